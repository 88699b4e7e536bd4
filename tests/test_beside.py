"""What a run may do beside its evidence: compare with the CPU, and measure times."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from harness import checkpoints, evidence, faults, support


@pytest.fixture
def run(cli, tmp_path):
    def start_and_wait(*args: object, checkpoint: tuple[str, ...] = support.STANDIN_ARGS, **options) -> support.Result:
        return cli(*checkpoint, *args, "--hold-seconds", 0, "--log-dir", tmp_path / "logs", **options)

    return start_and_wait


@pytest.fixture
def result(tmp_path):
    return lambda: support.read_result(tmp_path / "logs")


def model(name: str, directory: Path) -> tuple[str, ...]:
    path = checkpoints.make(checkpoints.KINDS[name], directory / "model.zip")
    return ("--checkpoint", str(path), "--sha256", evidence.sha256(path))


def assert_refused(done: support.Result, log_dir: Path, words: str) -> None:
    assert (done.code, evidence.problems(done, log_dir)) == (6, []), done.stderr
    [line] = evidence.complaints_of(done)
    assert re.search(words, line), line
    assert not (log_dir / "npu_outputs.npz").exists() or support.read_result(log_dir)["exit_code"] == 6


# ----------------------------------------------------------------------------------------------------------------------
# --compare-cpu
# ----------------------------------------------------------------------------------------------------------------------

KINDS = list(checkpoints.KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_the_npu_agrees_with_the_cpu(run, result, tmp_path, name):
    array = checkpoints.observations(checkpoints.KINDS[name], 5)
    done = run("--observation", json.dumps(array.tolist()), "--compare-cpu", checkpoint=model(name, tmp_path))
    assert done.code == 0, done.stderr
    compared = result()["cpu_reference"]
    assert (compared["rows"], compared["within_tolerance"], compared["tolerance"]) == (5, True, 1e-3)
    assert list(compared["outputs"]) == list(result()["outputs"])
    reference = checkpoints.reference(tmp_path / "model.zip", array)
    for output, values in reference.items():  # against numbers that SB3 computed apart from the program
        npu, cpu = np.asarray(result()[output], np.float64), values.astype(np.float64)
        stated = compared["outputs"][output]
        assert stated["max_abs_diff"] == pytest.approx(np.abs(npu - cpu).max(), abs=1e-6)
        assert 0 <= stated["mean_abs_diff"] <= stated["max_abs_diff"] < 1e-4
        assert stated["cosine"] is None or stated["cosine"] == pytest.approx(1, abs=1e-9)
    agreeing = compared["action_agreement"] * 5
    assert agreeing + compared["ties"] == pytest.approx(5)
    if name.startswith(("discrete", "multi")):
        assert (compared["action_agreement"], compared["ties"]) == (1.0, 0)


def test_every_row_of_a_file_is_compared(cli, run, result, tmp_path):
    """In chunks: the measures are those of all rows."""
    array = np.random.default_rng(3).normal(0, 1, (50, 4)).astype(np.float32)
    np.save(tmp_path / "o.npy", array)
    script = faults.patched(cli.project, "inference.CHUNK_ROWS = 8")
    assert run("--observations", tmp_path / "o.npy", "--compare-cpu", script=script).code == 0
    compared = result()["cpu_reference"]
    assert (compared["rows"], compared["action_agreement"]) == (50, 1.0)
    with np.load(tmp_path / "logs/npu_outputs.npz") as npu:
        reference = checkpoints.reference(support.PROJECT / support.STANDIN, array)
        for output in ("value", "logits"):
            difference = np.abs(npu[output].astype(float) - reference[output])
            scale = np.abs(reference[output]).max()
            assert compared["outputs"][output]["max_abs_diff"] == pytest.approx(difference.max(), abs=2e-6 * scale)


def test_outside_the_tolerance_the_run_fails(run, result, tmp_path):
    array = checkpoints.observations(checkpoints.KINDS["discrete"], 20)
    done = run("--observation", json.dumps(array.tolist()), "--compare-cpu", "--tolerance", "1e-12")
    assert_refused(done, tmp_path / "logs", r"the NPU differs from the CPU by \S+, tolerance 1e-12")
    assert result()["cpu_reference"]["within_tolerance"] is False
    assert "[cpu-reference]" in (tmp_path / "logs/npu_inference.log").read_text()


def test_a_cpu_that_overflows_where_the_npu_does_not_ends_the_run_with_evidence(cli, run, tmp_path):
    script = faults.patched(cli.project, """
