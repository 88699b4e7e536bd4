#!/usr/bin/env python3
"""Run one Stable-Baselines3 PPO checkpoint on an Ascend NPU and leave evidence.

    python3 inference.py --hold-seconds 8
    python3 inference.py --checkpoint my_ppo.zip \\
        --sha256 "$(sha256sum my_ppo.zip | cut -c1-64)"

The stages, in the order they run:

  verify    size and SHA256 of the checkpoint; its values, parsed by a reader
            that executes nothing; the observations
  npu       torch_npu is imported, npu:0 is set and computes something; names
            and versions
  load      PPO.load from an archive rebuilt from those values; every parameter
            on npu:0, bit for bit the checkpoint's
  ready     logs/npu_ready.marker with the PID, a hold, and what npu-smi says
            about that PID meanwhile
  forward   one deterministic pass on npu:0, run twice and compared bit for
            bit; its kernels counted; compared with a float64 reference
  final     the worker ends, the log is closed, and logs/npu_result.json is
            written: last, and atomically

Exit codes: 0 success, 1 a bug in this program, 2 usage, 3 checkpoint missing
or rejected, 4 no NPU, 5 loading or placement failed, 6 forward failed, gave
a wrong answer, or the device hung, 7 evidence cannot be written or another
run is writing it, 129/130/143 ended by SIGHUP/SIGINT/SIGTERM.

Nothing runs on the CPU in the NPU's place: not the process, not a tensor, not
an operator. Check a finished run with tests/check_evidence.py.
"""

# Two processes. The supervisor, which the user starts, writes all evidence, asks npu-smi, and keeps the deadline; it
# never imports torch, so that it answers whatever the device does. The worker, which it forks, is the process on the
# NPU: it goes through the stages straight down and sends what it measures over a pipe. The file reads in that order:
# the command line, the evidence, the supervisor, npu-smi, the worker's stages, and `main`, which ties them together.

from __future__ import annotations

import os

# Before all else the bytes that Python has just read, so that the evidence names the program that ran. Piped into
# python3 it has no file, and `main` refuses.
SCRIPT = globals().get("__file__", "")
if not os.path.isfile(SCRIPT):
    SCRIPT = os.devnull
with open(SCRIPT, "rb") as script:
    SOURCE = script.read()

import argparse
import base64
import collections
import contextlib
import ctypes
import errno
import faulthandler
import fcntl
import hashlib
import importlib
import io
import json
import math
import pickletools
import platform
import re
import resource
import select
import shlex
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple


class Lazily:
    """A module that is imported when it is first used: the supervisor needs neither numpy nor torch."""

    def __init__(self, name: str) -> None:
        self.module_name = name

    def __getattr__(self, name: str) -> Any:
        self.__dict__[name] = value = getattr(importlib.import_module(self.module_name), name)
        return value


if TYPE_CHECKING:
    import numpy
    from torch import Tensor

    Array = numpy.ndarray[Any, Any]
else:
    numpy = Lazily("numpy")
torch: Any = Lazily("torch")

VERSION = "2.0"
SCHEMA = "npu-inference-evidence/2"
CODE = sys._getframe().f_code
PROJECT = Path(SCRIPT).resolve().parent
DEVICE = "npu:0"

# The pinned checkpoint: HumanCompatibleAI/ppo-seals-CartPole-v0 at the revision below.
CHECKPOINT_NAME = "ppo-seals-CartPole-v0.zip"
CHECKPOINT_BYTES = 139005
CHECKPOINT_SHA256 = "4e57a2618e1ab32ee4c5267874ae9f630896bc73991bd68392f5c78e4ecf738d"
MODEL_ID = "HumanCompatibleAI/ppo-seals-CartPole-v0"
SOURCE_REVISION = "a86541dd3744275227cb16d07192967fc6b7775e"
LICENSE = "not-declared"  # the upstream card declares none, and a licence is never guessed

# From the upstream card. In the file they are closures of Python 3.8, which no other version can unpickle; they steer
# training alone and take no part in a forward.
LEARNING_RATE = 0.0012403278189645594
CLIP_RANGE = 0.4

# Measured with the pinned checkpoint and the zero observation on an Ascend910B4-1 (CANN 8.5.1, torch_npu 2.9.0).
# Another chip or CANN version may differ in the last bits; the action is far from a tie.
PUBLISHED: dict[str, Any] = {
    "action": [0],
    "value": [[196.2478790283203]],
    "log_prob": [-0.30756598711013794],
    "probs": [[0.7352343797683716, 0.26476559042930603]],
    "logits": [[-0.30756598711013794, -1.3289103507995605]],
    "entropy": [0.5779828429222107],
}
TOLERANCE = 1e-3  # of an output against the float64 reference: absolute, relative above 1

LOG, MARKER, NPU_SMI, OUTPUTS, RESULT = (
    "npu_inference.log", "npu_ready.marker", "npu_smi.log", "npu_outputs.npy", "npu_result.json")
MAX_CHECKPOINT_BYTES = 128 << 20  # an MLP of 11 million parameters, with its optimizer's state
CHUNK_BYTES = 1 << 20  # of float32 observations in one pass over a file, and
CHUNK_ROWS = 16384  # no more rows than these
SHOWN_ROWS = 16  # in the log and the result, and
SHOWN_NUMBERS = 1000  # no more numbers of one output than these


# === Failures: one class for each exit code. `Supervisor.conclude` makes a message, evidence and that code of them


class Failure(Exception):
    """A run that cannot go on. `hint` says what the user can do about it."""

    code = 1

    def __init__(self, message: str, hint: str = "this is a bug: please report it") -> None:
        super().__init__(message)
        self.hint = hint


class InternalError(Failure): code = 1
class UsageError(Failure): code = 2
class CheckpointRejected(Failure): code = 3
class NpuUnavailable(Failure): code = 4
class LoadFailed(Failure): code = 5
class ForwardFailed(Failure): code = 6
class DeviceTimeout(Failure): code = 6
class EvidenceUnwritable(Failure): code = 7


class Interrupted(Failure):
    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}", "start it again")
        self.code = 128 + signum


FAILURES: dict[str, type[Failure]] = {kind.__name__: kind for kind in Failure.__subclasses__()}

# What an error of a library, of CANN or of the operating system means in each stage.
STAGE_FAILURES: dict[str, type[Failure]] = {
    "verify": CheckpointRejected, "npu": NpuUnavailable, "load": LoadFailed, "ready": LoadFailed,
    "forward": ForwardFailed, "benchmark": ForwardFailed, "final": ForwardFailed}


# === Command line


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        if "unrecognized" in message:
            import difflib

            if name := re.search(r"\S+\.(zip|npy|csv)\b", message):
                flag = "--checkpoint" if name[1] == "zip" else "--observations"
                message += f" (did you mean {flag} {name[0]}?)"
            for flag in re.findall(r"--[\w-]+", message):
                known = [option for option in self._option_string_actions if option.startswith(flag)]
                known = known or difflib.get_close_matches(flag, self._option_string_actions)
                message += f" (did you mean {known[0]}?)" if known else ""
        raise UsageError(message, "nothing was run; see python3 inference.py --help")


def create_parser() -> Parser:
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = Parser("inference.py", description=summary, epilog=rest, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"inference.py {VERSION}")
    add = parser.add_argument_group("the model").add_argument
    add("--checkpoint", metavar="PATH",
        help=f"an SB3 PPO zip (default: {CHECKPOINT_NAME} beside this script)")
    add("--sha256", metavar="HEX", default=CHECKPOINT_SHA256, type=str.lower,
        help="the digest that the checkpoint must have (default: the pinned checkpoint's)")
    add = parser.add_argument_group("the observations").add_argument
    add("--observation", metavar="JSON",
        help="one observation or a list of them (default: zeros, [0.0, 0.0, 0.0, 0.0] for CartPole)")
    add("--observations", metavar="FILE",
        help=f"a .npy or .csv file of them, one a row; all outputs go to {OUTPUTS}")
    add("--shard", metavar="I/N", help="only the I-th of N equal slices of the file, I from 1 to N")
    add = parser.add_argument_group("the run").add_argument
    add("--hold-seconds", metavar="S", type=float, default=8.0,
        help="time between the ready marker and the forward, for npu-smi (default: 8)")
    add("--log-dir", metavar="DIR", help="where the evidence goes (default: logs beside this script)")
    add("--timeout-seconds", metavar="S", type=float, default=300.0,
        help="end a run whose device does not answer, the hold not counted (default: 300)")
    add("--tolerance", metavar="T", type=float, default=TOLERANCE,
        help="how far an output may be from the float64 reference: absolute, relative above 1 (default: %(default)s)")
    add("--benchmark", metavar="N", type=int, default=None,
        help="after the evidence, time N warm passes, eager and as a graph")
    return parser


PATH_FLAGS = ("--checkpoint", "--observations", "--log-dir")


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line, checked as far as it can be without the checkpoint. Raises UsageError."""
    parser = create_parser()
    args = parser.parse_args(argv)
    for path in (args.checkpoint, args.observations, args.log_dir):
        if path is not None and (not path or "\0" in path):
            parser.error("a path is empty, or holds a NUL")
    if not re.fullmatch("[0-9a-f]{64}", args.sha256):
        parser.error(f"--sha256 {args.sha256[:80]!r} is not a SHA256: 64 hexadecimal digits")
    for flag, value in (("--hold-seconds", args.hold_seconds), ("--timeout-seconds", args.timeout_seconds)):
        if not 0 <= value <= 86400:
            parser.error(f"{flag} takes seconds from 0 to 86400, not {value}")
    if not 0 < args.tolerance < math.inf:
        parser.error(f"--tolerance takes a number above 0, not {args.tolerance}")
    if args.benchmark is not None and not 1 <= args.benchmark <= 1_000_000:
        parser.error(f"--benchmark takes a number of passes from 1 to 1000000, not {args.benchmark}")
    if args.observation is not None and args.observations is not None:
        parser.error("--observation and --observations do not go together")
    if args.shard is not None:
        match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", args.shard)
        if not match or not 1 <= int(match[1]) <= int(match[2]):
            parser.error(f"--shard {args.shard[:40]!r} is not a slice I/N with I from 1 to N, such as 1/4")
        if args.observations is None:
            parser.error("--shard needs --observations: name the file whose slices are meant")
    if args.observation is not None:
        try:
            args.observation = json.loads(args.observation)
        except (ValueError, RecursionError):
            parser.error(f"--observation {args.observation[:60]!r} is not JSON such as [0.0, 0.0, 0.0, 0.0]")
    return args


def shown(path: str | Path, typed: str | None = None) -> str:
    """A path as evidence may show it: inside the project relative to it, any other as the user typed it."""
    try:
        places = [Path(os.path.abspath(path)), Path(os.path.realpath(path))]
    except FileNotFoundError:  # the current directory was deleted
        places = []
    for place in places:
        if place.is_relative_to(PROJECT):
            return str(place.relative_to(PROJECT))
    return typed or Path(path).name


def shown_argv(argv: list[str]) -> list[str]:
    """The command line with its paths as evidence may show them, `--flag=path` included."""
    result, flag = ["inference.py"], ""
    for argument in argv:
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            result.append(flag + equals + (shown(value, typed=value) if value and flag in PATH_FLAGS else value))
        else:
            result.append(shown(argument, typed=argument) if flag in PATH_FLAGS else argument)
    return result


# === Evidence: the files of one run. All or nothing: npu_result.json with exit_code 0 is written last, and atomically.

# Every key is in every result, null where it was not measured. What each means stands in logs/README.md.
RESULT_KEYS = (
    "schema exit_code error simulated simulator engine script_version script_sha256 pid argv cwd log_dir started_at "
    "finished_at total_s stages versions environment determinism model_id source_revision license checkpoint notes "
    "rows observation_shape observations npu_available npu_device npu_device_name device_count visible_devices "
    "device_nodes policy_class num_params param_devices all_params_on_npu params_match_checkpoint "
    "params_match_after_forward model_device load_s hold_seconds ready_at npu_smi action_space input_device "
    "inputs_match_host output_device all_outputs_on_npu bitwise_repeatable repeated_rows observation action value "
    "log_prob entropy probs logits mean std env_action outputs kernels forward_s reference published benchmark "
    "worker_exit files")


@contextlib.contextmanager
def writing(name: str) -> Iterator[None]:
    """What the file system refuses inside ends the run with the name of the file."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = "free some space" if full else "name a directory that can be written with --log-dir"
        raise EvidenceUnwritable(f"{name} cannot be written: {error.strerror or error}", hint) from error


class Evidence:
    """The log, the marker, the npu-smi log, the outputs, the result and SHA256SUMS of one run.

    The log is the lock of the directory. Until `begin` it is kept in memory, and nothing of an earlier run is touched,
    so that a mistyped observation costs nobody an evidence set. All methods raise EvidenceUnwritable.
    """

    def __init__(self, log_dir: str | None) -> None:
        self.dir = Path(log_dir) if log_dir else PROJECT / "logs"
        self.shown_dir = shown(self.dir, typed=log_dir)
        self.digests: dict[str, str] = {}  # of what was written, by file
        self.text = bytearray()  # of the log
        self.log_fd = -1
        self.begun = False

    def begin(self) -> None:
        """Take the directory. From here on nothing can pass for this run's outcome but what it writes."""
        if self.begun:
            return
        if self.log_fd < 0:
            with writing(self.shown_dir):
                self.dir.mkdir(parents=True, exist_ok=True)
                self.log_fd = self.lock()
        for name in (RESULT, MARKER, NPU_SMI, OUTPUTS, f".{OUTPUTS}.tmp", f".{RESULT}.tmp"):
            with writing(f"{self.shown_dir}/{name}"):
                (self.dir / name).unlink(missing_ok=True)
        with writing(self.shown_dir):
            self.update_sums({})
            os.ftruncate(self.log_fd, 0)
        self.begun = True
        lines, self.text = self.text, bytearray()
        self.append(lines)

    def lock(self) -> int:
        """Open the log as it is and lock it, unless another run holds it."""
        path = self.dir / LOG
        if path.is_symlink() or (path.exists() and not (path.is_file() and path.stat().st_nlink == 1)):
            path.unlink()  # a link, a pipe, or another name of somebody's file: not ours to write to
        log_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        try:
            fcntl.flock(log_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(log_fd)
            raise EvidenceUnwritable(f"another run is writing its evidence to {self.shown_dir}",
                                     "wait for it, or name another directory with --log-dir") from error
        return log_fd

    def append(self, lines: bytes | bytearray) -> None:
        """Lines for the log: all of them or, on a full disk, none."""
        if self.begun:
            with writing(LOG):
                if os.pwrite(self.log_fd, lines, len(self.text)) < len(lines):
                    os.ftruncate(self.log_fd, len(self.text))
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.text += lines

    def write(self, name: str, data: bytes) -> None:
        """Write a file of the run atomically and durably."""
        with writing(name):
            replace_file(self.dir / name, data)
        self.digests[name] = sha256_of(data)

    def create_outputs(self) -> IO[bytes]:
        """The file for the worker's rows of outputs, under a name of its own until it is whole."""
        with writing(OUTPUTS):
            return new_file(self.dir / f".{OUTPUTS}.tmp")

    def publish_outputs(self, sha256: str) -> None:
        with writing(OUTPUTS):
            os.replace(self.dir / f".{OUTPUTS}.tmp", self.dir / OUTPUTS)
        self.digests[OUTPUTS] = sha256

    def update_sums(self, digests: dict[str, str]) -> None:
        """Replace the lines of a run's files in the project's SHA256SUMS, and no other, for a run in its own logs/."""
        sums = PROJECT / "SHA256SUMS"
        if sums.is_file() and self.dir.resolve() == (PROJECT / "logs").resolve():
            ours = [f"logs/{name}".encode() for name in (LOG, MARKER, NPU_SMI, OUTPUTS, RESULT)]
            lines = [line for line in sums.read_bytes().splitlines() if line[66:] not in ours]
            lines += [f"{digest}  logs/{name}".encode() for name, digest in sorted(digests.items())]
            replace_file(sums, b"".join(line + b"\n" for line in lines))

    def commit(self, result: dict[str, Any], last_line: bytes) -> None:
        """Close the log and write the result, whose rename is the commit point."""
        end = len(self.text)
        try:
            self.append(last_line)
            with writing(RESULT):
                if not os.path.samestat(os.fstat(self.log_fd), os.lstat(self.dir / LOG)):
                    raise OSError(errno.ENOENT, "the directory was taken away during the run")
                (self.dir / f".{OUTPUTS}.tmp").unlink(missing_ok=True)  # of a run that failed
                os.fsync(self.log_fd)
                result["files"] = {LOG: sha256_of(self.text), **self.digests}
                data = (json.dumps(result, indent=2, allow_nan=False) + "\n").encode()
                sums = {**result["files"], RESULT: sha256_of(data)}
                replace_file(self.dir / RESULT, data, before_rename=lambda: self.update_sums(sums))
        except EvidenceUnwritable:
            del self.text[end:]  # the log must not claim what the result does not
            os.ftruncate(self.log_fd, end)
            raise


def sha256_of(data: bytes | bytearray) -> str:
    return hashlib.sha256(data).hexdigest()


def new_file(path: Path) -> IO[bytes]:
    """A file that did not exist: whatever stands in its place, a link or a pipe, is removed and not followed."""
    path.unlink(missing_ok=True)
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644), "wb")


