#!/usr/bin/env python3
"""Check evidence sets of inference.py: offline, without torch and without an NPU.

    python3 tests/check_evidence.py logs
    python3 tests/check_evidence.py runs/1 runs/2 --checkpoint my_ppo.zip --observations rows.npy

For each directory: what the set is about, each gate with PASS or FAIL, what the set does not show (NOTE), a verdict:

  VALID       exit code 0: the complete and consistent evidence of a good run
  FAILED RUN  exit code 1: the consistent evidence of a run that failed
  INVALID     exit code 1: something is missing, or two witnesses of one fact disagree

A usage error ends in 2. Sets of several slices of one file must be complete as well.

A forger who rewrites all files consistently passes every gate but the last, which needs the checkpoint: the gates show
that a set is whole and that its answers are the checkpoint's, not who made it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import re
import shlex
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple, TextIO

PROJECT = Path(__file__).resolve().parents[1]
try:
    import numpy as np
except ImportError:
    # tests/simulate.sh has set up one that has it.
    mended = [f"use {shlex.quote(str(path))}" for path in sorted(PROJECT.glob(".venv/*/bin/python3"))]
    mended.append("python3 -m pip install numpy")
    print(f"check_evidence.py: {sys.executable} has no numpy: {mended[0]}", file=sys.stderr)
    sys.exit(2)
Array = np.ndarray[Any, Any]
Rows = dict[str, Array]  # by output, each (n, numbers)
Json = dict[str, Any]
Problems = Iterator[str]  # what a gate found: two witnesses that disagree, in a sentence each; "" is none

# What the checker knows of inference.py, it knows by itself: the producer does not check itself.
SCHEMA, DEVICE = "npu-inference-evidence/2", "npu:0"
LOG, MARKER, NPU_SMI, OUTPUTS, RESULT = (
    "npu_inference.log", "npu_ready.marker", "npu_smi.log", "npu_outputs.npy", "npu_result.json")
STAGES = ("verify", "npu", "load", "ready", "forward", "benchmark", "final")
EXIT_CODES = {"InternalError": 1, "CheckpointRejected": 3, "NpuUnavailable": 4, "LoadFailed": 5, "ForwardFailed": 6,
              "DeviceTimeout": 6, "EvidenceUnwritable": 7, "interrupted by SIGHUP": 129, "interrupted by SIGINT": 130,
              "interrupted by SIGTERM": 143}
PINNED_NAME, PINNED_BYTES = "ppo-seals-CartPole-v0.zip", 139005
PINNED_SHA256 = "4e57a2618e1ab32ee4c5267874ae9f630896bc73991bd68392f5c78e4ecf738d"
PINNED_IDENTITY = [
    "HumanCompatibleAI/ppo-seals-CartPole-v0", "a86541dd3744275227cb16d07192967fc6b7775e", "not-declared"]
TOLERANCE = 1e-3  # of an output beside the float64 reference: absolute, relative above 1
FLAGS: dict[str, tuple[Callable[[str], Any], Any]] = {  # how a value is read, and the default
    "--checkpoint": (str, PINNED_NAME), "--sha256": (str.lower, PINNED_SHA256), "--observation": (json.loads, None),
    "--observations": (str, None), "--shard": (str, "1/1"), "--hold-seconds": (float, 8.0), "--log-dir": (str, "logs"),
    "--timeout-seconds": (float, 300.0), "--tolerance": (float, TOLERANCE), "--benchmark": (int, 0)}
PUBLISHED = {
    "value": [[196.2478790283203]], "log_prob": [-0.30756598711013794],
    "probs": [[0.7352343797683716, 0.26476559042930603]], "logits": [[-0.30756598711013794, -1.3289103507995605]],
    "entropy": [0.5779828429222107]}
SMALL, SATURATED = 0.01, 3.0  # see "How errors count" in logs/README.md
SHOWN_ROWS, SHOWN_NUMBERS = 16, 1000  # in the result
CHUNK_ROWS, CHUNK_NUMBERS = 16384, 1 << 18  # of observations in one pass over a file
CHIP_IS_FULL = 8  # processes that npu-smi info lists for a chip; as many calls ask for more

# Bounds near what a run can write: looked at before anything is hashed or parsed.
MAX_TEXT, MAX_MARKS, MAX_SPACE, MAX_CHECKPOINT = 16 << 20, 1_000_000, 1 << 20, 128 << 20
CLOCK = 1.1e-6  # seconds: times are rounded to the microsecond

# What a run that got past a stage cannot have found otherwise.
CLAIMS: dict[str, Json] = {
    "start": {"engine": "torch_npu"},
    "verify": {"checkpoint.size_ok": True, "checkpoint.sha256_ok": True},
    "npu": {"npu_available": True, "npu_device": DEVICE, "environment.TORCH_NPU_FALLBACK_CPU_DISABLE": "1",
            "environment.TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "environment.KINETO_LOG_LEVEL": "99",
            "determinism.deterministic_algorithms": True, "determinism.jit_compile": False,
            "determinism.allow_hf32_matmul": False},
    "load": {"policy_class": "ActorCriticPolicy", "param_devices": [DEVICE], "all_params_on_npu": True,
             "params_match_checkpoint": True, "model_device": DEVICE},
    "forward": {"input_device": DEVICE, "inputs_match_host": True, "output_device": DEVICE, "all_outputs_on_npu": True,
                "bitwise_repeatable": True, "params_match_after_forward": True, "reference.within_tolerance": True},
    "benchmark": {"benchmark.warm_up_passes": 10}}

# The keys of npu_result.json: the stage that measures them, what they are part of, their types and names; and those
# of action_space by its type. "?": may be null in a good run. "*": any name.
KEYS = """
start - text: schema engine script_version cwd log_dir texts: argv notes int: exit_code pid float: total_s
start - sha256: script_sha256 time: started_at finished_at ended: worker_exit
start error? text: stage type message hint
start stages float: *
start files sha256: *
verify - text: model_id? source_revision? license? ints: observation_shape dict: action_space int: rows
verify versions text: python platform torch? torch_npu? cann? npu_smi? driver?
verify versions text: stable_baselines3? gymnasium? numpy? cloudpickle?
verify checkpoint text: path int: bytes? sha256: sha256? bool: size_ok? sha256_ok?
verify observations? text: file shard dtype: dtype int: first_row rows total_rows sha256: sha256_float32?
npu - bool: simulated npu_available simulator: simulator? text: npu_device npu_device_name visible_devices
npu - int: device_count nodes: device_nodes
npu environment text: ASCEND_RT_VISIBLE_DEVICES TASK_QUEUE_ENABLE ACL_OP_INIT_MODE KINETO_LOG_LEVEL
npu environment text: TORCH_NPU_FALLBACK_CPU_DISABLE TORCH_DEVICE_BACKEND_AUTOLOAD
npu determinism bool: deterministic_algorithms jit_compile allow_hf32_matmul allow_hf32_conv device?
load - text: policy_class model_device int: num_params texts: param_devices float: load_s
load - bool: all_params_on_npu params_match_checkpoint
ready - float: hold_seconds time: ready_at
ready npu_smi bool: captured pid_found pid_absent_before? text: pid_line? matched_by? reason? npu_id? chip_id?
forward - text: input_device output_device int: repeated_rows float: forward_s
forward - bool: inputs_match_host all_outputs_on_npu bitwise_repeatable params_match_after_forward
forward - list: observation action value log_prob entropy? probs? logits? mean? std? env_action?
forward outputs.* text: dtype device ints: shape
forward kernels int: *
forward reference int: rows ties float: tolerance action_agreement elapsed_s bool: within_tolerance within_1_percent
forward reference.outputs.* float: max_abs_error max_rel_error_percent mean_abs_error cosine?
forward published? float: tolerance bool: within_tolerance action_equal
forward published?.outputs float: *
benchmark benchmark int: warm_up_passes text: graph_reason?
benchmark benchmark.eager int: passes float: p50_s p90_s p99_s mean_s
benchmark benchmark.graph? int: passes float: p50_s p90_s p99_s mean_s
Discrete - text: type int: n
MultiBinary - text: type int: n
MultiDiscrete - text: type ints: nvec
Box - text: type ints: shape list: low high bool: squashed
"""
SHA256 = re.compile("[0-9a-f]{64}")
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00")
TYPES: Json = {
    "text": str, "int": int, "float": float, "bool": bool, "list": list, "dict": dict, "texts": [str], "ints": [int],
    "sha256": SHA256, "time": TIME, "dtype": re.compile("float32|float64"),
    "simulator": re.compile(r"cannsim \d{1,9}"), "nodes": [re.compile(r"/dev/davinci\w{0,40}")],
    "ended": re.compile(r"exit code \d{1,3}|ended by SIG[A-Z0-9+]{2,9}|did not end")}


def read_forms(keys: str) -> dict[str, Json]:
    """The table of keys: for each stage, and each type of action space, a nested form."""
    forms: dict[str, Json] = {}
    for line in keys.strip().splitlines():
        stage, parents, *words = line.split()
        form = forms.setdefault(stage, {})
        for parent in parents.split(".") if parents != "-" else ():
            form = form.setdefault(parent, {})
        for word in words:
            if word.endswith(":"):
                type_ = TYPES[word[:-1]]
            else:
                form[word] = type_
    return forms


FORMS = read_forms(KEYS)


# --- Reading, within bounds


class Unreadable(Exception):
    """A file that the reader has named himself, and that says nothing about the set."""


def read_file(path: Path, limit: int) -> bytes:
    """A file's bytes. Raises ValueError for what is not a regular file (a link, a pipe), or is too large."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path.name} is not a regular file")
    if status.st_size > limit:
        raise ValueError(f"{path.name} has {status.st_size} bytes, more than {limit}")
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
        return file.read(limit + 1)


