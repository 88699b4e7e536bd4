"""What the tests share: where things are, and how to run inference.py as a user would."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import resource
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from harness.terminal import Terminal

PROJECT = Path(__file__).resolve().parents[2]
STANDIN = "tests/data/standin-ppo-seals-CartPole-v0.zip"  # relative to the project
STANDIN_SHA256 = "9cf3e56aad9699674a80c839ceb54482552873f5d344f4af1aecd287a9642062"
STANDIN_ARGS = ("--checkpoint", STANDIN, "--sha256", STANDIN_SHA256)

# Variables of the person who runs the tests that would change what the program does.
FOREIGN = ("ACL_", "ASCEND_", "CANNSIM_", "HF_", "LD_", "PYTEST_", "PYTHON", "TASK_QUEUE_ENABLE", "TEST_SIMULATOR",
           "TORCH_")

Environment = Mapping[str, "str | None"]


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}


def project_copy(directory: Path) -> Path:
    """Copies what a user needs to run the program, so that a test can let it write beside itself."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("inference.py", "requirements.txt", "SHA256SUMS", "README.md"):
        with contextlib.suppress(FileNotFoundError):
            shutil.copy2(PROJECT / name, directory)
    shutil.copytree(PROJECT / "tests/data", directory / "tests/data")
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(PROJECT / "tests/check_evidence.py", directory / "tests")
    if (PROJECT / "logs").is_dir():
        shutil.copytree(PROJECT / "logs", directory / "logs")
    return directory


def read_result(log_dir: Path) -> dict[str, Any]:
    """The evidence of a run; refuses NaN and infinity, which are not JSON."""

    def refuse(constant: str) -> None:
        raise ValueError(f"npu_result.json holds {constant}")

    return dict(json.loads((log_dir / "npu_result.json").read_text(encoding="utf-8"), parse_constant=refuse))


@dataclasses.dataclass(frozen=True)
class Result:
    code: int  # -N: ended by signal N, as in subprocess
    stdout: str
    stderr: str
    pid: int  # of the process that the user starts: the supervisor, not the worker
    seconds: float
    mark: str = ""  # TEST_RUN in the environment of every process that the run starts


class Process:
    """A running inference.py. `poll` waits up to so many seconds for the end and returns the exit code, or None."""

    def __init__(
        self, pid: int, poll: Callable[[float], int | None], stdout: IO[bytes], stderr: IO[bytes], mark: str
    ) -> None:
        self.pid = pid
        self.mark = mark
        self._poll = poll
        self._stdout = stdout
        self._stderr = stderr
        self._started = time.monotonic()
        self._code: int | None = None

    @property
    def stdout(self) -> str:
        """What it has written so far."""
        return _read(self._stdout)

    @property
    def stderr(self) -> str:
        return _read(self._stderr)

    def running(self) -> bool:
        return self._ended_within(0) is None

    @property
    def ended(self) -> bool:
        """Whether its end has been seen: by running, wait or kill."""
        return self._code is not None

    def signal(self, number: int) -> None:
        if not self.running():
            raise AssertionError(f"the process has ended with {self._code} before signal {number}\n{self._output()}")
        os.kill(self.pid, number)

    def wait_for(self, text: str, timeout: float = 60) -> None:
        """Waits until stdout or stderr holds the text."""
        deadline = time.monotonic() + timeout
        while text not in self.stdout and text not in self.stderr:
            ended = self._ended_within(0.01) is not None
            if ended and text not in self.stdout + self.stderr:
                raise AssertionError(f"ended with {self._code} and never wrote {text!r}\n{self._output()}")
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"did not write {text!r} within {timeout} s\n{self._output()}")

    def wait(self, timeout: float = 120) -> Result:
        code = self._ended_within(timeout)
        if code is None:
            self.kill()
            raise AssertionError(f"still running after {timeout} s\n{self._output()}")
        return Result(code, self.stdout, self.stderr, self.pid, time.monotonic() - self._started, self.mark)

    def kill(self) -> None:
        if self.running():
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(self.pid, signal.SIGKILL)
            self._ended_within(30)

    def _ended_within(self, seconds: float) -> int | None:
        if self._code is None:
            self._code = self._poll(seconds)
        return self._code

    def _output(self) -> str:
        return f"--- stdout\n{self.stdout}--- stderr\n{self.stderr}"


def _read(file: IO[bytes]) -> str:
    # pread: the file offset is the child's as well.
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode("utf-8", "replace")