def replace_file(path: Path, data: bytes, before_rename: Callable[[], None] | None = None) -> None:
    """Write a file so that no reader ever sees a part of it, and so that it survives a power cut."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with new_file(temporary) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if before_rename:
            before_rename()
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # the file has its name by now; some file systems cannot make that durable
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(directory)
        os.close(directory)


def one_line(text: str) -> str:
    """Text as the log and stderr may show it: one line, and harmless on a terminal, whatever a file put into it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# === The supervisor: the process that the user starts, and the only one that writes evidence

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TICK_S = 0.1  # for how long a signal, the deadline or the end of the worker may go unnoticed
TEARDOWN_S = 30.0  # for a worker that is done: CANN writes its logs, a profiler its data
UNREAD_BYTES = 1 << 20  # of output that nobody reads
DEVICE_HINT = "npu-smi info shows the health of the device, the CANN log (plog) what the error code means"
IMPORT_HINT = f"torch_npu aborts beside a CUDA build of torch: install the CPU build in its place; else {DEVICE_HINT}"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)

# What torch_npu says in every run, with a word for the reader who wonders.
EXPECTED_WARNINGS = (
    (rb"(ASCEND_HOME_PATH environment variable is not set[^\n]*)", rb"\1 (expected on the simulator)"),
    (rb"(require processing for 32 padding size[^\n]*)", rb"\1 (expected: a note of torch_npu's allocator)"),
)


class Stream:
    """stdout or stderr. What nobody reads is kept, up to a limit, and never holds up the run."""

    def __init__(self, fd: int) -> None:
        self.fd, self.unread = fd, bytearray()
        self.poll = select.poll()
        self.poll.register(fd, select.POLLOUT)

    def write(self, data: bytes) -> None:
        self.unread += data[:UNREAD_BYTES - len(self.unread)]
        self.flush()

    def line(self, text: str) -> None:
        self.write(one_line(text).encode() + b"\n")

    def flush(self, patience_s: float = 0.0) -> None:
        """Write what the reader takes, and wait for him no longer than this."""
        try:
            while self.unread and self.poll.poll(patience_s * 1000):
                del self.unread[:os.write(self.fd, self.unread[:4096])]  # poll promises room for one page
        except OSError:  # the reader has gone, as in `| head -1`, or the disk is full: the log has it all
            self.unread.clear()