def parse_result(text: bytes) -> Json:
    """npu_result.json as strict JSON: no NaN, no key twice, no number longer than a run writes."""
    def number(digits: str) -> int | float:
        if len(digits) > 40 or not math.isfinite(float(digits)):
            raise ValueError(f"{digits[:20]} is not a number that a run writes")
        return float(digits) if set(digits) & set(".eE") else int(digits)

    def unique(pairs: list[tuple[str, Any]]) -> Json:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a key stands twice")
        return dict(pairs)

    if sum(map(text.count, (b"[", b"{", b","))) > MAX_MARKS:
        raise ValueError(f"{RESULT} has more than {MAX_MARKS} values")
    result = json.loads(text.decode(), parse_constant=number, parse_int=number, parse_float=number,
                        object_pairs_hook=unique)
    if not isinstance(result, dict):
        raise ValueError(f"{RESULT} is not a JSON object")
    return result


class Evidence:
    """One set: its texts and its result, and what its reader has at hand."""

    def __init__(self, directory: Path, checkpoint: str | None, observations: str | None) -> None:
        self.dir, self.checkpoint, self.observations = directory, checkpoint, observations
        self.files = {name: read_file(directory / name, MAX_TEXT) for name in (RESULT, LOG, MARKER, NPU_SMI)
                      if os.path.lexists(directory / name)}
        self.r = parse_result(self.files[RESULT])
        self.model: Any = None  # what the checkpoint's bytes say, where they are at hand; see gate_checkpoint
        self.shown: Rows = {}  # the rows in the result; see gate_outputs

    def done(self, stage: str) -> bool:
        """Whether the run got past this stage."""
        return stage == "start" or stage in list(self.r["stages"])[:-1 if self.r["error"] else None]

    def offset(self, time: str) -> float:
        """Seconds from the start of the run."""
        return (datetime.fromisoformat(time) - datetime.fromisoformat(self.r["started_at"])).total_seconds()

    def within(self, stage: str, seconds: float) -> bool:
        """Whether the stage was under way so many seconds after the start."""
        names, took = list(self.r["stages"]), list(self.r["stages"].values())
        number = names.index(stage)
        return bool(sum(took[:number]) - 9 * CLOCK <= seconds <= sum(took[:number + 1]) + 9 * CLOCK)

    def is_cut(self) -> bool:
        """Whether the result shows only the beginning of a row of an output."""
        return any(math.prod(output["shape"][1:]) > SHOWN_NUMBERS for output in self.r["outputs"].values())

    def has_all_rows(self) -> bool:
        """Whether the file or the result has every number of every row."""
        return self.r["observations"] or (len(self.shown["value"]) == self.r["rows"] and not self.is_cut())

    def rows_at_hand(self) -> Array:
        """The observations that ran; of a file that is not at hand, those that the result shows whole."""
        shape, file, path = tuple(self.r["observation_shape"]), self.r["observations"], self.observations
        if not file:
            typed = parse_argv(self.r["argv"])["--observation"]
            rows = np.zeros(shape) if typed is None else np.array(typed)
            return (rows[None] if rows.shape == shape else rows).astype(np.float32)
        if not path:
            shown = self.shown["observation"]
            return shown.reshape(-1, *shape) if shown.shape[1] == math.prod(shape) else shown[:0]
        rows = read_observations(path)
        width = math.prod(rows.shape[1:]) if rows.ndim else 0
        ours = [file["total_rows"], math.prod(shape), file["dtype"]]
        theirs = [*rows.shape[:1], width, str(rows.dtype)]
        if ours != theirs:
            raise ValueError(f"another file of observations: rows, width, dtype: JSON {ours}, {path} {theirs}")
        return rows[file["first_row"]:][:file["rows"]].reshape(-1, *shape)

    def outputs(self) -> Array:
        """npu_outputs.npy, mapped. Raises ValueError unless header, size and types are those of the result's rows."""
        rows, path = self.r["rows"], self.dir / OUTPUTS
        forms, types = output_forms(self.r["action_space"]), {"torch.int64": "<i8", "torch.float32": "<f4"}
        wanted = np.dtype([(name, types[dtype], tuple(shape)) for name, (dtype, shape) in forms.items()])
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ValueError(f"{OUTPUTS} is not a regular file")
        with open(path, "rb") as file:
            size, hole = file.seek(0, os.SEEK_END), os.lseek(file.fileno(), 0, os.SEEK_HOLE)
            file.seek(0)
            read: Any = np.lib.format
            version, header = read.read_magic(file), read.read_array_header_1_0(file)
            needed = file.tell() + rows * wanted.itemsize
        if (version, header) != ((1, 0), ((rows,), False, wanted)):
            raise ValueError(f"rows: JSON {rows} of {wanted}, {OUTPUTS} {header[0]} of {header[2]}")
        if size != needed or hole != needed:
            raise ValueError(f"{OUTPUTS}: {size} bytes (a hole at {hole}), header {needed}")
        return np.memmap(path, wanted, "r", needed - rows * wanted.itemsize, (rows,))

    def chunks(self) -> Iterator[tuple[int, Rows]]:
        """(number of the first row, outputs): all rows of the file, or those in the result."""
        names, rows = list(self.r["outputs"]), self.r["rows"]
        if not self.r["observations"]:
            yield 0, {name: self.shown[name] for name in names}
            return
        table = self.outputs()
        widths = [table.dtype.itemsize // 4]
        if self.model:  # its layers, and the observations, are as wide as its tensors
            widths += [max(tensor.shape) for tensor in self.model.tensors.values()]
        step = max(1, min(CHUNK_ROWS, 4 * CHUNK_NUMBERS // max(widths)))
        for start in range(0, rows, step):
            if sys.stderr.isatty():
                print(f"\r{start} of {rows} rows\x1b[K\r", end="", file=sys.stderr, flush=True)
            chunk = table[start:start + step]
            yield start, {name: chunk[name].reshape(len(chunk), -1).astype(np.float64) for name in names}


def read_observations(path: str) -> Array:
    """The file of observations that the reader has named."""
    try:
        if path.lower().endswith(".npy"):
            rows = np.load(path, "r")
        else:
            with open(path, encoding="utf-8-sig") as text:
                rows = np.loadtxt(text, delimiter=",", comments=None, quotechar='"', ndmin=2)
    except (ValueError, OSError, EOFError) as error:
        raise Unreadable(f"{path} is not a .npy or .csv file of numbers") from error
    if not isinstance(rows, np.ndarray):
        raise Unreadable(f"{path} is a .npz file")
    return rows


def output_forms(space: Json) -> dict[str, tuple[str, list[int]]]:
    """The outputs that a policy of this action space gives: dtype, and shape for one row."""
    floats: dict[str, list[int]] = {"value": [1], "log_prob": []}
    if not space.get("squashed"):
        floats["entropy"] = []
    if space["type"] == "Box":
        size = math.prod(space["shape"])
        floats.update(mean=[size], std=[size], env_action=space["shape"])
        action = ("torch.float32", space["shape"])
    else:
        choices = space.get("nvec", [space.get("n")])
        floats.update(probs=[sum(choices)], logits=[sum(choices)])
        action = {"Discrete": ("torch.int64", []), "MultiDiscrete": ("torch.int64", [len(choices)]),
                  "MultiBinary": ("torch.float32", choices)}[space["type"]]
    return {"action": action, **{name: ("torch.float32", shape) for name, shape in floats.items()}}


def parse_argv(argv: list[str]) -> Json:
    """The command line of the run, parsed again. Raises ValueError for one that inference.py refuses."""
    asked = {flag: default for flag, (_, default) in FLAGS.items()}
    words = iter(argv[1:])
    for word in words:
        flag, equals, value = word.partition("=")
        if flag not in FLAGS:
            raise ValueError(f"argv: inference.py has no {flag[:60]!r}")
        if not equals and (value := next(words, "--")).startswith("--"):
            raise ValueError(f"argv: {flag} has no value")
        read, _ = FLAGS[flag]
        asked[flag] = read(value)
    return asked


def as_array(name: str, nested: Any, kind: type) -> Array:
    """Nested lists as an array. Raises ValueError where they are ragged, or hold something else than this type."""
    array = np.array(nested, object)
    if {*map(type, array.flat)} != {kind}:
        raise ValueError(f"{name}: JSON has something else than {kind.__name__}, or lists of different lengths")
    return array.astype(kind)


# --- The gates: each yields what is wrong


def differ(what: str, stated: Any, witness: str, found: Any) -> str:
    """Two witnesses that disagree. Compared as text: True is not 1 here, nor 1 the same as 1.0."""
    ours, theirs = repr(stated), repr(found)
    if ours == theirs:
        return ""
    start = max(0, len(os.path.commonprefix([ours, theirs])) - 60)  # noqa: RUF071 (texts, not paths)
    return f"{what}: JSON {'...' * (start > 0)}{ours[start:][:120]}, {witness} {theirs[start:][:120]}"


def unless(holds: bool, problem: str) -> str:
    return "" if holds else problem


def misfits(value: Any, form: Any, path: str) -> Problems:
    """Where a value is not of its form: a type, a pattern, [the form of each item], {name: form}."""
    if isinstance(form, dict) and type(value) is dict:
        names = {name.rstrip("?"): name for name in form}
        if "*" not in names and set(value) != set(names):
            yield f"{path}: JSON lacks {sorted(set(names) - set(value))}, or has also {sorted(set(value) - set(names))}"
            return
        for key, item in value.items():
            name = names.get(key, "*")
            if item is not None or not name.endswith("?"):
                yield from misfits(item, form[name], f"{path}.{key}")
    elif isinstance(form, list) and type(value) is list:
        for item in value:
            yield from misfits(item, form[0], f"{path}[]")
    elif isinstance(form, re.Pattern):
        if type(value) is not str or not form.fullmatch(value):
            yield f"{path}: JSON {str(value)[:60]!r}, expected {form.pattern}"
    elif type(value) is not form:
        yield f"{path}: JSON {str(value)[:60]!r}, expected {form}"


def gate_keys(s: Evidence) -> Problems:
    """Every key has its type. What a completed stage measures is there; what the run never came to is null."""
    if s.r.get("schema") != SCHEMA:
        stated = str(s.r.get("schema"))[:60]
        yield f"schema: JSON {stated!r}, this checker {SCHEMA!r}: of another version of inference.py"
        return
    stages = {stage: FORMS[stage] for stage in ("start", *STAGES[:-1])}
    names = {name.rstrip("?") for forms in stages.values() for name in forms}
    if set(s.r) != names:
        yield f"result: JSON lacks {sorted(names - set(s.r))}, or has also {sorted(set(s.r) - names)}"
        return
    for stage, forms in stages.items():
        for name, form in forms.items():
            value = s.r[name.rstrip("?")]
            if value is not None:
                yield from misfits(value, form, f"result.{name.rstrip('?')}")
                came = stage == "start" or stage in s.r["stages"]
                yield unless(came, f"{name}: JSON {str(value)[:60]!r}, but the run never came to {stage}")
            elif not name.endswith("?"):
                yield unless(not s.done(stage), f"{name}: JSON null, but the run got past {stage}")


def gate_sizes(s: Evidence) -> Problems:
    """Shapes and counts are such as a checkpoint can have."""
    space, shape = s.r["action_space"] or {"type": "Discrete", "n": 1}, s.r["observation_shape"] or [1]
    box, choices = space.get("shape", [1]), space.get("nvec", [space.get("n", 1)])
    yield from misfits(space, FORMS[space["type"]], "action_space")
    for counts in (shape, box):
        small = len(counts) <= 32 and all(0 < count <= MAX_SPACE for count in counts) and math.prod(counts) <= MAX_SPACE
        yield unless(small, f"observation_shape, action_space: JSON {str(counts)[:60]}, no shape of a checkpoint")
    positive = bool(choices) and all(0 < count <= MAX_SPACE for count in choices) and sum(choices) <= MAX_SPACE
    yield unless(positive, f"action_space: JSON {str(choices)[:60]}, no choices of a checkpoint")
    yield unless(s.r["rows"] is None or s.r["rows"] > 0, f"rows: JSON {s.r['rows']}, expected 1 or more")
    for bounds in (space.get("low", [0.0]), space.get("high", [0.0])):
        numbers = len(bounds) == math.prod(box) and {*map(type, bounds)} <= {float, type(None)}
        yield unless(numbers, f"action_space: JSON {str(bounds)[:60]}, expected a bound for each number")


def gate_outcome(s: Evidence) -> Problems:
    """Exit code 0 and no error, or the exit code of the error, which belongs to the last stage."""
    error, stages = s.r["error"], list(s.r["stages"])
    order = [stage for stage in STAGES if stage != "benchmark" or stage in stages]
    if error:
        order = order[:len(stages)]
        name = error["message"] if error["type"] == "Interrupted" else error["type"]
        yield differ("exit_code", s.r["exit_code"], f"error {name[:60]}", EXIT_CODES.get(name))
        yield differ("error.stage", error["stage"], "the last of stages", stages[-1] if stages else "start")
    else:
        yield differ("exit_code", s.r["exit_code"], "no error", 0)
    yield differ("stages", stages, "the order of a run", order)


def gate_times(s: Evidence) -> Problems:
    """All times follow from each other, and are rounded as a run rounds them."""
    r, stages, compared = s.r, s.r["stages"], (s.r["reference"] or {}).get("elapsed_s")
    named = {"total_s": r["total_s"], "load_s": r["load_s"], "forward_s": r["forward_s"], "elapsed_s": compared}
    for name, seconds in {**named, **stages}.items():
        rounded = seconds is None or 0 <= seconds == round(seconds, 6)
        yield unless(rounded, f"{name}: JSON {seconds}, not seconds of six digits")
    totals = {"finished_at - started_at": s.offset(r["finished_at"])}
    if stages:
        totals["stages"] = sum(stages.values())
    for witness, total in totals.items():
        equal = abs(total - r["total_s"]) <= CLOCK * max(1, len(stages))
        yield unless(equal, f"total_s: JSON {r['total_s']}, {witness} {total}")
    if r["ready_at"]:
        yield unless(s.within("ready", s.offset(r["ready_at"])), f"ready_at: JSON {r['ready_at']}, stages differ")
    if s.done("ready"):
        held = s.within("ready", s.offset(r["ready_at"]) + r["hold_seconds"])
        yield unless(held, f"hold_seconds: JSON {r['hold_seconds']}, the ready stage took {stages['ready']}")
    # What the worker timed lies in its stage, whose beginning the supervisor may have noticed late.
    if s.done("load"):
        yield unless(r["load_s"] <= stages["npu"] + stages["load"], f"load_s: JSON {r['load_s']}, stages less")
    if s.done("forward"):
        fits = r["forward_s"] + compared <= stages["ready"] + stages["forward"]
        yield unless(fits, f"forward_s, elapsed_s: JSON {r['forward_s']}, {compared}, stages less")


def gate_files(s: Evidence) -> Problems:
    """Each file of the run is there, with the digest that the result names, and no other file of a run."""
    r, rows = s.r, s.r["observations"] or {}
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in s.files.items()}
    if os.path.lexists(s.dir / OUTPUTS) and rows:
        s.outputs()  # its size is looked at before it is hashed
        digests[OUTPUTS] = hashlib.sha256(np.memmap(s.dir / OUTPUTS, np.uint8, "r").data).hexdigest()
    for name in sorted({*r["files"], *digests} - {RESULT}):
        yield differ(f"files.{name}", r["files"].get(name), "the file", digests.get(name))
    for name, may_be, must_be in (
            (LOG, True, True), (NPU_SMI, "npu" in r["stages"], r["npu_available"] is not None),
            (MARKER, "ready" in r["stages"], r["npu_smi"] is not None),
            (OUTPUTS, rows and "forward" in r["stages"], rows.get("sha256_float32") is not None)):
        there = os.path.lexists(s.dir / name)
        yield unless(there or not must_be, f"{name}: JSON tells of a run with it, the file is missing")
        yield unless(may_be or not there, f"{name}: JSON tells of a run without it, the file is there")
    sums = PROJECT / "SHA256SUMS"
    if s.dir.resolve() == (PROJECT / "logs").resolve() and sums.exists():
        listed = {line[66:]: line[:64] for line in read_file(sums, MAX_TEXT).decode().splitlines()}
        for name in (LOG, MARKER, NPU_SMI, OUTPUTS, RESULT):
            stated, found = listed.get(f"logs/{name}"), digests.get(name)
            yield unless(stated == found, f"{name}: SHA256SUMS {stated}, the file {found}")


def gate_program(s: Evidence) -> Problems:
    """The inference.py that made the set is the one beside this checker."""
    source = read_file(PROJECT / "inference.py", MAX_TEXT)
    version = re.search(rb'^VERSION = "([^"\n]{1,40})"', source, re.M)
    here, made_by = version[1].decode() if version else "?", s.r["script_version"]
    if here == made_by:
        yield differ("script_sha256", s.r["script_sha256"], "inference.py", hashlib.sha256(source).hexdigest())
    else:
        yield (f"script_version: made by inference.py {made_by[:40]} with SHA256 {s.r['script_sha256']}, this project "
               f"has {here}: check it beside that version")


def gate_command_line(s: Evidence) -> Problems:
    """The command line, parsed again, asks for what the result says was done."""
    r, asked, file, checkpoint = s.r, parse_argv(s.r["argv"]), s.r["observations"], s.r["checkpoint"]
    yield differ("argv[0]", r["argv"][0], "every run", "inference.py")
    yield differ("log_dir", r["log_dir"], "argv", asked["--log-dir"])
    if checkpoint and checkpoint["path"] != f"{asked['--checkpoint']}.zip":  # a name may leave out its .zip
        yield differ("checkpoint.path", checkpoint["path"], "argv", asked["--checkpoint"])
    if s.done("verify"):
        yield differ("checkpoint.sha256", checkpoint["sha256"], "argv", asked["--sha256"])
        yield differ("observations.file", file and file["file"], "argv", asked["--observations"])
        if file:
            index, of = map(int, asked["--shard"].split("/"))
            first, end = (index - 1) * file["total_rows"] // of, index * file["total_rows"] // of
            stated = [file["shard"], file["first_row"], file["rows"], r["rows"]]
            yield differ("observations", stated, "argv", [f"{index}/{of}", first, end - first, end - first])
        else:
            yield differ("rows", r["rows"], "argv", len(s.rows_at_hand()))
    if r["hold_seconds"] is not None:
        yield differ("hold_seconds", r["hold_seconds"], "argv", asked["--hold-seconds"])
    if s.done("forward"):
        yield differ("reference.tolerance", r["reference"]["tolerance"], "argv", asked["--tolerance"])
    if s.done("final"):
        passes = r["benchmark"]["eager"]["passes"] if r["benchmark"] else 0
        yield differ("benchmark.eager.passes", passes, "argv", asked["--benchmark"])


# The log, line by line. "KEY?": only where the result has that key.
LOG_LINES = {
    "verify": """
[inference] python            : {versions[python]}
[inference] platform          : {versions[platform]}
[inference] pid               : {pid}
[inference] cwd               : {cwd}
[inference] checkpoint        : {checkpoint[path]}
[inference] program           : {script_version} sha256={script_sha256}
[verify]  bytes={checkpoint[bytes]} sha256={checkpoint[sha256]}
[verify]  size_ok={checkpoint[size_ok]} sha256_ok={checkpoint[sha256_ok]}
observations?[verify]  observations file={observations[file]} dtype={observations[dtype]} shard={observations[shard]} \
first_row={observations[first_row]} rows={observations[rows]} total_rows={observations[total_rows]}
notes?""",
    "npu": """
[npu]     torch={versions[torch]} torch_npu={versions[torch_npu]}
[npu]     is_available={npu_available} device={npu_device} name={npu_device_name}
[npu]     device_count={device_count} CANN={versions[cann]} npu-smi={versions[npu_smi]}
[npu]     driver={versions[driver]} stable_baselines3={versions[stable_baselines3]} gymnasium={versions[gymnasium]} \
numpy={versions[numpy]} cloudpickle={versions[cloudpickle]}
[npu]     visible_devices={visible_devices} device_nodes={device_nodes}
[npu]     environment={environment}
[npu]     determinism={determinism}
simulated?[npu]     SIMULATED by {simulator}: nothing in this run touched a physical NPU""",
    "load": """
[load]    PPO.load elapsed={load_s:.4f}s device={model_device}
[model]   policy_class={policy_class} num_params={num_params}
[model]   param_devices={param_devices} all_params_on_npu={all_params_on_npu}
[model]   params_match_checkpoint={params_match_checkpoint}""",
    "ready": """
[ready]   NPU_READY_PID={pid} DEVICE={npu_device} MARKER={log_dir}/npu_ready.marker
[ready]   holding {hold_seconds}s for external npu-smi correlation ...
[ready]   npu_smi captured={npu_smi[captured]} pid_found={npu_smi[pid_found]} log={log_dir}/npu_smi.log
pid_found?[ready]   npu_smi pid_line={npu_smi[pid_line]}
reason?[ready]   npu_smi reason={npu_smi[reason]}
[ready]   npu_smi pid_absent_before={npu_smi[pid_absent_before]} matched_by={npu_smi[matched_by]} \
npu_id={npu_smi[npu_id]} chip_id={npu_smi[chip_id]}""",
    "forward": """
[forward] elapsed={forward_s:.4f}s (npu-synchronized)
[forward] obs={observation} {tensor[observation]}
[forward] action={action} {tensor[action]}
[forward] value={value} {tensor[value]}
[forward] log_prob={log_prob} {tensor[log_prob]}
probs?[forward] probs={probs} logits={logits} entropy={entropy}
mean?[forward] mean={mean} std={std} entropy={entropy}
env_action?[forward] env_action={env_action} {tensor[env_action]}
[forward] all_outputs_on_npu={all_outputs_on_npu}
[forward] bitwise_repeatable={bitwise_repeatable} rows={repeated_rows}
[forward] inputs_match_host={inputs_match_host} params_match_after_forward={params_match_after_forward}
[forward] kernels={kernels}
observations?[forward] observations sha256_float32={observations[sha256_float32]}
[reference] float64 from the checkpoint's bytes: compared with, never a source of a result
[reference] rows={reference[rows]} tolerance={reference[tolerance]} within_tolerance={reference[within_tolerance]} \
within_1_percent={reference[within_1_percent]} action_agreement={reference[action_agreement]} ties={reference[ties]} \
elapsed={reference[elapsed_s]:.4f}s
figures?
published?[published] tolerance={published[tolerance]} within_tolerance={published[within_tolerance]} \
action_equal={published[action_equal]} max_abs_error={published[outputs]}""",
    "benchmark": "\ntimes?",
    "final": "\n[final]   worker_exit={worker_exit}"}


def lines_of(r: Json, stage: str) -> Iterator[str]:
    """The lines of a stage, made of the values of the result."""
    found = (r["npu_smi"] or {}).get("pid_found")
    tensors = {"observation": {"shape": [r["rows"], *(r["observation_shape"] or ())], "dtype": "torch.float32",
                               "device": r["input_device"]}, **(r["outputs"] or {})}
    described = {name: f"shape={tuple(tensor['shape'])} dtype={tensor['dtype']} device={tensor['device']}"
                 for name, tensor in tensors.items()}
    values = {**r, "tensor": described, "pid_found": found, "reason": not found}
    for template in LOG_LINES[stage].split("\n")[1:]:
        condition, _, rest = template.rpartition("?")
        if template == "notes?":
            yield from (f"[note]    {note}" for note in r["notes"])
        elif template == "figures?":
            for name, errors in r["reference"]["outputs"].items():
                yield f"[reference] {name} " + " ".join(f"{figure}={value}" for figure, value in errors.items())
        elif template == "times?":
            yield from lines_of_benchmark(r["benchmark"], "SIMULATED " if r["simulated"] else "")
        elif not condition or values[condition]:
            yield rest.format_map(values)


def lines_of_benchmark(timed: Json, mark: str) -> Iterator[str]:
    for name in ("eager", "graph"):
        if times := timed[name]:
            in_ms = (f"{percentile}_ms={1e3 * times[f'{percentile}_s']:.4f}" for percentile in ("p50", "p90", "p99"))
            yield f"[benchmark] {mark}{name} passes={times['passes']} {' '.join(in_ms)}"
        else:
            yield f"[benchmark] {mark}graph: {timed['graph_reason']}"


def one_line(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def gate_log(s: Evidence) -> Problems:
    """The log says, line by line, what the result says. That of a failed run may end early in its last stage."""
    *lines, rest = s.files[LOG].decode().split("\n", 5000)
    error = s.r["error"]
    last = [f"[final]   exit_code={s.r['exit_code']} result_json={s.r['log_dir']}/{RESULT}"]
    if error:
        last.insert(0, "[error]   " + " ".join(f"{name}={value}" for name, value in error.items()))
    yield unless(not rest and len(lines) >= len(last), f"{LOG} is cut, or has more than 5000 lines")
    stated = ((stage, line) for stage in s.r["stages"] for line in lines_of(s.r, stage))
    for number, found in enumerate(lines[:-len(last)], 1):
        _, line = next(stated, ("", "no more lines of a stage"))
        if one_line(line) != found:
            yield differ(f"line {number}", one_line(line), LOG, found)
            return
    with contextlib.suppress(TypeError):  # the stage that failed has not measured all
        for stage, line in stated:
            yield unless(not s.done(stage), f"JSON says {line[:100]!r}, {LOG} does not")
    for line, found in zip(last, lines[-len(last):], strict=False):
        yield differ("last lines", one_line(line), LOG, found)


def gate_marker(s: Evidence) -> Problems:
    r = s.r
    if MARKER in s.files:
        stated = (f"NPU_READY_PID={r['pid']}\nDEVICE={r['npu_device']}\nHOLD_SECONDS={r['hold_seconds']}\n"
                  f"READY_AT={r['ready_at']}\nSIMULATED={int(r['simulated'])}\n")
        yield differ("marker", stated, MARKER, s.files[MARKER].decode())


# npu-smi: its raw answers, read anew


class Process(NamedTuple):
    """A row of npu-smi's process table."""

    chip: str  # the numbers of the NPU and of the chip on it, such as "0 0"
    pid: str
    inside: str  # the PID in its container, "" where the column is missing or has none
    line: str


class Call(NamedTuple):
    """A call of npu-smi, and what it answered."""

    arguments: str
    at: str
    outcome: str
    text: str

    def processes(self) -> list[Process] | None:
        """The process table, read by the names in its header row; None where there is no such table."""
        names: list[str] = []
        found = []
        for line in map(str.strip, self.text.splitlines() if self.outcome == "exit code 0" else ()):
            cells = [" ".join(cell.split()) for cell in line.split("|")[1:-1]]
            heads = [cell.lower() for cell in cells]
            if "process id" in heads:
                names = heads
            elif names and len(cells) >= len(names):
                pid = cells[names.index("process id")]
                from_the_end = dict(zip(reversed(names), reversed(cells), strict=False))  # a name may hold a bar
                inside = from_the_end.get("process id in container", "")
                if pid.isdecimal():
                    found.append(Process(cells[0], pid, inside if inside.isdecimal() else "", line))
        return found if names else None


HEADING = re.compile(
    rf"# npu-smi ([\w -]{{1,80}}) at=({TIME.pattern}) bytes=(\d{{1,7}}) outcome=(.{{1,400}})\n".encode())
VERSIONS = re.compile(r"npu-smi {1,9}v?(\d[\w.]{0,40}) {1,80}Version: {0,40}v?(\d[\w.]{0,40})")
CHIP_ROW = re.compile(r"(?m)^\| {1,9}\d{1,4} {1,40}(\S{1,40}) {1,80}\| {0,40}[A-Za-z]{1,20} {0,40}\|")


def read_calls(log: bytes) -> list[Call]:
    calls: list[Call] = []
    at = 0
    while at < len(log):
        heading = HEADING.match(log, at)
        if not heading or len(calls) > CHIP_IS_FULL + 2:
            raise ValueError(f"call {len(calls) + 1} has no heading, or is one too many")
        arguments, time, length, outcome = (part.decode("utf-8", "replace") for part in heading.groups())
        end = heading.end() + int(length)
        if log[end:end + 1] != b"\n":
            raise ValueError(f"call {len(calls) + 1} does not have {length} bytes")
        calls.append(Call(arguments, time, outcome, log[heading.end():end].decode("utf-8", "replace")))
        at = end + 1
    return calls


def correlate(pid: str, calls: list[Call]) -> tuple[Json, list[str]]:
    """What the answers say of the PID, without the reason, and the calls that should have been made."""
    before, after, *more = calls
    earlier, listed = before.processes(), after.processes() or []
    absent = None
    if earlier is not None:
        absent = not any(pid in (row.pid, row.inside) for row in earlier)
    found: Json = {"captured": after.outcome == "exit code 0", "pid_found": False, "pid_line": None, "matched_by": None,
                   "pid_absent_before": absent, "npu_id": None, "chip_id": None}
    # A row with a PID of a container belongs to that and to no other.
    matches = [(row, "process id in container") for row in listed if row.inside == pid]
    matches += [(row, "process id") for row in listed if row.pid == pid and not row.inside]
    # A chip lists no more processes than this, and is then asked about each.
    rows_of = Counter(row.chip for row in listed)
    full = [chip for chip, count in rows_of.items() if count == CHIP_IS_FULL and not matches]
    wanted = ["info", "info"]
    for chip, call in zip(full[:CHIP_IS_FULL], more, strict=False):
        npu, _, number = chip.partition(" ")
        wanted.append(f"info -t proc-mem -i {npu}" + (f" -c {number}" if number else ""))
        matches += [(Process(chip, pid, "", line.strip()), "proc-mem") for line in call.text.splitlines()
                    if re.search(rf"Process id\s*:\s*{pid}\b", line)]
        if call.outcome.startswith("no answer"):
            break
    if matches and absent is not False:
        row, matched_by = matches[0]
        npu, _, number = row.chip.partition(" ")
        found.update(pid_found=True, pid_line=row.line, matched_by=matched_by, npu_id=npu, chip_id=number)
    return found, wanted


def gate_npu_smi(s: Evidence) -> Problems:
    """What the result says of npu-smi follows from its raw answers, which were given when they should have been."""
    r, calls = s.r, read_calls(s.files.get(NPU_SMI, b""))
    yield unless(len(calls) > 0 or not s.done("npu"), f"{NPU_SMI}: no call, JSON got past the stage npu")
    in_order = sorted(calls, key=lambda call: call.at) == calls
    yield unless(in_order, f"{NPU_SMI}: the calls are not in the order of their times")
    for number, call in enumerate(calls):
        stage = "ready" if number else "npu"
        early = stage == "ready" and r["ready_at"] and call.at < r["ready_at"]
        in_time = s.within(stage, s.offset(call.at)) and not early
        yield unless(in_time, f"{NPU_SMI}: call {number + 1} at {call.at}, JSON stages, ready_at {r['ready_at']}")
        real = r["simulated"] is not False or "cannsim" not in call.text
        yield unless(real, f"simulated: JSON False, {NPU_SMI} names the simulator")
    for call in calls[:2] if s.done("npu") else ():
        text = call.text if call.outcome == "exit code 0" else ""
        versions, chips = VERSIONS.search(text), set(CHIP_ROW.findall(text))
        if versions or call is calls[0]:
            stated = [r["versions"]["npu_smi"], r["versions"]["driver"]]
            found_versions = list(versions.groups()) if versions else [None, None]
            yield differ("versions npu_smi, driver", stated, NPU_SMI, found_versions)
        name = r["npu_device_name"].removesuffix(" (simulated)").removeprefix("Ascend")
        alike = not chips or any(name.startswith(chip.removeprefix("Ascend")) for chip in chips)
        yield unless(alike, f"npu_device_name: JSON {name[:60]!r}, {NPU_SMI} {sorted(chips)[:4]}")
    if r["npu_smi"] is not None:
        found, wanted = correlate(str(r["pid"]), calls)
        for name, value in found.items():
            yield differ(name, r["npu_smi"][name], NPU_SMI, value)
        yield differ("reason", r["npu_smi"]["reason"] is None, NPU_SMI, found["pid_found"])
        yield differ("calls", wanted, NPU_SMI, [call.arguments for call in calls])


# The device and the answers


def gate_checkpoint(s: Evidence) -> Problems:
    """The checkpoint is the one that was asked for, and the result says of it what its bytes say."""
    r, stated = s.r, [s.r["checkpoint"]["bytes"], s.r["checkpoint"]["sha256"]]
    pinned = stated[1] == PINNED_SHA256
    yield differ("model_id, source_revision, license", [r["model_id"], r["source_revision"], r["license"]],
                 "the digest", PINNED_IDENTITY if pinned else [None] * 3)
    yield unless(stated[0] is not None, "bytes: JSON null, but the run read the checkpoint")
    if pinned:
        yield differ("bytes", stated[0], "the digest", PINNED_BYTES)
    if (path := checkpoint_at_hand(s)) is None:
        return
    raw = read_file(path.resolve(), MAX_CHECKPOINT)
    found = [len(raw), hashlib.sha256(raw).hexdigest()]
    if found != stated:
        yield differ("another checkpoint: bytes, sha256", stated, path.name, found)
        return
    s.model = model = program().read_checkpoint(raw)
    yield differ("observation_shape", r["observation_shape"], path.name, list(model.observation.shape))
    space = dict(model.action)
    if box := space.pop("box", None):
        low, high = ([bound if math.isfinite(bound) else None for bound in bounds] for bounds in (box.low, box.high))
        space.update(shape=list(box.shape), low=low, high=high, squashed=bool(model.policy_kwargs.get("squash_output")))
    yield differ("action_space", r["action_space"], path.name, space)
    yield differ("notes", bool(r["notes"]), path.name, model.vec_normalize)
    if s.done("load"):
        yield differ("num_params", r["num_params"], path.name, sum(map(np.size, model.tensors.values())))


def checkpoint_at_hand(s: Evidence) -> Path | None:
    """The checkpoint that the reader names, or that of the project that the set names; else no file is looked into."""
    if s.checkpoint:
        return Path(s.checkpoint)
    typed = any(word.startswith("--checkpoint") for word in s.r["argv"])
    path = Path(os.path.normpath(PROJECT / s.r["checkpoint"]["path"]))
    # A name that was typed outside the project may be another file here.
    known = path.is_relative_to(PROJECT) and not (typed and s.r["cwd"] == "outside the project")
    return path if known and path.is_file() and path.stat().st_size <= MAX_CHECKPOINT else None


def program() -> Any:
    """inference.py, of which the reader of checkpoints and the float64 reference are used, and nothing else."""
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(PROJECT))
    try:
        import inference
    finally:
        sys.path.pop(0)
    return inference


def gate_device(s: Evidence) -> Problems:
    """What a run that got past a stage cannot have found otherwise; and no facts of the device that do not agree."""
    r = s.r
    for stage, claims in CLAIMS.items():
        for path, value in claims.items() if s.done(stage) else ():
            part, _, name = path.rpartition(".")
            yield differ(path, (r[part] if part else r)[name], "a good run", value)
    if not s.done("npu"):
        return
    visible, nodes, name = r["visible_devices"], r["device_nodes"], r["npu_device_name"]
    yield differ("visible_devices", visible, "environment", r["environment"]["ASCEND_RT_VISIBLE_DEVICES"])
    listed = re.fullmatch("[0-9]{1,5}(,[0-9]{1,5}){0,999}", visible)
    numbers = [int(part) for part in visible.split(",")] if listed else []
    yield unless(numbers == sorted(set(numbers)) and 1 <= r["device_count"] <= len(numbers),
                 f"device_count: JSON {r['device_count']}, visible_devices {visible[:60]!r}")
    yield unless(nodes == sorted(set(nodes)), f"device_nodes: JSON {str(nodes)[:100]}, expected in order")
    yield unless(not (nodes and r["simulated"]), f"device_nodes: JSON {str(nodes)[:100]}, simulated True")
    marks = [r["simulated"], r["simulator"] is not None, name.endswith(" (simulated)")]
    yield differ("simulated, simulator, npu_device_name", marks, "one fact", [r["simulated"]] * 3)
    yield unless(0 < r["pid"] <= 1 << 22, f"pid: JSON {r['pid']}, expected the number of a process")
    yield unless(None not in (r["versions"]["torch"], r["versions"]["torch_npu"]), "versions: JSON has no torch")
    if s.done("load"):
        yield unless(r["num_params"] > 0, f"num_params: JSON {r['num_params']}, expected 1 or more")
    if s.done("forward"):
        named = all(re.fullmatch(r"aclnn[A-Z]\w{1,80}", name) and count > 0 for name, count in r["kernels"].items())
        yield unless(bool(r["kernels"]) and named, f"kernels: JSON {str(r['kernels'])[:100]}, expected aclnn...")


def gate_outputs(s: Evidence) -> Problems:
    """Names, shapes and types follow from the action space; the rows shown are as many as the rule says."""
    r, rows, file = s.r, s.r["rows"], s.r["observations"]
    forms = output_forms(r["action_space"])
    wanted = {name: {"dtype": dtype, "shape": [rows, *shape], "device": DEVICE}
              for name, (dtype, shape) in forms.items()}
    yield differ("outputs", r["outputs"], "action_space", wanted)
    optional = [name for name in ("entropy", "probs", "logits", "mean", "std", "env_action") if name not in forms]
    yield unless(all(r[name] is None for name in optional), f"JSON has one of {optional}, action_space has none")
    chunk = max(1, min(CHUNK_ROWS, CHUNK_NUMBERS // math.prod(r["observation_shape"]), rows))
    yield differ("repeated_rows", r["repeated_rows"], "rows", chunk if file else rows)
    columns = {"observation": ("torch.float32", r["observation_shape"]), **forms}
    widest = max(math.prod(shape) for _, shape in columns.values())
    count = min(rows, SHOWN_ROWS, max(1, SHOWN_NUMBERS // widest))
    for name, (dtype, shape) in columns.items():
        array = as_array(name, r[name], int if dtype == "torch.int64" else float)
        cut = math.prod(shape) > SHOWN_NUMBERS
        yield differ(f"shape of {name}", list(array.shape), "rows", [1, SHOWN_NUMBERS] if cut else [count, *shape])
        yield unless(np.array_equal(array, array.astype(np.float32)), f"{name}: JSON has numbers beyond float32")
        s.shown[name] = array.reshape(len(array), -1).astype(np.float64)
    observation = s.shown["observation"]
    if not file:
        ran = s.rows_at_hand()[:count].reshape(count, -1)[:, :SHOWN_NUMBERS]
        yield differ("observation", observation.tolist(), "argv", ran.tolist())
    elif observation.size == rows * math.prod(r["observation_shape"]):
        digest = hashlib.sha256(observation.astype("<f4").tobytes()).hexdigest()
        yield differ("sha256_float32", file["sha256_float32"], "observation", digest)


def first_wrong(ours: Array, theirs: Array, tolerance: float) -> int | None:
    """The first row with a number that is further from its own than this: absolute, relative above 1. NaN is far."""
    near = np.abs(ours - theirs) <= tolerance * np.maximum(1.0, np.abs(theirs)) * (1 + 1e-9)
    wrong = ~near.all(axis=1)
    return int(wrong.argmax()) if wrong.any() else None


def gate_rows(s: Evidence) -> Problems:
    """Each row is finite, and its log_prob, entropy and action follow from the parameters of its distribution."""
    space, tolerance = s.r["action_space"], max(2 * TOLERANCE, 2 * s.r["reference"]["tolerance"])
    witness = OUTPUTS if s.r["observations"] else "JSON"
    for start, rows in s.chunks():
        for name, values in rows.items():
            if start == 0:
                count, width = s.shown[name].shape
                yield differ(name, s.shown[name].tolist(), witness, values[:count, :width].tolist())
            if not np.isfinite(values).all():
                yield f"{name}: {witness} has NaN or infinity after row {start}"
                return
        if s.is_cut() and not s.r["observations"]:
            return
        expected = gaussian(space, rows) if space["type"] == "Box" else categorical(space, rows, tolerance)
        for name, values in expected.items():
            exact = name == "action" and space["type"] != "Box"
            row = first_wrong(rows[name], values, 0.0 if exact else tolerance)
            if row is not None:
                stated = f"{witness} {rows[name][row].tolist()}, recomputed {values[row].tolist()}"
                yield f"row {start + row}: {name}: {stated}"
                return


def categorical(space: Json, rows: Rows, tolerance: float) -> Rows:
    """Of Discrete, MultiDiscrete and MultiBinary actions: what follows from the logits, a group for each choice."""
    logits, choices = rows["logits"], space.get("nvec", [space.get("n")])
    is_binary = space["type"] == "MultiBinary"
    if is_binary:  # a choice between 0, whose logit is 0, and 1
        logits = np.stack([np.zeros_like(logits), logits], axis=2).reshape(len(logits), -1)
        choices = [2] * space["n"]
    parts = []
    groups = np.split(logits, np.cumsum(choices)[:-1], axis=1)
    for group, action in zip(groups, rows["action"].T, strict=True):
        shifted = group - group.max(axis=1, keepdims=True)
        log_probs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        probs = np.exp(log_probs)
        chosen = np.clip(action, 0, group.shape[1] - 1).astype(np.int64)[:, None]
        taken = np.take_along_axis(log_probs, chosen, axis=1)
        is_tie = probs.max(axis=1, keepdims=True) - np.exp(taken) <= tolerance / 100
        best = np.where(is_tie, chosen, group.argmax(axis=1, keepdims=True))
        entropy = -(probs * log_probs).sum(axis=1, keepdims=True)
        parts.append([probs, log_probs, best, taken, entropy])
    probs, log_probs, best, taken, entropy = (np.concatenate(part, axis=1) for part in zip(*parts, strict=True))
    expected = {"action": best, "log_prob": taken.sum(axis=1, keepdims=True),
                "entropy": entropy.sum(axis=1, keepdims=True)}
    if is_binary:
        return {**expected, "probs": probs[:, 1::2]}
    return {**expected, "probs": probs, "logits": log_probs}


def gaussian(space: Json, rows: Rows) -> Rows:
    """Of Box: what follows from the mean, at which the deterministic action lies, and the standard deviation."""
    mean = rows["mean"]
    low, high = np.array([space["low"], space["high"]], float)  # NaN for no bound, which fmin and fmax pass over
    scale = np.log(rows["std"]) + 0.5 * math.log(2 * math.pi)
    if not space["squashed"]:
        return {"action": mean, "env_action": np.fmin(np.fmax(mean, low), high),
                "log_prob": -scale.sum(axis=1, keepdims=True), "entropy": (scale + 0.5).sum(axis=1, keepdims=True)}
    action = np.tanh(mean)
    log_prob = -(scale + np.log(1 - action**2 + 1e-6)).sum(axis=1, keepdims=True)
    saturated = np.abs(mean).max(axis=1, keepdims=True) >= SATURATED  # lost in float32
    return {"action": action, "env_action": low + 0.5 * (action + 1) * (high - low),
            "log_prob": np.where(saturated, rows["log_prob"], log_prob)}


def ascending(*numbers: float) -> bool:
    """Whether each is at most the next, but for the last bits."""
    return all(one <= next_ * (1 + 1e-9) + 1e-300 for one, next_ in pairwise(numbers))


def gate_reference(s: Evidence) -> Problems:
    """The figures of the comparison with the float64 reference are consistent with each other and with the rows."""
    r, reference, rows = s.r, s.r["reference"], s.r["rows"]
    choices, squashed = r["action_space"]["type"] != "Box", r["action_space"].get("squashed", False)
    ties, outputs = reference["ties"], reference["outputs"]
    names = [name for name in r["outputs"] if not (choices and name == "action")]
    if squashed and "log_prob" not in outputs:  # saturated in every row
        names.remove("log_prob")
    yield differ("reference.outputs", sorted(outputs), "outputs", sorted(names))
    yield differ("reference.rows", reference["rows"], "rows", rows)
    yield unless(0 <= ties <= rows * choices, f"ties: JSON {ties}, rows {rows}")
    yield differ("action_agreement", reference["action_agreement"], "rows, ties", (rows - ties) / rows)
    yield differ("within_1_percent", reference["within_1_percent"], "outputs",
                 all(errors["max_rel_error_percent"] < 1 for errors in outputs.values()))
    for name, (largest, squares) in sizes_of(s).items():
        errors = outputs[name]
        worst, mean, percent = errors["max_abs_error"], errors["mean_abs_error"], errors["max_rel_error_percent"]
        total = mean * math.prod(r["outputs"][name]["shape"])
        size = largest + worst  # at most so large is the reference
        consistent = (ascending(0.0, mean, worst, total)
                      and ascending(worst, reference["tolerance"] * max(1.0, size))
                      and ascending(100 * worst / max(SMALL, size), percent, 100 * worst / SMALL))
        yield unless(consistent, f"{name}: JSON {errors}, which contradict each other or the rows")
        least = -1.0
        if squares > worst * total and not (squashed and name == "log_prob"):
            # The angle between two vectors is at most that whose sine is their distance by the length of one.
            least = math.sqrt(1 - worst * total / squares)
        cosine = errors["cosine"]
        right = least == -1 if cosine is None else least - 1e-9 <= cosine <= 1 + 1e-9
        yield unless(right, f"{name}: JSON cosine {cosine}, errors and rows allow {least} to 1")


def sizes_of(s: Evidence) -> dict[str, tuple[float, float]]:
    """Of each output that is compared, the largest number and the sum of squares; no bounds where rows are missing."""
    names = s.r["reference"]["outputs"]
    if not s.has_all_rows():
        return dict.fromkeys(names, (math.inf, 0.0))
    sizes = dict.fromkeys(names, (0.0, 0.0))
    for _, rows in s.chunks():
        for name, (largest, squares) in sizes.items():
            values = np.abs(rows[name])
            sizes[name] = max(largest, float(values.max())), squares + float((values**2).sum())
    return sizes


def is_published(s: Evidence) -> bool:
    """Whether this is the pinned checkpoint on zeros, of which there is a published result."""
    return s.r["checkpoint"]["sha256"] == PINNED_SHA256 and s.r["rows"] == 1 and not s.shown["observation"].any()


def gate_published(s: Evidence) -> Problems:
    """The comparison with the published result follows from the outputs."""
    r, stated, tolerance = s.r, s.r["published"], s.r["reference"]["tolerance"]
    if stated is None or not is_published(s):
        yield differ("published", stated is not None, "the checkpoint and zeros", is_published(s))
        return
    errors = {}
    for name, published in PUBLISHED.items():
        wanted = np.array(published).reshape(1, -1)
        errors[name] = float(np.abs(s.shown[name] - wanted).max())
        near = first_wrong(s.shown[name], wanted, tolerance) is None
        yield unless(near, f"{name}: JSON {r[name]}, published {published}")
    yield differ("action", r["action"], "published", [0])
    yield differ("published", stated, "the outputs", {
        "tolerance": tolerance, "within_tolerance": True, "action_equal": True, "outputs": errors})


def gate_benchmark(s: Evidence) -> Problems:
    timed = s.r["benchmark"]
    lines = [timed[name] for name in ("eager", "graph") if timed[name]]
    yield differ("graph_reason", timed["graph_reason"] is None, "graph", timed["graph"] is not None)
    for line in lines:
        ordered = 0 < line["p50_s"] <= line["p90_s"] <= line["p99_s"] and line["mean_s"] >= line["p50_s"] / 2
        yield unless(ordered, f"benchmark: JSON {line}, not in order")
        yield differ("benchmark passes", line["passes"], "eager", timed["eager"]["passes"])
    total, took = sum(line["passes"] * line["mean_s"] for line in lines), s.r["stages"]
    yield unless(total <= took["forward"] + took["benchmark"], f"benchmark: JSON {total} s of passes, stages less")


def gate_answers(s: Evidence) -> Problems:
    """Every answer at hand is, within the tolerance, what the checkpoint's own bytes give in float64."""
    r, space, digest, seen, differing = s.r, s.r["action_space"], hashlib.sha256(), 0, 0
    tolerance, worst = r["reference"]["tolerance"], dict.fromkeys(r["reference"]["outputs"], 0.0)
    ran = s.rows_at_hand()
    for start, rows in s.chunks():
        observations = np.array(ran[start:start + len(rows["value"])], np.float32)
        if len(observations) == 0:
            break
        rows = {name: values[:len(observations)] for name, values in rows.items()}
        digest.update(observations.tobytes())
        seen += len(observations)
        reference = {name: values.reshape(len(observations), -1)
                     for name, values in program().reference_outputs(s.model, observations).items()}
        if space.get("squashed"):
            saturated = np.abs(reference["mean"]).max(axis=1, keepdims=True) >= SATURATED
            reference["log_prob"] = np.where(saturated, rows["log_prob"], reference["log_prob"])
        if space["type"] != "Box" and rows["action"].shape == reference["action"].shape:
            other = (rows["action"] != reference["action"]).any(axis=1)
            own = program().log_prob_of(s.model, reference["logits"], rows["action"])[:, None]
            no_tie = other & (np.abs(own - reference["log_prob"]) > tolerance)[:, 0]
            yield unless(not no_tie.any(), f"action of row {start + int(no_tie.argmax())}: not the checkpoint's")
            reference["log_prob"] = np.where(other[:, None], own, reference["log_prob"])
            differing += int(other.sum())
        for name in worst:
            ours, theirs = rows[name], reference[name][:, :rows[name].shape[1]]
            worst[name] = max(worst[name], float(np.abs(ours - theirs).max()))
            row = first_wrong(ours, theirs, tolerance)
            if row is not None:
                yield f"{name}: JSON and the rows {ours[row].tolist()}, the checkpoint {theirs[row].tolist()}"
    if seen < r["rows"] or not s.has_all_rows():
        return
    yield differ("ties", r["reference"]["ties"], "recomputed", differing)
    for name, errors in r["reference"]["outputs"].items():  # float64 differs between machines in its last bits
        stated = errors["max_abs_error"]
        near = abs(worst[name] - stated) <= 1e-10 + 1e-6 * worst[name]
        yield unless(near, f"max_abs_error of {name}: JSON {stated}, recomputed {worst[name]}")
    if r["observations"]:
        yield differ("sha256_float32", r["observations"]["sha256_float32"], "--observations", digest.hexdigest())


# --- The verdict

Gate = Callable[[Evidence], Problems]
# With the stage that the run must have completed.
GATES: tuple[tuple[str, str, Gate], ...] = (
    ("keys and types", "start", gate_keys), ("sizes", "start", gate_sizes), ("outcome", "start", gate_outcome),
    ("times", "start", gate_times), ("files", "start", gate_files), ("program", "start", gate_program),
    ("command line", "start", gate_command_line), ("log", "start", gate_log), ("marker", "start", gate_marker),
    ("npu-smi", "start", gate_npu_smi), ("checkpoint", "verify", gate_checkpoint), ("device", "start", gate_device),
    ("outputs", "forward", gate_outputs), ("rows", "forward", gate_rows), ("reference", "forward", gate_reference),
    ("published", "forward", gate_published), ("benchmark", "benchmark", gate_benchmark),
    ("answers", "forward", gate_answers))


def applies(gate: Gate, stage: str, s: Evidence) -> bool:
    """Whether the run came far enough for a gate, and what the gate looks at is there."""
    if not s.done(stage) or (stage == "forward" and gate is not gate_outputs and not s.shown):
        return False
    if gate is gate_published:
        return s.r["published"] is not None or is_published(s)
    return gate is not gate_answers or s.model is not None


def problems_of(gate: Gate, s: Evidence) -> list[str]:
    """The first few problems that a gate finds."""
    problems: list[str] = []
    try:
        with np.errstate(all="ignore"):
            for problem in islice(filter(None, gate(s)), 5):
                problems.append(problem[:500])  # what was found before an error stays
    except Unreadable:
        raise
    except Exception as error:  # noqa: BLE001 (a gate computes with whatever a forged set holds)
        problems.append(f"{type(error).__name__}: {error}"[:500])
    return problems


def check(directory: Path, checkpoint: str | None, observations: str | None) -> tuple[Json, Json]:
    """The report on one set, and its result ({} where that cannot be read)."""
    report: Json = {"directory": str(directory), "head": {}, "gates": [], "notes": [], "verdict": "INVALID"}
    try:
        s = Evidence(directory, checkpoint, observations)
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        report["gates"].append({"gate": "reading", "problems": [str(error) or type(error).__name__]})
        return report, {}
    good = True
    for name, stage, gate in GATES:
        if not applies(gate, stage, s):
            continue
        problems = problems_of(gate, s)
        report["gates"].append({"gate": name, "problems": problems})
        good = good and not problems
        # Nothing is computed with what is malformed.
        if problems and gate in (gate_keys, gate_sizes):
            return report, s.r
        if problems and gate is gate_outputs:
            s.shown = {}
    report.update(head=head_of(s), notes=list(notes_of(s)))
    if good:
        report["verdict"] = "FAILED RUN" if s.r["error"] else "VALID"
    return report, s.r


def head_of(s: Evidence) -> Json:
    """What the set is about."""
    r, checkpoint, reference = s.r, s.r["checkpoint"], s.r["reference"]
    head = {"checkpoint": "not read", "device": "none was taken", "action": "none", "error": "not compared",
            "date": f"{r['started_at'][:19]} UTC, {r['total_s']} s, by inference.py {r['script_version']}"}
    if checkpoint and checkpoint["sha256"]:
        pinned = "the pinned one" if checkpoint["sha256"] == PINNED_SHA256 else "not the pinned one"
        head["checkpoint"] = f"{checkpoint['path']} ({pinned}), SHA256 {checkpoint['sha256']}"
    if r["npu_device_name"]:
        head["device"] = f"{r['npu_device_name']}, {'SIMULATED, not a physical NPU' if r['simulated'] else 'physical'}"
    if r["action"] is not None:
        head["action"] = f"{str(r['action'])[:60]} ({r['rows']} row{'s' * (r['rows'] > 1)})"
    if reference and reference["outputs"]:
        name, worst = max(reference["outputs"].items(), key=lambda output: output[1]["max_rel_error_percent"])
        head["error"] = (f"at most {worst['max_rel_error_percent']:.3g} % of the float64 reference ({name}), tolerance "
                         f"{reference['tolerance']}, actions agree in {reference['action_agreement']:.2%} of the rows")
    return head


def notes_of(s: Evidence) -> Iterator[str]:
    """What a whole and consistent set does not show."""
    r, npu_smi = s.r, s.r["npu_smi"]
    if r["error"]:
        yield f"the run failed in stage {r['error']['stage']}: {r['error']['message']}; {r['error']['hint']}"
    if r["simulated"]:
        yield "simulated: nothing in this set is about a physical NPU"
    if s.done("npu") and not r["simulated"] and not r["device_nodes"]:
        yield "the process held no /dev/davinci* open: the kernel is no witness that it used an NPU"
    if npu_smi and not npu_smi["pid_found"]:
        yield f"npu-smi did not list the process: {npu_smi['reason']}"
    if npu_smi and npu_smi["pid_absent_before"] is None:
        yield "npu-smi could not be asked for the PID before the device was taken (pid_absent_before null)"
    if s.done("forward"):
        if s.model is None and not s.checkpoint:
            yield "the checkpoint is not at hand: the answers were not recomputed (--checkpoint PATH)"
            if s.observations:
                yield f"without the checkpoint, {s.observations} was not looked at"
        elif r["observations"] and not s.observations:
            yield "of the rows of the file, only those that the result shows were recomputed (--observations FILE)"
        if r["reference"]["tolerance"] > TOLERANCE:
            yield f"the run allowed itself errors of {r['reference']['tolerance']}, the default is {TOLERANCE}"
    if not r["error"] and r["worker_exit"] != "exit code 0":
        yield f"the process on the NPU, after its work was done: {r['worker_exit']}"
    yield from r["notes"]


def join(results: list[Json]) -> Json | None:
    """Whether sets are slices of one file: complete, and without overlap. None where none of them is a slice."""
    files = sorted((r["observations"] for r in results if r["observations"]), key=lambda file: int(file["first_row"]))
    if len(results) < 2 or not any(file["rows"] < file["total_rows"] for file in files):
        return None
    problems = [] if len(files) == len(results) else ["a set has no file of observations"]
    of_all = {"checkpoint": {r["checkpoint"]["sha256"] for r in results},
              "inference.py": {r["script_sha256"] for r in results}}
    for key in ("file", "dtype", "total_rows"):
        of_all[key] = {file[key] for file in files}
    for what, values in of_all.items():
        if len(values) > 1:
            problems.append(f"not one {what}: {sorted(values)}")
    end, total = 0, files[0]["total_rows"]
    for file in [*files, {"first_row": total, "rows": 0}]:
        if end != file["first_row"]:
            what = "missing" if end < file["first_row"] else "there twice"
            problems.append(f"rows {end} to {file['first_row']} are {what}")
        end = file["first_row"] + file["rows"]
    rows = sum(file["rows"] for file in files)
    return {"complete": not problems, "problems": problems, "rows": rows, "total_rows": total}


def printable(text: str) -> str:
    """Harmless on a terminal, and in any locale."""
    return one_line(text).encode("ascii", "backslashreplace").decode()


def lines_of_report(report: Json) -> Iterator[str]:
    yield f"{report['directory']}"
    yield from (f"      {name:<12}{text[:300]}" for name, text in report["head"].items())
    for gate in report["gates"]:
        yield f"FAIL  {gate['gate']}: {'; '.join(gate['problems'])}" if gate["problems"] else f"PASS  {gate['gate']}"
    yield from (f"NOTE  {note[:600]}" for note in report["notes"][:10])
    yield report["verdict"]


def say(lines: list[str], stream: TextIO) -> None:
    try:
        print("\n".join(map(printable, lines)), file=stream, flush=True)
    except OSError:  # nobody reads: the exit code says it as well, and what is left must not fail at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        say([f"check_evidence.py: usage: {message}; see --help"], sys.stderr)
        sys.exit(2)


def main(argv: list[str] | None = None) -> int:
    parser = Parser("check_evidence.py", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", metavar="DIR", nargs="*", default=[str(PROJECT / "logs")])
    parser.add_argument("--checkpoint", metavar="PATH", help="the checkpoint of the sets, to recompute their answers")
    parser.add_argument("--observations", metavar="FILE", help="the file of observations, to recompute every row")
    parser.add_argument("--json", action="store_true", help="the reports as one JSON object")
    args = parser.parse_args(argv)
    given = [path for path in (args.checkpoint, args.observations) if path]
    missing = [f"{path}: no such file" for path in given if not Path(path).is_file()]
    missing += [f"{path} is not a directory with a {RESULT}: name one that inference.py has written to, such as logs"
                for path in args.directories if not os.path.lexists(Path(path, RESULT))]
    if missing:
        parser.error(missing[0])
    try:
        checked = [check(Path(path), args.checkpoint, args.observations) for path in args.directories]
    except Unreadable as error:
        parser.error(str(error))
    reports = [report for report, _ in checked]
    verdicts = {report["verdict"] for report in reports}
    shards = None if "INVALID" in verdicts else join([result for _, result in checked])
    good = verdicts == {"VALID"} and (shards is None or shards["complete"])
    lines = [line for report in reports for line in lines_of_report(report)]
    if shards:
        lines.append(f"SHARDS {'COMPLETE' if shards['complete'] else 'INCOMPLETE'}: {shards['rows']} of "
                     f"{shards['total_rows']} rows{''.join(f'; {problem}' for problem in shards['problems'])}")
    if args.json:
        lines = [json.dumps({"exit_code": int(not good), "sets": reports, "shards": shards})]
    say(lines, sys.stdout)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
