"""The reader: an odd checkpoint loads with its own weights, any other is refused by its right name, none costs much.

Files by the hundred meet `read_checkpoint` alone, in a process that watches what is run, how long it takes and how much
memory. A few of each kind go through the command line in test_hostile_checkpoints.py.
"""

from __future__ import annotations

import collections
import functools
import io
import json
import math
import random
import re
import struct
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import attacks, hostile, support
from harness.hostile import Member, checkpoint, data, members, ordered, pth, standin_weights, with_data, with_entry

FETCH_AGAIN = "fetch or copy the file again"
NOT_PPO_SAVE = "name the .zip that PPO.save of Stable-Baselines3 wrote"
PPO_ONLY = "only PPO with MlpPolicy and a Box of observations can be run"
CLASS = "<class 'torch.nn.modules.activation.{}'>"
OBSERVATIONS = np.random.default_rng(5).normal(0, 1, (3, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def program() -> Iterator[types.ModuleType]:
    """inference.py as a module."""
    spec = util.spec_from_file_location("inference_with_reader", support.PROJECT / "inference.py")
    assert spec
    assert spec.loader
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def refusal(program) -> Callable[[bytes], tuple[str, str]]:
    """Message and hint of a file that must not load."""

    def refusal(content: bytes) -> tuple[str, str]:
        with pytest.raises(program.CheckpointRejected) as caught:
            program.read_checkpoint(content)
        return str(caught.value), caught.value.hint

    return refusal


# ---------------------------------------------------------------------------------------------------------------------
# What is odd, and loads
# ---------------------------------------------------------------------------------------------------------------------


def deflated(contents: dict[str, bytes]) -> bytes:
    return hostile.archive([Member(name, content, method=zipfile.ZIP_DEFLATED) for name, content in contents.items()])


def policy_records() -> dict[str, bytes]:
    return members(members()["policy.pth"])


def with_deflated_records() -> bytes:
    return checkpoint({"policy.pth": deflated(policy_records())})


def with_commented_records() -> bytes:
    records = [Member(name, content) for name, content in policy_records().items()]
    return checkpoint({"policy.pth": hostile.archive(records, comment=b"zipped again")})


def with_record_names(name_of: Callable[[int], str]) -> bytes:
    """The stand-in, with other names for its records: torch before 1.8 took addresses of memory."""
    entries, records = {}, {}
    for number, (name, array) in enumerate(standin_weights().items()):
        key = name_of(number)
        entries[name] = hostile.tensor(hostile.storage(key, array.size), array.shape)
        records[f"data/{key}"] = array.tobytes()
    return hostile.with_pth("policy.pth", ordered(entries), records)


def address(number: int) -> str:
    return str(94_593_068_362_000 + 1_040 * number)


def twenty_digits(number: int) -> str:
    return f"{number + 1:020d}"


def with_large_data() -> bytes:
    """As 4,096 environments and VecNormalize write it."""
    observations = {":type:": "<class 'numpy.ndarray'>", ":serialized:": "QUJD" * (10 << 18)}
    return with_data(_last_obs=observations, _last_original_obs=observations)


def with_members_of_a_mac() -> bytes:
    return checkpoint({"__MACOSX/._data": b"\0\5\26\7", "__MACOSX/._policy.pth": b"\0\5\26\7"})


def bare() -> bytes:
    """The two members that are read, and nothing else."""
    return checkpoint(dict.fromkeys(set(members()) - {"data", "policy.pth"}))


def in_reverse() -> bytes:
    contents = members()
    return hostile.archive([Member(name, contents[name]) for name in reversed(contents)])


def with_data_twice() -> bytes:
    """zipfile, and so SB3, reads the last."""
    contents = members()
    return hostile.archive([Member("data", b"{}"), *(Member(name, content) for name, content in contents.items())])


def with_policy_kwargs(**changes: Any) -> bytes:
    return with_entry("policy_kwargs", **changes)


ODD: dict[str, Callable[[], bytes]] = {
    "records named by address": functools.partial(with_record_names, address),
    "records named by twenty digits": functools.partial(with_record_names, twenty_digits),
    "deflated members": lambda: deflated(members()),
    "deflated records": with_deflated_records,
    "a comment of the records": with_commented_records,
    "a folder of a Mac": with_members_of_a_mac,
    "a file of its owner": lambda: checkpoint({"config.json": b"{}", "README.md": b"mine", "more.pth": b"junk"}),
    "members in reverse": in_reverse,
    "nothing but data and policy.pth": bare,
    "members that are damaged, and not needed": lambda: checkpoint(
        {"policy.optimizer.pth": Member("policy.optimizer.pth", b"x", crc=1), "pytorch_variables.pth": b"\x80\2N."}
    ),
    "data twice": with_data_twice,
    "a comment": lambda: checkpoint(comment=b"my best model"),
    "bytes before it": lambda: checkpoint(prefix=b"#!/bin/sh\nexit\n"),
    "bytes after it": lambda: checkpoint(suffix=b"\n"),
    "data of 20 MB": with_large_data,
    "data that is not ASCII": lambda: checkpoint(
        {"data": json.dumps(data() | {"tensorboard_log": "日志"}, ensure_ascii=False).encode()}
    ),
    "net_arch as one list": lambda: with_policy_kwargs(net_arch=[64, 64]),
    "net_arch in a list": lambda: with_policy_kwargs(net_arch=[{"pi": [64, 64], "vf": [64, 64]}]),
    "net_arch of numpy 1": lambda: with_policy_kwargs(net_arch="{'pi': [64, 64], 'vf': [64, 64]}"),
    "net_arch of numpy 2": lambda: with_policy_kwargs(net_arch="[np.int64(64), np.int64(64)]"),
    "net_arch of None": lambda: with_policy_kwargs(net_arch=None),
    "no net_arch": lambda: with_policy_kwargs(net_arch=...),
    "arguments of training": lambda: with_policy_kwargs(
        ortho_init=False, log_std_init=-2, device="cuda:7", optimizer_class="<class 'mine.Adam'>",
        optimizer_kwargs={"eps": 1e-5},
    ),
    "arguments that are SB3's defaults": lambda: with_policy_kwargs(
        features_extractor_class="<class 'stable_baselines3.common.torch_layers.FlattenExtractor'>",
        features_extractor_kwargs={}, full_std=True, share_features_extractor=True,
    ),
    "a space of gym": lambda: with_entry(
        "observation_space", **{":type:": "<class 'gym.spaces.box.Box'>", "_shape": ..., "shape": [4],
                                "low_repr": ..., "high_repr": ...}
    ),
    "n as a number": lambda: with_entry("action_space", n=2),
    "a shape of numpy 2": lambda: with_entry("observation_space", _shape="(np.int64(4),)"),
    "a dtype as a class": lambda: with_entry("observation_space", dtype="<class 'numpy.float32'>"),
    "bounds that nobody can read": lambda: with_entry("observation_space", low_repr="[-1. ...", high_repr="?"),
    "weights stored by columns": attacks.ODD["a weight stored by columns"],
    "weights in one storage": attacks.ODD["one storage for all weights"],
    "weights of a GPU": attacks.ODD["weights of a GPU"],
    "a plain dictionary of weights": attacks.ODD["a plain dictionary"],
    "a huge integer that means nothing": lambda: with_data(seed=10**29),
    "numbers beyond any": lambda: checkpoint({"data": members()["data"].rstrip()[:-1] + b',"x":1e999,"y":NaN}'}),
}  # fmt: skip


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_what_is_odd_loads_with_its_own_weights(program, make):
    content = make()
    read = program.read_checkpoint(content)
    weights = standin_weights()
    assert set(read.tensors) == set(weights)
    for name, array in weights.items():
        assert read.tensors[name].dtype == np.float32
        assert np.array_equal(read.tensors[name], array), name
    expected = hostile.forward(hostile.standin(), OBSERVATIONS)
    if "activation_fn" in json.loads(members_leniently(content)["data"])["policy_kwargs"]:
        outputs = program.reference_outputs(read, OBSERVATIONS)
        for name, values in expected.items():
            np.testing.assert_allclose(outputs[name], values, rtol=1e-12, atol=1e-12, err_msg=name)


def test_no_other_member_is_opened(program, monkeypatch):
    opened = []

    class Watched(zipfile.ZipFile):
        def open(self, name: Any, *arguments: Any, **more: Any) -> Any:
            opened.append(getattr(name, "filename", name))
            return super().open(name, *arguments, **more)

    monkeypatch.setattr(zipfile, "ZipFile", Watched)
    program.read_checkpoint(hostile.standin())
    assert opened[:2] == ["data", "policy.pth"]
    inner = opened[2:]
    assert inner
    assert all(re.fullmatch(r"[^/]+/(data\.pkl|byteorder|data/\d+)", name) for name in inner)


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_weights_of_another_precision_are_converted_as_load_state_dict_does(program, dtype):
    weights = {name: array.astype(dtype) for name, array in standin_weights().items()}
    read = program.read_checkpoint(hostile.with_policy(weights))
    for name, array in weights.items():
        assert read.tensors[name].dtype == np.float32
        assert np.array_equal(read.tensors[name], array.astype(np.float32)), name


ACTIVATIONS = {
    CLASS.format("Mish"): ("Mish", {}),
    CLASS.format("Tanh"): ("Tanh", {}),
    f"functools.partial({CLASS.format('LeakyReLU')}, negative_slope=0.2)": ("LeakyReLU", {"negative_slope": 0.2}),
    f"functools.partial({CLASS.format('LeakyReLU')}, negative_slope=np.float64(0.2))": (
        "LeakyReLU", {"negative_slope": 0.2}),
    f"functools.partial({CLASS.format('ELU')}, alpha=2, inplace=True)": ("ELU", {"alpha": 2, "inplace": True}),
    f"functools.partial({CLASS.format('GELU')}, approximate='tanh')": ("GELU", {"approximate": "tanh"}),
    f"functools.partial({CLASS.format('Softplus')}, beta=0.5, threshold=1e1)": (
        "Softplus", {"beta": 0.5, "threshold": 10.0}),
    f"functools.partial({CLASS.format('Hardtanh')}, min_val=-2.5, max_val=3)": (
        "Hardtanh", {"min_val": -2.5, "max_val": 3}),
    f"functools.partial({CLASS.format('ReLU')})": ("ReLU", {}),
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), ACTIVATIONS.items())
def test_an_activation_is_known_by_its_name_and_arguments(program, text, expected):
    read = program.read_checkpoint(with_policy_kwargs(activation_fn=text))
    assert (read.activation, read.activation_kwargs) == expected


def test_an_empty_policy_kwargs_is_sb3s_default(program):
    read = program.read_checkpoint(with_data(policy_kwargs={}))
    assert (read.activation, read.net_arch) == ("Tanh", {"pi": [64, 64], "vf": [64, 64]})
    assert read.policy_kwargs == {}


def test_what_the_standin_says_is_read(program):
    read = program.read_checkpoint(hostile.standin())
    largest = float(np.finfo(np.float32).max)
    high = [largest, largest, math.pi, largest]
    assert (read.observation.shape, read.observation.dtype) == ((4,), "float32")
    np.testing.assert_allclose(read.observation.high, high, rtol=1e-6)
    np.testing.assert_allclose(read.observation.low, np.negative(high), rtol=1e-6)
    assert read.action == {"type": "Discrete", "n": 2}
    assert (read.use_sde, read.vec_normalize) == (False, False)


def test_training_with_vecnormalize_is_seen(program):
    assert program.read_checkpoint(with_data(_last_original_obs={":serialized:": "QUJD"})).vec_normalize
    assert not program.read_checkpoint(with_data(_last_original_obs=...)).vec_normalize


def with_action(kind: str, outputs: int, use_sde: bool = False, log_std: tuple[int, ...] = (), **text: Any) -> bytes:
    """The stand-in with another action space and weights for it."""
    weights = standin_weights()
    weights["action_net.weight"] = np.ones((outputs, 64), np.float32)
    weights["action_net.bias"] = np.zeros(outputs, np.float32)
    if log_std:
        weights["log_std"] = np.zeros(log_std, np.float32)
    entry = {":type:": f"<class 'gymnasium.spaces.{kind}'>", ":serialized:": "", **text}
    values = json.dumps(data() | {"action_space": entry, "use_sde": use_sde}).encode()
    entries, records = hostile.state_dict(weights)
    return checkpoint({"data": values, "policy.pth": pth(ordered(entries), records)})


BOX: dict[str, Any] = {"_shape": [2], "dtype": "float32", "low": "[-1.  -0.5]", "high": "[1. 2.]"}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: with_action("multi_discrete.MultiDiscrete", 5, nvec="[3 2]"), {"nvec": [3, 2]}),
        (lambda: with_action("multi_discrete.MultiDiscrete", 4, nvec="[4]"), {"nvec": [4]}),
        (lambda: with_action("multi_binary.MultiBinary", 4, n=4), {"n": 4}),
        (lambda: with_action("discrete.Discrete", 3, n="3", start="0"), {"n": 3}),
    ],
)
def test_actions_are_read_from_their_text(program, make, expected):
    action = program.read_checkpoint(make()).action
    assert {name: value for name, value in action.items() if name != "type"} == expected


