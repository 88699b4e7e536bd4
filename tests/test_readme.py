"""The commands of the pages run: what README.md, logs/README.md and tests/README.md tell a reader to type."""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from harness import support

PAGES = ("README.md", "logs/README.md", "tests/README.md", ".github/CONTRIBUTING.md")
FENCE = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [block for page in PAGES for block in FENCE.findall((support.PROJECT / page).read_text(encoding="utf-8"))]

# Blocks that no test can run, by their first line. Any other block is run.
NOT_RUN = {
    "tests/run.sh": "is what runs this test",
    "tests/simulate.sh --hold-seconds 0 --log-dir runs/mine": "ends with tests/run.sh",
    "tests/measure/bench.sh": "minutes to hours: what is measured by hand",
}
# What stands in for the parts of an Ascend machine: CANN's set_env.sh and the hub. The shim below is the package index.
ASCEND = 'source() { [ "$1" = /usr/local/Ascend/cann/set_env.sh ]; }\nhf() { [ "$1" = download ]; }\n'

HOLD_S, WATCHED_HOLD_S = 0.5, 3  # in the place of 8; the second where the block looks at the process meanwhile
BLOCK_TIMEOUT_S = 120

# python3 of the blocks. inference.py runs in a process that has torch imported (see Desk), all else in Python itself.
# The first lines are shell, for a path with a space in it.
SHIM = """#!/bin/sh
'''exec' "{python}" -IS "$0" "$@"
' '''
import json, os, socket, sys
if sys.argv[1:3] == ["-m", "pip"] or sys.argv[1:] == ["-c", "import torch, torch_npu"]:
    sys.exit(0)
if sys.argv[1:2] != ["inference.py"]:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as desk:
    desk.connect({address!r})
    request = json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(desk, [request], [0, 1, 2])
    code = int(desk.recv(16))
sys.exit(code if code >= 0 else 128 - code)
"""


class Desk:
    """Takes calls of the shim and runs them with `cli`. The stand-in is run where the page means the pinned file."""

    def __init__(self, cli: support.Cli, directory: Path) -> None:
        self.cli = cli
        self.address = f"\0test-readme-{os.getpid()}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.bind(self.address)
        self.socket.listen()
        directory.mkdir()
        shim = directory / "python3"
        shim.write_text(SHIM.format(python=sys.executable, address=self.address))
        shim.chmod(0o755)
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self.socket.accept()
                threading.Thread(target=self.answer, args=(connection,), daemon=True).start()

    def answer(self, connection: socket.socket) -> None:
        with connection, contextlib.ExitStack() as files:
            request, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 3)
            stdin, stdout, stderr = (files.enter_context(os.fdopen(fd, "r+b", buffering=0)) for fd in descriptors)
            args, cwd, env = json.loads(request)
            standin = support.STANDIN_ARGS if "--checkpoint" not in args else ()
            hold = () if "--hold-seconds" in args else ("--hold-seconds", HOLD_S)
            process = self.cli.start(*standin, *args, *hold, env=env, cwd=Path(cwd), script=Path(cwd, "inference.py"),
                                     stdin=stdin, stdout=stdout, stderr=stderr)  # fmt: skip
            connection.send(b"%d" % process.wait(BLOCK_TIMEOUT_S).code)