class Supervisor:
    """Follows the worker from its first message to its end, and turns what it sends into evidence."""

    def __init__(self, args: argparse.Namespace, argv: list[str], caught: list[int]) -> None:
        self.args, self.caught = args, caught  # the signals that came
        self.evidence = Evidence(args.log_dir)
        self.out, self.err = Stream(1), Stream(2)
        self.stage = "verify"
        self.started = self.stage_started = time.monotonic()
        self.started_at = datetime.now(timezone.utc)
        self.left_s = self.limit_s = math.inf  # until the device counts as hung
        self.messages: collections.deque[dict[str, Any]] = collections.deque()
        self.half_message = b""
        self.line_end = b"\n"  # of what the worker has printed last
        self.worker_failed = False
        self.pid_absent_before: bool | None = None
        self.npu_smi_log = b""
        self.inherited = children()  # of the shell that became this process: `exec python3 inference.py > >(tee log)`
        self.facts, self.facts_end = os.pipe()
        self.output, self.output_end = os.pipe()
        self.go, self.go_end = socket.socketpair()
        self.poll = select.poll()
        for pipe in (self.facts, self.output):
            self.poll.register(pipe, select.POLLIN)
        self.result: dict[str, Any] = dict.fromkeys(RESULT_KEYS.split())
        self.result.update(
            schema=SCHEMA, engine="torch_npu", script_version=VERSION, script_sha256=sha256_of(SOURCE),
            argv=shown_argv(argv), cwd=shown(os.curdir, typed="outside the project"),
            log_dir=self.evidence.shown_dir, started_at=self.time_at(self.started), stages={}, notes=[])

    def time_at(self, moment: float) -> str:
        """ISO 8601, UTC. Counted from the start on the monotonic clock, so that a clock set back breaks no order."""
        return (self.started_at + timedelta(seconds=moment - self.started)).isoformat(timespec="microseconds")

    def follow(self, worker_pid: int) -> int:
        """Follow the worker to its end. Returns the exit code that the evidence states."""
        self.pid = self.result["pid"] = worker_pid
        os.close(self.facts_end)
        os.close(self.output_end)
        self.go_end.close()
        try:
            while (message := self.next_message())["kind"] != "done":
                self.handle(message)
            self.end_worker(min(TEARDOWN_S, self.args.timeout_seconds))
            if self.caught:
                raise Interrupted(self.caught[0])
            self.say(f"[final]   worker_exit={self.result['worker_exit']}")
            self.finish(exit_code=0)
            place = "" if self.result["cwd"] == "." else f"{PROJECT}/"
            check = shlex.join(["python3", f"{place}tests/check_evidence.py", self.args.log_dir or f"{place}logs"])
            self.out.line(f"check it: {check}")
            code = 0
        except Failure as failure:
            code = self.conclude(failure)
        except Exception as error:  # noqa: BLE001 (the one place where a bug of the supervisor gets its exit code)
            import traceback

            self.err.write(traceback.format_exc().encode())
            code = self.conclude(InternalError(f"{type(error).__name__}: {error}"))
        for stream in (self.out, self.err):
            stream.flush(patience_s=0.0 if self.caught else 2.0)
        return code

    def next_message(self) -> dict[str, Any]:
        while not self.messages:
            if self.result["worker_exit"]:
                raise STAGE_FAILURES[self.stage](
                    f"the process on the NPU ended without a word: {self.result['worker_exit']}",
                    IMPORT_HINT if self.stage == "npu" else DEVICE_HINT)
            self.pump()
        return self.messages.popleft()

    def pump(self, wait_s: float = TICK_S) -> None:
        """Wait a moment for the worker. Raises Interrupted on a signal, and DeviceTimeout at the deadline."""
        before = time.monotonic()
        self.exchange(wait_s)
        if self.caught:
            raise Interrupted(self.caught[0])
        # A supervisor that was stopped itself (Ctrl-Z) cannot say how long the device took.
        self.left_s -= min(time.monotonic() - before, wait_s + TICK_S)
        if self.left_s <= 0 and not self.messages:
            raise DeviceTimeout(f"the device did not answer within {self.limit_s:g} s", "look at npu-smi info and "
                                "dmesg; a longer --timeout-seconds helps when operators are compiled")

    def exchange(self, wait_s: float) -> None:
        """Take in what the worker sends, pass on what it prints, and see whether it has ended."""
        if not self.result["worker_exit"]:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.result["worker_exit"] = how_it_ended(os.waitstatus_to_exitcode(status))
        ended = bool(self.result["worker_exit"])  # then what it sent is in the pipes by now
        for _ in range(256 if ended else 1):
            ready = self.poll.poll(0 if ended else wait_s * 1000)
            for fd, _ in ready:
                data = os.read(fd, 65536)
                if not data:
                    self.poll.unregister(fd)
                elif fd == self.facts:
                    *lines, self.half_message = (self.half_message + data).split(b"\n")
                    self.messages.extend(json.loads(line) for line in lines)
                else:
                    for pattern, marked in EXPECTED_WARNINGS:
                        data = re.sub(pattern, marked, data)
                    self.err.write(data)
                    self.line_end = data[-1:]
            if not ready:
                break
        self.out.flush()
        self.err.flush()

    def handle(self, message: dict[str, Any]) -> None:
        """What each message of the worker means."""
        kind = message["kind"]
        if kind == "stage":
            self.enter(message["stage"], message["at_least_s"])
        elif kind == "facts":
            self.result.update(message["facts"])
        elif kind == "line":
            self.say(message["line"], message["short"])
        elif kind == "progress":
            self.left_s = self.args.timeout_seconds
            self.show(f"[forward] {message['rows']} of {self.result['rows']} rows")
        elif kind == "inputs are good":
            # while the worker imports torch: compiling takes its time
            if compile(SOURCE, SCRIPT, "exec", dont_inherit=True) != CODE:
                raise UsageError("inference.py was replaced as it started", "start it again")
            self.evidence.begin()
        elif kind == "before the device":
            self.ask_before()
        elif kind == "ready":
            self.hold()
        elif kind == "outputs":
            self.evidence.publish_outputs(message["sha256"])
        elif kind == "failed":
            self.worker_failed = True
            raise FAILURES[message["type"]](message["message"], message["hint"])
        else:
            raise InternalError(f"the worker sent {kind!r}")

    def enter(self, stage: str, at_least_s: float | None) -> None:
        """A stage begins, or its next step: the device has the full time again; None for no deadline."""
        self.end_stage()
        self.stage = stage
        self.limit_s = math.inf if at_least_s is None else max(self.args.timeout_seconds, at_least_s)
        self.left_s = self.limit_s

    def end_stage(self) -> None:
        stages, now = self.result["stages"], time.monotonic()
        stages[self.stage] = round(stages.get(self.stage, 0.0) + now - self.stage_started, 6)
        self.stage_started = now

    def say(self, line: str, short: str = "") -> None:
        """One line for the log, and for stdout, where it may be shorter."""
        self.evidence.append(one_line(line).encode() + b"\n")
        self.out.line(short or line)

    def show(self, text: str) -> None:
        """On a terminal alone: a line that the next one overwrites."""
        if os.isatty(1) and os.environ.get("TERM") != "dumb" and not self.out.unread:
            self.out.write(f"\r{text}\x1b[K\r".encode())

    def ask_before(self) -> None:
        """Ask npu-smi before the device is taken, when it must not list the worker, and let the worker go on."""
        answer = self.npu_smi("info")
        rows = read_process_table(answer.text)
        if not answer.problem and rows is not None:
            self.pid_absent_before = not any(str(self.pid) in (row.pid, row.pid_in_container) for row in rows)
        npu_smi, driver = versions_of(answer)
        word = {"npu_smi": npu_smi, "driver": driver, "error": driver_error_of(answer.text)}
        if not self.args.observations:
            return self.let_go(word)
        with self.evidence.create_outputs() as file:
            return self.let_go(word, file.fileno())

    def let_go(self, word: dict[str, Any], *fds: int) -> None:
        with contextlib.suppress(BrokenPipeError):  # the worker has ended, and next_message will say so
            socket.send_fds(self.go, [json.dumps(word).encode()], fds)

    def hold(self) -> None:
        """Write the marker, hold, and look for the worker's PID in npu-smi meanwhile."""
        hold_s, ready_at = self.args.hold_seconds, time.monotonic()
        directory = self.evidence.shown_dir
        self.left_s = math.inf
        self.result.update(ready_at=self.time_at(ready_at), hold_seconds=hold_s)
        self.evidence.write(MARKER, (
            f"NPU_READY_PID={self.pid}\nDEVICE={DEVICE}\nHOLD_SECONDS={hold_s}\nREADY_AT={self.result['ready_at']}\n"
            f"SIMULATED={int(self.result['simulated'])}\n").encode())
        self.say(f"[ready]   NPU_READY_PID={self.pid} DEVICE={DEVICE} MARKER={directory}/{MARKER}")
        self.say(f"[ready]   holding {hold_s}s for external npu-smi correlation ...")
        found = self.result["npu_smi"] = correlate(str(self.pid), self.pid_absent_before, self.npu_smi)
        which = "pid_line={pid_line}" if found["pid_found"] else "reason={reason}"
        for line in (f"captured={{captured}} pid_found={{pid_found}} log={directory}/{NPU_SMI}", which,
                     "pid_absent_before={pid_absent_before} matched_by={matched_by} npu_id={npu_id} chip_id={chip_id}"):
            self.say("[ready]   npu_smi " + line.format_map(found))
        while (left := ready_at + hold_s - time.monotonic()) > 0 and not self.result["worker_exit"]:
            self.show(f"[ready]   {math.ceil(left)} s left")
            self.pump(min(left, TICK_S))
        self.show("")
        self.left_s = self.args.timeout_seconds
        self.let_go({})

    def npu_smi(self, *arguments: str) -> Answer:
        """Call npu-smi, bounded in time and output, and keep the raw answer in npu_smi.log."""
        import tempfile

        program = shutil.which("npu-smi") or shutil.which("npu-smi", path="/usr/local/bin:/usr/local/sbin")
        at, output, problem = self.time_at(time.monotonic()), b"", "it is not on PATH"
        left_s, self.left_s = self.left_s, math.inf  # a slow npu-smi is not a hung device
        if program is not None:
            with writing(NPU_SMI), tempfile.TemporaryFile(dir=self.evidence.dir) as file:
                problem = self.run_bounded([program, *arguments], file)
                file.seek(0)
                output = file.read(NPU_SMI_BYTES)
        self.left_s = left_s
        heading = f"# npu-smi {' '.join(arguments)} at={at} bytes={len(output)} outcome={problem or 'exit code 0'}\n"
        self.npu_smi_log += heading.encode() + output + b"\n"
        self.evidence.write(NPU_SMI, self.npu_smi_log)
        return Answer(output.decode("utf-8", "replace"), problem)

    def run_bounded(self, command: list[str], file: IO[bytes]) -> str:
        """Run a command that prints into a file. Returns what was wrong with it, "" for nothing."""
        until = time.monotonic() + NPU_SMI_TIMEOUT_S
        try:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                                     start_new_session=True, preexec_fn=die_with_parent)
        except OSError as error:
            return f"it cannot be started: {error.strerror}"
        try:
            while child.poll() is None and not self.result["worker_exit"]:
                if os.fstat(file.fileno()).st_size > NPU_SMI_BYTES:
                    break
                if time.monotonic() > until:
                    return f"no answer within {NPU_SMI_TIMEOUT_S:.0f} s"
                self.pump(TICK_S / 4)
        finally:
            kill_group(child.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the driver
                child.wait(1.0)
        if os.fstat(file.fileno()).st_size > NPU_SMI_BYTES:
            return f"more than {NPU_SMI_BYTES} bytes"
        return f"exit code {child.returncode}" if child.returncode else ""

    def end_worker(self, patience_s: float, signum: int = signal.SIGABRT) -> None:
        """Let the worker end as a Python process ends, and then end what is left of it. Notes how it ended."""
        for number, wait_s in ((0, patience_s), (signum, 1.0), (signal.SIGKILL, 1.0)):
            until, caught = time.monotonic() + wait_s, len(self.caught)
            if number == signal.SIGABRT and self.caught:
                number = signal.SIGTERM  # it is the user who wants an end: nothing hangs that is to be shown
            if not self.result["worker_exit"]:
                os.kill(self.pid, number)  # on SIGABRT, faulthandler shows the line that hung; 0 does nothing
            while not self.result["worker_exit"] and time.monotonic() < until and len(self.caught) == caught:
                self.exchange(TICK_S / 4)
        self.result["worker_exit"] = self.result["worker_exit"] or "did not end"
        self.exchange(0.0)
        kill_group(self.pid)
        end_children(but=self.inherited)

    def finish(self, exit_code: int) -> None:
        """Close the evidence with this exit code. Raises EvidenceUnwritable."""
        self.end_stage()
        now = self.stage_started
        self.result.update(exit_code=exit_code, finished_at=self.time_at(now), total_s=round(now - self.started, 6))
        line = one_line(f"[final]   exit_code={exit_code} result_json={self.evidence.shown_dir}/{RESULT}")
        self.evidence.commit(self.result, line.encode() + b"\n")
        self.out.line(line)

    def conclude(self, failure: Failure) -> int:
        """End a run that failed: log, JSON and one line on stderr say so. Returns the exit code."""
        if isinstance(failure, DeviceTimeout):
            self.end_worker(0.0)
        elif self.worker_failed:  # it is ending by itself
            self.end_worker(min(10.0, max(1.0, self.left_s)))
        else:
            self.end_worker(0.0, signal.SIGTERM)
        message, hint = one_line(str(failure))[:500] or type(failure).__name__, one_line(failure.hint)
        if isinstance(failure, NpuUnavailable) and not self.result["simulated"]:
            hint += "; without an NPU, try the program on the simulated one: tests/simulate.sh"
        error = {"stage": self.stage, "type": type(failure).__name__, "message": message, "hint": hint}
        self.result["error"] = error
        where, lost = self.stage, ""
        if isinstance(failure, UsageError):  # which writes nothing and removes nothing
            where, lost = "usage", "; nothing was run"
        else:
            try:
                self.evidence.begin()
                self.say("[error]   stage={stage} type={type} message={message} hint={hint}".format_map(error))
                self.finish(failure.code)
            except EvidenceUnwritable as unwritable:
                lost = "" if str(unwritable) == str(failure) else f" (no result: {unwritable})"
        start = "" if self.line_end == b"\n" else "\n"
        self.err.write(start.encode())
        self.err.line(f"inference.py: {where}: {message}{lost}; {hint}")
        return failure.code


def how_it_ended(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"ended by {signal.Signals(-returncode).name}"
    except ValueError:  # a real-time signal
        return f"ended by SIG{-returncode}"


def die_with_parent() -> None:
    """In a child: the kernel ends it when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def children() -> set[int]:
    """The PIDs of this process's children; of none on a kernel that does not tell."""
    try:
        return {int(child) for child in Path("/proc/thread-self/children").read_text().split()}
    except OSError:
        return set()


def end_children(but: set[int]) -> None:
    """End the processes that the worker and npu-smi have left behind. Those whose parent ended are ours by now."""
    until = time.monotonic() + 1.0  # one that hangs in the driver cannot be ended
    while (left := children() - but) and time.monotonic() < until:
        for child in left:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)


# === npu-smi: is the worker in the process table of the device?

NPU_SMI_TIMEOUT_S = 20.0  # it takes seconds on a board of many chips, and queues where others ask as well
NPU_SMI_BYTES = 1 << 20
NPU_SMI_PROCESSES = 8  # npu-smi info lists no more for one chip
NPU_SMI_CALLS = 8  # for chips that are full


class Answer(NamedTuple):
    """What one call of npu-smi printed, and what went wrong with it ("" for nothing)."""

    text: str
    problem: str


class Process(NamedTuple):
    """One row of npu-smi's process table; `pid_in_container` is "" where the column is absent or says NA."""

    chip: str  # NPU and chip, such as "0 0"
    pid: str
    pid_in_container: str
    line: str


def read_process_table(text: str) -> list[Process] | None:
    """The rows of the process table of `npu-smi info`, None where it has no such table.

    Read by the names in its header row: the columns, their widths and the lines around the table differ between
    boards and drivers. The name cell is never looked at; since it may hold anything, the column behind it is counted
    from the end.
    """
    header: list[str] = []
    rows: list[Process] = []
    for line in text.splitlines():
        cells = [" ".join(cell.split()) for cell in line.strip().split("|")[1:-1]]
        names = [cell.lower() for cell in cells]
        if "process id" in names:
            header = names
        elif header and len(cells) >= len(header) and cells[header.index("process id")].isdecimal():
            inside = ""
            if "process id in container" in header:
                inside = cells[header.index("process id in container") - len(header)]
            rows.append(Process(cells[0], cells[header.index("process id")], inside * inside.isdecimal(), line.strip()))
    return rows if header else None


def correlate(pid: str, pid_absent_before: bool | None, ask: Callable[..., Answer]) -> dict[str, Any]:
    """Whether npu-smi lists this PID now and did not before, and if not, why not. A PID not found fails no run."""
    found: dict[str, Any] = {"captured": False, "pid_found": False, "pid_line": None, "matched_by": None,
                             "reason": None, "pid_absent_before": pid_absent_before, "npu_id": None, "chip_id": None}
    answer = ask("info")
    if answer.problem:
        return {**found, "reason": f"npu-smi info: {answer.problem}: {answer.text.strip()[-200:]}".rstrip(": ")}
    found["captured"] = True
    rows = read_process_table(answer.text)
    if rows is None:
        return {**found, "reason": "this board or driver has no process table"}
    # A row with a PID of a container belongs to that and to no other.
    matches = [("process id in container", row) for row in rows if row.pid_in_container == pid]
    matches += [("process id", row) for row in rows if row.pid == pid and not row.pid_in_container]
    matches = matches or [("proc-mem", row) for row in beyond_cap(pid, rows, ask)]
    if not matches:
        return {**found, "reason": "the PID is not listed; in a container, npu-smi may list the host's PIDs"}
    if pid_absent_before is False:
        return {**found, "reason": "the PID was listed before the device was taken: another process has that number"}
    matched_by, row = matches[0]
    npu_id, _, chip_id = row.chip.partition(" ")
    return {**found, "pid_found": True, "pid_line": row.line, "matched_by": matched_by, "npu_id": npu_id,
            "chip_id": chip_id}


def beyond_cap(pid: str, rows: list[Process], ask: Callable[..., Answer]) -> Iterator[Process]:
    """npu-smi info lists eight processes for a chip; its proc-mem query has no such cap."""
    listed = collections.Counter(row.chip for row in rows)
    full = [chip for chip, count in listed.items() if count == NPU_SMI_PROCESSES]
    for npu_id, _, chip_id in (chip.partition(" ") for chip in full[:NPU_SMI_CALLS]):
        answer = ask("info", "-t", "proc-mem", "-i", npu_id, *(["-c", chip_id] if chip_id else []))
        for line in answer.text.splitlines():
            if re.search(rf"Process id\s*:\s*{pid}\b", line):
                yield Process(f"{npu_id} {chip_id}", pid, "", line.strip())
        if answer.problem.startswith("no answer"):
            return


def versions_of(answer: Answer) -> tuple[str | None, str | None]:
    """The versions of npu-smi and of the driver, from the header of `npu-smi info`."""
    match = re.search(r"npu-smi {1,9}v?(\d[\w.]{0,40}) {1,80}Version: {0,40}(\d[\w.]{0,40})", answer.text)
    return (match[1], match[2]) if match and not answer.problem else (None, None)


def driver_error_of(npu_smi_says: str) -> str:
    """The driver's error, such as "-8005", in what npu-smi says of a device that it cannot open."""
    match = re.search(r"-80\d\d", npu_smi_says)
    return match[0] if match else ""


# === The worker: the process on the NPU. It goes through the stages straight down, and writes only rows of outputs


class Worker:
    """The worker's line to the supervisor: what it learns it sends, and where it must wait it waits for a word."""

    def __init__(self, facts_end: int, go_end: socket.socket) -> None:
        self.facts_end = open(facts_end, "wb")  # noqa: SIM115 (open to the end of the process)
        self.go_end = go_end
        self.stage = "verify"
        self.result: dict[str, Any] = {}  # what was measured so far, under the keys of the evidence
        self.outputs_fd: int | None = None  # of the file for the outputs of a file of observations

    def send(self, kind: str, **content: Any) -> None:
        self.facts_end.write(json.dumps({"kind": kind, **content}, allow_nan=False).encode() + b"\n")
        self.facts_end.flush()

    def enter(self, stage: str, at_least_s: float | None = 0.0) -> None:
        """Name the stage, or its next step, and ask for the full time again; None for no deadline."""
        self.stage = stage
        self.send("stage", stage=stage, at_least_s=at_least_s)

    def facts(self, **facts: Any) -> None:
        self.result.update(facts)
        self.send("facts", facts=facts)

    def log(self, template: str, **values: Any) -> None:
        """Lines of the log, made of what was measured; on stdout, the many rows of a file are shortened."""
        values = {**self.result, **values}
        shortened = dict(values)
        if values.get("observations") and values["rows"] > 3:
            shortened.update({name: first_rows(values[name]) for name in PER_ROW if values.get(name)})
        for line in template.strip("\n").split("\n"):
            self.send("line", line=line.format_map(values), short=line.format_map(shortened))

    def wait_for_go(self, kind: str) -> dict[str, Any]:
        """Say that this point is reached, and wait for the supervisor's word."""
        self.send(kind)
        word, fds, _, _ = socket.recv_fds(self.go_end, 1 << 16, 1)
        if not word:
            sys.exit(1)  # the supervisor has ended
        self.outputs_fd = fds[0] if fds else self.outputs_fd
        return dict(json.loads(word))


PER_ROW = ("observation", "action", "value", "log_prob", "entropy", "probs", "logits", "mean", "std", "env_action")


def first_rows(rows: list[Any]) -> str:
    return f"[{', '.join(map(in_short, rows[:3]))}, ...]"


def in_short(value: Any) -> str:
    """A number, or nested lists of numbers, with six digits of each and no more than eight in a list."""
    if isinstance(value, list):
        more = ", ..." if len(value) > 8 else ""
        return f"[{', '.join(map(in_short, value[:8]))}{more}]"
    return f"{value:.6g}"


def work(args: argparse.Namespace, worker: Worker) -> int:
    """All stages. Returns the exit code of the worker's process."""
    try:
        worker.enter("verify", at_least_s=None)  # no device yet, and a fetch may be slow
        checkpoint = verify(args, worker)
        observations = read_observations(args, checkpoint.observation.shape, worker)
        for note in worker.result.get("notes", []):
            worker.log("[note]    {note}", note=note)
        worker.send("inputs are good")
        worker.enter("npu", at_least_s=120)
        take_npu(worker)
        worker.enter("load", at_least_s=120)
        policy = load(checkpoint, worker)
        worker.enter("ready")
        torch.npu.synchronize()  # npu-smi is not to be started while a copy is under way
        worker.wait_for_go("ready")
        worker.enter("forward")
        passes = Passes(policy)
        forward(args, checkpoint, observations, passes, worker)
        if args.benchmark:
            worker.enter("benchmark")
            benchmark(args, checkpoint, observations, passes, worker)
        worker.enter("final")
        torch.npu.synchronize()  # an error that is still on its way ends the run here
        # torch's allocator retries a failed allocation and says nothing; a device that failed once is no witness.
        if retries := torch.npu.memory_stats()["num_alloc_retries"]:
            raise ForwardFailed(f"{retries} allocations of device memory failed and were tried again",
                                "the device is full or at fault: npu-smi info shows its memory")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the device is given back from here on
        worker.send("done")
        return 0
    except Exception as error:  # noqa: BLE001 (the one place where an error of the worker becomes a failure)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        failure = failure_of(error, worker.stage)
        if type(failure) is InternalError:
            import traceback

            traceback.print_exc()
        worker.send("failed", type=type(failure).__name__, message=str(failure), hint=failure.hint)
        return failure.code


def failure_of(error: Exception, stage: str) -> Failure:
    """What an error means that no stage has explained itself."""
    text = f"{type(error).__name__}: {first_line(error)}"
    if isinstance(error, Failure):
        return error
    if isinstance(error, ImportError):  # of numpy, or of what SB3 needs
        return (LoadFailed if stage == "load" else NpuUnavailable)(
            text, "python3 -m pip install -r requirements.txt")
    if isinstance(error, MemoryError):
        return STAGE_FAILURES[stage](text, "this machine, or its limit (ulimit -v), has too little memory")
    if isinstance(error, (RuntimeError, OSError)):  # torch, torch_npu and CANN; the operating system
        hint = "look at the file and the disk" if stage == "verify" else npu_hint(str(error))
        return STAGE_FAILURES[stage](text, hint)
    return InternalError(text)


def first_line(error: BaseException) -> str:
    """The line of an error's text that tells most, without the directories of this machine: evidence is published."""
    text = str(error.__cause__ if error.__cause__ and "backend extension" in str(error) else error).strip()
    # What the device said stands deep inside the texts that torch wraps around it.
    match = re.search(r"NPU function error:? .*?error code is \d+", text)
    line = (match[0] if match else (text.splitlines() or [type(error).__name__])[0])[:300]
    return re.sub(r"(?<![\w.~:/-])/(?!dev/)(?:[\w.+@~-]+/)+", "", line)


# --- Stage verify: the checkpoint's bytes, without torch


HEAD_LINES = """
[inference] python            : {versions[python]}
[inference] platform          : {versions[platform]}
[inference] pid               : {pid}
[inference] cwd               : {cwd}
[inference] checkpoint        : {checkpoint[path]}
[inference] program           : {program}
"""
FILE_LINES = """
[verify]  bytes={checkpoint[bytes]} sha256={checkpoint[sha256]}
[verify]  size_ok={checkpoint[size_ok]} sha256_ok={checkpoint[sha256_ok]}
"""


def verify(args: argparse.Namespace, worker: Worker) -> Checkpoint:
    """Read the checkpoint once, compare its digest, and parse it."""
    typed, pinned = args.checkpoint and with_zip(args.checkpoint), args.sha256 == CHECKPOINT_SHA256
    path = Path(typed) if typed else PROJECT / CHECKPOINT_NAME
    name = shown(path, typed)
    file: dict[str, Any] = {"path": name, "bytes": None, "sha256": None, "size_ok": None, "sha256_ok": None}
    worker.facts(pid=os.getpid(), checkpoint=file, versions=dict.fromkeys(VERSIONS) | {
        "python": platform.python_version(), "platform": platform.platform()})
    worker.log(HEAD_LINES, cwd=shown(os.curdir, typed="outside the project"),
               program=f"{VERSION} sha256={sha256_of(SOURCE)}")
    if args.checkpoint is None and pinned and not os.path.lexists(path):
        path = fetch_checkpoint(path)
    raw = read_file(path, name)
    size, digest = CHECKPOINT_BYTES if pinned else os.stat(path).st_size, sha256_of(raw)
    file.update(bytes=len(raw), sha256=digest, size_ok=len(raw) == size, sha256_ok=digest == args.sha256)
    worker.facts(checkpoint=file)
    worker.log(FILE_LINES)
    if not (file["size_ok"] and file["sha256_ok"]):
        open_zip(raw, "the file")  # says so when it is another kind of file
        expected = f"{CHECKPOINT_BYTES} bytes and SHA256 {CHECKPOINT_SHA256}" if pinned else f"SHA256 {args.sha256}"
        hint = FETCH_AGAIN
        if args.checkpoint is None:
            hint = FETCH_HINT
        elif pinned:
            hint = f"if this is the checkpoint that you mean, add --sha256 {digest}; otherwise {FETCH_AGAIN}"
        raise CheckpointRejected(f"{name} has {len(raw)} bytes and SHA256 {digest}, expected {expected}", hint)
    if pinned:
        worker.facts(model_id=MODEL_ID, source_revision=SOURCE_REVISION, license=LICENSE)
    checkpoint = read_checkpoint(raw)
    worker.facts(action_space=describe_action_space(checkpoint), observation_shape=list(checkpoint.observation.shape))
    if checkpoint.vec_normalize:
        worker.facts(notes=["trained with VecNormalize: unless it normalised rewards alone, observations must be "
                            "normalised with its statistics first, which a checkpoint does not hold"])
    return checkpoint


PACKAGES = ("stable_baselines3", "gymnasium", "numpy", "cloudpickle")
VERSIONS = ("python", "platform", "torch", "torch_npu", "cann", "npu_smi", "driver", *PACKAGES)
FETCH_HINT = ("fetch it, in the directory of inference.py: python3 -m pip install huggingface_hub; "
              f"hf download {MODEL_ID} {CHECKPOINT_NAME} --revision {SOURCE_REVISION} --local-dir . "
              f"(SHA256 {CHECKPOINT_SHA256}); or name another with --checkpoint and --sha256; or try the simulator "
              "with a checkpoint of its own: tests/simulate.sh")
CHECKPOINT_HINT = "name a file with --checkpoint; a relative path counts from the current directory"


def with_zip(typed: str) -> str:
    """The file that is meant: as for PPO.load, a name may leave out its .zip."""
    return typed if os.path.lexists(typed) or not os.path.lexists(f"{typed}.zip") else f"{typed}.zip"


def fetch_checkpoint(path: Path) -> Path:
    """Fetch the pinned file, where huggingface_hub is installed. Returns where it is: beside this script, or in the
    hub's cache where that cannot be written.

    The package's own environment variables apply (HF_ENDPOINT, HF_HUB_OFFLINE ...).
    """
    # With its telemetry, the client asks the hub for more than the file (a list of programs to find itself under).
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    try:
        from huggingface_hub import hf_hub_download

        # token=False: the file is public, and HF_ENDPOINT may be anybody's
        cached = Path(hf_hub_download(MODEL_ID, CHECKPOINT_NAME, revision=SOURCE_REVISION, token=False))
        data = cached.read_bytes()
    except ImportError:
        return path
    except Exception as error:  # any of the hub's, the HTTP client's and the file system's
        raise CheckpointRejected(f"{CHECKPOINT_NAME} is absent, and fetching it failed: "
                                 f"{' '.join(str(error).split())[:300]}", FETCH_HINT) from error
    if sha256_of(data) != CHECKPOINT_SHA256:
        with contextlib.suppress(OSError):
            cached.resolve().unlink()  # so that the next run asks the hub again
        raise CheckpointRejected(f"what was fetched as {CHECKPOINT_NAME} is another file", FETCH_HINT)
    if not os.access(PROJECT, os.W_OK):
        return cached
    replace_file(path, data)
    return path


def read_file(path: Path, name: str) -> bytes:
    """The file's bytes, read once."""
    try:
        # O_NONBLOCK: opening a named pipe must not wait for a writer
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            require(stat.S_ISREG(status.st_mode), f"{name} is not a regular file", CHECKPOINT_HINT)
            require(status.st_size <= MAX_CHECKPOINT_BYTES,
                    f"{name} has {status.st_size} bytes, more than {MAX_CHECKPOINT_BYTES}",
                    "a PPO checkpoint with MlpPolicy is smaller")
            return file.read(MAX_CHECKPOINT_BYTES + 1)
    except OSError as error:
        hint = FETCH_HINT if path == PROJECT / CHECKPOINT_NAME else CHECKPOINT_HINT
        raise CheckpointRejected(f"{name}: {error.strerror}", hint) from error


def describe_action_space(checkpoint: Checkpoint) -> dict[str, Any]:
    if "box" not in checkpoint.action:
        return checkpoint.action
    box: Box = checkpoint.action["box"]
    return {"type": "Box", "shape": list(box.shape), "low": finite_or_null(box.low), "high": finite_or_null(box.high),
            "squashed": bool(checkpoint.policy_kwargs.get("squash_output"))}


def finite_or_null(bounds: list[float]) -> list[float | None]:
    """JSON has no number for an infinite bound."""
    return [bound if math.isfinite(bound) else None for bound in bounds]


# --- The reader: what a checkpoint says, without running anything that it asks for
#
# A checkpoint of SB3 is a zip with `data`, the settings as JSON, and `policy.pth`, the weights as torch.save writes
# them: again a zip, with a pickle that describes the tensors and a record of bytes for each. No other member is opened.
# An odd file loads if it can be read. What cannot be rebuilt is refused by its name.

MAX_DATA_BYTES = 32 << 20  # 10 MB were seen: 4,096 environments with VecNormalize
MAX_DATA_MARKS = 200_000  # brackets, commas and escapes in it; some hundreds are usual
MAX_MEMBERS = 5_000
MAX_PICKLE_BYTES = 256 << 10
MAX_OPCODES = 20_000  # some hundreds are usual
MAX_SPACE = 1 << 20  # numbers in an observation or an action, and characters of a text that is taken apart

FETCH_AGAIN = "fetch or copy the file again"
NOT_PPO_SAVE = "name the .zip that PPO.save of Stable-Baselines3 wrote"
PPO_ONLY = "only PPO with MlpPolicy and a Box of observations can be run"
SHARED_LAYERS = "the policy has layers that both towers share (SB3 before 1.8), which SB3 2 cannot build"
OTHER_FILES = (  # how a file begins that people pass by mistake, what it is, and what to do
    (b"version https://git-lfs", "is a Git LFS pointer, not the checkpoint itself", "git lfs pull"),
    (b"<!doctype html", "is an HTML page", "fetch the file itself: hf download REPOSITORY FILE"),
    (b"<html", "is an HTML page", "fetch the file itself: hf download REPOSITORY FILE"),
    (b"\x80\x02\x8a\nl\xfc\x9cf", "was written by torch before 1.6", "load and save it again with a newer torch"),
    (b"pk\3\4", "is a zip archive that is cut short or damaged", FETCH_AGAIN),
    (b"", "is not a zip archive", NOT_PPO_SAVE))
OTHER_MEMBERS = (  # how a member's name ends in other archives, what such an archive is, and what to do
    ("parameter_list", "the checkpoint is of Stable-Baselines 2, not of SB3", "train it again with SB3"),
    ("/policy.pth", "the members of the checkpoint are in a folder of the archive", "zip them without the folder"),
    ("/data.pkl", "the file is a .pth of torch.save, or a checkpoint that is cut short", NOT_PPO_SAVE),
    (".zip", "the archive holds another archive", "unzip it once"),
    ("", "the archive has no member data, so it is not a checkpoint of SB3", NOT_PPO_SAVE))
OTHER_ALGORITHMS = {"td3": "TD3 or DDPG", "maskable": "MaskablePPO", "recurrent": "RecurrentPPO"}  # by policy module
OTHER_POLICIES = {"ActorCriticCnnPolicy": "CnnPolicy", "MultiInputActorCriticPolicy": "MultiInputPolicy"}
PLAIN_ARGUMENTS = ("full_std", "use_expln", "squash_output", "share_features_extractor", "normalize_images")
UNUSED_ARGUMENTS = (  # of training, overwritten by the weights, or SB3's only choice for a Box
    ":type:", ":serialized:", "device", "optimizer_class", "optimizer_kwargs", "ortho_init", "log_std_init")
FLATTEN = "<class 'stable_baselines3.common.torch_layers.FlattenExtractor'>"


class Box(NamedTuple):
    """A Box of gymnasium; `low` and `high` are flattened, a number for each element."""

    shape: tuple[int, ...]
    dtype: str
    low: list[float]
    high: list[float]


class Checkpoint(NamedTuple):
    """What a verified checkpoint says: numbers and text, nothing unpickled."""

    tensors: dict[str, Array]  # float32 and finite, by their names in policy.pth
    observation: Box
    action: dict[str, Any]  # {"type": "Discrete", "n": 2}, {"type": "MultiDiscrete", "nvec": [3, 2]}, ..., "box": Box
    net_arch: dict[str, list[int]]  # {"pi": [64, 64], "vf": [64, 64]}
    activation: str  # its name in torch.nn
    activation_kwargs: dict[str, Any]
    policy_kwargs: dict[str, Any]  # other arguments of ActorCriticPolicy that the file gives
    use_sde: bool
    vec_normalize: bool  # trained on observations that VecNormalize had normalised


def read_checkpoint(raw: bytes) -> Checkpoint:
    """Raises CheckpointRejected. Time and memory stay bounded, whatever the file holds."""
    archive = open_zip(raw, "the file")
    names = archive.namelist()
    if "data" not in names or "parameter_list" in names:
        for ending, message, hint in OTHER_MEMBERS:
            require(not any(name.endswith(ending) for name in ["", *names]), message, hint)
    data = read_member(archive, "data", MAX_DATA_BYTES)
    marks = sum(data.count(mark) for mark in (b"[", b"{", b",", b"\\"))
    require(marks <= MAX_DATA_MARKS, f"data has {marks} brackets, commas and escapes, more than {MAX_DATA_MARKS}")
    settings = parsed(data)
    require(isinstance(settings, dict), "data is not a JSON object that can be read", FETCH_AGAIN)
    return read_policy(read_member(archive, "policy.pth", MAX_CHECKPOINT_BYTES), read_settings(settings))


def require(holds: bool, message: str, hint: str = NOT_PPO_SAVE) -> None:
    if not holds:
        raise CheckpointRejected(message, hint)


def quoted(value: Any) -> str:
    """A value of the file for a message: short, printable, without addresses of memory."""
    if isinstance(value, (dict, list)):
        return f"a JSON {'object' if isinstance(value, dict) else 'array'}"
    return ascii(re.sub(r" at 0x[0-9a-fA-F]+", "", str(value)[:200])[:100])


def open_zip(raw: bytes, what: str) -> zipfile.ZipFile:
    require(len(raw) > 0, f"{what} is empty", FETCH_AGAIN)
    require(raw.count(b"PK\1\2") <= MAX_MEMBERS, "a zip archive has an enormous directory")
    try:
        return zipfile.ZipFile(io.BytesIO(raw))
    except ZIP_ERRORS as error:
        start = raw[:200].lstrip().lower()
        message, hint = next(other[1:] for other in OTHER_FILES if start.startswith(other[0]))
        raise CheckpointRejected(f"{what} {message}", hint) from error


# What zipfile raises for archives that are damaged, encrypted or lie about themselves.
ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, ValueError, OverflowError, OSError)