@pytest.mark.parametrize(
    ("text", "shape", "dtype", "low", "high"),
    [
        ({}, (2,), "float32", [-1, -0.5], [1, 2]),
        ({"low_repr": "-1.0", "high_repr": "inf"}, (2,), "float32", [-1, -1], [math.inf, math.inf]),
        ({"_shape": [1, 2], "low": "[[-1. -2.]]", "high": "[[1.\n  1e-05]]"}, (1, 2), "float32", [-1, -2], [1, 1e-5]),
        ({"dtype": "bool", "low": "[False False]", "high": "[ True  True]"}, (2,), "bool", [0, 0], [1, 1]),
        ({"dtype": "<class 'numpy.int8'>", "low": [-3, -3], "high": 4}, (2,), "int8", [-3, -3], [4, 4]),
    ],
)
def test_a_box_of_actions_is_read_from_its_text(program, text, shape, dtype, low, high):
    box = program.read_checkpoint(with_action("box.Box", 2, log_std=(2,), **BOX | text)).action["box"]
    assert (box.shape, box.dtype, box.low, box.high) == (shape, dtype, low, high)


@pytest.mark.parametrize(("full_std", "log_std"), [(True, (64, 2)), (False, (64, 1))])
def test_gsde_has_a_deviation_for_each_latent_feature(program, full_std, log_std):
    content = with_action("box.Box", 2, use_sde=True, log_std=log_std, **BOX)
    entry = {**data()["policy_kwargs"], "full_std": full_std, "squash_output": True}
    values = json.dumps({**json.loads(members(content)["data"]), "policy_kwargs": entry}).encode()
    read = program.read_checkpoint(checkpoint({"data": values, "policy.pth": members(content)["policy.pth"]}))
    assert (read.use_sde, read.tensors["log_std"].shape) == (True, log_std)
    assert read.policy_kwargs == {"full_std": full_std, "squash_output": True}


