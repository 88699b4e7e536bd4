"""inference.py beside plain Stable-Baselines3 on the simulated NPU, in one run; see bench.sh.

Each figure is measured for both in turn, so that a busy machine slows both alike, and what is compared is their ratio.
What is counted (kernels, copies, synchronisations) is so on hardware as well. Times are the simulator's.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
STANDIN = PROJECT / "tests/data/standin-ppo-seals-CartPole-v0.zip"
STANDIN_SHA256 = "9cf3e56aad9699674a80c839ceb54482552873f5d344f4af1aecd287a9642062"
PROGRAM = [PROJECT / "inference.py", "--checkpoint", STANDIN, "--sha256", STANDIN_SHA256, "--hold-seconds", "0"]
OBSERVATION = [0.1, -0.2, 0.03, 0.4]
BATCH = 4096


# ----------------------------------------------------------------------------------------------------------------------
# Plain Stable-Baselines3, as one would write it
# ----------------------------------------------------------------------------------------------------------------------


def load_plainly() -> Any:
    """The model on npu:0. The schedules in the file were pickled by Python 3.8, so they have to be replaced."""
    import torch
    import torch_npu  # noqa: F401
    from stable_baselines3 import PPO

    schedules = {"learning_rate": 0.0, "lr_schedule": lambda _: 0.0, "clip_range": lambda _: 0.0}
    model = PPO.load(STANDIN, device="npu:0", custom_objects=schedules)
    model.policy.set_training_mode(False)
    torch.npu.synchronize()
    return model


def forward_plainly(model: Any, observations: Any) -> dict[str, Any]:
    """All outputs that inference.py gives, by the public methods of the policy."""
    import torch

    with torch.no_grad():
        tensor, _ = model.policy.obs_to_tensor(observations)
        action, value, log_prob = model.policy(tensor, deterministic=True)
        distribution = model.policy.get_distribution(tensor)
        categorical = distribution.distribution
        outputs = {"action": action, "value": value, "log_prob": log_prob, "entropy": distribution.entropy(),
                   "probs": categorical.probs, "logits": categorical.logits}  # fmt: skip
        return {name: tensor.cpu().numpy() for name, tensor in outputs.items()}


def floor() -> None:
    """The least that a run can do: the imports, the load and one forward."""
    import numpy

    forward_plainly(load_plainly(), numpy.array([OBSERVATION], numpy.float32))
    os._exit(0)  # as inference.py ends, without torch_npu's exit hooks


# ----------------------------------------------------------------------------------------------------------------------
# One process with both: warm passes
# ----------------------------------------------------------------------------------------------------------------------

CALLS = {
    "kernels": lambda name: name.startswith("exec:"),
    "copies": lambda name: name in ("aclrtMemcpy", "aclrtMemcpyAsync"),  # between tensors of the device it is a kernel
    "synchronisations": lambda name: name.startswith("aclrtSynchronize"),
}


def calls_of(forward: Callable[[], Any]) -> dict[str, int]:
    """The calls that one forward makes, when the simulator writes a trace."""
    trace = os.environ.get("CANNSIM_TRACE")
    if trace is None:
        return {}
    before = os.path.getsize(trace)
    forward()
    with open(trace) as file:
        file.seek(before)
        names = [json.loads(line)["name"] for line in file]
    return {kind: sum(map(belongs, names)) for kind, belongs in CALLS.items()}


def warm(repetitions: int) -> None:
    """Prints as JSON what one forward of each costs, and how far their outputs differ.

    inference.py's is measured twice: with its operators recorded, as its benchmark does, and through SB3's methods, as
    in the evidence.
    """
    import numpy

    sys.path.insert(0, str(PROJECT))
    sys.dont_write_bytecode = True
    import inference

    model = load_plainly()
    import torch

    model.policy.requires_grad_(False)  # this and the next as the program does
    validate_distributions = torch.distributions.Distribution.set_default_validate_args
    passes = inference.Passes(model.policy, torch)
    one = numpy.array([OBSERVATION], numpy.float32)
    many = numpy.random.default_rng(0).normal(0, 1, (BATCH, 4)).astype(numpy.float32)
    validate_distributions(False)
    recorded = {len(rows): passes.recorded(rows) for rows in (one, many)}

    def eager(observations: Any) -> dict[str, Any]:
        validate_distributions(False)
        try:
            return passes.run(observations)
        finally:
            validate_distributions(True)

    validate_distributions(True)
    both = {"inference.py": lambda observations: recorded[len(observations)](observations), "eager": eager,
            "plain SB3": lambda observations: forward_plainly(model, observations)}  # fmt: skip
    seconds = {(name, rows): [] for name in both for rows in (1, BATCH)}
    outputs = {}
    for number in range(-10, repetitions):  # the first ten warm up
        for rows, observations in ((1, one), (BATCH, many)):
            if rows == BATCH and number % 10:
                continue
            for name, forward in both.items():
                started = time.perf_counter()
                outputs[name, rows] = forward(observations)
                if number >= 0:
                    seconds[name, rows].append(time.perf_counter() - started)
    counted = {name: calls_of(lambda forward=forward: forward(one)) for name, forward in both.items()}
    difference = max(float(numpy.abs(outputs[name, 1][output] - values).max())
                     for name in both for output, values in outputs["plain SB3", 1].items())  # fmt: skip
    ratios = {name: [mine / theirs for mine, theirs in zip(seconds[name, 1], seconds["plain SB3", 1], strict=True)]
              for name in both}  # fmt: skip
    print(json.dumps({
        "counts": counted, "difference": difference,
        "p50": {name: statistics.median(seconds[name, 1]) for name in both},
        "ratio": {name: statistics.median(ratios[name]) for name in both},
        "rows_per_s": {name: BATCH / statistics.median(seconds[name, BATCH]) for name in both},
    }), flush=True)  # fmt: skip
    os._exit(0)


# ----------------------------------------------------------------------------------------------------------------------
# Whole processes
# ----------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Cost:
    wall: float
    cpu: float  # user and system
    peak: float  # MiB
    output: str


def measure(command: list[Any], code: int = 0, env: dict[str, str] | None = None) -> Cost:
    """The cost of `python3 COMMAND`, a process of its own and what it waited for."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CANNSIM_")}
    environment |= {"TASK_QUEUE_ENABLE": "0", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **(env or {})}
    with tempfile.TemporaryFile() as output:
        started = time.monotonic()
        process = subprocess.Popen([sys.executable, *map(str, command)], stdout=output, stderr=subprocess.STDOUT,
                                   stdin=subprocess.DEVNULL, env=environment)  # fmt: skip
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.monotonic() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read().decode("utf-8", "replace")
    if process.returncode != code:
        sys.exit(f"bench: {command} ended with {process.returncode}, expected {code}:\n{text[-2000:]}")
    return Cost(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, text)


