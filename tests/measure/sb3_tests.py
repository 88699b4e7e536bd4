#!/usr/bin/env python3
"""Runs Stable-Baselines3's own tests on the simulated NPU and prints a table of how they ended.

    python3 tests/measure/sb3_tests.py [--wanted N]

The tests come with the sources of the installed release, which pip downloads. "auto", SB3's default device, means npu:0
here. Then PPO trains 2,048 steps on the simulated NPU and on the CPU, and the weights are compared.

Run by hand: some minutes. PYTHON picks the interpreter, as for run.sh. Exit code 0: at least N cases passed (220 unless
given) and the weights agree; 1: they do not.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
FILES = ("predict", "distributions", "save_load", "spaces", "sde", "deterministic", "run")
ALGORITHMS = {"PPO and A2C": r"PPO|A2C|ppo|a2c", "SAC, TD3, DDPG and DQN": r"SAC|TD3|DDPG|DQN|td3|dqn"}
NEITHER = "no algorithm in the name"
OUTCOMES = ("passed", "failed", "skipped")
WANTED = 220
STEPS = 2048
TOLERANCE = 1e-6  # of a weight

Table = dict[tuple[str, str], collections.Counter[str]]

# Loaded by pytest before the tests. Modules of SB3 have imported the function itself, so its code is exchanged.
PLUGIN = """
import torch
import torch_npu
from stable_baselines3.common import utils


def get_device(device="auto"):
    import torch

    device = torch.device("npu:0" if device == "auto" else device)
    return torch.device("cpu") if device.type == "cuda" and not torch.cuda.is_available() else device


utils.get_device.__code__ = get_device.__code__
"""

# Prints the largest difference of a weight. The draws of an action are those of the CPU on both devices: the generators
# of a device and of the CPU differ.
TRAINING = """
import sys

import torch
import torch_npu
from stable_baselines3 import PPO
from torch.distributions import Categorical


def sample(self, sample_shape=torch.Size()):
    return torch.multinomial(self.probs.cpu(), 1, True).squeeze(-1).to(self.probs.device)


Categorical.sample = sample
trained = []
for device in ("cpu", "npu:0"):
    model = PPO("MlpPolicy", "CartPole-v1", n_steps=int(sys.argv[1]) // 2, seed=0, device=device)
    trained.append(model.learn(int(sys.argv[1])).policy.state_dict())
print(max((trained[0][name] - trained[1][name].cpu()).abs().max().item() for name in trained[0]))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wanted", type=int, default=WANTED, help="cases that must pass (%(default)s)")
    wanted = parser.parse_args().wanted
    if "TEST_SIMULATOR" not in os.environ:
        start_on_the_simulator()
    with tempfile.TemporaryDirectory(prefix="sb3-") as directory:
        sources = download(Path(directory))
        passed = show(run_tests(sources, Path(directory)))
        difference = train(Path(directory))
    print(f"\nPPO after {STEPS} steps: the weights differ by at most {difference:.1e} from those of the CPU")
    return 0 if passed >= wanted and difference <= TOLERANCE else 1


def start_on_the_simulator() -> None:
    """Starts this program anew with the interpreter and the simulator of setup.sh."""
    script = 'source "$1"; setup_runtime; setup_tools; use_simulator; export TEST_SIMULATOR=$simulator'
    script += '; exec "$test_python" "${@:2}"'
    arguments = ["sb3_tests.py", str(TESTS / "setup.sh"), str(Path(__file__).resolve()), *sys.argv[1:]]
    os.execvp("bash", ["bash", "-euo", "pipefail", "-c", script, *arguments])


def download(directory: Path) -> Path:
    """The unpacked sources of the installed SB3."""
    release = f"stable-baselines3=={importlib.metadata.version('stable-baselines3')}"
    options = ["--quiet", "--no-deps", "--no-binary", "stable-baselines3", "--dest", str(directory)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, release], check=True)
    (archive,) = directory.glob("*.tar.gz")
    with tarfile.open(archive) as sources:
        sources.extractall(directory, filter="data")
    return directory / archive.name.removesuffix(".tar.gz")


def environment(plugins: Path) -> dict[str, str]:
    chosen = {"TASK_QUEUE_ENABLE": "0", "TORCH_NPU_FALLBACK_CPU_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    return os.environ | chosen | {"PYTHONPATH": str(plugins)}


def run_tests(sources: Path, directory: Path) -> Path:
    """The report, in JUnit's format."""
    (directory / "on_npu.py").write_text(PLUGIN, encoding="utf-8")
    report = directory / "report.xml"
    files = [f"tests/test_{name}.py" for name in FILES]
    options = ["-p", "on_npu", "-p", "no:cacheprovider", "-q", "--tb=line", f"--junit-xml={report}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files], cwd=sources, env=environment(directory), check=False
    )
    if done.returncode not in (0, 1):  # 1: some failed
        raise SystemExit(f"pytest ended with {done.returncode}")
    return report


def show(report: Path) -> int:
    """Prints the table; returns how many cases passed."""
    table: Table = collections.defaultdict(collections.Counter)
    missing: collections.Counter[str] = collections.Counter()
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        failure = case.find("failure") if case.find("failure") is not None else case.find("error")
        outcome = "failed" if failure is not None else "skipped" if case.find("skipped") is not None else "passed"
        file = case.get("classname", "").rpartition("test_")[2]
        table[file, algorithm_of(case.get("name", ""))][outcome] += 1
        if failure is not None:
            text = f"{failure.get('message')} {failure.text}"
            missing[next(iter(re.findall(r"(aclnn\w+|operator \w+)", text)), text.splitlines()[0])] += 1

    rows = [*ALGORITHMS, NEITHER]
    print("\n| test file | algorithm | " + " | ".join(OUTCOMES) + " |\n|---|---|---|---|---|")
    for file in FILES:
        for row in rows:
            if (file, row) in table:
                print_row(file, row, table[file, row])
    for row in rows:
        print_row("all", row, total(counts for (_, algorithm), counts in table.items() if algorithm == row))
    everything = total(table.values())
    print_row("all", "all", everything)
    print("\nWhat the failed cases name:", json.dumps(dict(missing.most_common())))
    return everything["passed"]


def algorithm_of(name: str) -> str:
    return next((label for label, pattern in ALGORITHMS.items() if re.search(pattern, name)), NEITHER)


def total(counts: collections.abc.Iterable[collections.Counter[str]]) -> collections.Counter[str]:
    return sum(counts, collections.Counter())


def print_row(file: str, algorithm: str, counts: collections.Counter[str]) -> None:
    print(f"| {file} | {algorithm} | " + " | ".join(str(counts[outcome]) for outcome in OUTCOMES) + " |")


def train(directory: Path) -> float:
    command = [sys.executable, "-c", TRAINING, str(STEPS)]
    done = subprocess.run(command, env=environment(directory), stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.split()[-1])


if __name__ == "__main__":
    sys.exit(main())
