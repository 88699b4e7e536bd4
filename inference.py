#!/usr/bin/env python3
"""Run one Stable-Baselines3 PPO checkpoint on an Ascend NPU and leave evidence.

    python3 inference.py --hold-seconds 8
    python3 inference.py --checkpoint my_ppo.zip \\
        --sha256 "$(sha256sum my_ppo.zip | cut -c1-64)"

The stages, in the order they run:

  verify    size, SHA256 and structure of the checkpoint, with the standard
            library alone
  npu       torch_npu is imported, npu:0 is set and computes something; names
            and versions
  load      PPO.load from the verified bytes; every parameter on npu:0, bit for
            bit the checkpoint's
  ready     logs/npu_ready.marker with the PID, a hold, and what npu-smi says
            about that PID meanwhile
  forward   one deterministic pass on npu:0, run twice and compared bit for bit
  final     the log is closed and sealed, then logs/npu_result.json is written:
            last, and atomically

Exit codes: 0 success, 1 a bug in this program, 2 usage, 3 checkpoint missing
or rejected, 4 no NPU, 5 loading or placement failed, 6 forward failed or the
device hung, 7 evidence cannot be written or another run is writing it,
8 --check found no good run, 129/130/143 ended by SIGHUP/SIGINT/SIGTERM.

Nothing runs on the CPU in the NPU's place: not the process, not a tensor, not
an operator. A checkpoint is untrusted input: it is read once, hashed, and
loaded from those same bytes, and nothing in it is unpickled with arbitrary
globals.
"""

# The file reads in the order in which a run goes. Before the stages stands what all of them use: the command line, the
# log's lines, the evidence, the watcher. After them stands --check, which runs nothing and recomputes what an evidence
# set states.

from __future__ import annotations

import argparse
import ast
import contextlib
import csv
import ctypes
import errno
import fcntl
import hashlib
import io
import itertools
import json
import math
import os
import pickle
import platform
import re
import select
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy
    import torch
    from stable_baselines3 import PPO

SCHEMA = "npu-inference-evidence/1"
PROJECT = Path(__file__).resolve().parent
DEVICE = "npu:0"

# The pinned checkpoint: HumanCompatibleAI/ppo-seals-CartPole-v0 at the revision below.
CHECKPOINT_NAME = "ppo-seals-CartPole-v0.zip"
CHECKPOINT_BYTES = 139005
CHECKPOINT_SHA256 = "4e57a2618e1ab32ee4c5267874ae9f630896bc73991bd68392f5c78e4ecf738d"
MODEL_ID = "HumanCompatibleAI/ppo-seals-CartPole-v0"
SOURCE_REVISION = "a86541dd3744275227cb16d07192967fc6b7775e"
LICENSE = "not-declared"  # the upstream card declares none, and a licence is never guessed

# From the upstream card. In the file they are closures of Python 3.8, which no other version can unpickle; they steer
# training alone and take no part in a forward.
LEARNING_RATE = 0.0012403278189645594
CLIP_RANGE = 0.4

# Measured with the pinned checkpoint and the zero observation on an Ascend910B4-1 (CANN 8.5.1, torch_npu 2.9.0).
# Another chip or CANN version may differ in the last bits, never in the action.
PUBLISHED: dict[str, Any] = {
    "action": [0],
    "value": [[196.2478790283203]],
    "log_prob": [-0.30756598711013794],
    "probs": [[0.7352343797683716, 0.26476559042930603]],
    "logits": [[-0.30756598711013794, -1.3289103507995605]],
    "entropy": [0.5779828429222107],
}
TOLERANCE = 1e-3  # relative for the value, absolute for the rest

# What SB3 writes into a checkpoint, from 1.0rc0 to 2.9; anything else is no checkpoint of SB3's.
REQUIRED_MEMBERS = {"data", "policy.pth", "policy.optimizer.pth"}
OPTIONAL_MEMBERS = {"pytorch_variables.pth", "_stable_baselines3_version", "system_info.txt"}
MAX_CHECKPOINT_BYTES = 128 << 20  # an MLP of 11 million parameters, with its optimizer's state
MAX_DATA_BYTES = 8 << 20  # of `data`, mostly 15 kB
MAX_INDEX_BYTES = 256 << 10  # of an archive's directory, and of the pickle that describes the tensors: mostly 2 kB

OUTPUTS_FILE = "npu_outputs.npz"
EVIDENCE_FILES = ("npu_inference.log", "npu_ready.marker", "npu_smi.log", OUTPUTS_FILE)
RESULT_FILE = "npu_result.json"
CHUNK_BYTES = 1 << 20  # of float32 observations in one pass over a file, and
CHUNK_ROWS = 16384  # no more rows than these
SHOWN_ROWS = 16  # of a file, in the log and the result
PROGRESS_S = 5.0
NPU_SMI_TIMEOUT_S = 20.0  # it takes seconds on a board of many chips, and queues where others ask as well
NPU_SMI_MAX_BYTES = 1 << 20
NPU_SMI_MAX_PROCESSES = 8  # npu-smi lists no more for one chip


# ---------------------------------------------------------------------------------------------------------------------
# Failures: one class for each exit code. `main` is the one place where they become a message and an exit code.
# ---------------------------------------------------------------------------------------------------------------------


class Failure(BaseException):
    """A run that cannot go on. `hint` says what the user can do about it.

    No Exception, so that what catches the errors of a library, here or in a library, never takes one of these for them.
    """

    code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(Failure):
    code = 2


class CheckpointRejected(Failure):
    code = 3


class NpuUnavailable(Failure):
    code = 4


class LoadFailed(Failure):
    code = 5


class ForwardFailed(Failure):
    code = 6


class DeviceTimeout(Failure):
    code = 6


class EvidenceUnwritable(Failure):
    code = 7


class Interrupted(Failure):
    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}", "start it again")
        self.code = 128 + signum


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UsageError(message, "see python3 inference.py --help")