@pytest.mark.parametrize(
    ("text", "image"),
    [
        ({"low_repr": "0", "high_repr": "255"}, True),
        ({"low": "[[[0]\n  [0]]\n\n [[0]\n  [0]]]", "high": "[[[255]\n  [255]]\n\n [[255]\n  [255]]]"}, True),
        ({"low": "[[[0 ... 0]]]", "high": "[[[255 ... 255]]]"}, True),
        ({"low_repr": "0", "high_repr": "254"}, False),
        ({"low_repr": "0", "high_repr": "255", "dtype": "int16"}, False),
        ({"low_repr": "0", "high_repr": "255", "_shape": [4]}, False),
    ],
)
def test_what_sb3_takes_for_an_image_is_known_as_one(program, text, image):
    usual = {"low_repr": ..., "high_repr": ..., "dtype": "uint8", "_shape": [2, 2, 1]}
    read = program.read_checkpoint(with_entry("observation_space", **usual | text))
    assert program.is_image(read) is image
    read.policy_kwargs["normalize_images"] = False
    assert not program.is_image(read)


# ---------------------------------------------------------------------------------------------------------------------
# What is refused, in so many words
# ---------------------------------------------------------------------------------------------------------------------


def with_policy_class(module: str, name: str, **changes: Any) -> bytes:
    """The stand-in as another algorithm's or another policy's."""
    entry = {"__module__": module, "__init__": f"<function {name}.__init__ at 0x7fddd37a4a60>", "__doc__": None}
    return with_data(policy_class=entry, **changes)


