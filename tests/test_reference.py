"""Exit 0 means that the answer is right: every run is compared with a float64 reference from the checkpoint's bytes."""

from __future__ import annotations

import functools
import json
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from harness import checkpoints, evidence, faults, support
from harness.checkpoints import Kind
from torch import nn

CLOSE = 1e-5  # on the simulator, relative above 1
OUTPUTS = {"action", "value", "log_prob", "entropy", "probs", "logits", "mean", "std", "env_action"}
PROGRAM = runpy.run_path(str(support.PROJECT / "inference.py"))


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> dict[str, str]:
    return faults.quick_npu_smi(tmp_path_factory.mktemp("bin"))


@pytest.fixture
def run(cli, quick, tmp_path):
    """Runs a checkpoint, by default the stand-in, over observations and returns how it ended and its result."""

    def start_and_wait(
        observations: np.ndarray, *args: object, path: Path | None = None, patch: str = "",
        env: support.Environment | None = None,
    ) -> tuple[support.Result, dict[str, Any]]:  # fmt: skip
        model = support.STANDIN_ARGS if path is None else ("--checkpoint", path, "--sha256", evidence.sha256(path))
        options = {"script": faults.patched(cli.project, patch)} if patch else {}
        done = cli(*model, "--observation", json.dumps(observations.tolist()), "--hold-seconds", 0,
                   "--log-dir", tmp_path / "logs", *args, env={**quick, **(env or {})}, **options)  # fmt: skip
        assert evidence.problems(done, tmp_path / "logs") == [], done.stderr
        return done, support.read_result(tmp_path / "logs")

    return start_and_wait


def model(kind: Kind, directory: Path, name: str = "model") -> Path:
    return checkpoints.make(kind, directory / f"{name}.zip")


def log_of(directory: Path) -> str:
    return (directory / "logs" / evidence.LOG).read_text()


# ----------------------------------------------------------------------------------------------------------------------
# Every kind of policy
# ----------------------------------------------------------------------------------------------------------------------


def assert_outputs(result: dict[str, Any], expected: dict[str, np.ndarray]) -> None:
    for name in OUTPUTS - set(expected):
        assert result[name] is None, name
    for name, values in expected.items():
        actual = np.asarray(result[name])
        assert actual.shape == values.shape, name
        if values.dtype.kind in "iu":
            assert np.array_equal(actual, values), name
        else:
            np.testing.assert_allclose(actual, values, rtol=CLOSE, atol=CLOSE, err_msg=name)


def assert_compared(result: dict[str, Any], rows: int) -> None:
    """The reference was computed for all rows and found no difference beyond float32."""
    compared = result["reference"]
    assert (compared["rows"], compared["tolerance"], compared["within_tolerance"]) == (rows, 1e-3, True)
    assert (compared["action_agreement"], compared["ties"]) == (1.0, 0)
    expected = set(result["outputs"]) - ({"action"} if result["action_space"]["type"] != "Box" else set())
    assert set(compared["outputs"]) == expected
    for name, errors in compared["outputs"].items():
        size = max(1.0, float(np.abs(result[name]).max()))
        assert 0 <= errors["mean_abs_error"] <= errors["max_abs_error"] <= CLOSE * size, name
        assert errors["cosine"] is None or errors["cosine"] == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("name", checkpoints.KINDS)
def test_the_npu_gives_what_sb3_gives_on_the_cpu_and_the_reference_agrees(run, tmp_path, name):
    kind = checkpoints.KINDS[name]
    path = model(kind, tmp_path)
    rows = checkpoints.observations(kind, 3)
    done, result = run(rows, path=path)
    assert done.code == 0, done.stderr
    assert_outputs(result, checkpoints.reference(path, rows))
    assert_compared(result, 3)
    assert result["observation"] == rows.tolist()
    assert result["bitwise_repeatable"] and result["all_outputs_on_npu"] and result["params_match_checkpoint"]
    assert result["kernels"] and result["inputs_match_host"]