def create_parser(add_help: bool = True) -> argparse.ArgumentParser:
    """Without the help, whose option would end the process, for a command line that is to be parsed."""
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = Parser("inference.py", description=summary, epilog=rest, allow_abbrev=False, add_help=add_help,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_argument_group("the model")
    model.add_argument("--checkpoint", metavar="PATH", type=existing_name, default=None,
                       help=f"an SB3 PPO zip (default: {CHECKPOINT_NAME} beside this script)")
    model.add_argument("--sha256", metavar="HEX", type=sha256_digest, default=CHECKPOINT_SHA256,
                       help="the digest that the checkpoint must have (default: the pinned checkpoint's)")
    rows = parser.add_argument_group("the observations")
    one = rows.add_mutually_exclusive_group()
    one.add_argument("--observation", metavar="JSON", type=json_list, default=None,
                     help="one observation or a list of them (default: zeros, [0.0, 0.0, 0.0, 0.0] for CartPole)")
    one.add_argument("--observations", metavar="FILE", type=existing_name, default=None,
                     help=f"a .npy, .csv or .json file of them, one a row; all outputs go to {OUTPUTS_FILE}")
    rows.add_argument("--shard", metavar="I/N", type=slice_of_file, default=(1, 1),
                      help="only the I-th of N equal slices of the file, I from 1 to N")
    run = parser.add_argument_group("the run")
    run.add_argument("--hold-seconds", metavar="S", type=seconds, default=8.0,
                     help="time between the ready marker and the forward, for npu-smi (default: 8)")
    run.add_argument("--log-dir", metavar="DIR", type=existing_name, default=None,
                     help="where the evidence goes (default: logs beside this script)")
    run.add_argument("--timeout-seconds", metavar="S", type=seconds, default=300.0,
                     help="end a run whose device does not answer, the hold not counted (default: 300)")
    extra = parser.add_argument_group("beside the evidence")
    extra.add_argument("--compare-cpu", action="store_true",
                       help="run the same weights and observations on the CPU too, as a reference for the NPU")
    extra.add_argument("--tolerance", metavar="T", type=tolerance, default=TOLERANCE,
                       help="what --compare-cpu allows: absolute, relative above 1 (default: %(default)s)")
    extra.add_argument("--benchmark", metavar="N", type=count, default=0,
                       help="time N warm passes over one observation, and batches of 1, 16, 256 and 4096")
    checker = parser.add_argument_group("instead of a run")
    checker.add_argument("--check", metavar="DIR", nargs="?", const="", type=str,
                       help="run nothing, but check an evidence set (default: logs beside this script)")
    return parser


PATH_OPTIONS = ("--checkpoint", "--observations", "--log-dir")


def existing_name(text: str) -> str:
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError("a path is needed")
    return text


def option(convert: Callable[[str], Any], what: str) -> Callable[[str], Any]:
    """A type of argparse: text that `convert` makes nothing of (an error, or None) is refused as no `what`."""
    def value_of(text: str) -> Any:
        with contextlib.suppress(ValueError, RecursionError):
            if (value := convert(text)) is not None:
                return value
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is no {what}")
    return value_of


def number(text: str, least: float, most: float, kind: type = float) -> Any:
    return kind(text) if re.fullmatch(r"[0-9.eE+-]{1,40}", text) and least <= kind(text) <= most else None


def shard(text: str) -> tuple[int, int] | None:
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    return (int(match[1]), int(match[2])) if match and 1 <= int(match[1]) <= int(match[2]) else None


sha256_digest = option(lambda text: text.lower() if re.fullmatch(r"[0-9a-fA-F]{64}", text) else None,
                       "SHA256: 64 hexadecimal digits")
seconds = option(lambda text: number(text, 0, 86400), "time: seconds from 0 to 86400")
tolerance = option(lambda text: number(text, sys.float_info.min, sys.float_info.max), "number above 0")
count = option(lambda text: number(text, 1, 1_000_000, int), "number from 1 to 1000000")
slice_of_file = option(shard, "slice I/N with I from 1 to N, such as 1/4")
json_list = option(lambda text: value if isinstance(value := json.loads(text), list) and value else None,
                   "JSON list such as [0.0, 0.0, 0.0, 0.0]")


# ---------------------------------------------------------------------------------------------------------------------
# Evidence: the files of one run. All or nothing: npu_result.json with exit_code 0 is written last, and atomically.
# ---------------------------------------------------------------------------------------------------------------------


# npu_result.json: what each stage measures ("" is for the whole run), with the form of each value: a type, a list of
# one form, or an object of given keys or of any ("*"). Every key is in every result. Where its name ends in "?" it may
# be null; in a run that failed, so may all that was not measured.
TIMES_FORM = {"batch": int, "passes": int, "p50_s": float, "p90_s": float, "p99_s": float, "mean_s": float,
              "rows_per_s": float}
RESULT_FORMS: dict[str, dict[str, Any]] = {
    "": {
        "schema": str, "exit_code": int, "script_sha256": str, "pid": int, "argv": [str], "cwd": str, "log_dir": str,
        "started_at": str, "finished_at": str, "total_s": float,
        "versions": {"python": str, "platform": str, "torch": str, "torch_npu": str, "cann?": str, "npu_smi?": str,
                     "driver?": str, "stable_baselines3?": str, "gymnasium?": str, "numpy?": str, "cloudpickle?": str},
        "stages": [{"name": str, "elapsed_s": float, "outcome": str}], "files": {"*": str},
        "error?": {"stage": str, "type": str, "message": str, "hint": str}},
    "verify": {
        "checkpoint": {"path": str, "bytes": int, "sha256": str, "size_ok": bool, "sha256_ok": bool},
        "model_id?": str, "source_revision?": str, "license?": str, "rows": int,
        "observations?": {"file": str, "dtype": str, "shard": str, "first_row": int, "rows": int,
                          "sha256_float32": str}},
    "npu": {
        "simulated": bool, "simulator?": str, "engine": str, "visible_devices": str, "npu_available": bool,
        "npu_device": str, "npu_device_name": str, "device_count": int, "device_nodes": [str],
        "environment": {"ASCEND_RT_VISIBLE_DEVICES": str, "TASK_QUEUE_ENABLE": str, "ACL_OP_INIT_MODE": str,
                        "TORCH_NPU_FALLBACK_CPU_DISABLE": str, "TORCH_FORCE_WEIGHTS_ONLY_LOAD": str,
                        "TORCH_DEVICE_BACKEND_AUTOLOAD": str},
        "determinism": {"deterministic_algorithms": bool, "jit_compile": bool, "allow_hf32_matmul": bool,
                        "allow_hf32_conv": bool, "device?": bool}},
    "load": {
        "policy_class": str, "num_params": int, "param_devices": [str], "all_params_on_npu": bool,
        "params_match_checkpoint": bool, "model_device": str, "load_s": float},
    "ready": {
        "hold_seconds": float, "ready_at": str,
        "npu_smi": {"captured": bool, "pid_found": bool, "pid_line?": str, "matched_by?": str, "reason?": str,
                    "detail?": str, "npu_id?": str, "chip_id?": str}},
    "forward": {
        "input_device": str, "output_device": str, "all_outputs_on_npu": bool, "action_space": dict,
        "repeated_rows": int, "observation": list, "action": list, "env_action?": list, "value": list,
        "log_prob": list, "entropy?": list, "probs?": list, "logits?": list, "mean?": list, "std?": list,
        "outputs": {"*": {"dtype": str, "shape": [int], "device": str}}, "bitwise_repeatable": bool, "forward_s": float,
        "reference?": dict,
        "cpu_reference?": {
            "rows": int, "tolerance": float, "within_tolerance": bool, "action_agreement": float, "ties": int,
            "outputs": {"*": {"max_abs_diff": float, "mean_abs_diff": float, "cosine?": float}}}},
    "benchmark": {
        "benchmark?": {"simulated": bool, "warm_up_passes": int, "actions_equal_evidence": bool, "single": TIMES_FORM,
                       "eager": TIMES_FORM, "batches": [TIMES_FORM]}},
}
STAGE_OF_KEY = {name.rstrip("?"): stage for stage, keys in RESULT_FORMS.items() for name in keys}
VERSIONS = [name.rstrip("?") for name in RESULT_FORMS[""]["versions"]]

Result = dict[str, Any]  # npu_result.json


def fields(prefix: str, values: dict[str, Any]) -> str:
    return " ".join([prefix, *(f"{name}={value}" for name, value in values.items())])


def lines_of_output(result: Result, name: str) -> str:
    output = result["outputs"][name]
    return (f"[forward] {name}={result[name]} shape={tuple(output['shape'])} dtype={output['dtype']} "
            f"device={output['device']}")


def lines_of_forward(r: Result) -> list[str]:
    shape = (r["rows"], *shape_of(r["observation"])[1:])
    pair = ("probs", "logits") if r["probs"] is not None else ("mean", "std")
    return [
        f"[forward] elapsed={r['forward_s']:.4f}s (npu-synchronized)",
        f"[forward] obs={r['observation']} shape={shape} dtype=torch.float32 device={r['input_device']}",
        *(lines_of_output(r, name) for name in ("action", "value", "log_prob")),
        f"[forward] {pair[0]}={r[pair[0]]} {pair[1]}={r[pair[1]]} entropy={r['entropy']}",
        *([lines_of_output(r, "env_action")] if r["env_action"] is not None else []),
        f"[forward] all_outputs_on_npu={r['all_outputs_on_npu']}",
        f"[forward] bitwise_repeatable={r['bitwise_repeatable']} rows={r['repeated_rows']}",
    ]


# The log, by stage and block, in the order in which a run writes it. Each line is made of the result's own values:
# what --check rebuilds from the JSON must be what the log says.
LOG: dict[str, dict[str, Callable[[Result], list[str]]]] = {
    "verify": {
        "start": lambda r: [
            f"[inference] python            : {r['versions']['python']}",
            f"[inference] platform          : {r['versions']['platform']}",
            f"[inference] pid               : {r['pid']}",
            f"[inference] cwd               : {r['cwd']}",
            f"[inference] checkpoint        : {r['checkpoint']['path']}"],
        "checkpoint": lambda r: [
            f"[verify]  bytes={r['checkpoint']['bytes']} sha256={r['checkpoint']['sha256']}",
            f"[verify]  size_ok={r['checkpoint']['size_ok']} sha256_ok={r['checkpoint']['sha256_ok']}"],
        "observations": lambda r: [fields("[verify] ", r["observations"])] if r["observations"] else []},
    "npu": {
        "torch": lambda r: [f"[npu]     torch={r['versions']['torch']} torch_npu={r['versions']['torch_npu']}"],
        "device": lambda r: [
            f"[npu]     is_available={r['npu_available']} device={r['npu_device']} name={r['npu_device_name']}",
            f"[npu]     device_count={r['device_count']} CANN={r['versions']['cann']} "
            f"npu-smi={r['versions']['npu_smi']}",
            *([f"[npu]     SIMULATED by {r['simulator']}: nothing in this run touched a physical NPU"]
              if r["simulated"] else [])]},
    "load": {
        "model": lambda r: [
            f"[load]    PPO.load elapsed={r['load_s']:.4f}s device={r['model_device']}",
            f"[model]   policy_class={r['policy_class']} num_params={r['num_params']}",
            f"[model]   param_devices={r['param_devices']} all_params_on_npu={r['all_params_on_npu']}"],
        "bits": lambda r: [f"[model]   params_match_checkpoint={r['params_match_checkpoint']}"]},
    "ready": {
        "marker": lambda r: [
            f"[ready]   NPU_READY_PID={r['pid']} DEVICE={r['npu_device']} MARKER={r['log_dir']}/npu_ready.marker",
            f"[ready]   holding {r['hold_seconds']}s for external npu-smi correlation ..."],
        "npu_smi": lambda r: [
            f"[ready]   npu_smi captured={r['npu_smi']['captured']} pid_found={r['npu_smi']['pid_found']} "
            f"log={r['log_dir']}/npu_smi.log",
            f"[ready]   npu_smi pid_line={r['npu_smi']['pid_line']}" if r["npu_smi"]["pid_found"] else
            f"[ready]   npu_smi reason={r['npu_smi']['reason']} detail={r['npu_smi']['detail']}"]},
    "forward": {
        "outputs": lines_of_forward,
        "reference": lambda r: [fields("[forward]", {"reference": r["reference"]["name"], **r["reference"]})]
        if r["reference"] else [],
        "cpu_reference": lambda r: [
            fields("[cpu-reference]", {k: v for k, v in r["cpu_reference"].items() if k != "outputs"}),
            *(fields(f"[cpu-reference] {name}", measures) for name, measures in r["cpu_reference"]["outputs"].items())]
        if r["cpu_reference"] else []},
    "benchmark": {
        "times": lambda r: [
            fields("[benchmark]" + (" SIMULATED" if r["simulated"] else ""), {"forward": forward, **line})
            for forward, line in (("recorded", r["benchmark"]["single"]), ("eager", r["benchmark"]["eager"]),
                                  *(("recorded", line) for line in r["benchmark"]["batches"]))]
        if r["benchmark"] else []},
}
PROGRESS = re.compile(r"\[forward\] rows=(\d+)/(\d+) rows_per_s=\d+ left=\d+s")


def final_line(result: Result) -> str:
    return f"[final]   exit_code={result['exit_code']} result_json={result['log_dir']}/{RESULT_FILE}"


def log_text(line: str) -> str:
    """A line as it stands in the log: one, and harmless on a terminal, whatever a file or a library put into it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(line.split("\n")))


def shape_of(value: Any) -> list[int]:
    return [len(value), *shape_of(value[0])] if isinstance(value, list) and value else []


@contextlib.contextmanager
def writing(name: str) -> Iterator[None]:
    """What the file system refuses inside ends the run with the name of the file."""
    try:
        yield
    except OSError as error:
        raise EvidenceUnwritable(f"{name}: {error.strerror}", "free some space") from error


class Evidence:
    """The log, the marker, the npu-smi log, the result and SHA256SUMS of one run, in one locked directory."""

    def __init__(self, log_dir: str | None, argv: list[str]) -> None:
        self.dir = Path(log_dir) if log_dir else PROJECT / "logs"
        self.lock_path = self.dir / ".npu_inference.lock"
        self.lock_fd = -1
        self.lock_status: os.stat_result | None = None
        self.log_fd = -1
        self.written: dict[str, Any] = {}  # the SHA256 of what this process wrote to each file
        self.pen_fd = unnamed_file()
        self.verdict, self.verdict_fd = os.pipe()  # of the watcher: the exit code, once it has concluded the run
        os.set_blocking(self.verdict, False)
        self.pen_depth = 0
        self.npu_smi_pid = 0
        self.crash_hint = "the CANN logs (plog) may tell more"
        self.unread: set[int] = set()  # stdout or stderr, once nobody reads it
        self.stdout_fd = os.dup(1)
        self.terminal = os.isatty(1) and os.environ.get("TERM") != "dumb"
        self.colour = self.terminal and not os.environ.get("NO_COLOR")
        self.stderr_fd = os.dup(2)
        self.captured_stderr = open(unnamed_file(), "w+b")  # noqa: SIM115 (open to the end)
        self.news_fd = -1  # a pipe to the watcher
        self.concluded = False
        self.stage = "start"
        self.deadline = math.inf  # time.monotonic() of the moment when the run counts as hung
        self.started = time.monotonic()
        self.started_at = datetime.now(timezone.utc)
        self.result: Result = dict.fromkeys(("schema", "exit_code", "simulated", *STAGE_OF_KEY))
        self.stage_started = self.started
        self.result.update(
            schema=SCHEMA, pid=os.getpid(), started_at=self.now(self.started),
            argv=self.shown_argv(argv),
            cwd=self.shown(os.curdir, typed="outside the project"), log_dir=self.shown(self.dir, typed=log_dir),
            versions={**dict.fromkeys(VERSIONS), "python": platform.python_version(), "platform": platform.platform()},
            script_sha256=sha256_of(Path(__file__)))

    def now(self, moment: float | None = None) -> str:
        """ISO 8601, UTC. Counted from the start on the monotonic clock, so that a clock set back breaks no order."""
        passed = (time.monotonic() if moment is None else moment) - self.started
        return (self.started_at + timedelta(seconds=passed)).isoformat(timespec="microseconds")

    @contextlib.contextmanager
    def pen(self) -> Iterator[None]:
        """Only its holder writes evidence: this process, or the watcher. Who concludes the run never lays it down."""
        fcntl.flock(self.pen_fd, fcntl.LOCK_EX)
        self.pen_depth += 1
        with contextlib.suppress(BlockingIOError):  # there is no verdict
            leave(self, os.read(self.verdict, 1)[0])  # of a watcher that was killed before it could end this process
        try:
            yield
        finally:
            self.pen_depth -= 1
            if not self.pen_depth and not self.concluded:
                fcntl.flock(self.pen_fd, fcntl.LOCK_UN)

    def enter(self, stage: str | None) -> float:
        """Note how long the stage took that ends here (the first since the start), and begin the next."""
        now = time.monotonic()
        if self.stage != "start":
            outcome = "failed" if self.result["error"] else "ok"
            past = [entry for entry in self.result["stages"] or [] if entry["name"] != self.stage]
            self.result["stages"] = [*past, {
                "name": self.stage, "elapsed_s": round(now - self.stage_started, 6), "outcome": outcome}]
            if stage:
                self.stage_started = now
        self.stage = stage or self.stage
        return now

    def open(self) -> None:
        """Lock the directory, remove what an earlier run left, and start the log."""
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            self.lock()
            # The result goes first: from here on nothing can pass for the outcome of this run but what it writes.
            for name in (RESULT_FILE, *EVIDENCE_FILES, *(f".{name}.tmp" for name in (RESULT_FILE, *EVIDENCE_FILES))):
                (self.dir / name).unlink(missing_ok=True)
            self.update_sums([])
            self.log_fd = os.open(self.dir / "npu_inference.log",
                                  os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise EvidenceUnwritable(f"{self.shown(self.dir)}: {error.strerror}",
                                     "name a directory that can be written with --log-dir") from error

    def lock(self) -> None:
        # A lock file, since NFS cannot lock a directory. It is removed at the end; if another run replaced it between
        # our open and our lock, ours locks nothing and we try again.
        while True:
            lock_fd = os.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(lock_fd)
                raise EvidenceUnwritable(f"another run is writing its evidence to {self.shown(self.dir)}",
                                         "wait for it, or name another directory with --log-dir") from error
            with contextlib.suppress(FileNotFoundError):
                self.lock_status = os.fstat(lock_fd)
                if os.path.samestat(self.lock_status, os.stat(self.lock_path)):
                    self.lock_fd = lock_fd
                    return
            os.close(lock_fd)

    def owns_directory(self) -> bool:
        """Whether what is locked is still what others see: False when the directory was removed meanwhile."""
        with contextlib.suppress(OSError):
            return self.lock_status is not None and os.path.samestat(self.lock_status, os.stat(self.lock_path))
        return False

    def unlock(self) -> None:
        if self.lock_fd >= 0:
            if self.owns_directory():
                with contextlib.suppress(OSError):
                    self.lock_path.unlink()
            os.close(self.lock_fd)

    def shown(self, path: str | Path, typed: str | None = None) -> str:
        """A path as evidence may show it: inside the project relative to it, any other as the user typed it."""
        with contextlib.suppress(FileNotFoundError):  # of a current directory that was deleted
            for absolute in (os.path.abspath(path), os.path.realpath(path)):  # it may be, or lie behind, a link
                for project in (PROJECT, Path(os.path.abspath(__file__)).parent):
                    if Path(absolute).is_relative_to(project):
                        return str(Path(absolute).relative_to(project))
        return typed or Path(path).name

    def shown_argv(self, argv: list[str]) -> list[str]:
        """The command line, its paths as evidence may show them."""
        shown = []
        for before, argument in itertools.pairwise(["", *argv]):
            name, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
            is_path = os.path.isabs(value) or (name if equals else before) in PATH_OPTIONS
            shown.append(name + equals + (self.shown(value, typed=value) if is_path and value else value))
        return shown

    def log(self, block: str) -> None:
        for line in LOG[self.stage][block](self.result):
            self.say(line)
        self.tell_watcher()

    def tell_watcher(self) -> None:
        """Hand the watcher what it needs to conclude this run (see Watcher)."""
        if self.news_fd >= 0:
            names = ("stage", "stage_started", "deadline", "npu_smi_pid", "crash_hint", "result")
            news = json.dumps({name: getattr(self, name) for name in names}).encode() + b"\n"
            try:
                while news:
                    news = news[os.write(self.news_fd, news):]
            except BrokenPipeError as error:
                raise EvidenceUnwritable("the process that watches this one was killed", "start it again") from error

    def say(self, line: str, echo: bool = True) -> None:
        """One line for the log, and for stdout."""
        data = (log_text(line) + "\n").encode()
        with self.pen():
            with writing("npu_inference.log"):
                written = os.write(self.log_fd, data)
            if written != len(data):
                raise EvidenceUnwritable("npu_inference.log: no space left", "free some space")
            self.written.setdefault("npu_inference.log", hashlib.sha256()).update(data)
            if echo:
                self.echo(data)

    def countdown(self, until: float) -> None:
        """Sleep, and on a terminal say for how much longer."""
        while (left := until - time.monotonic()) > 0:
            if self.terminal:
                self.echo(f"\r[ready]   {math.ceil(left)} s left \r".encode(), colour=False)
            time.sleep(min(left, 1.0))
        if self.terminal:
            self.echo(b" " * len("[ready]   86400 s left ") + b"\r", colour=False)

    def echo(self, data: bytes, colour: bool = True) -> None:
        if self.colour and colour:
            data = re.sub(rb"^(\[[\w-]+\])", rb"\033[36m\1\033[0m", data)
            data = re.sub(rb"=(True\b|0 (?=result_json))", rb"=\033[32m\1\033[0m", data)
            data = re.sub(rb"=(False\b|\d+ (?=result_json))", rb"=\033[1;31m\1\033[0m", data)
        self.pour(self.stdout_fd, data)

    def pour(self, fd: int, data: bytes) -> None:
        # Both streams are a courtesy beside the log: a reader that went away (| head -1) or stopped reading must not
        # end or stall the run. poll says when a pipe takes another 4096 bytes without blocking.
        try:
            while data and fd not in self.unread and ready_of([fd], 5.0, select.POLLOUT):
                data = data[os.write(fd, data[:4096]):]
        except OSError:
            pass
        if data:
            self.unread.add(fd)

    def complain(self, line: str) -> None:
        self.pour(self.stderr_fd, (log_text(line) + "\n").encode())

    def capture_stderr(self) -> None:
        """From here on, stderr is kept (see no_cpu_fallback) until it is released, and what libraries print with it.

        stdout is the log's alone: a library that prints to one that nobody reads would fail in the middle of its work.
        """
        os.dup2(self.captured_stderr.fileno(), 1)
        os.dup2(self.captured_stderr.fileno(), 2)

    def release_stderr(self) -> bytes:
        """Print what was kept, once, and return it."""
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os.dup2(self.stdout_fd, 1)
        os.dup2(self.stderr_fd, 2)
        self.captured_stderr.seek(0)
        text: bytes = self.captured_stderr.read()
        self.captured_stderr.seek(0)
        self.captured_stderr.truncate()
        self.pour(self.stderr_fd, text + (b"\n" if text and not text.endswith(b"\n") else b""))
        return text

    def write(self, name: str, data: bytes | Callable[[IO[bytes]], None]) -> None:
        """Write a file of the run atomically and durably."""
        with writing(name), self.pen():
            replace_file(self.dir / name, data)
            self.written[name] = hash_of(self.dir / name)

    def append(self, name: str, data: bytes) -> None:
        with writing(name), self.pen(), open(self.dir / name, "ab") as file:
            file.write(data)
            self.written.setdefault(name, hashlib.sha256()).update(data)

    def update_sums(self, lines: list[str]) -> None:
        """Replace the logs/ lines of the project's SHA256SUMS, and no other, when the run writes to its own logs/."""
        sums = PROJECT / "SHA256SUMS"
        if not sums.exists() or self.dir.resolve() != (PROJECT / "logs").resolve():
            return
        others = [line for line in sums.read_bytes().splitlines() if not line[66:].startswith(b"logs/")]
        replace_file(sums, b"".join(line + b"\n" for line in [*others, *(line.encode() for line in lines)]))

    def seal(self) -> None:
        """Close the log, hash the files, and write the result. The rename of the result is the commit point."""
        now = self.enter(None)
        self.result.update(finished_at=self.now(now), total_s=round(now - self.started, 6))
        with writing(RESULT_FILE):
            os.fsync(self.log_fd)
            self.result["files"] = {
                name: sha256_of(self.dir / name) for name in EVIDENCE_FILES if (self.dir / name).exists()}
            wanted = {name: digest.hexdigest() for name, digest in self.written.items()}
            if not self.result["error"] and (self.result["files"] != wanted or not self.owns_directory()):
                changed = [name for name in EVIDENCE_FILES if self.result["files"].get(name) != wanted.get(name)]
                raise EvidenceUnwritable("changed or removed by others during the run: "
                                         f"{', '.join(changed) or 'the directory'}",
                                         "leave the directory alone until the run has ended")
            data = (json.dumps(self.result, indent=2, allow_nan=False) + "\n").encode()
            hashes = {**self.result["files"], RESULT_FILE: hashlib.sha256(data).hexdigest()}
            replace_file(self.dir / RESULT_FILE, data, before_rename=lambda: self.update_sums(
                [f"{digest}  logs/{name}" for name, digest in sorted(hashes.items())]))

    def commit(self) -> None:
        """End a run that succeeded."""
        with self.pen():
            end_of_log = os.fstat(self.log_fd).st_size
            self.result["exit_code"] = 0
            try:
                self.say(final_line(self.result), echo=False)
                self.seal()
            except BaseException:
                os.ftruncate(self.log_fd, end_of_log)  # the log must not claim what the result does not
                raise
            self.concluded = True
            self.echo((log_text(final_line(self.result)) + "\n").encode())

    def conclude(self, failure: BaseException) -> int:
        """End a run that failed: log, JSON and one line on stderr say so. Returns the exit code."""
        with self.pen():
            self.concluded = True
            code = failure.code if isinstance(failure, Failure) else 1
            hint = failure.hint if isinstance(failure, Failure) else "this is a bug: please report it"
            message = log_text(without_paths(str(failure)))[:500] or type(failure).__name__
            self.result["exit_code"] = code
            self.result["error"] = {"stage": self.stage, "type": type(failure).__name__, "message": message,
                                    "hint": hint}
            lost = ""
            if self.log_fd >= 0 and not self.owns_directory():
                lost = " (no result: the directory was taken away)"
            elif self.log_fd >= 0:
                try:
                    self.say(fields("[error]  ", self.result["error"]), echo=False)
                    self.say(final_line(self.result))
                except EvidenceUnwritable as error:
                    lost = f" ({error})"
                try:
                    self.seal()
                except EvidenceUnwritable as error:
                    lost = f" (no result: {error})"
                    with contextlib.suppress(OSError):
                        (self.dir / RESULT_FILE).unlink(missing_ok=True)
            self.release_stderr()
            self.complain(f"inference.py: {self.stage}: {message}{lost}" + (f"; {hint}" if hint else ""))
            return code


def ready_of(fds: list[int], wait_s: float, for_what: int = select.POLLIN) -> list[int]:
    """Those that are ready within this time. By poll, since select knows none above 1023, and CANN may hold many."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, for_what)
    return [fd for fd, _ in poll.poll(wait_s * 1000)]


def unnamed_file() -> int:
    """A file of this process alone: in memory, or on disk where Python was built for an old glibc, as conda's is."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("inference.py")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def replace_file(path: Path, data: bytes | Callable[[IO[bytes]], None], before_rename: Any = None) -> None:
    """Write a file so that no reader ever sees a part of it, and so that it survives a power cut."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            if callable(data):
                data(file)
            else:
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if before_rename:
            before_rename()
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot
            raise
    finally:
        os.close(directory)


def sha256_of(path: Path) -> str:
    return str(hash_of(path).hexdigest())


def hash_of(path: Path) -> Any:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest


def without_paths(text: str) -> str:
    """An error text of a library without the directories of this machine: evidence is made to be published."""
    return re.sub(r"(?<![\w.~:/-])/(?!dev/)(?:[\w.+@~-]+/)+", "", text)


# ---------------------------------------------------------------------------------------------------------------------
# The watcher: ends a run on a signal and at the deadline, even inside a device call that never returns
# ---------------------------------------------------------------------------------------------------------------------

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def device_timeout(stage: str) -> DeviceTimeout:
    return DeviceTimeout(f"the device did not answer in time during {stage}",
                         "look at npu-smi info and dmesg; a longer --timeout-seconds helps when operators are compiled")


class Watcher:
    """A second process that ends this one: on a signal, and when a device call does not return in time.

    It must be another process, since some calls of torch_npu (set_device) keep the GIL while CANN hangs, and then no
    Python runs here. What this process learns it tells the watcher as it goes; the watcher writes the evidence of the
    failure, and makes this process exit with the code that stands in it. Whoever holds the pen decides, so that a run
    has one outcome.
    """

    def __init__(self, evidence: Evidence, timeout_s: float) -> None:
        self.evidence, self.timeout_s = evidence, timeout_s
        signals = [s for s in SIGNALS if signal.getsignal(s) != signal.SIG_IGN]  # nohup stays nohup
        news, news_fd = os.pipe()
        caught, wakeup = os.pipe()
        exits = {code: os.pipe() for code in (DeviceTimeout.code, *(128 + signum for signum in signals))}
        try:
            watcher = os.fork()
        except OSError as error:
            raise EvidenceUnwritable(f"no process can be started: {error.strerror}",
                                     "end some, or raise the limit") from error
        if watcher == 0:
            for fd in (news_fd, wakeup, evidence.lock_fd):  # the lock is the parent's alone
                os.close(fd)
            try:
                self.watch(news, caught, {code: write_end for code, (_, write_end) in exits.items()})
            finally:
                os._exit(1)  # whatever happens: no second process goes on with the run
        os.close(news)  # but not `caught`: without a reader, a signal after the watcher's end would be an error
        self.pid = watcher
        evidence.news_fd = news_fd
        self.exits = [exit_on_byte(read_end, code) for code, (read_end, _) in exits.items()]
        # The handler that CPython has in C writes the number of a signal into the pipe, without the GIL. It runs in a
        # thread of its own, so that no call of CANN is interrupted.
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        self.signals = signals
        self.catch_signals()
        # A process that a library forks (CANN's operator compiler) must not keep the run's pipes, locks and log open.
        own = [news_fd, wakeup, evidence.pen_fd, evidence.lock_fd, evidence.log_fd]
        os.register_at_fork(after_in_child=lambda: close_all(own))
        try:
            threading.Thread(target=self.receive, args=(signals,), name="signals", daemon=True).start()
        except RuntimeError as error:
            raise EvidenceUnwritable(f"no thread can be started: {error}", "raise the limit of processes") from error

    def catch_signals(self) -> None:
        """Again after CANN is loaded, and after it is initialised: it sets handlers of its own."""
        for signum in self.signals:
            signal.signal(signum, self.handle)

    def handle(self, signum: int, _: Any) -> None:
        """In Python, once the main thread gets to it: to be done only where the watcher was killed."""
        if self.evidence.concluded or self.evidence.stage == "end":
            return
        try:
            gone = os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
        except ChildProcessError:  # an earlier signal found that out
            gone = True
        if gone:
            raise Interrupted(signum)

    def receive(self, signals: list[signal.Signals]) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        threading.Event().wait()

    def enter(self, stage: str, at_least_s: float = 0.0) -> None:
        """Name the stage (or its next step) and give the device the full time again."""
        if stage != self.evidence.stage:
            self.evidence.enter(stage)
        self.evidence.deadline = time.monotonic() + max(self.timeout_s, at_least_s)
        self.evidence.tell_watcher()

    def watch(self, news: int, caught: int, exits: dict[int, int]) -> None:
        """What the second process does. Never returns."""
        parent, evidence, pending = os.getppid(), self.evidence, bytearray()
        failure: Failure | None = None
        spoken = False
        # flock tells holders apart by how they opened the file, and a fork shares that
        evidence.pen_fd = os.open(f"/proc/self/fd/{evidence.pen_fd}", os.O_RDWR)

        def listen(wait: float) -> bool:
            """Take in what the parent tells, and its signals, within so many seconds; False when it has ended."""
            nonlocal pending, failure
            ready = ready_of([news, caught], wait)
            number = os.read(caught, 1) if caught in ready else b""
            if number and 128 + number[0] in exits:  # other signals are a library's own
                failure = failure or Interrupted(number[0])
            if news not in ready:
                return os.getppid() == parent  # a process that it forked may hold the pipe open
            piece = os.read(news, 1 << 20)
            pending += piece
            if b"\n" in piece:
                *lines, pending = pending.split(b"\n")
                for line in lines:
                    vars(evidence).update(json.loads(line))
            return bool(piece)

        while failure is None and listen(min(1.0, max(0.0, evidence.deadline - time.monotonic()))):
            if failure is None and time.monotonic() >= evidence.deadline:
                failure = device_timeout(evidence.stage)
        if failure:
            with evidence.pen():  # waits for a parent that is concluding the run itself, until it has ended
                while ready_of([news], 0.0) and listen(0.0):
                    pass
                if evidence.stage != "end" and os.getppid() == parent:
                    code = evidence.conclude(failure)
                    os.write(evidence.verdict_fd, bytes([code]))
                    spoken = True
                    end_descendants(parent)
                    os.write(exits[code], b"!")
            while listen(0.1):
                pass
        if evidence.stage != "end" and not spoken:
            evidence.release_stderr()
            written = (evidence.dir / RESULT_FILE).exists()  # by this run: the one of an earlier run went first of all
            evidence.complain(f"inference.py: {evidence.stage}: the process was killed, or a native library crashed; "
                              f"{'its' if written else 'no'} result was written; {evidence.crash_hint}")
            end_group(evidence.npu_smi_pid)
        for _ in range(100):  # the kernel releases the parent's lock a little after its pipes; or another run has it
            with contextlib.suppress(Failure, OSError):
                evidence.lock()
                evidence.unlock()
                break
            time.sleep(0.01)
        os._exit(0)


def exit_on_byte(read_end: int, code: int) -> Any:
    """_exit(code) when a byte arrives in a pipe, without the GIL: the C library reads (aio) and calls it.

    What this returns must be kept until then."""
    libc = ctypes.CDLL(None)
    library = libc if hasattr(libc, "aio_read") else ctypes.CDLL("librt.so.1")  # before glibc 2.34
    byte, sigev_thread = ctypes.create_string_buffer(1), 2
    # glibc's struct aiocb: descriptor, operation, priority, buffer, size; then struct sigevent: value, signal number,
    # kind, function; the rest is zero
    request = ctypes.create_string_buffer(struct.pack(
        "@3iPNl2iP", read_end, 0, 0, ctypes.addressof(byte), 1, code, 0, sigev_thread,
        ctypes.cast(libc._exit, ctypes.c_void_p).value), 256)
    if library.aio_read(request):
        raise EvidenceUnwritable("aio_read failed: the run cannot be watched", "raise the limit of processes")
    return byte, request


def close_all(fds: list[int]) -> None:
    """Close them, and once: in a child of the child these numbers are other files."""
    while fds:
        os.close(fds.pop())


def leave(evidence: Evidence, exit_code: int) -> None:
    """End the process here. torch_npu's exit hooks would turn a failed teardown into exit 0, or crash on the way."""
    evidence.stage = "end"
    for signum in SIGNALS:  # from here on the outcome stands
        signal.signal(signum, signal.SIG_IGN)
    with contextlib.suppress(EvidenceUnwritable):
        evidence.tell_watcher()
    end_descendants(os.getpid())  # the watcher, and the pool that CANN's operator compiler keeps
    evidence.unlock()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


def end_group(leader: int) -> None:
    if leader:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


def end_descendants(pid: int) -> None:
    """End the processes that this one and its children have started and that are still its own."""
    with contextlib.suppress(OSError):  # gone meanwhile, or a kernel without these files
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()):
                if child not in (0, os.getpid()):  # 0: of another namespace
                    end_descendants(child)
                    with contextlib.suppress(OSError):
                        os.kill(child, signal.SIGKILL)


