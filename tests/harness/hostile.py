"""The parts that hostile checkpoints are made of, and what an honest reading of one computes.

Everything here is made from the stand-in with the standard library and numpy alone: a zip writer that may lie in every
field, a pickle writer that may say anything, and readers that share no code with torch, SB3 or inference.py.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import io
import json
import pickle
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from harness import support

Weights = dict[str, np.ndarray]

# ---------------------------------------------------------------------------------------------------------------------
# Zip archives that lie
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Member:
    """A member as the central directory and the local header describe it; None: the truth."""

    name: str | bytes
    content: bytes = b""
    method: int = zipfile.ZIP_STORED
    packed: bytes | None = None  # the bytes in the archive
    size: int | None = None
    packed_size: int | None = None
    crc: int | None = None
    flags: int = 0
    extra: bytes = b""
    comment: bytes = b""
    local_name: str | bytes | None = None
    local_size: int | None = None
    offset: int | None = None  # of the local header

    def fields(self, size: int | None, name: str | bytes) -> tuple[bytes, bytes]:
        """What the two headers have in common, and the name."""
        packed = self.stored()
        name = name.encode() if isinstance(name, str) else name
        size = len(self.content) if size is None else size
        packed_size = len(packed) if self.packed_size is None else self.packed_size
        crc = zlib.crc32(self.content) if self.crc is None else self.crc
        date_and_time = (0, 33)  # 1980-01-01
        return struct.pack(
            "<HHHHHLLLHH",
            20,
            self.flags,
            self.method,
            *date_and_time,
            crc,
            packed_size,
            size,
            len(name),
            len(self.extra),
        ), name

    def stored(self) -> bytes:
        if self.packed is not None:
            return self.packed
        return deflated(self.content) if self.method == zipfile.ZIP_DEFLATED else self.content

    def local(self) -> bytes:
        fields, name = self.fields(
            self.size if self.local_size is None else self.local_size,
            self.name if self.local_name is None else self.local_name,
        )
        return b"PK\3\4" + fields + name + self.extra + self.stored()

    def central(self, offset: int) -> bytes:
        fields, name = self.fields(self.size, self.name)
        offset = offset if self.offset is None else self.offset
        return (
            b"PK\1\2"
            + struct.pack("<H", 20)
            + fields
            + struct.pack("<HHHLL", len(self.comment), 0, 0, 0, offset)
            + name
            + self.extra
            + self.comment
        )


def archive(
    members: Sequence[Member],
    *,
    prefix: bytes = b"",
    between: bytes = b"",
    comment: bytes = b"",
    suffix: bytes = b"",
    hidden: Sequence[Member] = (),
    count: int | None = None,
    directory_size: int | None = None,
    directory_offset: int | None = None,
) -> bytes:
    """A zip. `prefix` stands before the first member and is not counted in any offset, `between` before the directory;
    `hidden` members have local headers and no entry in it."""
    body, directory = b"", b""
    for member in hidden:
        body += member.local()
    for member in members:
        directory += member.central(len(body))
        body += member.local()
    number = len(members) if count is None else count
    end = struct.pack(
        "<HHHHLLH",
        0,
        0,
        number & 0xFFFF,
        number & 0xFFFF,
        len(directory) if directory_size is None else directory_size,
        len(body) + len(between) if directory_offset is None else directory_offset,
        len(comment),
    )
    return prefix + body + between + directory + b"PK\5\6" + end + comment + suffix


def deflated(content: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(content) + packer.flush()


def standin() -> bytes:
    return (support.PROJECT / support.STANDIN).read_bytes()


def members(file: bytes | None = None) -> dict[str, bytes]:
    """The members of a checkpoint, by default the stand-in's."""
    with zipfile.ZipFile(io.BytesIO(standin() if file is None else file)) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def checkpoint(changes: Mapping[str, bytes | Member | None] | None = None, **options: Any) -> bytes:
    """The stand-in with members replaced, added, or (None) left out."""
    contents: dict[str, bytes | Member | None] = {**members(), **(changes or {})}
    return archive(
        [
            content if isinstance(content, Member) else Member(name, content)
            for name, content in contents.items()
            if content is not None
        ],
        **options,
    )


