"""Mistakes that people make: each is answered in one line with what is wrong and what to do, and costs nothing."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from harness import evidence, faults, support
from harness.terminal import Terminal

CHECKER = support.PROJECT / "tests/check_evidence.py"
CSV_CURE = r'write numbers alone: table\.to_csv\("rows\.csv", index=False, header=False\)'


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> dict[str, str]:
    return faults.quick_npu_smi(tmp_path_factory.mktemp("bin"))


@pytest.fixture(scope="module")
def earlier(cli, quick, tmp_path_factory) -> Path:
    """The evidence of a good run."""
    log_dir = tmp_path_factory.mktemp("earlier") / "logs"
    done = cli(*support.STANDIN_ARGS, "--hold-seconds", 0, "--log-dir", log_dir, env=quick)
    assert done.code == 0, done.stderr
    return log_dir


def answered(result: support.Result, code: int, cause: str, cure: str) -> None:
    """In one line, cause first; nothing else is on stderr, and no traceback."""
    assert result.code == code, result.stderr
    [line] = result.stderr.splitlines()
    assert re.search(f"^inference\\.py: .*({cause}).*; .*({cure})", line), line


def kept(log_dir: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in log_dir.iterdir()}


STANDIN = list(support.STANDIN_ARGS)
ARGUMENTS = {
    "a flag": ([*STANDIN, "--hold-second", "8"], 2, r"did you mean --hold-seconds\?", "--help"),
    "a flag without its value": ([*STANDIN, "--tolerance"], 2, "--tolerance: expected one argument", "--help"),
    "a path": (["--checkpoint", "modle.zip", "--sha256", "0" * 64], 3, "modle.zip: No such file",
               "name a file with --checkpoint; a relative path counts from the current directory"),
    "another model's digest": (["--checkpoint", support.STANDIN], 3, "has 139220 bytes .* expected 139005 bytes",
                               "add --sha256 [0-9a-f]{64}; otherwise fetch or copy"),
    "a folder": (["--checkpoint", "tests", "--sha256", "0" * 64], 3, "tests is not a regular file|tests: Is a dir",
                 "name a file with --checkpoint; a relative path counts from the current directory"),
    "a shape": ([*STANDIN, "--observation", "[0, 0, 0]"], 2, r"shape \[3\], expected \[4\]",
                r"--observation '\[0\.0, 0\.0, 0\.0, 0\.0\]'"),
    "a file without its flag": ([*STANDIN, "rows.npy"], 2, r"did you mean --observations rows\.npy\?", "--help"),
    "a model without its flag": (["my_ppo.zip"], 2, r"did you mean --checkpoint my_ppo\.zip\?", "--help"),
    "text for a number": ([*STANDIN, "--observation", "[a, b, c, d]"], 2, "is not JSON such as", "--help"),
}  # fmt: skip


@pytest.mark.parametrize("what", ARGUMENTS)
def test_in_the_arguments(cli, earlier, what):
    arguments, code, cause, cure = ARGUMENTS[what]
    before = kept(earlier)
    answered(cli.cold("--log-dir", earlier, *arguments), code, cause, cure)
    assert code != 2 or kept(earlier) == before, "a mistyped call has cost the evidence of an earlier run"
    if code != 2:
        for name, content in before.items():
            (earlier / name).write_bytes(content)


def npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, rows=np.zeros((5, 4), np.float32))
    return file.getvalue()


NPZ = npz()
FILES = {
    "a header in a csv": ("rows.csv", b"cart,speed,pole,turn\n0,0,0,0\n",
                          r"rows\.csv: .*'cart'.* row 0, column 0", CSV_CURE),
    "a header of numbers, as pandas writes it": ("rows.csv", b"0,1,2,3\n0,0,0,0\n",
                                                 r"rows\.csv: row 0 is 0, 1, 2, .* header that pandas wrote", CSV_CURE),
    "a .npz under the name of a .npy": ("rows.npy", NPZ, r"rows\.npy is a \.npz file", r"numpy\.save"),
    "letters": ("rows.csv", b"0,0,0,0\n0,0,O,0\n", r"rows\.csv: .*'O'.* row 1, column 2", CSV_CURE),
    "an empty field": ("rows.csv", b"0,0,0,0\n0,0,0,\n", r"rows\.csv: .* row 1, column 3", CSV_CURE),
    "an index": ("rows.csv", b"5,0,0,0,0\n6,0,0,0,0\n", r"rows\.csv has the shape \[2, 5\], expected \[N, 4\]",
                 "one observation a row"),
    "a parquet file": ("rows.parquet", b"PAR1" + bytes(99) + b"PAR1", r"rows\.parquet is not a \.npy or \.csv file",
                       CSV_CURE),
    "integers": ("rows.npy", None, r"rows\.npy holds int64, expected float32 or float64", "astype"),
}  # fmt: skip


@pytest.mark.parametrize("what", FILES)
def test_in_a_file_of_observations(cli, earlier, tmp_path, what):
    name, content, cause, cure = FILES[what]
    if content is None:
        np.save(tmp_path / name, np.zeros((5, 4), np.int64))
    else:
        (tmp_path / name).write_bytes(content)
    before = kept(earlier)
    answered(cli.cold(*STANDIN, "--observations", tmp_path / name, "--log-dir", earlier), 2, cause, cure)
    assert kept(earlier) == before


def test_a_directory_that_cannot_be_written(cli, tmp_path):
    (tmp_path / "logs").mkdir(mode=0o555)
    script = faults.patched(cli.project, faults.WITHOUT_PRIVILEGES)
    for log_dir in (tmp_path / "logs", tmp_path / "logs/new"):
        result = cli.cold(*STANDIN, "--log-dir", log_dir, script=script)
        answered(result, 7, "cannot be written: Permission denied", "name a directory .* with --log-dir")
        assert "[npu]" not in result.stdout  # the device was not touched


def test_two_runs_in_one_directory(cli, quick, tmp_path):
    arguments = (*STANDIN, "--log-dir", tmp_path / "logs")
    first = cli.start(*arguments, "--hold-seconds", 1.5, env=quick)
    first.wait_for("holding")
    answered(cli.cold(*arguments), 7, "another run is writing", "wait for it, or name another directory with --log-dir")
    done = first.wait()
    assert (done.code, evidence.problems(done, tmp_path / "logs")) == (0, [])


def test_ctrl_c(cli, quick, tmp_path):
    terminal = Terminal()
    process = cli.start(*STANDIN, "--hold-seconds", 60, "--log-dir", tmp_path / "logs", terminal=terminal, env=quick)
    terminal.wait_for("holding")
    terminal.press(b"\x03")
    assert process.wait(10).code == 130
    [line] = [line for line in re.split(r"[\r\n]", terminal.text()) if line.startswith("inference.py: ")]
    assert re.match(r"inference\.py: ready: interrupted by SIGINT; start it again", line.replace("\x1b[K", ""))
    assert support.read_result(tmp_path / "logs")["exit_code"] == 130


def checked(directory: Path) -> subprocess.CompletedProcess[str]:
    if not CHECKER.exists():
        pytest.skip("tests/check_evidence.py is not here")
    command, environment = [sys.executable, CHECKER, directory], support.clean_environment()
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_an_edited_result_is_invalid_and_the_line_names_what_disagrees(earlier, tmp_path):
    (tmp_path / "logs").mkdir()
    for name, content in kept(earlier).items():
        (tmp_path / "logs" / name).write_bytes(content)
    result = tmp_path / "logs" / evidence.RESULT
    document = json.loads(result.read_text())
    document["value"][0][0] += 1
    result.write_text(json.dumps(document, indent=2) + "\n")
    done = checked(tmp_path / "logs")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("INVALID")
    assert [line for line in done.stdout.splitlines() if line.startswith("FAIL") and "value" in line], done.stdout


def test_the_wrong_directory_for_the_checker(tmp_path):
    for directory in (tmp_path / "absent", tmp_path):
        done = checked(directory)
        assert done.returncode in ((2,) if directory.name == "absent" else (1, 2)), done.stdout
        text = done.stderr or done.stdout
        assert re.search(f"{directory.name}|npu_result.json", text) and "Traceback" not in text, text