# ---------------------------------------------------------------------------------------------------------------------
# Stage verify: the checkpoint's bytes, with the standard library alone
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Checkpoint:
    """A verified checkpoint: its bytes, what its `data` says in readable text, and the tensors of its policy."""

    raw: bytes
    data: dict[str, Any]
    network: Network
    tensors: dict[str, SavedTensor]
    pinned: bool


@dataclass
class Box:
    """A box of `shape`; `low` and `high` have one number per element, flattened."""

    shape: tuple[int, ...]
    dtype: str
    low: list[float]
    high: list[float]


@dataclass
class Network:
    """What a policy is built from, read from the text beside each serialised value and never unpickled."""

    observation: Box
    action: dict[str, Any]  # {"type": "Discrete", "n": 2} and the like; for "Box" its Box under "box"
    policy_kwargs: dict[str, Any] = field(default_factory=dict)
    use_sde: bool = False
    activation: str = "Tanh"


class SavedTensor(NamedTuple):
    """A contiguous tensor as the file holds it: little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    content: memoryview


def verify(args: argparse.Namespace, evidence: Evidence) -> Checkpoint:
    path = Path(args.checkpoint) if args.checkpoint else PROJECT / CHECKPOINT_NAME
    shown = evidence.shown(path, typed=args.checkpoint)
    pinned = args.sha256 == CHECKPOINT_SHA256
    result = evidence.result["checkpoint"] = dict.fromkeys(("path", "bytes", "sha256", "size_ok", "sha256_ok"))
    result["path"] = shown
    evidence.log("start")
    fetched = None
    if args.checkpoint is None and pinned and not os.path.lexists(path):
        fetched = fetch_checkpoint()
    try:
        raw, size_on_disk = read_checkpoint(fetched or path, shown)
    except CheckpointRejected:
        discard(fetched)
        raise
    digest = hashlib.sha256(raw).hexdigest()
    size_ok = len(raw) == (CHECKPOINT_BYTES if pinned else size_on_disk)
    sha256_ok = digest == args.sha256
    result.update(bytes=len(raw), sha256=digest, size_ok=size_ok, sha256_ok=sha256_ok)
    evidence.log("checkpoint")
    if not (size_ok and sha256_ok):
        discard(fetched)
        expected = f"{CHECKPOINT_BYTES} bytes and SHA256 {CHECKPOINT_SHA256}" if pinned else f"SHA256 {args.sha256}"
        raise CheckpointRejected(f"{shown} has {len(raw)} bytes and SHA256 {digest}, expected {expected}",
                                 FETCH_HINT if pinned and not args.checkpoint else
                                 "fetch the file again; --sha256 names the digest of a checkpoint of your own")
    if fetched:
        with contextlib.suppress(OSError):  # where the project cannot be written, the hub's cache serves the next run
            replace_file(path, raw)
    if pinned:
        evidence.result.update(model_id=MODEL_ID, source_revision=SOURCE_REVISION, license=LICENSE)
    members = zip_members(raw, "the archive")
    refuse_unknown(members)
    data = read_data(members["data"])
    network = read_network(data, len(members["policy.pth"]))
    tensors = read_policy(members, tensor_shapes(network))
    return Checkpoint(raw, data, network, tensors, pinned)


FETCH_HINT = (f"fetch it, in the directory of inference.py: hf download {MODEL_ID} {CHECKPOINT_NAME} --revision "
              f"{SOURCE_REVISION} --local-dir . (SHA256 {CHECKPOINT_SHA256}); or name another with --checkpoint and "
              "--sha256")


def fetch_checkpoint() -> Path | None:
    """The pinned file in huggingface_hub's cache, fetched where need be; None when that package is not installed.

    Its environment variables apply (HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME ...). What arrives is verified like any file.
    """
    # With its telemetry, the client asks the hub for more than the file (a list of programs to find itself under).
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    try:
        from huggingface_hub import hf_hub_download

        # token=False: the file is public, and HF_ENDPOINT may be anybody's
        return Path(hf_hub_download(MODEL_ID, CHECKPOINT_NAME, revision=SOURCE_REVISION, token=False))
    except ImportError:
        return None
    except Exception as error:  # any of the hub's, the HTTP client's and the file system's
        raise CheckpointRejected(f"{CHECKPOINT_NAME} is absent, and fetching it failed: "
                                 f"{' '.join(str(error).split())[:300]}", FETCH_HINT) from error


def discard(fetched: Path | None) -> None:
    """Remove a wrong file from the hub's cache, so that the next run asks the hub again."""
    if fetched:
        with contextlib.suppress(OSError):
            fetched.resolve().unlink()


def read_checkpoint(path: Path, shown: str) -> tuple[bytes, int]:
    """The file's bytes, read once, and its size."""
    try:
        # O_NONBLOCK: opening a named pipe must not wait for a writer
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointRejected(f"{shown} is not a regular file", "name a checkpoint with --checkpoint")
            if status.st_size > MAX_CHECKPOINT_BYTES:
                raise CheckpointRejected(f"{shown} has {status.st_size} bytes, more than {MAX_CHECKPOINT_BYTES}",
                                         FETCH_HINT if path.name == CHECKPOINT_NAME else NOT_SB3)
            return file.read(MAX_CHECKPOINT_BYTES + 1), status.st_size
    except OSError as error:
        hint = FETCH_HINT if path == PROJECT / CHECKPOINT_NAME else "name a checkpoint with --checkpoint"
        raise CheckpointRejected(f"{shown}: {error.strerror}", hint) from error


NOT_SB3 = "this is no file that SB3's PPO.save wrote"


def require(holds: bool, fault: str, hint: str = NOT_SB3) -> None:
    if not holds:
        raise CheckpointRejected(fault, hint)


def zip_members(raw: bytes, what: str) -> dict[str, bytes]:
    """The members of a zip archive, by name. Refuses an archive in which two readers could see two different things.

    zipfile and torch's reader look for the directory in different ways, and either can be shown other members than the
    other. So nothing is left to find: the end record is at the end, the directory right before it, the members adjoin
    from the first byte on, their two headers agree, and all are stored plainly, as SB3 and torch.save write them
    (which also ends zip bombs). Formats: APPNOTE.TXT of PKWARE, 4.3.
    """
    end = len(raw) - 22
    require(end >= 0 and raw[end:end + 4] == b"PK\5\6", f"{what} is no zip archive, or has bytes after its end")
    disk, directory_disk, here, entries, size, offset, comment = struct.unpack("<HHHHLLH", raw[end + 4:])
    directory_end = end
    if raw[max(0, end - 20):end].startswith(b"PK\6\7"):  # zip64, as torch writes it: it must repeat the end record
        directory_end = end - 76
        record = raw[max(0, directory_end):end]
        require(record[:12] == b"PK\6\6" + struct.pack("<Q", 44)
                and record[16:56] == struct.pack("<LLQQQQ", 0, 0, entries, entries, size, offset)
                and record[60:] == struct.pack("<LQL", 0, directory_end, 1), f"{what} has two end records that differ")
    require((disk, directory_disk, comment) == (0, 0, 0) and here == entries and offset + size == directory_end
            and size <= MAX_INDEX_BYTES, f"{what} has a directory that is not where its end record says, or too large")
    members: dict[str, bytes] = {}
    position = 0
    try:
        for info in zipfile.ZipFile(io.BytesIO(raw)).infolist():
            name, length = info.filename, info.file_size
            require(info.orig_filename == name and name.isascii() and name.isprintable() and name not in members,
                    f"{what} has a member with an odd name, or twice: {name[:80]!r}")
            require(info.compress_type == zipfile.ZIP_STORED and info.compress_size == length,
                    f"{what} has a compressed member: {name[:80]}")
            require(not info.flag_bits & ~0x808,  # all but a data descriptor and UTF-8
                    f"{what} has an encrypted member: {name[:80]}")
            signature, _, flags, method, _, _, crc, packed, unpacked, name_length, extra_length = struct.unpack_from(
                "<4sHHHHHLLLHH", raw, position)
            content = position + 30 + name_length + extra_length
            deferred = bool(flags & 8)  # the sizes follow the content; 0xFFFFFFFF: they are in the zip64 field
            sizes = [(length, length), (0xFFFFFFFF, 0xFFFFFFFF), *([(0, 0)] if deferred else [])]
            differ = f"{what} has a member whose two headers differ: {name[:80]}"
            require(signature == b"PK\3\4" and info.header_offset == position and not method
                    and flags == info.flag_bits and raw[position + 30:position + 30 + name_length] == name.encode()
                    and (crc == info.CRC or deferred) and (packed, unpacked) in sizes, differ)
            members[name] = raw[content:content + length]
            position = content + length
            require(zlib.crc32(members[name]) == info.CRC, f"{what} has a damaged member: {name[:80]}")
            if deferred:
                descriptors = [b"PK\7\10" + struct.pack(form, info.CRC, length, length) for form in ("<LLL", "<LQQ")]
                found = [d for d in descriptors if raw.startswith(d, position)]
                require(bool(found), differ)
                position += len(found[0])
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError) as error:
        raise CheckpointRejected(f"{what} is not readable: {error}", NOT_SB3) from error
    require(position == offset and len(members) == entries,
            f"{what} has bytes between its members, or a directory that counts them wrong")
    return members


def refuse_unknown(members: dict[str, bytes]) -> None:
    missing, unknown = REQUIRED_MEMBERS - set(members), set(members) - REQUIRED_MEMBERS - OPTIONAL_MEMBERS
    require(not missing, f"the archive lacks {', '.join(sorted(missing))}")
    require(not unknown, f"the archive has unknown members: {', '.join(sorted(unknown))[:200]}")
    require(len(members["data"]) <= MAX_DATA_BYTES, f"data has more than {MAX_DATA_BYTES} bytes")


def read_policy(members: dict[str, bytes], shapes: dict[str, tuple[int, ...]]) -> dict[str, SavedTensor]:
    """policy.pth as {name: float32 tensor} of these shapes; the other .pth members are held to what SB3 writes."""
    variables = read_pth("pytorch_variables.pth", members) if "pytorch_variables.pth" in members else None
    require(variables is None or (isinstance(variables, dict) and all(v is None for v in variables.values())),
            "pytorch_variables.pth holds values, which would overwrite the policy's")
    optimizer = read_pth("policy.optimizer.pth", members)  # of no use to a forward, and so not looked into
    require(isinstance(optimizer, dict) and set(optimizer) == {"state", "param_groups"},
            "policy.optimizer.pth is not the state of an optimizer")
    policy: dict[str, SavedTensor] = read_pth("policy.pth", members)
    require(isinstance(policy, dict) and all(isinstance(tensor, SavedTensor) for tensor in policy.values()),
            "policy.pth is no dictionary of tensors")
    for name in [*shapes, *policy]:
        saved = policy[name].shape if name in policy else None
        require(saved == shapes.get(name), f"policy.pth is not of the network that data describes: {str(name)[:80]} is "
                                           f"{saved}, expected {shapes.get(name)}")
    require(sum(len(tensor.content) for tensor in policy.values()) <= len(members["policy.pth"]),
            "policy.pth has tensors that share their bytes")
    for name, tensor in policy.items():
        require(tensor.dtype == "float32", f"policy.pth: {name} is {tensor.dtype}, not float32")
        # A sum is finite when all that it adds up is: no float32 is large enough to overflow it.
        require(math.isfinite(sum(tensor.content.cast("f"))), f"policy.pth: {name} holds NaN or infinite weights",
                "its training has diverged, or the file is damaged")
    return policy


def read_pth(name: str, members: dict[str, bytes]) -> Any:
    """What torch.save wrote, read without torch and without running anything that the pickle asks for."""
    require(members[name].startswith(b"PK\3\4"), f"{name} is not in the zip format of torch since 1.6")
    records = zip_members(members[name], name)
    root = next(iter(records), "").partition("/")[0]
    known = {f"{root}/{record}" for record in ("data.pkl", "version", "byteorder", ".data/serialization_id",
                                               ".format_version", ".storage_alignment")}
    storages = {match[1]: memoryview(content) for record, content in records.items()
                if (match := re.fullmatch(re.escape(root) + r"/data/(\d{1,9})", record))}
    unknown = [r for r in records if r not in known and r.removeprefix(f"{root}/data/") not in storages]
    require(not unknown, f"{name} has unknown records: {', '.join(unknown)[:200]}")
    pickled = records.get(f"{root}/data.pkl", b"")
    require(len(pickled) <= MAX_INDEX_BYTES and records.get(f"{root}/byteorder", b"little") == b"little",
            f"{name} is too large, or big-endian")
    try:
        return TensorUnpickler(name, pickled, storages).load()
    except Exception as error:  # the unpickler on untrusted input: anything, and none of it a bug
        raise CheckpointRejected(f"{name} is no plain dictionary of tensors: {type(error).__name__}",
                                 NOT_SB3) from error


class StateDict(dict[Any, Any]):
    """Stands for every dictionary of a .pth: keys of text or numbers, and no attributes to shadow its methods."""

    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> None:
        if type(key) not in (str, int):
            raise TypeError("a key is neither text nor a number")
        super().__setitem__(key, value)

    def __setstate__(self, attributes: Any) -> None:
        # what torch hangs on to a state dict: the versions of its modules, of no use here
        if not (isinstance(attributes, dict) and set(attributes) == {"_metadata"}
                and isinstance(attributes["_metadata"], dict)
                and all(isinstance(version, dict) for version in attributes["_metadata"].values())):
            raise TypeError("a dictionary has attributes")


class SavedStorage(NamedTuple):
    """The bytes that tensors are cut from, and the width of one number in them."""

    dtype: str
    width: int
    content: memoryview


class TensorUnpickler(pickle._Unpickler):
    """Reads what torch.save writes for tensors in dictionaries, and nothing else.

    It knows a few opcodes and three names: a dictionary, a storage, and the function that makes a tensor, none of them
    torch's own. Each step does a bounded amount of work. The pure Python unpickler, since the one in C makes room for
    as many objects as a pickle says that it has.
    """

    OPCODES = ("PROTO GLOBAL MARK STOP BINPUT LONG_BINPUT BINGET LONG_BINGET EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 "
               "EMPTY_DICT SETITEM SETITEMS EMPTY_LIST APPEND APPENDS NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 "
               "LONG1 BINFLOAT BINUNICODE BINPERSID REDUCE BUILD")
    dispatch = {getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]]  # noqa: RUF012
                for name in OPCODES.split()}
    dispatch[pickle.EMPTY_DICT[0]] = lambda self: self.append(StateDict())  # type: ignore[attr-defined]
    STORAGES = {name: SavedStorage(dtype, width, memoryview(b"")) for name, dtype, width in (  # noqa: RUF012
        ("FloatStorage", "float32", 4), ("DoubleStorage", "float64", 8), ("HalfStorage", "float16", 2),
        ("LongStorage", "int64", 8), ("IntStorage", "int32", 4), ("ByteStorage", "uint8", 1),
        ("BoolStorage", "bool", 1))}

    def __init__(self, name: str, pickled: bytes, storages: dict[str, memoryview]) -> None:
        super().__init__(io.BytesIO(pickled))
        self.name, self.storages = name, storages

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return lambda: StateDict()  # not the class: called with a dictionary, it would copy it
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self.tensor
        if module == "torch" and name in self.STORAGES:
            return self.STORAGES[name]
        raise CheckpointRejected(f"{self.name} asks for {module[:60]}.{name[:60]}, which is no tensor",
                                 "nothing in a checkpoint is run")

    def build(self: Any) -> None:
        require(type(self.stack[-2]) is StateDict, f"{self.name} gives attributes to what is no dictionary")
        self.load_build()

    dispatch[pickle.BUILD[0]] = build

    def persistent_load(self, reference: Any) -> SavedStorage:
        kind, empty, key, _, count = reference
        require(kind == "storage" and type(empty) is SavedStorage and type(key) is str and type(count) is int
                and len(self.storages[key]) == count * empty.width,
                f"{self.name}: a storage has not the size that is stated")
        return SavedStorage(empty.dtype, empty.width, self.storages[key])

    def tensor(self, storage: SavedStorage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...],
               requires_grad: bool = False, hooks: Any = None, metadata: Any = None) -> SavedTensor:
        require(type(storage) is SavedStorage and type(shape) is tuple and type(strides) is tuple,
                f"{self.name} has a tensor without storage or shape")
        dtype, width, content = storage
        larger = f"{self.name} has a tensor that is larger than its storage"
        require(len(strides) == len(shape) <= 32 and all(
            type(number) is int and 0 <= number <= len(content) for number in (offset, *shape, *strides)), larger)
        size = 1
        for length, stride in zip(reversed(shape), reversed(strides), strict=True):
            require(stride == size or length <= 1, f"{self.name} has a tensor that is not contiguous")
            size *= length
        require((offset + size) * width <= len(content), larger)
        return SavedTensor(dtype, tuple(shape), content[offset * width:(offset + size) * width])


def read_data(text: bytes) -> dict[str, Any]:
    try:
        data = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointRejected(f"data is not JSON: {type(error).__name__}", NOT_SB3) from error
    require(isinstance(data, dict), "data is not a JSON object")
    for key in ("policy_class", "policy_kwargs", "observation_space", "action_space"):
        require(isinstance(data.get(key), dict), f"data lacks {key}, or it is not an object")
    require(bool({"clip_range", "n_epochs"} & set(data)),
            "data has neither clip_range nor n_epochs: its algorithm is not PPO")
    return dict(data)


