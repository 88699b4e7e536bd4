"""PPO checkpoints of every kind, made on the CPU by Stable-Baselines3, and what SB3 itself computes with them there.

`old_dialect` rewrites one as an earlier release of SB3 would have written it: those files name classes of gym, which
nobody has any more, and differ in a dozen small ways.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import pickle
import sys
import types
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from torch import nn


def box(*shape: int, low: float = -5, high: float = 5, dtype: Any = np.float32) -> spaces.Box:
    return spaces.Box(low, high, shape, dtype)


@dataclasses.dataclass(frozen=True)
class Kind:
    action_space: spaces.Space
    policy_kwargs: dict[str, Any] | None = None
    observation_space: spaces.Box = dataclasses.field(default_factory=lambda: box(4))
    use_sde: bool = False
    algorithm: dict[str, Any] = dataclasses.field(default_factory=dict)


def net(*layers: Any, **more: Any) -> dict[str, Any]:
    return {"net_arch": list(layers), **more}


def heads(pi: list[int] | None, vf: list[int] | None, **more: Any) -> dict[str, Any]:
    return {"net_arch": {name: layers for name, layers in (("pi", pi), ("vf", vf)) if layers is not None}, **more}


KINDS = {
    # action spaces
    "discrete": Kind(spaces.Discrete(3)),
    "discrete of one": Kind(spaces.Discrete(1)),
    "multi-discrete": Kind(spaces.MultiDiscrete([3, 2, 5])),
    "multi-discrete of one": Kind(spaces.MultiDiscrete([4])),
    "multi-binary": Kind(spaces.MultiBinary(4)),
    "box": Kind(box(2, low=-1, high=1)),
    "box of one, bounds exceeded": Kind(box(1, low=-0.01, high=0.01)),
    "box of two dimensions": Kind(box(2, 3, low=-1, high=1)),
    "box of no dimensions": Kind(box(low=-0.1, high=0.1)),
    "box, log_std_init": Kind(box(2), {"log_std_init": -1.5}),
    # generalised state-dependent exploration
    "gSDE": Kind(box(2), use_sde=True),
    "gSDE, not full_std": Kind(box(2), {"full_std": False}, use_sde=True),
    "gSDE, use_expln": Kind(box(2), {"use_expln": True}, use_sde=True),
    "gSDE, squash_output": Kind(box(2, low=-2, high=1), {"squash_output": True}, use_sde=True),
    "gSDE of two dimensions, ReLU": Kind(box(2, 2), {"activation_fn": nn.ReLU}, use_sde=True),
    # networks
    "ReLU, two heads": Kind(spaces.Discrete(2), heads([64, 64], [64, 64], activation_fn=nn.ReLU)),
    "ELU, other heads": Kind(spaces.Discrete(2), heads([16], [32, 8], activation_fn=nn.ELU)),
    "Tanh, a list for both": Kind(spaces.Discrete(2), net(48, 24, activation_fn=nn.Tanh)),
    "no layers": Kind(spaces.Discrete(2), net()),
    "no layers for the value": Kind(spaces.Discrete(2), heads([8], None)),
    "not orthogonal": Kind(spaces.Discrete(2), {"ortho_init": False}),
    "separate extractors": Kind(spaces.Discrete(2), {"share_features_extractor": False}),
    "another optimizer": Kind(
        spaces.Discrete(2), {"optimizer_class": torch.optim.RMSprop, "optimizer_kwargs": {"alpha": 0.9}}
    ),
    # observations
    "observation of one": Kind(spaces.Discrete(2), observation_space=box(1)),
    "observation of two dimensions": Kind(spaces.Discrete(2), observation_space=box(3, 5)),
    "observation of float64": Kind(spaces.Discrete(2), observation_space=box(4, dtype=np.float64)),
    "observation of integers": Kind(spaces.Discrete(2), observation_space=box(4, dtype=np.int64)),
    "unbounded observation": Kind(spaces.Discrete(2), observation_space=box(4, low=-np.inf, high=np.inf)),
    # the algorithm's own settings, which no forward uses
    "schedules and clip_range_vf": Kind(
        spaces.Discrete(2),
        algorithm={
            "learning_rate": lambda progress: 1e-3 * progress,
            "clip_range": lambda progress: 0.1 * progress,
            "clip_range_vf": 0.2,
            "target_kl": 0.05,
            "n_steps": 16,
        },
    ),
}


class Nothing(gym.Env):
    """An environment of the given spaces, to make a model and never to be run."""

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space) -> None:
        self.observation_space = observation_space
        self.action_space = action_space


def make(kind: Kind, path: Path) -> Path:
    """Writes a checkpoint whose weights are random enough that no output is near a constant."""
    seed = zlib.crc32(path.name.encode())
    settings = {"n_steps": 8, "batch_size": 8, **kind.algorithm}
    environment = Nothing(kind.observation_space, kind.action_space)
    kwargs = None if kind.policy_kwargs is None else dict(kind.policy_kwargs)
    model = PPO(
        "MlpPolicy", environment, policy_kwargs=kwargs, use_sde=kind.use_sde, seed=seed, device="cpu", **settings
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.policy.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("weight"):
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
            else:  # a bias, or log_std around what log_std_init says
                parameter.add_(0.5 * noise)
    model.save(path)
    return path


def observations(kind: Kind, count: int) -> np.ndarray:
    """Observations that JSON text carries exactly."""
    rng = np.random.default_rng(20240402)
    values = rng.normal(0, 2, (count, *kind.observation_space.shape)).astype(np.float32)
    return values.astype(kind.observation_space.dtype)


def reference(path: Path, observation: np.ndarray) -> dict[str, np.ndarray]:
    """What SB3 computes for a batch on the CPU, under the names of npu_result.json."""
    model = PPO.load(path, device="cpu")
    policy = model.policy
    policy.set_training_mode(False)
    with torch.no_grad():
        tensor, _ = policy.obs_to_tensor(observation)
        action, value, log_prob = policy(tensor, deterministic=True)
        distribution = policy.get_distribution(tensor)
        entropy = distribution.entropy()
    outputs = {"action": action, "value": value, "log_prob": log_prob}
    if entropy is not None:  # a squashed Gaussian has none
        outputs["entropy"] = entropy
    inner = distribution.distribution
    if isinstance(inner, list):  # MultiDiscrete: a categorical distribution for each dimension, side by side
        outputs["probs"] = torch.cat([each.probs for each in inner], dim=1)
        outputs["logits"] = torch.cat([each.logits for each in inner], dim=1)
    elif isinstance(inner, torch.distributions.Normal):
        outputs["mean"], outputs["std"] = inner.mean, inner.stddev
        outputs["env_action"] = torch.as_tensor(model.predict(observation, deterministic=True)[0])
    else:
        outputs["probs"], outputs["logits"] = inner.probs, inner.logits
    return {name: output.numpy() for name, output in outputs.items()}


# ---------------------------------------------------------------------------------------------------------------------
# The files of earlier releases
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Dialect:
    """How a release wrote `data`; what differs is what real files of it show."""

    version: str
    gym: bool = True  # spaces of gym, not gymnasium
    shape_key: str = "_shape"
    numbers: bool = True  # Discrete.n as a number, not as a string
    last_dones: bool = False
    system_info: bool = True
    list_of_dict: bool = True  # net_arch [{"pi": ..., "vf": ...}]
    missing: tuple[str, ...] = ()  # keys that came later


LATER = ("normalize_advantage", "_stats_window_size", "rollout_buffer_class", "rollout_buffer_kwargs")
DIALECTS = {
    dialect.version: dialect
    for dialect in (
        Dialect("1.0rc0", shape_key="shape", last_dones=True, system_info=False, missing=LATER),
        Dialect("1.1.0", last_dones=True, system_info=False, missing=LATER),
        Dialect("1.4.0", missing=LATER),
        Dialect("1.8.0", numbers=False, list_of_dict=False, missing=LATER[2:]),
        Dialect("2.0.0", gym=False, numbers=False, list_of_dict=False, missing=LATER[2:]),
    )
}


def old_dialect(source: Path, target: Path, dialect: Dialect) -> Path:
    with zipfile.ZipFile(source) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    data = json.loads(members["data"])
    for key in dialect.missing:
        data.pop(key, None)
    if dialect.last_dones:
        data["_last_dones"] = data.pop("_last_episode_starts")
    for key in ("observation_space", "action_space"):
        data[key] = old_space(pickle.loads(base64.b64decode(data[key][":serialized:"])), dialect)  # noqa: S301
    kwargs = data["policy_kwargs"]
    if ":serialized:" in kwargs and dialect.list_of_dict:
        value = pickle.loads(base64.b64decode(kwargs[":serialized:"]))  # noqa: S301
        if isinstance(value.get("net_arch"), dict):
            value["net_arch"] = [value["net_arch"]]
        data["policy_kwargs"] = entry(value)
    members["data"] = json.dumps(data, indent=4).encode()
    members["_stable_baselines3_version"] = dialect.version.encode()
    if not dialect.system_info:
        members.pop("system_info.txt", None)
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return target


def entry(value: Any) -> dict[str, Any]:
    """A value as SB3's data_to_json writes what JSON does not know: the pickle, and the text of its first level."""
    text: dict[str, Any] = {
        ":type:": str(type(value)),
        ":serialized:": base64.b64encode(pickle.dumps(value, protocol=4)).decode(),
    }
    for key, item in (value if isinstance(value, dict) else vars(value)).items():
        try:
            json.dumps(item)
        except TypeError:
            item = str(item)
        text[key] = item
    return text


