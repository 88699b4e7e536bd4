"""What the design promises about how a run ends, checked from outside: by its exit code, its output and its files.

Written apart from inference.py on purpose: nothing here trusts what that says about itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness import support

RESULT = "npu_result.json"
OUTPUTS = "npu_outputs.npy"  # only with --observations
LOG, MARKER, NPU_SMI = FILES = ("npu_inference.log", "npu_ready.marker", "npu_smi.log")  # the log is the lock as well
USAGE = 2  # the exit code that leaves the directory as it was

# The exit code with which a failure of each stage ends, signals and unwritable evidence aside.
STAGE_CODES = {"verify": 3, "npu": 4, "load": 5, "ready": 5, "forward": 6, "final": 6}

# What two good runs of one checkpoint on one machine do not share.
OF_ONE_RUN = {
    "pid", "argv", "log_dir", "started_at", "finished_at", "ready_at", "npu_smi", "stages", "load_s", "forward_s",
    "total_s", "files", "benchmark",
}  # fmt: skip


def problems(result: support.Result, log_dir: Path) -> list[str]:
    """Whatever is wrong with a run that ended; none when exit code, output and evidence agree."""
    found = []
    if processes := processes_of(result):
        found.append(f"left running: {processes}")
    if left := leftovers(log_dir):
        found.append(f"left in the log directory: {left}")
    if "Traceback" in result.stderr and result.code != 1:
        found.append("a traceback")
    if result.code == USAGE:  # whatever stands there is another run's
        complaints = complaints_of(result)
        if len(complaints) != 1 or "; nothing was run" not in complaints[0]:
            found.append(f"on stderr: {complaints}")
        return found
    if not (log_dir / RESULT).is_file():
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
    reference = document["reference"] or {}
    supervisors = document["pid"] == result.pid
    measured = {"reference": reference.get("within_tolerance"), "pid is the supervisor's": supervisors}
    expected = {
        "error": None, "npu_available": True, "all_params_on_npu": True, "params_match_checkpoint": True,
        "params_match_after_forward": True, "inputs_match_host": True, "all_outputs_on_npu": True,
        "bitwise_repeatable": True, "input_device": "npu:0", "model_device": "npu:0", "output_device": "npu:0",
        "files": hashes(log_dir), "reference": True, "pid is the supervisor's": False,
    }  # fmt: skip
    stated = {**document, **measured}
    found += [f"{name} is {stated.get(name)!r}" for name, value in expected.items() if stated.get(name) != value]
    if not log.endswith("\n") or not log.splitlines()[-1].startswith("[final]   exit_code=0 "):
        found.append(f"the log ends in {log[-100:]!r}")
    if f"[final]   worker_exit={document['worker_exit']}\n" not in log:
        found.append("the log does not say how the worker ended")
    if "[error]" in log:
        found.append("the log holds an error")
    if f"NPU_READY_PID={document['pid']}\n" not in (log_dir / FILES[1]).read_text():
        found.append("the marker is not this run's")
    return found


def problems_of_failure(result: support.Result, document: dict[str, Any], log_dir: Path) -> list[str]:
    found = []
    error = document["error"] or {}
    if not all(isinstance(error.get(name), str) and error[name] for name in ("stage", "type", "message", "hint")):
        found.append(f"error is {document['error']}")
    log = (log_dir / FILES[0]).read_text() if (log_dir / FILES[0]).exists() else ""
    if not log.endswith("\n") or not log.splitlines()[-1].startswith(f"[final]   exit_code={result.code} "):
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
    known = {RESULT, OUTPUTS, *FILES, "README.md"}  # the last is the project's
    return sorted(set(os.listdir(log_dir)) - known) if log_dir.is_dir() else []


def facts(log_dir: Path) -> dict[str, Any]:
    """What a good run must share with every other good run of the same checkpoint."""
    document = support.read_result(log_dir)
    (document["reference"] or {}).pop("elapsed_s", None)
    return {name: value for name, value in document.items() if name not in OF_ONE_RUN}


def hashes(log_dir: Path) -> dict[str, str]:
    return {name: sha256(log_dir / name) for name in (*FILES, OUTPUTS) if (log_dir / name).exists()}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def processes_of(run: support.Result | support.Process, patience: float = 1.0) -> list[int]:
    """The processes of a run that live: none a moment after its end.

    What is forked belongs to the session of the run, and what is executed (npu-smi, in a session of its own) has the
    mark of the run in its environment.
    """
    deadline = time.monotonic() + patience
    while (found := list(_living(run))) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def worker_of(process: support.Process, patience: float = 60) -> int:
    """The PID of the worker of a running inference.py, once it is there."""
    deadline = time.monotonic() + patience
    while process.running() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                if os.getpgid(int(child)) == int(child) and os.getsid(int(child)) == os.getsid(process.pid):
                    return int(child)
        time.sleep(0.005)
    raise AssertionError(f"no worker\n{process.stdout}\n{process.stderr}")


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that only waits for its parent to read its status does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _living(run: support.Result | support.Process) -> Iterable[int]:
    mark = f"TEST_RUN={run.mark}\0".encode()
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            ours = os.getsid(pid) == run.pid or (bool(run.mark) and mark in Path(f"/proc/{pid}/environ").read_bytes())
            if ours and is_alive(pid):
                yield pid


def verdict(log_dir: Path, *arguments: object) -> str:
    """What tests/check_evidence.py says about a set: VALID, FAILED RUN or INVALID, with the gates that failed."""
    program = support.PROJECT / "tests/check_evidence.py"
    done = subprocess.run([sys.executable, program, log_dir, *map(str, arguments)], capture_output=True, text=True)
    words = re.findall(r"\b(?:VALID|FAILED RUN|INVALID)\b", done.stdout)
    failed = [line.strip() for line in done.stdout.splitlines() if re.match(r"\s*FAIL\b", line)]
    if not words:
        return f"no verdict: {done.stdout[-300:]}{done.stderr[-300:]}"
    return words[-1] if words[-1] != "INVALID" else f"INVALID: {failed}"