def with_shared_layers() -> bytes:
    """As SB3 before 1.8 wrote net_arch=[64, 64]: one tower for both."""
    weights = standin_weights()
    for number in (0, 2):
        for part in ("weight", "bias"):
            del weights[f"mlp_extractor.value_net.{number}.{part}"]
            array = weights.pop(f"mlp_extractor.policy_net.{number}.{part}")
            weights[f"mlp_extractor.shared_net.{number}.{part}"] = array
    entries, records = hostile.state_dict(weights)
    values = json.dumps(data() | {"policy_kwargs": {"net_arch": [64, 64]}}).encode()
    return checkpoint({"data": values, "policy.pth": pth(ordered(entries), records)})


def sb2() -> bytes:
    return hostile.archive([Member("data", b"{}"), Member("parameters", b"PK"), Member("parameter_list", b"[]")])


def in_a_folder() -> bytes:
    return hostile.archive([Member(f"model/{name}", content) for name, content in members().items()])


def in_another() -> bytes:
    return hostile.archive([Member("model.zip", hostile.standin())])


def with_weights(**changes: np.ndarray | None) -> bytes:
    """The stand-in with other tensors, or (None) without some; two underscores stand for a dot."""
    weights: dict[str, Any] = {**standin_weights(), **{k.replace("__", "."): v for k, v in changes.items()}}
    return hostile.with_policy({name: array for name, array in weights.items() if array is not None})


def with_wrong_element(value: float) -> bytes:
    weights = standin_weights()
    weights["value_net.weight"][0, 63] = value
    return hostile.with_policy(weights)


def space(kind: str) -> dict[str, str]:
    return {":type:": f"<class 'gymnasium.spaces.{kind}'>"}


OTHER_POLICY = "the policy is not SB3's own, or its settings were changed"
SHARED = "the policy has layers that both towers share (SB3 before 1.8), which SB3 2 cannot build"
CUT = "the file is a zip archive that is cut short or damaged"
NOT_JSON = "data is not a JSON object that can be read"
HTML = "fetch the file itself: hf download REPOSITORY FILE"
SB3_POLICIES = "stable_baselines3.common.policies"