def test_a_file_of_an_early_release_gives_the_same(run, tmp_path):
    """Every release and kind meets the reader in test_reference_formulas.py."""
    kind = checkpoints.KINDS["ELU, other heads"]
    path = model(kind, tmp_path)
    old = checkpoints.old_dialect(path, tmp_path / "old.zip", checkpoints.DIALECTS["1.0rc0"])
    rows = checkpoints.observations(kind, 3)
    done, result = run(rows, path=old)
    assert done.code == 0, done.stderr
    assert_outputs(result, checkpoints.reference(path, rows))


ACTIVATIONS: dict[str, Any] = {
    name: getattr(nn, name) for name in PROGRAM["ACTIVATIONS"] if name not in ("Tanh", "ReLU", "ELU")  # among KINDS
} | {"LeakyReLU of 0.2": functools.partial(nn.LeakyReLU, negative_slope=0.2)}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_npu_computes_every_activation_as_the_reference_does(run, tmp_path, name):
    """The formulas themselves are compared with torch's in test_reference_formulas.py."""
    kind = Kind(spaces.Discrete(3), {"activation_fn": ACTIVATIONS[name], "net_arch": [32, 32]})
    path = model(kind, tmp_path)
    rows = checkpoints.observations(kind, 8)
    done, result = run(rows, path=path)
    assert done.code == 0, done.stderr
    if name.startswith("GELU"):  # torch_npu has one formula for both of torch's, which differ by up to 5e-4
        assert result["reference"]["within_tolerance"] is True
    else:
        assert_outputs(result, checkpoints.reference(path, rows))
        assert_compared(result, 8)


# ----------------------------------------------------------------------------------------------------------------------
# What an NPU that computes wrongly would do: both passes agree, and only the reference can tell
# ----------------------------------------------------------------------------------------------------------------------

ROWS = checkpoints.observations(checkpoints.KINDS["discrete"], 20)


def wrapped(place: str, statement: str) -> str:
    """A patch: `outputs` of a function of a library are changed before they are handed on."""
    owner, name = place.rsplit(".", 1)
    return f"""
import torch, torch_npu, stable_baselines3.common.policies, stable_baselines3.common.distributions
owner = {owner}
original = owner.{name}
def changed(self, *args, **kwargs):
    outputs = original(self, *args, **kwargs)
    {statement}
    return outputs
owner.{name} = changed
"""


def scaled_value(factor: float) -> str:
    policy = "stable_baselines3.common.policies.ActorCriticPolicy"
    return wrapped(f"{policy}.forward", f"outputs = (outputs[0], outputs[1] * {factor}, outputs[2])")


CATEGORICAL = "torch.distributions.Categorical"
FAULTS = {
    "value": scaled_value(1.01),
    "log_prob": wrapped(f"{CATEGORICAL}.log_prob", "outputs = outputs - 0.01"),
    "entropy": wrapped(f"{CATEGORICAL}.entropy", "outputs = outputs.clone(); outputs[13].add_(0.01)"),
    "action": wrapped("stable_baselines3.common.distributions.CategoricalDistribution.mode", "outputs = 1 - outputs"),
    "logits": wrapped("torch.nn.Linear.forward",
                      "outputs = torch.cat([outputs[:, 1:], outputs[:, :1]], 1) if outputs.shape[1] == 2 else outputs"),
}


@pytest.mark.parametrize("output", FAULTS)
def test_a_wrong_output_ends_the_run_and_is_named(run, tmp_path, output):
    done, result = run(ROWS, patch=FAULTS[output])
    assert (done.code, result["error"]["stage"]) == (6, "forward")
    [line] = evidence.complaints_of(done)
    assert re.search(rf"outside the tolerance of 0\.001 of the float64 reference: .*\b{output}\b", line), line
    assert result["reference"]["within_tolerance"] is False
    assert result["bitwise_repeatable"] is True and result["all_outputs_on_npu"] is True
    assert "within_tolerance=False" in log_of(tmp_path)