def old_space(space: spaces.Space, dialect: Dialect) -> dict[str, Any]:
    """A space with the attributes that its class had in gym (0.17 for `shape`, 0.21 for `_shape`), or in gymnasium."""
    if not dialect.gym:
        return entry(space)
    shape = list(space.shape or ())
    attributes: dict[str, Any] = {}
    if isinstance(space, spaces.Box):
        attributes = {"dtype": space.dtype, dialect.shape_key: shape, "low": space.low, "high": space.high}
        attributes |= {"bounded_below": space.bounded_below, "bounded_above": space.bounded_above}
    elif isinstance(space, spaces.Discrete):
        attributes = {"n": int(space.n) if dialect.numbers else space.n, dialect.shape_key: shape, "dtype": space.dtype}
    elif isinstance(space, spaces.MultiDiscrete):
        attributes = {"nvec": space.nvec, dialect.shape_key: shape, "dtype": space.dtype}
    elif isinstance(space, spaces.MultiBinary):
        attributes = {"n": space.n, dialect.shape_key: shape, "dtype": space.dtype}
    attributes["np_random" if dialect.shape_key == "shape" else "_np_random"] = None
    module = type(space).__module__.replace("gymnasium", "gym")  # gymnasium kept gym's layout
    with gym_class(module, type(space).__name__) as old:
        instance = old.__new__(old)
        vars(instance).update(attributes)
        return entry(instance)


@contextlib.contextmanager
def gym_class(module: str, name: str) -> Iterator[type]:
    """A class that pickles as one of gym's, which is not installed."""
    made = types.ModuleType(module)
    before = dict(sys.modules)
    sys.modules.update({"gym": types.ModuleType("gym"), "gym.spaces": types.ModuleType("gym.spaces"), module: made})
    old = type(name, (), {"__module__": module})
    setattr(made, name, old)
    try:
        yield old
    finally:
        sys.modules.clear()
        sys.modules.update(before)