class Cli:
    """Runs inference.py on the simulated NPU; `cli(*args)` is `python3 inference.py ARGS` in a copy of the project.

    Options of a call, of `start` and of `cold`:
      env       variables on top of a clean environment; None removes one
      cwd       the working directory, by default the copy (so STANDIN is a valid --checkpoint)
      script    another copy of inference.py, for instance one of project_copy
      stdin, stdout, stderr    an open file; stdout and stderr are captured by default, stdin is empty
      terminal  a terminal.Terminal for all three, which the process controls: its Ctrl-C reaches it
      rlimits   {"RLIMIT_FSIZE": bytes, ...}
    Calls wait `timeout` seconds (120), then kill the process and fail.

    A case is normally forked from a process that has torch imported. What is read earlier than that (LD_LIBRARY_PATH,
    the loader, `python -X ...`, whether torch gets imported at all) needs `cold`, a process of its own.
    """

    def __init__(self, simulator: Path, directory: Path) -> None:
        self.simulator = simulator
        self.project = project_copy(directory)
        self._server: _Server | None = None
        self._processes: list[Process] = []  # that have not ended yet
        self._lock = threading.Lock()  # calls may come from several threads
        self._numbers = itertools.count(1)

    def __call__(self, *args: object, timeout: float = 120, **options: Any) -> Result:
        return self.start(*args, **options).wait(timeout)

    def cold(self, *args: object, timeout: float = 120, **options: Any) -> Result:
        return self.start(*args, cold=True, **options).wait(timeout)

    def start(
        self,
        *args: object,
        env: Environment | None = None,
        cwd: Path | None = None,
        script: Path | None = None,
        stdin: IO[Any] | None = None,
        stdout: IO[Any] | None = None,
        stderr: IO[Any] | None = None,
        terminal: Terminal | None = None,
        rlimits: Mapping[str, int] | None = None,
        cold: bool = False,
        python_args: tuple[str, ...] = (),
    ) -> Process:
        cwd = cwd or self.project
        script = script or self.project / "inference.py"
        name = script.name if script.parent == cwd else str(script)
        arguments = [str(argument) for argument in args]
        mark = f"{os.getpid()}-{id(self)}-{next(self._numbers)}"
        environment = self.environment(env) | {"TEST_RUN": mark}
        limits = dict(rlimits or {})
        if terminal is not None:
            stdin, stdout, stderr = terminal.file, stdout or terminal.file, stderr or terminal.file
        output = tempfile.TemporaryFile()  # noqa: SIM115
        errors = tempfile.TemporaryFile()  # noqa: SIM115
        with open(os.devnull, "rb") as nothing:
            files = [(stdin or nothing).fileno(), (stdout or output).fileno(), (stderr or errors).fileno()]
            if cold:
                command = [sys.executable, *python_args, name, *arguments]
                pid, poll = _start_cold(command, environment, cwd, files, limits, terminal is not None)
            else:
                if python_args or environment.get("LD_LIBRARY_PATH") != str(self.simulator):
                    raise ValueError("the forked process has read these long ago: use cold()")
                with self._lock:
                    if self._server is None:
                        self._server = _Server(self.environment())
                case = {"args": arguments, "env": environment, "cwd": str(cwd), "script": name, "rlimits": limits,
                        "terminal": terminal is not None}  # fmt: skip
                pid, poll = self._server.fork(case, files)
        process = Process(pid, poll, output, errors, mark)
        with self._lock:
            self._processes = [*(other for other in self._processes if not other.ended), process]
        return process

    def environment(self, changes: Environment | None = None) -> dict[str, str]:
        """The environment of a run: that of the tests, less what would change the program, plus the simulator."""
        variables = clean_environment()
        variables["LD_LIBRARY_PATH"] = str(self.simulator)
        variables["HF_HUB_OFFLINE"] = "1"  # only test_fetch.py asks a hub, and one of its own
        variables["PATH"] = f"{self.simulator / 'bin'}{os.pathsep}{variables['PATH']}"
        for name, value in (changes or {}).items():
            if value is None:
                variables.pop(name, None)
            else:
                variables[name] = value
        return variables

    def close(self) -> None:
        for process in self._processes:
            with contextlib.suppress(RuntimeError):  # the server died, and its children with it
                process.kill()
        if self._server is not None:
            self._server.close()


def _start_cold(
    command: list[str], environment: dict[str, str], cwd: Path, files: list[int], limits: dict[str, int], terminal: bool
) -> tuple[int, Callable[[float], int | None]]:
    def prepare() -> None:
        for number in (signal.SIGINT, signal.SIGHUP):  # which a shell's `&`, or nohup, lets the tests ignore
            signal.signal(number, signal.SIG_DFL)
        if terminal:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        for name, value in limits.items():
            resource.setrlimit(getattr(resource, name), (value, value))

    process = subprocess.Popen(
        command,
        env=environment,
        cwd=cwd,
        stdin=files[0],
        stdout=files[1],
        stderr=files[2],
        start_new_session=True,
        preexec_fn=prepare,
    )

    def poll(seconds: float) -> int | None:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    return process.pid, poll


class _Server:
    """The client of forkserver.py."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        # What inference.py sets before it imports torch, which reads some of it then. A case starts without.
        program = runpy.run_path(str(PROJECT / "inference.py"))
        environment = environment | program["DEFAULT_ENVIRONMENT"] | program["FORCED_ENVIRONMENT"]
        with other:
            self._process = subprocess.Popen(
                [sys.executable, str(PROJECT / "tests/harness/forkserver.py"), str(other.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[other.fileno()],
            )

    def fork(self, case: dict[str, Any], files: list[int]) -> tuple[int, Callable[[float], int | None]]:
        read, write = os.pipe()
        try:
            socket.send_fds(self._control, [json.dumps(case).encode()], [*files, write])
        except OSError as error:
            raise self._died() from error
        finally:
            os.close(write)
        pipe = os.fdopen(read, "rb", buffering=0)

        def number(seconds: float) -> int | None:
            if pipe not in select.select([pipe], [], [], seconds)[0]:
                return None
            line = pipe.readline()
            if not line:
                raise self._died()
            return int(line)

        def poll(seconds: float) -> int | None:
            status = number(seconds)
            if status is None:
                return None
            pipe.close()
            return os.waitstatus_to_exitcode(status)

        pid = number(120)
        if pid is None:
            raise RuntimeError(f"the fork server does not answer:\n{_read(self._log)}")
        return pid, poll

    def _died(self) -> RuntimeError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        return RuntimeError(f"the fork server ended with {self._process.poll()}:\n{_read(self._log)}")

    def close(self) -> None:
        self._control.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