def interleaved(commands: dict[str, dict[str, Any]], times: int) -> dict[str, list[Cost]]:
    costs: dict[str, list[Cost]] = collections.defaultdict(list)
    for number in range(times):
        for name in sorted(commands, reverse=bool(number % 2)):
            costs[name].append(measure(**commands[name]))
    return costs


def median(costs: list[Cost], what: str) -> float:
    return statistics.median(getattr(cost, what) for cost in costs)


def write_rows(path: Path, rows: int) -> Path:
    import numpy

    numpy.save(path, numpy.random.default_rng(0).normal(0, 1, (rows, 4)).astype(numpy.float32))
    return path


# ----------------------------------------------------------------------------------------------------------------------
# The table
# ----------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Row:
    what: str
    ours: str
    other: str
    found: float | None = None  # what the target is about
    target: float | None = None  # at most
    on_hardware: bool = False

    def missed(self) -> bool:
        return self.target is not None and (self.found is None or not self.found <= self.target)

    def __str__(self) -> str:
        limit = "" if self.target is None else f" (at most {self.target:g}{', MISSED' * self.missed()})"
        goal = "" if self.found is None else f"{self.found:.3g}{limit}"
        hardware = "the same" if self.on_hardware else "differs"
        return f"| {self.what} | {self.ours} | {self.other} | {goal} | {hardware} |"


