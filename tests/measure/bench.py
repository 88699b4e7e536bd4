"""inference.py beside plain Stable-Baselines3 on the simulated NPU, in one run; see bench.sh.

Each figure is measured for both in turn, so that a busy machine slows both alike, and what is compared is their ratio.
What is counted (kernels, copies, synchronisations) is so on hardware as well. Times are the simulator's.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import os
import re
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
    """The least that a run can do: the imports, the load and one forward. It ends as a Python process ends."""
    import numpy

    forward_plainly(load_plainly(), numpy.array([OBSERVATION], numpy.float32))


# ----------------------------------------------------------------------------------------------------------------------
# One process with all three: warm passes
# ----------------------------------------------------------------------------------------------------------------------

CALLS = {
    "launches": re.compile(r"aclnn\w+(?<!GetWorkspaceSize)|aclmdlRIExecuteAsync"),  # what the host asks for
    "kernels": re.compile(r"exec:\w+"),  # what the device executes
    "copies": re.compile(r"aclrtMemcpy(Async)?"),  # between tensors of the device it is a kernel
    "synchronisations": re.compile(r"aclrtSynchronize\w+"),
}


def names_in(trace: str | Path, after: int = 0) -> list[str]:
    """The names of the calls in a trace of the simulator, from this byte on."""
    with open(trace) as file:
        file.seek(after)
        return [json.loads(line)["name"] for line in file]


def calls_of(forward: Callable[[], Any]) -> dict[str, int]:
    """The calls that one forward makes, when the simulator writes a trace."""
    trace = os.environ.get("CANNSIM_TRACE")
    if trace is None:
        return {}
    before = os.path.getsize(trace)
    forward()
    names = names_in(trace, before)
    return {kind: sum(bool(pattern.fullmatch(name)) for name in names) for kind, pattern in CALLS.items()}


def forwards() -> tuple[dict[str, Callable[[Any], dict[str, Any]]], str | None]:
    """What is compared, each from observations on the host to all outputs on the host, and why there is no graph."""
    import numpy

    sys.path.insert(0, str(PROJECT))
    sys.dont_write_bytecode = True
    import inference

    model = load_plainly()
    import torch

    model.policy.requires_grad_(False)  # this and the next as the program does
    validate = torch.distributions.Distribution.set_default_validate_args
    passes = inference.Passes(model.policy)

    def eager(observations: Any) -> dict[str, Any]:
        validate(False)
        try:
            return passes.run(observations)
        finally:
            validate(True)

    both = {"eager": eager, "plain SB3": lambda observations: forward_plainly(model, observations)}
    validate(False)
    try:
        captured = {rows: inference.capture(passes, numpy.zeros((rows, 4), numpy.float32)) for rows in (1, BATCH)}
    except (AttributeError, RuntimeError) as error:
        return both, str(error).splitlines()[0]
    finally:
        validate(True)
    return {**both, "graph": lambda observations: captured[len(observations)](observations)}, None


def warm(repetitions: int) -> None:
    """Prints as JSON what one forward of each costs, and how far their outputs differ."""
    import numpy

    every, no_graph = forwards()
    one = numpy.array([OBSERVATION], numpy.float32)
    many = numpy.random.default_rng(0).normal(0, 1, (BATCH, 4)).astype(numpy.float32)
    seconds = {(name, rows): [] for name in every for rows in (1, BATCH)}
    outputs = {}
    for number in range(-10, repetitions):  # the first ten warm up
        for rows, observations in ((1, one), (BATCH, many)):
            if rows == BATCH and number % 10:
                continue
            for name, forward in every.items():
                started = time.perf_counter()
                outputs[name, rows] = forward(observations)
                if number >= 0:
                    seconds[name, rows].append(time.perf_counter() - started)
    counted = {name: calls_of(functools.partial(forward, one)) for name, forward in every.items()}
    difference = max(float(numpy.abs(outputs[name, 1][output] - values).max())
                     for name in every for output, values in outputs["plain SB3", 1].items())  # fmt: skip
    ratios = {name: [mine / theirs for mine, theirs in zip(seconds[name, 1], seconds["plain SB3", 1], strict=True)]
              for name in every}  # fmt: skip
    print(json.dumps({
        "counts": {"graph": None, **counted}, "graph_reason": no_graph, "difference": difference,
        "p50": {name: statistics.median(seconds[name, 1]) for name in every},
        "ratio": {name: statistics.median(ratios[name]) for name in every},
        "rows_per_s": {name: BATCH / statistics.median(seconds[name, BATCH]) for name in every},
    }), flush=True)  # fmt: skip


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


LIMITS = {  # at most, by what is counted in one forward
    "eager": {"kernels": 21, "copies": 3, "synchronisations": 3},
    "graph": {"launches": 1, "copies": 3, "synchronisations": 3},
}
RATIOS = {"eager": 0.6, "graph": 0.25}  # of plain SB3's p50


def rows_of_forwards(directory: Path, repetitions: int) -> list[Row]:
    # a trace costs time: what is timed has none
    traced, timed = (
        json.loads(measure([__file__, "warm", count], env=env).output.splitlines()[-1])
        for count, env in ((1, {"CANNSIM_TRACE": str(directory / "trace")}), (repetitions, {})))
    plain, table = traced["counts"]["plain SB3"], []
    for name, limits in LIMITS.items():
        counts = traced["counts"][name]
        for kind, limit in limits.items():
            ours, found = (str(counts[kind]), counts[kind]) if counts else (traced["graph_reason"], None)
            table.append(Row(f"{kind} in a forward, {name}", ours, str(plain[kind]), found, limit, True))
    table.append(Row("greatest difference of an output", "", "", timed["difference"], 1e-6))
    p50, speed = timed["p50"], timed["rows_per_s"]
    for name, limit in RATIOS.items():
        ours = f"{p50[name] * 1e6:.0f} µs" if name in p50 else timed["graph_reason"]
        table.append(Row(f"warm forward, p50, {name}", ours, f"{p50['plain SB3'] * 1e6:.0f} µs",
                         timed["ratio"].get(name), limit))  # fmt: skip
        if name in speed:
            table.append(Row(f"rows/s in batches of {BATCH}, {name}", f"{speed[name]:,.0f}",
                             f"{speed['plain SB3']:,.0f}"))  # fmt: skip
    return table


def rows_of_processes(directory: Path, times: int) -> list[Row]:
    """Start-up beside the least that a run can do, and a refusal beside an import; wall time is only told, since it is
    too noisy on a machine that does other things."""
    logs, wrong = ["--log-dir", directory / "logs"], directory / "wrong.zip"
    wrong.write_bytes(STANDIN.read_bytes()[:-1] + b"x")
    costs = interleaved({
        "run": {"command": [*PROGRAM, "--observation", json.dumps(OBSERVATION), *logs]},
        "floor": {"command": [__file__, "floor"]},
        "refuse": {"command": [PROJECT / "inference.py", "--checkpoint", wrong, *logs], "code": 3},
        "import": {"command": ["-c", "import torch"]},
    }, times)  # fmt: skip
    table = []
    for what, unit, label in (("cpu", "s", "CPU time"), ("wall", "s", "time"), ("peak", "MiB", "peak memory")):
        found, least = (median(costs[name], what) for name in ("run", "floor"))
        table.append(Row(f"whole run, {label}; beside it imports, PPO.load and one forward", f"{found:.2f} {unit}",
                         f"{least:.2f} {unit}", found / least, None if what == "wall" else 1.10))  # fmt: skip
    refuse, importing = (median(costs[name], "cpu") for name in ("refuse", "import"))
    table.append(Row("a wrong checkpoint refused, CPU time; beside it `import torch`", f"{refuse:.2f} s",
                     f"{importing:.2f} s", refuse / importing, 0.1))  # fmt: skip
    return table


def rows_of_files(directory: Path, sizes: tuple[int, ...]) -> list[Row]:
    """Memory must not grow with the rows; the first size fills a whole pass. The rates of the device, and of the
    reference that checks it."""
    table, first_peak = [], 0.0
    for rows in sizes:
        cost = measure([*PROGRAM, "--observations", write_rows(directory / "rows.npy", rows), "--log-dir",
                        directory / "logs"])  # fmt: skip
        result = json.loads((directory / "logs/npu_result.json").read_text())
        if result["rows"] != rows or result["reference"]["rows"] != rows:
            sys.exit(f"bench: {result['rows']} of {rows} rows")
        if not first_peak:
            first_peak = cost.peak
            continue
        table.append(Row(f"peak memory, from {sizes[0]:,} to {rows:,} rows", f"{cost.peak:.0f} MiB",
                         f"{first_peak:.0f} MiB", cost.peak - first_peak, 64))  # fmt: skip
        device, reference = rows / result["forward_s"], rows / result["reference"]["elapsed_s"]
        table.append(Row(f"rows/s on the device, a file of {rows:,}; beside it the reference's", f"{device:,.0f}",
                         f"{reference:,.0f}"))  # fmt: skip
    return table


def rows_of_table(directory: Path, quick: bool) -> list[Row]:
    repetitions, times = (50, 3) if quick else (300, 7)
    sizes = (20_000, 100_000) if quick else (20_000, 100_000, 1_000_000)
    return [*rows_of_forwards(directory, repetitions), *rows_of_processes(directory, times),
            *rows_of_files(directory, sizes)]  # fmt: skip


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
    elif sys.argv[1:2] == ["warm"]:
        warm(int(sys.argv[2]))
    else:
        sys.exit(main())
