"""What a forward costs an NPU, counted in the trace of the simulated runtime beside plain Stable-Baselines3; and that
nothing imports torch which does not need it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from harness import evidence, faults, support
from measure import bench


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> dict[str, str]:
    return faults.quick_npu_smi(tmp_path_factory.mktemp("bin"))


def traced(cli, quick, directory: Path, *args: object) -> list[str]:
    """The names of the calls of a run."""
    trace = directory / "trace"
    trace.unlink(missing_ok=True)
    done = cli(*support.STANDIN_ARGS, "--hold-seconds", 0, "--log-dir", directory / "logs", *args,
               env={**quick, "CANNSIM_TRACE": str(trace)})  # fmt: skip
    assert done.code == 0, done.stderr
    return bench.names_in(trace)


def test_it_gives_what_plain_sb3_gives_on_the_same_npu_for_half_the_calls(cli, tmp_path):
    """One warm pass of each: the evidence's own, and plain SB3's."""
    done = cli("warm", 1, script=support.PROJECT / "tests/measure/bench.py",
               env={"CANNSIM_TRACE": str(tmp_path / "trace")})  # fmt: skip
    assert done.code == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    eager, plain = (measured["counts"][name] for name in ("eager", "plain SB3"))
    assert measured["difference"] <= 1e-6
    assert plain["kernels"] > 30 and plain["copies"] > 6, "the count sees not all"
    assert 10 < eager["kernels"] <= 21
    assert 1 < eager["copies"] <= 3 and 1 < eager["synchronisations"] <= 3
    graph = measured["counts"]["graph"]
    if graph is None:
        assert measured["graph_reason"]
    else:
        assert graph["launches"] == 1 and graph["copies"] <= 3 and graph["synchronisations"] <= 3, graph


def test_the_cost_of_many_rows_is_that_of_one(cli, quick, tmp_path):
    """No loop over rows: a batch of 500 launches as many kernels as one observation, in the evidence's two passes."""
    launched = []
    for rows in (1, 500):
        observation = json.dumps([[0.1, -0.2, 0.03, 0.4]] * rows)
        names = traced(cli, quick, tmp_path, "--observation", observation)
        launched.append(Counter(name for name in names if name.startswith("exec:")))
    one, many = launched
    assert many == one
    kernels = support.read_result(tmp_path / "logs")["kernels"]
    assert 10 < sum(kernels.values()) <= 21
    for name, count in kernels.items():
        assert one[f"exec:{name}"] >= 2 * count, name


HEAVY = {"torch", "torch_npu", "stable_baselines3", "numpy", "gymnasium", "pandas", "matplotlib", "huggingface_hub"}
LIGHT = {
    "help": (["--help"], 0),
    "its version": (["--version"], 0),
    "an unknown option": (["--bogus"], 2),
    "a bad value": ([*support.STANDIN_ARGS, "--hold-seconds", "x"], 2),
    "a checkpoint that is absent": (["--checkpoint", "absent.zip"], 3),
    "a wrong checkpoint": (["--checkpoint", support.STANDIN], 3),
    "a file that is not a zip": (["--checkpoint", "tests/data/README.md", "--sha256", "README"], 3),
}


@pytest.mark.parametrize("what", LIGHT)
def test_torch_and_numpy_are_not_imported_for(cli, tmp_path, what):
    args, code = LIGHT[what]
    if "README" in args:
        args = [*args[:-1], evidence.sha256(cli.project / "tests/data/README.md")]
    done = subprocess.run([sys.executable, "-X", "importtime", "inference.py", *args, "--log-dir", tmp_path / "logs"],
                          cwd=cli.project, text=True, capture_output=True, env=support.clean_environment())  # fmt: skip
    assert done.returncode == code, done.stderr[-2000:]
    assert "argparse" in imports(done.stderr), "the list of imports cannot be read"
    assert not HEAVY & imports(done.stderr)


def test_a_run_imports_nothing_that_it_does_not_need(cli, quick, tmp_path):
    """torch's compiler, which several of its functions import on the way, costs more than the whole forward."""
    done = cli.cold(*support.STANDIN_ARGS, "--hold-seconds", 0, "--log-dir", tmp_path / "logs", env=quick,
                    python_args=("-X", "importtime"))  # fmt: skip
    assert done.code == 0, done.stderr[-2000:]
    imported = imports(done.stderr)
    assert {"torch", "torch_npu", "stable_baselines3"} <= imported
    assert not {"torch._dynamo", "torch._inductor", "huggingface_hub"} & imported


def test_the_process_that_the_user_starts_never_imports_torch(cli, quick, tmp_path):
    """It must answer whatever the device does: CANN's libraries are not even mapped."""
    process = cli.start(*support.STANDIN_ARGS, "--hold-seconds", 10, "--log-dir", tmp_path / "logs", cold=True,
                        env=quick)  # fmt: skip
    process.wait_for("holding")
    supervisor = Path(f"/proc/{process.pid}/maps").read_text()
    worker = Path(f"/proc/{evidence.worker_of(process)}/maps").read_text()
    process.kill()
    assert "libtorch" in worker and "libascendcl" in worker
    assert "libtorch" not in supervisor and "libascendcl" not in supervisor


def imports(report: str) -> set[str]:
    """The modules in what `python3 -X importtime` printed."""
    return {line.rpartition("|")[2].strip() for line in report.splitlines() if line.startswith("import time:")}