def rows_of_table(directory: Path, quick: bool) -> list[Row]:
    repetitions, times = (50, 3) if quick else (300, 7)
    # a trace costs time: what is timed has none
    traced, timed = (
        json.loads(measure([__file__, "warm", count], env=env).output.splitlines()[-1])
        for count, env in ((1, {"CANNSIM_TRACE": str(directory / "trace")}), (repetitions, {})))
    ours, eager, plain = (traced["counts"][name] for name in ("inference.py", "eager", "plain SB3"))
    if ours != eager:
        sys.exit(f"bench: the recorded forward makes other calls than the eager one: {ours}, {eager}")
    limits = {"kernels": 21, "copies": 3, "synchronisations": 4}
    table = [Row(f"{kind} in a forward", str(ours[kind]), str(plain[kind]), ours[kind], limits[kind], True)
             for kind in CALLS]  # fmt: skip
    table.append(Row("greatest difference of an output", "", "", timed["difference"], 1e-6))
    p50 = timed["p50"]
    for what, name, target in (("its operators recorded", "inference.py", 0.4),
                               ("eager, through SB3's methods", "eager", None)):  # fmt: skip
        table.append(Row(f"warm forward, p50, {what}", f"{p50[name] * 1e6:.0f} µs", f"{p50['plain SB3'] * 1e6:.0f} µs",
                         timed["ratio"][name], target))  # fmt: skip
    speed = timed["rows_per_s"]
    table.append(Row(f"rows/s in batches of {BATCH}", f"{speed['inference.py']:,.0f}", f"{speed['plain SB3']:,.0f}"))

    logs = ["--log-dir", directory / "logs"]
    wrong = directory / "wrong.zip"
    wrong.write_bytes(STANDIN.read_bytes()[:-1] + b"x")
    costs = interleaved({
        "run": {"command": [*PROGRAM, "--observation", json.dumps(OBSERVATION), *logs]},
        "floor": {"command": [__file__, "floor"]},
        "refuse": {"command": [PROJECT / "inference.py", "--checkpoint", wrong, *logs], "code": 3},
        "import": {"command": ["-c", "import torch"]},
    }, times)  # fmt: skip
    for what, unit, label in (("cpu", "s", "CPU time"), ("wall", "s", "time"), ("peak", "MiB", "peak memory")):
        found, least = (median(costs[name], what) for name in ("run", "floor"))
        # wall time is too noisy on a machine that does other things
        table.append(Row(f"whole run, {label}; beside it imports, PPO.load and one forward", f"{found:.2f} {unit}",
                         f"{least:.2f} {unit}", found / least, None if what == "wall" else 1.10))  # fmt: skip
    refuse, importing = (median(costs[name], "cpu") for name in ("refuse", "import"))
    table.append(Row("a wrong checkpoint refused, CPU time; beside it `import torch`", f"{refuse:.2f} s",
                     f"{importing:.2f} s", refuse / importing, 0.1))  # fmt: skip

    peaks, speeds = {}, {}
    for rows in (1_000, 100_000, *([] if quick else [1_000_000])):
        cost = measure([*PROGRAM, "--observations", write_rows(directory / "rows.npy", rows), *logs])
        result = json.loads((directory / "logs/npu_result.json").read_text())
        if result["rows"] != rows:
            sys.exit(f"bench: {result['rows']} of {rows} rows")
        peaks[rows], speeds[rows] = cost.peak, rows / result["forward_s"]
    for rows, peak in list(peaks.items())[1:]:
        table.append(Row(f"peak memory, from 1,000 to {rows:,} rows", f"{peak:.0f} MiB", f"{peaks[1_000]:.0f} MiB",
                         peak - peaks[1_000], 64))  # fmt: skip
        table.append(Row(f"rows/s on the device, a file of {rows:,}", f"{speeds[rows]:,.0f}", ""))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description="inference.py beside plain Stable-Baselines3, simulated")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, and no million rows")
    with tempfile.TemporaryDirectory() as directory:
        table = rows_of_table(Path(directory), parser.parse_args().quick)
    print("| simulated NPU | inference.py | compared with plain SB3, or what the row names | found (limit) "
          "| on hardware |")
    print("| --- | --- | --- | --- | --- |")
    print("\n".join(map(str, table)))
    return int(any(row.missed() for row in table))


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if sys.argv[1:2] == ["floor"]:
        floor()
    if sys.argv[1:2] == ["warm"]:
        warm(int(sys.argv[2]))
    sys.exit(main())