def read_network(data: dict[str, Any], limit: int) -> Network:
    """Spaces, architecture and policy arguments from the readable text in `data`; no space larger than `limit`.

    SB3 writes a value that JSON cannot hold as cloudpickle, and beside it the text of its first level
    (stable_baselines3.common.save_util.data_to_json). That text differs a little over the years: gym and gymnasium,
    `shape` and `_shape`, numbers as numbers and as strings. What cannot be rebuilt is refused by name.
    """
    policy = data["policy_class"]
    if (policy.get("__module__") != "stable_baselines3.common.policies"
            or not str(policy.get("__init__")).startswith("<function ActorCriticPolicy.__init__ ")):
        name = re.sub(r"<function ([\w.]+)\.__init__ .*", r"\1", text_of(policy, "__init__")[:200])
        raise CheckpointRejected(f"policy_class is {name[:80]} of {text_of(policy, '__module__')[:80]}, not SB3's "
                                 "ActorCriticPolicy", "only PPO with MlpPolicy can be run")
    network = Network(read_box(data["observation_space"], "observation_space", limit),
                      read_action_space(data["action_space"], limit))
    require(network.observation.shape != (), "observation_space is a Box without a dimension", "SB3 cannot flatten it")
    read_policy_kwargs(data["policy_kwargs"], network)
    network.use_sde = data.get("use_sde", False)
    require(type(network.use_sde) is bool and (not network.use_sde or "box" in network.action),
            "use_sde is not true or false, or true without a Box of actions")
    return network


def text_of(entry: dict[str, Any], *names: str) -> str:
    """The first of these values that the entry has, as text: SB3 writes numbers and arrays both ways."""
    return next((str(entry[name]) for name in names if entry.get(name) is not None), "")[:1 << 20]


def class_name(text: str, module: str) -> str:
    """Box of "<class 'gymnasium.spaces.box.Box'>", when it is of the given module; "" for any other."""
    match = re.fullmatch(rf"<class '{module}\.(\w+)'>", text) if len(text) < 200 else None
    return match[1] if match else ""


def integers(text: str, what: str) -> list[int]:
    """The numbers of "(4,)", "[3 2]", "[3, 2]" or "2"."""
    require(len(text) <= 10_000 and bool(re.fullmatch(r"[\[(]?[\d\s,]*[\])]?", text)),
            f"{what} cannot be read: {text[:60]!r}", "")
    return [int(number) for number in re.findall(r"\d{1,9}", text)]


def read_box(space: dict[str, Any], what: str, limit: int) -> Box:
    kind = class_name(text_of(space, ":type:"), SPACES)
    require(kind == "Box", f"{what} is {kind or 'unreadable'}, not a Box", "other spaces cannot be run")
    shape = tuple(integers(text_of(space, "_shape", "shape"), f"{what}.shape"))
    dtype = text_of(space, "dtype")[:60]
    dtype = class_name(dtype, "numpy") or dtype
    require(bool(re.fullmatch(r"float(16|32|64)|u?int(8|16|32|64)", dtype)),
            f"{what}.dtype cannot be read: {dtype!r}", "")
    size = math.prod(shape)
    require(0 < size <= limit and len(shape) <= 32,  # numpy's limit
            f"{what} has the shape {str(shape)[:80]}, too large for the weights in policy.pth", "")
    bounds = []
    for name, unbounded in (("low", -math.inf), ("high", math.inf)):
        text = text_of(space, f"{name}_repr", name)
        numbers = [float(number) for number in re.findall(r"[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|inf)", text)]
        if len(set(numbers)) == 1:
            numbers *= size  # one number for all, or all that numpy's "..." left are the same
        elif len(numbers) != size:
            require(what != "action_space" and dtype.startswith("float"),
                    f"{what}.{name} cannot be read: {text[:60]!r}", "")
            numbers = [unbounded] * size  # the bounds of a float observation take no part in a forward
        bounds.append(numbers[:size])
    return Box(shape, dtype, *bounds)


def read_action_space(space: dict[str, Any], limit: int) -> dict[str, Any]:
    kind = class_name(text_of(space, ":type:"), SPACES)
    if kind == "Box":
        return {"type": kind, "box": read_box(space, "action_space", limit)}
    counts = {name: integers(text_of(space, name), f"action_space.{name}") for name in ("n", "nvec")}
    if kind in ("Discrete", "MultiBinary") and len(counts["n"]) == 1 and counts["n"][0] > 0:
        return {"type": kind, "n": counts["n"][0]}
    if kind == "MultiDiscrete" and 0 < len(counts["nvec"]) <= 1000 and min(counts["nvec"]) > 0:
        return {"type": kind, "nvec": counts["nvec"]}
    raise CheckpointRejected(f"action_space is {kind or 'unreadable'} of {counts['n'] or counts['nvec']}",
                             "Discrete, MultiDiscrete, MultiBinary and Box can be run")


SPACES = r"gym(?:nasium)?\.spaces\.\w+"
ACTIVATIONS = {"ReLU", "Tanh", "ELU", "LeakyReLU", "GELU", "SELU", "SiLU", "Sigmoid"}
PLAIN_POLICY_KWARGS = {"ortho_init": bool, "full_std": bool, "use_expln": bool, "squash_output": bool,
                       "share_features_extractor": bool, "normalize_images": bool}
# Of training, or overwritten by the weights.
UNUSED_POLICY_KWARGS = ("device", "optimizer_class", "optimizer_kwargs", "log_std_init")


def read_policy_kwargs(saved: dict[str, Any], network: Network) -> None:
    require(":serialized:" not in saved or not set(saved) <= {":type:", ":serialized:"},
            "policy_kwargs has no readable text beside what is serialised")
    for name, value in saved.items():
        what = f"policy_kwargs.{name[:60]}"
        if name in (":type:", ":serialized:", *UNUSED_POLICY_KWARGS):
            continue
        if name == "net_arch":
            network.policy_kwargs[name] = read_net_arch(value)
        elif name == "activation_fn":
            network.activation = class_name(str(value), r"torch\.nn\.modules\.activation")
            require(network.activation in ACTIVATIONS, f"{what} is {str(value)[:80]}",
                    f"known are {', '.join(sorted(ACTIVATIONS))}")
        elif name == "features_extractor_class" and class_name(
                str(value), r"stable_baselines3\.common\.torch_layers") == "FlattenExtractor":
            continue
        elif value is None or (name == "features_extractor_kwargs" and value == {}):
            continue  # SB3's default
        elif name in PLAIN_POLICY_KWARGS and isinstance(value, PLAIN_POLICY_KWARGS[name]):
            network.policy_kwargs[name] = value
        else:
            raise CheckpointRejected(f"{what} cannot be rebuilt: {str(value)[:80]!r}")


def read_net_arch(value: Any) -> dict[str, list[int]] | None:
    """Layer sizes as {"pi": [64, 64], "vf": [64, 64]}; None for SB3's default of just that.

    Written as that object, as a list around it (until SB3 1.8), as one list for both, or not at all."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        value = value[0]
    if isinstance(value, list):
        value = {"pi": value, "vf": value}
    if value is None:
        return None
    towers = {name: value.get(name, []) for name in ("pi", "vf")} if isinstance(value, dict) else {}
    if (not towers or set(value) - set(towers)
            or not all(isinstance(sizes, list) and len(sizes) <= 1000 for sizes in towers.values())
            or not all(type(size) is int and size > 0 for sizes in towers.values() for size in sizes)):
        raise CheckpointRejected(f"policy_kwargs.net_arch cannot be rebuilt: {str(value)[:80]}",
                                 "SB3 since 1.8 knows no layers that both towers share")
    return towers


def tensor_shapes(network: Network) -> dict[str, tuple[int, ...]]:
    """The tensors that SB3 makes for this network, with their shapes (stable_baselines3.common.policies)."""
    towers = network.policy_kwargs.get("net_arch") or {"pi": [64, 64], "vf": [64, 64]}
    action = network.action
    outputs = math.prod(action["box"].shape) if "box" in action else sum(action.get("nvec") or [action["n"]])
    shapes: dict[str, tuple[int, ...]] = {}
    for tower, layers, head, width in (("pi", "policy_net", "action_net", outputs),
                                       ("vf", "value_net", "value_net", 1)):
        below = math.prod(network.observation.shape)
        # every other module of a tower is its activation, which has no weights
        names = [f"mlp_extractor.{layers}.{2 * number}" for number in range(len(towers[tower]))]
        for name, above in zip([*names, head], [*towers[tower], width], strict=True):
            shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (above, below), (above,)
            below = above
        if tower == "pi" and "box" in action:
            full = network.policy_kwargs.get("full_std", True)
            latent = (towers["pi"] or [math.prod(network.observation.shape)])[-1]
            shapes["log_std"] = (latent, outputs if full else 1) if network.use_sde else (outputs,)
    return shapes


# ---------------------------------------------------------------------------------------------------------------------
# Observations: from the command line or a file of any length, checked before the NPU is touched
# ---------------------------------------------------------------------------------------------------------------------


def chunk_rows(shape: tuple[int, ...]) -> int:
    """Rows of a file in one pass: a fixed number, so that memory does not grow with the file."""
    return max(1, min(CHUNK_ROWS, CHUNK_BYTES // (4 * math.prod(shape))))


def read_observations(args: argparse.Namespace, shape: tuple[int, ...], evidence: Evidence) -> numpy.ndarray[Any, Any]:
    """The observations that the command line names: float32 (n, *shape), checked, in a copy that nobody can change."""
    try:
        import numpy
    except ImportError as error:
        raise NpuUnavailable(f"numpy cannot be imported: {first_line(error)}",
                             f"python3 -m pip install -r requirements.txt; {TRY_SIMULATOR}") from error

    source, first = "observation", 0
    if args.observations is not None:
        source = f"{evidence.shown(args.observations, typed=args.observations)}: row"
        rows, first = read_observation_file(args, shape, evidence)
    else:
        if args.shard != (1, 1):
            raise UsageError("--shard needs --observations", "name the file whose slices are meant")
        value = nested_zeros(shape) if args.observation is None else args.observation
        given = next((rows for rows in ([value], value) if all(has_shape(row, shape) for row in rows)), None)
        if given is None:
            raise UsageError(f"--observation has not the shape {list(shape)} of the checkpoint's observations, or "
                             "holds what is no number", f"one observation: {json.dumps(nested_zeros(shape))[:100]}")
        rows = numpy.array(given, dtype=numpy.float64)
    digest = hashlib.sha256()
    with writing("the copy of the observations"), tempfile.TemporaryFile(dir=evidence.dir) as copy:
        for start in range(0, len(rows), chunk_rows(shape)):
            with numpy.errstate(over="ignore"):
                chunk = numpy.array(rows[start:start + chunk_rows(shape)], dtype=numpy.float32, order="C")
            finite = numpy.isfinite(chunk.reshape(len(chunk), -1)).all(axis=1)
            if not finite.all():
                raise UsageError(f"{source} {first + start + int(finite.argmin())} holds NaN, infinity or a number "
                                 "beyond float32", "rows count from 0; mend or remove it")
            digest.update(chunk.tobytes())
            copy.write(chunk.tobytes())
        copy.flush()
        observations = numpy.memmap(copy, dtype=numpy.float32, mode="r", shape=rows.shape)
    evidence.result["rows"] = len(rows)
    if args.observations is not None:
        evidence.result["observations"] = {
            "file": evidence.shown(args.observations, typed=args.observations), "dtype": str(rows.dtype),
            "shard": "/".join(map(str, args.shard)), "first_row": first, "rows": len(rows),
            "sha256_float32": digest.hexdigest()}
        evidence.log("observations")
    return observations


def read_observation_file(args: argparse.Namespace, shape: tuple[int, ...],
                          evidence: Evidence) -> tuple[numpy.ndarray[Any, Any], int]:
    """A slice of a file, and the number of its first row there.

    .npy is mapped; .csv and .json are parsed row by row into an unnamed file, and that is mapped.
    """
    import numpy

    shown = evidence.shown(args.observations, typed=args.observations)
    kind = Path(args.observations).suffix.lower()
    try:
        if os.path.exists(args.observations) and not os.path.isfile(args.observations):
            raise UsageError(f"{shown} is not a regular file", "name a file of observations")
        if kind == ".npy":
            rows = numpy.load(args.observations, mmap_mode="r", allow_pickle=False)
        elif kind in (".csv", ".json"):
            size = math.prod(shape)
            with open(args.observations, encoding="utf-8-sig") as text, writing("the copy of the observations"), \
                    tempfile.TemporaryFile(dir=evidence.dir) as parsed:
                for number, row in enumerate(csv_rows(text) if kind == ".csv" else json_rows(text)):
                    values = flat(row) if kind == ".csv" or has_shape(row, shape) else []
                    if len(values) != size:
                        raise UsageError(f"{shown}: row {number} has not the shape {list(shape)} of the checkpoint's "
                                         "observations, or holds what is no number", "rows count from 0")
                    parsed.write(numpy.array(values, dtype=numpy.float64).tobytes())
                parsed.flush()
                rows = numpy.memmap(parsed, dtype=numpy.float64, mode="r",
                                    shape=(parsed.tell() // (8 * size), *shape)) if parsed.tell() else []
        else:
            raise UsageError(f"{shown} is no .npy, .csv or .json file", "see python3 inference.py --help")
    except OSError as error:
        raise UsageError(f"{shown}: {error.strerror or error}", "name a file of observations") from error
    except Exception as error:  # the readers of numpy, csv and json on a file that may hold anything
        raise UsageError(f"{shown}: {first_line(error)}", "it is damaged, or of another format") from error
    if not isinstance(rows, numpy.ndarray) or len(rows.shape) == 0 or len(rows) == 0:
        raise UsageError(f"{shown} holds no rows", "one observation a row")
    if rows.dtype not in (numpy.float32, numpy.float64):
        raise UsageError(f"{shown} holds {rows.dtype}, not float32 or float64", "convert it with numpy's astype")
    if rows.shape[1:] != shape:
        raise UsageError(f"{shown} has the shape {list(rows.shape)}, and the checkpoint's observations {list(shape)}",
                         f"a row for each observation is needed: the shape [N{''.join(f', {size}' for size in shape)}]")
    index, of = args.shard
    first, end = (index - 1) * len(rows) // of, index * len(rows) // of
    if first == end:
        raise UsageError(f"--shard {index}/{of} of {len(rows)} rows is empty", "use fewer slices")
    return rows[first:end], first


def csv_rows(text: Any) -> Iterator[list[float]]:
    for row in csv.reader(text):
        if row:
            yield [float(value) for value in row]


def json_rows(text: Any) -> Iterator[Any]:
    """The elements of one JSON list, one by one: a file of any length in a little memory."""
    decoder, buffer, due = json.JSONDecoder(), "", "["  # what may come next: one of these characters, or a row

    def misplaced() -> ValueError:
        wanted = {"[": "a list", "row": "a row", "row]": "a row or the end", ",]": "a comma or the end"}
        return ValueError(f"it is no JSON list of observations: {buffer[:20]!r} where {wanted.get(due, 'its end')} was "
                          "expected")

    while piece := text.read(max(1 << 12, len(buffer))):  # little: each row moves the rest; a long row is soon whole
        buffer = (buffer + piece).lstrip(" \t\r\n")
        with contextlib.suppress(json.JSONDecodeError, RecursionError):  # the row is not whole yet
            while buffer:
                if due == "row" or (due == "row]" and buffer[0] != "]"):
                    row, end = decoder.raw_decode(buffer)
                    yield row
                    due = ",]"
                elif buffer[0] in due:
                    due, end = {"[": "row]", ",": "row", "]": ""}[buffer[0]], 1
                else:
                    raise misplaced()
                buffer = buffer[end:].lstrip(" \t\r\n")
        if len(buffer) > MAX_CHECKPOINT_BYTES:
            break
    if buffer or due:
        raise misplaced()


def nested_zeros(shape: tuple[int, ...]) -> Any:
    return [nested_zeros(shape[1:]) for _ in range(shape[0])] if shape else 0.0


def has_shape(value: Any, shape: tuple[int, ...]) -> bool:
    if shape:
        return isinstance(value, list) and len(value) == shape[0] and all(has_shape(v, shape[1:]) for v in value)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e308


# ---------------------------------------------------------------------------------------------------------------------
# Stage npu
# ---------------------------------------------------------------------------------------------------------------------

# Set before torch is imported. The first are the user's to choose, the others are not.
DEFAULT_ENVIRONMENT = {
    "ASCEND_RT_VISIBLE_DEVICES": "0",
    # With the queue on, torch_npu silently drops every operator after a failed launch and hands back stale memory.
    "TASK_QUEUE_ENABLE": "0",
    # CANN's operator compiler starts when an operator needs it, not before: it is slow, and fails for its own reasons.
    "ACL_OP_INIT_MODE": "1",
}
FORCED_ENVIRONMENT = {
    "TORCH_NPU_FALLBACK_CPU_DISABLE": "1",  # an operator without an NPU kernel is an error (recent torch_npu)
    "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",  # SB3 before 2.8 asks torch.load for arbitrary unpickling
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # torch_npu is imported below, where its errors can be explained
}
REMOVED_ENVIRONMENT = (
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD",  # contradicts the above
    # Each would hide the line that tells of a CPU fallback; torch_npu warns in rank 0 alone.
    "TORCH_NPU_WARNING_DISABLE", "TORCH_NPU_DISABLED_WARNING", "TORCH_CPP_LOG_LEVEL", "RANK",
    # Together they make infinity the largest number and NaN 0, where nothing can see them.
    "INF_NAN_MODE_ENABLE", "INF_NAN_MODE_FORCE_DISABLE",
    "PYTORCH_JIT",  # without it, the benchmark's recorded operators would be none
    # CANN's log belongs into its files: what is printed is kept in memory until the forward is over.
    "ASCEND_SLOG_PRINT_TO_STDOUT", "ASCEND_LOG_PRINT_TO_STDOUT",
)
DETERMINISM = {"deterministic_algorithms": True, "jit_compile": False, "allow_hf32_matmul": False,
               "allow_hf32_conv": False}
# What torch_npu says of it, and what kernels say that copy to the CPU and back on their own account.
FALLBACK = re.compile(rb"(?:(?:will|to) fall ?back to (?:run on )?|running on )(?:the )?CPU", re.IGNORECASE)


def prepare_environment(evidence: Evidence) -> None:
    for name, value in DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.update(FORCED_ENVIRONMENT)
    for name in REMOVED_ENVIRONMENT:
        os.environ.pop(name, None)
    warnings.filterwarnings("always", message=".*CPU")  # some kernels tell of a fallback in this way, see FALLBACK
    try:
        os.getcwd()
    except FileNotFoundError:
        os.chdir("/")  # libraries fail in odd ways in a directory that was deleted
    recorded = {name: os.environ[name] for name in (*DEFAULT_ENVIRONMENT, *FORCED_ENVIRONMENT)}
    visible = os.environ["ASCEND_RT_VISIBLE_DEVICES"]
    evidence.result.update(environment=recorded, visible_devices=visible)
    if not is_device_list(visible):
        raise NpuUnavailable(f"ASCEND_RT_VISIBLE_DEVICES={visible[:60]!r} is no ascending list of device numbers",
                             "export ASCEND_RT_VISIBLE_DEVICES=0, or unset it")


def is_device_list(visible: str) -> bool:
    """CANN reports no device at all, and no reason, for a list that is empty, repeats or descends."""
    return bool(re.fullmatch(r"\d{1,5}(,\d{1,5})*", visible)) and all(
        int(a) < int(b) for a, b in itertools.pairwise(visible.split(",")))


def npu(evidence: Evidence, watcher: Watcher) -> Any:
    """Import torch and torch_npu, take npu:0, and prove with a real operation that it answers. Returns torch."""
    result = evidence.result
    torch, torch_npu = import_torch_npu(evidence)
    watcher.catch_signals()
    simulator = simulator_version()
    result.update(engine="torch_npu", simulated=simulator is not None,
                  simulator=f"cannsim {simulator}" if simulator else None)
    result["versions"].update(versions(torch, torch_npu))
    evidence.log("torch")
    watcher.enter("npu")
    try:
        result["npu_available"] = torch.npu.is_available()
        if not result["npu_available"]:
            raise NpuUnavailable("torch.npu.is_available() is False: no device", no_device_hint(
                result["visible_devices"], npu_smi(["info"], evidence).text))
        torch.npu.set_device(0)
        torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms, but imports no compiler
        torch.utils.deterministic.fill_uninitialized_memory = False  # a fill for every allocation, of use to bugs only
        torch.npu.set_compile_mode(jit_compile=False)
        for products in (torch.npu.matmul, torch.npu.conv):
            if products.allow_hf32:  # even setting what is set starts CANN's operator compiler in torch_npu 2.9
                products.allow_hf32 = False
        # One check that the outputs are finite replaces the twenty kernels with which torch validates a distribution.
        torch.distributions.Distribution.set_default_validate_args(False)
        ones = torch.ones(4, device=DEVICE)
        answer = (ones + ones).cpu().tolist()
        torch.npu.synchronize()
        name = torch.npu.get_device_name(0)
        if not name:
            raise RuntimeError("the device gives no name")
        result["device_count"] = torch.npu.device_count()
        result["determinism"] = {
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "jit_compile": not torch.npu.is_jit_compile_false(),
            "allow_hf32_matmul": torch.npu.matmul.allow_hf32, "allow_hf32_conv": torch.npu.conv.allow_hf32,
            "device": None}
        if result["determinism"] != {**DETERMINISM, "device": None}:
            raise RuntimeError(f"torch_npu does not keep its settings: {result['determinism']}")
        result["determinism"]["device"] = device_is_deterministic()
    except Exception as error:  # torch, torch_npu and CANN on a device and an environment that may be at fault
        raise NpuUnavailable(f"{DEVICE} cannot be used: {first_line(error)}", npu_hint(str(error))) from error
    if answer != [2.0] * 4 or str(ones.device) != DEVICE:
        raise NpuUnavailable(f"1 + 1 on {ones.device} gave {answer}", "the device or its driver is at fault")
    result.update(npu_device=DEVICE, npu_device_name=name + (" (simulated)" if simulator else ""),
                  device_nodes=device_nodes())
    result["versions"]["cann"] = cann_version(torch_npu)
    result["versions"]["driver"] = driver_version()
    result["versions"]["npu_smi"] = version_of(npu_smi(["-v"], evidence))
    evidence.log("device")
    return torch


DEVICE_HINT = "npu-smi info shows the health of the device, the CANN log (plog) what the error code means"
TRY_SIMULATOR = "without an NPU, try the program on the simulated one: tests/simulate.sh"
# What mends a start-up failure, by the text that users meet. The first pattern that is found counts.
NPU_HINTS = (
    (r"No module named '?torch", "torch and torch_npu come as a pair of one version that fits your CANN, as in "
     "the CANN image: python3 -m pip install torch==2.9.0 torch_npu==2.9.0"),
    (r"No module named '?yaml", "torch_npu 2.9 needs PyYAML and does not say so: python3 -m pip install pyyaml"),
    (r"libascend_hal\.so|lib(drv|c_sec|mmpa)\w*\.so", "the driver's libraries are out of reach: in a container, start "
     "it with -v /usr/local/Ascend/driver:/usr/local/Ascend/driver; then source "
     "/usr/local/Ascend/driver/bin/setenv.bash"),
    (r"static TLS block", "the named library must be loaded first: start again with LD_PRELOAD=/path/to/it"),
    (r"\.so[.\d]*: cannot open", "CANN is not set up in this shell: source "
     "/usr/local/Ascend/ascend-toolkit/set_env.sh (CANN 8.5 and later: /usr/local/Ascend/cann/set_env.sh)"),
    (r"undefined symbol|version `", "torch and torch_npu are no pair: python3 -m pip install torch_npu=={torch}"),
    (r"Two accelerators", "this torch is a CUDA build and sees a GPU: install the CPU build of torch {torch}"),
    (r"ACL_PRECISION_MODE|\b500001\b|[Nn]um[Pp]y [12]|numpy\.core\.multiarray|No module named",
     "CANN's operator compiler lacks Python packages, or meets a numpy that is too new: "
     "python3 -m pip install 'numpy<2' decorator attrs psutil scipy sympy cffi pyyaml pathlib2 protobuf"),
    (r"EL0004|\b207001\b|out of memory", "the device's memory is full: npu-smi info lists the processes that hold it"),
    (r"\b(107001|207004)\b|(?i:visible.devices?)", "ASCEND_RT_VISIBLE_DEVICES names no device of this machine: export "
     "ASCEND_RT_VISIBLE_DEVICES=0"),
    (r"\b507008\b|[Uu]nsupported soc", "this CANN or torch_npu does not know the chip: update them"),
    (r"-8005\b", "this user may not use the driver: sudo usermod -aG HwHiAiUser $USER and log in again; after a driver "
     "upgrade, reboot"),
    (r"-8020\b|\b507899\b|EL0005", "another container holds the device, or this one may not open it: stop the other, "
     "or start this one with --device /dev/davinci0"),
    (r"\b507033\b|E30006", "the device does not start: npu-smi info shows its health; after a driver upgrade, reboot"),
)
DEVICE_FILES = ("davinci_manager", "devmm_svm", "hisi_hdc")


def npu_hint(text: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    text = re.sub(r"PID: ?\d+", "PID", text)  # a number that is no error code
    hint = next((hint for pattern, hint in NPU_HINTS if re.search(pattern, text)), DEVICE_HINT)
    with contextlib.suppress(PackageNotFoundError):
        hint = hint.replace("{torch}", version("torch").partition("+")[0])
    return f"{hint}; {TRY_SIMULATOR}"


def no_device_hint(visible: str, npu_smi_says: str, dev: Path = Path("/dev")) -> str:
    """Why torch_npu counts no device: it only counts, and gives no reason."""
    if re.search(r"-80\d\d", npu_smi_says):
        return npu_hint(npu_smi_says)
    listed = len(re.findall(r"^\|\s*\d+\s+\S+\s*\|\s*(?:OK|Warning|Alarm|Critical|UNKNOWN)\b", npu_smi_says, re.M))
    devices = sorted(path.name for path in dev.glob("davinci*") if re.fullmatch(r"davinci\d+", path.name))
    if devices and (missing := [name for name in DEVICE_FILES if not (dev / name).exists()]):
        return f"this container lacks /dev/{missing[0]}: start it with {device_options(devices[0])}; {TRY_SIMULATOR}"
    if devices and not all(os.access(dev / name, os.R_OK | os.W_OK) for name in (*devices, *DEVICE_FILES)):
        return npu_hint("-8005")
    if devices or listed:
        return (f"devices here: {listed or len(devices)}, and ASCEND_RT_VISIBLE_DEVICES={visible} names another: "
                "they count from 0, whatever npu-smi info calls them: export ASCEND_RT_VISIBLE_DEVICES=0; "
                f"{TRY_SIMULATOR}")
    return (f"there is no /dev/davinci*: in a container, start it with {device_options('davinci0')}; on the host, "
            f"npu-smi info must list a device; {TRY_SIMULATOR}")


def device_options(device: str) -> str:
    return " ".join(f"--device /dev/{name}" for name in (device, *DEVICE_FILES))


def import_torch_npu(evidence: Evidence) -> tuple[Any, Any]:
    try:
        import torch

        usual_hint = evidence.crash_hint
        if torch.version.cuda:  # then torch_npu 2.13 and 2.14 may call abort(), and only the watcher is left to say why
            evidence.crash_hint = (f"torch_npu aborts beside a CUDA build of torch: install the CPU build of "
                                   f"{torch.__version__.partition('+')[0]}")
            evidence.tell_watcher()
        import torch_npu

        evidence.crash_hint = usual_hint
    except Exception as error:  # wheels that are no pair fail in many ways
        raise NpuUnavailable(f"torch_npu cannot be imported: {first_line(error)}",
                             npu_hint(f"{error} {error.__cause__}")) from error
    return torch, torch_npu


def first_line(error: BaseException) -> str:
    """The line of an error's text that tells most."""
    text = str(error.__cause__ if error.__cause__ and "backend extension" in str(error) else error).strip()
    # What the device said stands deep inside the texts that torch wraps around it.
    match = re.search(r"NPU function error:? .*?error code is \d+|WeightsUnpickler error: .*", text)
    return (match[0] if match else (text.splitlines() or [type(error).__name__])[0])[:300]