def test_a_broken_unit_of_the_device_ends_the_run(run):
    """Every product of matrices has a wrong bit, in both passes alike: the device reports success."""
    done, result = run(ROWS[:2], env={"CANNSIM_CORRUPT": "exec:aclnnAddmm:*:bit"})
    assert done.code == 6, done.stderr
    assert result["error"]["type"] == "ForwardFailed"


def test_the_tolerance_decides_and_one_percent_is_another_question(run, tmp_path):
    """The same answer, 1.5 % off: wrong by default, right where the user allows it, and said not to be within 1 %."""
    path = model(checkpoints.KINDS["discrete"], tmp_path)
    allowed, result = run(ROWS, "--tolerance", "0.1", path=path, patch=scaled_value(1.015))
    assert allowed.code == 0, allowed.stderr
    compared = result["reference"]
    assert (compared["tolerance"], compared["within_tolerance"], compared["within_1_percent"]) == (0.1, True, False)
    assert compared["outputs"]["value"]["max_rel_error_percent"] == pytest.approx(1.5, abs=0.01)
    assert compared["outputs"]["logits"]["max_rel_error_percent"] < 1
    refused, result = run(ROWS, path=path, patch=scaled_value(1.015))
    assert refused.code == 6 and result["reference"]["within_tolerance"] is False


def test_the_figures_are_those_of_numpy(run, tmp_path):
    _, result = run(ROWS, "--tolerance", "1", patch=scaled_value(1.015))
    expected = checkpoints.reference(support.PROJECT / support.STANDIN, ROWS)["value"].astype(np.float64)
    error = np.abs(1.015 * expected - expected)
    stated = result["reference"]["outputs"]["value"]
    assert stated["max_abs_error"] == pytest.approx(error.max(), rel=1e-3)
    assert stated["mean_abs_error"] == pytest.approx(error.mean(), rel=1e-3)
    assert stated["max_rel_error_percent"] == pytest.approx(100 * (error / np.abs(expected)).max(), rel=1e-3)
    assert stated["cosine"] == pytest.approx(1)
    line = next(line for line in log_of(tmp_path).splitlines() if line.startswith("[reference] value "))
    assert line == "[reference] value " + " ".join(f"{name}={number}" for name, number in stated.items())


def test_every_row_of_a_file_is_compared(cli, quick, tmp_path):
    """In chunks; here one row of the fifth is wrong, beyond what is shown and what runs twice."""
    rows = np.random.default_rng(3).normal(0, 1, (50, 4)).astype(np.float32)
    rows[37, 0] = 9.5
    np.save(tmp_path / "rows.npy", rows)
    policy = "stable_baselines3.common.policies.ActorCriticPolicy"
    chunks = "inference.CHUNK_ROWS = 8\n"
    wrong = wrapped(f"{policy}.forward",
                    "outputs = (outputs[0], outputs[1] + (args[0][:, :1] > 9).float(), outputs[2])")  # fmt: skip
    for patch, code in ((chunks, 0), (chunks + wrong, 6)):
        done = cli(*support.STANDIN_ARGS, "--observations", tmp_path / "rows.npy", "--hold-seconds", 0, "--log-dir",
                   tmp_path / "logs", env=quick, script=faults.patched(cli.project, patch))  # fmt: skip
        result = support.read_result(tmp_path / "logs")
        assert (done.code, evidence.problems(done, tmp_path / "logs")) == (code, []), done.stderr
        assert (result["reference"]["rows"], result["repeated_rows"]) == (50, 8)
    assert result["reference"]["outputs"]["value"]["max_abs_error"] == pytest.approx(1, abs=1e-3)
    assert not (tmp_path / "logs" / evidence.OUTPUTS).exists() or result["exit_code"] == 6


