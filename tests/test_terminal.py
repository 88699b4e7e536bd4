"""What a person sees: a countdown and progress on a terminal, and nothing but plain lines anywhere else."""

from __future__ import annotations

import re
import shlex
import signal
from pathlib import Path

import numpy as np
import pytest
from harness import evidence, faults, support
from harness.terminal import Terminal

XTERM = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "CLICOLOR_FORCE": "1", "FORCE_COLOR": "1"}
COLOUR = re.compile(r"\x1b\[[\d;]*m")
ERASE = "\x1b[K"  # to the end of the line; of all escape sequences the only one


def rows(text: str) -> list[str]:
    """The lines that are to be seen in the end, when \\r goes back and what follows is written over what was there."""
    shown = []
    for line in text.split("\n"):
        row = ""
        for part in line.split("\r"):
            written, erased, rest = part.partition(ERASE)
            row = written + ("" if erased else row[len(written) :]) + rest
        shown.append(row.rstrip())
    return shown


class Session:
    """A run whose stdout and stderr are one terminal of 80 columns."""

    def __init__(self, process: support.Process, screen: Terminal, log_dir: Path) -> None:
        self.process, self.screen, self.log_dir = process, screen, log_dir
        self.code = 0
        self.text = ""

    def end(self) -> Session:
        self.code = self.process.wait().code
        self.text = self.screen.text()
        return self

    @property
    def log(self) -> list[str]:
        return (self.log_dir / evidence.LOG).read_text().splitlines()


@pytest.fixture(scope="module")
def session(cli, tmp_path_factory):
    def start(*args: object, hold: float = 0, env: support.Environment | None = None, patch: str = "") -> Session:
        log_dir = tmp_path_factory.mktemp("run") / "logs"
        screen = Terminal()
        arguments = (*support.STANDIN_ARGS, "--hold-seconds", hold, "--log-dir", log_dir, *args)
        env = {**faults.quick_npu_smi(log_dir.parent / "bin"), **XTERM, **(env or {})}
        options = {"script": faults.patched(cli.project, patch)} if patch else {}
        process = cli.start(*arguments, env=env, stdout=screen.file, stderr=screen.file, **options)
        return Session(process, screen, log_dir)

    return start


@pytest.fixture(scope="module")
def good(session) -> Session:
    ended = session(hold=2.2).end()
    assert ended.code == 0, ended.text
    return ended


@pytest.fixture(scope="module")
def failed(session) -> Session:
    ended = session(env={"CANNSIM_FAIL": "exec:aclnnAddmm"}).end()
    assert ended.code == 6, ended.text
    return ended


def test_a_terminal_shows_every_line_of_the_log_in_its_order_and_whole(good, failed):
    for ended in (good, failed):
        seen = iter(rows(ended.text))
        assert [line for line in ended.log if line not in seen] == []


def test_there_is_no_colour_anywhere_whatever_is_forced(good, failed):
    for ended in (good, failed):
        assert COLOUR.search(ended.text) is None
        assert "\x1b" not in ended.text.replace(ERASE, "")
        for file in ended.log_dir.iterdir():
            assert b"\x1b" not in file.read_bytes(), file.name


def test_a_good_run_ends_with_the_command_that_checks_it(good, failed):
    shown = [row for row in rows(good.text) if row]
    [command] = re.findall("^check it: (.*)", shown[-1])
    assert shlex.split(command)[2:] == [str(good.log_dir)]
    assert "check it" not in "\n".join(good.log)
    assert "check it" not in failed.text


def test_the_hold_counts_down_to_one_and_leaves_no_trace(good):
    counted = [int(number) for number in re.findall(r"(\d+) s left", good.text)]
    assert counted == sorted(counted, reverse=True)
    assert counted[0] <= 3 and counted[-1] == 1  # npu-smi is asked within the hold, and takes its time
    in_the_end, after_the_hold = rows(good.text), rows(good.text.partition("[forward]")[0])
    assert [row for row in in_the_end + after_the_hold if " s left" in row] == []
    assert " s left" not in "\n".join(good.log)