def simulator_version() -> str | None:
    """The version of the simulated CANN runtime, None on a real one: it names itself by an exported symbol."""
    try:
        library = ctypes.CDLL("libascendcl.so")  # the one that torch_npu has loaded
        function = library.cannsim_version
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_char_p
    return str(function().decode())


def device_is_deterministic() -> bool | None:
    """Whether the device was told to compute deterministically, None when it does not say.

    torch_npu since 2.13 (and later builds of 2.9 to 2.12) leaves it off for CANN before 8.5, whatever torch is set to.
    """
    value = ctypes.c_int64()
    try:
        failed = ctypes.CDLL("libascendcl.so").aclrtCtxGetSysParamOpt(0, ctypes.byref(value))  # ACL_OPT_DETERMINISTIC
    except (OSError, AttributeError):
        return None
    return None if failed else bool(value.value)


def versions(torch: Any, torch_npu: Any) -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"torch": torch.__version__, "torch_npu": torch_npu.__version__}
    for package in VERSIONS[7:]:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def cann_version(torch_npu: Any) -> str | None:
    """CANN's version from its runtime (torch_npu since 2.5, CANN since 8.1), else from its install files."""
    with contextlib.suppress(AttributeError, ImportError, RuntimeError):
        if version := torch_npu.npu.utils.get_cann_version("CANN"):
            return str(version)
    for root in filter(None, (os.environ.get("ASCEND_HOME_PATH"), os.environ.get("ASCEND_TOOLKIT_HOME"),
                              "/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann")):
        for name in (f"{platform.machine()}-linux/ascend_toolkit_install.info",
                     f"{platform.machine()}-linux/ascend_all_cann_install.info", "version.cfg"):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                if match := re.search(r"version=\[?(?:[\d.]+:)?([\w.]+)", (Path(root) / name).read_text()):
                    return match[1]
    return None


def driver_version() -> str | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        text = Path("/usr/local/Ascend/driver/version.info").read_text()
        if match := re.search(r"^package_version=(\S+)", text, re.M) or re.search(r"^Version=(\S+)", text, re.M):
            return match[1]
    return None


def device_nodes() -> list[str]:
    """The /dev/davinci* that this process holds open: what the kernel knows of it and the NPU."""
    links = {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
    return sorted(link for link in links if link.startswith("/dev/davinci"))


@contextlib.contextmanager
def no_cpu_fallback(evidence: Evidence) -> Iterator[None]:
    """Fail when torch_npu says on stderr that an operator ran on the CPU.

    Releases before TORCH_NPU_FALLBACK_CPU_DISABLE only warn, once per operator, from C++ and so past sys.stderr. What
    stands there is kept until the forward is over; a run that fails releases it in Evidence.conclude."""
    evidence.capture_stderr()
    yield
    text = evidence.release_stderr()
    if match := FALLBACK.search(text):
        line = text[text.rfind(b"\n", 0, match.start()) + 1:match.end()].decode("utf-8", "replace")
        raise ForwardFailed(f"an operator fell back to the CPU: {line[-300:]}",
                            "this torch_npu or CANN has no NPU kernel for it: update them")


# ---------------------------------------------------------------------------------------------------------------------
# Stage load
# ---------------------------------------------------------------------------------------------------------------------


def load(checkpoint: Checkpoint, torch: Any, evidence: Evidence, watcher: Watcher) -> PPO:
    """PPO.load onto npu:0 from the verified bytes; every parameter there, equal to the file's bit for bit."""
    watcher.enter("load", at_least_s=120)
    try:
        from stable_baselines3 import PPO
    except Exception as error:  # packages that do not fit each other fail in many ways
        raise LoadFailed(f"stable_baselines3 cannot be imported: {first_line(error)}",
                         "python3 -m pip install -r requirements.txt") from error
    watcher.enter("load")
    if tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2]) < (2, 6):
        raise LoadFailed(f"torch {torch.__version__} cannot load untrusted weights safely", "use torch 2.6 or newer")
    started = time.monotonic()
    try:
        objects = custom_objects(checkpoint, torch, PPO)
        with warnings.catch_warnings():
            # advice for training speed: here the NPU is the point
            warnings.filterwarnings("ignore", message="You are trying to run PPO on the GPU")
            model = PPO.load(io.BytesIO(checkpoint.raw), device=DEVICE, custom_objects=objects)
        torch.npu.synchronize()
    except ImportError as error:
        raise LoadFailed(first_line(error), "python3 -m pip install -r requirements.txt") from error
    except Exception as error:  # SB3 and gymnasium on untrusted input: any of a dozen kinds, none of them a bug here
        raise LoadFailed(f"PPO.load: {type(error).__name__}: {first_line(error)}",
                         f"the checkpoint and this SB3 do not fit, or the device failed: {DEVICE_HINT}") from error
    load_s = time.monotonic() - started
    model.policy.set_training_mode(False)
    model.policy.requires_grad_(False)
    evidence.result.update(load_s=round(load_s, 6), policy_class=type(model.policy).__name__,
                           model_device=str(model.policy.device))
    check_placement(model.policy, checkpoint.tensors, evidence)
    return model


class NoOptimizer:
    """In the optimizer's place: a run trains nothing, and torch.optim would import torch's compiler for a second."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def load_state_dict(self, *_: Any, **__: Any) -> None:
        pass


def custom_objects(checkpoint: Checkpoint, torch: Any, ppo_class: type[PPO]) -> dict[str, Any]:
    """A value for every key of `data` that is serialised or that steers SB3's loading, so that nothing is unpickled."""
    import gymnasium.spaces
    import numpy
    from stable_baselines3.common.policies import ActorCriticPolicy

    def box(description: Box) -> gymnasium.spaces.Box:
        dtype = numpy.dtype(description.dtype)
        low, high = (numpy.array(bound).astype(dtype).reshape(description.shape)
                     for bound in (description.low, description.high))
        return gymnasium.spaces.Box(low, high, description.shape, dtype.type)

    network, action = checkpoint.network, checkpoint.network.action
    action_space = box(action["box"]) if "box" in action else getattr(gymnasium.spaces, action["type"])(
        action.get("n") or action["nvec"])
    steering = {
        "policy_class": ActorCriticPolicy,
        # without the orthogonal initialisation: slow, and overwritten with the file's weights at once
        "policy_kwargs": {**network.policy_kwargs, "ortho_init": False,
                          "activation_fn": getattr(torch.nn, network.activation), "optimizer_class": NoOptimizer},
        "observation_space": box(network.observation),
        "action_space": action_space,
        "learning_rate": LEARNING_RATE, "lr_schedule": lambda _: LEARNING_RATE, "clip_range": CLIP_RANGE,
        "clip_range_vf": None,
        "device": torch.device(DEVICE),
        "env": None,  # a string here makes SB3 import the module that it names
        "seed": None,  # would reseed the global generators
        "n_steps": 1, "n_envs": 1,  # they size a rollout buffer that no forward needs
        "rollout_buffer_class": None, "rollout_buffer_kwargs": {}, "verbose": 0,
    }
    objects = {}
    for key, value in checkpoint.data.items():
        if hasattr(ppo_class, key):
            raise LoadFailed(f"data has the key {key[:80]!r}, which would replace a method of PPO")
        if key in steering:
            objects[key] = steering[key]
        elif isinstance(value, dict) and ":serialized:" in value:
            objects[key] = None  # state of the training (last observations, episode statistics)
    return objects


def check_placement(policy: Any, saved: dict[str, SavedTensor], evidence: Evidence) -> None:
    tensors = policy.state_dict()
    parameters = list(policy.parameters())
    devices = sorted({str(tensor.device) for tensor in (*parameters, *policy.buffers(), *tensors.values())})
    num_params = sum(parameter.numel() for parameter in parameters)
    all_on_npu = devices == [DEVICE]
    evidence.result.update(num_params=num_params, param_devices=devices, all_params_on_npu=all_on_npu)
    evidence.log("model")
    if not all_on_npu:
        raise LoadFailed(f"parameters are on {devices}, not on {DEVICE} alone", "this is a fault of SB3 or torch_npu")
    # Bit for bit: what PPO.load made of the file against what the file holds.
    differing = sorted(set(tensors) ^ set(saved)) or [
        name for name, tensor in tensors.items()
        if tuple(tensor.shape) != saved[name].shape or tensor.cpu().numpy().tobytes() != saved[name].content]
    evidence.result["params_match_checkpoint"] = not differing
    evidence.log("bits")
    if differing:
        raise LoadFailed(f"on {DEVICE}, these differ from the checkpoint: {', '.join(differing)[:200]}",
                         "the copy to the device is at fault, or the file overwrites its own weights")


# ---------------------------------------------------------------------------------------------------------------------
# Stage ready: the marker, the hold, and npu-smi
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """What one call of npu-smi printed, and what went wrong with it ("" for nothing)."""

    text: str
    problem: str
    detail: str = ""


@dataclass
class Process:
    """One row of npu-smi's process table."""

    npu: str
    chip: str
    pid: str
    pid_in_container: str  # "" where the column is absent or says NA
    line: str


def ready(args: argparse.Namespace, evidence: Evidence, watcher: Watcher) -> None:
    """Write the marker, hold, and look for this PID in npu-smi meanwhile. A PID that is not found fails no run."""
    watcher.enter("ready", at_least_s=args.hold_seconds + args.timeout_seconds)
    result = evidence.result
    ready_at = evidence.stage_started
    result.update(ready_at=evidence.now(ready_at), hold_seconds=args.hold_seconds)
    evidence.write("npu_ready.marker", marker_text(result).encode())
    evidence.log("marker")
    result["npu_smi"] = correlate(os.getpid(), lambda arguments: npu_smi(arguments, evidence))
    result["versions"]["driver"] = result["npu_smi"].pop("driver") or result["versions"]["driver"]
    evidence.log("npu_smi")
    evidence.countdown(ready_at + args.hold_seconds)


def marker_text(result: Result) -> str:
    return (f"NPU_READY_PID={result['pid']}\nDEVICE={result['npu_device']}\nHOLD_SECONDS={result['hold_seconds']}\n"
            f"READY_AT={result['ready_at']}\nSIMULATED={int(result['simulated'])}\n")


def correlate(pid: int, ask: Callable[[list[str]], Answer]) -> dict[str, Any]:
    """Whether npu-smi lists this PID, and if not, why not; `ask` calls npu-smi, or looks up what it once answered."""
    found: dict[str, Any] = {"captured": False, "pid_found": False, "pid_line": None, "matched_by": None,
                             "reason": None, "detail": None, "npu_id": None, "chip_id": None, "driver": None}
    info = ask(["info"])
    if info.problem:
        return {**found, "reason": info.problem, "detail": info.detail}
    found["captured"] = True
    if match := re.search(r"npu-smi\s+\S+\s+Version:\s*(\S+)", info.text):  # the tool's version, then the driver's
        found["driver"] = match[1]
    processes = read_process_table(info.text)
    if processes is None:
        return {**found, "reason": "no process table"}
    row, matched_by = find_process(pid, processes)
    if row is None:
        row, matched_by = find_beyond_cap(pid, processes, ask)
    if row is None:
        return {**found, "reason": "not listed"}
    return {**found, "pid_found": True, "pid_line": row.line, "matched_by": matched_by, "npu_id": row.npu,
            "chip_id": row.chip}


