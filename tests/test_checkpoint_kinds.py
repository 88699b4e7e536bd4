"""Every kind of checkpoint that PPO writes for MlpPolicy gives, on the simulated NPU, what SB3 gives on the CPU."""

from __future__ import annotations

import hashlib
import itertools
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from harness import checkpoints, support

OUTPUTS = {"action", "value", "log_prob", "entropy", "probs", "logits", "mean", "std", "env_action"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Makes each kind once."""
    directory = tmp_path_factory.mktemp("checkpoints")

    def make(name: str) -> Path:
        path = directory / f"{name}.zip"
        return path if path.exists() else checkpoints.make(checkpoints.KINDS[name], path)

    return make


def run(cli, path: Path, log_dir: Path, observation: np.ndarray | None = None, cold: bool = False) -> support.Result:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    args = ["--checkpoint", path, "--sha256", digest, "--hold-seconds", 0, "--log-dir", log_dir]
    if observation is not None:
        args += ["--observation", json.dumps(observation.tolist())]
    return cli.start(*args, cold=cold).wait()


def assert_outputs(result: dict, expected: dict[str, np.ndarray]) -> None:
    for name in OUTPUTS - set(expected):
        assert result[name] is None, name
    for name, values in expected.items():
        actual = np.asarray(result[name])
        assert actual.shape == values.shape, name
        if values.dtype.kind in "iu":
            assert np.array_equal(actual, values), name
        else:
            np.testing.assert_allclose(actual, values, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", checkpoints.KINDS)
def test_the_outputs_are_those_of_sb3_on_the_cpu(cli, checkpoint, tmp_path, name):
    path = checkpoint(name)
    observation = checkpoints.observations(checkpoints.KINDS[name], 3)
    done = run(cli, path, tmp_path, observation)
    assert done.code == 0, done.stderr
    result = support.read_result(tmp_path)
    assert_outputs(result, checkpoints.reference(path, observation))
    assert result["observation"] == observation.tolist()
    assert result["bitwise_repeatable"] and result["all_outputs_on_npu"] and result["params_match_checkpoint"]


# Each release with what it writes in its own way, and one of them with the rest. (A plain list in net_arch is not among
# them: before SB3 1.8 it meant layers that both heads share.)
OLD = [
    *itertools.product(
        ["discrete", "multi-discrete", "multi-binary", "box of two dimensions", "ELU, other heads"],
        checkpoints.DIALECTS,
    ),
    *itertools.product(
        ["gSDE, not full_std", "no layers", "observation of two dimensions", "observation of float64",
         "unbounded observation"],
        ["1.0rc0"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "version"), OLD)
def test_files_of_earlier_releases_give_the_same(cli, checkpoint, tmp_path, name, version):
    path = checkpoint(name)
    old = checkpoints.old_dialect(path, tmp_path / "old.zip", checkpoints.DIALECTS[version])
    observation = checkpoints.observations(checkpoints.KINDS[name], 2)
    done = run(cli, old, tmp_path / "logs", observation)
    assert done.code == 0, done.stderr
    assert_outputs(support.read_result(tmp_path / "logs"), checkpoints.reference(path, observation))


@pytest.mark.parametrize("name", ["discrete", "observation of two dimensions"])
def test_without_an_observation_it_is_zero(cli, checkpoint, tmp_path, name):
    path = checkpoint(name)
    zero = np.zeros((1, *checkpoints.KINDS[name].observation_space.shape), np.float32)
    done = run(cli, path, tmp_path)
    assert done.code == 0, done.stderr
    result = support.read_result(tmp_path)
    assert result["observation"] == zero.tolist()
    assert_outputs(result, checkpoints.reference(path, zero))


def test_one_observation_is_a_batch_of_one(cli, checkpoint, tmp_path):
    path = checkpoint("discrete")
    observation = checkpoints.observations(checkpoints.KINDS["discrete"], 1)
    assert run(cli, path, tmp_path, observation[0]).code == 0
    assert_outputs(support.read_result(tmp_path), checkpoints.reference(path, observation))


def test_a_cold_process_leaves_the_same_evidence_as_a_forked_one(cli, checkpoint, tmp_path):
    """Else the tests of this suite would say little about `python3 inference.py`."""
    path = checkpoint("box")
    differs = {"pid", "argv", "started_at", "finished_at", "ready_at", "load_s", "forward_s", "total_s", "files"}
    results = []
    for cold in (False, True):
        done = run(cli, path, tmp_path, cold=cold)
        assert done.code == 0, done.stderr
        result = support.read_result(tmp_path)
        assert str(done.pid) in result["npu_smi"].pop("pid_line")
        for stage in result["stages"]:
            stage.pop("elapsed_s")
        results.append({key: value for key, value in result.items() if key not in differs})
    forked, cold = results
    assert forked == cold


# What cannot be rebuilt


def edited(source: Path, target: Path, **changes) -> Path:
    """A copy whose `data` has other values."""
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(target, "w") as copy:
        for name in archive.namelist():
            content = archive.read(name)
            if name == "data":
                content = json.dumps(json.loads(content) | changes).encode()
            copy.writestr(name, content)
    return target


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("net_arch", {"policy_kwargs": {"net_arch": [32, {"pi": [16], "vf": [16]}]}}),
        ("activation_fn", {"policy_kwargs": {"activation_fn": "<class 'my_module.Swish'>"}}),
        ("features_extractor_class", {"policy_kwargs": {"features_extractor_class": "<class 'my_module.Net'>"}}),
        ("observation_space", {"observation_space": {":type:": "<class 'gymnasium.spaces.dict.Dict'>"}}),
        ("policy_class", {"policy_class": {"__module__": "my_module", "__init__": "<function Mine.__init__ at 0x7f>"}}),
    ],
)
def test_what_cannot_be_rebuilt_is_refused_by_name(cli, checkpoint, tmp_path, words, changes):
    path = edited(checkpoint("discrete"), tmp_path / "edited.zip", **changes)
    done = run(cli, path, tmp_path / "logs")
    result = support.read_result(tmp_path / "logs")
    assert (done.code, result["exit_code"]) == (3, 3)
    assert words in done.stderr
    assert words in result["error"]["message"]
    assert result["action"] is None


def test_a_network_that_is_not_the_files_is_refused(cli, checkpoint, tmp_path):
    path = edited(checkpoint("ReLU, two heads"), tmp_path / "edited.zip", policy_kwargs={"net_arch": [64, 32]})
    done = run(cli, path, tmp_path / "logs")
    assert done.code == 3, done.stderr
    assert support.read_result(tmp_path / "logs")["exit_code"] == 3
