#!/usr/bin/env python3
"""Looks for a run that succeeds although something was wrong: every fault of the device, one or two in each run.

    python3 tests/measure/sweep.py [--only fail|corrupt|random ...] [--cases N] [--seed S] [--jobs N] [--table FILE]

A good run on the simulated NPU is traced: each API call, each GetWorkspaceSize, each launch, each execution and copy on
the device. Then the program runs once more for each of these cases:

  fail     every call of the trace fails, one in each run; one call of each name never returns
  corrupt  every execution of a kernel and every copy delivers wrong data and reports success, once and every time, in
           each way that the simulator knows; on checkpoints with Discrete, Box and MultiDiscrete actions, and the
           copies of a file of two chunks
  random   two things at once, N pairs drawn by a seed: faults of the device, signals, limits, a bad npu-smi, output
           that nobody reads, a stranger's files in the place of the evidence

A false success is an exit code 0 with an output outside the tolerance of a float64 reference that is computed here, by
torch, and not by inference.py; or one of a run in which a call failed that the NPU's answer depends on. Besides, a run
must end in time, leave no process, and leave evidence that agrees with its exit code and that check_evidence.py calls
VALID or FAILED RUN. Prints how the runs ended and what caught them, and writes each outcome to a table. Exit code 0:
nothing was found; 1: something was, and it is listed.

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
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from harness import evidence, faults, support

Trace = list[dict[str, Any]]
TABLE = support.PROJECT / ".cache/sweep.tsv"
TOLERANCE = 1e-3  # the program's own, stated again: absolute, relative above 1
TIMEOUT_S = 60  # of a run in which nothing hangs: it never gets near
HANG_TIMEOUT_S = 3  # of a stage, of which none takes that long
LATE_S = 2  # by which a stage may outlive the timeout
NPU_SMI_S = 4  # that a slow npu-smi takes, more than the timeout: it is not the device that is late
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

KINDS = ("bit", "zero", "stale", "swap")  # of corruption

# What caught a fault, by the message of the failure. The first that is found counts.
CATCHERS = {
    "the first operation (1 + 1)": r"1 \+ 1",
    "bits of the weights, after the load": r"these differ from the checkpoint",
    "observations read back": r"observations read back",
    "bits of the weights, after the forward": r"weights changed on the device",
    "repeatability": r"two passes over the same observations differ",
    "finiteness": r"NaN or infinite",
    "float64 reference": r"float64 reference",
    "published result": r"published",
    "an error of the device": r"NPU function error|error code",
    "the deadline": r"the device did not answer",
    "the number of devices": r"is_available\(\) is False",
    "the worker's end": r"ended without a word",
    "a signal": r"interrupted by",
    "the evidence": r"cannot be written|another run",
}


# ---------------------------------------------------------------------------------------------------------------------
# What is run, and what it must give
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Subject:
    """A checkpoint with observations, and the outputs that a float64 computation gives for every row."""

    name: str
    checkpoint: Path
    arguments: tuple[str, ...]  # of inference.py
    reference: dict[str, np.ndarray]
    log_probs: Callable[[np.ndarray], np.ndarray]  # of given actions: to know a tie

    @property
    def in_file(self) -> bool:
        return "--observations" in self.arguments


ROWS = [[0.5, -1.0, 0.02, 1.5], [-1.2, 0.3, 0.1, -0.4], [2.0, 0.1, -0.2, 0.7]]  # no zeros: those hide what is lost
FILE_ROWS = 16384 + 8  # of the stand-in's four numbers: a chunk, and a little one


def subjects(directory: Path) -> dict[str, Subject]:
    """Imports torch and SB3, which compute the reference, into this process."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # without torch_npu; the runs have an environment of their own
    from harness import checkpoints

    directory.mkdir(parents=True, exist_ok=True)
    paths = {"Discrete": support.PROJECT / support.STANDIN}
    for name, kind in (("Box", "box"), ("MultiDiscrete", "multi-discrete")):
        paths[name] = checkpoints.make(checkpoints.KINDS[kind], directory / f"{name}.zip")
    rows = np.array(ROWS, np.float32)
    made = {name: subject(name, path, rows, ("--observation", json.dumps(ROWS))) for name, path in paths.items()}
    many = np.random.default_rng(5).normal(0, 1, (FILE_ROWS, 4)).astype(np.float32)
    np.save(directory / "rows.npy", many)
    made["two chunks"] = subject(
        "two chunks", paths["Discrete"], many, ("--observations", str(directory / "rows.npy"))
    )
    return made


