"""The float64 reference is what SB3 computes: in float32 within its rounding, and in float64 to fifteen digits."""

from __future__ import annotations

import functools
import json
import sys
import time
import types
import zipfile
from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from gymnasium import spaces
from harness import checkpoints, support
from harness.checkpoints import Kind, box
from stable_baselines3 import PPO
from stable_baselines3.common.preprocessing import preprocess_obs
from torch import nn

ROUNDING = 1e-5  # of float32, relative above 1
EXACT = 1e-12

Outputs = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def program() -> Iterator[types.ModuleType]:
    """inference.py as a module."""
    spec = util.spec_from_file_location("inference_with_reference", support.PROJECT / "inference.py")
    assert spec
    assert spec.loader
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def made(tmp_path) -> Callable[[Kind], Path]:
    def made(kind: Kind) -> Path:
        return checkpoints.make(kind, tmp_path / "made.zip")

    return made


def sb3(path: Path, observations: np.ndarray, dtype: torch.dtype) -> Outputs:
    """SB3's own outputs on the CPU, of a policy of this precision."""
    model = PPO.load(path, device="cpu")
    policy = model.policy.to(dtype)
    policy.set_training_mode(False)

    def preprocess(*arguments: Any, **more: Any) -> torch.Tensor:
        return preprocess_obs(*arguments, **more).to(dtype)

    with torch.no_grad(), mock.patch("stable_baselines3.common.policies.preprocess_obs", preprocess):
        action, value, log_prob = policy(torch.as_tensor(observations), deterministic=True)
        distribution = policy.action_dist
        entropy = distribution.entropy()
        outputs = {"action": action, "value": value, "log_prob": log_prob}
        if entropy is not None:
            outputs["entropy"] = entropy
        inner = distribution.distribution
        if isinstance(inner, list):
            outputs["probs"] = torch.cat([each.probs for each in inner], dim=1)
            outputs["logits"] = torch.cat([each.logits for each in inner], dim=1)
        elif isinstance(inner, torch.distributions.Normal):
            outputs["mean"], outputs["std"] = inner.mean, inner.stddev
            outputs["env_action"] = torch.as_tensor(model.predict(observations, deterministic=True)[0])
        else:
            outputs["probs"], outputs["logits"] = inner.probs, inner.logits
    return {name: output.numpy().astype(np.float64) for name, output in outputs.items()}


def assert_equal(actual: Outputs, expected: Outputs, tolerance: float) -> None:
    assert set(actual) == set(expected)
    for name, values in expected.items():
        assert actual[name].dtype == np.float64, name
        assert actual[name].shape == values.shape, name
        np.testing.assert_allclose(actual[name], values, rtol=tolerance, atol=tolerance, err_msg=name)


def assert_as_sb3(
    program: types.ModuleType, path: Path, rows: np.ndarray, original: Path | None = None, exact: float = EXACT
) -> None:
    """`original` is the same checkpoint in today's form, when SB3 cannot load this one."""
    actual = program.reference_outputs(program.read_checkpoint(path.read_bytes()), rows)
    assert_equal(actual, sb3(original or path, rows, torch.float32), ROUNDING)
    assert_equal(actual, sb3(original or path, rows, torch.float64), exact)


def rows_for(kind: Kind, count: int = 20) -> np.ndarray:
    zeros = np.zeros((1, *kind.observation_space.shape), np.float32)
    return np.concatenate([zeros, checkpoints.observations(kind, count).astype(np.float32)])


@pytest.mark.parametrize("name", checkpoints.KINDS)
def test_every_kind_of_checkpoint_gives_what_sb3_gives(program, made, name):
    kind = checkpoints.KINDS[name]
    assert_as_sb3(program, made(kind), rows_for(kind))


OLD_KINDS = ("discrete", "multi-discrete", "multi-binary", "box of two dimensions", "ELU, other heads",
             "gSDE, not full_std")  # fmt: skip


