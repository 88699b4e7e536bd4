"""Looks, while a run goes on, for what CANN's operator compiler does to a process once something has started it.

It cannot be looked for afterwards: the compiler takes its directory, its processes and its signal handlers along when
the device is given back. Its processes stay as long as the device does. That tells them from an errand, such as the
`uname` or `ldconfig` that an import runs for a moment, and does not count.
"""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)  # which the compiler takes
INTERVAL_S = 0.01
ERRAND_S = 0.3  # a child that is there for longer stays


class Watch:
    """`with Watch(log_dir, cwd) as watch:` around a run that writes to log_dir, which must be new, and works in cwd.

    `found` names what was seen, `children` the child processes that stayed, and `looks` is how often the worker was
    looked at.
    """

    def __init__(self, log_dir: Path, cwd: Path) -> None:
        self.found: set[str] = set()
        self.children: set[str] = set()
        self.looks = 0
        self._log, self._cwd = log_dir / "npu_inference.log", cwd
        self._caught_first: set[signal.Signals] | None = None
        self._children_since: dict[str, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow)

    def __enter__(self) -> Watch:
        if self._log.exists():
            raise ValueError(f"{self._log} is of an earlier run")
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()
        self._look_for_directory()

    def _follow(self) -> None:
        pid = None
        while not self._over.wait(INTERVAL_S):
            # By the time of that line the worker has put its own handlers in place.
            pid = pid or self._worker()
            if pid:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                    self._look_at(pid)
                self._look_for_directory()

    def _worker(self) -> str | None:
        with contextlib.suppress(FileNotFoundError):
            if line := re.search(r"^\[inference\] pid +: (\d+)$", self._log.read_text(encoding="utf-8"), re.MULTILINE):
                return line[1]
        return None

    def _look_at(self, pid: str) -> None:
        caught = caught_signals(pid)
        if self._caught_first is None:
            self._caught_first = caught
        self.found.update(f"a handler for {number.name}" for number in caught - self._caught_first)
        now, children = time.monotonic(), children_of(pid)
        self._children_since = {child: self._children_since.get(child, now) for child in children}
        for child in children:
            if now - self._children_since[child] > ERRAND_S:
                self.found.add("child processes")
                self.children.add(name_of(child))
        self.looks += 1

    def _look_for_directory(self) -> None:
        if (self._cwd / "kernel_meta").exists():
            self.found.add("kernel_meta")


def caught_signals(pid: str) -> set[signal.Signals]:
    status = Path("/proc", pid, "status").read_text(encoding="utf-8")
    [mask] = re.findall(r"^SigCgt:\s+([0-9a-f]+)$", status, re.MULTILINE)
    return {number for number in SIGNALS if int(mask, 16) >> (number - 1) & 1}


def name_of(pid: str) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        command = Path("/proc", pid, "cmdline").read_bytes()
        return command.replace(b"\0", b" ").decode(errors="replace").strip() or "(no command line)"
    return "(ended)"


def children_of(pid: str) -> list[str]:
    """By the parent that each process names: what /proc says of a thread's children is optional in a kernel."""
    children = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # The name before it, in brackets, may hold anything.
            if status.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1] == pid:
                children.append(status.parent.name)
    return children
