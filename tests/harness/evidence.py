"""What the design promises about how a run ends, checked from outside: by its exit code, its output and its files.

Written apart from inference.py on purpose: nothing here trusts what that says about itself.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness import support

RESULT = "npu_result.json"
OUTPUTS = "npu_outputs.npz"  # only with --observations
FILES = ("npu_inference.log", "npu_ready.marker", "npu_smi.log")

# The exit code with which a failure of each stage ends, signals and unwritable evidence aside.
STAGE_CODES = {"verify": 3, "npu": 4, "load": 5, "ready": 5, "forward": 6, "final": 6}

# What two good runs of one checkpoint on one machine do not share.
OF_ONE_RUN = {
    "pid", "argv", "log_dir", "started_at", "finished_at", "ready_at", "npu_smi", "stages", "load_s", "forward_s",
    "total_s", "files",
}  # fmt: skip


def problems(result: support.Result, log_dir: Path) -> list[str]:
    """Whatever is wrong with a run that ended; none when exit code, output and evidence agree."""
    found = []
    if processes := processes_of_session(result.pid):  # first: the last of them tidies up
        found.append(f"left running: {processes}")
    if left := leftovers(log_dir):
        found.append(f"left in the log directory: {left}")
    if "Traceback" in result.stderr and result.code != 1:
        found.append("a traceback")
    if not (log_dir / RESULT).exists():
        if result.code >= 0:
            found.append(f"exit code {result.code} and no {RESULT}")
        return found
    document = support.read_result(log_dir)
    if document["exit_code"] != result.code:
        found.append(f"exit code {result.code}, but {RESULT} says {document['exit_code']}")
    return found + (problems_of_success if result.code == 0 else problems_of_failure)(result, document, log_dir)


def problems_of_success(result: support.Result, document: dict[str, Any], log_dir: Path) -> list[str]:
    found = [f"{name} is missing" for name in FILES if not (log_dir / name).exists()]
    if found:
        return found
    log = (log_dir / FILES[0]).read_text()
    expected = {
        "error": None, "pid": result.pid, "npu_available": True, "all_params_on_npu": True,
        "params_match_checkpoint": True, "all_outputs_on_npu": True, "bitwise_repeatable": True,
        "input_device": "npu:0", "model_device": "npu:0", "output_device": "npu:0",
        "files": hashes(log_dir),
    }  # fmt: skip
    found += [f"{name} is {document.get(name)!r}" for name, value in expected.items() if document.get(name) != value]
    if not log.endswith("\n") or not log.splitlines()[-1].startswith("[final]   exit_code=0 "):
        found.append(f"the log ends in {log[-100:]!r}")
    if "[error]" in log:
        found.append("the log holds an error")
    if f"NPU_READY_PID={result.pid}\n" not in (log_dir / FILES[1]).read_text():
        found.append("the marker is not this run's")
    return found


def problems_of_failure(result: support.Result, document: dict[str, Any], log_dir: Path) -> list[str]:
    found = []
    error = document["error"] or {}
    if not all(isinstance(error.get(name), str) and error[name] for name in ("stage", "type", "message", "hint")):
        found.append(f"error is {document['error']}")
    log = (log_dir / FILES[0]).read_text() if (log_dir / FILES[0]).exists() else ""
    if log and not re.search(rf"^\[final\]   exit_code={result.code} ", log, re.MULTILINE):
        found.append(f"the log ends in {log[-100:]!r}")
    if "exit_code=0" in log:
        found.append("the log claims success")
    if document["files"] != hashes(log_dir):
        found.append("the hashes are not those of the files")
    complaints = complaints_of(result)
    if len(complaints) != 1 or not error or f" {error.get('stage')}: " not in complaints[0]:
        found.append(f"on stderr: {complaints}")
    return found


def complaints_of(result: support.Result) -> list[str]:
    """The lines that the program itself wrote to stderr; libraries write there as well."""
    return [line for line in result.stderr.splitlines() if line.startswith("inference.py: ")]


def leftovers(log_dir: Path) -> list[str]:
    return sorted(set(os.listdir(log_dir)) - {RESULT, OUTPUTS, *FILES}) if log_dir.is_dir() else []


def facts(log_dir: Path) -> dict[str, Any]:
    """What a good run must share with every other good run of the same checkpoint."""
    return {name: value for name, value in support.read_result(log_dir).items() if name not in OF_ONE_RUN}


def hashes(log_dir: Path) -> dict[str, str]:
    return {name: sha256(log_dir / name) for name in (*FILES, OUTPUTS) if (log_dir / name).exists()}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def processes_of_session(session: int, patience: float = 5.0) -> list[int]:
    """The processes that a run left behind. It may take them a moment to notice that it has ended."""
    deadline = time.monotonic() + patience
    while (found := list(_living(session))) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def _living(session: int) -> Iterable[int]:
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            # PID (COMMAND) STATE PARENT GROUP SESSION ...; the command may hold anything
            state, _, _, of = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(of) == session and state != "Z":
            yield int(name)