def read_process_table(text: str) -> list[Process] | None:
    """The rows of the process table of `npu-smi info`, None where it has no such table.

    Read by the names in its header row: the columns, their widths and the lines around the table differ between
    boards and drivers. The name cell is never looked at; since it may hold anything, the columns behind it are counted
    from the end.
    """
    header: list[str] = []
    processes: list[Process] = []
    for line in text.splitlines():
        cells = [" ".join(cell.split()) for cell in line.strip().split("|")[1:-1]]
        names = [cell.lower() for cell in cells]
        if "process id" in names:
            header = names
        elif header and len(cells) >= len(header) and (pid := cells[header.index("process id")]).isdecimal():
            inside = ""
            if "process id in container" in header:
                inside = cells[header.index("process id in container") - len(header)]
            npu, _, chip = cells[0].partition(" ")
            processes.append(Process(npu, chip, pid, inside if inside.isdecimal() else "", line.strip()))
    return processes if header else None


def find_process(pid: int, processes: list[Process]) -> tuple[Process | None, str | None]:
    """The row of this PID: by the container's column first. A row that has one belongs to that PID and no other."""
    for process in processes:
        if process.pid_in_container == str(pid):
            return process, "process id in container"
    for process in processes:
        if process.pid == str(pid) and not process.pid_in_container:
            return process, "process id"
    return None, None


def find_beyond_cap(pid: int, processes: list[Process],
                    ask: Callable[[list[str]], Answer]) -> tuple[Process | None, str | None]:
    """npu-smi info lists eight processes for a chip; its proc-mem query has no such cap."""
    for npu_id, chip in sorted({(process.npu, process.chip) for process in processes}):
        if sum((p.npu, p.chip) == (npu_id, chip) for p in processes) == NPU_SMI_MAX_PROCESSES:
            answer = ask(["info", "-t", "proc-mem", "-i", npu_id, *(["-c", chip] if chip else [])])
            for line in answer.text.splitlines() if not answer.problem else []:
                if re.search(rf"Process id\s*:\s*{pid}\b", line):
                    return Process(npu_id, chip, str(pid), "", line.strip()), "proc-mem"
    return None, None


def npu_smi(arguments: list[str], evidence: Evidence) -> Answer:
    """Call npu-smi, bounded in time and output, and keep the raw answer in npu_smi.log."""
    program = shutil.which("npu-smi") or shutil.which("npu-smi", path="/usr/local/bin:/usr/local/sbin")
    output, wrong = b"", "missing: it is not on PATH"
    if program is not None:
        try:
            output, wrong = bounded_output([program, *arguments], evidence)
        except OSError as error:
            wrong = str(error.strerror)
    heading = (f"# npu-smi {' '.join(arguments)} at={evidence.now()} bytes={len(output)} "
               f"outcome={wrong or 'exit code 0'}\n")
    evidence.append("npu_smi.log", heading.encode() + output + b"\n")
    return answer_of(output, wrong)


def version_of(answer: Answer) -> str | None:
    match = re.search(r"version\s*:?\s*(\d[\w.]*)", "" if answer.problem else answer.text, re.IGNORECASE)
    return match[1] if match else None


def answer_of(output: bytes, wrong: str) -> Answer:
    text = output.decode("utf-8", "replace")
    if not wrong:
        return Answer(text, "")
    lines = text.strip().splitlines()
    return Answer(text, "npu-smi missing" if wrong.startswith("missing") else "npu-smi failed",
                  wrong + (f": {lines[-1][:200]}" if lines else ""))


def recorded_answers(log: bytes) -> Iterator[tuple[str, str, Answer]]:
    """(arguments, time, answer) of each call in a npu_smi.log. Raises ValueError where it is none."""
    for number in itertools.count():
        if not log:
            return
        if number == 100:  # two, and one for each chip that is full
            raise ValueError("more calls than a run makes")
        heading, _, rest = log.partition(b"\n")
        match = re.fullmatch(r"# npu-smi (.*) at=(\S+) bytes=(\d+) outcome=(.*)", heading.decode())
        if not match or rest[int(match[3]):int(match[3]) + 1] != b"\n":
            raise ValueError(f"not the heading of a call: {heading[:80]!r}")
        size = int(match[3])
        yield match[1], match[2], answer_of(rest[:size], "" if match[4] == "exit code 0" else match[4])
        log = rest[size + 1:]


def bounded_output(command: list[str], evidence: Evidence) -> tuple[bytes, str]:
    """What a command printed, and "" or what was wrong with how it ended."""
    read_end, write_end = os.pipe()
    with open(read_end, "rb", buffering=0) as pipe:
        try:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=write_end, stderr=subprocess.STDOUT,
                                     start_new_session=True)
        finally:
            os.close(write_end)
        evidence.npu_smi_pid = child.pid
        # A slow npu-smi is no hung device: the time that it takes does not count.
        started, until = time.monotonic(), evidence.deadline
        evidence.deadline = max(until, started + 2 * NPU_SMI_TIMEOUT_S)
        evidence.tell_watcher()
        deadline = started + NPU_SMI_TIMEOUT_S
        output, wrong = b"", ""
        while not wrong:
            ended = child.poll() is not None  # asked before the pipe: what it has written by its end is in there
            if ready_of([read_end], 0.0 if ended else 0.1):
                piece = os.read(pipe.fileno(), 65536)
                output += piece
                if not piece:
                    break
            elif ended:
                break  # a process that it started may keep the pipe open
            if len(output) > NPU_SMI_MAX_BYTES:
                wrong = f"more than {NPU_SMI_MAX_BYTES} bytes"
            elif time.monotonic() > deadline:
                wrong = f"no answer within {NPU_SMI_TIMEOUT_S:.0f} s"
    if not wrong:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0.1, deadline - time.monotonic()))
    if child.poll() is None:
        wrong = wrong or "closed its output but did not end"
    end_group(child.pid)
    child.wait()
    evidence.npu_smi_pid = 0
    evidence.deadline = until + time.monotonic() - started
    evidence.tell_watcher()
    if not wrong and child.returncode:
        wrong = f"exit code {child.returncode}"
    return output[:NPU_SMI_MAX_BYTES], wrong


# ---------------------------------------------------------------------------------------------------------------------
# Stage forward
# ---------------------------------------------------------------------------------------------------------------------


def forward(args: argparse.Namespace, model: PPO, checkpoint: Checkpoint, observations: numpy.ndarray[Any, Any],
            torch: Any, evidence: Evidence, watcher: Watcher) -> None:
    """One deterministic pass over the observations on npu:0; the first chunk, mostly all of them, twice."""
    import numpy

    result = evidence.result
    watcher.enter("forward")
    passes = Passes(model.policy, torch)
    reference = CpuReference(model, args.tolerance, torch) if args.compare_cpu else None
    outputs = OutputsFile(evidence) if args.observations else None
    done, started, reported = 0, time.monotonic(), time.monotonic()
    step = chunk_rows(observations.shape[1:]) if outputs else len(observations)
    while done < len(observations):
        chunk = numpy.array(observations[done:done + step])
        watcher.enter("forward")
        values = passes.run(chunk, counted=True)
        if done == 0:
            again = passes.run(chunk)
            result.update(observation=chunk[:SHOWN_ROWS if outputs else None].tolist(), repeated_rows=len(chunk),
                          bitwise_repeatable=all(values[n].tobytes() == again[n].tobytes() for n in values))
            result.update({name: array[:len(result["observation"])].tolist() for name, array in values.items()})
            benchmark_reference = chunk
        if outputs:
            outputs.append(values)
        if reference:
            reference.compare(chunk, values)
        done += len(chunk)
        if time.monotonic() - reported > PROGRESS_S:
            reported = time.monotonic()
            rate = done / (reported - started)
            evidence.say(f"[forward] rows={done}/{len(observations)} rows_per_s={rate:.0f} "
                         f"left={(len(observations) - done) / rate:.0f}s")
    if outputs:
        watcher.enter("forward", at_least_s=math.inf)  # nor is a slow disk
        outputs.save()
    watcher.enter("forward")
    devices = sorted({description["device"] for description in passes.outputs.values()})
    result.update(forward_s=round(passes.seconds, 6), input_device=passes.input_device, outputs=passes.outputs,
                  output_device=devices[0] if len(devices) == 1 else devices, all_outputs_on_npu=devices == [DEVICE],
                  action_space=describe_action_space(model.policy, checkpoint.network.action))
    evidence.log("outputs")
    if result["input_device"] != DEVICE or not result["all_outputs_on_npu"]:
        raise ForwardFailed(f"input on {result['input_device']}, outputs on {devices}: not all on {DEVICE}",
                            "this is a fault of SB3 or torch_npu")
    if not result["bitwise_repeatable"]:
        raise ForwardFailed("two passes over the same observations differ", "the device or a kernel is at fault")
    if checkpoint.pinned and result["observation"] == [[0.0, 0.0, 0.0, 0.0]]:
        result["reference"] = compare_with_published(result)
        evidence.log("reference")
        if not result["reference"]["within_tolerance"]:
            raise ForwardFailed(f"the result differs from the published one: {result['reference']['max_abs_diff']}",
                                "another chip may differ in the last bits, not by this much: the port is at fault")
    if reference:
        reference.conclude(evidence)
    if args.benchmark:
        benchmark(args.benchmark, args.tolerance, passes, benchmark_reference, evidence, watcher)


class Passes:
    """Passes of observations through the policy on npu:0, and what was seen of them."""

    def __init__(self, policy: Any, torch: Any) -> None:
        self.policy, self.torch = policy, torch
        self.seconds = 0.0  # of the counted passes, each until the device had finished
        self.input_device = ""
        self.outputs: dict[str, dict[str, Any]] = {}  # dtype, shape and device by name

    def run(self, chunk: numpy.ndarray[Any, Any], counted: bool = False) -> dict[str, numpy.ndarray[Any, Any]]:
        """One pass over float32 observations (n, *shape). Raises ForwardFailed unless all that it gives is finite.

        A pass that is `counted` belongs to the evidence: its time, and the devices and shapes that it saw.
        """
        with self.torch.inference_mode():
            started = time.monotonic()
            observations = self.torch.from_numpy(chunk).to(DEVICE)
            outputs = policy_outputs(self.policy, observations, self.torch)
            if counted:
                self.torch.npu.synchronize()
                self.seconds += time.monotonic() - started
                self.note(observations, outputs)
            return to_host(side_by_side(outputs, self.torch), layout_of(outputs))

    def note(self, observations: torch.Tensor, outputs: dict[str, torch.Tensor]) -> None:
        self.input_device = str(observations.device)
        for name, tensor in outputs.items():
            rows = self.outputs[name]["shape"][0] if name in self.outputs else 0
            device = self.outputs[name]["device"] if rows else DEVICE
            self.outputs[name] = {"dtype": str(tensor.dtype), "shape": [rows + len(tensor), *tensor.shape[1:]],
                                  "device": str(tensor.device) if device == DEVICE else device}

    def recorded(self, chunk: numpy.ndarray[Any, Any]) -> Callable[[numpy.ndarray[Any, Any]], Any]:
        """A function like `run`, for as many rows: it launches the same kernels in the same order without the Python
        of SB3 and torch.distributions around them, which for one observation takes a third of the time."""
        layout: Layout = {}

        def one_pass(observations: torch.Tensor) -> torch.Tensor:
            outputs = policy_outputs(self.policy, observations, self.torch)
            layout.update(layout_of(outputs))
            return side_by_side(outputs, self.torch)

        def replay(chunk: numpy.ndarray[Any, Any]) -> dict[str, numpy.ndarray[Any, Any]]:
            with self.torch.inference_mode():
                return to_host(operators(self.torch.from_numpy(chunk).to(DEVICE)), layout)

        with self.torch.inference_mode(), warnings.catch_warnings():
            for category in (self.torch.jit.TracerWarning, DeprecationWarning):  # a shape may well become a constant
                warnings.simplefilter("ignore", category)
            operators = self.torch.jit.trace(one_pass, self.torch.from_numpy(chunk).to(DEVICE), check_trace=False)
        if not isinstance(operators, self.torch.jit.ScriptFunction):
            raise ForwardFailed("torch.jit.trace recorded nothing", "unset the variables PYTORCH_JIT*")
        return replay


class OutputsFile:
    """npu_outputs.npz: each output as one array over all rows. Written as the rows come, so that memory stays flat."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.parts: dict[str, tuple[IO[bytes], numpy.ndarray[Any, Any]]] = {}  # raw rows, the first of them

    def append(self, values: dict[str, numpy.ndarray[Any, Any]]) -> None:
        with writing(OUTPUTS_FILE):
            for name, array in values.items():
                if name not in self.parts:
                    file = tempfile.TemporaryFile(dir=self.evidence.dir)  # noqa: SIM115 (open until save)
                    self.parts[name] = (file, array[:1].copy())
                self.parts[name][0].write(array.tobytes())

    def save(self) -> None:
        import numpy

        def write(target: IO[bytes]) -> None:
            with zipfile.ZipFile(target, "w") as archive:
                for name, (file, sample) in self.parts.items():
                    # a fixed date: the same outputs give the same bytes
                    with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                        header = {"descr": numpy.lib.format.dtype_to_descr(sample.dtype), "fortran_order": False,
                                  "shape": (file.tell() // sample.nbytes, *sample.shape[1:])}
                        numpy.lib.format.write_array_header_1_0(member, header)
                        file.seek(0)
                        shutil.copyfileobj(file, member, 1 << 20)
        self.evidence.write(OUTPUTS_FILE, write)


def policy_outputs(policy: Any, observations: torch.Tensor, torch: Any) -> dict[str, torch.Tensor]:
    """Everything that one deterministic pass gives, as tensors on the device of `observations`.

    For n observations: action (n, *action shape), value (n, 1), log_prob (n,), entropy (n,); probs and logits
    (n, choices) where actions are categorical or binary, MultiDiscrete's side by side; mean and std (n, size) of a
    Gaussian, and env_action, the action as `PPO.predict` would hand it to the environment: clipped to the space, or
    scaled to it when the policy squashes. A squashed Gaussian has no entropy in closed form.
    """
    action, value, log_prob = policy(observations, deterministic=True)
    outputs = {"action": action, "value": value, "log_prob": log_prob}
    # policy.forward leaves the distribution that it built in action_dist: no second pass for the rest.
    entropy = policy.action_dist.entropy()
    if entropy is not None:
        outputs["entropy"] = entropy
    distribution = policy.action_dist.distribution
    if isinstance(distribution, list):  # MultiDiscrete: one categorical each
        outputs["probs"] = torch.cat([choice.probs for choice in distribution], dim=1)
        outputs["logits"] = torch.cat([choice.logits for choice in distribution], dim=1)
    elif hasattr(distribution, "probs"):
        outputs.update(probs=distribution.probs, logits=distribution.logits)
    else:
        outputs.update(mean=distribution.mean, std=distribution.stddev)
        low, high = (torch.as_tensor(bound, dtype=action.dtype).to(action.device)
                     for bound in (policy.action_space.low, policy.action_space.high))
        outputs["env_action"] = (low + 0.5 * (action + 1.0) * (high - low) if policy.squash_output
                                 else torch.clamp(action, low, high))
    return outputs


def side_by_side(outputs: dict[str, torch.Tensor], torch: Any) -> torch.Tensor:
    """All outputs as columns of one float32 tensor (n, total), so that a single copy brings them to the host.

    An integer action stays exact: no checkpoint of MAX_CHECKPOINT_BYTES has weights for more than 2**24 choices.
    """
    columns = [tensor.reshape(len(tensor), -1).float() for tensor in outputs.values()]
    return torch.cat(columns, dim=1)  # type: ignore[no-any-return]


Layout = dict[str, tuple[tuple[int, ...], bool]]  # of each output its shape, and whether it holds integers


def layout_of(outputs: dict[str, torch.Tensor]) -> Layout:
    return {name: (tuple(map(int, tensor.shape)), not tensor.is_floating_point())  # tensors while torch.jit traces
            for name, tensor in outputs.items()}


def to_host(joined: torch.Tensor, layout: Layout) -> dict[str, numpy.ndarray[Any, Any]]:
    """The outputs as numpy arrays, cut from what `side_by_side` made.

    Raises ForwardFailed unless all are finite: one check in the place of torch's validation of distributions.
    """
    import numpy

    array = joined.cpu().numpy()
    values, start = {}, 0
    for name, (shape, integers) in layout.items():
        end = start + math.prod(shape[1:])
        values[name] = array[:, start:end].reshape(shape)
        if integers:
            values[name] = values[name].astype(numpy.int64)
        start = end
    if not numpy.isfinite(array).all():
        wrong = ", ".join(name for name, part in values.items() if not numpy.isfinite(part).all())
        raise ForwardFailed(f"{wrong} is NaN or infinite", "the weights overflow on these observations")
    return values


def describe_action_space(policy: Any, action: dict[str, Any]) -> dict[str, Any]:
    if "box" not in action:
        return action
    # null for an infinite bound, which JSON has no number for
    low, high = ([float(bound) if math.isfinite(bound) else None for bound in array.reshape(-1).tolist()]
                 for array in (policy.action_space.low, policy.action_space.high))
    return {"type": "Box", "shape": list(policy.action_space.shape), "low": low, "high": high,
            "squashed": policy.squash_output}


def compare_with_published(result: dict[str, Any]) -> dict[str, Any]:
    """The result for the zero observation against the published one: same action, the rest within TOLERANCE."""
    differences = {name: max(abs(ours - theirs) for ours, theirs in zip(flat(result[name]), flat(wanted), strict=True))
                   for name, wanted in PUBLISHED.items() if name != "action"}
    equal, scale = result["action"] == PUBLISHED["action"], {"value": PUBLISHED["value"][0][0]}
    within = equal and all(difference <= TOLERANCE * scale.get(name, 1.0) for name, difference in differences.items())
    return {"name": "published", "tolerance": TOLERANCE, "within_tolerance": within, "action_equal": equal,
            "max_abs_diff": differences}


def flat(value: Any) -> list[float]:
    return [number for part in value for number in flat(part)] if isinstance(value, list) else [value]


# ---------------------------------------------------------------------------------------------------------------------
# Beside the evidence: the CPU as a reference, and times
# ---------------------------------------------------------------------------------------------------------------------


SATURATED = 3.0  # where a mean is that large, atanh(tanh(mean)) is lost in float32, and a squashed log_prob with it


class CpuReference:
    """The same weights and observations on the CPU: a reference for the NPU's outputs, never their source."""

    def __init__(self, model: PPO, tolerance: float, torch: Any) -> None:
        self.torch, self.tolerance = torch, tolerance
        self.policy = type(model.policy)(model.observation_space, model.action_space, model.lr_schedule,
                                         use_sde=model.use_sde, **model.policy_kwargs)
        self.policy.load_state_dict({name: tensor.cpu() for name, tensor in model.policy.state_dict().items()})
        self.policy.set_training_mode(False)
        self.rows = self.agreeing = self.ties = 0
        self.largest: dict[str, Any] = {}  # by output: the largest difference, and the largest beside the tolerance
        self.sums: dict[str, Any] = {}  # of differences, numbers, products, and both squares

    def compare(self, chunk: numpy.ndarray[Any, Any], npu: dict[str, numpy.ndarray[Any, Any]]) -> None:
        import numpy

        with self.torch.no_grad():
            cpu = {name: tensor.numpy() for name, tensor in policy_outputs(
                self.policy, self.torch.from_numpy(chunk), self.torch).items()}
            is_choice = "probs" in cpu  # a Gaussian action is a number like the others
            differ, ties = numpy.zeros(len(chunk), bool), numpy.zeros(len(chunk), bool)
            if is_choice:
                # Where the CPU finds both actions as likely, the choice between them is a tie and no disagreement.
                chosen = self.policy.action_dist.log_prob(self.torch.from_numpy(npu["action"])).numpy()
                ties = numpy.abs(chosen - cpu["log_prob"]) <= self.tolerance
        for name, array in cpu.items():
            ours, theirs = npu[name].astype(numpy.float64), array.astype(numpy.float64)
            if not numpy.isfinite(theirs).all():
                raise ForwardFailed(f"{name} is NaN or infinite on the CPU, and not on the NPU",
                                    "the NPU saturates, or computes something else")
            difference = numpy.abs(ours - theirs)
            beside = difference / numpy.maximum(1.0, numpy.abs(theirs))
            if name == "action":
                differ = (difference if is_choice else beside > self.tolerance).reshape(len(chunk), -1).any(axis=1)
                beside = beside * (not is_choice)
            elif name == "log_prob" and self.policy.squash_output:
                beside = beside * (numpy.abs(cpu["mean"]).max(axis=1) < SATURATED)
            self.largest[name] = numpy.maximum(self.largest.get(name, 0.0), [difference.max(), beside.max()])
            self.sums[name] = self.sums.get(name, 0.0) + numpy.array(
                [difference.sum(), difference.size, (ours * theirs).sum(), (ours**2).sum(), (theirs**2).sum()])
        self.rows += len(chunk)
        self.agreeing += int((~differ).sum())
        self.ties += int((differ & ties).sum())

    def conclude(self, evidence: Evidence) -> None:
        """Into the result and the log; raises ForwardFailed where the NPU is outside the tolerance."""
        outputs = {}
        for name, (total, count, dot, ours, theirs) in self.sums.items():
            outputs[name] = {"max_abs_diff": float(self.largest[name][0]), "mean_abs_diff": float(total / count),
                             "cosine": float(dot / math.sqrt(ours * theirs)) if ours and theirs else None}
        worst = max(float(beside) for _, beside in self.largest.values())
        within = worst <= self.tolerance and self.agreeing + self.ties == self.rows
        evidence.result["cpu_reference"] = {
            "rows": self.rows, "tolerance": self.tolerance, "within_tolerance": within,
            "action_agreement": self.agreeing / self.rows, "ties": self.ties, "outputs": outputs}
        evidence.log("cpu_reference")
        if not within:
            raise ForwardFailed(f"the NPU differs from the CPU by {worst:.3g}, tolerance {self.tolerance}; actions "
                                f"agree in {self.agreeing} of {self.rows} rows",
                                "910A and 310P compute in float16: allow for it with --tolerance")


