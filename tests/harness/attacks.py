"""Hostile and odd checkpoints by the hundred, made from the stand-in with the parts in hostile.py when they are needed.

Each may be refused, or loaded with its own weights: nothing that it asks for may run, and it may not cost much.
"""

from __future__ import annotations

import base64
import bz2
import functools
import io
import json
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from harness.hostile import (
    Member,
    Raw,
    archive,
    built,
    called,
    checkpoint,
    data,
    members,
    named,
    ordered,
    pickled,
    pth,
    pushed,
    standin,
    standin_weights,
    state_dict,
    storage,
    tensor,
    with_data,
    with_entry,
    with_policy,
    with_pth,
)

Make = Callable[[], bytes]


def one(make: Callable[..., bytes], *arguments: Any, **more: Any) -> Make:
    return functools.partial(make, *arguments, **more)


def each(name: str, make: Callable[[Any], bytes], values: Mapping[str, Any]) -> dict[str, Make]:
    """An attack for each value; {} in the name stands for the name of the value."""
    return {name.format(kind): functools.partial(make, value) for kind, value in values.items()}


def named_by_themselves(*values: str) -> dict[str, str]:
    return {value: value for value in values}


# ---------------------------------------------------------------------------------------------------------------------
# Archives that SB3 does not write
# ---------------------------------------------------------------------------------------------------------------------

def with_member_twice(name: str) -> bytes:
    contents = members()
    return archive([*(Member(each, content) for each, content in contents.items()), Member(name, contents[name])])


def with_member_of(name: str, **lies: Any) -> bytes:
    """The stand-in, one member of which is not as its headers say."""
    return checkpoint({name: Member(name, members()[name], **lies)})


def with_overlap() -> bytes:
    """system_info.txt is the whole of another member, header and all: two entries for the same bytes."""
    contents = members()
    inside = Member("_stable_baselines3_version", contents.pop("_stable_baselines3_version"))
    del contents["system_info.txt"]
    outside = Member("system_info.txt", inside.local())
    ordinary = [Member(name, content) for name, content in contents.items()]
    start = sum(len(member.local()) for member in ordinary)
    inside.offset = start + len(outside.local()) - len(inside.local())
    listed = Member(inside.name, inside.content, offset=inside.offset)
    file = archive([*ordinary, outside, listed])
    # The local header of the listed one is not needed: its bytes are those inside the other.
    end = start + len(outside.local())
    return archive_without(file, end, end + len(listed.local()))


def archive_without(file: bytes, start: int, end: int) -> bytes:
    """A zip without these bytes, in front of its directory."""
    offset = struct.unpack("<L", file[-6:-2])[0] - (end - start)
    return file[:start] + file[end:-6] + struct.pack("<L", offset) + file[-2:]


def with_zip64_size(size: int) -> bytes:
    """A member whose size stands in the zip64 field."""
    content = members()["system_info.txt"]
    field = struct.pack("<HHQQ", 1, 16, size, len(content))
    return with_member_of("system_info.txt", size=0xFFFFFFFF, packed_size=0xFFFFFFFF, extra=field)