REFUSED: dict[str, tuple[Callable[[], bytes], str | tuple[str, ...], str]] = {
    # files that are no checkpoint
    "an empty file": (bytes, "the file is empty", FETCH_AGAIN),
    "a text": (lambda: b"Entry not found", "the file is not a zip archive", NOT_PPO_SAVE),
    "a Git LFS pointer": (
        lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:9cf3\nsize 138490\n",
        "the file is a Git LFS pointer, not the checkpoint itself", "git lfs pull"),
    "an HTML page": (lambda: b"\n<!DOCTYPE html>\n<html>...", "the file is an HTML page", HTML),
    "an HTML page without a type": (lambda: b"<HTML><body>404", "the file is an HTML page", HTML),
    "a .pth of torch before 1.6": (
        lambda: members(attacks.with_legacy_policy())["policy.pth"], "the file was written by torch before 1.6",
        "load and save it again with a newer torch"),
    "a .pth": (
        lambda: members()["policy.pth"], "the file is a .pth of torch.save, or a checkpoint that is cut short",
        NOT_PPO_SAVE),
    "a file that is cut": (lambda: hostile.standin()[:10_000], CUT, FETCH_AGAIN),
    "a file that is cut behind policy.pth": (
        lambda: hostile.standin()[:100_000], "the file is a .pth of torch.save, or a checkpoint that is cut short",
        NOT_PPO_SAVE),
    "another zip": (
        lambda: hostile.archive([Member("a.txt", b"a")]),
        "the archive has no member data, so it is not a checkpoint of SB3", NOT_PPO_SAVE),
    "a checkpoint in a folder": (
        in_a_folder, "the members of the checkpoint are in a folder of the archive", "zip them without the folder"),
    "a zip in a zip": (in_another, "the archive holds another archive", "unzip it once"),
    "Stable-Baselines 2": (sb2, "the checkpoint is of Stable-Baselines 2, not of SB3", "train it again with SB3"),
    "no policy.pth": (lambda: checkpoint({"policy.pth": None}), "the member 'policy.pth' is missing", FETCH_AGAIN),
    "a damaged member": (
        lambda: attacks.with_member_of("data", crc=1), "the member 'data' is damaged or encrypted", FETCH_AGAIN),
    "an encrypted member": (
        lambda: attacks.with_member_of("data", flags=1), "the member 'data' is damaged or encrypted", FETCH_AGAIN),
    "a member packed by bzip2": (
        lambda: attacks.with_member_of("data", method=zipfile.ZIP_BZIP2),
        "the member 'data' is neither stored nor deflated", "zip the members again"),
    # other algorithms, before anything else is looked at
    **{name: (functools.partial(with_policy_class, module, "SomePolicy"), ("the checkpoint is of", "not of PPO"),
              PPO_ONLY) for name, module in {
        "SAC": "stable_baselines3.sac.policies", "TD3 or DDPG": "stable_baselines3.td3.policies",
        "DQN": "stable_baselines3.dqn.policies", "MaskablePPO": "sb3_contrib.common.maskable.policies",
        "RecurrentPPO": "sb3_contrib.common.recurrent.policies", "QR-DQN": "sb3_contrib.qrdqn.policies",
        "TQC": "sb3_contrib.tqc.policies", "ARS": "sb3_contrib.ars.policies",
        "CrossQ": "sb3_contrib.crossq.policies"}.items()},
    "A2C": (lambda: with_data(clip_range=..., n_epochs=...), "the checkpoint is of A2C, not of PPO", PPO_ONLY),
    "TRPO": (
        lambda: with_data(clip_range=..., n_epochs=..., cg_max_steps=15), "the checkpoint is of TRPO, not of PPO",
        PPO_ONLY),
    # other policies
    "CnnPolicy": (
        lambda: with_policy_class(SB3_POLICIES, "ActorCriticCnnPolicy"),
        f"the policy is CnnPolicy of '{SB3_POLICIES}', not MlpPolicy", PPO_ONLY),
    "MultiInputPolicy": (
        lambda: with_policy_class(SB3_POLICIES, "MultiInputActorCriticPolicy"),
        f"the policy is MultiInputPolicy of '{SB3_POLICIES}', not MlpPolicy", PPO_ONLY),
    "a policy of one's own": (
        lambda: with_policy_class("imitation.policies.base", "FeedForward32Policy"),
        "the policy is 'FeedForward32Policy' of 'imitation.policies.base', not MlpPolicy", PPO_ONLY),
    "a policy of a notebook": (
        lambda: with_policy_class("__main__", "main.<locals>.MyPolicy"),
        "the policy is 'main.<locals>.MyPolicy' of '__main__', not MlpPolicy", PPO_ONLY),
    "a policy without a constructor of its own": (
        lambda: with_data(policy_class={"__module__": "mine", "forward": "<function Mine.forward at 0x7f>"}),
        "of 'mine', not MlpPolicy", PPO_ONLY),
    "a policy without a name": (
        lambda: with_data(policy_class={"__module__": "mine"}),
        "the policy is 'a class' of 'mine', not MlpPolicy", PPO_ONLY),
    # what a policy is built of
    "layers that both towers share": (with_shared_layers, SHARED, "train it again with SB3 2"),
    "layers that both towers share, in net_arch": (
        lambda: with_policy_kwargs(net_arch=[64, {"pi": [64], "vf": [64]}]), SHARED, "train it again with SB3 2"),
    "layers that are shared, of numpy's integers": (
        lambda: with_policy_kwargs(net_arch="[np.int64(64), {'pi': [64], 'vf': [64]}]"), SHARED,
        "train it again with SB3 2"),
    "net_arch of words": (
        lambda: with_policy_kwargs(net_arch="small"),
        ("policy_kwargs", "net_arch", "not lists of layer sizes", "'small'"), ""),
    "net_arch of nothing": (
        lambda: with_policy_kwargs(net_arch=[0]),
        ("net_arch in policy_kwargs", "pi", "'[0]'"), ""),
    "an extractor of one's own": (
        lambda: with_policy_kwargs(features_extractor_class="<class 'mine.Extractor'>"),
        ("policy_kwargs has 'features_extractor_class'", "<class 'mine.Extractor'>"),
        "a policy with it cannot be rebuilt"),
    "squash_output without gSDE": (
        lambda: with_policy_kwargs(squash_output=True), "squash_output is true, but use_sde is not",
        ""),
    "gSDE of a choice": (
        lambda: with_data(use_sde=True), "use_sde is not true or false, or true without a Box of actions",
        ""),
    "no policy_kwargs": (lambda: with_data(policy_kwargs=...), "data lacks policy_kwargs", NOT_PPO_SAVE),
    "policy_kwargs without text": (
        lambda: with_data(policy_kwargs={":type:": "<class 'dict'>", ":serialized:": "QUJD"}),
        "policy_kwargs has no text beside what is serialised", NOT_PPO_SAVE),
    "Dict observations": (
        lambda: with_entry("observation_space", **space("dict.Dict")), "observation_space is Dict, not Box", PPO_ONLY),
    "Discrete observations": (
        lambda: with_entry("observation_space", **space("discrete.Discrete")),
        "observation_space is Discrete, not Box", PPO_ONLY),
    "a space of one's own": (
        lambda: with_entry("observation_space", **{":type:": "<class 'mine.Box'>"}),
        'observation_space is "<class \'mine.Box\'>", not a space of gymnasium', PPO_ONLY),
    "a Box without dimensions": (
        lambda: with_entry("observation_space", _shape=[]), "observation_space has 1 numbers in 0 dimensions",
        ""),
    "a Tuple of actions": (
        lambda: with_data(action_space=space("tuple.Tuple")), "action_space is Tuple",
        "Discrete, MultiDiscrete, MultiBinary and Box can be run"),
    "MultiBinary of two dimensions": (
        lambda: with_data(action_space=space("multi_binary.MultiBinary") | {"n": [2, 3]}),
        "action_space is MultiBinary of [2, 3], not of one number", ""),
    "MultiDiscrete of two dimensions": (
        lambda: with_data(action_space=space("multi_discrete.MultiDiscrete") | {"nvec": "[[1 1]\n [1 1]]"}),
        ("nvec", "action_space", "[[1 1]\\n [1 1]]"), ""),
    "bounds of actions that are left out": (
        lambda: with_action("box.Box", 2, log_std=(2,), **BOX | {"low": "[-1. ... -1.]"}),
        "action_space has bounds that cannot be read", "SB3 has written them in part, or rounded"),
    # weights
    "a tensor too few": (
        lambda: with_weights(value_net__bias=None),
        ("policy.pth", "'value_net.bias' is missing", "(1,)"), OTHER_POLICY),
    "a tensor too many": (
        lambda: with_weights(extra=np.zeros(2, np.float32)),
        ("policy.pth", "'extra' is (2,)"), OTHER_POLICY),
    "another shape": (
        lambda: with_policy_kwargs(net_arch=[64, 32]),
        ("policy.pth", "'mlp_extractor.policy_net.2.weight' is (64, 64)", "(32, 64)"),
        OTHER_POLICY),
    "weights of NaN": (
        functools.partial(with_wrong_element, math.nan), "policy.pth has NaN or infinite weights in value_net.weight",
        "the training has diverged: take an earlier checkpoint"),
    "infinite weights": (
        functools.partial(with_wrong_element, math.inf), "policy.pth has NaN or infinite weights in value_net.weight",
        "the training has diverged: take an earlier checkpoint"),
    "weights beyond float32": (
        lambda: with_weights(value_net__bias=np.full(1, 1e300)),
        "policy.pth has NaN or infinite weights in value_net.bias",
        "the training has diverged: take an earlier checkpoint"),
    "complex weights": (
        lambda: with_weights(value_net__bias=np.zeros(1, np.complex64)),
        "policy.pth asks for 'torch ComplexFloatStorage'",
        "tensors of float32, float64 and float16 can be read, and nothing is run"),
    "a call": (
        lambda: hostile.with_pth("policy.pth", hostile.called(hostile.named("os", "system"), "touch x")),
        "policy.pth asks for 'os system'", "tensors of float32, float64 and float16 can be read, and nothing is run"),
    "weights of torch before 1.6": (
        attacks.with_legacy_policy, "policy.pth was written by torch before 1.6",
        "load and save it again with a newer torch"),
    "weights of a big-endian machine": (
        lambda: attacks.with_records(lambda records: {**records, "byteorder": b"big"}),
        "policy.pth was written on a big-endian machine", "save it again on a little-endian one"),
    "two archives in one": (
        attacks.with_two_policies, "policy.pth is an archive that torch could read in another way", NOT_PPO_SAVE),
    "a record that is too long": (
        lambda: attacks.with_records(lambda r: {**r, "data/2": r["data/2"] + bytes(4)}),
        "policy.pth has a record of another size for mlp_extractor.policy_net.2.weight", FETCH_AGAIN),
    # data
    "data that is not JSON": (lambda: checkpoint({"data": b"{"}), NOT_JSON, FETCH_AGAIN),
    "data that is nested too deep": (
        lambda: checkpoint({"data": b"[" * 50_000 + b"]" * 50_000}), NOT_JSON, FETCH_AGAIN),
    "data with a number of many digits": (
        lambda: checkpoint({"data": b'{"a":' + b"9" * 5000 + b"}"}), NOT_JSON, FETCH_AGAIN),
    "data that is a list": (lambda: checkpoint({"data": b"[]"}), NOT_JSON, FETCH_AGAIN),
}  # fmt: skip


