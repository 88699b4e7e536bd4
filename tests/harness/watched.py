"""Runs inference.py, as the processes that it is, and reports what the run did to them.

    python watched.py ARGUMENTS OF inference.py      in the directory of inference.py, with WATCHED_REPORT=FILE

FILE is about the worker, FILE.supervisor about its parent. Each is JSON, written when the process ends: names looked up
by pickle, commands run by a shell, modules imported, changes of the environment and of the random generators, the peak
of resident memory, and CPU seconds.
"""

from __future__ import annotations

import atexit
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
    """Begins to watch; the report is written when the process ends, the supervisor's beside the worker's."""
    modules, environment, before = set(sys.modules), dict(os.environ), generators()
    events: list[str] = []
    started_as = os.getpid()

    def record(event: str, arguments: tuple[Any, ...]) -> None:
        if event in WATCHED_EVENTS:
            events.append(f"{event} {arguments!r}"[:500])

    def report() -> None:
        now = dict(os.environ)
        found = {
            "events": events,
            "modules": sorted(set(sys.modules) - modules),
            "environment": {name: now.get(name) for name in environment | now
                            if environment.get(name) != now.get(name)},
            "generators_before": before,
            "generators": generators(),
            "peak_kib": peak_kib(),
            "cpu_s": time.process_time(),
        }  # fmt: skip
        with open(f"{path}.supervisor" if os.getpid() == started_as else path, "w", encoding="utf-8") as file:
            json.dump(found, file)

    sys.addaudithook(record)
    atexit.register(report)  # a fork inherits it, and each process calls it once


if __name__ == "__main__":
    watch(os.environ.pop("WATCHED_REPORT"))
    sys.path.insert(0, os.getcwd())
    sys.argv[0] = "inference.py"
    sys.exit(importlib.import_module("inference").main())