def tar_of(contents: Mapping[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, content in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


ARCHIVES = {
    **each("{}", bytes, {
        "an empty file": b"",
        "one byte": b"P",
        "a text": b"this is a checkpoint\n" * 99,
        "an end record alone": b"PK\5\6" + bytes(18),
    }),
    "an archive of nothing": one(archive, []),
    "a tar": lambda: tar_of(members()),
    "its policy.pth alone": lambda: members()["policy.pth"],
    # around the members
    "bytes before it": one(checkpoint, prefix=b"#!/bin/sh\n"),
    "another checkpoint before it": lambda: checkpoint(prefix=standin()),
    "a member before the first": one(checkpoint, hidden=[Member("data", b"{}")]),
    "bytes before the directory": one(checkpoint, between=bytes(99)),
    "bytes before the directory, uncounted": lambda: checkpoint(
        between=bytes(99), directory_offset=len(checkpoint()) - 500),
    "a byte after it": one(checkpoint, suffix=b"\n"),
    "a megabyte after it": one(checkpoint, suffix=bytes(1 << 20)),
    "a comment": one(checkpoint, comment=bytes(65535)),
    "another archive as its comment": one(checkpoint, comment=archive([Member("data", b"{}")])),
    # which members
    **each("{} twice", with_member_twice, named_by_themselves(*members())),
    **each("no {}", lambda name: checkpoint({name: None}),
           named_by_themselves("data", "policy.pth", "policy.optimizer.pth")),
    **each("{}", lambda name: checkpoint({name: b"\x80\2N."}), {
        "an extra member": "extra", "an extra .pth": "extra.pth", "tensors.pth": "tensors.pth",
        "a directory": "policy/", "a path upwards": "../../policy.pth", "an absolute path": "/etc/policy.pth",
        "capital letters": "DATA", "a space at the end": "data ", "a member below a member": "policy.pth/x",
        "a name for the terminal": "a\x1b[2Jb", "a name of two lines": "n\u2028ame",
        "a letter that looks like another": "p\u043elicy.pth",
    }),
    "a letter that looks like another, in place of it": lambda: checkpoint(
        {"data": None, "d\u0430ta": members()["data"]}),
    "NUL in a name": one(checkpoint, {"system_info.txt": Member("system_info.txt\0.pth")}),
    "a name that is not UTF-8": one(checkpoint, {"x": Member(b"\xff\xfe", flags=0x800)}),
    # what their headers say
    "an encrypted member": one(with_member_of, "data", flags=1),
    "a deflated member": one(with_member_of, "data", method=zipfile.ZIP_DEFLATED),
    "a deflated member that is damaged": one(with_member_of, "data", method=8, packed=b"\xff" * 99),
    **each("a member packed by {}", lambda how: with_member_of("data", method=how[0],
                                                                       packed=how[1](members()["data"])), {
        "bzip2": (zipfile.ZIP_BZIP2, bz2.compress), "LZMA": (zipfile.ZIP_LZMA, lzma.compress),
        "deflate64": (9, bytes), "method 99": (99, bytes),
    }),
    "a wrong CRC": one(with_member_of, "data", crc=1),
    "a size too small": one(with_member_of, "data", size=99),
    "a size too large": one(with_member_of, "data", size=99_999),
    "a packed size too large": one(with_member_of, "system_info.txt", packed_size=1 << 30),
    "another size in the local header": one(with_member_of, "data", local_size=9),
    "another name in the local header": one(with_member_of, "data", local_name="policy.pth"),
    "no local header": one(with_member_of, "data", offset=7),
    "a local header beyond the end": one(with_member_of, "system_info.txt", offset=1 << 31),
    "members that overlap": one(with_overlap),
    "a zip64 size of 2^60": one(with_zip64_size, 1 << 60),
    "a directory longer than the file": one(checkpoint, directory_size=1 << 30),
    "a directory beyond the file": one(checkpoint, directory_offset=1 << 31),
    "a count of 65535 members": one(checkpoint, count=65535),
}  # fmt: skip

# ---------------------------------------------------------------------------------------------------------------------
# data: texts, then values
# ---------------------------------------------------------------------------------------------------------------------


def with_text(text: bytes) -> bytes:
    return checkpoint({"data": text})


TEXT = members()["data"]
TEXTS = each("{}", with_text, {
    "empty": b"",
    "cut": TEXT[:5000],
    "a list": b"[]",
    "null": b"null",
    "a number": b"3",
    "a string": b'"data"',
    "an object without keys": b"{}",
    "not UTF-8": b'{"a": "\xff"}',
    "UTF-16": TEXT.decode().encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + TEXT,
    "single quotes": b"{'a': 1}",
    "a letter after it": TEXT + b"x",
    "NUL after it": TEXT + b"\0",
    "a pickle": pickled({}),
    "lists 100,000 deep": b"[" * 100_000 + b"]" * 100_000,
    "objects 100,000 deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "an integer of 10,000 digits": b'{"a":' + b"9" * 10_000 + b"}",
    "an unfinished string of a megabyte": b'"' + b"a" * (1 << 20),
    "a megabyte of backslashes": b'"' + b"\\" * (1 << 20),
})  # fmt: skip


def lists(depth: int) -> Any:
    return [lists(depth - 1)] if depth else 1


SPACE, ACTION, KWARGS = "observation_space", "action_space", "policy_kwargs"
NONSENSE = {
    "null": None, "true": True, "-1": -1, "2.5": 2.5, "1e400": 1e400, "NaN": float("nan"), "10^400": 10**400,
    "2^31": 2 << 30, "a word": "two", "nothing": "", "a megabyte": "9" * (1 << 20), "a surrogate": "\ud800", "{}": {},
    "[[2]]": [[2]], "[2, 2]": [2, 2], "lists 800 deep": lists(800),
}  # fmt: skip
SET_NONSENSE = {name: value for name, value in NONSENSE.items() if value is not None}
FLAT_NONSENSE = {name: value for name, value in NONSENSE.items() if not isinstance(value, list)}


def entry_with(key: str, name: str) -> Callable[[Any], bytes]:
    return lambda value: with_entry(key, **{name: value})


def with_action(kind: str, **text: Any) -> bytes:
    """The stand-in with an action space that its weights are not for."""
    return with_data(action_space={":type:": f"<class 'gymnasium.spaces.{kind}'>", ":serialized:": "", **text})


def with_box_action(changes: dict[str, Any]) -> bytes:
    text = {"_shape": [2], "dtype": "float32", "low": "[-1. -1.]", "high": "[1. 1.]"}
    return with_action("box.Box", **{**text, **changes})


SPACES = {
    **each("observation of type {}", entry_with(SPACE, ":type:"), {
        **NONSENSE, "Dict": "<class 'gymnasium.spaces.dict.Dict'>", "another's Box": "<class 'my_module.Box'>",
        "Discrete": "<class 'gymnasium.spaces.discrete.Discrete'>",
    }),
    **each("observation of dtype {}", entry_with(SPACE, "dtype"), {
        **NONSENSE, "object": "object", "complex64": "complex64", "void": "<class 'numpy.void'>", "two": "f4,O",
    }),
    **each("observation of shape {}", entry_with(SPACE, "_shape"), {
        **FLAT_NONSENSE, "[0]": [0], "[[4]]": [[4]], "[-4]": [-4], "['x']": ["x"], "[4.0]": [4.0],
        "[1e400]": [1e400], "[5]": [5], "[4, 10^9]": [4, 10**9], "33 dimensions": [1] * 33,
        "3000 dimensions": [1] * 3000,
    }),
    **each("Discrete of {}", entry_with(ACTION, "n"), {**NONSENSE, "0": 0, "'-2'": "-2", "'0'": "0"}),
    **each("Discrete of {}", entry_with(ACTION, "n"), {"1": 1, "'3'": "3"}),
    "another's Discrete": one(with_entry, ACTION, **{":type:": "<class 'my_module.Discrete'>"}),
    **each("MultiDiscrete of {}", lambda value: with_action("multi_discrete.MultiDiscrete", nvec=value), {
        **NONSENSE, "[0 2]": "[0 2]", "no choice": "[]", "[2 ... 3]": "[2 ... 3]", "two rows": "[[1 1]\n [1 1]]",
    }),
    **each("MultiBinary of {}", lambda value: with_action("multi_binary.MultiBinary", n=value),
           {**FLAT_NONSENSE, "0": 0, "3": 3}),
    "a Tuple of actions": one(with_action, "tuple.Tuple", spaces="()"),
    **each("Box action, {}", with_box_action, {
        "of the same size": {}, "bounds of NaN": {"low": "[nan nan]"}, "without bounds": {"low": None, "high": None},
        "low above high": {"low": "[5. 5.]"}, "of integers without bounds": {"dtype": "int64", "low": "[-inf -inf]"},
        "bounds of another size": {"low": "[1. 2. 3.]"}, "of size 0": {"_shape": [0]},
    }),
    "gSDE with Discrete actions": one(with_data, use_sde=True),
    "use_sde is a string": one(with_data, use_sde="yes"),
}  # fmt: skip

POLICIES = {
    "saved by another algorithm": one(with_data, clip_range=..., n_epochs=...),
    **{f"{key} is {kind}": one(with_data, **{key: value}) for key in ("policy_class", KWARGS, SPACE, ACTION)
       for kind, value in {"missing": ..., "null": None, "a list": [{}], "a string": "{}", "true": True}.items()},
    **each("policy_class of {}", lambda entry: with_entry("policy_class", **entry), {
        "another module": {"__module__": "my_module"}, "a list of modules": {"__module__": ["x"]},
        "another constructor": {"__init__": "<function Mine.__init__ at 0x7f>"}, "no constructor": {"__init__": 1},
    }),
    **each("net_arch {}", entry_with(KWARGS, "net_arch"), {
        **SET_NONSENSE, "[true]": [True], "[0]": [0], "[-64]": [-64], "[64.0]": [64.0], "['64']": ["64"],
        "[null]": [None], "[1e400]": [1e400], "of one tower": {"pi": [64, 64]}, "of sizes": {"pi": 64, "vf": 64},
        "of three towers": {"pi": [64, 64], "vf": [64, 64], "qf": [1]}, "[2^40]": [1 << 40], "[10^4000]": [10**4000],
        "of 100,000 layers": [64] * 100_000, "of 999 layers": [64] * 999, "with a layer shared": [64, {"pi": [64]}],
        "too wide": [65, 64], "too deep": [64, 64, 64], "too shallow": [],
    }),
    **each("activation_fn {}", entry_with(KWARGS, "activation_fn"), {
        **SET_NONSENSE, "a name alone": "Tanh", "another's Tanh": "<class 'my_module.Tanh'>",
        "no activation": "<class 'torch.nn.modules.module.Module'>", "a function": "<built-in function system>",
    }),
    **each("features_extractor_class {}", entry_with(KWARGS, "features_extractor_class"), {
        "true": True, "NatureCNN": "<class 'stable_baselines3.common.torch_layers.NatureCNN'>",
        "another's": "<class 'my_module.FlattenExtractor'>",
    }),
    **{f"an argument {name!r}": one(with_entry, KWARGS, **{name: 1}) for name in (
        "forward", "__init__", "self", "features_dim", "lr_schedule", SPACE, "load_state_dict", "", "\ud800")},
    **{f"{name} is {value!r}": one(with_entry, KWARGS, **{name: value}) for name, value in {
        "ortho_init": 3, "use_sde": "yes", "full_std": [], "normalize_images": 0, "squash_output": "no",
        "features_extractor_kwargs": {"a": 1}}.items()},
    "squash_output without gSDE": one(with_entry, KWARGS, squash_output=True),
    "nothing readable beside the pickle": lambda: with_data(policy_kwargs={
        key: value for key, value in data()[KWARGS].items() if key.startswith(":")}),
    # keys that would replace what PPO is made of
    **{f"a key {key}": one(with_data, **{key: "x"}) for key in (
        "predict", "learn", "load", "_setup_model", "set_parameters", "set_random_seed", "_get_torch_save_params",
        "__class__", "__dict__", "__init__", "__setattr__", "__doc__", "logger", "policy_aliases", "_dump_logs")},
    # text for the terminal and the log
    "a megabyte of escape sequences": one(
        with_entry, "policy_class", __module__="\x1b[2J\x1b]0;x\7" * 100_000),
    "a forged line of the log": one(
        with_entry, KWARGS, **{"x\n\r\u2028\x85\x1c[final]   exit_code=0 " * 1000: 1}),
}  # fmt: skip

# ---------------------------------------------------------------------------------------------------------------------
# Pickles that run something
# ---------------------------------------------------------------------------------------------------------------------

MARKER = "code-ran"


def opens(name: str) -> Raw:
    """Opcodes that make a file when they are run."""
    return called(named("builtins", "open"), f"{MARKER}-{name}", "w")


GADGETS = {
    "a call of open": opens("global"),
    "a call of os.system": called(named("os", "system"), f"touch {MARKER}-system"),
    "a call of eval": called(named("builtins", "eval"), f"open('{MARKER}-eval', 'w')"),
    "a call by INST": Raw(b"(" + pushed(f"{MARKER}-inst") + pushed("w") + b"ibuiltins\nopen\n"),
    "a call by OBJ": Raw(b"(" + named("builtins", "open") + pushed(f"{MARKER}-obj") + pushed("w") + b"o"),
    "a call by STACK_GLOBAL": Raw(pushed("builtins") + pushed("open") + b"\x93" + pushed((f"{MARKER}-4", "w")) + b"R"),
    "an extension code": Raw(b"\x82\1"),
    "a module to import": named("antigravity", "webbrowser"),
    "this very program": named("inference", "main"),
    "torch.hub.load": called(named("torch.hub", "load"), "my/repository", "x"),
    "torch.load": called(named("torch.serialization", "load"), "policy.pth"),
    "a codec to import": called(named("_codecs", "encode"), "x", "utf_32_be"),
    "an array of numpy": called(named("numpy.core.multiarray", "_reconstruct"), named("numpy", "ndarray"), (0,), "b"),
    "a name with dots": Raw(b"cbuiltins\nopen.__call__\n"),
}
PICKLES = {
    **each("{} in policy.pth", lambda value: with_pth("policy.pth", value), GADGETS),
    **each("{} in a state dict", lambda value: with_policy(standin_weights(), x=value), GADGETS),
    "a call in each of the other members": one(checkpoint, {
        name: pth(opens("pth")) for name in ("policy.optimizer.pth", "pytorch_variables.pth", "system_info.txt")}),
    "policy.pth is a plain pickle": one(checkpoint, {"policy.pth": pickled(opens("plain"))}),
    "policy.pth is a tar, as torch 0.1 wrote": one(checkpoint, {"policy.pth": tar_of({
        "pickle": pickled(opens("tar")), "sys_info": b"", "storages": b"", "tensors": b""})}),
    "TorchScript": one(with_pth, "policy.pth", opens("script"), {
        "constants.pkl": pickled(()), "code/__torch__.py": b"import os"}),
}  # fmt: skip

# ---------------------------------------------------------------------------------------------------------------------
# Weights that are not the policy's
# ---------------------------------------------------------------------------------------------------------------------

BIAS, KERNEL = "action_net.bias", "mlp_extractor.policy_net.2.weight"
RECORD = str(list(standin_weights()).index(BIAS))
OWN = storage(RECORD, 2)


def with_array(name: str, array: np.ndarray | None) -> bytes:
    """The stand-in with another array under a name, or (None) without that."""
    weights: dict[str, Any] = {**standin_weights(), name: array}
    return with_policy({name: array for name, array in weights.items() if array is not None})


def with_element(value: float) -> bytes:
    """One weight among thousands that does not even count for the observation 0."""
    array = standin_weights()["mlp_extractor.policy_net.0.weight"].copy()
    array[-1, -1] = value
    return with_array("mlp_extractor.policy_net.0.weight", array)


def with_bias_of(value: Any) -> bytes:
    """The stand-in with anything in the place of the bias (2,)."""
    return with_policy(standin_weights(), lambda name, entry: value if name == BIAS else entry)


def with_state_dict(change: Callable[[Any], Any] = ordered, weights: dict[str, np.ndarray] | None = None) -> bytes:
    """policy.pth holds what `change` makes of the entries."""
    entries, records = state_dict(weights or standin_weights())
    return with_pth("policy.pth", change(entries), records)


def with_records(change: Callable[[dict[str, bytes]], dict[str, bytes]], **options: Any) -> bytes:
    """The stand-in with other records in policy.pth."""
    entries, records = state_dict(standin_weights())
    return with_pth("policy.pth", ordered(entries), change(records), **options)


def with_policy_archive(*contents: Member) -> bytes:
    return checkpoint({"policy.pth": archive(contents)})


def with_legacy_policy(stored: bool = True) -> bytes:
    """The stand-in as torch before 1.6 wrote it; unless `stored`, the weights are nowhere in the file."""
    weights = standin_weights()
    entries = {name: tensor(legacy_storage(name, array.size), array.shape) for name, array in weights.items()}
    keys = sorted(weights) if stored else []
    stores = b"".join(struct.pack("<Q", weights[key].size) + weights[key].tobytes() for key in keys)
    return checkpoint({"policy.pth": legacy(ordered(entries), keys) + stores})


def legacy(value: Any, keys: list[str]) -> bytes:
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    return b"".join(map(pickled, (0x1950A86A20F9469CFC6C, 1001, system, value, keys)))


def legacy_storage(key: str, count: int) -> Raw:
    return Raw(pushed(("storage", named("torch", "FloatStorage"), key, "cpu", count, None)) + b"Q")


def two_archives(for_zipfile: list[Member], for_torch: list[Member]) -> bytes:
    """One file that two readers read differently; both archives have the same names.

    zipfile takes the directory that ends where the end record begins, and shifts all offsets by as much as that is not
    where the end record says; torch's reader looks where it says.
    """
    first = archive(for_torch)[:-22]
    stated = len(first) - sum(len(member.central(0)) for member in for_torch)
    positions, body = [], first
    for member in for_zipfile:
        positions.append(len(body))
        body += member.local()
    size = len(first) - stated
    shift = len(body) - stated
    directory = b"".join(m.central(position - shift) for m, position in zip(for_zipfile, positions, strict=True))
    count = len(for_zipfile)
    return body + directory + b"PK\5\6" + struct.pack("<HHHHLLH", 0, 0, count, count, size, stated, 0)


def with_two_policies() -> bytes:
    """policy.pth has the weights of the stand-in for zipfile, and their negatives for torch."""

    def contents(sign: float) -> list[Member]:
        entries, records = state_dict({name: array * np.float32(sign) for name, array in standin_weights().items()})
        records = {"data.pkl": pickled(ordered(entries)), **records, "version": b"3\n"}
        return [Member(f"archive/{name}", content) for name, content in records.items()]

    padding = Member("archive/padding", bytes(9999))  # no shifted offset is negative then
    return checkpoint({"policy.pth": two_archives([*contents(1), Member("archive/padding")], [*contents(-1), padding])})


NAN, INF = float("nan"), float("inf")
ORDERED_DICT = named("collections", "OrderedDict")
FLOAT32, FLOAT_STORAGE = named("torch", "float32"), named("torch", "FloatStorage")
REBUILD = named("torch._utils", "_rebuild_tensor_v2")
UNINITIALISED = called(named("torch", "FloatTensor"), 2)
NO_TENSORS = {
    "a list": [0.0, 0.0],
    "None": None,
    "a number": 1,
    "a string": "weights",
    "a dictionary": {"a": 1},
    "of no storage": tensor(Raw(b"N"), (2,)),
    "of a shape of strings": tensor(OWN, ("2",), (1,)),  # type: ignore[arg-type]
    "of a negative shape": tensor(OWN, (-2,), (1,)),
    "of a negative stride": tensor(OWN, (2,), (-1,), 1),
    "at a negative offset": tensor(OWN, (2,), None, -1),
    "past its storage": tensor(OWN, (2,), None, 1),
    "far past its storage": tensor(OWN, (2,), (1 << 40,)),
    "of 2^31 elements of stride 0": tensor(OWN, (1 << 31,), (0,)),
    "of 2^62 elements of stride 0": tensor(OWN, (1 << 62,), (0,)),
    "of a storage larger than its record": tensor(storage(RECORD, 1 << 20), (2,)),
    "of a storage of 2^60": tensor(storage(RECORD, 1 << 60), (2,)),
    "of a storage of a negative size": tensor(storage(RECORD, -1), (2,)),
    "of a storage that is missing": tensor(storage("nowhere", 2), (2,)),
    "of a storage in another directory": tensor(storage("../data.pkl", 2), (2,)),
    "of a storage of doubles": tensor(storage(RECORD, 1, "DoubleStorage"), (1,)),
    "with another content": built(tensor(OWN, (2,)), {"content": "x"}),
    "with another type": built(tensor(OWN, (2,)), {"dtype": ["float32"], "shape": 5}),
    "with slots": built(tensor(OWN, (2,)), (None, {"content": None})),
    "that is the function itself": built(REBUILD, {"x": 1}),
    "that is the function with slots": built(REBUILD, (None, {"__defaults__": (1,)})),
    "of a text": called(REBUILD, ("float32", 4, "abcdefgh"), 0, (2,), (1,), False, ordered({})),
    "of a list": called(REBUILD, ("float32", 4, [1] * 8), 0, (2,), (1,), False, ordered({})),
    "of a storage of another kind": tensor(
        Raw(pushed(("storage", ("float32", 1), RECORD, "cpu", 8)) + b"Q"), (2,)
    ),
    "of many arguments": called(REBUILD, OWN, 0, (2,), (1,), False, ordered({}), *[None] * 9999),
    "uninitialised": UNINITIALISED,
    "an uninitialised storage": called(named("torch", "FloatStorage"), 2),
    "an uninitialised parameter": called(named("torch._utils", "_rebuild_parameter"), UNINITIALISED, True, ordered({})),
    "meta": called(named("torch._utils", "_rebuild_meta_tensor_no_storage"), FLOAT32, (2,), (1,), False),
    "sparse": called(
        named("torch._utils", "_rebuild_sparse_tensor"),
        called(named("torch.serialization", "_get_layout"), "torch.sparse_coo"),
        (tensor(storage("0", 1, "LongStorage"), (1, 1)), tensor(storage("1", 64), (1,)), (2,), True),
    ),
    "quantized": called(
        named("torch._utils", "_rebuild_qtensor"),
        *(storage(RECORD, 8, "QUInt8Storage"), 0, (2,), (1,), (named("torch", "per_tensor_affine"), 1.0, 0), False),
        ordered({}),
    ),
    "a wrapper": called(
        named("torch._utils", "_rebuild_wrapper_subclass"), named("torch", "Tensor"), FLOAT32, (2,), (1,), 0
    ),
    "of another type": called(
        named("torch._tensor", "_rebuild_from_type_v2"),
        *(named("torch._utils", "_rebuild_tensor"), named("torch", "Tensor"), (OWN, 0, (2,), (1,)), {"grad": 1}),
    ),
}
HIDING = dict.fromkeys(("items", "values", "keys", "__len__", "__iter__", "copy"), ORDERED_DICT)
WITH_NAN = {**standin_weights(), BIAS: np.array([NAN, 0], np.float32)}

WEIGHTS = {
    **each("{} among them", with_element, {"NaN": NAN, "infinity": INF, "minus infinity": -INF}),
    **each("{}", lambda dtype: with_array(KERNEL, standin_weights()[KERNEL].astype(dtype)),
           named_by_themselves("float64", "float16", "complex64", "int64")),
    **{f"of shape {shape}": one(with_array, KERNEL, np.resize(standin_weights()[KERNEL], shape))
       for shape in ((64, 63), (63, 64), (4096,), (64, 64, 1), (1, 64, 64), (0,), ())},
    **each("without {}", lambda name: with_array(name, None),
           named_by_themselves(BIAS, KERNEL, "value_net.weight")),
    **each("with {}", lambda name: with_array(name, np.zeros(2, np.float32)), {
        **named_by_themselves("extra", "log_std", "action_net", "policy.optimizer", "__class__"),
        "another layer": "mlp_extractor.policy_net.9.weight", "an empty name": "", "a surrogate": "\ud800",
        "a forged line of the log": "\x1b[2J\r\u2028[final]   exit_code=0" * 1000,
    }),
    **each("a tensor {}", with_bias_of, NO_TENSORS),
    **each("in place of them {}", lambda value: with_pth("policy.pth", value), {
        "None": None, "a list": [], "a number": 5, "nothing": {}, "a tuple": (1, 2), "no names": {0: 1},
    }),
    "under numbers": one(with_state_dict, lambda entries: ordered(dict(enumerate(entries.values())))),
    "NaN, hidden by the dictionary": one(
        with_state_dict, lambda entries: built(ordered(entries), HIDING), WITH_NAN),
    **each("metadata of {}", lambda value: with_state_dict(
        lambda entries: built(ordered(entries), {"_metadata": value})),
            {"a list": [1], "a number": {"": 5}, "None": None}),
    # the archive that policy.pth is
    "others for torch than for zipfile": one(with_two_policies),
    "data.pkl twice": one(with_policy_archive, Member("archive/data.pkl", pickled({})),
                          Member("archive/data.pkl", pickled({"a": 1})), Member("archive/version", b"3")),
    "a record for two readers": one(with_records, lambda r: {
        **{name: content for name, content in r.items() if name != "data/9"}, "data/x/9": bytes(8)}),
    "records in two directories": one(
        with_policy_archive, Member("archive/version", b"3"), Member("other/data.pkl", pickled({}))),
    "no data.pkl": one(with_policy_archive, Member("archive/version", b"3")),
    "records in no directory": one(with_policy_archive, Member("data.pkl", pickled({}))),
    "an empty archive": one(with_policy_archive),
    "an empty file": one(checkpoint, {"policy.pth": b""}),
    "a cut file": lambda: checkpoint({"policy.pth": members()["policy.pth"][:20_000]}),
    "a compressed record": one(
        with_policy_archive, Member("archive/data.pkl", pickled({}), 8), Member("archive/version", b"3")),
    "an encrypted record": one(
        with_policy_archive, Member("archive/data.pkl", pickled({}), flags=1), Member("archive/version", b"3")),
    "a record too short": one(with_records, lambda r: {**r, "data/2": r["data/2"][:-4]}),
    "a record too long": one(with_records, lambda r: {**r, "data/2": r["data/2"] + bytes(4)}),
    "an unknown byte order": one(with_records, lambda r: {**r, "byteorder": b"middle"}),
    "bytes before the archive": one(with_records, dict, prefix=b"PK\3\4" + bytes(60)),
    "bytes after the archive": one(with_records, dict, suffix=bytes(60)),
    **each("a pickle {}", lambda opcodes: with_pth("policy.pth", opcodes), {
        "without an end": b"\x80\2N", "of nothing": b".", "that takes more than it has": b"\x80\2t.",
        "with a hole in its memo": b"\x80\2h\x09.", "of protocol 9": b"\x80\x09N.", "of text": b"weights",
    }),
    # the legacy format
    "a legacy file without its weights": one(with_legacy_policy, stored=False),
    "a legacy file that claims 2^33 floats": one(checkpoint, {
        "policy.pth": legacy({"a": tensor(legacy_storage("a", 1 << 33), (2,))}, ["a"])}),
}  # fmt: skip

# ---------------------------------------------------------------------------------------------------------------------
# Structures that are a trap to walk
# ---------------------------------------------------------------------------------------------------------------------


def doubled(kind: str, levels: int) -> Raw:
    """What holds twice what holds twice ... : 2^levels steps for a walk, and a few bytes."""
    below = b"K\1"
    for level in range(levels):
        keep, again = (opcode + struct.pack("<L", 1000 + level) for opcode in (b"r", b"j"))
        below = {
            "list": b"](" + below + keep + again + b"e",
            "tuple": b"(" + below + keep + again + b"t",
            "dictionary": b"}(K\1" + below + keep + b"K\2" + again + b"u",
        }[kind]
    return Raw(below)


TRAPS = {
    "a list that holds itself": Raw(b"]r\xe7\3\0\0j\xe7\3\0\0a"),
    "a dictionary that holds itself": Raw(b"}r\xe7\3\0\0K\1j\xe7\3\0\0s"),
    "a list doubled 40 times": doubled("list", 40),
    "a tuple doubled 40 times": doubled("tuple", 40),
    "a dictionary doubled 40 times": doubled("dictionary", 40),
    "tuples 200,000 deep": Raw(b")" + b"\x85" * 200_000),
    "lists 100,000 deep": Raw(b"]" * 100_000 + b"a" * 99_999),
}


def reference(count: int, key: Any, kind: Any = FLOAT_STORAGE) -> Raw:
    """A storage by a name that is none, or of a kind that is none."""
    return Raw(pushed(("storage", kind, key, "cpu", count)) + b"Q")


KEYS_OF_TUPLES = {f"a key of {name}": Raw(b"}" + trap + b"K\1s") for name, trap in TRAPS.items() if "tuple" in name}
STRUCTURES = {
    **each("{} in place of the state dict", lambda trap: with_pth("policy.pth", trap), TRAPS | KEYS_OF_TUPLES),
    **each("{} in the state dict", lambda trap: with_policy(standin_weights(), x=trap), TRAPS | KEYS_OF_TUPLES),
    **each("{} in the metadata", lambda trap: with_state_dict(lambda entries: built(ordered(entries), trap)),
           TRAPS | KEYS_OF_TUPLES),
    **each("{} as the name of a storage", lambda trap: with_bias_of(tensor(reference(2, trap), (2,))), TRAPS),
}  # fmt: skip

# ---------------------------------------------------------------------------------------------------------------------
# Small files that grow, and texts that take forever
# ---------------------------------------------------------------------------------------------------------------------

ROOM = 1 << 30


def zeros(size: int) -> bytes:
    """So many zero bytes, deflated: the same piece again and again, and an end."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    piece = packer.compress(bytes(1 << 24)) + packer.flush(zlib.Z_FULL_FLUSH)
    return piece * (size >> 24) + b"\3\0"


def with_big(name: str) -> bytes:
    """A member of a gigabyte."""
    return checkpoint({name: Member(name, method=8, packed=zeros(ROOM), size=ROOM)})


def with_modest(size: int) -> bytes:
    """A member of gigabytes that says it has 100 bytes."""
    return with_member_of("system_info.txt", method=8, packed=zeros(size), size=100)


def crowd(name: str, count: int) -> bytes:
    """An archive with so many entries in its directory, all for one member."""
    member = Member(name, b"{}")
    body, directory = member.local(), member.central(0) * count
    end = struct.pack("<HHHHLLH", 0, 0, count & 0xFFFF, count & 0xFFFF, len(directory), len(body), 0)
    return body + directory + b"PK\5\6" + end


def with_big_record_for_torch() -> bytes:
    """policy.pth has a record of a gigabyte, and zipfile does not see it."""
    version = Member("archive/version", b"3")
    names = pickled({"x": tensor(storage("0", ROOM // 4), (2,))})
    big = Member("archive/data/0", method=8, packed=zeros(ROOM), size=ROOM)
    small = [Member("archive/data.pkl", pickled({})), version, Member("archive/data/0")]
    return checkpoint({"policy.pth": two_archives(small, [Member("archive/data.pkl", names), version, big])})


def with_wide_network() -> bytes:
    """A hundred million parameters in `data`, and a policy.pth of about as many bytes without them."""
    text = json.dumps({**data(), KWARGS: {"net_arch": [20_000_000]}}).encode()
    return checkpoint({"data": text, "policy.pth": pth({}, {"data/0": bytes(110 << 20)})})


def repeated(first: Any, again: bytes, times: int) -> bytes:
    """A pickle of a list: `first`, kept as the memo's 9999, and opcodes that use it many times."""
    return b"\x80\2](" + pushed(first) + b"r\x0f\x27\0\0" + again * times + b"e."


def with_pickle(opcodes: bytes, records: Mapping[str, bytes] | None = None) -> bytes:
    return with_pth("policy.pth", opcodes, records)


GET = b"j\x0f\x27\0\0"
BIG_NUMBER = Raw(b"\x8b" + struct.pack("<l", 100_000) + b"\x7f" * 100_000)


def with_copies_of_a_dictionary() -> bytes:
    """A dictionary of 20,000 entries, and OrderedDict called with it 9,000 times."""
    keep = b"r\x10\x27\0\0"
    opcodes = repeated(ORDERED_DICT, b"", 0)[:-2] + pushed(dict.fromkeys(range(20_000))) + keep
    return with_pickle(opcodes + (GET + b"j\x10\x27\0\0\x85R") * 9_000 + b"e.")


def with_copies_of_a_storage() -> bytes:
    """A tensor that leaves out the first element of 4 MB, made 9,000 times."""
    arguments = (storage("0", 1 << 20), 1, ((1 << 20) - 1,), (1,), False, ordered({}))
    opcodes = repeated(arguments, b"", 0)[:-2] + REBUILD + b"r\x10\x27\0\0"
    again = (b"j\x10\x27\0\0" + GET + b"R") * 9_000
    return with_pickle(opcodes + again + b"e.", {"data/0": bytes(4 << 20)})


def with_one_storage_for_many_layers() -> bytes:
    """A network of 400 million parameters: 400 layers that are all the same 4 MB."""
    layers = [1000] * 200
    text = json.dumps({**data(), KWARGS: {"net_arch": layers}}).encode()
    source, entries = storage("0", 1_000_000), {}
    for tower, head, width in (("policy_net", "action_net", 2), ("value_net", "value_net", 1)):
        names = [*(f"mlp_extractor.{tower}.{2 * number}" for number in range(len(layers))), head]
        for name, below, above in zip(names, [4, *layers], [*layers, width], strict=True):
            entries[f"{name}.weight"] = tensor(source, (above, below))
            entries[f"{name}.bias"] = tensor(source, (above,))
    return checkpoint({"data": text, "policy.pth": pth(ordered(entries), {"data/0": bytes(4_000_000)})})


EMPTY_LISTS = b"\x80\2](" + b"]" * 60_000_000 + b"e."
BOMBS = {
    **each("{} of 1 GiB", with_big, named_by_themselves("data", "policy.pth", "system_info.txt")),
    "2 GiB that say they are 100 bytes": one(with_modest, 2 * ROOM),
    "half a million entries": one(crowd, "data", 500_000),
    "half a million entries in policy.pth": lambda: checkpoint({"policy.pth": crowd("archive/data.pkl", 500_000)}),
    "30 million empty lists for data": lambda: with_text(b"[" + b"[]," * 30_000_000 + b"1]"),
    "30 million empty lists in data": lambda: with_text(TEXT.rstrip()[:-1] + b',"a":[' + b"[]," * 30_000_000 + b"1]}"),
    "60 million empty lists in a pickle": lambda: with_pth("policy.pth", EMPTY_LISTS),
    "60 million empty lists in a legacy pickle": lambda: checkpoint({"policy.pth": EMPTY_LISTS}),
    "a record of 1 GiB": lambda: with_policy_archive(
        Member("archive/data.pkl", pickled({})),
        Member("archive/data/0", method=8, packed=zeros(ROOM), size=ROOM)),
    "a record of 1 GiB for torch alone": one(with_big_record_for_torch),
    "a bytearray of 2 GiB": one(
        with_pth, "policy.pth", called(named("builtins", "bytearray"), 2 * ROOM)),
    "a tensor of 4 GiB of nothing": one(
        with_pth, "policy.pth", called(named("torch", "FloatTensor"), ROOM)),
    "a bias of 2^40 elements of stride 0": one(with_bias_of, tensor(OWN, (1 << 40,), (0,))),
    "a bytearray that says it has 3 GiB": one(
        with_pickle, b"\x80\5\x96" + struct.pack("<Q", 3 * ROOM) + b"x."),
    "bytes that say they are 3 GiB": one(with_pickle,
        b"\x80\4\x8e" + struct.pack("<Q", 3 * ROOM) + b"x."),
    "a frame that says it has 3 GiB": one(with_pickle,
        b"\x80\4\x95" + struct.pack("<Q", 3 * ROOM) + b"N."),
    "a memo of 2^31": one(with_pickle, b"\x80\2Nr\xff\xff\xff\x7f."),
    "copies of a dictionary": one(with_copies_of_a_dictionary),
    "copies of a storage": one(with_copies_of_a_storage),
    "layers that share a storage": one(with_one_storage_for_many_layers),
    "a shape of large numbers": one(with_pickle, b"\x80\2" + called(
        REBUILD, OWN, 0,
        Raw(b"(" + BIG_NUMBER + b"r\x0f\x27\0\0" + GET * 20_000 + b"t"), (), False, ordered({})) + b".",
        {f"data/{RECORD}": bytes(8)}),
    "a type of a megabyte": one(with_entry, SPACE, **{":type:": "<class '" + "a" * (1 << 20)}),
    "a dtype of a megabyte": one(with_entry, SPACE, dtype="'numpy." * (1 << 17)),
    "an activation of a megabyte": one(with_entry, KWARGS, activation_fn="<class '" + "a" * (1 << 20)),
    "bounds of a megabyte": one(with_entry, SPACE, _shape=[99],
                                low_repr="1e+" * (1 << 18)),
    "a bound of a million digits": one(with_entry, SPACE, _shape=[99],
                                       low_repr="9" * (1 << 20), high_repr="[" + "1" * 999 + " " * (1 << 20)),
    "an observation of 120 million numbers": one(with_entry, SPACE, _shape=[120_000_000],
                                                 low_repr="0", high_repr="1"),
    "an action of 120 million numbers": one(with_box_action, {
        "_shape": [120_000_000], "low": "0", "high": "1"}),
    "a network of 120 million parameters": one(with_wide_network),
}  # fmt: skip

# ---------------------------------------------------------------------------------------------------------------------
# Odd files that may be loaded, if the outputs are those of their weights
# ---------------------------------------------------------------------------------------------------------------------


def with_marked_data() -> bytes:
    """A pickle that leaves a marker in every value that is serialised, and where none should be."""
    values = data()
    for key, value in values.items():
        if isinstance(value, dict) and ":serialized:" in value:
            value[":serialized:"] = marked(key)[":serialized:"]
    for key in ("unknown", "env", "device", "rollout_buffer_class", "tensorboard_log", "clip_range_vf"):
        values[key] = marked(key)
    values["_last_obs"] = [marked("list"), {"a": marked("object")}]
    return with_data(**values)


def marked(name: str) -> dict[str, str]:
    return {":type:": "<class 'function'>", ":serialized:": base64.b64encode(pickled(opens(name))).decode()}


def with_foreign_schedules() -> bytes:
    """Schedules whose code objects are of no Python at all."""
    junk = base64.b64encode(pickled(named("cloudpickle.cloudpickle", "_make_function")) + bytes(999)).decode()
    return with_data(
        **{key: {**data()[key], ":serialized:": junk} for key in ("learning_rate", "lr_schedule", "clip_range")}
    )


def with_repeated_keys(first: bytes, last: bytes) -> bytes:
    return with_text(first.rstrip()[:-1] + b"," + last.lstrip()[1:])


OTHER_VALUES = json.dumps(dict.fromkeys(data(), 1)).encode()
MODEL_ATTRIBUTES: dict[str, Any] = {
    "policy": "x", "device": "cuda:7", "seed": 123, "verbose": 3, "n_steps": 10**9, "n_envs": 10**9,
    "batch_size": -1, "gamma": float("nan"), "gae_lambda": "x", "learning_rate": "x", "lr_schedule": "x",
        "clip_range": None,
    "clip_range_vf": "x", "target_kl": [], "tensorboard_log": "somewhere", "rollout_buffer": "x",
        "num_timesteps": 1e400,
    "rollout_buffer_class": "x", "rollout_buffer_kwargs": [], "_last_obs": {"a": 1}, "ep_info_buffer": 5,
        "_logger": "x",
    "_vec_normalize_env": "x", "action_noise": True, "sde_sample_freq": None, "_custom_logger": True,
}  # fmt: skip


def with_one_storage() -> bytes:
    """All weights are views of one storage, which is larger than they need."""
    weights = standin_weights()
    pile = np.concatenate([*(array.ravel() for array in weights.values()), np.zeros(999, np.float32)])
    entries, offset = {}, 0
    for name, array in weights.items():
        entries[name] = tensor(storage("0", pile.size), array.shape, None, offset)
        offset += array.size
    return with_pth("policy.pth", ordered(entries), {"data/0": pile.tobytes()})


def with_columns() -> bytes:
    """A weight that is stored by columns."""
    weights = standin_weights()
    turned = tensor(storage(str(list(weights).index(KERNEL)), weights[KERNEL].size), (64, 64), (1, 64))
    weights[KERNEL] = np.ascontiguousarray(weights[KERNEL].T)
    return with_policy(weights, lambda name, entry: turned if name == KERNEL else entry)


def with_parameters() -> bytes:
    rebuild = named("torch._utils", "_rebuild_parameter")
    return with_policy(standin_weights(), lambda _, entry: called(rebuild, entry, True, ordered({})))


def with_location(location: str) -> bytes:
    entries, records = {}, {}
    for number, (name, array) in enumerate(standin_weights().items()):
        entries[name] = tensor(storage(str(number), array.size, location=location), array.shape)
        records[f"data/{number}"] = array.tobytes()
    return with_pth("policy.pth", ordered(entries), records)


def swapped(records: dict[str, bytes]) -> dict[str, bytes]:
    turned = {name: np.frombuffer(content, "<f4").astype(">f4").tobytes() for name, content in records.items()}
    return {"byteorder": b"big", **turned}


def with_metadata(**entry: Any) -> bytes:
    def change(entries: dict[str, Raw]) -> Raw:
        layers = {name.rpartition(".")[0]: entry for name in entries}
        return built(ordered(entries), {"_metadata": {"": entry, **layers}})

    return with_state_dict(change)


ODD: dict[str, Callable[[], bytes]] = {
    # data
    "pickles with a marker in every value": with_marked_data,
    "schedules of no Python": with_foreign_schedules,
    "attributes of a model": lambda: with_data(**MODEL_ATTRIBUTES),
    "a module to import for env": lambda: with_data(env="antigravity:x"),
    "keys without meaning": lambda: with_data(**{
        "": 1, "\ud800": "\udfff", "\0": None, "\x1b[2J": 1, "policy.action_net.bias": [9, 9], "x" * 100_000: 1}),
    "every key twice, the stand-in's last": lambda: with_repeated_keys(OTHER_VALUES, TEXT),
    "every key twice, the stand-in's first": lambda: with_repeated_keys(TEXT, OTHER_VALUES),
    "no policy_kwargs beside their braces": lambda: with_data(policy_kwargs={}),
    "a device in policy_kwargs": lambda: with_entry(KWARGS, device="cuda:7"),
    "another activation": lambda: with_entry(KWARGS, activation_fn="<class 'torch.nn.modules.activation.Tanh'>"),
    "arguments of other actions": lambda: with_entry(KWARGS, log_std_init="x", full_std=False, use_expln=True),
    "arguments of the optimiser": lambda: with_entry(KWARGS, optimizer_kwargs={"lr": 1, "params": [], "eps": -1}),
    "no arguments of the optimiser": lambda: with_entry(KWARGS, optimizer_kwargs=[1]),
    "an optimiser that is not there": lambda: with_entry(KWARGS, optimizer_class="<class 'torch.optim.a.b'>"),
    "an optimiser that is a module": lambda: with_entry(KWARGS, optimizer_class="<class 'torch.optim.x.lr_scheduler'>"),
    "an optimiser of another's": lambda: with_entry(KWARGS, optimizer_class="<class 'my_module.Adam'>"),
    "bounds that are none": lambda: with_entry(SPACE, low_repr="[nan nan nan nan]", high_repr="nothing"),
    "low above high": lambda: with_entry(SPACE, low_repr="[5. 5. 5. 5.]", high_repr="[1. 1. 1. 1.]"),
    "integers without bounds": lambda: with_entry(SPACE, dtype="int8", low_repr="[-inf]", high_repr="[999]"),
    # policy.pth
    "one storage for all weights": with_one_storage,
    "a weight stored by columns": with_columns,
    "parameters in place of tensors": with_parameters,
    "attributes by metadata": lambda: with_bias_of(tensor(OWN, (2,), metadata={"grad": 1, "data": 2})),
    "a negative bit": lambda: with_bias_of(tensor(OWN, (2,), metadata={"neg": True})),
    "a gradient required": lambda: with_bias_of(tensor(OWN, (2,), requires_grad=True)),
    "big-endian weights": lambda: with_records(swapped),
    "weights of a GPU": lambda: with_location("cuda:0"),
    "weights of the device meta": lambda: with_location("meta"),
    "weights of no device": lambda: with_location("nowhere:-1"),
    "metadata that assigns": lambda: with_metadata(assign_to_params_buffers=True, version=99),
    "a plain dictionary": lambda: with_state_dict(dict),
    "a legacy file": with_legacy_policy,
    "a format version": lambda: with_records(lambda r: {**r, ".format_version": b"9", ".storage_alignment": b"1"}),
    "an alignment of x": lambda: with_records(lambda r: {**r, ".storage_alignment": b"x"}),
    "records of no use": lambda: with_records(lambda r: {**r, "data/99": bytes(999), "extra/secret": b"x"}),
    # the other members
    "no pytorch_variables.pth": lambda: checkpoint({"pytorch_variables.pth": None}),
    "binary texts": lambda: checkpoint({"_stable_baselines3_version": b"\xff\0", "system_info.txt": bytes(range(256))}),
}  # fmt: skip

# Finite weights whose outputs are not: what only the forward can find.
OVERFLOWS: dict[str, Callable[[], bytes]] = {
    "value": lambda: with_array("value_net.weight", np.full((1, 64), 3e38, np.float32)),
    "logits": lambda: with_array("action_net.weight", np.array([[3e38] * 64, [-3e38] * 64], np.float32)),
}