BENCHMARK_WARM_UP = 10
BENCHMARK_BATCHES = (1, 16, 256, 4096)
BENCHMARK_BATCH_PASSES = 20


def benchmark_batches(shape: tuple[int, ...]) -> list[int]:
    """Those that need no more memory than the passes over a file."""
    return [batch for batch in BENCHMARK_BATCHES if batch <= chunk_rows(shape)]


def benchmark(passes_wanted: int, tolerance: float, passes: Passes, chunk: numpy.ndarray[Any, Any], evidence: Evidence,
              watcher: Watcher) -> None:
    """Warm passes, from observations on the host to all outputs on the host, and the outputs of each pass checked.

    `single` and `batches` time the recorded operators, `eager` one observation through SB3's methods, as in the
    evidence. Every pass gets another observation than the one before, so that a forward that is cached or skipped gives
    a wrong answer and is found.
    """
    import numpy

    random = numpy.random.default_rng(0)
    watcher.enter("benchmark")
    tolerance = min(tolerance, 0.1)
    varied = numpy.repeat(chunk[:1], 8, axis=0)  # the first stays the observation of the evidence
    amounts = random.uniform(-1.0, 1.0, varied[1:].shape)  # a large number only shrinks, so that nothing overflows
    varied[1:] = numpy.where(numpy.abs(varied[1:]) > 1.0, varied[1:] * numpy.abs(amounts), varied[1:] + amounts)
    expected = [passes.run(varied[i:i + 1]) for i in range(len(varied))]
    slack = {name: 0.0 if name == "action" and "probs" in expected[0] else tolerance for name in expected[0]}
    if not numpy.allclose(expected[0]["action"][0], evidence.result["action"][0], slack["action"], slack["action"]):
        raise ForwardFailed("the benchmark's action is not the evidence's", "the device or a kernel is at fault")
    if len({b"".join(array.tobytes() for array in values.values()) for values in expected}) == 1:
        raise ForwardFailed(f"the benchmark's {len(varied)} observations all gave the same outputs",
                            "a forward was cached or skipped; or the network is constant, and nothing to measure")

    def timed(batch: int, times: int, eager: bool = False) -> dict[str, Any]:
        one_pass = passes.run if eager else passes.recorded(varied[numpy.arange(batch) % len(varied)])
        seconds = []
        for number in range(BENCHMARK_WARM_UP + times):
            if number % 1000 == 0:
                watcher.enter("benchmark")
            which = (numpy.arange(batch) + number) % len(varied)
            observations = varied[which]
            started = time.perf_counter()
            values = one_pass(observations)
            seconds.append(time.perf_counter() - started)
            for name, array in values.items():
                wanted = numpy.concatenate([expected[i][name] for i in which])
                # sums differ a little between batch shapes, and more where they are float16
                if not numpy.allclose(array, wanted, slack[name], slack[name]):
                    raise ForwardFailed(f"pass {number} of the benchmark gave another {name} than before",
                                        "a forward was cached or skipped, or the device is at fault")
        seconds = seconds[BENCHMARK_WARM_UP:]
        p50, p90, p99 = (float(numpy.percentile(seconds, q)) for q in (50, 90, 99))
        return {"batch": batch, "passes": times, "p50_s": p50, "p90_s": p90, "p99_s": p99,
                "mean_s": float(numpy.mean(seconds)), "rows_per_s": batch / float(numpy.mean(seconds))}

    few = min(passes_wanted, BENCHMARK_BATCH_PASSES)
    evidence.result["benchmark"] = {
        "simulated": evidence.result["simulated"], "warm_up_passes": BENCHMARK_WARM_UP, "actions_equal_evidence": True,
        "single": timed(1, passes_wanted), "eager": timed(1, few, eager=True),
        "batches": [timed(batch, few) for batch in benchmark_batches(chunk.shape[1:])]}
    evidence.log("times")


# ---------------------------------------------------------------------------------------------------------------------
# Stage final, and the run as a whole
# ---------------------------------------------------------------------------------------------------------------------


def final(torch: Any, evidence: Evidence, watcher: Watcher) -> None:
    watcher.enter("final")
    torch.npu.synchronize()  # an error that is still on its way ends the run here
    # torch's allocator retries a failed allocation and says nothing; a device that failed once is no witness.
    retries = torch.npu.memory_stats()["num_alloc_retries"]
    if retries:
        raise ForwardFailed(f"{retries} allocations of device memory failed and were tried again",
                            "the device is full or at fault: npu-smi info shows its memory")
    evidence.commit()


def run(args: argparse.Namespace, evidence: Evidence, watcher: Watcher) -> None:
    """All stages. Returns only when the evidence of a good run is committed."""
    watcher.enter("verify", at_least_s=math.inf)  # no device yet, and a fetch may be slow
    checkpoint = verify(args, evidence)
    observations = read_observations(args, checkpoint.network.observation.shape, evidence)
    watcher.enter("npu", at_least_s=120)
    prepare_environment(evidence)
    with no_cpu_fallback(evidence):
        torch = npu(evidence, watcher)
        watcher.catch_signals()
        model = load(checkpoint, torch, evidence, watcher)
        ready(args, evidence, watcher)
        forward(args, model, checkpoint, observations, torch, evidence, watcher)
    final(torch, evidence, watcher)


STAGE_FAILURES = {
    "verify": CheckpointRejected, "npu": NpuUnavailable, "load": LoadFailed, "ready": LoadFailed,
    "forward": ForwardFailed, "benchmark": ForwardFailed, "final": ForwardFailed}
STAGES = list(STAGE_FAILURES)


# ---------------------------------------------------------------------------------------------------------------------
# --check: everything in an evidence set that can be recomputed, without torch
# ---------------------------------------------------------------------------------------------------------------------

CHECK_TOLERANCE = 2e-3  # of recomputed float32 values; some chips compute them in float16
MAX_TEXT_BYTES = 256 << 20  # of the result, the log, the marker and what npu-smi printed
CLOCK_TOLERANCE_S = 2e-5  # of sums of times, each rounded to the microsecond
FAILURE_CODES = {failure.__name__: failure.code for failure in Failure.__subclasses__()}
ACTION_SPACE_FORMS: dict[str, Any] = {
    "Discrete": {"type": str, "n": int}, "MultiBinary": {"type": str, "n": int},
    "MultiDiscrete": {"type": str, "nvec": [int]},
    "Box": {"type": str, "shape": [int], "low": list, "high": list, "squashed": bool},
}


def check(directory: Path) -> int:
    """Print every gate with PASS or FAIL, and then the verdict. Returns 0 for VALID, 8 for all else.

    A forger who rewrites all files consistently passes: the gates show that a set is whole, not who made it.
    """
    try:
        for name in (RESULT_FILE, *EVIDENCE_FILES):
            refuse_odd_file(directory / name)
        result = read_result(directory / RESULT_FILE)
    except (OSError, ValueError, RecursionError) as error:
        say(f"FAIL  {RESULT_FILE}: {ascii(str(error)[:500])[1:-1]}")
        say("INVALID")
        return 8
    valid = True
    for name, (stage, gate) in GATES.items():
        try:
            if stage and not completed(result, stage):
                continue
            reason = "; ".join(gate(result, directory))
        except Exception as error:  # noqa: BLE001 (a gate computes with whatever a forged set holds)
            reason = f"{type(error).__name__}: {error}"
        valid = valid and not reason
        say(f"FAIL  {name}: {ascii(reason[:500])[1:-1]}" if reason else f"PASS  {name}")
    good_run = result.get("exit_code") == 0
    for note in notes(result) if valid and sys.stderr else ():
        say(f"NOTE  {ascii(note)[1:-1]}", sys.stderr)
    say("INVALID" if not valid else "VALID" if good_run else "FAILED RUN")
    return 0 if valid and good_run else 8


def say(line: str, stream: Any = None) -> None:
    """Print, and do not mind when nobody reads: the exit code has the verdict as well."""
    try:
        print(line, file=stream, flush=True)
    except OSError:  # what is left in the buffer must not fail again at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), (stream or sys.stdout).fileno())


def notes(r: Result) -> Iterator[str]:
    """What a whole and consistent set does not show."""
    if r["error"]:
        yield f"the run failed in stage {r['error']['stage']}: {r['error']['message']}"
    if r["simulated"]:
        yield "simulated: nothing in this set is about a physical NPU"
    if completed(r, "ready") and not r["npu_smi"]["pid_found"]:
        yield f"npu-smi did not list the process: {r['npu_smi']['reason']}"
    if completed(r, "forward") and r["reference"] is None and r["cpu_reference"] is None:
        yield "the outputs were compared with nothing: that they are right is not shown (--compare-cpu)"


def refuse_odd_file(path: Path) -> None:
    """A pipe or a device in the place of a file would be read for ever."""
    if os.path.lexists(path) and not path.is_file():
        raise ValueError(f"{path.name} is not a regular file")
    if path.name != OUTPUTS_FILE and path.is_file() and path.stat().st_size > MAX_TEXT_BYTES:
        raise ValueError(f"{path.name} has more than {MAX_TEXT_BYTES} bytes")


def read_result(path: Path) -> Result:
    def no_constant(name: str) -> Any:
        raise ValueError(f"{name} is no number of JSON")

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError("a key stands twice")
        return dict(pairs)

    def finite(text: str) -> float:
        return float(text) if math.isfinite(float(text)) else no_constant(text)

    result = json.loads(path.read_text("utf-8"), parse_constant=no_constant, parse_float=finite,
                        object_pairs_hook=no_duplicates)
    if not isinstance(result, dict):
        raise ValueError("not a JSON object")
    return result


def completed(r: Result, stage: str) -> bool:
    """Whether the run got past this stage."""
    return r["error"] is None or (
        r["error"]["stage"] in STAGES and STAGES.index(stage) < STAGES.index(r["error"]["stage"]))


def unequal(**pairs: tuple[Any, Any]) -> Iterator[str]:
    """What differs. Compared as text: True is not 1 here, nor 1 the same as 1.0."""
    return (f"{name} is {found!r}, expected {expected!r}" for name, (found, expected) in pairs.items()
            if repr(found) != repr(expected))


def misfits(value: Any, form: Any, path: str, partial: bool = False) -> Iterator[str]:
    """Where a value is not of its form (see RESULT_FORMS); `partial`: its parts may be null."""
    names = {name.rstrip("?"): name for name in form} if isinstance(form, dict) else {}
    if names and type(value) is dict and ("*" in form or set(value) == set(names)):
        for key, item in value.items():
            name = names.get(key, "*")
            if item is not None or not (partial or name.endswith("?")):
                yield from misfits(item, form[name], f"{path}.{key}", partial)
    elif isinstance(form, list) and type(value) is list:
        for item in value:
            yield from misfits(item, form[0], f"{path}[]")
    elif names or isinstance(form, list) or type(value) is not form:
        yield path


def gate_keys(r: Result, _: Path) -> Iterator[str]:
    forms = {name: form for forms in RESULT_FORMS.values() for name, form in forms.items()}
    wrong = [*misfits(r, forms, "result", partial=r["error"] is not None)]
    if (space := r["action_space"]) is not None:
        wrong += misfits(space, ACTION_SPACE_FORMS[space["type"]], "action_space")
        wrong += [f"action_space.{name}" for name in ("low", "high") for bound in space.get(name, [])
                  if type(bound) not in (float, type(None))]
    yield from unequal(misfits=(wrong, []), schema=(r["schema"], SCHEMA), argv0=(r["argv"][0], "inference.py"))


def gate_outcome(r: Result, _: Path) -> Iterator[str]:
    """Exit code 0 and no error, or the exit code of the error, which belongs to the last stage."""
    error, stages = r["error"], r["stages"] or []
    outcomes = [stage["outcome"] for stage in stages]
    if error is None:
        return unequal(exit_code=(r["exit_code"], 0), outcomes=(outcomes, ["ok"] * len(stages)))
    signals = {f"interrupted by {s.name}": 128 + s for s in SIGNALS}
    code = signals.get(error["message"], 1) if error["type"] == "Interrupted" else FAILURE_CODES.get(error["type"], 1)
    return unequal(exit_code=(r["exit_code"], int(code)), outcomes=(outcomes, ["ok"] * (len(stages) - 1) + ["failed"]
                                                                    if stages else []),
                   stage=(error["stage"], stages[-1]["name"] if stages else "start"))


def gate_stages(r: Result, _: Path) -> Iterator[str]:
    """Each stage that the run completed has left its claims, and none that it did not reach has left any."""
    reached = [stage["name"] for stage in r["stages"] or []]
    claimed = [key for key, stage in STAGE_OF_KEY.items() if stage and stage not in reached and r[key] is not None]
    claimed += [name for name in VERSIONS[2:] if "npu" not in reached and r["versions"][name] is not None]
    lacking = [name for stage, keys in RESULT_FORMS.items() if not stage or (stage in reached and completed(r, stage))
               for name in keys if not name.endswith("?") and r[name] is None]
    return unequal(claimed=(claimed, []), lacking=(lacking, [] if reached else ["stages"]))


def gate_times(r: Result, _: Path) -> Iterator[str]:
    """All times follow from each other: the stages follow without a gap and make up the whole."""
    moments = {key: datetime.fromisoformat(r[key]) for key in ("started_at", "ready_at", "finished_at")
               if r[key] is not None}
    passed = {key: (moment - moments["started_at"]).total_seconds() for key, moment in moments.items()}
    took = {stage["name"]: stage["elapsed_s"] for stage in r["stages"] or []}
    stages = [name for name in STAGES if name != "benchmark" or name in took]
    yield from unequal(
        utc=([r[key] for key in moments], [moment.astimezone(timezone.utc).isoformat(timespec="microseconds")
                                           for moment in moments.values()]),
        stages=([stage["name"] for stage in r["stages"] or []],
                stages[:len(r["stages"] or [])] if r["error"] else stages),
        total=(abs(passed["finished_at"] - r["total_s"]) < CLOCK_TOLERANCE_S, True),
        sum=(abs(sum(took.values()) - r["total_s"]) < CLOCK_TOLERANCE_S or not took, True),
        positive=(all(elapsed >= 0 for elapsed in (r["total_s"], *took.values())), True))
    if "ready_at" in passed:
        before = sum(took[name] for name in STAGES[:STAGES.index("ready")])
        yield from unequal(ready=(abs(passed["ready_at"] - before) < CLOCK_TOLERANCE_S, True))
    for key, stage in (("hold_seconds", "ready"), ("load_s", "load"), ("forward_s", "forward")):
        if completed(r, stage):
            yield from unequal(**{key: (0 <= r[key] <= took[stage] + CLOCK_TOLERANCE_S, True)})


def gate_files(r: Result, directory: Path) -> Iterator[str]:
    """Each file has the digest that the result names, and there is no other."""
    digests = {name: sha256_of(directory / name) for name in EVIDENCE_FILES if (directory / name).exists()}
    wanted = [*EVIDENCE_FILES[:3], *([OUTPUTS_FILE] if r["observations"] else [])]
    yield from unequal(**{name: (r["files"].get(name), digests.get(name)) for name in sorted({*r["files"], *digests})})
    if r["exit_code"] == 0:
        yield from unequal(present=(list(digests), wanted))
    if directory.resolve() == (PROJECT / "logs").resolve() and (PROJECT / "SHA256SUMS").exists():
        listed = {line[66:]: line[:64] for line in (PROJECT / "SHA256SUMS").read_text("utf-8").splitlines()}
        for name, digest in {**digests, RESULT_FILE: sha256_of(directory / RESULT_FILE)}.items():
            if listed.get(f"logs/{name}") != digest:
                yield f"lacks {name} as in SHA256SUMS"


def gate_script(r: Result, _: Path) -> Iterator[str]:
    return unequal(script_sha256=(r["script_sha256"], sha256_of(Path(__file__))))


def gate_checkpoint(r: Result, _: Path) -> Iterator[str]:
    checkpoint = r["checkpoint"]
    pinned = checkpoint["sha256"] == CHECKPOINT_SHA256
    on_disk, size = checkpoint["sha256"], checkpoint["bytes"]
    path = Path(os.path.normpath(PROJECT / checkpoint["path"]))
    # A name that was typed outside the project may be another file here, and a forger may name any of the reader's.
    typed = any(argument.partition("=")[0] == "--checkpoint" for argument in r["argv"])
    if not (typed and r["cwd"] == "outside the project") and path.is_relative_to(PROJECT) and path.is_file() \
            and path.stat().st_size <= MAX_CHECKPOINT_BYTES:
        on_disk, size = sha256_of(path), path.stat().st_size
    return unequal(
        sha256=(checkpoint["sha256"], on_disk), bytes=(checkpoint["bytes"], CHECKPOINT_BYTES if pinned else size),
        size_ok=(checkpoint["size_ok"], True), sha256_ok=(checkpoint["sha256_ok"], True),
        identity=([r["model_id"], r["source_revision"], r["license"]],
                  [MODEL_ID, SOURCE_REVISION, LICENSE] if pinned else [None] * 3),
        hexadecimal=(bool(re.fullmatch("[0-9a-f]{64}", checkpoint["sha256"])), True))


