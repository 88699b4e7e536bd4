#!/usr/bin/env python3
"""Makes every single call into CANN fail, one in each run, and looks for a run that succeeds nevertheless.

    python3 tests/measure/sweep.py [--table FILE] [--jobs N]

A good run of the stand-in checkpoint on the simulated NPU is traced: each API call, each GetWorkspaceSize, each launch
and each execution on the device. Then, for every line of that trace, the program runs once more with just that call
failing, and for one call of each name with it never returning. Prints how many calls were swept and how the runs ended,
and writes the outcome of each to a table. Exit code 0: none ended in a false success, or in any other way than the
design allows; 1: some did, and they are listed.

A call is addressed as the Nth of its name, not as the Nth of all: the device executes kernels on a thread of its own,
so that the place of an execution among the other calls varies from run to run.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import csv
import dataclasses
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness import evidence, faults, support

Trace = list[dict[str, Any]]
TABLE = support.PROJECT / ".cache/sweep.tsv"
RUN_ARGS = (*support.STANDIN_ARGS, "--hold-seconds", 0)
TIMEOUT_S = 60  # of a run in which nothing hangs: it never gets near
HANG_TIMEOUT_S = 6  # of a stage, of which none takes that long
HANGING_JOBS = 6  # as many at a time for each processor: they wait

# Calls that torch_npu makes for itself and whose failure it passes over. A run in which one of them failed may end
# well, but only if it states nothing that the good run did not state.
TOLERATED = {
    "aclrtGetDevice": "whether this thread has a device yet: a failure means no, and it is set next",
    "aclrtGetSocName": "the first time, to find the chip in torch_npu's table; the stated name is read later",
    "aclrtSetDeviceSatMode": "the overflow mode, which is the chip's default; the outputs must be finite anyway",
    "aclsysGetCANNVersion": "to choose between code paths of old and new releases of CANN",
    "aclsysGetVersionStr": "the same, by component",
    "aclrtCtxGetSysParamOpt": "asked by the program itself, which then states null for determinism.device",
}
# What determinism.device truly is then. With CANN's version unknown, torch_npu 2.13 leaves the setting off.
DEVICE_DETERMINISM = {"aclrtCtxGetSysParamOpt": None, "aclsysGetCANNVersion": False}


@dataclasses.dataclass(frozen=True)
class Case:
    kind: str  # "fail" or "hang"
    name: str  # of the call, as in the trace
    nth: int  # among the calls of that name

    @property
    def environment(self) -> dict[str, str]:
        return {f"CANNSIM_{self.kind.upper()}": f"{self.name}:{self.nth}"}


@dataclasses.dataclass(frozen=True)
class Outcome:
    case: Case
    code: int
    stage: str
    message: str
    problems: tuple[str, ...]
    seconds: float

    @property
    def verdict(self) -> str:
        if self.problems:
            return "; ".join(self.problems)
        return "tolerated" if self.code == 0 else "died" if self.code < 0 else "refused"


class Sweep:
    def __init__(self, cli: support.Cli, directory: Path) -> None:
        self.cli = cli
        self.directory = directory
        self.directory.mkdir(parents=True, exist_ok=True)
        self.environment = faults.quick_npu_smi(directory / "bin")
        result, trace = self.run("good", {})
        if result.code != 0 or evidence.problems(result, self.log_dir("good")):
            raise RuntimeError(f"the good run ended with {result.code}:\n{result.stderr}")
        self.good = evidence.facts(self.log_dir("good"))
        self.calls = list(numbered(line["name"] for line in trace))

    def log_dir(self, name: str) -> Path:
        return self.cli.project / "sweep" / name

    def run(self, name: str, environment: dict[str, str], timeout_s: float = TIMEOUT_S) -> tuple[support.Result, Trace]:
        trace = self.directory / f"{name}.trace"
        arguments = (*RUN_ARGS, "--timeout-seconds", timeout_s, "--log-dir", f"sweep/{name}")
        result = self.cli(*arguments, env={**self.environment, **environment, "CANNSIM_TRACE": str(trace)})
        return result, [json.loads(line) for line in trace.read_text().splitlines()]

    def failures(self) -> list[Case]:
        return [Case("fail", name, nth) for name, nth in self.calls]

    def hangs(self) -> list[Case]:
        """A sample: of each API call and of every third call of an operator, the one in the middle of the run."""
        total = collections.Counter(name for name, _ in self.calls)
        operators = [name for name in total if "aclnn" in name]
        names = [name for name in total if "aclnn" not in name] + operators[::3]
        return [Case("hang", name, total[name] // 2 + 1) for name in names]

    def outcome(self, case: Case) -> Outcome:
        name = f"{case.kind}-{case.name.replace(':', '-')}-{case.nth}"
        result, trace = self.run(name, case.environment, HANG_TIMEOUT_S if case.kind == "hang" else TIMEOUT_S)
        log_dir = self.log_dir(name)
        found = evidence.problems(result, log_dir)
        error: dict[str, str] = {}
        with contextlib.suppress(FileNotFoundError):
            error = support.read_result(log_dir)["error"] or {}
        if sum("injected" in line for line in trace) != 1:
            found.append("the call was not made, or more than one failed")
        if result.code == 0:
            if case.name not in TOLERATED:
                found.append("FALSE SUCCESS")
            found += self.untruths(log_dir, case.name)
        elif result.code > 0:
            expected = 6 if case.kind == "hang" else evidence.STAGE_CODES.get(error.get("stage", ""))
            if result.code != expected:
                found.append(f"exit code {result.code} of stage {error.get('stage')}")
        shutil.rmtree(log_dir, ignore_errors=True)
        (self.directory / f"{name}.trace").unlink()
        stage, message = error.get("stage", ""), error.get("message", "")
        return Outcome(case, result.code, stage, message, tuple(found), result.seconds)

    def untruths(self, log_dir: Path, name: str) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            stated = evidence.facts(log_dir)
            if name in DEVICE_DETERMINISM and stated["determinism"]["device"] == DEVICE_DETERMINISM[name]:
                stated["determinism"]["device"] = self.good["determinism"]["device"]
            untrue = [name for name, value in self.good.items() if stated.get(name) != value]
            return [f"states {name}={stated.get(name)!r}" for name in untrue]
        return []

    def outcomes(self, jobs: int) -> Iterator[Outcome]:
        for cases, workers in ((self.failures(), jobs), (self.hangs(), jobs * HANGING_JOBS)):
            with ThreadPoolExecutor(workers) as pool:
                yield from pool.map(self.outcome, cases)


def numbered(names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Each name with how often it has occurred so far."""
    seen: collections.Counter[str] = collections.Counter()
    for name in names:
        seen[name] += 1
        yield name, seen[name]