@pytest.mark.parametrize("version", checkpoints.DIALECTS)
@pytest.mark.parametrize("name", OLD_KINDS)
def test_files_of_earlier_releases_give_the_same(program, made, tmp_path, name, version):
    kind = checkpoints.KINDS[name]
    path = made(kind)
    old = checkpoints.old_dialect(path, tmp_path / "old.zip", checkpoints.DIALECTS[version])
    assert_as_sb3(program, old, rows_for(kind), original=path)


ACTIVATIONS = {
    **{name: getattr(nn, name) for name in (
        "Tanh", "ReLU", "ReLU6", "LeakyReLU", "ELU", "CELU", "SELU", "GELU", "SiLU", "Mish", "Sigmoid", "LogSigmoid",
        "Softplus", "Softsign", "Hardsigmoid", "Hardswish", "Hardtanh", "Tanhshrink", "Softshrink", "Hardshrink",
        "Identity")},
    "LeakyReLU, 0.2": functools.partial(nn.LeakyReLU, negative_slope=0.2),
    "ELU, 2": functools.partial(nn.ELU, alpha=2),
    "CELU, 0.3, in place": functools.partial(nn.CELU, alpha=0.3, inplace=True),
    "GELU by tanh": functools.partial(nn.GELU, approximate="tanh"),
    "Softplus, a low threshold": functools.partial(nn.Softplus, beta=3, threshold=2.0),
    "Hardtanh, wide": functools.partial(nn.Hardtanh, min_val=-0.5, max_val=2),
    "Softshrink, 0.1": functools.partial(nn.Softshrink, lambd=0.1),
    "Hardshrink, 1": functools.partial(nn.Hardshrink, lambd=1.0),
}  # fmt: skip


def test_an_action_must_be_the_npus_own_choice_even_where_the_reference_chooses_it_too(program):
    checkpoint = program.read_checkpoint((support.PROJECT / support.STANDIN).read_bytes())
    observations = np.zeros((1, 4), np.float32)
    npu = program.reference_outputs(checkpoint, observations)
    for probs, wrong in ((npu["probs"], []), (npu["probs"][:, ::-1], ["action"])):
        comparison = program.Comparison(checkpoint, tolerance=0.3)
        comparison.add(observations, {**npu, "probs": probs})
        assert comparison.wrong() == wrong


def test_every_activation_that_loads_is_compared_with_sb3(program):
    assert set(program.ACTIVATIONS) <= set(ACTIVATIONS)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_gives_what_torch_gives(program, made, name):
    kind = Kind(box(2), {"net_arch": [12, 9], "activation_fn": ACTIVATIONS[name]})
    assert_as_sb3(program, made(kind), 3 * rows_for(kind))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_right_far_from_zero(program, name):
    x = np.concatenate([np.linspace(-40, 40, 4001), [-750.0, 750.0, -1e4, 1e4, 0.0]])
    activation = ACTIVATIONS[name]
    known, arguments = program.read_activation(str(activation))
    with np.errstate(all="ignore"):
        actual = program.activate(known, x, **arguments)
    expected = activation()(torch.tensor(x)).numpy()
    np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12)


IMAGE = spaces.Box(0, 255, (2, 4, 4), np.uint8)


@pytest.mark.parametrize("policy_kwargs", [None, {"normalize_images": False}])
def test_images_are_scaled_where_sb3_scales_them(program, made, policy_kwargs):
    kind = Kind(spaces.Discrete(3), policy_kwargs, observation_space=IMAGE)
    rows = np.random.default_rng(2).integers(0, 256, (9, *IMAGE.shape)).astype(np.float32)
    assert_as_sb3(program, made(kind), rows, exact=1e-7)  # SB3 divides in float32


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.float64])
def test_observations_of_other_types_are_not_scaled(program, made, dtype):
    kind = Kind(spaces.Discrete(2), observation_space=box(4, low=0, high=1, dtype=dtype))
    assert_as_sb3(program, made(kind), np.eye(4, dtype=np.float32))


def scaled(path: Path, target: Path, factor: float) -> Path:
    """The checkpoint with larger weights in its last layer of the actor."""
    model = PPO.load(path, device="cpu")
    with torch.no_grad():
        model.policy.action_net.weight.mul_(factor)
    model.save(target)
    return target