# ---------------------------------------------------------------------------------------------------------------------
# data
# ---------------------------------------------------------------------------------------------------------------------


def data() -> dict[str, Any]:
    return dict(json.loads(members()["data"]))


def with_data(**changes: Any) -> bytes:
    """The stand-in with other values in `data`; ... removes one."""
    values = {**data(), **changes}
    text = json.dumps({key: value for key, value in values.items() if value is not ...}, indent=4)
    return checkpoint({"data": text.encode()})


def with_entry(key: str, **changes: Any) -> bytes:
    """The stand-in with other values in one object of `data`; ... removes one."""
    entry = {**data()[key], **changes}
    return with_data(**{key: {name: value for name, value in entry.items() if value is not ...}})


def serialized(opcodes: bytes, text: Any = None) -> dict[str, Any]:
    """A value as SB3 writes what JSON cannot hold."""
    return {":type:": "<class 'function'>", ":serialized:": base64.b64encode(opcodes).decode(), **(text or {})}


# ---------------------------------------------------------------------------------------------------------------------
# Pickles, opcode by opcode, in the dialect of torch.save
# ---------------------------------------------------------------------------------------------------------------------


class Raw(bytes):
    """Opcodes that push one value."""


def pushed(value: Any) -> bytes:
    match value:
        case Raw():
            return value
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int() if 0 <= value < 256:
            return b"K" + bytes([value])
        case int() if -(2**31) <= value < 2**31:
            return b"J" + struct.pack("<i", value)
        case int():
            number = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            return b"\x8a" + bytes([len(number)]) + number
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            text = value.encode("utf-8", "surrogatepass")
            return b"X" + struct.pack("<L", len(text)) + text
        case tuple():
            return b"(" + b"".join(map(pushed, value)) + b"t"
        case list():
            return b"](" + b"".join(map(pushed, value)) + b"e"
        case dict():
            return b"}(" + pairs(value) + b"u"
    raise TypeError(f"no opcodes for {value!r}")


def pairs(items: Mapping[Any, Any]) -> bytes:
    return b"".join(pushed(key) + pushed(value) for key, value in items.items())


def named(module: str, name: str) -> Raw:
    return Raw(f"c{module}\n{name}\n".encode())


def called(function: Raw, *arguments: Any) -> Raw:
    return Raw(function + pushed(arguments) + b"R")


def built(value: bytes, state: Any) -> Raw:
    return Raw(value + pushed(state) + b"b")


def ordered(items: Mapping[Any, Any]) -> Raw:
    return Raw(called(named("collections", "OrderedDict")) + b"(" + pairs(items) + b"u")


def storage(key: str, count: int, kind: str = "FloatStorage", location: str = "cpu") -> Raw:
    return Raw(pushed(("storage", named("torch", kind), key, location, count)) + b"Q")


def tensor(
    source: Raw,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
    offset: int = 0,
    requires_grad: bool = False,
    metadata: Any = None,
) -> Raw:
    strides = row_major(shape) if strides is None else strides
    more = () if metadata is None else (metadata,)
    rebuild = named("torch._utils", "_rebuild_tensor_v2")
    return called(rebuild, source, offset, shape, strides, requires_grad, ordered({}), *more)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape)))


def pickled(value: Any) -> bytes:
    return b"\x80\2" + pushed(value) + b"."


KINDS = {
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "float16": "HalfStorage",
    "int64": "LongStorage",
    "complex64": "ComplexFloatStorage",
}


def state_dict(weights: Weights, change: Callable[[str, Raw], Any] | None = None) -> tuple[dict[str, Any], Records]:
    """The entries of a state dict, each tensor with a storage of its own, and those storages."""
    entries, records = {}, {}
    for number, (name, array) in enumerate(weights.items()):
        source = storage(str(number), array.size, KINDS[array.dtype.name])
        entry = tensor(source, array.shape)
        entries[name] = change(name, entry) if change else entry
        records[f"data/{number}"] = array.tobytes()
    return entries, records


Records = dict[str, bytes]


def pth(value: Any, records: Mapping[str, bytes] | None = None, root: str = "archive", **options: Any) -> bytes:
    """A file of torch.save."""
    contents = {"data.pkl": value if isinstance(value, bytes) and not isinstance(value, Raw) else pickled(value)}
    contents |= {**(records or {}), "version": b"3\n"}
    return archive([Member(f"{root}/{name}", content) for name, content in contents.items()], **options)


