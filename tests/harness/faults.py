"""Brings about what cannot be brought about from outside: inference.py with one of its functions changed in memory."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

from harness import support

_numbers = itertools.count()

# Patches. Each is code that runs before main(), with the program in reach as `inference`.
STALLED = "stalled"  # what a stalled program prints


def stall(function: str) -> str:
    """The program says so and then sleeps, for ever, when it calls this function of its own."""
    return f"""
stdout = os.dup(1)  # the program keeps what is printed while a device is at work
def stall(*args, **kwargs):
    os.write(stdout, {STALLED.encode()!r})
    while True:
        time.sleep(1)
inference.{function} = stall
"""


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
    """The environment in which npu-smi is a shell script that lists its caller: two interpreters less to start."""
    directory.mkdir(parents=True, exist_ok=True)
    script = directory / "npu-smi"
    script.write_text(
        '#!/bin/sh\n[ "$1" = info ] || { echo "npu-smi version: 25.5.1"; exit; }\n'
        'echo "| npu-smi 25.5.1    Version: 25.5.1 |"\n'
        'echo "| NPU     Chip | Process id | Process name | Process memory(MB) |"\n'
        'echo "| 0       0    | $PPID      | python3      | 2                  |"\n'
    )
    script.chmod(0o755)
    return {"PATH": f"{directory}{os.pathsep}{os.environ['PATH']}"}