@pytest.mark.parametrize("name", ["discrete", "multi-discrete", "multi-binary"])
@pytest.mark.parametrize("factor", [30, 1e4, 1e30])
def test_logits_of_any_size_give_finite_numbers(program, made, tmp_path, name, factor):
    kind = checkpoints.KINDS[name]
    path = scaled(made(kind), tmp_path / "scaled.zip", factor)
    rows = rows_for(kind)
    actual = program.reference_outputs(program.read_checkpoint(path.read_bytes()), rows)
    assert all(np.isfinite(values).all() for values in actual.values())
    expected = sb3(path, rows, torch.float64)
    for name, values in expected.items():
        scale = max(1.0, float(np.abs(expected["logits"]).max()))  # of what rounding leaves of a difference
        np.testing.assert_allclose(actual[name], values, rtol=1e-12, atol=1e-12 * scale, err_msg=name)


def test_a_saturated_squashed_action_is_sb3s_formula(program, made, tmp_path):
    kind = checkpoints.KINDS["gSDE, squash_output"]
    path = scaled(made(kind), tmp_path / "scaled.zip", 20)
    rows = rows_for(kind)
    actual = program.reference_outputs(program.read_checkpoint(path.read_bytes()), rows)
    assert np.abs(actual["mean"]).max() > 20
    assert "entropy" not in actual
    expected = sb3(path, rows, torch.float32)
    for name in ("mean", "std", "action", "env_action", "value"):
        np.testing.assert_allclose(actual[name], expected[name], rtol=ROUNDING, atol=ROUNDING, err_msg=name)
    # Where the action in float32 still tells its mean, so does the log-probability; beyond, both are clipped alike.
    clear = (np.abs(actual["mean"]) < 3).all(axis=1)
    np.testing.assert_allclose(actual["log_prob"][clear], expected["log_prob"][clear], rtol=1e-3, atol=1e-3)
    assert np.isfinite(actual["log_prob"]).all()


@pytest.mark.parametrize("name", ["multi-discrete", "gSDE", "box of two dimensions"])
def test_a_row_does_not_depend_on_the_others(program, made, name):
    kind = checkpoints.KINDS[name]
    read = program.read_checkpoint(made(kind).read_bytes())
    rows = rows_for(kind)
    together = program.reference_outputs(read, rows)
    for number in range(len(rows)):
        alone = program.reference_outputs(read, rows[number : number + 1])
        for output, values in alone.items():
            np.testing.assert_allclose(values[0], together[output][number], rtol=1e-12, atol=1e-12, err_msg=output)


def test_many_rows_take_no_time_of_their_own(program, made):
    """50,000 rows in a second or two: no Python code for each row."""
    kind = checkpoints.KINDS["multi-discrete"]
    read = program.read_checkpoint(made(kind).read_bytes())
    rows = np.zeros((50_000, 4), np.float32)
    started = time.process_time()
    program.reference_outputs(read, rows)
    assert time.process_time() - started < 5


def test_the_bounds_of_a_box_are_those_of_its_type(program, made, tmp_path):
    """0.1 is another number in float32, and an action is clipped to that."""
    path = made(Kind(box(2, low=-0.1, high=0.1)))
    read = program.read_checkpoint(path.read_bytes())
    outputs = program.reference_outputs(read, 9 * np.ones((1, 4), np.float32))
    assert set(np.abs(outputs["env_action"]).ravel()) == {float(np.float32(0.1))}


def test_what_is_compared_is_read_from_the_file_alone(program, made, tmp_path):
    """A weight changed in the file changes the reference."""
    path = made(checkpoints.KINDS["discrete"])
    rows = rows_for(checkpoints.KINDS["discrete"])
    before = program.reference_outputs(program.read_checkpoint(path.read_bytes()), rows)
    after = program.reference_outputs(program.read_checkpoint(scaled(path, tmp_path / "x.zip", 2).read_bytes()), rows)
    assert not np.allclose(before["logits"], after["logits"])
    np.testing.assert_array_equal(before["value"], after["value"])
    with zipfile.ZipFile(path) as archive:
        assert json.loads(archive.read("data"))["policy_kwargs"] == {}
