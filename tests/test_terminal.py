"""What a person sees: colours and a countdown on a terminal, and nothing but plain text anywhere else."""

from __future__ import annotations

import re
import runpy
import shlex
import signal
from pathlib import Path

import pytest
from harness import evidence, faults, support
from harness.terminal import Terminal

XTERM = {"TERM": "xterm-256color", "NO_COLOR": None}
COLOUR = re.compile(r"\x1b\[[\d;]*m")
GREEN, RED, PLAIN = "\x1b[32m", "\x1b[1;31m", "\x1b[0m"


def rows(text: str) -> list[str]:
    """The lines that are to be seen in the end, when \\r goes back and what follows is written over what was there."""
    shown = []
    for line in COLOUR.sub("", text).split("\n"):
        row = ""
        for part in line.split("\r"):
            row = part + row[len(part) :]
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
        return (self.log_dir / "npu_inference.log").read_text().splitlines()


@pytest.fixture(scope="module")
def session(cli, tmp_path_factory):
    def start(*args: object, hold: float = 0, env: support.Environment | None = None) -> Session:
        log_dir = tmp_path_factory.mktemp("logs")
        screen = Terminal()
        arguments = (*support.STANDIN_ARGS, "--hold-seconds", hold, "--log-dir", log_dir, *args)
        env = {**faults.quick_npu_smi(log_dir.parent / "bin"), **XTERM, **(env or {})}
        process = cli.start(*arguments, env=env, stdout=screen.file, stderr=screen.file)
        return Session(process, screen, log_dir)

    return start


@pytest.fixture(scope="module")
def good(session) -> Session:
    ended = session(hold=3.2).end()
    assert ended.code == 0, ended.text
    return ended


@pytest.fixture(scope="module")
def failed(session) -> Session:
    ended = session(env={"CANNSIM_FAIL": "exec:aclnnAddmm"}).end()
    assert ended.code == 6, ended.text
    return ended


# Colours


def test_a_terminal_shows_every_line_of_the_log_in_its_order_and_whole(good, failed):
    for ended in (good, failed):
        seen = iter(rows(ended.text))
        assert [line for line in ended.log if not line.startswith("[error]") and line not in seen] == []


def test_stages_and_outcomes_stand_out_in_colour(good, failed):
    stages = set(re.findall(r"^\x1b\[36m\[(\w+)\]\x1b\[0m ", good.text, re.MULTILINE))
    assert stages >= {"verify", "npu", "load", "ready", "forward", "final"}
    for outcome in ("size_ok=", "is_available=", "all_params_on_npu=", "all_outputs_on_npu="):
        assert f"{outcome}{GREEN}True{PLAIN}" in good.text
    assert f"exit_code={GREEN}0" in good.text and RED not in good.text
    assert f"exit_code={RED}6" in failed.text


def test_no_colour_runs_on_beyond_its_line(good, failed):
    for line in (good.text + failed.text).splitlines():
        assert not COLOUR.findall(line) or COLOUR.findall(line)[-1] == PLAIN, line


def test_the_evidence_has_no_colour(good, failed):
    for file in (*good.log_dir.iterdir(), *failed.log_dir.iterdir()):
        assert b"\x1b" not in file.read_bytes(), file.name


@pytest.mark.parametrize("value", ["1", "0", "no"])
def test_no_color_is_honoured_whatever_it_says_and_keeps_the_countdown(session, value):
    ended = session(hold=0.3, env={"NO_COLOR": value}).end()
    assert "\x1b" not in ended.text
    assert " s left" in ended.text


def test_an_empty_no_color_counts_as_none(session):
    assert COLOUR.search(session(env={"NO_COLOR": ""}).end().text)


def test_a_dumb_terminal_gets_lines_alone(session):
    ended = session(hold=0.3, env={"TERM": "dumb"}).end()
    assert ended.code == 0
    assert re.search(r"[\x1b\r]", ended.text) is None


@pytest.mark.parametrize("other", ["pipe", "terminal"])
def test_a_pipe_gets_the_lines_of_the_log_and_nothing_else(cli, tmp_path, other):
    """Also where stderr is a terminal: inference.py | tee log"""
    screen = Terminal()
    stderr = {"stderr": screen.file} if other == "terminal" else {}
    arguments = (*support.STANDIN_ARGS, "--hold-seconds", 0.3, "--log-dir", tmp_path / "logs")
    result = cli(*arguments, env=XTERM, **stderr)
    assert result.code == 0
    assert result.stdout == (tmp_path / "logs/npu_inference.log").read_text()
    assert re.search(r"[\x1b\r]", result.stdout + result.stderr + screen.text()) is None


# The countdown


def test_the_hold_counts_down_to_one_and_leaves_no_trace(good):
    counted = [int(number) for number in re.findall(r"(\d+) s left", good.text)]
    assert counted == sorted(set(counted), reverse=True)
    assert counted[0] <= 4 and counted[-1] == 1  # npu-smi is asked within the hold, and takes its time
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


# --help


@pytest.fixture(scope="module")
def program() -> dict:
    return runpy.run_path(str(support.PROJECT / "inference.py"))


@pytest.fixture(scope="module")
def helped(cli) -> str:
    result = cli("--help", env={"COLUMNS": "80"})
    assert (result.code, result.stderr) == (0, "")
    return result.stdout


def test_the_help_fits_a_terminal_of_80_columns(helped):
    assert [line for line in helped.splitlines() if len(line) > 80] == []


def test_the_help_groups_and_explains_every_option(program, helped):
    heads = re.findall(r"^(\S.*):$", helped, re.MULTILINE)
    assert {"the model", "the observations", "the run", "instead of a run"} <= set(heads)
    actions = program["create_parser"]()._actions
    assert len(actions) > 10
    for action in actions:
        assert re.search(rf"^  (-h, )?{action.option_strings[-1]}\b.*?\n? +\w", helped, re.MULTILINE), action
        assert action.help


def test_the_help_states_every_exit_code(program, helped):
    text = re.sub(r"\s+", " ", helped.partition("Exit codes")[2])
    failures = [item for item in program.values() if isinstance(item, type) and issubclass(item, program["Failure"])]
    codes = {failure.code for failure in failures} | {0, 8, 129, 130, 143}
    assert codes >= set(range(9))
    assert [code for code in sorted(codes) if not re.search(rf"(?<!\d){code}(?!\d)", text)] == []


def test_the_examples_of_the_help_are_commands_that_the_program_takes(program, helped):
    examples = re.findall(r"^ +python3 inference\.py (.*)$", helped.replace("\\\n", ""), re.MULTILINE)
    assert len(examples) >= 2
    for example in examples:
        arguments = shlex.split(re.sub(r'"\$\(.*?\)"', "0" * 64, example))
        assert program["create_parser"]().parse_args(arguments)


@pytest.mark.parametrize("arguments", [("--hold", "1"), ("--shard", "3"), ("stray",), ("--checkpoint",)], ids=" ".join)
def test_a_wrong_call_is_one_line_that_points_to_the_help(cli, tmp_path, arguments):
    result = cli(*arguments, "--log-dir", tmp_path / "logs")
    assert (result.code, evidence.problems(result, tmp_path / "logs")) == (2, [])
    [line] = result.stderr.splitlines()
    assert line.endswith("; see python3 inference.py --help")