original = inference.policy_outputs
def policy_outputs(policy, observations, torch):
    outputs = original(policy, observations, torch)
    if observations.device.type == "cpu":
        outputs["value"] = outputs["value"] / 0
    return outputs
inference.policy_outputs = policy_outputs
""")
    assert_refused(run("--compare-cpu", script=script), tmp_path / "logs", "value is NaN or infinite on the CPU")


FAULTS = {  # what an NPU that computes wrongly would do to one output: exit 6 for each
    "value": "outputs['value'] = outputs['value'] + 1", "log_prob": "outputs['log_prob'] = outputs['log_prob'] - 0.01",
    "probs": "outputs['probs'] = 1 - outputs['probs']", "action": "outputs['action'] = 1 - outputs['action']",
    "one row": "outputs['entropy'] = outputs['entropy'] + (torch.arange(20) == 13).float().to('npu:0')",
}  # fmt: skip


@pytest.mark.parametrize("output", FAULTS)
def test_a_wrong_output_of_the_npu_is_found(cli, run, tmp_path, output):
    script = faults.patched(cli.project, f"""
original = inference.policy_outputs
def policy_outputs(policy, observations, torch):
    outputs = original(policy, observations, torch)
    if observations.device.type == "npu":
        {FAULTS[output]}
    return outputs