def test_an_interrupt_during_the_countdown_leaves_a_readable_end(session):
    running = session(hold=60)
    running.screen.wait_for(" s left")
    running.process.signal(signal.SIGINT)
    ended = running.end()
    assert ended.code == 130
    [line] = [row for row in rows(ended.text) if row.startswith("inference.py: ")]
    assert re.fullmatch(r"inference\.py: ready: interrupted by SIGINT; .*(?<! s left)", line)
    assert ended.log[-1] in rows(ended.text)


ROWS = np.random.default_rng(0).normal(0, 1, (40, 4)).astype(np.float32)


def test_the_progress_of_a_file_is_shown_on_a_terminal_and_leaves_no_trace(session, tmp_path):
    np.save(tmp_path / "rows.npy", ROWS)
    ended = session("--observations", tmp_path / "rows.npy", patch="inference.CHUNK_ROWS = 8").end()
    assert ended.code == 0, ended.text
    counted = re.findall(r"\[forward\] (\d+) of 40 rows", ended.text)
    assert counted[-1] == "40" and len(counted) > 2 and counted == sorted(counted, key=int)
    assert [row for row in rows(ended.text) if re.search(r"\d+ of 40 rows", row)] == []
    assert "of 40 rows" not in "\n".join(ended.log)


def test_a_dumb_terminal_gets_lines_alone(session):
    ended = session(hold=0.3, env={"TERM": "dumb"}).end()
    assert ended.code == 0
    assert re.search(r"[\x1b\r]", ended.text) is None


@pytest.fixture(scope="module")
def piped(cli, tmp_path_factory) -> tuple[support.Result, str, str]:
    """A run over a file, stdout a pipe and stderr a terminal: inference.py | tee log"""
    directory, screen = tmp_path_factory.mktemp("piped"), Terminal()
    np.save(directory / "rows.npy", ROWS)
    arguments = (*support.STANDIN_ARGS, "--hold-seconds", 0.3, "--log-dir", directory / "logs", "--observations",
                 directory / "rows.npy")  # fmt: skip
    result = cli(*arguments, env={**faults.quick_npu_smi(directory / "bin"), **XTERM}, stderr=screen.file)
    assert result.code == 0
    return result, (directory / "logs" / evidence.LOG).read_text(), screen.text()


def test_a_pipe_gets_lines_and_nothing_else(piped):
    result, log, screen = piped
    assert re.search(r"[\x1b\r]", result.stdout + screen) is None
    assert not re.search(r"\d+ s left|\d+ of 40 rows", result.stdout + screen)
    *lines, last = result.stdout.splitlines()
    assert last.startswith("check it: ")
    assert [line.partition("=")[0] for line in lines] == [line.partition("=")[0] for line in log.splitlines()]


def test_the_rows_of_a_file_are_shortened_on_stdout_and_whole_in_the_log(piped):
    """Three rows of six digits; one observation on the command line is shown as it is (see test_main_job.py)."""
    result, log, _ = piped
    shown = re.search(r"^\[forward\] obs=(.*) shape=\(40, 4\)", result.stdout, re.MULTILINE)[1]
    assert shown == "[" + ", ".join(f"[{', '.join(f'{x:.6g}' for x in row.tolist())}]" for row in ROWS[:3]) + ", ...]"
    assert f"[forward] obs={ROWS[:16].tolist()} shape=(40, 4)" in log
    for name in ("action", "value", "log_prob"):
        row = re.search(rf"^\[forward\] {name}=(.*) shape=", result.stdout, re.MULTILINE)[1]
        assert row.endswith(", ...]") and len(row) < 60, row
    assert all(len(line) < 300 for line in result.stdout.splitlines() if line.startswith("[forward]"))


EXPECTED = {
    "ASCEND_HOME_PATH environment variable is not set": "expected on the simulator",
    "32 padding size": "expected: a note of torch_npu's allocator",
}


def test_what_torch_npu_says_in_every_run_is_marked_as_expected(cli, tmp_path):
    """And nothing else is on stderr: a reader who sees a line there may worry."""
    result = cli.cold(*support.STANDIN_ARGS, "--hold-seconds", 0, "--log-dir", tmp_path / "logs")
    assert result.code == 0
    lines = result.stderr.splitlines()
    assert lines and all("(expected" in line for line in lines), result.stderr
    for text, note in EXPECTED.items():
        assert [line for line in lines if text in line and f"({note})" in line], result.stderr
