"""Brings about what a test needs to go wrong: a hanging call, a pipe that is full, or, for what cannot be brought about
from outside, inference.py with one of its functions changed in memory."""

from __future__ import annotations

import contextlib
import itertools
import os
import runpy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from harness import support

_numbers = itertools.count()


def program() -> dict[str, Any]:
    """The functions of inference.py, for what they know of a checkpoint."""
    return runpy.run_path(str(support.PROJECT / "inference.py"))


# Patches: code that runs before main(), with the program in reach as `inference`, and counts in both its processes.


def during(function: str, statement: str) -> str:
    """A statement runs each time that the program calls this function of its own, before it does."""
    return f"""
original = inference.{function}
def changed(*args, **kwargs):
    {statement}
    return original(*args, **kwargs)
inference.{function} = changed
"""


# root may write everywhere; without these capabilities it is a user like any other.
WITHOUT_PRIVILEGES = """
class Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]
class Sets(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint32 * 3), ("high", ctypes.c_uint32 * 3)]  # effective, permitted, inheritable
libc, header, sets = ctypes.CDLL(None, use_errno=True), Header(0x20080522, 0), Sets()
if libc.capget(ctypes.byref(header), ctypes.byref(sets)):
    sys.exit("capget failed")
for number in range(2):
    sets.low[number] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
if libc.capset(ctypes.byref(header), ctypes.byref(sets)):
    sys.exit("capset failed")
"""


def patched(project: Path, patch: str) -> Path:
    """A program that runs the project's inference.py after the patch."""
    path = project / f"patched{next(_numbers)}.py"
    path.write_text(f"import ctypes, os, signal, sys, time\nsys.dont_write_bytecode = True\nimport inference\n{patch}\n"
                    "sys.exit(inference.main())\n")  # fmt: skip
    return path


def wait_for_hang(trace: Path, process: support.Process, patience: float = 60) -> None:
    """Waits until the call that CANNSIM_HANG names has been made."""
    deadline = time.monotonic() + patience
    while not (trace.exists() and '"injected":"hang"' in trace.read_text()):
        if not process.running() or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"never hung\n{process.stdout}\n{process.stderr}")
        time.sleep(0.01)


def quick_npu_smi(directory: Path) -> dict[str, str]:
    """The environment in which npu-smi is a shell script: an interpreter less to start.

    It lists those children of its caller, the supervisor, that hold the simulated device: each keeps the file open by
    which the simulator's own npu-smi finds it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    script = directory / "npu-smi"
    script.write_text(f"""#!/bin/sh
[ "$1" = info ] || exit 1
echo "| npu-smi 25.5.1    Version: 25.5.1 |"
echo "| NPU     Chip | Process id | Process name | Process memory(MB) |"
registry=${{XDG_RUNTIME_DIR:-/dev/shm}}
[ -w "$registry" ] || registry=/tmp
read -r children </proc/$PPID/task/$PPID/children
for pid in $children; do
  for file in /proc/$pid/fd/*; do
    if [ "$file" -ef "$registry/cannsim-{os.geteuid()}/$pid.0" ]; then
      echo "| 0       0    | $pid      | python3      | 2                  |"
      break
    fi
  done
done
exit 0
""")
    script.chmod(0o755)
    return {"PATH": f"{directory}{os.pathsep}{os.environ['PATH']}"}


@contextlib.contextmanager
def full_pipe() -> Iterator[IO[bytes]]:
    """The writing end of a pipe that nobody reads and that takes no byte more."""
    read, write = os.pipe()
    with os.fdopen(read, "rb"), os.fdopen(write, "wb", buffering=0) as file:
        os.set_blocking(write, False)
        with contextlib.suppress(BlockingIOError):
            while file.write(bytes(65536)):
                pass
        os.set_blocking(write, True)
        yield file