inference.policy_outputs = policy_outputs
""")
    array = checkpoints.observations(checkpoints.KINDS["discrete"], 20)
    done = run("--observation", json.dumps(array.tolist()), "--compare-cpu", script=script)
    assert_refused(done, tmp_path / "logs", "the NPU differs from the CPU")


def test_what_the_cpu_says_cannot_be_taken_for_the_npus(run, result, tmp_path):
    assert run("--compare-cpu").code == 0
    log = (tmp_path / "logs/npu_inference.log").read_text().replace(str(tmp_path), "")
    lines = [line for line in log.splitlines() if "cpu" in line.lower() and "torch=" not in line]
    assert lines and all(line.startswith("[cpu-reference] ") for line in lines)
    assert [key for key in result() if "cpu" in key] == ["cpu_reference"]
    assert "device" not in json.dumps(result()["cpu_reference"])  # measures of a difference, no outputs
    assert result()["all_outputs_on_npu"] is True and result()["param_devices"] == ["npu:0"]


def test_it_changes_nothing_in_the_evidence(cli, run, result, tmp_path):
    observation = ("--observation", "[0.1, -0.2, 0.03, 0.4]")
    assert run(*observation).code == 0
    without = evidence.facts(tmp_path / "logs")
    assert run(*observation, "--compare-cpu", "--benchmark", 1).code == 0
    assert without.pop("cpu_reference") is without.pop("benchmark") is None
    both = evidence.facts(tmp_path / "logs")
    assert both.pop("cpu_reference") and both.pop("benchmark") and both == without


@pytest.mark.parametrize("args", [
    ("--tolerance", "0"), ("--tolerance", "-1"), ("--tolerance", "nan"), ("--tolerance", "inf"), ("--tolerance", "x"),
    ("--benchmark", "0"), ("--benchmark", "-1"), ("--benchmark", "x"), ("--benchmark", "1.5"),
    ("--benchmark", "1000001"), ("--benchmark",), ("--compare-cpu=yes",),
])  # fmt: skip
def test_bad_values_are_usage_errors(run, tmp_path, args):
    done = run(*args)
    assert (done.code, evidence.problems(done, tmp_path / "logs")) == (2, [])
    assert args[0].partition("=")[0] in evidence.complaints_of(done)[0]


# ----------------------------------------------------------------------------------------------------------------------
# --benchmark
# ----------------------------------------------------------------------------------------------------------------------


def test_the_benchmark_states_what_it_measured(run, result, tmp_path):
    done = run("--benchmark", 30)
    assert done.code == 0, done.stderr
    measured = result()["benchmark"]
    assert list(measured) == ["simulated", "warm_up_passes", "actions_equal_evidence", "single", "eager", "batches"]
    assert measured["simulated"] is True and measured["actions_equal_evidence"] is True
    assert measured["warm_up_passes"] > 0
    assert (measured["single"]["batch"], measured["single"]["passes"]) == (1, 30)
    assert (measured["eager"]["batch"], measured["eager"]["passes"]) == (1, 20)
    assert [line["batch"] for line in measured["batches"]] == [1, 16, 256, 4096]
    for line in (measured["single"], measured["eager"], *measured["batches"]):
        assert 0 < line["p50_s"] <= line["p90_s"] <= line["p99_s"] < 10
        assert line["mean_s"] > 0 and math.isclose(line["rows_per_s"], line["batch"] / line["mean_s"])
    log = (tmp_path / "logs/npu_inference.log").read_text()
    lines = re.findall(r"^\[benchmark\] SIMULATED forward=(\w+) batch=\d+ passes=\d+ p50_s=", log, re.M)
    assert lines == ["recorded", "eager", *["recorded"] * 4]
    assert result()["stages"][-2]["name"] == "benchmark"


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_policy_can_be_measured(run, result, tmp_path, name):
    array = checkpoints.observations(checkpoints.KINDS[name], 3)
    done = run("--observation", json.dumps(array.tolist()), "--benchmark", 1, checkpoint=model(name, tmp_path))
    assert done.code == 0, done.stderr
    assert result()["benchmark"]["single"]["passes"] == 1


@pytest.mark.parametrize("size", [1e-9, 1e9, 1e30, -1e30])
def test_observations_of_any_size_can_be_measured(run, result, size):
    """The passes vary them, by more than float32 rounds away."""
    done = run("--observation", json.dumps([size] * 4), "--benchmark", 1)
    assert done.code == 0, done.stderr


def test_a_wide_observation_is_measured_in_batches_that_fit(run, result, tmp_path):
    name = "observation of two dimensions"
    kind = dataclasses.replace(checkpoints.KINDS[name], observation_space=checkpoints.box(40, 50))
    path = checkpoints.make(kind, tmp_path / "model.zip")
    done = run("--benchmark", 1, checkpoint=("--checkpoint", path, "--sha256", evidence.sha256(path)))
    assert done.code == 0, done.stderr
    assert [line["batch"] for line in result()["benchmark"]["batches"]] == [1, 16]


def test_a_recording_of_nothing_is_no_measurement(cli, run, tmp_path):
    script = faults.patched(cli.project, faults.during(
        "benchmark", "sys.modules['torch'].jit.trace = lambda function, *_, **__: function"))  # fmt: skip
    assert_refused(run("--benchmark", 1, script=script), tmp_path / "logs", "recorded nothing")


CHEATS = {
    "cached by shape": "if key not in known: known[key] = original(policy, observations, torch)\n    return known[key]",
    "skipped every other time": "known[1] = not known.get(1)\n"
    "    if known[1] or key not in known: known[key] = original(policy, observations, torch)\n    return known[key]",
    "its first answer for ever": "if not known: known.update(original(policy, observations, torch))\n"
    "    return {name: part.expand(len(observations), *part.shape[1:]) for name, part in known.items()}",
    "a row left out": "out = original(policy, observations, torch)\n"
    "    return {name: torch.cat([part[:-1], part[:1]]) if len(part) > 1 else part for name, part in out.items()}",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_forward_that_is_cached_or_skipped_is_found(cli, run, tmp_path, cheat):
    """The evidence alone cannot tell: it passes one observation twice, and these give equal answers."""
    script = faults.patched(cli.project, f"""
original, known = inference.policy_outputs, {{}}
def policy_outputs(policy, observations, torch):
    key = tuple(observations.shape)
    {CHEATS[cheat]}
inference.policy_outputs = policy_outputs
""")
    observation = ("--observation", "[0.1, -0.2, 0.03, 0.4]")
    assert run(*observation, script=script).code == 0
    done = run(*observation, "--benchmark", 5, script=script)
    assert_refused(done, tmp_path / "logs", "the benchmark.* gave (another \\w+ than before|the same outputs)")


def test_a_benchmark_whose_action_is_not_the_evidences_is_found(cli, run, tmp_path):
    script = faults.patched(cli.project, """
original = inference.Passes.run
def run(passes, chunk, counted=False):
    values = original(passes, chunk, counted)
    if inference.sys._getframe(1).f_code.co_name != "forward":
        values["action"] = 1 - values["action"]
    return values
inference.Passes.run = run
""")
    done = run("--benchmark", 5, script=script)
    assert_refused(done, tmp_path / "logs", "the benchmark's action is not the evidence's")