def write_table(path: Path, outcomes: list[Outcome]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, dialect="excel-tab", lineterminator="\n")
        table.writerow(["injected", "call", "nth", "exit_code", "stage", "verdict", "message", "seconds"])
        for o in outcomes:
            fields = (o.case.kind, o.case.name, o.case.nth, o.code, o.stage, o.verdict, o.message, f"{o.seconds:.2f}")
            table.writerow(" ".join(str(field).split()) for field in fields)


def summary(outcomes: list[Outcome]) -> str:
    lines = []
    for kind, ended in (("fail", "a failing call"), ("hang", "a call that never returns")):
        of_kind = [outcome for outcome in outcomes if outcome.case.kind == kind]
        lines.append(f"calls swept with {ended}: {len(of_kind)} ({len({o.case.name for o in of_kind})} names)")
        for code, count in sorted(collections.Counter(outcome.code for outcome in of_kind).items()):
            what = "tolerated by torch_npu, evidence true" if code == 0 else ""
            lines.append(f"  exit code {code:4}: {count:5} {what}".rstrip())
    lines.append(f"false successes: {sum(outcome.code == 0 and bool(outcome.problems) for outcome in outcomes)}")
    lines.append(f"other violations: {sum(outcome.code != 0 and bool(outcome.problems) for outcome in outcomes)}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--table", metavar="FILE", type=Path, default=TABLE, help="where the outcome of each call goes")
    parser.add_argument("--jobs", metavar="N", type=int, default=os.cpu_count() or 1, help="runs at a time")
    args = parser.parse_args()
    if "TEST_SIMULATOR" not in os.environ:
        set_up()
    started = time.monotonic()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as directory:
        cli = support.Cli(Path(os.environ["TEST_SIMULATOR"]), Path(directory, "project"))
        try:
            sweep = Sweep(cli, Path(directory, "traces"))
            for outcome in sweep.outcomes(args.jobs):
                outcomes.append(outcome)
                if outcome.problems:
                    print(f"{outcome.case.kind} {outcome.case.name}:{outcome.case.nth}: {outcome.verdict}", flush=True)
        finally:
            cli.close()
            write_table(args.table, outcomes)
    print(f"{summary(outcomes)}\n{args.table}: {len(outcomes)} runs in {time.monotonic() - started:.0f} s")
    return int(any(outcome.problems for outcome in outcomes))


def set_up() -> None:
    """Starts this program anew with the interpreter and the simulator of tests/setup.sh."""
    here = Path(__file__).resolve()
    script = 'source "$1"; setup_runtime; use_simulator; TEST_SIMULATOR=$simulator exec "$python" "${@:2}"'
    arguments = ["sweep.py", str(here.with_name("setup.sh")), str(here), *sys.argv[1:]]
    os.execvp("bash", ["bash", "-euo", "pipefail", "-c", script, *arguments])


if __name__ == "__main__":
    sys.exit(main())