@pytest.mark.parametrize(("make", "message", "hint"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_names_what_the_file_is_and_what_to_do(refusal, make, message, hint):
    """The words may change, the names not: each of `message` is in what is said, and so is the start of the cure."""
    said, cure = refusal(make())
    for words in (message,) if isinstance(message, str) else message:
        assert words in said
    assert hint in cure
    assert cure


@pytest.mark.parametrize(
    "text",
    [
        CLASS.format("PReLU"),
        CLASS.format("Softmax"),
        "<class 'mine.Swish'>",
        "<function <lambda> at 0x7fddd37a4a60>",
        f"functools.partial({CLASS.format('LeakyReLU')}, 0.2)",
        f"functools.partial({CLASS.format('LeakyReLU')}, slope=0.2)",
        f"functools.partial({CLASS.format('LeakyReLU')}, negative_slope='tanh')",
        f"functools.partial({CLASS.format('GELU')}, approximate='other')",
        f"functools.partial({CLASS.format('ELU')}, alpha=inf)",
        f"functools.partial({CLASS.format('ELU')}, alpha=__import__('os'))",
    ],
)
def test_an_activation_that_cannot_be_computed_is_refused(refusal, text):
    message, hint = refusal(with_policy_kwargs(activation_fn=text))
    assert message.startswith("policy_kwargs has an")
    assert "activation_fn" in message
    assert "0x" not in message
    assert hint.startswith("known are Tanh, ReLU, ")


def test_the_algorithm_is_named_before_anything_else_is_looked_at(refusal):
    content = with_policy_class("stable_baselines3.sac.policies", "SACPolicy", observation_space={}, policy_kwargs={})
    damaged = hostile.archive([Member("data", members(content)["data"]), Member("policy.pth", b"junk")])
    assert refusal(damaged)[0] == "the checkpoint is of SAC, not of PPO"


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("policy_class", "__module__"),
        ("policy_class", "__init__"),
        ("observation_space", ":type:"),
        ("observation_space", "_shape"),
        ("observation_space", "dtype"),
        ("action_space", "n"),
        ("policy_kwargs", "net_arch"),
        ("policy_kwargs", "activation_fn"),
        ("policy_kwargs", "\x1b[2J\r\u2028日[final]   exit_code=0"),
    ],
)
def test_a_message_is_one_short_line_of_ascii(refusal, key, name):
    nasty = "\x1b[2J\r\u2028日[final]   exit_code=0 at 0x7fddd37a4a60" * 100
    for text in (nasty, f"<function {nasty}", f"<class '{nasty}'>", "9" * 100_000):
        message, hint = refusal(with_entry(key, **{name: text}))
        assert message.isascii()
        assert message.isprintable()
        assert "0x7fdd" not in message
        assert len(message) + len(hint) < 700


# ---------------------------------------------------------------------------------------------------------------------
# What is hostile: nothing runs, nothing else comes out, and it costs little
# ---------------------------------------------------------------------------------------------------------------------

MIB = 1 << 20
MAX_SECONDS = 2
MAX_MIB = 500  # of the whole process, with the interpreter, numpy and a file of 128 MiB