def gate_argv(r: Result, _: Path) -> Iterator[str]:
    """The command line, parsed again, asks for what the result says was done."""
    args: Any
    try:
        args = create_parser(add_help=False).parse_args(r["argv"][1:])
    except UsageError as error:
        args = error
    if r["error"] and r["error"]["stage"] == "start":
        return unequal(wrong=(isinstance(args, UsageError) or r["error"]["type"] != "UsageError", True))
    if isinstance(args, UsageError):
        return iter([str(args)])
    file = r["observations"]
    asked: dict[str, tuple[Any, Any]] = {"log_dir": (r["log_dir"], args.log_dir or "logs")}
    if r["checkpoint"]:
        asked["checkpoint"] = (r["checkpoint"]["path"], args.checkpoint or CHECKPOINT_NAME)
    if completed(r, "verify"):
        asked["sha256"] = (r["checkpoint"]["sha256"], args.sha256)
        asked["file"] = ((file["file"], file["shard"]) if file else (None, "1/1"),
                         (args.observations, "/".join(map(str, args.shard))))
    if r["hold_seconds"] is not None:
        asked["hold_seconds"] = (r["hold_seconds"], args.hold_seconds)
    if completed(r, "forward"):
        observed = r["observation"]
        wanted = args.observation if args.observation is not None else nested_zeros(tuple(shape_of(observed)[1:]))
        as_float32 = [struct.unpack("f", struct.pack("f", number))[0] for number in flat(wanted)]
        asked["observation"] = (flat(observed), flat(observed) if file else as_float32)
        asked["tolerance"] = (r["cpu_reference"]["tolerance"] if r["cpu_reference"] else None,
                              args.tolerance if args.compare_cpu else None)
    if completed(r, "benchmark"):
        asked["passes"] = (r["benchmark"]["single"]["passes"] if r["benchmark"] else 0, args.benchmark)
    return unequal(**asked)


def gate_log(r: Result, directory: Path) -> Iterator[str]:
    """The log says, line by line, what the result says."""
    lines = (directory / EVIDENCE_FILES[0]).read_text("utf-8").split("\n")
    yield from unequal(after_the_last_line=(lines.pop(), ""))
    reached = [stage["name"] for stage in r["stages"] or []]
    expected: list[str] = []
    least = 0  # of a run that failed, the lines of the stages that it completed
    for stage, blocks in LOG.items():
        if stage == "forward":
            remove_progress(lines, len(expected), r)
        with contextlib.nullcontext() if completed(r, stage) else contextlib.suppress(KeyError, TypeError, IndexError):
            for lines_of_block in blocks.values() if stage in reached else ():
                expected += lines_of_block(r)
        least = len(expected) if completed(r, stage) else least
    end = [final_line(r)]
    if r["error"] is not None:
        end = [fields("[error]  ", r["error"]), final_line(r)]
        expected = expected[:max(least, len(lines) - len(end))]
    for number, (line, wanted) in enumerate(itertools.zip_longest(lines, map(log_text, [*expected, *end])), 1):
        if line != wanted:
            yield f"line {number} is {str(line)[:150]!r}, expected {str(wanted)[:150]!r}"
            break


def remove_progress(lines: list[str], start: int, r: Result) -> None:
    """Take out the reports of progress that a file of observations may give, from this line on."""
    done = 0
    while r["observations"] and start < len(lines) and (match := PROGRESS.fullmatch(lines[start])):
        now, of = int(match[1]), int(match[2])
        if not done < now <= of == r["rows"] or (r["repeated_rows"] and now % r["repeated_rows"] and now != of):
            break
        done = now
        del lines[start]


def gate_marker(r: Result, directory: Path) -> Iterator[str]:
    marker = directory / EVIDENCE_FILES[1]
    if completed(r, "ready") or marker.exists():
        yield from unequal(marker=(marker.read_text("utf-8"), marker_text(r)))


def gate_npu(r: Result, _: Path) -> Iterator[str]:
    return unequal(
        determinism=(r["determinism"], {**r["determinism"], **DETERMINISM}),
        environment=(r["environment"], {**r["environment"], **FORCED_ENVIRONMENT}),
        visible=(r["visible_devices"], r["environment"]["ASCEND_RT_VISIBLE_DEVICES"]),
        list=(is_device_list(r["visible_devices"]), True),
        positive=(r["device_count"] > 0 and r["pid"] > 0, True),
        nodes=(all(re.fullmatch(r"/dev/davinci\w*", node) for node in r["device_nodes"]), True),
        simulator=(r["simulator"] is not None, r["simulated"]),
        name=(r["npu_device_name"].endswith(" (simulated)"), r["simulated"]))


# What a run that got past a stage cannot have found otherwise.
REQUIRED = {
    "npu": {"engine": "torch_npu", "npu_available": True, "npu_device": DEVICE},
    "load": {"policy_class": "ActorCriticPolicy", "param_devices": [DEVICE], "all_params_on_npu": True,
             "params_match_checkpoint": True, "model_device": DEVICE},
    "forward": {"input_device": DEVICE, "output_device": DEVICE, "all_outputs_on_npu": True,
                "bitwise_repeatable": True},
}


def gate_claims(r: Result, _: Path) -> Iterator[str]:
    for stage, claims in REQUIRED.items():
        if completed(r, stage):
            yield from unequal(**{key: (r[key], value) for key, value in claims.items()})
    yield from unequal(num_params=(r["num_params"] is None or r["num_params"] > 0, True))


def gate_npu_smi(r: Result, directory: Path) -> Iterator[str]:
    """What the result says of npu-smi follows from the raw answers."""
    answers = list(recorded_answers((directory / EVIDENCE_FILES[2]).read_bytes()))
    by_arguments = {arguments: answer for arguments, _, answer in answers}
    times = [r["started_at"], *(at for _, at, _ in answers), r["finished_at"]]
    yield from unequal(version=(r["versions"]["npu_smi"], version_of(by_arguments["-v"])),
                       calls=(len(by_arguments), len(answers)), order=(times, sorted(times)))
    if completed(r, "ready"):
        found = correlate(r["pid"], lambda arguments: by_arguments[" ".join(arguments)])
        driver = found.pop("driver") or r["versions"]["driver"]
        yield from unequal(npu_smi=(r["npu_smi"], found), driver=(r["versions"]["driver"], driver))


def output_shapes(space: dict[str, Any]) -> dict[str, list[int]]:
    """The outputs that a policy of this action space gives, and the shape of each for one row."""
    if space["type"] == "Box":
        size = math.prod(space["shape"])
        own = {"mean": [size], "std": [size], "env_action": space["shape"]}
        action = space["shape"]
    else:
        size = sum(space.get("nvec") or [space["n"]])
        own = {"probs": [size], "logits": [size]}
        action = {"Discrete": [], "MultiBinary": [size]}.get(space["type"], [len(space.get("nvec", []))])
    entropy: dict[str, list[int]] = {} if space.get("squashed") else {"entropy": []}
    return {"action": action, "value": [1], "log_prob": [], **entropy, **own}


def gate_outputs(r: Result, directory: Path) -> Iterator[str]:
    """Names, shapes and types follow from the action space, and the file of all rows begins with those shown."""
    shown, shapes = len(r["observation"]), output_shapes(r["action_space"])
    optional = ("env_action", "entropy", "probs", "logits", "mean", "std")
    yield from unequal(
        names=(list(r["outputs"]), list(shapes)),
        given=([name for name in optional if r[name] is not None], [name for name in optional if name in shapes]),
        rows=(shown, min(r["repeated_rows"], SHOWN_ROWS) if r["observations"] else r["rows"]),
        repeated=(0 < r["repeated_rows"] <= r["rows"], True),
        observation=({type(number) for number in flat(r["observation"])}, {float}))
    for name, shape in shapes.items():
        whole = name == "action" and r["action_space"]["type"] in ("Discrete", "MultiDiscrete")
        yield from unequal(**{
            f"outputs.{name}": (r["outputs"][name], {"dtype": "torch.int64" if whole else "torch.float32",
                                                     "shape": [r["rows"], *shape], "device": DEVICE}),
            f"the shape of {name}": (shape_of(r[name]), [shown, *shape]),
            f"the types of {name}": ({type(number) for number in flat(r[name])}, {int if whole else float})})
    for number, row in enumerate(itertools.islice(rows_of(r, directory), shown)):
        yield from unequal(**{f"row {number} of {name}": (values, flat(r[name][number]))
                              for name, values in row.items()})
    if file := r["observations"]:
        if (part := shard(file["shard"])) is None:
            yield "shard is no slice"
            return
        index, of = part
        rows, first = r["rows"], file["first_row"]
        yield from unequal(rows=(file["rows"], rows), slice=(any(  # of a file of that many rows
            ((index - 1) * total // of, index * total // of) == (first, first + rows)
            for total in range((rows - 1) * of, (rows + 1) * of + 1)), True))
        if shown == rows:
            numbers = flat(r["observation"])
            digest = hashlib.sha256(struct.pack(f"<{len(numbers)}f", *numbers)).hexdigest()
            yield from unequal(sha256_float32=(file["sha256_float32"], digest))


def rows_of(r: Result, directory: Path) -> Iterator[dict[str, list[float]]]:
    """Every row of every output: of the file of all rows where there is one, else of the result."""
    if not r["observations"]:
        yield from ({name: flat(r[name][row]) for name in r["outputs"]} for row in range(r["rows"]))
        return
    with zipfile.ZipFile(directory / OUTPUTS_FILE) as archive, contextlib.ExitStack() as files:
        if archive.namelist() != [f"{name}.npy" for name in r["outputs"]]:
            raise ValueError(f"{OUTPUTS_FILE} holds {archive.namelist()}")
        columns = {}
        for name, output in r["outputs"].items():
            file = files.enter_context(archive.open(f"{name}.npy"))
            magic, length = struct.unpack("<8sH", file.read(10))
            kind = "i8" if output["dtype"] == "torch.int64" else "f4"
            expected = {"descr": f"<{kind}", "fortran_order": False, "shape": tuple(output["shape"])}
            header = ast.literal_eval(file.read(length).decode("ascii").strip())
            if magic != b"\x93NUMPY\1\0" or repr(header) != repr(expected):
                raise ValueError(f"{name} in {OUTPUTS_FILE} is {header}, expected {expected}")
            columns[name] = iter_rows(file, f"<{math.prod(output['shape'][1:])}{'q' if kind == 'i8' else 'f'}")
        yield from (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


def iter_rows(file: IO[bytes], layout: str) -> Iterator[list[float]]:
    """The rows of a column to its end, where zipfile compares its checksum."""
    size = struct.calcsize(layout)
    while block := file.read(size * 4096):
        yield from map(list, struct.iter_unpack(layout, block))


def gate_distribution(r: Result, directory: Path) -> Iterator[str]:
    """log_prob, entropy and action follow from the parameters of the distribution, in every row."""
    rows = 0
    for number, row in enumerate(rows_of(r, directory)):
        rows += 1
        chosen = r["action_space"]["type"] != "Box"
        wanted = (categorical(row["logits"], row["action"], r["action_space"]) if chosen
                  else gaussian(row["mean"], row["std"], r["action_space"]))
        for name, values in wanted.items():
            tolerance = 0.0 if name == "action" and chosen else CHECK_TOLERANCE
            if not all(abs(found - value) <= tolerance * max(1.0, abs(value))
                       for found, value in zip(row[name], values, strict=True)):
                yield f"row {number}: {name} is {row[name]}, recomputed {values}"
                return
        if not all(map(math.isfinite, itertools.chain(*row.values()))):
            yield f"row {number} is not finite"
            return
    yield from unequal(rows=(rows, r["rows"]))


def categorical(logits: list[float], action: list[float], space: dict[str, Any]) -> dict[str, list[float]]:
    """Discrete, MultiDiscrete and MultiBinary: what follows from the logits."""
    if space["type"] == "MultiBinary":
        probs = [0.5 + 0.5 * math.tanh(logit / 2) for logit in logits]
        best = [choice if abs(logit) < CHECK_TOLERANCE and choice in (0, 1) else float(logit > 0)
                for logit, choice in zip(logits, action, strict=True)]
        taken = [logit if choice else -logit for logit, choice in zip(logits, best, strict=True)]
        entropy = -sum(x * math.log(x) for p in probs for x in (p, 1 - p) if x > 0)
        log_probs = [min(logit, 0.0) - math.log1p(math.exp(-abs(logit))) for logit in taken]
        return {"probs": probs, "action": best, "log_prob": [sum(log_probs)], "entropy": [entropy]}
    probs, normalised, best, log_prob, entropy, start = [], [], [], 0.0, 0.0, 0
    for choices, chosen in zip(space.get("nvec") or [space["n"]], action, strict=True):
        group = logits[start:start + choices]
        start += choices
        total = math.log(sum(math.exp(logit - max(group)) for logit in group)) + max(group)
        group_probs = [math.exp(logit - total) for logit in group]
        # the arg max, or a choice as likely as it
        likely = [number for number, p in enumerate(group_probs) if p >= max(group_probs) - CHECK_TOLERANCE / 100]
        choice = int(chosen) if chosen in likely else likely[0]
        best.append(choice)
        probs += group_probs
        normalised += [logit - total for logit in group]
        log_prob += group[choice] - total
        entropy -= sum(p * math.log(p) for p in group_probs if p > 0)
    return {"probs": probs, "logits": normalised, "action": best, "log_prob": [log_prob], "entropy": [entropy]}


def gaussian(mean: list[float], std: list[float], space: dict[str, Any]) -> dict[str, list[float]]:
    """Box: what follows from the mean, at which the deterministic action lies, and the standard deviation."""
    log_prob = -sum(math.log(s) + 0.5 * math.log(2 * math.pi) for s in std)
    if not space["squashed"]:
        bounds = [(-math.inf if low is None else low, math.inf if high is None else high)
                  for low, high in zip(space["low"], space["high"], strict=True)]
        return {"action": mean, "log_prob": [log_prob],
                "entropy": [sum(0.5 + 0.5 * math.log(2 * math.pi) + math.log(s) for s in std)],
                "env_action": [min(max(m, low), high) for m, (low, high) in zip(mean, bounds, strict=True)]}
    squashed = [math.tanh(m) for m in mean]
    scaled = [low + 0.5 * (a + 1) * (high - low)
              for a, low, high in zip(squashed, space["low"], space["high"], strict=True)]
    wanted = {"action": squashed, "env_action": scaled}
    if max(map(abs, mean)) < SATURATED:
        wanted["log_prob"] = [log_prob - sum(math.log(1 - a * a + 1e-6) for a in squashed)]
    return wanted


def gate_extras(r: Result, directory: Path) -> Iterator[str]:
    """The comparisons with the published result and the CPU, and the times, follow from their numbers."""
    pinned_zero = r["checkpoint"]["sha256"] == CHECKPOINT_SHA256 and r["observation"] == [[0.0] * 4]
    yield from unequal(reference=(r["reference"], compare_with_published(r) if pinned_zero else None),
                       within=((r["reference"] or {}).get("within_tolerance", True), True))
    if cpu := r["cpu_reference"]:
        agreeing = cpu["action_agreement"] * cpu["rows"]
        yield from unequal(
            within=(cpu["within_tolerance"], True), rows=(cpu["rows"], r["rows"]),
            outputs=(list(cpu["outputs"]), list(r["outputs"])),
            agreement=(math.isclose(agreeing + cpu["ties"], cpu["rows"], rel_tol=1e-9) and cpu["ties"] >= 0, True),
            tolerable=([name for name, each in cpu["outputs"].items() if each["max_abs_diff"] > allowed_difference(
                name, r, directory, each["max_abs_diff"])], []),
            differences=(all(0 <= each["mean_abs_diff"] <= each["max_abs_diff"] * (1 + 1e-9)
                             and abs(each["cosine"] or 0) <= 1 + 1e-9 for each in cpu["outputs"].values()), True))
    if timed := r["benchmark"]:
        lines = [timed["single"], timed["eager"], *timed["batches"]]
        yield from unequal(
            simulated=(timed["simulated"], r["simulated"]), warm_up=(timed["warm_up_passes"], BENCHMARK_WARM_UP),
            equal=(timed["actions_equal_evidence"], True),
            batches=([line["batch"] for line in lines],
                     [1, 1, *benchmark_batches(tuple(shape_of(r["observation"])[1:]))]),
            passes=([line["passes"] for line in lines[1:]],
                    [min(timed["single"]["passes"], BENCHMARK_BATCH_PASSES)] * (len(lines) - 1)),
            time=(sum(line["passes"] * line["mean_s"] for line in lines) <= sum(
                stage["elapsed_s"] for stage in r["stages"] if stage["name"] == "benchmark"), True),
            quantiles=(all(0 < line["p50_s"] <= line["p90_s"] <= line["p99_s"]
                           and math.isclose(line["rows_per_s"] * line["mean_s"], line["batch"])
                           for line in lines), True))


def allowed_difference(name: str, r: Result, directory: Path, difference: float) -> float:
    """What an output of the CPU may at most differ, when its largest is as far beyond the NPU's as it says."""
    space = r["action_space"]
    if difference <= r["cpu_reference"]["tolerance"] or (name == "action" and space["type"] != "Box") or (
            name == "log_prob" and space.get("squashed")):
        return math.inf  # always allowed; a choice, which may be a tie; or of no meaning where it is saturated
    largest = max(abs(value) for row in rows_of(r, directory) for value in row[name])
    return float(r["cpu_reference"]["tolerance"]) * max(1.0, largest + difference) * (1 + 1e-6)


# With the stage that a gate needs the run to have completed.
GATES: dict[str, tuple[str, Callable[[Result, Path], Iterator[str]]]] = {
    "keys and types": ("", gate_keys), "outcome": ("", gate_outcome), "stages": ("", gate_stages),
    "times": ("", gate_times), "files": ("", gate_files), "script": ("", gate_script),
    "command line": ("", gate_argv), "log": ("", gate_log), "marker": ("", gate_marker),
    "checkpoint": ("verify", gate_checkpoint), "claims": ("", gate_claims), "npu": ("npu", gate_npu),
    "npu-smi": ("npu", gate_npu_smi), "outputs": ("forward", gate_outputs),
    "distribution": ("forward", gate_distribution), "references": ("forward", gate_extras)}


# ---------------------------------------------------------------------------------------------------------------------
# Main: the one place where an error becomes a message and an exit code
# ---------------------------------------------------------------------------------------------------------------------


def log_dir_of(argv: list[str]) -> str | None:
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--log-dir", type=existing_name)
    log_dir: str | None = parser.parse_known_args(argv)[0].log_dir
    return log_dir


def check_command(argv: list[str]) -> int:
    parser = create_parser(add_help=False)
    try:
        args = parser.parse_args(argv)
        if len(argv) > 1 + (args.check != ""):
            parser.error("--check goes with no other option than its directory")
    except UsageError as error:
        say(f"inference.py: usage: {error}; {error.hint}", sys.stderr)
        return UsageError.code
    return check(Path(args.check) if args.check else PROJECT / "logs")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    for fd in (0, 1, 2):  # were one of them closed, the log would get its number, and all that libraries print there
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if {"-h", "--help"} & set(argv):
        create_parser().parse_args(["-h"])
    if any(argument.partition("=")[0] == "--check" for argument in argv):
        return check_command(argv)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the watcher gets them
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, no child has an exit code
    evidence = None
    try:
        evidence = Evidence(log_dir_of(argv), ["inference.py", *argv])
        evidence.open()
        # Parsed only now: whatever is wrong with this call, the result of an earlier one must not pass for its own.
        args = create_parser(add_help=False).parse_args(argv)
        run(args, evidence, Watcher(evidence, args.timeout_seconds))
        code = 0
    except (Exception, Failure) as error:  # noqa: BLE001 (the one place where errors become exit codes)
        failure: BaseException = error
        stage = evidence.stage if evidence else "usage"
        if isinstance(error, (RuntimeError, MemoryError)) and stage in STAGE_FAILURES:
            failure = STAGE_FAILURES[stage](f"{type(error).__name__}: {first_line(error)}", DEVICE_HINT)
        elif isinstance(error, OSError):  # of the evidence's files: what can fail elsewhere is caught there
            failure = EvidenceUnwritable(f"{type(error).__name__}: {error.strerror}", "look at the disk and the limits")
        elif not isinstance(error, Failure):
            traceback.print_exc()
        if evidence is None:
            say(f"inference.py: {stage}: {log_text(str(failure))}", sys.stderr)
            return failure.code if isinstance(failure, Failure) else 1
        code = evidence.conclude(failure)
    leave(evidence, code)
    return code


if __name__ == "__main__":
    sys.exit(main())