def with_pth(name: str, value: Any, records: Mapping[str, bytes] | None = None, **options: Any) -> bytes:
    """The stand-in with another .pth file."""
    return checkpoint({name: pth(value, records, **options)})


def with_policy(weights: Weights, change: Callable[[str, Raw], Any] | None = None, **more: Any) -> bytes:
    """The stand-in with a policy.pth of these weights."""
    entries, records = state_dict(weights, change)
    return with_pth("policy.pth", ordered({**entries, **more}), records)


# ---------------------------------------------------------------------------------------------------------------------
# An independent reading, and what it computes
# ---------------------------------------------------------------------------------------------------------------------


class Reader(pickle.Unpickler):
    """Reads a state dict into arrays. Knows the three names in it, and calls nothing else."""

    def __init__(self, records: zipfile.ZipFile, root: str) -> None:
        super().__init__(io.BytesIO(records.read(f"{root}/data.pkl")))
        self.records, self.root = records, root
        order = records.read(f"{root}/byteorder") if f"{root}/byteorder" in records.namelist() else b"little"
        self.endian = {b"little": "<", b"big": ">"}[order]

    def find_class(self, module: str, name: str) -> Any:
        known = {
            "collections.OrderedDict": collections.OrderedDict,
            "torch._utils._rebuild_tensor_v2": self.rebuild,
            "torch.FloatStorage": np.dtype(f"{self.endian}f4"),
        }
        return known[f"{module}.{name}"]

    def persistent_load(self, identifier: tuple[str, np.dtype, str, str, int]) -> np.ndarray:
        _, dtype, key, _, count = identifier
        return np.frombuffer(self.records.read(f"{self.root}/data/{key}"), dtype, count)

    @staticmethod
    def rebuild(
        source: np.ndarray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
    ) -> np.ndarray:
        positions = np.full(shape, offset)
        for axis, stride in enumerate(strides):
            steps = np.arange(shape[axis]) * stride
            positions += steps.reshape([-1 if other == axis else 1 for other in range(len(shape))])
        return source[positions]


def read_weights(content: bytes) -> Weights:
    with zipfile.ZipFile(io.BytesIO(content)) as records:
        root = records.namelist()[0].split("/")[0]
        for info in records.infolist():
            info.CRC = None  # type: ignore[assignment]  # torch checks none either
        return dict(Reader(records, root).load())


def standin_weights() -> Weights:
    return read_weights(members()["policy.pth"])


ACTIVATIONS = {"ReLU": lambda x: np.maximum(x, 0), "Tanh": np.tanh}


def forward(file: bytes, observations: np.ndarray) -> dict[str, np.ndarray]:
    """The outputs of a policy with one Discrete action, in float64, straight from the bytes of its checkpoint."""
    with zipfile.ZipFile(io.BytesIO(file)) as opened:
        weights = {name: array.astype(np.float64) for name, array in read_weights(opened.read("policy.pth")).items()}
        kwargs = json.loads(opened.read("data"))["policy_kwargs"]
    activation = ACTIVATIONS[re.sub(r"\W", " ", kwargs.get("activation_fn", "Tanh")).split()[-1]]

    def linear(layer: str, x: np.ndarray) -> np.ndarray:
        return np.asarray(x @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"])

    def head(tower: str, last: str) -> np.ndarray:
        x = observations.astype(np.float64)
        layer = 0
        while f"mlp_extractor.{tower}.{layer}.weight" in weights:
            x = activation(linear(f"mlp_extractor.{tower}.{layer}", x))
            layer += 2
        return linear(last, x)

    raw = head("policy_net", "action_net")
    top = raw.max(axis=1, keepdims=True)
    logits = raw - top - np.log(np.exp(raw - top).sum(axis=1, keepdims=True))
    probs = np.exp(logits)
    return {
        "action": raw.argmax(axis=1),
        "value": head("value_net", "value_net"),
        "log_prob": logits.max(axis=1),
        "logits": logits,
        "probs": probs,
        "entropy": -(probs * logits).sum(axis=1),
    }