WATCHER = """
import json, os, sys, time
sys.path.insert(0, sys.argv[1])
import numpy
import inference

events, watching = [], False
HARMLESS = ("object.__getattr__", "sys._getframe", "code.__new__", "marshal.loads")

def watch(event, arguments):
    if watching and event not in HARMLESS:
        events.append(event + " " + repr(arguments[:1])[:100])

sys.addaudithook(watch)
inference.read_checkpoint(open(sys.argv[2], "rb").read())  # what is imported late is imported now
for path in sys.stdin:
    raw = open(path.rstrip(), "rb").read()
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    started, events[:], watching = time.process_time(), [], True
    try:
        read, outcome = inference.read_checkpoint(raw), "loaded"
    except inference.CheckpointRejected as refusal:
        outcome = "refused: " + str(refusal)
    except BaseException as error:
        outcome = "CRASH " + repr(error)[:300]
    watching = False
    seconds = time.process_time() - started
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
    if outcome == "loaded" and len(raw) < 10 << 20:
        numpy.savez(path.rstrip() + ".npz", **read.tensors)
    mib = (int(peak.split()[1]) >> 10) + 128 - (len(raw) >> 20)  # had the file 128 MiB
    read = raw = None
    print(json.dumps([outcome, seconds, mib, events]), flush=True)
"""


class Report:
    def __init__(self, line: str) -> None:
        self.outcome, self.seconds, self.mib, self.events = json.loads(line)
        self.tensors: dict[str, np.ndarray] = {}  # of a file that was loaded


class Watcher:
    """A process that reads files, one after another, and reports on each."""

    def __init__(self, project: Path, first: Path, directory: Path) -> None:
        self.path = directory / "watched.zip"
        environment = {**support.clean_environment(), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen([sys.executable, "-c", WATCHER, str(project), str(first)], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)  # fmt: skip

    def __call__(self, content: bytes) -> Report:
        assert self.process.stdin
        assert self.process.stdout
        self.path.write_bytes(content)
        self.process.stdin.write(f"{self.path}\n")
        self.process.stdin.flush()
        report = Report(self.process.stdout.readline())
        if Path(f"{self.path}.npz").exists():
            with np.load(f"{self.path}.npz") as tensors:
                report.tensors = dict(tensors)
            Path(f"{self.path}.npz").unlink()
        self.path.unlink()
        return report

    def close(self) -> None:
        self.process.communicate()


@pytest.fixture(scope="module")
def watched(tmp_path_factory) -> Iterator[Watcher]:
    watcher = Watcher(support.PROJECT, support.PROJECT / support.STANDIN, tmp_path_factory.mktemp("watched"))
    yield watcher
    watcher.close()


def standard_library(event: str) -> bool:
    """The import of a codec by the standard library, when a pickle has an opcode with an escaped text."""
    return "encodings" in event or bool(re.match(r"exec \(<code object <module>", event))


def assert_harmless(report: Report, name: str) -> None:
    assert not report.outcome.startswith("CRASH"), f"{name}: {report.outcome}"
    assert [event for event in report.events if not standard_library(event)] == [], name
    assert report.seconds < MAX_SECONDS, name
    # what is loaded has its weights as well: as many bytes as the file
    assert report.mib < MAX_MIB + 128 * (report.outcome == "loaded"), name


GROUPS = ("ARCHIVES", "TEXTS", "SPACES", "POLICIES", "PICKLES", "WEIGHTS", "STRUCTURES", "BOMBS", "ODD",
          "OVERFLOWS")  # fmt: skip


@pytest.mark.parametrize("group", GROUPS)
def test_a_hostile_file_is_refused_or_loads_with_its_own_weights(watched, group):
    outcomes = collections.Counter()
    for name, make in getattr(attacks, group).items():
        content = make()
        report = watched(content)
        assert_harmless(report, name)
        assert_own_weights(report, content, name)
        outcomes[report.outcome == "loaded"] += 1
    assert outcomes[False] or group in ("STRUCTURES", "OVERFLOWS")


def assert_own_weights(report: Report, content: bytes, name: str) -> None:
    """What was read is what an independent reader finds in policy.pth, where that can read it."""
    if not report.tensors:
        return
    try:
        expected = hostile.read_weights(members_leniently(content)["policy.pth"])
    except (KeyError, TypeError, ValueError, hostile.pickle.UnpicklingError):
        return
    for key, array in expected.items():
        assert np.array_equal(report.tensors[key], array), f"{name}: {key}"


def members_leniently(content: bytes) -> dict[str, bytes]:
    """`data` and policy.pth of an archive, the others of which may be damaged."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in ("data", "policy.pth")}


def with_json(text: bytes) -> bytes:
    """`data` with one more value."""
    return checkpoint({"data": members()["data"].rstrip()[:-1] + b',"more":' + text + b"}"})


def with_extra_fields() -> bytes:
    """Directory entries whose extra fields zipfile walks in quadratic time."""
    extra = struct.pack("<HH", 0x9999, 0) * 16_000
    more = [Member(f"{number}", extra=extra) for number in range(7)]
    inner = [Member(name, content) for name, content in policy_records().items()]
    outer = {**members(), "policy.pth": hostile.archive([*inner, *more])}
    return hostile.archive([*(Member(name, content) for name, content in outer.items()), *more])


def large_network(hidden: int) -> bytes:
    """A checkpoint of one wide layer in each tower."""
    weights = {}
    for net, head, width in (("policy_net", "action_net", 2), ("value_net", "value_net", 1)):
        weights[f"mlp_extractor.{net}.0.weight"] = np.ones((hidden, 4), np.float32)
        weights[f"mlp_extractor.{net}.0.bias"] = np.ones(hidden, np.float32)
        weights[f"{head}.weight"] = np.ones((width, hidden), np.float32)
        weights[f"{head}.bias"] = np.ones(width, np.float32)
    entries, records = hostile.state_dict(weights)
    text = json.dumps(data() | {"policy_kwargs": {"net_arch": [hidden]}}).encode()
    return checkpoint({"data": text, "policy.pth": pth(ordered(entries), records)})


COSTLY: dict[str, Callable[[], bytes]] = {
    "a text of 31 MB": lambda: with_json(b'"' + b"a" * (31 * MIB) + b'"'),
    "a text of 31 MB that is four bytes a letter": lambda: with_json(
        b'"' + b"a" * (31 * MIB) + "\U0001f600".encode() + b'"'),
    "99,000 objects": lambda: with_json(b"[" + b'{"":1},' * 99_000 + b"1]"),
    "199,000 escapes": lambda: with_json(b'"' + b"\\u4e00" * 199_000 + b'"'),
    "199,000 long numbers": lambda: with_json(b"[" + b"1." + b"1" * 140 + b",1" * 199_000 + b"]"),
    "an integer of 31 MB": lambda: with_json(b"9" * (31 * MIB)),
    "a number of 31 MB": lambda: with_json(b"9" * (31 * MIB) + b".5e-3"),
    "methods by the thousand": lambda: with_entry(
        "policy_class", __init__=..., **{f"m{number}": "<function " + "a" * 190 for number in range(60_000)}),
    "a shape of 500,000 numbers": lambda: with_entry("observation_space", _shape="1 " * 500_000),
    "bounds of a million": lambda: with_entry("observation_space", _shape=[MIB], low_repr="0", high_repr="1"),
    "100,000 layers": lambda: with_policy_kwargs(net_arch=[64] * 100_000),
    "extra fields": with_extra_fields,
    "many end records": lambda: b"PK\3\4" + b"PK\5\6" * (30 * MIB),
    "43,000 times BUILD": lambda: hostile.with_pth(
        "policy.pth", b"\x80\2" + hostile.named("collections", "OrderedDict") + b")R"
        + (hostile.pushed({"_metadata": 1}) + b"b") * 43_000 + b"."),
    "a shape of many numbers, many times": lambda: hostile.with_pth(
        "policy.pth", b"\x80\2(" + b"K\1" * 9_000 + b"tq\0" + attacks.REBUILD + b"q\1"
        + (b"h\1(" + hostile.storage("0", 1) + b"K\0h\0h\0tR") * 500 + b"."),
    "weights of 127 MB": lambda: large_network(2_500_000),
}  # fmt: skip


@pytest.mark.parametrize("name", COSTLY)
def test_no_file_costs_more_than_two_seconds_or_500_mib(watched, name):
    report = watched(COSTLY[name]())
    assert_harmless(report, name)
    if name == "weights of 127 MB":
        assert report.outcome == "loaded"


def test_the_watcher_sees_what_a_reader_could_do(tmp_path):
    """Else `assert_harmless` would assert nothing."""
    (tmp_path / "inference.py").write_text("""
import os, pickle
class CheckpointRejected(Exception): pass
calls = []
def read_checkpoint(raw):
    calls.append(raw)
    if len(calls) == 2:
        pickle.loads(b"cos\\nsystem\\n(S'true'\\ntR.")
        bytearray(600 << 20).count(1)
        sum(range(30_000_000))
    if len(calls) == 3:
        raise OSError
    import types
    return types.SimpleNamespace(tensors={})
""")
    watcher = Watcher(tmp_path, tmp_path / "inference.py", tmp_path)
    first, second = watcher(b"1"), watcher(b"2")
    watcher.close()
    assert any(event.startswith("os.system") for event in first.events)
    assert first.mib > MAX_MIB > second.mib
    assert first.seconds > 0.2
    assert second.outcome.startswith("CRASH OSError")


# Damage anywhere, with the checksums corrected

OPCODES = b"cN.0(12}]l)tqrhjR.bsuQPXKMJoiGFIVSTUBC" + bytes(range(0x80, 0x98))


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Some bytes flipped, replaced, cut out, doubled or put in."""
    mutant = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 5, 20])):
        place = rng.randrange(len(mutant))
        length = rng.choice([1, 2, 4, 30, 1000])
        match rng.randrange(5):
            case 0:
                mutant[place] ^= 1 << rng.randrange(8)
            case 1:
                mutant[place : place + 4] = rng.choice([b"\xff" * 4, bytes(4), b"\xff\xff\xff\x7f", b"PK\5\6"])
            case 2:
                del mutant[place : place + min(length, len(mutant) - 1)]
            case 3:
                mutant[place:place] = mutant[place : place + length]
            case 4:
                mutant[place] = rng.choice(OPCODES)
    return bytes(mutant)