def test_the_reference_is_never_taken_for_a_result(run, tmp_path):
    done, result = run(ROWS[:1])
    assert done.code == 0, done.stderr
    log = log_of(tmp_path).replace(str(tmp_path), "")
    lines = [line for line in log.splitlines() if "reference" in line or "float64" in line]
    assert len(lines) > 5 and all(line.startswith("[reference] ") for line in lines)
    assert "never a source of a result" in lines[0]
    assert "device" not in json.dumps(result["reference"])  # measures of a difference, no outputs
    value = np.float64(result["value"][0][0])
    assert value == np.float32(value), "a value that float32 does not have is not the NPU's"


# ----------------------------------------------------------------------------------------------------------------------
# Ties, and what saturation makes meaningless
# ----------------------------------------------------------------------------------------------------------------------


def edited(path: Path, change: Any) -> Path:
    """A checkpoint whose policy is changed, and saved again."""
    from stable_baselines3 import PPO

    saved = PPO.load(path, device="cpu")
    with torch.no_grad():
        change(saved.policy)
    saved.save(path)
    return path


HAIR = 1e-9  # lost beside 1 in float32, and not in float64


def last_by_a_hair(policy: Any) -> None:
    """All choices are equally likely for float32, and the last is the likeliest by a hair."""
    policy.action_net.weight[:] = 0
    policy.action_net.bias[:] = 1
    policy.action_net.weight[-1, 0] = HAIR


TIES = {
    "discrete": (checkpoints.KINDS["discrete"], last_by_a_hair),
    "multi-discrete": (Kind(spaces.MultiDiscrete([3, 2])), last_by_a_hair),
    "multi-binary": (checkpoints.KINDS["multi-binary"],
                     lambda policy: (policy.action_net.weight.zero_(), policy.action_net.bias.fill_(HAIR))),
}  # fmt: skip


@pytest.mark.parametrize("name", TIES)
def test_a_choice_as_likely_as_the_references_own_is_a_tie_and_no_fault(run, tmp_path, name):
    kind, change = TIES[name]
    # a positive first feature, so that the hair counts for the last choice
    positive = Kind(kind.action_space, {"activation_fn": nn.Sigmoid}, kind.observation_space)
    path = edited(model(positive, tmp_path), change)
    done, result = run(checkpoints.observations(kind, 4), path=path)
    assert done.code == 0, done.stderr
    compared = result["reference"]
    assert (compared["ties"], compared["action_agreement"], compared["within_tolerance"]) == (4, 0.0, True)
    assert compared["outputs"]["log_prob"]["max_abs_error"] < 1e-6
    assert "action_agreement=0.0 ties=4" in log_of(tmp_path)


ZEROS = np.zeros(4)


# The other one of two choices, with the log-probability that it has.
OTHER_ACTION = """args[0]["action"] = (args[0]["action"] == 0).long()
    args[0]["log_prob"] = args[0]["logits"].gather(1, args[0]["action"][:, None])[:, 0]"""


def test_an_action_that_the_npus_own_probabilities_do_not_choose_is_no_tie(run):
    """However large the tolerance: the stand-in's choices have 0.55 and 0.45."""
    done, result = run(ZEROS, "--tolerance", 0.3, patch=faults.during("side_by_side", OTHER_ACTION))
    assert (done.code, result["action"]) == (6, [1])
    assert re.search("outside the tolerance .*: action;", done.stderr), done.stderr


@pytest.mark.parametrize("precision", [0, 2, 8])
def test_bounds_that_numpy_printed_rounded_are_read_exactly(run, tmp_path, precision):
    """gymnasium prints them by the options of numpy that hold when the space is made. env_action depends on them."""
    with np.printoptions(precision=precision, suppress=True):
        space = spaces.Box(np.float32([0.4, -np.pi]), np.float32([1.6, -1 / 3]))
    kind = Kind(space)
    path = edited(model(kind, tmp_path), lambda policy: policy.action_net.bias.fill_(0.7))
    rows = checkpoints.observations(kind, 3)
    done, result = run(rows, path=path)
    assert done.code == 0, done.stderr
    assert_outputs(result, checkpoints.reference(path, rows))
    assert result["action_space"]["low"] == space.low.tolist()