def subject(name: str, path: Path, rows: np.ndarray, observations: tuple[str, ...]) -> Subject:
    import torch
    from stable_baselines3 import PPO

    unreadable = {"learning_rate": 0.0, "lr_schedule": None, "clip_range": 0.0}  # closures of another Python
    policy = PPO.load(path, device="cpu", custom_objects=unreadable).policy.double()
    with torch.no_grad():
        latent_pi, latent_vf = policy.mlp_extractor(torch.from_numpy(rows.astype(np.float64)))
        distribution = policy._get_action_dist_from_latent(latent_pi)
        action = distribution.mode()
        outputs = {"action": action, "log_prob": distribution.log_prob(action), "value": policy.value_net(latent_vf),
                   "entropy": distribution.entropy()}  # fmt: skip
        inner = distribution.distribution
        if isinstance(inner, torch.distributions.Normal):
            outputs |= {"mean": inner.mean, "std": inner.stddev}
        else:
            parts = inner if isinstance(inner, list) else [inner]
            outputs |= {"probs": torch.cat([part.probs for part in parts], dim=1),
                        "logits": torch.cat([part.logits for part in parts], dim=1)}  # fmt: skip
    arguments = ("--checkpoint", str(path), "--sha256", evidence.sha256(path), "--hold-seconds", "0", *observations)
    reference = {name: output.numpy() for name, output in outputs.items()}
    return Subject(name, path, arguments, reference,
                   lambda chosen: distribution.log_prob(torch.tensor(chosen.tolist())).numpy())  # fmt: skip


def wrong_outputs(of: Subject, log_dir: Path) -> list[str]:
    """The outputs of a success that are not what the checkpoint computes: in a file every row, else all that ran."""
    if of.in_file:
        rows = np.load(log_dir / evidence.OUTPUTS)
        given = {name: rows[name] for name in rows.dtype.names}
    else:
        given = {name: np.array(value) for name, value in support.read_result(log_dir).items() if name in of.reference}
    wrong = []
    for name, right in of.reference.items():
        ours = given.get(name)
        if ours is None or ours.shape != right.shape:
            wrong.append(f"{name} is missing or has another shape")
        elif name == "action" and ours.dtype.kind in "iu":
            differs = (ours != right).reshape(len(ours), -1).any(axis=1)
            if (differs & ~(np.abs(of.log_probs(ours) - of.reference["log_prob"]) <= TOLERANCE)).any():
                wrong.append("action")
        elif not (np.abs(ours - right) <= TOLERANCE * np.maximum(1.0, np.abs(right))).all():
            wrong.append(name)
    return wrong


# ---------------------------------------------------------------------------------------------------------------------
# Cases
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    kind: str  # "fail", "hang", "corrupt" or "random"
    name: str  # of the call, as in the trace
    nth: int = 0  # among the calls of that name; 0: every one
    how: str = ""  # of a corruption
    subject: str = "Discrete"

    @property
    def label(self) -> str:
        parts = (self.kind, self.subject, self.name, self.nth or "all", self.how)
        return "-".join(re.sub(r"\W+", "-", str(part)) for part in parts if part)

    @property
    def environment(self) -> dict[str, str]:
        nth = str(self.nth or "*")
        return {f"CANNSIM_{self.kind.upper()}": ":".join([self.name, nth, self.how] if self.how else [self.name, nth])}


@dataclasses.dataclass(frozen=True)
class Outcome:
    case: Case
    code: int
    stage: str
    message: str
    problems: tuple[str, ...]
    seconds: float
    effect: str = ""  # of a corruption that nothing caught

    @property
    def verdict(self) -> str:
        if self.problems:
            return "; ".join(self.problems)
        if self.code == 0:
            return self.effect or "tolerated"
        return "died" if self.code < 0 else caught_by(self)


def caught_by(outcome: Outcome) -> str:
    for name, pattern in CATCHERS.items():
        if re.search(pattern, outcome.message):
            return name
    return "other"