def read_member(archive: zipfile.ZipFile, name: str, limit: int) -> bytes:
    """A member in full; of two with one name the last, as SB3 reads it. It expands to no more than its stated size."""
    try:
        info = archive.getinfo(name)
        require(info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED),
                f"the member {quoted(name)} is neither stored nor deflated", "zip the members again")
        require(info.file_size <= limit,
                f"the member {quoted(name)} expands to {info.file_size} bytes, more than {limit}")
        with archive.open(info) as file:
            content = file.read(info.file_size)
            file.read(1)  # the end, where zipfile compares the CRC
    except KeyError as error:
        raise CheckpointRejected(f"the member {quoted(name)} is missing", FETCH_AGAIN) from error
    except ZIP_ERRORS as error:
        raise CheckpointRejected(f"the member {quoted(name)} is damaged or encrypted", FETCH_AGAIN) from error
    require(len(content) == info.file_size, f"the member {quoted(name)} is shorter than its size says", FETCH_AGAIN)
    return content


def parsed(text: bytes | str) -> Any:
    """The value of a JSON text, None of any other."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def read_settings(data: dict[str, Any]) -> Checkpoint:
    """Spaces, architecture and policy arguments, from plain values and the text that SB3 writes beside others."""
    for name in ("policy_class", "observation_space", "action_space", "policy_kwargs"):
        require(isinstance(data.get(name), dict), f"data lacks {name}")
    module, method = text_of(data["policy_class"], "__module__"), text_of(data["policy_class"], "__init__")[:200]
    other = re.match(r"(?:stable_baselines3|sb3_contrib\.common|sb3_contrib)\.(?!common)(\w+)\.policies", module)
    algorithm = OTHER_ALGORITHMS.get(other[1], other[1].upper()) if other else ""
    require(not algorithm, f"the checkpoint is of {algorithm}, not of PPO", PPO_ONLY)
    found = re.search(r"<function ([\w.<>]+)\.\w+ at ", method)
    policy = found[1] if found else "a class"
    require(module == "stable_baselines3.common.policies" and policy == "ActorCriticPolicy",
            f"the policy is {OTHER_POLICIES.get(policy, quoted(policy))} of {quoted(module)}, not MlpPolicy", PPO_ONLY)
    algorithm = "TRPO" if "cg_max_steps" in data else "A2C"  # with the same policy
    require("clip_range" in data or "n_epochs" in data, f"the checkpoint is of {algorithm}, not of PPO", PPO_ONLY)

    checkpoint = Checkpoint(
        {}, read_box(data["observation_space"], "observation_space"), read_action_space(data["action_space"]),
        *read_policy_kwargs(data["policy_kwargs"]), use_sde=data.get("use_sde", False),
        vec_normalize=data.get("_last_original_obs") is not None)
    require(type(checkpoint.use_sde) is bool and (not checkpoint.use_sde or "box" in checkpoint.action),
            "use_sde is not true or false, or true without a Box of actions", "SB3 cannot load this either")
    require(checkpoint.use_sde or not checkpoint.policy_kwargs.get("squash_output"),
            "squash_output is true, but use_sde is not", "SB3 cannot load this either")
    return checkpoint


def text_of(entry: dict[str, Any], *names: str) -> str:
    """The first of these values that is there, as text: gym, gymnasium and SB3 changed names and forms over the years.

    An array of numbers becomes "[3, 2]", and numpy's "np.int64(3)" becomes "3". What is nested or too long is "[...]".
    """
    value = next((entry[name] for name in names if entry.get(name) is not None), "")
    if isinstance(value, list) and all(isinstance(item, (int, float)) for item in value):
        value = str(value)
    text = str(value) if isinstance(value, (str, int, float)) else "[...]"
    return re.sub(r"np\.\w{1,20}\(([^()]{1,40})\)", r"\1", text) if len(text) <= MAX_SPACE else "[...]"


def numbers_of(text: str) -> list[float]:
    """Those of "2", "(4,)", "[3, 2]", "[-1.  inf]" or "[False  True]"; NaN when something else is in the text."""
    words = re.sub(r"[\[\](),]", " ", text).replace("True", "1").replace("False", "0").split()
    try:
        return [float(word) for word in words]
    except ValueError:
        return [math.nan]


def counts_of(entry: dict[str, Any], what: str, *names: str) -> list[int]:
    text = text_of(entry, *names)
    numbers = numbers_of(text)
    plain = "[[" not in text and all(0 < number < 1 << 31 and number == int(number) for number in numbers)
    require(plain, f"{what} has {names[-1]} of {quoted(text)}", PPO_ONLY)
    return [int(number) for number in numbers]


def space_type(space: dict[str, Any], what: str) -> str:
    text = text_of(space, ":type:")
    match = re.fullmatch(r"<class 'gym(?:nasium)?\.spaces\.\w+\.(\w+)'>", text)
    require(match is not None, f"{what} is {quoted(text)}, not a space of gymnasium", PPO_ONLY)
    return match[1] if match else ""


def read_box(space: dict[str, Any], what: str) -> Box:
    kind = space_type(space, what)
    require(kind == "Box", f"{what} is {kind}, not Box", PPO_ONLY)
    shape = counts_of(space, what, "_shape", "shape")
    size = math.prod(shape)
    fewest = 0 if what == "action_space" else 1
    require(fewest <= len(shape) <= 32 and size <= MAX_SPACE,
            f"{what} has {size} numbers in {len(shape)} dimensions", "flatten it, or make it smaller")
    text = text_of(space, "dtype")
    dtype = re.fullmatch(r"(?:<class ')?(?:numpy\.)?(bool|u?int(?:8|16|32|64)|float(?:16|32|64))_?(?:'>)?", text)
    require(dtype is not None, f"{what} has a dtype of {quoted(text)}")
    bounds = []
    for name, unbounded in (("low", -math.inf), ("high", math.inf)):
        text = text_of(space, f"{name}_repr", name)
        numbers = numbers_of(text.replace("...", ""))
        if len(set(numbers)) == 1:  # gymnasium shortens bounds that are all the same, and numpy long arrays
            numbers = numbers[:1] * size
        complete = len(numbers) == size and not any(map(math.isnan, numbers))
        if what == "action_space" and complete and dtype and dtype[1].startswith("float") and "[" in text:
            numbers = exact_bounds(numbers, text, dtype[1], text_of(space, ":serialized:"))
            complete = bool(numbers)
        require(what != "action_space" or (complete and "..." not in text), f"{what} has bounds that cannot be read",
                "SB3 has written them in part, or rounded")
        bounds.append(numbers if complete else [unbounded] * size)  # an observation's only tell whether it is an image
    return Box(tuple(shape), dtype[1] if dtype else "", *bounds)


def exact_bounds(printed: list[float], text: str, dtype: str, serialized: str) -> list[float]:
    """The bounds that numpy printed, by its options of that day perhaps rounded; [] where that cannot be told.

    The bytes of the array stand in the serialised pickle, whose opcodes are listed and not run. Without such a text,
    what was printed is all that there is.
    """
    if not serialized:
        return printed
    try:
        opcodes = list(pickletools.genops(base64.b64decode(serialized)))  # of a megabyte at most: 0.3 s
    except ValueError:
        return []
    bounds = numpy.array(printed, dtype)
    stored = {bytes(argument) for _, argument, _ in opcodes
              if isinstance(argument, (bytes, bytearray)) and len(argument) == bounds.nbytes}
    if bounds.tobytes() in stored:
        return [float(bound) for bound in bounds]
    digits = max([len(decimals) for decimals in re.findall(r"\.(\d*)", text)], default=0)
    rounding = 0.51 * 10.0**-digits
    arrays = [numpy.frombuffer(raw, dtype).astype(numpy.float64) for raw in stored]
    relative = rounding if "e" in text else 0.0
    with numpy.errstate(all="ignore"):  # other arrays of that size may hold any bits
        close = [array for array in arrays if numpy.isclose(array, printed, atol=rounding, rtol=relative).all()]
    return close[0].tolist() if len(close) == 1 else []


def read_action_space(space: dict[str, Any]) -> dict[str, Any]:
    kind = space_type(space, "action_space")
    if kind == "Box":
        return {"type": kind, "box": read_box(space, "action_space")}
    require(kind in ("Discrete", "MultiDiscrete", "MultiBinary"), f"action_space is {kind}",
            "Discrete, MultiDiscrete, MultiBinary and Box can be run")
    if kind == "MultiDiscrete":
        return {"type": kind, "nvec": counts_of(space, "action_space", "nvec")}
    counts = counts_of(space, "action_space", "n")
    require(len(counts) == 1, f"action_space is {kind} of {counts}, not of one number", "SB3 cannot run it either")
    return {"type": kind, "n": counts[0]}


def read_policy_kwargs(arguments: dict[str, Any]) -> tuple[dict[str, list[int]], str, dict[str, Any], dict[str, Any]]:
    """Layer sizes, activation and its arguments, and other arguments of the policy; SB3's defaults where none is."""
    net_arch, others = {"pi": [64, 64], "vf": [64, 64]}, {}
    activation: tuple[str, dict[str, Any]] = ("Tanh", {})
    require(set(arguments) != {":type:", ":serialized:"}, "policy_kwargs has no text beside what is serialised")
    for name, value in arguments.items():
        if name in UNUSED_ARGUMENTS or value in (None, FLATTEN) or (name, value) == ("features_extractor_kwargs", {}):
            continue
        if name == "net_arch":
            net_arch = read_net_arch(value)
        elif name == "activation_fn":
            activation = read_activation(text_of(arguments, name)[:300])
        else:
            require(name in PLAIN_ARGUMENTS and isinstance(value, bool),
                    f"policy_kwargs has {quoted(name)} of {quoted(value)}", "a policy with it cannot be rebuilt")
            others[name] = value
    return net_arch, *activation, others