@pytest.mark.parametrize("mean", [0.5, 5.0])
def test_a_squashed_log_probability_counts_where_float32_has_it(run, tmp_path, mean):
    """Beyond |mean| = 3 it goes through atanh(tanh(mean)), which float32 has lost."""
    kind = checkpoints.KINDS["gSDE, squash_output"]

    def change(policy: Any) -> None:
        policy.action_net.weight *= 0
        policy.action_net.bias.fill_(mean)

    path = edited(model(kind, tmp_path), change)
    done, result = run(checkpoints.observations(kind, 3), path=path)
    assert done.code == 0, done.stderr
    assert ("log_prob" in result["reference"]["outputs"]) is (mean < 3)
    assert result["reference"]["within_tolerance"] is True and result["log_prob"] is not None


# ----------------------------------------------------------------------------------------------------------------------
# The published result; the pinned checkpoint itself is not at hand
# ----------------------------------------------------------------------------------------------------------------------

FORWARD = json.loads((support.PROJECT / "tests/data/standin.forward.json").read_text())["zero"]


def published(**changes: Any) -> str:
    """A patch: the stand-in in the pinned checkpoint's place, and what is published about it."""
    size = (support.PROJECT / support.STANDIN).stat().st_size
    wanted = {"action": [FORWARD["action"]], "value": [[FORWARD["value"]]], "log_prob": [FORWARD["log_prob"]],
              "probs": [FORWARD["probs"]], "logits": [FORWARD["logits"]], "entropy": [FORWARD["entropy"]]}  # fmt: skip
    return (f"inference.CHECKPOINT_BYTES, inference.CHECKPOINT_SHA256 = {size}, {support.STANDIN_SHA256!r}\n"
            f"inference.PUBLISHED = {wanted | changes!r}\n")  # fmt: skip




@pytest.mark.parametrize(
    ("changes", "within"),
    [
        ({}, True),
        ({"value": [[FORWARD["value"] * 1.0009]]}, True),
        ({"value": [[FORWARD["value"] * 1.0011]]}, False),
        ({"action": [1]}, False),
        ({"probs": [[FORWARD["probs"][0], FORWARD["probs"][1] + 2e-3]]}, False),
        ({"entropy": [FORWARD["entropy"] + 2e-3]}, False),
    ],
)
def test_the_pinned_checkpoint_at_zeros_is_held_against_the_published_result(run, tmp_path, changes, within):
    done, result = run(ZEROS, patch=published(**changes))
    assert done.code == (0 if within else 6), done.stderr
    assert result["source_revision"] == "a86541dd3744275227cb16d07192967fc6b7775e"
    assert (result["model_id"], result["license"]) == ("HumanCompatibleAI/ppo-seals-CartPole-v0", "not-declared")
    stated = result["published"]
    assert (stated["tolerance"], stated["within_tolerance"]) == (1e-3, within)
    assert stated["action_equal"] is ("action" not in changes)
    assert f"[published] tolerance=0.001 within_tolerance={within}" in log_of(tmp_path)
    for name in changes:
        assert name == "action" or stated["outputs"][name] > 5e-4


def test_the_tolerance_of_the_user_counts_for_the_published_result_as_well(run):
    done, result = run(ZEROS, "--tolerance", 0.002, patch=published(value=[[FORWARD["value"] * 1.0011]]))
    assert (done.code, result["published"]["tolerance"]) == (0, 0.002), done.stderr


def test_other_observations_are_not_held_against_the_published_result(run):
    done, result = run(np.array([0.1, 0.0, 0.0, 0.0]), patch=published(action=[1]))
    assert (done.code, result["published"]) == (0, None)


def test_the_published_result_is_the_one_of_the_model_card():
    assert PROGRAM["PUBLISHED"]["value"] == [[196.2478790283203]]
    assert PROGRAM["PUBLISHED"]["probs"] == [[0.7352343797683716, 0.26476559042930603]]
    assert PROGRAM["CHECKPOINT_SHA256"].startswith("4e57a261") and PROGRAM["CHECKPOINT_BYTES"] == 139005