class Reader:
    """Someone with a copy of the project, in a path with a space, who types what the pages say."""

    def __init__(self, cli: support.Cli, directory: Path, desk: Desk, commands: Path) -> None:
        self.project = support.project_copy(directory)
        for name in os.listdir(self.project / "logs"):
            if name != "README.md":
                (self.project / "logs" / name).unlink()
        tests = self.project / "tests"
        for script in (support.PROJECT / "tests").glob("*.sh"):
            shutil.copy2(script, tests)
        shutil.copytree(support.PROJECT / "tests/cannsim", tests / "cannsim", ignore=shutil.ignore_patterns("build"))
        # the simulator is built already
        (tests / "cannsim/build").symlink_to(support.PROJECT / "tests/cannsim/build")
        shutil.copy2(self.project / support.STANDIN, self.project / "my_ppo.zip")
        sums = subprocess.run(["sha256sum", "inference.py", "requirements.txt", "README.md"], cwd=self.project,
                              check=True, capture_output=True).stdout  # fmt: skip
        (self.project / "SHA256SUMS").write_bytes(sums)
        environment = cli.environment({"PYTHON": sys.executable, "CANNSIM_DEVICES": "4"})
        self.environment = environment | {"PATH": f"{commands}{os.pathsep}{environment['PATH']}"}

    def types(self, block: str) -> str:
        """Runs a block, with its holds cut short. Returns "" or what went wrong."""
        hold = WATCHED_HOLD_S if "$NPU_READY_PID" in block else HOLD_S
        block = re.sub(r"--hold-seconds 8\b", f"--hold-seconds {hold}", ASCEND + block)
        shell = subprocess.Popen(["bash", "-eu", "-o", "pipefail", "-c", block], cwd=self.project, env=self.environment,
                                 stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                 start_new_session=True)  # fmt: skip
        try:
            output, _ = shell.communicate(timeout=BLOCK_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(shell.pid, signal.SIGKILL)
            output, _ = shell.communicate()
        if shell.returncode == 0:
            return ""
        return f"exit code {shell.returncode} of\n{block}{output.decode('utf-8', 'replace')[-3000:]}"

    def knows_simulate_sh(self) -> None:
        """tests/simulate.sh has run as it is, in full: from here on it starts inference.py at once."""
        (self.project / "tests/simulate.sh").write_text('#!/bin/sh\nexec python3 inference.py "$@"\n')


def first_line(block: str) -> str:
    return block.partition("\n")[0]


@pytest.fixture(scope="module")
def reader(cli: support.Cli, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """After every block that can run here has run, page by page and in order."""
    directory = tmp_path_factory.mktemp("reader")
    desk = Desk(cli, directory / "bin")
    someone = Reader(cli, directory / "a clone", desk, directory / "bin")
    for block in BLOCKS:
        if first_line(block) not in NOT_RUN:
            problem = someone.types(block)
            assert not problem, problem
            if block.startswith("tests/simulate.sh"):
                someone.knows_simulate_sh()
    yield someone
    desk.socket.close()


def test_every_block_that_can_run_here_runs(reader):
    """The fixture has run them; these are the marks that they left."""
    runs = {path.parent.name: support.read_result(path.parent) for path in reader.project.rglob("npu_result.json")}
    assert set(runs) == {"logs", "all", "watched", "failed", "wrong", "1", "2", "3", "4"}
    assert {name: run["exit_code"] for name, run in runs.items() if run["exit_code"]} == {"failed": 6, "wrong": 6}
    assert runs["wrong"]["reference"]["within_tolerance"] is False
    assert [runs[name]["visible_devices"] for name in ("1", "4")] == ["0", "3"]
    assert runs["logs"]["observation"] == [[pytest.approx(value) for value in (0.1, 0.0, -0.02, 0.3)]]
    joined, whole = (np.load(reader.project / name) for name in ("outputs.npy", "runs/all/npu_outputs.npy"))
    assert len(whole) == 1000
    assert np.array_equal(joined["action"], whole["action"])


def test_every_block_that_is_not_run_is_there_and_is_shell():
    assert sorted(NOT_RUN) == sorted(first for block in BLOCKS if (first := first_line(block)) in NOT_RUN)
    for block in BLOCKS:
        subprocess.run(["bash", "-n", "-c", block], check=True)


def test_every_program_that_a_block_starts_is_there():
    """Also in the blocks that are not run."""
    for line in "".join(BLOCKS).replace("\\\n", " ").splitlines():
        words = line.split()
        if words[:1] == ["python3"] and words[1].endswith(".py"):
            assert (support.PROJECT / words[1]).is_file(), line
        elif words and words[0].startswith("tests/"):
            assert os.access(support.PROJECT / words[0], os.X_OK), line


@pytest.mark.parametrize("page", PAGES)
def test_every_fence_is_shell(page):
    """Nothing passes for a command, or for its output, that no test looks at."""
    text = (support.PROJECT / page).read_text(encoding="utf-8")
    assert set(re.findall(r"^ *(?:```|~~~)(.*)$", text, re.MULTILINE)) <= {"bash", ""}
    assert text.count("```") == 2 * len(FENCE.findall(text))


def test_every_command_line_of_the_program_is_one_that_it_takes():
    """Also on lines that stand in the text, between backticks."""
    parse = runpy.run_path(str(support.PROJECT / "inference.py"))["parse_arguments"]
    pattern = re.compile(r"`(?:python3 inference\.py|tests/simulate\.sh) ([^`]+)`")
    found = [arguments for page in PAGES
             for arguments in pattern.findall((support.PROJECT / page).read_text(encoding="utf-8"))]
    assert found
    for arguments in found:
        if arguments != "--version":
            parse(shlex.split(arguments))
