"""Runs inference.py, as the process that it is, and reports what the run did to its process.

    python watched.py ARGUMENTS OF inference.py      in the directory of inference.py, with WATCHED_REPORT=FILE

The report is JSON, written when the program calls os._exit: names looked up by pickle, commands run by a shell, modules
imported, changes of the environment and of the random generators, the peak of resident memory, and CPU seconds.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
from typing import Any

WATCHED_EVENTS = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn")


def generators() -> dict[str, str]:
    """The state of the global generators; torch's by its seed, since building a network draws from it."""
    numpy, torch = sys.modules["numpy"], sys.modules["torch"]
    return {
        "random": str(hash(random.getstate())),
        "numpy": str(hash(str(numpy.random.get_state()))),
        "torch": str(torch.initial_seed()),
    }


def peak_kib() -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))


def watch(path: str) -> None:
    modules, environment, before = set(sys.modules), dict(os.environ), generators()
    events: list[str] = []
    pid, leave = os.getpid(), os._exit

    def record(event: str, arguments: tuple[Any, ...]) -> None:
        if event in WATCHED_EVENTS and os.getpid() == pid:
            events.append(f"{event} {arguments!r}"[:500])

    def report_and_leave(code: int) -> None:
        if os.getpid() == pid:  # not a forked child
            now = dict(os.environ)
            report = {
                "events": events,
                "modules": sorted(set(sys.modules) - modules),
                "environment": {name: now.get(name) for name in environment | now
                                if environment.get(name) != now.get(name)},
                "generators_before": before,
                "generators": generators(),
                "peak_kib": peak_kib(),
                "cpu_s": time.process_time(),
            }  # fmt: skip
            with open(path, "w", encoding="utf-8") as file:
                json.dump(report, file)
        leave(code)

    sys.addaudithook(record)
    os._exit = report_and_leave  # type: ignore[assignment]


if __name__ == "__main__":
    watch(os.environ.pop("WATCHED_REPORT"))
    sys.path.insert(0, os.getcwd())
    sys.argv[0] = "inference.py"
    sys.exit(importlib.import_module("inference").main())