def mutants(rng: random.Random, count: int) -> Iterator[bytes]:
    """The stand-in, damaged in its archive, in `data`, in policy.pth, in the pickle there, or in a record."""
    whole, outer, inner = hostile.standin(), members(), policy_records()
    pickle_name = next(name for name in inner if name.endswith("data.pkl"))
    for number in range(count):
        kind = ("file", "data", "policy", "pickle", "pickle", "record")[number % 6]
        if kind == "file":
            yield damaged(whole, rng)
            continue
        changed = dict(inner)
        name = pickle_name if kind == "pickle" else rng.choice(sorted(set(inner) - {pickle_name}))
        changed[name] = damaged(inner[name], rng)
        policy = hostile.archive([Member(name, content) for name, content in changed.items()])
        if kind == "data":
            yield checkpoint({"data": damaged(outer["data"], rng)})
        elif kind == "policy":
            yield checkpoint({"policy.pth": damaged(outer["policy.pth"], rng)})
        else:
            yield checkpoint({"policy.pth": policy})


def test_a_damaged_file_is_refused_or_loads_with_its_own_weights(watched):
    outcomes = collections.Counter()
    for number, content in enumerate(mutants(random.Random(11), 600)):
        report = watched(content)
        assert_harmless(report, str(number))
        assert_own_weights(report, content, str(number))
        outcomes[report.outcome == "loaded"] += 1
    assert outcomes[True] > 20
    assert outcomes[False] > 300
