"""What a forward costs an NPU, counted in the trace of the simulated runtime beside plain Stable-Baselines3; and that
nothing imports torch which does not need it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from harness import evidence, support
from measure import bench

BATCH_PASSES = 20  # a benchmark of more passes measures no more batches


def calls(cli, directory: Path, passes: int) -> Counter[str]:
    """The calls of a run with so many warm passes over one observation."""
    trace = directory / f"trace{passes}"
    done = cli(*support.STANDIN_ARGS, "--hold-seconds", 0, "--log-dir", directory / "logs", "--benchmark", passes,
               env={"CANNSIM_TRACE": str(trace)})  # fmt: skip
    assert done.code == 0, done.stderr
    names = [json.loads(line)["name"] for line in trace.read_text().splitlines()]
    return Counter({kind: sum(map(belongs, names)) for kind, belongs in bench.CALLS.items()})


def test_a_warm_pass_costs_no_more_than_it_must(cli, tmp_path):
    """By the difference that one more pass of the benchmark makes, and one more pass of its operators recorded."""
    fewer, more = (calls(cli, tmp_path, passes) for passes in (BATCH_PASSES, BATCH_PASSES + 1))
    cost = {kind: more[kind] - fewer[kind] for kind in bench.CALLS}
    assert 10 < cost["kernels"] <= 21, cost
    assert 1 < cost["copies"] <= 3, cost
    assert 1 < cost["synchronisations"] <= 4, cost


def test_it_gives_what_plain_sb3_gives_on_the_same_npu_for_half_the_calls(cli, tmp_path):
    done = cli("warm", 1, script=support.PROJECT / "tests/measure/bench.py", env={"CANNSIM_TRACE": str(tmp_path / "trace")})
    assert done.code == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    ours, eager, plain = (measured["counts"][name] for name in ("inference.py", "eager", "plain SB3"))
    assert measured["difference"] <= 1e-6
    assert eager == ours, "the recorded forward must launch what SB3's methods launch"
    assert plain["kernels"] > 30 and plain["copies"] > 6, "the count sees not all"
    assert ours["kernels"] <= 0.55 * plain["kernels"]
    assert ours["copies"] <= 0.3 * plain["copies"] and ours["synchronisations"] <= 0.3 * plain["synchronisations"]


def test_the_cost_of_many_rows_is_that_of_one(cli, tmp_path):
    """No loop over rows: a batch of 500 makes as many calls as one observation."""

    def counted(rows: int) -> Counter[str]:
        trace = tmp_path / f"trace{rows}"
        observation = json.dumps([[0.1, -0.2, 0.03, 0.4]] * rows)
        done = cli(*support.STANDIN_ARGS, "--hold-seconds", 0, "--log-dir", tmp_path / "logs",
                   "--observation", observation, env={"CANNSIM_TRACE": str(trace)})  # fmt: skip
        assert done.code == 0, done.stderr
        return Counter(json.loads(line)["name"] for line in trace.read_text().splitlines())

    one, many = counted(1), counted(500)
    assert {name: many[name] for name in many if name.startswith("exec:")} == {
        name: one[name] for name in one if name.startswith("exec:")
    }


HEAVY = {"torch", "torch_npu", "stable_baselines3", "numpy", "gymnasium", "pandas", "matplotlib", "huggingface_hub"}
LIGHT = {
    "help": (["--help"], 0),
    "an unknown option": (["--bogus"], 2),
    "a bad value": ([*support.STANDIN_ARGS, "--hold-seconds", "x"], 2),
    "a checkpoint that is absent": (["--checkpoint", "absent.zip"], 3),
    "a wrong checkpoint": (["--checkpoint", support.STANDIN], 3),
    "no zip": (["--checkpoint", "tests/data/README.md", "--sha256", "README"], 3),
    "--check": (["--check", "."], 8),
}


@pytest.mark.parametrize("what", LIGHT)
def test_torch_is_not_imported_for(tmp_path, what):
    args, code = LIGHT[what]
    project = support.project_copy(tmp_path / "project")
    if "README" in args:
        args = [*args[:-1], evidence.sha256(project / "tests/data/README.md")]
    done = subprocess.run([sys.executable, "-X", "importtime", "inference.py", *args], cwd=project, text=True,
                          capture_output=True, env=support.clean_environment())  # fmt: skip
    assert done.returncode == code, done.stderr[-2000:]
    assert "argparse" in imports(done.stderr), "the list of imports cannot be read"
    assert not HEAVY & imports(done.stderr)


def test_a_run_imports_nothing_that_it_does_not_need(cli, tmp_path):
    """torch's compiler, which several of its functions import on the way, costs more than the whole forward."""
    done = cli.cold(*support.STANDIN_ARGS, "--hold-seconds", 0, "--log-dir", tmp_path, python_args=("-X", "importtime"))
    assert done.code == 0, done.stderr[-2000:]
    imported = imports(done.stderr)
    assert {"torch", "torch_npu", "stable_baselines3"} <= imported
    assert not {"torch._dynamo", "torch._inductor", "huggingface_hub"} & imported


def imports(report: str) -> set[str]:
    """The modules in what `python3 -X importtime` printed."""
    return {line.rpartition("|")[2].strip() for line in report.splitlines() if line.startswith("import time:")}
