"""--benchmark: times of the forward that the evidence ran, each pass on other observations and each answer checked."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import checkpoints, evidence, faults, support

OBSERVATION = ("--observation", "[0.1, -0.2, 0.03, 0.4]")


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> dict[str, str]:
    return faults.quick_npu_smi(tmp_path_factory.mktemp("bin"))


@pytest.fixture
def run(cli, quick, tmp_path):
    def start_and_wait(
        *args: object, path: Path | None = None, patch: str = "", env: support.Environment | None = None
    ) -> tuple[support.Result, dict[str, Any]]:
        model = support.STANDIN_ARGS if path is None else ("--checkpoint", path, "--sha256", evidence.sha256(path))
        options = {"script": faults.patched(cli.project, patch)} if patch else {}
        done = cli(*model, *args, "--hold-seconds", 0, "--log-dir", tmp_path / "logs", env={**quick, **(env or {})},
                   **options)  # fmt: skip
        assert evidence.problems(done, tmp_path / "logs") == [], done.stderr
        return done, support.read_result(tmp_path / "logs")

    return start_and_wait


def test_it_states_what_it_measured(run, tmp_path):
    done, result = run("--benchmark", 30)
    assert done.code == 0, done.stderr
    measured = result["benchmark"]
    assert list(measured) == ["warm_up_passes", "eager", "graph", "graph_reason"]
    assert measured["warm_up_passes"] > 0
    log = (tmp_path / "logs" / evidence.LOG).read_text()
    for name in ("eager", "graph"):
        times = measured[name]
        if times is None:
            assert name == "graph" and measured["graph_reason"]
            assert f"[benchmark] SIMULATED graph: {measured['graph_reason']}\n" in log
            continue
        assert list(times) == ["passes", "p50_s", "p90_s", "p99_s", "mean_s"]
        assert times["passes"] == 30 and 0 < times["p50_s"] <= times["p90_s"] <= times["p99_s"] < 10
        assert 0 < times["mean_s"] <= 30 * times["p99_s"]
        assert (f"[benchmark] SIMULATED {name} passes=30 p50_ms={1e3 * times['p50_s']:.4f} "
                f"p90_ms={1e3 * times['p90_s']:.4f} p99_ms={1e3 * times['p99_s']:.4f}\n") in log  # fmt: skip
    assert (measured["graph"] is None) == (measured["graph_reason"] is not None)
    assert list(result["stages"])[-2:] == ["benchmark", "final"]


def test_it_changes_nothing_in_the_evidence(run, tmp_path):
    assert run(*OBSERVATION)[0].code == 0
    without = evidence.facts(tmp_path / "logs")
    assert run(*OBSERVATION, "--benchmark", 1)[0].code == 0
    assert evidence.facts(tmp_path / "logs") == without


@pytest.mark.parametrize("name", ["multi-discrete", "multi-binary", "gSDE, squash_output"])
def test_every_kind_of_action_can_be_measured(run, tmp_path, name):
    path = checkpoints.make(checkpoints.KINDS[name], tmp_path / "model.zip")
    observation = json.dumps(checkpoints.observations(checkpoints.KINDS[name], 3).tolist())
    done, result = run("--observation", observation, "--benchmark", 2, path=path)
    assert done.code == 0, done.stderr
    assert result["benchmark"]["eager"]["passes"] == 2


@pytest.mark.parametrize("size", [1e-9, 1e30])
def test_observations_of_any_size_can_be_measured(run, size):
    """The passes vary them, by more than float32 rounds away and without overflow."""
    done, _ = run("--observation", json.dumps([size] * 4), "--tolerance", "1e30", "--benchmark", 1)
    assert done.code == 0, done.stderr


def test_a_file_is_measured_one_observation_at_a_time(run, tmp_path):
    np.save(tmp_path / "rows.npy", np.ones((100, 4), np.float32))
    done, result = run("--observations", tmp_path / "rows.npy", "--benchmark", 5)
    assert (done.code, result["benchmark"]["eager"]["passes"], result["rows"]) == (0, 5, 100), done.stderr


# What a forward does that only seems to compute; the evidence alone cannot tell, since its passes are over the same
# observations.
CHEATS = {
    "cached by shape": "if key not in known: known[key] = original(self, observations, *args, **kwargs)\n"
    "    outputs = known[key]",
    "skipped every other time": "known[1] = not known.get(1)\n"
    "    if known[1] or key not in known: known[key] = original(self, observations, *args, **kwargs)\n"
    "    outputs = known[key]",
    # the passes that the reference judges are over by then: only their repetition tells
    "cached when it is warm": "known[1] = known.get(1, 0) + 1\n"
    "    if known[1] < 15: known[key] = original(self, observations, *args, **kwargs)\n"
    "    outputs = known[key]",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_forward_that_is_cached_or_skipped_is_found(run, cheat):
    patch = f"""
import torch, torch_npu
from stable_baselines3.common.policies import ActorCriticPolicy
original, known = ActorCriticPolicy.forward, {{}}
def forward(self, observations, *args, **kwargs):
    key = tuple(observations.shape)
    {CHEATS[cheat]}
    return outputs
ActorCriticPolicy.forward = forward
"""
    assert run(*OBSERVATION, patch=patch)[0].code == 0
    done, result = run(*OBSERVATION, "--benchmark", 5, patch=patch)
    assert (done.code, result["error"]["stage"]) == (6, "benchmark"), done.stderr
    assert re.search("other outputs than before|outside the tolerance", evidence.complaints_of(done)[0])


@pytest.mark.parametrize("fault", ["exec:aclnnAddmm:30", "aclrtMemcpy:60"])
def test_a_device_that_fails_meanwhile_ends_the_run_without_a_figure(run, fault):
    done, result = run("--benchmark", 50, env={"CANNSIM_FAIL": fault})
    assert (done.code, result["error"]["stage"], result["benchmark"]) == (6, "benchmark", None), done.stderr