class Sweep:
    def __init__(self, cli: support.Cli, directory: Path) -> None:
        self.cli = cli
        self.directory = directory
        self.directory.mkdir(parents=True, exist_ok=True)
        self.environment = faults.quick_npu_smi(directory / "bin")
        self.subjects = subjects(directory / "subjects")
        self.good: dict[str, dict[str, Any]] = {}
        self.traces: dict[str, Trace] = {}
        self.seconds = 0.0
        for of in self.subjects.values():
            self.run_good(of)

    def run_good(self, of: Subject) -> None:
        name = f"good {of.name}"
        result, trace = self.run(name, of, {})
        log_dir = self.log_dir(name)
        found = [*evidence.problems(result, log_dir), *wrong_outputs(of, log_dir)]
        if result.code != 0 or found:
            raise RuntimeError(f"the good run ended with {result.code}: {found}\n{result.stderr}")
        self.good[of.name], self.traces[of.name] = evidence.facts(log_dir), trace
        self.seconds = max(self.seconds, result.seconds)

    def calls(self, of: str = "Discrete") -> list[tuple[str, int]]:
        return list(numbered(line["name"] for line in self.traces[of]))

    def teardown(self, of: str = "Discrete") -> set[tuple[str, int]]:
        """The calls behind the program's last word to the device: one synchronisation after the last copy."""
        names = [line["name"] for line in self.traces[of]]
        last_copy = max(place for place, name in enumerate(names) if name == "aclrtMemcpy")
        last_word = names.index("aclrtSynchronizeDeviceWithTimeout", last_copy)
        return set(self.calls(of)[last_word + 1 :])

    def log_dir(self, name: str) -> Path:
        return self.cli.project / "sweep" / re.sub(r"\W+", "-", name)

    def run(self, name: str, of: Subject, environment: dict[str, str],
            timeout_s: float = TIMEOUT_S) -> tuple[support.Result, Trace]:  # fmt: skip
        trace = self.directory / f"{re.sub(r'[^A-Za-z0-9]+', '-', name)}.trace"
        result = self.cli(*of.arguments, "--timeout-seconds", timeout_s, "--log-dir", self.log_dir(name),
                          env={**self.environment, **environment, "CANNSIM_TRACE": str(trace)})  # fmt: skip
        lines = [json.loads(line) for line in trace.read_text().splitlines()]
        trace.unlink()
        return result, lines

    # --- fail: one call fails, or never returns

    def failures(self) -> list[Case]:
        return [Case("fail", name, nth) for name, nth in self.calls()]

    def hangs(self) -> list[Case]:
        """A sample: of each API call and of every third call of an operator, the one in the middle of the run."""
        total = collections.Counter(name for name, _ in self.calls())
        operators = [name for name in total if "aclnn" in name]
        names = [name for name in total if "aclnn" not in name] + operators[::3]
        return [Case("hang", name, total[name] // 2 + 1) for name in names]

    # --- corrupt: a kernel or a copy delivers something else

    def corruptions(self) -> list[Case]:
        cases = []
        for of in self.subjects:
            calls = [(name, nth) for name, nth in self.calls(of) if delivers(name, copies_alone=of == "two chunks")]
            for name, nth in [*calls, *((name, 0) for name in dict.fromkeys(name for name, _ in calls))]:
                cases += [Case("corrupt", corruptible(name), nth, how, of) for how in KINDS]
        return cases

    def outcome(self, case: Case) -> Outcome:
        of = self.subjects[case.subject]
        timeout_s = HANG_TIMEOUT_S if case.kind == "hang" else TIMEOUT_S
        result, trace = self.run(case.label, of, case.environment, timeout_s)
        log_dir = self.log_dir(case.label)
        found = evidence.problems(result, log_dir)
        error: dict[str, str] = {}
        with contextlib.suppress(FileNotFoundError):
            error = support.read_result(log_dir)["error"] or {}
        injected, effect = sum("injected" in line for line in trace), ""
        if injected != 1 and not (injected and case.nth == 0):
            found.append(f"the call was made {injected} times")
        if result.code == 0:
            more, effect = self.problems_of_success(case, log_dir)
            found += more
        elif result.code > 0:
            expected = 6 if case.kind == "hang" else evidence.STAGE_CODES.get(error.get("stage", ""))
            if result.code != expected:
                found.append(f"exit code {result.code} of stage {error.get('stage')}")
            found += too_late(log_dir, timeout_s)
        shutil.rmtree(log_dir, ignore_errors=True)
        stage, message = error.get("stage", ""), error.get("message", "")
        return Outcome(case, result.code, stage, message, tuple(found), result.seconds, effect)

    def problems_of_success(self, case: Case, log_dir: Path) -> tuple[list[str], str]:
        """What is wrong with an exit 0 of a case, and what the fault did if it was harmless."""
        wrong = wrong_outputs(self.subjects[case.subject], log_dir)
        found = [f"FALSE SUCCESS: {', '.join(wrong)}"] if wrong else []
        if case.kind == "corrupt":
            return found, "no effect" if not self.untruths(log_dir, case) else "within the tolerance"
        if (case.name, case.nth) in self.teardown(case.subject):
            return found, "after the last word: " + str(support.read_result(log_dir)["worker_exit"])
        if case.name not in TOLERATED:
            found.append("FALSE SUCCESS: the call is needed")
        return found + self.untruths(log_dir, case), ""

    def untruths(self, log_dir: Path, case: Case) -> list[str]:
        stated, good = evidence.facts(log_dir), self.good[case.subject]
        if case.name in DEVICE_DETERMINISM and stated["determinism"]["device"] == DEVICE_DETERMINISM[case.name]:
            stated["determinism"]["device"] = good["determinism"]["device"]
        untrue = [name for name, value in good.items() if stated.get(name) != value]
        return [f"states {name}={stated.get(name)!r}"[:200] for name in untrue]

    def outcomes(self, cases: list[Case], jobs: int) -> Iterator[Outcome]:
        hanging = [case for case in cases if case.kind == "hang"]
        others = [case for case in cases if case.kind != "hang"]
        for part, workers in ((others, jobs), (hanging, jobs * HANGING_JOBS)):
            with ThreadPoolExecutor(workers) as pool:
                yield from pool.map(self.outcome, part)


def delivers(name: str, copies_alone: bool) -> bool:
    """Whether a call of the trace writes to memory: a copy, or the execution of a kernel."""
    if name == "aclrtMemcpy" or name.startswith("exec:aclrtMemcpy"):
        return True
    return name.startswith("exec:") and not copies_alone


def corruptible(name: str) -> str:
    """CANNSIM_CORRUPT knows kernels as exec:aclnnX and copies by the name of the API, as CANNSIM_FAIL does not."""
    return name.removeprefix("exec:") if name.startswith("exec:aclrt") else name


def numbered(names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Each name with how often it has occurred so far."""
    seen: collections.Counter[str] = collections.Counter()
    for name in names:
        seen[name] += 1
        yield name, seen[name]


def too_late(log_dir: Path, timeout_s: float, npu_smi_s: float = 0) -> list[str]:
    """The stages of a failed run that outlived the timeout. Those without a device, and its start, have more time."""
    if not (log_dir / evidence.RESULT).exists():
        return []
    limits = {"load": timeout_s, "ready": timeout_s + npu_smi_s, "forward": timeout_s, "benchmark": timeout_s,
              "final": timeout_s + npu_smi_s}  # fmt: skip
    stages = support.read_result(log_dir)["stages"]
    return [f"stage {stage} took {taken} s" for stage, taken in stages.items()
            if taken > limits.get(stage, math.inf) + LATE_S]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Random: two things at once
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Plan:
    """What two random things add up to."""

    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    rlimits: dict[str, int] = dataclasses.field(default_factory=dict)
    signals: list[tuple[float, int, str]] = dataclasses.field(default_factory=list)  # after how long, which, to whom
    planted: dict[str, str] = dataclasses.field(default_factory=dict)  # name in the log directory: what stands there
    unread: list[str] = dataclasses.field(default_factory=list)
    npu_smi: str = ""

    def inject(self, variable: str, text: str) -> None:
        self.environment[variable] = ",".join(filter(None, [self.environment.get(variable), text]))


PLANTED = ("directory", "link", "pipe", "file")
NPU_SMIS = {
    "slow": f"exec sleep {NPU_SMI_S}", "error": "echo dcmi error; exit 1", "nothing": "exit 0", "flood": "exec yes",
    "lost child": "setsid sleep 600 >/dev/null 2>&1 &",
}  # fmt: skip


class Pairs:
    """Draws two things at once, runs them, and judges what is left."""

    def __init__(self, sweep: Sweep, seed: int) -> None:
        self.sweep, self.seed = sweep, seed
        self.things: dict[str, Callable[[Plan, random.Random, Subject], str]] = {
            "fail": self.fail, "hang": self.hang, "corrupt": self.corrupt, "signal": self.signal, "death": self.death,
            "limit": self.limit, "npu-smi": self.npu_smi, "planted": self.plant, "unread": self.leave_unread,
        }  # fmt: skip
        for name, body in NPU_SMIS.items():
            script = sweep.directory / "odd" / name / "npu-smi"
            script.parent.mkdir(parents=True, exist_ok=True)
            script.write_text(f"#!/bin/sh\n{body}\n")
            script.chmod(0o755)

    def fail(self, plan: Plan, draw: random.Random, of: Subject) -> str:
        name, nth = draw.choice(self.sweep.calls(of.name))
        plan.inject("CANNSIM_FAIL", f"{name}:{nth}")
        return f"fail {name}:{nth}"

    def hang(self, plan: Plan, draw: random.Random, of: Subject) -> str:
        name, nth = draw.choice(self.sweep.calls(of.name))
        plan.inject("CANNSIM_HANG", f"{name}:{nth}")
        return f"hang {name}:{nth}"

    def corrupt(self, plan: Plan, draw: random.Random, of: Subject) -> str:
        name, nth = draw.choice([call for call in self.sweep.calls(of.name) if delivers(call[0], False)])
        text = f"{corruptible(name)}:{draw.choice([str(nth), '*'])}:{draw.choice(KINDS)}"
        plan.inject("CANNSIM_CORRUPT", text)
        return f"corrupt {text}"

    def signal(self, plan: Plan, draw: random.Random, _: Subject) -> str:
        number = draw.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL, signal.SIGSTOP])
        return self.send(plan, draw, number, "supervisor")

    def death(self, plan: Plan, draw: random.Random, _: Subject) -> str:
        number = draw.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM, signal.SIGSTOP])
        return self.send(plan, draw, number, "worker")

    def send(self, plan: Plan, draw: random.Random, number: signal.Signals, whom: str) -> str:
        after = draw.uniform(0.05, self.sweep.seconds)
        plan.signals.append((after, number, whom))
        return f"{number.name} to the {whom} after {after:.2f} s"

    def limit(self, plan: Plan, draw: random.Random, _: Subject) -> str:
        name = draw.choice(["RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_AS"])
        value = {"RLIMIT_FSIZE": int(10 ** draw.uniform(0, 4.5)), "RLIMIT_NOFILE": draw.randint(8, 60),
                 "RLIMIT_AS": int(1e9 * draw.uniform(0.9, 1.3))}[name]  # fmt: skip
        plan.rlimits[name] = value
        if name == "RLIMIT_AS":
            plan.environment["CANNSIM_HBM_MB"] = "64"
        return f"{name}={value}"

    def npu_smi(self, plan: Plan, draw: random.Random, _: Subject) -> str:
        plan.npu_smi = draw.choice(list(NPU_SMIS))
        return f"npu-smi: {plan.npu_smi}"

    def plant(self, plan: Plan, draw: random.Random, _: Subject) -> str:
        names = [evidence.RESULT, evidence.OUTPUTS, *evidence.FILES]
        name = draw.choice(names + [f".{name}.tmp" for name in names])
        plan.planted[name] = draw.choice(PLANTED)
        return f"a {plan.planted[name]} as {name}"

    def leave_unread(self, plan: Plan, draw: random.Random, _: Subject) -> str:
        plan.unread.append(draw.choice(["stdout", "stderr"]))
        return f"nobody reads {plan.unread[-1]}"

    def outcome(self, number: int) -> Outcome:
        draw = random.Random(f"{self.seed} {number}")
        of = self.sweep.subjects[draw.choice(["Discrete", "Discrete", "Box", "MultiDiscrete"])]
        plan = Plan()
        chosen = [draw.choice(list(self.things)) for _ in range(2)]
        what = " + ".join(self.things[thing](plan, draw, of) for thing in chosen)
        case = Case("random", what, number, subject=of.name)
        log_dir = self.sweep.log_dir(f"random {number}")
        precious = self.sweep.directory / f"precious {number}"
        precious.write_text("precious")
        log_dir.mkdir(parents=True)
        for name, kind in plan.planted.items():
            plant(log_dir / name, kind, precious)
        result, slow_signals = self.run(plan, of, log_dir)
        found = [*slow_signals, *self.problems(plan, of, result, log_dir)]
        if precious.read_text() != "precious":
            found.append("a linked file was written to")
        error: dict[str, str] = {}
        with contextlib.suppress(FileNotFoundError, IsADirectoryError, ValueError):
            error = support.read_result(log_dir)["error"] or {}
        shutil.rmtree(log_dir, ignore_errors=True)
        precious.unlink()
        stage, message = error.get("stage", ""), error.get("message", "")
        return Outcome(case, result.code, stage, message, tuple(found), result.seconds)

    def run(self, plan: Plan, of: Subject, log_dir: Path) -> tuple[support.Result, list[str]]:
        environment = {**self.sweep.environment, **plan.environment}
        if plan.npu_smi:
            environment["PATH"] = f"{self.sweep.directory / 'odd' / plan.npu_smi}{os.pathsep}{os.environ['PATH']}"
        late = []
        with contextlib.ExitStack() as stack:
            streams = {name: stack.enter_context(faults.full_pipe()) for name in plan.unread}
            process = self.sweep.cli.start(*of.arguments, "--timeout-seconds", HANG_TIMEOUT_S, "--log-dir", log_dir,
                                           env=environment, rlimits=plan.rlimits, **streams)  # fmt: skip
            started = time.monotonic()
            for after, number, whom in sorted(plan.signals):
                time.sleep(max(0.0, after - (time.monotonic() - started)))
                send(process, number, whom)
            result = process.wait(120)
        ends = [after for after, number, whom in plan.signals if whom == "supervisor" and number != signal.SIGSTOP]
        slack = LATE_S + 2 + 2 * (signal.SIGSTOP in [number for _, number, _ in plan.signals])  # two cores, many runs
        if ends and result.seconds > max(ends) + slack:
            late.append(f"took {result.seconds:.1f} s, although it was told to end")
        return result, late

    def problems(self, plan: Plan, of: Subject, result: support.Result, log_dir: Path) -> list[str]:
        if result.code < 0:  # killed: what is left of it is nothing, or nobody's success
            left = evidence.processes_of(result)
            for pid in left if plan.npu_smi == "lost child" else []:  # nobody was left to end it
                os.kill(pid, signal.SIGKILL)
            found = [f"left running: {left}"] if left and plan.npu_smi != "lost child" else []
            killed = {-number for _, number, whom in plan.signals if whom == "supervisor"}
            return found + ([] if result.code in killed else [f"ended by signal {-result.code}"])
        found = [problem for problem in evidence.problems(result, log_dir) if not excused(problem, plan, result.code)]
        if not (log_dir / evidence.RESULT).is_file():
            return found + ([] if result.code else ["FALSE SUCCESS: no result"])
        if result.code == 0 and (wrong := wrong_outputs(of, log_dir)):
            found.append(f"FALSE SUCCESS: {', '.join(wrong)}")
        found += too_late(log_dir, HANG_TIMEOUT_S + 4 * (signal.SIGSTOP in [number for _, number, _ in plan.signals]),
                          NPU_SMI_S if plan.npu_smi else 0)  # fmt: skip
        expected = "VALID" if result.code == 0 else "FAILED RUN"
        if (verdict := evidence.verdict(log_dir, "--checkpoint", of.checkpoint)) != expected:
            found.append(f"check_evidence.py says {verdict}")
        return found

    def outcomes(self, count: int, jobs: int) -> Iterator[Outcome]:
        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(self.outcome, range(count))


def excused(problem: str, plan: Plan, code: int) -> bool:
    """What the two things themselves bring about."""
    lost = "RLIMIT_FSIZE" in plan.rlimits or "stderr" in plan.unread  # stderr is a file here, or a pipe that is full
    if lost and problem.startswith("on stderr"):
        return True
    if code > 0 and problem == f"exit code {code} and no {evidence.RESULT}":
        return bool(plan.rlimits or plan.planted)
    return bool(plan.planted) and problem.startswith("left in the log directory")


def plant(path: Path, kind: str, precious: Path) -> None:
    if kind == "directory":
        (path / "precious").mkdir(parents=True)
    elif kind == "link":
        path.symlink_to(precious)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_text("{}")


def send(process: support.Process, number: int, whom: str) -> None:
    """To a process that may have ended. One that is stopped goes on a while later."""
    with contextlib.suppress(ProcessLookupError, AssertionError):
        if not process.running():
            return
        pid = process.pid if whom == "supervisor" else evidence.worker_of(process, patience=0.2)
        os.kill(pid, number)
        if number == signal.SIGSTOP:
            time.sleep(1)
            os.kill(pid, signal.SIGCONT)


# ---------------------------------------------------------------------------------------------------------------------
# What came of it
# ---------------------------------------------------------------------------------------------------------------------


COLUMNS = ("kind", "checkpoint", "call", "nth", "how", "exit_code", "stage", "verdict", "message", "seconds")


def write_table(path: Path, outcomes: list[Outcome]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, dialect="excel-tab", lineterminator="\n")
        table.writerow(COLUMNS)
        for o in outcomes:
            fields = (o.case.kind, o.case.subject, o.case.name, o.case.nth or "all", o.case.how, o.code, o.stage,
                      o.verdict, o.message, f"{o.seconds:.2f}")  # fmt: skip
            table.writerow(" ".join(str(field).split()) for field in fields)


ENDED = {"fail": "a failing call", "hang": "a call that never returns", "random": "two things at once"}


def summary(outcomes: list[Outcome]) -> str:
    lines = []
    for kind, ended in ENDED.items():
        of_kind = [outcome for outcome in outcomes if outcome.case.kind == kind]
        if of_kind:
            lines.append(f"runs with {ended}: {len(of_kind)}")
        for code, count in sorted(collections.Counter(outcome.code for outcome in of_kind).items()):
            lines.append(f"  exit code {code:4}: {count:5}")
    corrupted = [outcome for outcome in outcomes if outcome.case.kind == "corrupt"]
    for of in dict.fromkeys(outcome.case.subject for outcome in corrupted):
        of_subject = [outcome for outcome in corrupted if outcome.case.subject == of]
        lines.append(f"runs with corrupted data, {of}: {len(of_subject)}")
        for verdict, count in collections.Counter(outcome.verdict for outcome in of_subject).most_common():
            lines.append(f"  {count:5} {verdict}")
    false = sum(any("FALSE SUCCESS" in problem for problem in outcome.problems) for outcome in outcomes)
    lines.append(f"false successes: {false}")
    lines.append(f"other violations: {sum(bool(outcome.problems) for outcome in outcomes) - false}")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--only", choices=["fail", "corrupt", "random"], action="append", help="these cases alone")
    parser.add_argument("--cases", metavar="N", type=int, default=500, help="random pairs (default: %(default)s)")
    parser.add_argument("--seed", metavar="S", type=int, default=1, help="of the random pairs (default: %(default)s)")
    parser.add_argument("--table", metavar="FILE", type=Path, default=TABLE, help="where the outcome of each run goes")
    parser.add_argument("--jobs", metavar="N", type=int, default=os.cpu_count() or 1, help="runs at a time")
    return parser.parse_args()


def all_outcomes(sweep: Sweep, args: argparse.Namespace) -> Iterator[Outcome]:
    kinds = args.only or ["fail", "corrupt", "random"]
    if "fail" in kinds:
        yield from sweep.outcomes([*sweep.failures(), *sweep.hangs()], args.jobs)
    if "corrupt" in kinds:
        yield from sweep.outcomes(sweep.corruptions(), args.jobs)
    if "random" in kinds:
        yield from Pairs(sweep, args.seed).outcomes(args.cases, args.jobs * 2)


def main() -> int:
    args = parse_arguments()
    if "TEST_SIMULATOR" not in os.environ:
        set_up()
    started = time.monotonic()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as directory:
        cli = support.Cli(Path(os.environ["TEST_SIMULATOR"]), Path(directory, "project"))
        try:
            for outcome in all_outcomes(Sweep(cli, Path(directory, "traces")), args):
                outcomes.append(outcome)
                if outcome.problems:
                    print(f"{outcome.case.label} {outcome.case.name}: {outcome.code}: {outcome.verdict}", flush=True)
        finally:
            cli.close()
            write_table(args.table, outcomes)
    print(f"{summary(outcomes)}\n{args.table}: {len(outcomes)} runs in {time.monotonic() - started:.0f} s")
    return int(any(outcome.problems for outcome in outcomes))


def set_up() -> None:
    """Starts this program anew with the interpreter and the simulator of tests/setup.sh."""
    here = Path(__file__).resolve()
    script = 'source "$1"; setup_runtime; use_simulator; TEST_SIMULATOR=$simulator exec "$python" "${@:2}"'
    arguments = ["sweep.py", str(here.parents[1] / "setup.sh"), str(here), *sys.argv[1:]]
    os.execvp("bash", ["bash", "-euo", "pipefail", "-c", script, *arguments])


if __name__ == "__main__":
    sys.exit(main())