def read_net_arch(written: Any) -> dict[str, list[int]]:
    """Layer sizes, written as {"pi": [64], "vf": [64]}, as a list of that, or as one list for both towers."""
    value = written
    if isinstance(written, str):  # the sizes are numpy's integers
        value = parsed(text_of({"net_arch": written}, "net_arch").replace("'", '"'))
    if isinstance(value, list) and any(isinstance(part, dict) for part in value):
        require(len(value) == 1, SHARED_LAYERS, "train it again with SB3 2")
        value = value[0]
    towers = value if isinstance(value, dict) else {"pi": value, "vf": value}
    require(all(isinstance(layers, list) and len(layers) <= 1000 for layers in towers.values()),
            f"policy_kwargs has a net_arch of {quoted(written)}, not lists of layer sizes")
    return {tower: counts_of(towers, "net_arch in policy_kwargs", tower) for tower in ("pi", "vf")}


def read_activation(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the arguments of a class of torch.nn, or of a functools.partial of one."""
    cls = r"<class 'torch\.nn\.modules\.\w+\.(\w+)'>"
    match = re.fullmatch(cls, text) or re.fullmatch(rf"functools\.partial\({cls}((?:, \w+=[\w.'+-]+)*)\)", text)
    name = match[1] if match and match[1] in ACTIVATIONS else ""
    arguments = {key: parsed(written.lower().replace("'", '"')) for key, written in re.findall(r"(\w+)=([^,)]+)", text)}
    plain = all(key in ("inplace", *ACTIVATIONS.get(name, "").split())
                and (isinstance(value, (int, float)) or (key == "approximate" and value in ("none", "tanh")))
                for key, value in arguments.items())
    require(bool(name) and plain, f"policy_kwargs has an activation_fn of {quoted(text)}",
            f"known are {', '.join(ACTIVATIONS)}, and functools.partial of one with named plain numbers")
    return name, arguments


def tensor_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """The tensors that SB3 makes for these settings (stable_baselines3.common.policies)."""
    width, outputs = math.prod(checkpoint.observation.shape), sum(choices_of(checkpoint.action))
    shapes: dict[str, tuple[int, ...]] = {}
    if checkpoint.use_sde:
        latent = [width, *checkpoint.net_arch["pi"]][-1]
        shapes["log_std"] = (latent, outputs if checkpoint.policy_kwargs.get("full_std", True) else 1)
    elif "box" in checkpoint.action:
        shapes["log_std"] = (outputs,)
    for tower, net, head, heads in (("pi", "policy_net", "action_net", outputs), ("vf", "value_net", "value_net", 1)):
        sizes = [width, *checkpoint.net_arch[tower], heads]
        # Every other module of a tower is its activation, which has no weights.
        names = [f"mlp_extractor.{net}.{2 * number}" for number in range(len(sizes) - 2)]
        for number, name in enumerate([*names, head]):
            shapes[f"{name}.weight"] = (sizes[number + 1], sizes[number])
            shapes[f"{name}.bias"] = (sizes[number + 1],)
    return shapes


def choices_of(action: dict[str, Any]) -> list[int]:
    """The outputs of the policy for each part of an action."""
    if "box" in action:
        return [math.prod(action["box"].shape)]
    return list(action["nvec"]) if "nvec" in action else [action["n"]]


class SavedTensor(NamedTuple):
    """A tensor as the pickle describes it; offset and strides count numbers, not bytes."""

    storage: tuple[str, str, int]  # the type and the record of its numbers, and how many they are
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


STORAGES = {"torch FloatStorage": "<f4", "torch DoubleStorage": "<f8", "torch HalfStorage": "<f2"}


def read_policy(policy: bytes, checkpoint: Checkpoint) -> Checkpoint:
    """Complete the checkpoint with the tensors of policy.pth, which must be those of the network that `data` names."""
    archive = open_zip(policy, "policy.pth")
    members = archive.infolist()
    # zipfile and torch find the directory in different ways, and an archive can be made to show each another one.
    require(b"PK" not in archive.comment and len({member.filename.lower() for member in members}) == len(members) > 0
            and not min(member.header_offset for member in members),
            "policy.pth is an archive that torch could read in another way")
    root = members[0].filename.partition("/")[0]
    order = f"{root}/byteorder"
    require(order not in archive.namelist() or read_member(archive, order, 99) == b"little",
            "policy.pth was written on a big-endian machine", "save it again on a little-endian one")
    try:
        saved = read_pickle(read_member(archive, f"{root}/data.pkl", MAX_PICKLE_BYTES))
    except (ValueError, TypeError, KeyError, IndexError) as error:  # an opcode found something else than it needs
        raise CheckpointRejected("policy.pth has a pickle that torch.save did not write", FETCH_AGAIN) from error
    require(type(saved) is dict and all(type(tensor) is SavedTensor for tensor in saved.values()),
            "policy.pth is not a dictionary of tensors")
    compare_shapes(saved, tensor_shapes(checkpoint))
    records: dict[str, bytes] = {}
    for tensor in saved.values():
        record = tensor.storage[1]
        if record not in records:  # tensors may share one
            left = MAX_CHECKPOINT_BYTES - sum(map(len, records.values()))
            records[record] = read_member(archive, f"{root}/data/{record}", left)
    return checkpoint._replace(tensors={name: tensor_of(name, tensor, records) for name, tensor in saved.items()})


def tensor_of(name: str, saved: SavedTensor, records: dict[str, bytes]) -> Array:
    (dtype, record, size), offset, shape, strides = saved
    width = numpy.dtype(dtype).itemsize
    require(len(records[record]) == width * size, f"policy.pth has a record of another size for {name}", FETCH_AGAIN)
    try:  # numpy refuses what reaches beyond the record
        view: Array = numpy.ndarray(shape, dtype, records[record], width * offset, [width * s for s in strides])
    except (ValueError, OverflowError) as error:
        raise CheckpointRejected(f"policy.pth has {name} beyond the end of its record", FETCH_AGAIN) from error
    with numpy.errstate(over="ignore"):  # float64 beyond the range of float32
        tensor = numpy.array(view, dtype=numpy.float32, order="C")
    require(bool(numpy.isfinite(tensor).all()), f"policy.pth has NaN or infinite weights in {name}",
            "the training has diverged: take an earlier checkpoint")
    return tensor


def read_pickle(pickled: bytes) -> Any:
    """What a pickle of torch.save describes, out of numbers, texts, tuples, dictionaries and SavedTensor alone.

    Stands in for an unpickler: it knows the opcodes that a dictionary of tensors needs, and calls nothing. (That of C
    makes room for as many objects as a pickle claims, and hashes tuples of tuples for ever.)
    """
    stack: list[Any] = []
    marks: list[int] = []  # heights of the stack
    memo: dict[Any, Any] = {}
    for count, (opcode, argument, _) in enumerate(pickletools.genops(pickled)):
        require(count < MAX_OPCODES, f"policy.pth has a pickle of more than {MAX_OPCODES} opcodes")
        match opcode.name:
            case "BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1":
                stack.append(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE":  # requires_grad, of no use here
                stack.append(None)
            case "GLOBAL":
                known = (*STORAGES, "collections OrderedDict", "torch._utils _rebuild_tensor_v2")
                require(argument in known, f"policy.pth asks for {quoted(argument)}",
                        "tensors of float32, float64 and float16 can be read, and nothing is run")
                stack.append(argument)
            case "EMPTY_TUPLE" | "EMPTY_DICT":
                stack.append(() if opcode.name == "EMPTY_TUPLE" else {})
            case "MARK":
                marks.append(len(stack))
            case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                start = marks.pop() if opcode.name == "TUPLE" else len(stack) - int(opcode.name[-1])
                stack[start:] = [tuple(stack[start:])]
            case "SETITEM" | "SETITEMS":
                start = marks.pop() if opcode.name == "SETITEMS" else len(stack) - 2
                items = stack[start:]
                del stack[start:]
                add_items(stack[-1], items)
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "BINPERSID":
                _, storage, record, _, size = stack.pop()
                stack.append((STORAGES[storage], record, size))
            case "REDUCE":
                arguments = stack.pop()
                stack.append(result_of(stack.pop(), arguments))
            case "BUILD":  # attributes of a dictionary: the versions of torch's modules
                stack.pop()
                add_items(stack[-1], [])
            case "STOP":
                return stack.pop()
            case other if other != "PROTO":
                raise ValueError(f"opcode {other}")
    raise ValueError("a pickle without an end")


def add_items(target: Any, items: list[Any]) -> None:
    if type(target) is not dict or not all(type(key) is str for key in items[::2]):
        raise ValueError("items without a dictionary, or without names")
    target.update(zip(items[::2], items[1::2], strict=True))


def result_of(function: Any, arguments: Any) -> Any:
    """What a call of one of the two functions gives that a dictionary of tensors needs."""
    if function == "collections OrderedDict":
        return {}
    (dtype, record, size), offset, shape, strides, *_ = arguments
    plain = type(dtype) is str and type(record) is str and len(shape) == len(strides) <= 32
    counted = all(type(number) is int and number >= 0 for number in (size, offset, *shape, *strides))
    if function != "torch._utils _rebuild_tensor_v2" or not plain or not counted:
        raise ValueError("a call of no function, or a tensor of an odd shape")
    return SavedTensor((dtype, record, size), offset, tuple(shape), tuple(strides))


def compare_shapes(saved: dict[str, SavedTensor], shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuse the first tensor that is not of the network that `data` names."""
    require(not any(name.startswith("mlp_extractor.shared_net.") for name in saved), SHARED_LAYERS,
            "train it again with SB3 2")
    for name in [*shapes, *saved]:
        found, expected = saved[name].shape if name in saved else "missing", shapes.get(name, "missing")
        require(found == expected, f"{quoted(name)} is {found} in policy.pth, and {expected} in the network of data",
                "the policy is not SB3's own, or its settings were changed")
    parameters = sum(map(math.prod, shapes.values()))
    require(parameters <= MAX_CHECKPOINT_BYTES // 4, f"the policy has {parameters} parameters, too many for its file")


# --- Observations: from the command line or a file of any length, checked before the NPU is touched


def chunk_rows(shape: tuple[int, ...]) -> int:
    """Rows of a file in one pass: a fixed number, so that memory does not grow with the file."""
    return max(1, min(CHUNK_ROWS, CHUNK_BYTES // (4 * math.prod(shape))))


def read_observations(args: argparse.Namespace, shape: tuple[int, ...], worker: Worker) -> Array:
    """The observations that the command line names, (n, *shape) and all finite; those of a .npy are mapped."""
    name, first = "--observation", 0
    if args.observations is not None:
        name = shown(args.observations, typed=args.observations)
        rows = read_rows(args.observations, name, shape)
        index, of = map(int, (args.shard or "1/1").split("/"))
        first, end = (index - 1) * len(rows) // of, index * len(rows) // of
        if first == end:
            raise UsageError(f"--shard {args.shard} of {len(rows)} rows is empty", "use fewer slices")
        worker.facts(rows=end - first, observations={
            "file": name, "dtype": str(rows.dtype), "shard": f"{index}/{of}", "first_row": first, "rows": end - first,
            "total_rows": len(rows), "sha256_float32": None})
        worker.log("[verify]  observations file={observations[file]} dtype={observations[dtype]} "
                   "shard={observations[shard]} first_row={observations[first_row]} rows={observations[rows]} "
                   "total_rows={observations[total_rows]}")
        rows = rows[first:end]
    elif args.observation is not None:
        rows = given_rows(args.observation, shape)
    else:
        rows = numpy.zeros((1, *shape))
    for start in range(0, len(rows), chunk_rows(shape)):
        finite = numpy.isfinite(as_float32(rows[start:start + chunk_rows(shape)])).reshape(-1, math.prod(shape))
        if not finite.all():
            row, column = numpy.argwhere(~finite)[0]
            raise UsageError(f"{name}: row {first + start + row}, column {column} is NaN, infinite or beyond float32",
                             "rows and columns count from 0; mend or remove it")
    worker.facts(rows=len(rows))
    return rows


def given_rows(given: Any, shape: tuple[int, ...]) -> Array:
    """--observation as an array of one or several observations."""
    example = f"one observation: --observation '{json.dumps(numpy.zeros(shape).tolist())[:100]}'"
    try:
        rows = numpy.array(given)
    except ValueError as error:
        raise UsageError("--observation has rows of different lengths", example) from error
    if rows.dtype.kind not in "iuf" or not rows.size:
        raise UsageError("--observation holds something that is not a number", example)
    if rows.shape == shape:
        rows = rows[None]
    if rows.shape[1:] != shape:
        raise UsageError(f"--observation has the shape {list(rows.shape)}, expected {list(shape)}", example)
    return rows


def read_rows(path: str, name: str, shape: tuple[int, ...]) -> Array:
    """The rows of a file: a .npy mapped, a .csv read."""
    table_hint = 'write numbers alone: table.to_csv("rows.csv", index=False, header=False) for a pandas table'
    suffix = Path(path).suffix.lower()
    if suffix not in (".npy", ".csv"):
        raise UsageError(f"{name} is not a .npy or .csv file", f'{table_hint}; or numpy.save("rows.npy", rows)')
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise UsageError(f"{name} is not a regular file", "name a file of observations")
        if suffix == ".npy":
            rows = numpy.load(path, mmap_mode="r", allow_pickle=False)
        else:
            with open(path, encoding="utf-8-sig") as text, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of an empty file, which is refused below
                rows = numpy.loadtxt(text, delimiter=",", comments=None, quotechar='"', ndmin=2)
    except Failure:
        raise
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror or error}", "name a file of observations") from error
    except Exception as error:  # the readers of numpy on a file that may hold anything
        # numpy counts columns from 1, and rows from 0; but the rows of a changing width from 1
        fault = re.sub(r"(column |row (?=\d+;))(\d+).*", lambda found: f"{found[1]}{int(found[2]) - 1}",
                       first_line(error))
        raise UsageError(f"{name}: {fault}", table_hint if suffix == ".csv" else
                         "it is damaged, or not a .npy file of numbers") from error
    if not isinstance(rows, numpy.ndarray):
        raise UsageError(f"{name} is a .npz file", 'write one array: numpy.save("rows.npy", rows)')
    if rows.ndim == 0 or not rows.size:
        raise UsageError(f"{name} holds no rows", "one observation a row")
    if rows.dtype not in (numpy.float32, numpy.float64):
        raise UsageError(f"{name} holds {rows.dtype}, expected float32 or float64", "convert it with numpy's astype")
    if suffix == ".csv" and rows.shape[1] > 1 and (rows[0] == numpy.arange(rows.shape[1])).all():
        raise UsageError(f"{name}: row 0 is 0, 1, 2, ...: a header that pandas wrote, not an observation", table_hint)
    if suffix == ".csv" and rows.shape[1] == math.prod(shape):
        rows = rows.reshape(-1, *shape)
    if rows.shape[1:] != shape:
        raise UsageError(f"{name} has the shape {list(rows.shape)}, expected {['N', *shape]}".replace("'", ""),
                         "one observation a row")
    return rows


def as_float32(rows: Array) -> Array:
    """A copy of these rows of its own, as the policy takes them."""
    with numpy.errstate(over="ignore"):
        return numpy.array(rows, dtype=numpy.float32, order="C")


# --- Stage npu

# Set before torch is imported. The first are the user's to choose, the others are not.
DEFAULT_ENVIRONMENT = {
    "ASCEND_RT_VISIBLE_DEVICES": "0",
    # With the queue on, torch_npu silently drops every operator after a failed launch and hands back stale memory.
    "TASK_QUEUE_ENABLE": "0",
    # CANN's operator compiler starts when an operator needs it, not before: it is slow, and fails for its own reasons.
    "ACL_OP_INIT_MODE": "1",
}
FORCED_ENVIRONMENT = {
    "TORCH_NPU_FALLBACK_CPU_DISABLE": "1",  # an operator without an NPU kernel is an error (recent torch_npu)
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # torch_npu is imported below, where its errors can be explained
    "KINETO_LOG_LEVEL": "99",  # of torch's profiler, which counts the kernels and would talk about itself
}
REMOVED_ENVIRONMENT = (
    # Each would hide the line that tells of a CPU fallback; torch_npu warns in rank 0 alone.
    "TORCH_NPU_WARNING_DISABLE", "TORCH_NPU_DISABLED_WARNING", "TORCH_CPP_LOG_LEVEL", "RANK",
    # Together they make infinity the largest number and NaN 0, where nothing can see them.
    "INF_NAN_MODE_ENABLE", "INF_NAN_MODE_FORCE_DISABLE",
)


NPU_LINES = """
[npu]     is_available={npu_available} device={npu_device} name={npu_device_name}
[npu]     device_count={device_count} CANN={versions[cann]} npu-smi={versions[npu_smi]}
[npu]     driver={versions[driver]} stable_baselines3={versions[stable_baselines3]} \
gymnasium={versions[gymnasium]} numpy={versions[numpy]} cloudpickle={versions[cloudpickle]}
[npu]     visible_devices={visible_devices} device_nodes={device_nodes}
[npu]     environment={environment}
[npu]     determinism={determinism}
"""


def take_npu(worker: Worker) -> None:
    """Import torch and torch_npu, take npu:0, and prove with a real operation that it answers."""
    visible = prepare_environment(worker)
    try:
        import torch_npu  # and with it torch
    except Exception as error:  # wheels that are not a pair fail in many ways
        raise NpuUnavailable(f"torch_npu cannot be imported: {first_line(error)}",
                             npu_hint(f"{error} {error.__cause__}")) from error
    simulator = simulator_version()
    versions = {**worker.result["versions"], "torch": torch.__version__, "torch_npu": torch_npu.__version__,
                **{name: package_version(name) for name in PACKAGES}}
    worker.facts(simulated=simulator is not None, simulator=simulator and f"cannsim {simulator}", versions=versions)
    worker.log("[npu]     torch={versions[torch]} torch_npu={versions[torch_npu]}")
    npu_smi = worker.wait_for_go("before the device")
    worker.enter("npu")
    worker.facts(npu_available=torch.npu.is_available())
    if not worker.result["npu_available"]:
        hint = no_device_hint(visible, npu_smi["error"])
        if simulator:
            hint += "; the simulator has one device, 0: export CANNSIM_DEVICES=4 gives it four"
        raise NpuUnavailable("torch.npu.is_available() is False: no device", hint)
    try:
        determinism = set_device()
        ones = torch.ones(4, device=DEVICE)
        answer = (ones + ones).cpu().tolist()
        torch.npu.synchronize()
        determinism["device"] = device_is_deterministic()  # which torch_npu sets with the first operation
        name = torch.npu.get_device_name(0)
        cann = torch_npu.npu.utils.get_cann_version("CANN") or None
    except Exception as error:  # torch, torch_npu and CANN on a device and an environment that may be at fault
        raise NpuUnavailable(f"{DEVICE} cannot be used: {first_line(error)}", npu_hint(str(error))) from error
    if answer != [2.0] * 4 or str(ones.device) != DEVICE or not name:
        raise NpuUnavailable(f"1 + 1 on {ones.device} {name!r} gave {answer}", "the device or its driver is at fault")
    versions.update(cann=cann, npu_smi=npu_smi["npu_smi"], driver=npu_smi["driver"])
    worker.facts(npu_device=DEVICE, npu_device_name=name + (" (simulated)" if simulator else ""), versions=versions,
                 device_count=torch.npu.device_count(), device_nodes=device_nodes(), determinism=determinism)
    worker.log(NPU_LINES)
    if simulator:
        worker.log("[npu]     SIMULATED by {simulator}: nothing in this run touched a physical NPU")


def prepare_environment(worker: Worker) -> str:
    """Set what torch and torch_npu read when they are imported. Returns the list of visible devices."""
    for name, value in DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.update(FORCED_ENVIRONMENT)
    for name in REMOVED_ENVIRONMENT:
        os.environ.pop(name, None)
    try:
        os.getcwd()
    except FileNotFoundError:
        os.chdir("/")  # libraries fail in odd ways in a directory that was deleted
    visible = os.environ["ASCEND_RT_VISIBLE_DEVICES"]
    worker.facts(environment={name: os.environ[name] for name in (*DEFAULT_ENVIRONMENT, *FORCED_ENVIRONMENT)},
                 visible_devices=visible)
    # CANN reports no device at all, and no reason, for a list that is empty, repeats or descends.
    numbers = [int(part) for part in visible.split(",")] if re.fullmatch("[0-9]{1,5}(,[0-9]{1,5})*", visible) else []
    if not numbers or numbers != sorted(set(numbers)):
        raise NpuUnavailable(f"ASCEND_RT_VISIBLE_DEVICES={visible[:60]!r} is not an ascending list of device numbers",
                             "export ASCEND_RT_VISIBLE_DEVICES=0, or unset it")
    return visible


def set_device() -> dict[str, Any]:
    """Take npu:0 and make it deterministic. Returns the settings as they are read back."""
    torch.npu.set_device(0)
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms, but imports no compiler
    torch.utils.deterministic.fill_uninitialized_memory = False  # a fill for every allocation, of use to bugs only
    # On torch_npu 2.9.0, setting even what is set may start CANN's operator compiler. The option for convolutions is
    # left alone for that reason: an MLP has none.
    if not torch.npu.is_jit_compile_false():
        torch.npu.set_compile_mode(jit_compile=False)
    if torch.npu.matmul.allow_hf32:
        torch.npu.matmul.allow_hf32 = False
    # One check that the outputs are finite replaces the twenty kernels with which torch validates a distribution.
    torch.distributions.Distribution.set_default_validate_args(False)
    settings = {"deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
                "jit_compile": not torch.npu.is_jit_compile_false(), "allow_hf32_matmul": torch.npu.matmul.allow_hf32}
    if settings != {"deterministic_algorithms": True, "jit_compile": False, "allow_hf32_matmul": False}:
        raise RuntimeError(f"torch_npu does not keep its settings: {settings}")
    return {**settings, "allow_hf32_conv": torch.npu.conv.allow_hf32}


# What mends a failure of torch_npu, CANN or the driver, by the text that users meet. The first that is found counts.
NPU_HINTS = (
    (r"No module named '?torch", "torch and torch_npu come as a pair of one version that fits your CANN, as in its "
     "image: python3 -m pip install torch==2.9.0 torch_npu==2.9.0"),
    (r"No module named '?yaml", "torch_npu 2.9 needs PyYAML and does not say so: python3 -m pip install pyyaml"),
    (r"libascend_hal\.so|lib(drv|c_sec|mmpa)\w*\.so", "the driver's libraries are out of reach: in a container, add "
     "-v /usr/local/Ascend/driver:/usr/local/Ascend/driver; then source /usr/local/Ascend/driver/bin/setenv.bash"),
    (r"static TLS block", "the named library must be loaded first: start again with LD_PRELOAD=/path/to/it"),
    (r"\.so[.\d]*: cannot open", "CANN is not set up in this shell: source "
     "/usr/local/Ascend/ascend-toolkit/set_env.sh (CANN 8.5 and later: /usr/local/Ascend/cann/set_env.sh)"),
    (r"undefined symbol|version `", "torch and torch_npu are not a pair: python3 -m pip install torch_npu=={torch}"),
    (r"Two accelerators", "this torch is a CUDA build and sees a GPU: install the CPU build of torch {torch}"),
    (r"kernel package is installed", "CANN's operator package for this chip is missing, or of another version: install "
     "the kernels package of your CANN for your chip (Ascend-cann-kernels-910b for a 910B), or use the CANN image"),
    (r"\b561103\b", "CANN and the driver do not match: update the older one; npu-smi info shows the driver's version"),
    (r"ACL_PRECISION_MODE|\b500001\b|[Nn]um[Pp]y [12]|numpy\.core\.multiarray|No module named",
     "CANN's operator compiler lacks Python packages, or meets a numpy that is too new: "
     "python3 -m pip install 'numpy<2' decorator attrs psutil scipy sympy cffi pyyaml pathlib2 protobuf"),
    (r"EL0004|\b207001\b|out of memory", "the device's memory is full: npu-smi info lists the processes that hold it"),
    (r"\b507008\b|[Uu]nsupported soc", "this CANN or torch_npu does not know the chip: update them"),
    (r"\b(107001|207004)\b|(?i:visible.devices?)",
     "ASCEND_RT_VISIBLE_DEVICES names no device of this machine: export ASCEND_RT_VISIBLE_DEVICES=0"),
    (r"-8005\b", "this user may not use the driver: sudo usermod -aG HwHiAiUser $USER and log in again; after a driver "
     "upgrade, reboot"),
    (r"-8020\b|\b507899\b|EL0005", "another container holds the device, or this one may not open it: stop the other, "
     "or start this one with --device /dev/davinci0"),
    (r"\b507033\b|E30006", "the device does not start: npu-smi info shows its health; after a driver upgrade, reboot"),
)
DEVICE_FILES = ("davinci_manager", "devmm_svm", "hisi_hdc")


def npu_hint(text: str) -> str:
    """What to do about an error of torch_npu, CANN or the driver, by its text."""
    text = re.sub(r"PID: ?\d+", "PID", text)  # a number that is not an error code
    hint = next((hint for pattern, hint in NPU_HINTS if re.search(pattern, text)), DEVICE_HINT)
    torch_version = (package_version("torch") or "of its version").partition("+")[0]
    return hint.replace("{torch}", torch_version)


def no_device_hint(visible: str, driver_error: str, dev: Path = Path("/dev")) -> str:
    """Why torch_npu counts no device: it only counts, and gives no reason."""
    if driver_error:
        return npu_hint(driver_error)
    devices = sorted(path.name for path in dev.glob("davinci[0-9]*"))
    options = " ".join(f"--device /dev/{name}" for name in ((devices or ["davinci0"])[0], *DEVICE_FILES))
    if not devices:
        hint = f"there is no /dev/davinci*: in a container, start it with {options}; on the host, npu-smi info must " \
               "list a device"
    elif missing := [name for name in DEVICE_FILES if not (dev / name).exists()]:
        hint = f"this container lacks /dev/{missing[0]}: start it with {options}"
    elif not all(os.access(dev / name, os.R_OK | os.W_OK) for name in (*devices, *DEVICE_FILES)):
        hint = npu_hint("-8005")
    else:
        hint = (f"devices here: {len(devices)}, and ASCEND_RT_VISIBLE_DEVICES={visible} names another: they count from "
                "0, whatever npu-smi info calls them: export ASCEND_RT_VISIBLE_DEVICES=0")
    return hint


def simulator_version() -> str | None:
    """The version of the simulated CANN runtime, None on a real one: it names itself by an exported symbol."""
    try:
        function = ctypes.CDLL("libascendcl.so").cannsim_version  # of the library that torch_npu has loaded
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_char_p
    return str(function().decode())


def device_is_deterministic() -> bool | None:
    """Whether the device was told to compute deterministically, None when it does not say.

    torch_npu since 2.13 (and later builds of 2.9 to 2.12) leaves it off for CANN before 8.5, whatever torch is set to.
    """
    value = ctypes.c_int64()
    try:
        failed = ctypes.CDLL("libascendcl.so").aclrtCtxGetSysParamOpt(0, ctypes.byref(value))  # ACL_OPT_DETERMINISTIC
    except (OSError, AttributeError):
        return None
    return None if failed else bool(value.value)


def package_version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def device_nodes() -> list[str]:
    """The /dev/davinci* that this process holds open: what the kernel knows of it and the NPU."""
    links = {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
    return sorted(link for link in links if link.startswith("/dev/davinci"))


# --- Stage load


MODEL_LINES = """
[load]    PPO.load elapsed={load_s:.4f}s device={model_device}
[model]   policy_class={policy_class} num_params={num_params}
[model]   param_devices={param_devices} all_params_on_npu={all_params_on_npu}
"""


def load(checkpoint: Checkpoint, worker: Worker) -> Any:
    """PPO.load onto npu:0; every parameter there, equal to the file's bit for bit. Returns the policy."""
    try:
        from stable_baselines3 import PPO
    except Exception as error:  # packages that do not fit each other fail in many ways
        raise LoadFailed(f"stable_baselines3 cannot be imported: {first_line(error)}",
                         "python3 -m pip install -r requirements.txt") from error
    worker.enter("load")
    started = time.monotonic()
    objects = custom_objects(checkpoint)
    try:
        with warnings.catch_warnings():
            # advice for training speed: here the NPU is the point
            warnings.filterwarnings("ignore", message="You are trying to run PPO on the GPU")
            archive = clean_archive(checkpoint, objects)
            policy = PPO.load(archive, device=DEVICE, custom_objects=objects).policy
        torch.npu.synchronize()
    except Exception as error:  # of SB3, or of the device
        raise LoadFailed(f"PPO.load: {type(error).__name__}: {first_line(error)}",
                         f"this SB3 does not fit, or the device failed: {DEVICE_HINT}") from error
    policy.set_training_mode(False)
    policy.requires_grad_(False)
    tensors = (*policy.parameters(), *policy.buffers(), *policy.state_dict().values())
    devices = sorted({str(tensor.device) for tensor in tensors})
    worker.facts(load_s=round(time.monotonic() - started, 6), model_device=str(policy.device),
                 policy_class=type(policy).__name__, num_params=sum(p.numel() for p in policy.parameters()),
                 param_devices=devices, all_params_on_npu=devices == [DEVICE])
    worker.log(MODEL_LINES)
    if devices != [DEVICE]:
        raise LoadFailed(f"parameters are on {devices}, not on {DEVICE} alone", "this is a fault of SB3 or torch_npu")
    differing = differing_tensors(policy, checkpoint)
    worker.facts(params_match_checkpoint=not differing)
    worker.log("[model]   params_match_checkpoint={params_match_checkpoint}")
    if differing:
        raise LoadFailed(f"on {DEVICE}, these differ from the checkpoint: {', '.join(differing)[:200]}",
                         "the copy to the device is at fault")
    return policy


class NoOptimizer:
    """In the optimizer's place: a run trains nothing, and torch.optim would import torch's compiler for a second."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def load_state_dict(self, *_: Any, **__: Any) -> None:
        pass


def custom_objects(checkpoint: Checkpoint) -> dict[str, Any]:
    """What PPO.load is to make the model of: the values that the reader took from the checkpoint."""
    import gymnasium.spaces
    from stable_baselines3.common.policies import ActorCriticPolicy

    def box(description: Box) -> gymnasium.spaces.Box:
        dtype = numpy.dtype(description.dtype)
        bounds = numpy.array([description.low, description.high])
        if dtype.kind in "iu":
            bounds = numpy.clip(bounds, numpy.iinfo(dtype).min, numpy.iinfo(dtype).max)  # infinite: not known
        low, high = bounds.astype(dtype).reshape(2, *description.shape)
        return gymnasium.spaces.Box(low, high, description.shape, dtype.type)

    def activation() -> Any:
        return getattr(torch.nn, checkpoint.activation)(**checkpoint.activation_kwargs)

    action = checkpoint.action
    if "box" in action:
        action_space: Any = box(action["box"])
    else:
        action_space = getattr(gymnasium.spaces, action["type"])(action.get("n") or action["nvec"])
    return {
        "policy_class": ActorCriticPolicy,
        # without the orthogonal initialisation: slow, and overwritten with the file's weights at once
        "policy_kwargs": {**checkpoint.policy_kwargs, "net_arch": checkpoint.net_arch, "activation_fn": activation,
                          "ortho_init": False, "optimizer_class": NoOptimizer},
        "observation_space": box(checkpoint.observation), "action_space": action_space,
        "use_sde": checkpoint.use_sde, "learning_rate": LEARNING_RATE, "lr_schedule": lambda _: LEARNING_RATE,
        "clip_range": CLIP_RANGE,
        "n_steps": 1, "n_envs": 1,  # they size a rollout buffer that no forward needs
    }


def clean_archive(checkpoint: Checkpoint, objects: dict[str, Any]) -> io.BytesIO:
    """An archive as PPO.save writes it, made of values alone: neither torch nor SB3 sees a byte of the user's file."""
    weights = {name: torch.from_numpy(array) for name, array in checkpoint.tensors.items()}
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as members:
        members.writestr("data", json.dumps(dict.fromkeys(objects)))
        for name, content in (("policy.pth", weights), ("policy.optimizer.pth", {})):
            buffer = io.BytesIO()
            torch.save(content, buffer)
            members.writestr(name, buffer.getvalue())
    archive.seek(0)
    return archive


def differing_tensors(policy: Any, checkpoint: Checkpoint) -> list[str]:
    """The tensors that are not on the device, bit for bit, what the checkpoint says."""
    saved, tensors = checkpoint.tensors, policy.state_dict()
    return sorted(set(tensors) ^ set(saved)) or [
        name for name, tensor in tensors.items() if tensor.cpu().numpy().tobytes() != saved[name].tobytes()]


# --- Stage forward


FORWARD_LINES = """
[forward] elapsed={forward_s:.4f}s (npu-synchronized)
[forward] obs={observation} shape={shape} dtype=torch.float32 device={input_device}
[forward] action={action} {of[action]}
[forward] value={value} {of[value]}
[forward] log_prob={log_prob} {of[log_prob]}
[forward] probs={probs} logits={logits} entropy={entropy}
[forward] mean={mean} std={std} entropy={entropy}
[forward] env_action={env_action} {of[env_action]}
[forward] all_outputs_on_npu={all_outputs_on_npu}
[forward] bitwise_repeatable={bitwise_repeatable} rows={repeated_rows}
[forward] inputs_match_host={inputs_match_host} params_match_after_forward={params_match_after_forward}
[forward] kernels={kernels}
[forward] observations sha256_float32={observations[sha256_float32]}
"""
ONLY_WITH = ("probs", "mean", "env_action", "observations")  # lines that begin with these are not in every run


def forward(args: argparse.Namespace, checkpoint: Checkpoint, observations: Array, passes: Passes,
            worker: Worker) -> None:
    """One deterministic pass over the observations on npu:0; the first chunk, mostly all of them, twice."""
    comparison = Comparison(checkpoint, args.tolerance)
    file = OutputsFile(worker.outputs_fd, len(observations)) if worker.outputs_fd is not None else None
    digest, elapsed = hashlib.sha256(), 0.0
    step = chunk_rows(observations.shape[1:]) if file else len(observations)
    for start in range(0, len(observations), step):
        chunk = as_float32(observations[start:start + step])
        digest.update(chunk.tobytes())
        joined = passes.run(chunk, profiled=start == 0)
        elapsed += passes.seconds
        outputs = joined.astype(passes.row_type)
        if start == 0:
            if passes.run(chunk).tobytes() != joined.tobytes():
                raise ForwardFailed("two passes over the same observations differ",
                                    "the device or a kernel is at fault")
            worker.facts(bitwise_repeatable=True, repeated_rows=len(chunk), **shown_rows(chunk, outputs))
        comparison.add(chunk, outputs)
        if file:
            file.append(outputs)
        worker.send("progress", rows=start + len(chunk))
    if file:
        worker.enter("forward", at_least_s=None)  # a slow disk is not a slow device
        worker.send("outputs", sha256=file.close())
        worker.facts(observations={**worker.result["observations"], "sha256_float32": digest.hexdigest()})
    worker.enter("forward")
    changed = differing_tensors(passes.policy, checkpoint)
    for output in passes.facts["outputs"].values():
        output["shape"][0] = len(observations)
    worker.facts(forward_s=round(elapsed, 6), params_match_after_forward=not changed, **passes.facts)
    log_forward(worker)
    if changed:
        raise ForwardFailed(f"weights changed on the device during the run: {', '.join(changed)[:200]}",
                            "its memory is at fault, or another process writes to it")
    worker.facts(reference=comparison.figures())
    log_reference(worker)
    comparison.judge()
    if args.sha256 == CHECKPOINT_SHA256 and len(observations) == 1 and not observations.any():
        compare_with_published(Comparison(checkpoint, args.tolerance), outputs, worker)


def shown_rows(chunk: Array, outputs: Array) -> dict[str, Any]:
    """The rows that the evidence shows: the first, as far as a person reads them; a row that is too wide is cut."""
    arrays = {"observation": chunk, **{name: outputs[name] for name in outputs.dtype.names or ()}}
    widest = max(array[0].size for array in arrays.values())
    count = min(SHOWN_ROWS, max(1, SHOWN_NUMBERS // widest))
    shown_of = {}
    for name, array in arrays.items():
        rows = array[:count]
        if array[0].size > SHOWN_NUMBERS:
            rows = rows.reshape(1, -1)[:, :SHOWN_NUMBERS]
        shown_of[name] = rows.tolist()
    return shown_of


def log_forward(worker: Worker) -> None:
    result = worker.result
    kinds = {name: f"shape={tuple(output['shape'])} dtype={output['dtype']} device={output['device']}"
             for name, output in result["outputs"].items()}
    lines = []
    for line in FORWARD_LINES.strip().splitlines():
        _, name, *_ = re.split("[ =]", line)
        if name not in ONLY_WITH or name in result:
            lines.append(line)
    worker.log("\n".join(lines), entropy=result.get("entropy"), of=kinds,
               shape=(result["rows"], *result["observation_shape"]))


class Passes:
    """Passes of observations through the policy on npu:0, each of them checked."""

    def __init__(self, policy: Any) -> None:
        self.policy, self.device = policy, torch.device(DEVICE)
        self.seconds = 0.0  # of the last pass, until its outputs were on the host
        self.facts: dict[str, Any] = {}  # what the evidence says of every pass, learnt in the profiled one
        self.joined_type: Any = None  # of a row of outputs, with
        self.row_type: Any = None  # integers where they are; see row_types
        # The bounds of a Box of actions go to the device before a pass: nothing crosses the bus within one.
        space = policy.action_space
        self.bounds = [torch.as_tensor(bound, dtype=torch.float32).to(DEVICE)
                       for bound in (space.low, space.high)] if hasattr(space, "low") else []

    def run(self, chunk: Array, profiled: bool = False) -> Array:
        """One pass over float32 observations (n, *shape): three copies and three synchronisations.

        Returns a structured array (n,) of float32 with a field for each output. Raises ForwardFailed unless all of it
        was on the device, and all that it gives is finite.
        """
        with torch.inference_mode():
            started = time.monotonic()
            observations = torch.from_numpy(chunk).to(self.device)
            profile = torch.autograd.profiler.profile(use_cpu=True) if profiled else None
            with profile or contextlib.nullcontext():
                outputs = policy_outputs(self.policy, observations, self.bounds)
                joined = side_by_side(outputs)
            if self.joined_type is None:
                self.joined_type, self.row_type = row_types(outputs)
            rows = to_host(joined, self.joined_type)  # waits for the device
            self.seconds = time.monotonic() - started
            inputs_match = observations.cpu().numpy().tobytes() == chunk.tobytes()
        devices = {tensor.device for tensor in outputs.values()}
        if observations.device != self.device or devices != {self.device}:
            raise ForwardFailed(f"input on {observations.device}, outputs on {', '.join(map(str, devices))}",
                                f"not all on {DEVICE}: this is a fault of SB3 or torch_npu")
        if not inputs_match:
            raise ForwardFailed("observations read back from the device are not those that were sent",
                                "the copy to the device, or its memory, is at fault")
        if profile:
            self.facts = {
                "input_device": str(observations.device), "output_device": str(devices.pop()),
                "all_outputs_on_npu": True, "inputs_match_host": inputs_match,
                "kernels": kernels_of(profile.function_events),
                "outputs": {name: {"dtype": str(tensor.dtype), "shape": list(tensor.shape),
                                   "device": str(tensor.device)} for name, tensor in outputs.items()}}
        return rows


def policy_outputs(policy: Any, observations: Tensor, bounds: list[Tensor]) -> dict[str, Tensor]:
    """Everything that one deterministic pass gives, as tensors on the device of `observations`.

    For n observations: action (n, *action shape), value (n, 1), log_prob (n,), entropy (n,); probs and logits
    (n, choices) where actions are categorical or binary, MultiDiscrete's side by side; mean and std (n, size) of a
    Gaussian, and env_action, the action as `PPO.predict` would hand it to the environment: clipped to the space, or
    scaled to it when the policy squashes. A squashed Gaussian has no entropy in closed form.
    """
    action, value, log_prob = policy.forward(observations, deterministic=True)
    outputs = {"action": action, "value": value, "log_prob": log_prob}
    # policy.forward leaves the distribution that it built in action_dist: no second pass for the rest.
    entropy = policy.action_dist.entropy()
    if entropy is not None:
        outputs["entropy"] = entropy
    distribution = policy.action_dist.distribution
    if isinstance(distribution, list):  # MultiDiscrete: one categorical each
        outputs["probs"] = torch.cat([choice.probs for choice in distribution], dim=1)
        outputs["logits"] = torch.cat([choice.logits for choice in distribution], dim=1)
    elif hasattr(distribution, "probs"):
        outputs.update(probs=distribution.probs, logits=distribution.logits)
    else:
        outputs.update(mean=distribution.mean, std=distribution.stddev)
        low, high = bounds
        outputs["env_action"] = (low + 0.5 * (action + 1.0) * (high - low) if policy.squash_output
                                 else torch.clamp(action, low, high))
    return outputs


def side_by_side(outputs: dict[str, Tensor]) -> Tensor:
    """All outputs as columns of one float32 tensor (n, total), so that a single copy brings them to the host.

    An integer action stays exact: no checkpoint of MAX_CHECKPOINT_BYTES has weights for more than 2**24 choices.
    """
    columns = []
    for tensor in outputs.values():  # a call into torch that changes nothing costs its time in every pass
        column = tensor if tensor.ndim == 2 else tensor.reshape(len(tensor), -1)
        columns.append(column if column.dtype == torch.float32 else column.float())
    return torch.cat(columns, dim=1)


def row_types(outputs: dict[str, Tensor]) -> tuple[Any, Any]:
    """The types of a row of outputs: as `side_by_side` joins it, all float32, and with integers where they are."""
    joined, own = [], []
    for name, tensor in outputs.items():
        shape = tuple(tensor.shape[1:])
        joined.append((name, "<f4", shape))
        own.append((name, "<f4" if tensor.is_floating_point() else "<i8", shape))
    return numpy.dtype(joined), numpy.dtype(own)


def to_host(joined: Tensor, row_type: Any) -> Array:
    """What `side_by_side` made, as a structured array (n,) of float32 with a field for each output."""
    array = joined.cpu().numpy()
    if not numpy.isfinite(array).all():
        raise ForwardFailed("an output is NaN or infinite", "the weights overflow on these observations, or the device "
                                                            "is at fault")
    return numpy.frombuffer(array, row_type)


def kernels_of(events: Any) -> dict[str, int]:
    """How often each kernel ran in the profiled pass, by torch's profiler.

    torch_npu launches every kernel below an event of the name that CANN gives it (aclnn...). Raises ForwardFailed for
    an operator that ran on the CPU. Two things tell of one: torch_npu's own fallback, and a copy that is not a kernel
    (so it crosses the bus) into memory that is not the device's (whose allocation torch_npu calls empty_tensor).
    """
    kernels = collections.Counter(event.name for event in events if event.name.startswith("aclnn"))
    hint = "this torch_npu or CANN has no NPU kernel for it: update them"
    for event in events:
        if event.name == "aten::_to_cpu":
            raise ForwardFailed(f"{event.cpu_parent.name if event.cpu_parent else 'an operator'} fell back to the CPU",
                                hint)
        if event.name == "aten::copy_" and not any(child.name.startswith("aclnn") for child in event.cpu_children):
            beside = event.cpu_parent.cpu_children if event.cpu_parent else []
            if not any(child.name == "empty_tensor" for sibling in beside for child in sibling.cpu_children):
                raise ForwardFailed("data was copied to the host within the policy", hint)
    if not kernels:
        raise ForwardFailed("torch's profiler saw no kernel on the NPU", "this torch_npu does not name its kernels")
    return dict(sorted(kernels.items()))


class OutputsFile:
    """npu_outputs.npy: one structured row for each observation. Written as the rows come: memory stays flat."""

    def __init__(self, fd: int, rows: int) -> None:
        self.file, self.rows = open(fd, "wb"), rows  # noqa: SIM115 (closed by close)
        self.digest = hashlib.sha256()

    def append(self, outputs: Array) -> None:
        data = io.BytesIO()
        if self.file.tell() == 0:
            numpy.lib.format.write_array_header_1_0(data, {
                "descr": numpy.lib.format.dtype_to_descr(outputs.dtype), "fortran_order": False, "shape": (self.rows,)})
        data.write(outputs.tobytes())
        self.digest.update(data.getbuffer())
        with writing(OUTPUTS):
            self.file.write(data.getbuffer())
            self.file.flush()

    def close(self) -> str:
        """Returns the SHA256 of what was written."""
        with writing(OUTPUTS):
            os.fsync(self.file.fileno())
            self.file.close()
        return self.digest.hexdigest()

# --- The reference: SB3's formulas in float64 on the tensors of the file. It is never the source of a result.

ACTIVATIONS = {  # those of torch.nn that act on each number alone, and the arguments that they take
    "Tanh": "", "ReLU": "", "ReLU6": "", "LeakyReLU": "negative_slope", "ELU": "alpha", "CELU": "alpha", "SELU": "",
    "GELU": "approximate", "SiLU": "", "Mish": "", "Sigmoid": "", "LogSigmoid": "", "Softplus": "beta threshold",
    "Softsign": "", "Hardsigmoid": "", "Hardswish": "", "Hardtanh": "min_val max_val", "Tanhshrink": "",
    "Softshrink": "lambd", "Hardshrink": "lambd", "Identity": "",
}


def reference_outputs(checkpoint: Checkpoint, observations: Array) -> dict[str, Array]:
    """The outputs of a deterministic pass for observations (n, *shape), named and shaped as in `policy_outputs`."""
    features = observations.reshape(len(observations), -1).astype(numpy.float64)
    if is_image(checkpoint):
        features /= 255

    def linear(layer: str, x: Array) -> Array:
        return x @ checkpoint.tensors[f"{layer}.weight"].T.astype(x.dtype) + checkpoint.tensors[f"{layer}.bias"]

    def tower(name: str, net: str) -> Array:
        x = features
        for number in range(len(checkpoint.net_arch[name])):
            x = linear(f"mlp_extractor.{net}.{2 * number}", x)
            x = activate(checkpoint.activation, x, **checkpoint.activation_kwargs)
        return x

    with numpy.errstate(all="ignore"):  # what overflows is seen in the outputs
        value, latent = linear("value_net", tower("vf", "value_net")), tower("pi", "policy_net")
        head = linear("action_net", latent)
        if "box" in checkpoint.action:
            outputs = gaussian(checkpoint, head, latent)
        elif checkpoint.action["type"] == "MultiBinary":
            outputs = bernoulli(head)
        else:
            outputs = categorical(head, choices_of(checkpoint.action))
    if checkpoint.action["type"] == "Discrete":
        outputs["action"] = outputs["action"][:, 0]
    return {"value": value, **outputs}


def is_image(checkpoint: Checkpoint) -> bool:
    """Whether SB3 divides observations by 255 (stable_baselines3.common.preprocessing)."""
    box = checkpoint.observation
    is_8_bit = len(box.shape) == 3 and box.dtype == "uint8" and set(box.low) == {0} and set(box.high) == {255}
    return is_8_bit and bool(checkpoint.policy_kwargs.get("normalize_images", True))


def activate(name: str, x: Array, alpha: float = 1.0, beta: float = 1.0, lambd: float = 0.5, threshold: float = 20.0,
             negative_slope: float = 0.01, min_val: float = -1.0, max_val: float = 1.0, approximate: str = "none",
             inplace: bool = False) -> Array:
    match name:
        case "Identity":
            return x
        case "Tanh":
            return numpy.tanh(x)
        case "ReLU":
            return numpy.maximum(x, 0)
        case "ReLU6":
            return numpy.clip(x, 0, 6)
        case "LeakyReLU":
            return numpy.where(x > 0, x, negative_slope * x)
        case "ELU":
            return numpy.where(x > 0, x, alpha * numpy.expm1(numpy.minimum(x, 0)))
        case "CELU":
            return numpy.where(x > 0, x, alpha * numpy.expm1(numpy.minimum(x, 0) / alpha))
        case "SELU":
            return 1.0507009873554805 * numpy.where(x > 0, x, 1.6732632423543772 * numpy.expm1(numpy.minimum(x, 0)))
        case "GELU" if approximate == "tanh":
            return 0.5 * x * (1 + numpy.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        case "GELU":
            return 0.5 * x * (1 + numpy.frompyfunc(math.erf, 1, 1)(x / math.sqrt(2)).astype(x.dtype))
        case "SiLU":
            return x * sigmoid(x)
        case "Mish":
            return x * numpy.tanh(numpy.logaddexp(0, x))
        case "Sigmoid":
            return sigmoid(x)
        case "LogSigmoid":
            return -numpy.logaddexp(0, -x)
        case "Softplus":
            return numpy.where(beta * x > threshold, x, numpy.logaddexp(0, beta * x) / beta)
        case "Softsign":
            return x / (1 + numpy.abs(x))
        case "Hardsigmoid":
            return numpy.clip(x / 6 + 0.5, 0, 1)
        case "Hardswish":
            return x * numpy.clip(x / 6 + 0.5, 0, 1)
        case "Hardtanh":
            return numpy.clip(x, min_val, max_val)
        case "Tanhshrink":
            return x - numpy.tanh(x)
        case "Softshrink":
            return numpy.sign(x) * numpy.maximum(numpy.abs(x) - lambd, 0)
        case "Hardshrink":
            return numpy.where(numpy.abs(x) > lambd, x, 0)
    raise ValueError(f"no formula for {name}")


def sigmoid(x: Array) -> Array:
    return numpy.exp(-numpy.logaddexp(0, -x))


def categorical(head: Array, choices: list[int]) -> dict[str, Array]:
    """A categorical distribution for each part of an action, side by side."""
    logits = []
    for part in numpy.split(head, numpy.cumsum(choices)[:-1], axis=1):
        shifted = part - part.max(axis=1, keepdims=True)
        logits.append(shifted - numpy.log(numpy.exp(shifted).sum(axis=1, keepdims=True)))
    joined = numpy.concatenate(logits, axis=1)
    probs = numpy.exp(joined)
    return {"action": numpy.stack([part.argmax(axis=1) for part in logits], axis=1).astype(numpy.float64),
            "log_prob": numpy.stack([part.max(axis=1) for part in logits], axis=1).sum(axis=1),
            "entropy": -(probs * joined).sum(axis=1), "probs": probs, "logits": joined}


def bernoulli(logits: Array) -> dict[str, Array]:
    size = numpy.abs(logits)  # the likelier value's log_prob, and the entropy, depend on nothing else
    log_prob = -numpy.logaddexp(0, -size)
    return {"action": (logits > 0).astype(numpy.float64), "log_prob": log_prob.sum(axis=1),
            "entropy": (size * sigmoid(-size) - log_prob).sum(axis=1), "probs": sigmoid(logits), "logits": logits}


def gaussian(checkpoint: Checkpoint, mean: Array, latent: Array) -> dict[str, Array]:
    """A diagonal Gaussian. With gSDE its deviation depends on the latent features, and it may be squashed by tanh."""
    box, kwargs = checkpoint.action["box"], checkpoint.policy_kwargs
    low, high = numpy.array([box.low, box.high])
    if box.dtype.startswith("float"):
        low, high = numpy.array([low, high], box.dtype).astype(numpy.float64)
    log_std = checkpoint.tensors["log_std"].astype(numpy.float64)
    std = numpy.exp(log_std)
    if checkpoint.use_sde:
        if kwargs.get("use_expln"):
            std = numpy.where(log_std > 0, numpy.log1p(log_std + 1e-6) + 1, std)
        std = numpy.sqrt(latent**2 @ std**2 + 1e-6)
    std = std + numpy.zeros_like(mean)
    scale = numpy.log(std) + 0.5 * math.log(2 * math.pi)
    if kwargs.get("squash_output"):
        action = numpy.tanh(mean)
        nearest = 1 - 2.0**-23  # SB3 keeps a float32 action so far inside of -1 and 1 when it goes back from it
        inverse = numpy.arctanh(numpy.clip(action, -nearest, nearest))
        log_prob = -(((inverse - mean) / std) ** 2) / 2 - scale - numpy.log(1 - numpy.tanh(inverse) ** 2 + 1e-6)
        outputs = {"log_prob": log_prob.sum(axis=1)}
        env_action = low + 0.5 * (action + 1) * (high - low)
    else:
        action, env_action = mean, numpy.clip(mean, low, high)
        outputs = {"log_prob": -scale.sum(axis=1), "entropy": (scale + 0.5).sum(axis=1)}
    shape = (len(mean), *box.shape)
    return {"action": action.reshape(shape), "mean": mean, "std": std, "env_action": env_action.reshape(shape),
            **outputs}


def log_prob_of(checkpoint: Checkpoint, logits: Array, action: Array) -> Array:
    """The log-probability of given choices, (n,), from the reference's logits; -inf of one that does not exist."""
    chosen = action.reshape(len(action), -1).astype(numpy.int64)
    if checkpoint.action["type"] == "MultiBinary":
        exists = (chosen == 0) | (chosen == 1)
        each = -numpy.logaddexp(0, numpy.where(chosen == 1, -logits, logits))
        return numpy.where(exists, each, -numpy.inf).sum(axis=1)
    return of_chosen(logits, chosen, numpy.array(choices_of(checkpoint.action))).sum(axis=1)


def of_chosen(values: Array, chosen: Array, choices: Array) -> Array:
    """What stands in `values` for the choice of each part, (n, parts); -inf for one that does not exist."""
    starts = numpy.cumsum(choices) - choices
    each = numpy.take_along_axis(values, starts + numpy.clip(chosen, 0, choices - 1), axis=1)
    return numpy.where((chosen >= 0) & (chosen < choices), each, -numpy.inf)


def is_likeliest(checkpoint: Checkpoint, action: Array, probs: Array) -> Array:
    """Whether each action, (n,), is SB3's choice for these probabilities: the largest, of a binary one the rounded."""
    chosen = action.reshape(len(action), -1).astype(numpy.int64)
    if checkpoint.action["type"] == "MultiBinary":
        return (chosen == numpy.round(probs)).all(axis=1)
    choices = numpy.array(choices_of(checkpoint.action))
    largest = numpy.maximum.reduceat(probs, numpy.cumsum(choices) - choices, axis=1)
    return (of_chosen(probs, chosen, choices) == largest).all(axis=1)


SATURATED = 3.0  # where a mean is that large, atanh(tanh(mean)) is lost in float32, and a squashed log_prob with it
SMALL = 0.01  # the error of a smaller number is put in relation to this


class Comparison:
    """The NPU's outputs against the float64 reference, row by row. The reference is never a source of a result."""

    def __init__(self, checkpoint: Checkpoint, tolerance: float) -> None:
        self.checkpoint, self.tolerance = checkpoint, tolerance
        self.rows = self.differing = self.ties = 0
        self.seconds = 0.0
        self.largest: dict[str, Any] = {}  # by output: the error, and beside the reference, at least 1 or SMALL
        self.sums: dict[str, Any] = {}  # by output: of errors, of numbers, of products, and of both squares

    def add(self, observations: Array, npu: Array) -> None:
        started = time.monotonic()
        reference = reference_outputs(self.checkpoint, observations)
        if "box" not in self.checkpoint.action:
            self.compare_choices(npu, reference)
        self.compare(npu, reference)
        self.rows += len(observations)
        self.seconds += time.monotonic() - started

    def compare_choices(self, npu: Array, reference: dict[str, Array]) -> None:
        """Count actions that differ, and ties among them: choices that the reference finds as likely as its own.

        An action that is not the likeliest by the NPU's own probabilities is no tie: something else has chosen it.
        """
        action = npu["action"]
        likeliest = is_likeliest(self.checkpoint, action, npu["probs"])
        differ = (action != reference.pop("action")).reshape(len(action), -1).any(axis=1) | ~likeliest
        own = log_prob_of(self.checkpoint, reference["logits"], action)
        tie = differ & likeliest & (numpy.abs(own - reference["log_prob"]) <= self.tolerance)
        reference["log_prob"] = numpy.where(tie, own, reference["log_prob"])
        self.differing += int(differ.sum())
        self.ties += int(tie.sum())

    def compare(self, npu: Array, reference: dict[str, Array]) -> None:
        for name, theirs in reference.items():
            ours = npu[name].astype(numpy.float64)
            if name == "log_prob" and self.checkpoint.policy_kwargs.get("squash_output"):
                meaningful = numpy.abs(reference["mean"]).max(axis=1) < SATURATED
                ours, theirs = ours[meaningful], theirs[meaningful]
            if ours.size == 0:
                continue
            error, size = numpy.abs(ours - theirs), numpy.abs(theirs)
            relative = [(error / numpy.maximum(least, size)).max() for least in (1.0, SMALL)]
            self.largest[name] = numpy.maximum(self.largest.get(name, 0.0), [error.max(), *relative])
            self.sums[name] = self.sums.get(name, 0.0) + numpy.array(
                [error.sum(), error.size, (ours * theirs).sum(), (ours**2).sum(), (theirs**2).sum()])

    def figures(self) -> dict[str, Any]:
        """The errors of all rows so far, as the result shows them."""
        outputs: dict[str, dict[str, Any]] = {}
        for name, (total, count, product, ours, theirs) in self.sums.items():
            absolute, _, relative = self.largest[name]
            cosine = float(product / math.sqrt(ours * theirs)) if ours * theirs else None
            outputs[name] = {"max_abs_error": float(absolute), "max_rel_error_percent": float(100 * relative),
                             "mean_abs_error": float(total / count), "cosine": cosine}
        return {"rows": self.rows, "tolerance": self.tolerance, "within_tolerance": not self.wrong(),
                "within_1_percent": all(errors["max_rel_error_percent"] < 1 for errors in outputs.values()),
                "action_agreement": (self.rows - self.differing) / self.rows, "ties": self.ties,
                "elapsed_s": round(self.seconds, 6), "outputs": outputs}

    def wrong(self) -> list[str]:
        """The outputs that are outside the tolerance."""
        names = [name for name, (_, beside, _) in self.largest.items() if not beside <= self.tolerance]
        return names + ["action"] * (self.differing > self.ties)

    def judge(self, what: str = "the NPU's answer") -> None:
        if wrong := self.wrong():
            raise ForwardFailed(f"{what} is outside the tolerance of {self.tolerance:g} of the float64 reference: "
                                f"{', '.join(wrong)}", "a kernel, a copy or the device is at fault; 910A and 310P "
                                "compute in float16: allow for it with --tolerance")


REFERENCE_LINES = """
[reference] float64 from the checkpoint's bytes: compared with, never a source of a result
[reference] rows={reference[rows]} tolerance={reference[tolerance]} within_tolerance={reference[within_tolerance]} \
within_1_percent={reference[within_1_percent]} action_agreement={reference[action_agreement]} ties={reference[ties]} \
elapsed={reference[elapsed_s]:.4f}s
"""
ERROR_LINE = ("[reference] {name} max_abs_error={max_abs_error} max_rel_error_percent={max_rel_error_percent} "
              "mean_abs_error={mean_abs_error} cosine={cosine}")


def log_reference(worker: Worker) -> None:
    worker.log(REFERENCE_LINES)
    for name, errors in worker.result["reference"]["outputs"].items():
        worker.log(ERROR_LINE, name=name, **errors)


def compare_with_published(comparison: Comparison, outputs: Array, worker: Worker) -> None:
    """The outputs for the zero observation against the published ones: same action, the rest within the tolerance."""
    comparison.compare(outputs, {name: numpy.array(values) for name, values in PUBLISHED.items() if name != "action"})
    errors = {name: float(largest[0]) for name, largest in comparison.largest.items()}
    action_equal = outputs["action"].tolist() == PUBLISHED["action"]
    within = action_equal and not comparison.wrong()
    worker.facts(published={"tolerance": comparison.tolerance, "within_tolerance": within,
                            "action_equal": action_equal, "outputs": errors})
    worker.log("[published] tolerance={published[tolerance]} within_tolerance={published[within_tolerance]} "
               "action_equal={published[action_equal]} max_abs_error={published[outputs]}")
    if not within:
        raise ForwardFailed(f"the result differs from the published one: {errors}",
                            "another chip may differ in the last bits, not by this much: the port is at fault")


# --- Beside the evidence: times

WARM_UP = 10


def benchmark(args: argparse.Namespace, checkpoint: Checkpoint, observations: Array, passes: Passes,
              worker: Worker) -> None:
    """Warm passes, from one observation on the host to all outputs on the host, and the outputs of each checked.

    `eager` is the evidence's own path; `graph` replays its kernels, captured, with one launch. Every pass gets another
    observation than the one before, so that a forward that is cached or skipped gives a wrong answer and is found.
    """
    amounts = numpy.random.default_rng(0).uniform(-1.0, 1.0, (8, *observations.shape[1:]))
    # a large number only shrinks, so that nothing overflows
    first = observations[:1]
    varied = as_float32(numpy.where(numpy.abs(first) > 1.0, first * numpy.abs(amounts), first + amounts))
    chunks = [varied[number:number + 1] for number in range(len(varied))]
    expected = [passes.run(chunk) for chunk in chunks]
    comparison = Comparison(checkpoint, args.tolerance)
    comparison.add(varied, numpy.concatenate(expected))
    comparison.judge("a pass of the benchmark")

    def timed(one_pass: Callable[[Array], Array]) -> dict[str, Any]:
        taken = []
        for number in range(WARM_UP + args.benchmark):
            if number % 1000 == 0:
                worker.enter("benchmark")
            which = number % len(chunks)
            started = time.perf_counter()
            outputs = one_pass(chunks[which])
            taken.append(time.perf_counter() - started)
            if outputs.tobytes() != expected[which].tobytes():
                raise ForwardFailed("a pass of the benchmark gave other outputs than before for the same observation",
                                    "a forward was cached or skipped, or the device is at fault")
        taken = taken[WARM_UP:]
        p50, p90, p99 = (float(numpy.percentile(taken, percent)) for percent in (50, 90, 99))
        return {"passes": len(taken), "p50_s": p50, "p90_s": p90, "p99_s": p99, "mean_s": float(numpy.mean(taken))}

    times: dict[str, Any] = {"warm_up_passes": WARM_UP, "eager": timed(passes.run), "graph": None, "graph_reason": None}
    try:
        times["graph"] = timed(capture(passes, chunks[0]))
    except (AttributeError, RuntimeError, ForwardFailed) as error:  # a release without graphs, or one that refuses
        times["graph_reason"] = first_line(error)
    worker.facts(benchmark=times)
    mark = "SIMULATED " if worker.result["simulated"] else ""
    for name in ("eager", "graph"):
        if times[name]:
            in_ms = {percentile: 1e3 * times[name][f"{percentile}_s"] for percentile in ("p50", "p90", "p99")}
            worker.log("[benchmark] {mark}{name} passes={passes} p50_ms={p50:.4f} p90_ms={p90:.4f} p99_ms={p99:.4f}",
                       mark=mark, name=name, passes=args.benchmark, **in_ms)
        else:
            worker.log("[benchmark] {mark}graph: {benchmark[graph_reason]}", mark=mark)


def capture(passes: Passes, chunk: Array) -> Callable[[Array], Array]:
    """A function like Passes.run for as many rows, which replays a captured graph: one launch for all kernels.

    Raises AttributeError where torch_npu has no graphs, and RuntimeError where the capture is refused.
    """
    graph = torch.npu.NPUGraph()
    with torch.inference_mode():
        observations = torch.from_numpy(chunk).to(DEVICE)

        def one_pass() -> tuple[Tensor, dict[str, Tensor]]:
            outputs = policy_outputs(passes.policy, observations, passes.bounds)
            return side_by_side(outputs), outputs

        for _ in range(3):  # what operators set up at their first calls must not be part of the capture
            one_pass()
        torch.npu.synchronize()
        with torch.npu.graph(graph):
            joined, outputs = one_pass()
    joined_type, _ = row_types(outputs)

    def replay(chunk: Array) -> Array:
        with torch.inference_mode():
            observations.copy_(torch.from_numpy(chunk))
            graph.replay()
            return to_host(joined, joined_type)

    return replay


# === Main


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    for fd in (0, 1, 2):  # were one of them closed, the log would get its number, and all that libraries print there
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    caught: list[int] = []
    for signum in SIGNALS:
        if signal.getsignal(signum) != signal.SIG_IGN:  # nohup stays nohup
            signal.signal(signum, lambda number, _: caught.append(number))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, no child has an exit code
    try:
        args = parse_arguments(argv)
        if not SOURCE:
            raise UsageError("piped into python3, the program cannot say what it is",
                             "nothing was run; start it as python3 inference.py")
        supervisor = Supervisor(args, argv, caught)
        if not supervisor.inherited:  # their orphans would come here as well, and are not ours to end
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        own_pid = os.getpid()
        # Before torch and numpy are imported: of the two processes that go on from here, one never sees them.
        pid = os.fork()
    except UsageError as failure:
        print(f"inference.py: usage: {one_line(str(failure))}; {failure.hint}", file=sys.stderr)
        return failure.code
    except (OSError, MemoryError) as error:
        print(f"inference.py: start: no process can be started: {one_line(str(error) or 'out of memory')}; raise the "
              "limits of processes, files and memory (ulimit -a)", file=sys.stderr)
        return EvidenceUnwritable.code
    if pid == 0:
        become_worker(supervisor, own_pid)
        return work(args, Worker(supervisor.facts_end, supervisor.go_end))
    return supervisor.follow(pid)


def become_worker(supervisor: Supervisor, supervisor_pid: int) -> None:
    """A process group of its own, which ends with the supervisor, and whose output goes through it."""
    os.setpgid(0, 0)
    die_with_parent()
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))  # the SIGABRT of a hung run is to leave no core of a gigabyte
    if os.getppid() != supervisor_pid:  # it ended before the line above
        os._exit(1)
    for fd in (supervisor.facts, supervisor.output):
        os.close(fd)
    supervisor.go.close()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (supervisor.output_end, 1), (supervisor.output_end, 2)):
        os.dup2(source, target)
    for signum in (signal.SIGINT, signal.SIGHUP):  # the supervisor answers them
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the device is given back
    faulthandler.enable(2)  # on SIGABRT, stderr shows the line that hung


if __name__ == "__main__":
    sys.exit(main())
