"""The checker of evidence: a good set is VALID, and no fact that a set states twice, or that can be recomputed from
the rest, changes unnoticed, not even when the hashes are made anew."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.util
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from harness import checkpoints, faults, support

RESULT, LOG, MARKER, NPU_SMI, OUTPUTS = (
    "npu_result.json", "npu_inference.log", "npu_ready.marker", "npu_smi.log", "npu_outputs.npz",
)  # fmt: skip
ROWS = 40  # of a file of observations: more than the sixteen that the result shows

# The stage in which each run fails, with its exit code.
FAILED = {
    "usage": ("start", 2), "refused": ("verify", 3), "load failed": ("load", 5), "interrupted": ("ready", 143),
    "hung": ("npu", 6), "not finite": ("forward", 6),
}  # fmt: skip
GOOD = ["default", "rows", "shard", "beside", "box", "gSDE, squash_output", "multi-discrete", "multi-binary"]


@pytest.fixture(scope="module")
def sets(cli, tmp_path_factory) -> dict[str, Path]:
    """An evidence set of each kind, by name; not to be written to."""
    rng = np.random.default_rng(5)
    np.save(cli.project / "rows.npy", rng.normal(0, 2, (ROWS, 4)).astype(np.float32))
    np.save(cli.project / "more.npy", rng.normal(0, 2, (3 * ROWS - 1, 4)))
    three = ("--observation", json.dumps(rng.normal(0, 2, (3, 4)).astype(np.float32).tolist()))

    def kind(name: str) -> tuple[str, ...]:
        path = checkpoints.make(checkpoints.KINDS[name], cli.project / f"{name}.zip")
        return ("--checkpoint", path.name, "--sha256", hashlib.sha256(path.read_bytes()).hexdigest(), *three)

    standin = support.STANDIN_ARGS
    # to have the progress reported at every chunk, of a few rows each
    eager = faults.patched(cli.project, "inference.PROGRESS_S, inference.CHUNK_ROWS = 0, 16")
    runs: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
        "default": (standin, {}),
        "rows": ((*standin, "--observations", "rows.npy"), {"script": eager}),
        "shard": ((*standin, "--observations", "more.npy", "--shard", "2/3", "--compare-cpu", "--benchmark", "2"), {}),
        "beside": ((*standin, *three, "--compare-cpu", "--benchmark", "2"), {}),
        **{name: (kind(name), {}) for name in GOOD[4:]},
        "usage": ((*standin, "--bogus"), {}),
        "refused": (("--checkpoint", "tests/data/README.md"), {}),
        "load failed": (standin, {"env": {"CANNSIM_FAIL": "aclrtMemcpy:10"}}),
        "hung": ((*standin, "--timeout-seconds", "1"), {"env": {"CANNSIM_HANG": "aclrtSetDevice"}}),
        "not finite": ((*standin, "--observation", "[3e38, 3e38, 3e38, 3e38]"), {}),
    }

    def make(name: str) -> Path:
        args, options = runs[name]
        directory = cli.project / "evidence" / re.sub(r"\W", "-", name)
        done = cli(*args, "--hold-seconds", 0, "--log-dir", directory.relative_to(cli.project), **options)
        assert done.code == FAILED.get(name, ("", 0))[1], done.stderr
        return directory

    interrupted = cli.start(*standin, "--hold-seconds", 600, "--log-dir", "evidence/interrupted")
    with ThreadPoolExecutor(2) as pool:
        made = dict(zip(runs, pool.map(make, runs), strict=True))
    interrupted.wait_for("holding")
    interrupted.signal(signal.SIGTERM)
    assert interrupted.wait().code == FAILED["interrupted"][1]
    return {**made, "interrupted": cli.project / "evidence/interrupted"}


@pytest.fixture(scope="module")
def program(cli) -> ModuleType:
    """The inference.py that made the sets, as a module: some ten thousand checks are too many for a process each."""
    spec = importlib.util.spec_from_file_location("inference_that_ran", cli.project / "inference.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


class Copy:
    """An evidence set to be tampered with."""

    def __init__(self, program: ModuleType, original: Path, directory: Path) -> None:
        self.program, self.original = program, original
        self.path = directory / "copy"
        shutil.copytree(original, self.path)
        self.result: dict[str, Any] = json.loads((original / RESULT).read_text())
        self.log = (self.path / LOG).read_text()

    def write_result(self, result: dict[str, Any]) -> None:
        (self.path / RESULT).write_text(json.dumps(result, indent=2) + "\n")

    def reseal(self, result: dict[str, Any] | None = None) -> None:
        """Makes the hashes of the files anew, as an attacker would."""
        result = copy.deepcopy(self.result if result is None else result)
        present = [name for name in self.program.EVIDENCE_FILES if (self.path / name).exists()]
        result["files"] = {name: hashlib.sha256((self.path / name).read_bytes()).hexdigest() for name in present}
        self.write_result(result)

    def failed_gates(self) -> list[str]:
        """Checks the set; the gates that fail, none when it is what the original is."""
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = self.program.check(self.path)
        *gates, verdict = printed.getvalue().splitlines()
        failed = [line[6:].partition(":")[0] for line in gates if line.startswith("FAIL  ")]
        assert len(failed) == sum(not line.startswith("PASS  ") for line in gates)
        expected = "INVALID" if failed else "FAILED RUN" if self.result["error"] else "VALID"
        assert (code, verdict) == (0 if expected == "VALID" else 8, expected)
        return failed

    def restore(self) -> None:
        for path in self.path.iterdir():
            path.unlink()
        for path in self.original.iterdir():
            shutil.copy(path, self.path)


@pytest.fixture
def evidence_of(program, sets, tmp_path) -> Callable[[str], Copy]:
    return lambda name: Copy(program, sets[name], tmp_path)


def check(project: Path, *args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """`python3 inference.py --check ARGS`, and no simulator near."""
    command = [sys.executable, project / "inference.py", "--check", *args]
    return subprocess.run(command, capture_output=True, text=True, env=support.clean_environment(), **options)


# ----------------------------------------------------------------------------------------------------------------------
# The verdicts
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*GOOD, *FAILED])
def test_the_evidence_of_a_run_is_consistent(cli, sets, name):
    done = check(cli.project, sets[name])
    *gates, verdict = done.stdout.splitlines()
    expected = "FAILED RUN" if name in FAILED else "VALID"
    assert (verdict, done.returncode) == (expected, 8 if name in FAILED else 0), done.stdout
    assert all(line.startswith("PASS  ") for line in gates)
    assert all(line.startswith("NOTE  ") for line in done.stderr.splitlines())
    assert support.read_result(sets[name])["exit_code"] == FAILED.get(name, ("", 0))[1]


NOTES = {
    "default": {"simulated", "the outputs were compared with nothing"},
    "beside": {"simulated"},
    "refused": {"the run failed in stage verify"},
    "not finite": {"the run failed in stage forward", "simulated"},
}


@pytest.mark.parametrize("name", NOTES)
def test_what_a_consistent_set_does_not_show_is_said_beside_the_verdict(cli, sets, name):
    notes = {line[6:].partition(":")[0] for line in check(cli.project, sets[name]).stderr.splitlines()}
    assert {note.partition(" that ")[0] for note in notes} == NOTES[name]


def test_a_process_that_npu_smi_did_not_list_is_named_beside_the_verdict(cli, tmp_path):
    done = cli(*support.STANDIN_ARGS, "--hold-seconds", 0, "--log-dir", tmp_path, env={"CANNSIM_NPU_SMI": "none"})
    assert done.code == 0
    done = check(cli.project, tmp_path)
    assert done.stdout.splitlines()[-1] == "VALID"
    assert "NOTE  npu-smi did not list the process: no process table" in done.stderr.splitlines()


def test_the_file_that_was_changed_is_named(cli, sets, tmp_path):
    copied = shutil.copytree(sets["rows"], tmp_path / "copy")
    (copied / NPU_SMI).write_text("another")
    done = check(cli.project, copied)
    assert re.search(rf"^FAIL  files: {NPU_SMI} is '[0-9a-f]{{64}}', expected '[0-9a-f]{{64}}'$", done.stdout, re.M)


def test_good_evidence_passes_every_gate_that_there_is(cli, program, sets):
    assert check(cli.project, sets["shard"]).stdout.splitlines()[:-1] == [f"PASS  {name}" for name in program.GATES]


def test_the_evidence_of_a_set_of_rows_holds_what_is_to_be_checked(sets):
    """Else much of the below would check nothing."""
    result = support.read_result(sets["rows"])
    assert result["rows"] == ROWS > len(result["observation"]) == 16
    assert len(re.findall(r"^\[forward\] rows=\d+/40 ", (sets["rows"] / LOG).read_text(), re.M)) == 3
    assert support.read_result(sets["shard"])["observations"]["first_row"] > 0


@pytest.mark.parametrize("way", [
    "other directory", "dot slash", "absolute", "with equals signs", "linked checkpoint", "linked program",
    "outside the project", "unusual names", "linked logs", "own logs",
])  # fmt: skip
def test_good_evidence_is_valid_however_the_run_was_started(cli, program, tmp_path, way):
    """The paths in it are rewritten, so that they tell nothing of the machine: the check must not trip over that."""
    project = support.project_copy(tmp_path / "the project")
    shutil.copy(cli.project / "inference.py", project)  # the one that the fork server and `program` know
    (project / "SHA256SUMS").write_text("")
    zipped, rows = project / "model.zip", project / "rows.npy"
    shutil.copy(support.PROJECT / support.STANDIN, zipped)
    np.save(rows, np.ones((3, 4), np.float32))
    (tmp_path / "elsewhere").mkdir()
    options: dict[str, Any] = {"cwd": project, "script": project / "inference.py"}
    names, logs = [zipped.name, rows.name, "out"], project / "out"
    if way == "other directory":
        options["cwd"], names = project / "tests", ["../model.zip", "../rows.npy", "../out"]
    elif way == "dot slash":
        names = [f"./{name}" for name in names]
    elif way in ("absolute", "with equals signs"):
        names = [str(project / name) for name in names]
    elif way == "linked checkpoint":
        zipped.rename(tmp_path / "elsewhere/model.zip")
        zipped.symlink_to(tmp_path / "elsewhere/model.zip")
    elif way == "linked program":
        (tmp_path / "elsewhere/run.py").symlink_to(project / "inference.py")
        options = {"cwd": tmp_path / "elsewhere", "script": tmp_path / "elsewhere/run.py"}
        names = [f"../the project/{name}" for name in names]
    elif way == "outside the project":
        options["cwd"] = tmp_path / "elsewhere"
        zipped.rename(tmp_path / "elsewhere/model.zip")
        rows.rename(tmp_path / "elsewhere/rows.npy")
        logs = tmp_path / "elsewhere/out"
    elif way == "unusual names":
        names = ["mödel =1.zip", "röws\t1.npy", "=out; ls"]
        for path, name in zip((zipped, rows), names, strict=False):
            path.rename(project / name)
        logs = project / names[2]
    elif way == "linked logs":
        (tmp_path / "elsewhere/logs").mkdir()
        shutil.rmtree(project / "logs", ignore_errors=True)
        (project / "logs").symlink_to(tmp_path / "elsewhere/logs")
    if way in ("linked logs", "own logs"):
        names[2], logs = "", project / "logs"
    flags = [("--checkpoint", names[0]), ("--observations", names[1]), ("--log-dir", names[2])]
    args = [text for flag, name in flags if name
            for text in ([f"{flag}={name}"] if way == "with equals signs" else [flag, name])]  # fmt: skip
    done = cli(*args, "--sha256", support.STANDIN_SHA256, "--hold-seconds", 0, **options)
    assert done.code == 0, done.stderr
    checked = check(project, *([logs] if names[2] else []))
    assert (checked.returncode, checked.stdout.splitlines()[-1]) == (0, "VALID"), checked.stdout
    for path in logs.iterdir():
        assert str(tmp_path).encode() not in path.read_bytes(), path.name


# ----------------------------------------------------------------------------------------------------------------------
# The JSON: every value at every depth
# ----------------------------------------------------------------------------------------------------------------------

Path_ = tuple[Any, ...]


def parts(value: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Every part of a JSON value; of a list, which holds things of one kind, the first, the second and the last."""
    if path:
        yield path, value
    if isinstance(value, dict):
        for key, part in value.items():
            yield from parts(part, (*path, key))
    elif isinstance(value, list):
        for index in sorted({0, 1, len(value) - 1} & set(range(len(value)))):
            yield from parts(value[index], (*path, index))


def mutations(value: Any) -> Iterator[tuple[str, Any]]:
    """Other values in the place of one, with the kind of the change."""
    other = {bool: [int], int: [float, str], float: [str], str: [lambda text: [text]], list: [tuple_as_dict, str],
             dict: [lambda value: list(value.values()), str], type(None): []}  # fmt: skip
    for convert in other[type(value)]:
        yield "retyped", convert(value)
    if value is None:
        for claim in ("x", 0, 0.5, True, [], {}, ["x"], [1]):
            yield "claimed", claim
        return
    yield "null", None
    if isinstance(value, bool):
        yield "changed", not value
    elif isinstance(value, (int, float)):
        yield "changed", value + 1
        if isinstance(value, float):
            yield "nudged", math.nextafter(value, math.inf)
            yield "retyped", round(value)
    elif isinstance(value, str):
        yield "changed", value + "x"
        yield "emptied", ""
        if digits := re.search(r"\d(?=\D*$)", value):
            yield "changed", value[:digits.start()] + str((int(digits[0]) + 1) % 10) + value[digits.end():]
    elif value:
        yield "emptied", type(value)()
    if isinstance(value, dict):
        yield "added", {**value, "another": 1}
    elif isinstance(value, list):
        yield "added", [*value, value[-1] if value else "x"]
        if value != value[::-1]:
            yield "reordered", value[::-1]


def tuple_as_dict(value: list[Any]) -> dict[str, Any]:
    return {str(index): part for index, part in enumerate(value)}


def replaced(document: dict[str, Any], path: Path_, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(document)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return changed


def without(document: dict[str, Any], path: Path_) -> dict[str, Any]:
    changed = copy.deepcopy(document)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    del parent[path[-1]]
    return changed


def name_of(path: Path_) -> str:
    return ".".join("*" if isinstance(key, int) else key for key in path)


ROUNDED = ("load_s", "forward_s")  # to four digits in the log, where their last bit shows once in a hundred runs


def survivors(evidence: Copy) -> dict[str, set[str]]:
    """The changes of the JSON that are not found: {name of the value: kinds of change}."""
    found: dict[str, set[str]] = {}
    for path, value in parts(evidence.result):
        changed = [(kind, replaced(evidence.result, path, other)) for kind, other in mutations(value)]
        for kind, document in [*changed, ("removed", without(evidence.result, path))]:
            if kind == "nudged" and name_of(path) in ROUNDED:
                continue
            evidence.write_result(document)
            if not evidence.failed_gates():
                found.setdefault(name_of(path), set()).add(kind)
    return found


TEXT = {"changed", "emptied"}
PACKAGES = ("stable_baselines3", "gymnasium", "numpy", "cloudpickle")
CLOCK = {"total_s": {"nudged"}, "stages.*.elapsed_s": {"nudged"}}  # read to the microsecond
# What the JSON alone says, and what nothing else in the set tells anything about.
ONCE: dict[str, set[str]] = {
    "environment.TASK_QUEUE_ENABLE": TEXT, "environment.ACL_OP_INIT_MODE": TEXT,  # the user may set them
    "determinism.device": {"changed", "null"},
    **{f"versions.{name}": TEXT | {"null"} for name in PACKAGES},  # of what is installed, null for what is not
    **CLOCK,
}  # fmt: skip
SURVIVORS = {
    # the bounds to which an action is clipped tell nothing where no action reaches them
    "box": ONCE | {"action_space.low.*": {"null", "nudged"}, "action_space.high.*": {"changed", "null", "nudged"}},
    # every action is scaled to the bounds, within the tolerance of float32
    "gSDE, squash_output": ONCE | {"action_space.low.*": {"nudged"}, "action_space.high.*": {"nudged"}},
}


@pytest.mark.parametrize("name", GOOD)
def test_every_change_of_a_fact_in_the_json_is_found_but_of_those_that_stand_nowhere_else(evidence_of, name):
    assert survivors(evidence_of(name)) == SURVIVORS.get(name, ONCE)


def each(names: str, *kinds: str) -> dict[str, set[str]]:
    return {name: set(kinds) for name in names.split()}


# Of a run that failed, its last stage logged only a part of what it measured, and may have measured more than there is.
STARTED = each("environment.TASK_QUEUE_ENABLE environment.ACL_OP_INIT_MODE", *TEXT, "null") | {
    f"versions.{name}": TEXT | {"null"} for name in PACKAGES
} | each("rows", "changed") | CLOCK  # fmt: skip
ON_DEVICE = each("determinism.device", "changed", "null")
SURVIVORS_OF_FAILED = {
    "usage": each("argv.*", *TEXT, "removed") | each("argv", "added") | each("cwd", *TEXT) | each("pid", "changed")
    | each("versions.python versions.platform", *TEXT, "null") | each("total_s", "nudged"),
    "refused": each("model_id source_revision license rows", "claimed") | CLOCK,
    "hung": STARTED
    | each("engine simulator visible_devices environment.ASCEND_RT_VISIBLE_DEVICES "
           "environment.TORCH_DEVICE_BACKEND_AUTOLOAD environment.TORCH_FORCE_WEIGHTS_ONLY_LOAD "
           "environment.TORCH_NPU_FALLBACK_CPU_DISABLE", *TEXT, "null")
    | each("environment", "null") | each("simulated", "null", "changed")
    | each("device_count device_nodes npu_available npu_device npu_device_name versions.cann versions.driver "
           "versions.npu_smi", "claimed"),
    "load failed": STARTED | ON_DEVICE
    | each("load_s policy_class param_devices all_params_on_npu params_match_checkpoint model_device "
           "versions.driver", "claimed"),
    "interrupted": STARTED | ON_DEVICE | each("npu_smi.reason npu_smi.detail", "claimed")
    | each("npu_smi.matched_by npu_smi.npu_id npu_smi.chip_id versions.driver", *TEXT, "null"),
    "not finite": STARTED | ON_DEVICE
    | each("input_device output_device all_outputs_on_npu repeated_rows observation action env_action value log_prob "
           "entropy probs logits mean std outputs bitwise_repeatable reference forward_s", "claimed"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILED)
def test_a_failed_run_claims_nothing_beyond_the_stage_in_which_it_failed(evidence_of, name):
    """Nor is it ever taken for a good run, whatever is changed in its JSON: `failed_gates` asserts that."""
    assert survivors(evidence_of(name)) == SURVIVORS_OF_FAILED[name]


@pytest.mark.parametrize("name", FAILED)
def test_a_failed_run_cannot_be_declared_a_success(evidence_of, name):
    evidence = evidence_of(name)
    evidence.write_result(evidence.result | {"exit_code": 0})
    assert "outcome" in evidence.failed_gates()
    stages = [{**stage, "outcome": "ok"} for stage in evidence.result["stages"] or []]
    evidence.result |= {"exit_code": 0, "error": None, "stages": stages}
    evidence.write_result(evidence.result)
    assert {"keys and types", "times", "log"} <= set(evidence.failed_gates())


# ----------------------------------------------------------------------------------------------------------------------
# The other files: every line
# ----------------------------------------------------------------------------------------------------------------------


def line_mutations(text: str) -> Iterator[tuple[str, str]]:
    """(what was done to which line, the text after that)"""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        before, after = lines[:number], lines[number + 1:]
        others = {"changed": [[line + "x"], [line.swapcase()]], "removed": [[]], "doubled": [[line, line]],
                  "added": [["[forward] action=[1] shape=(1,) dtype=torch.int64 device=npu:0", line], ["", line],
                            ["[forward] rows=1/40 rows_per_s=1 left=1s", line]]}  # fmt: skip
        digits = [match.start() for match in re.finditer(r"\d", line)]
        for at in {digits[0], digits[-1]} if digits else ():
            others["changed"].append([f"{line[:at]}{(int(line[at]) + 1) % 10}{line[at + 1:]}"])
        if after:
            others["swapped"] = [[after[0], line]]
        for kind, replacements in others.items():
            for replacement in replacements:
                rest = after[1:] if kind == "swapped" else after
                changed = "".join(f"{line}\n" for line in [*before, *replacement, *rest])
                if changed != text:
                    yield f"{number} {kind}: {line[:60]}", changed


@pytest.mark.parametrize("file", [LOG, MARKER, NPU_SMI])
def test_every_change_of_a_file_is_found_by_its_hash(evidence_of, file):
    evidence = evidence_of("default")
    for what, changed in line_mutations((evidence.path / file).read_text()):
        (evidence.path / file).write_text(changed)
        assert "files" in evidence.failed_gates(), what


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("file", [LOG, MARKER])
def test_every_change_of_a_line_is_found_even_with_the_hashes_made_anew(evidence_of, file, name):
    evidence = evidence_of(name)
    survived = []
    for what, changed in line_mutations((evidence.path / file).read_text()):
        (evidence.path / file).write_text(changed)
        evidence.reseal()
        if not evidence.failed_gates():
            survived.append(what)
    # how often a run reports its progress, and the speed and the time left in a report, stand nowhere else
    progress = re.compile(r"\d+ (changed|removed): \[forward\] rows=\d+/40 rows_per_s=")
    assert all(map(progress.match, survived))
    assert len(survived) == (6 if (file, name) == (LOG, "rows") else 0)


@pytest.mark.parametrize("name", ["load failed", "interrupted", "not finite", "hung"])
def test_the_log_of_a_failed_run_is_compared_as_well(evidence_of, name):
    evidence = evidence_of(name)
    lines = evidence.log.splitlines(keepends=True)
    for what, changed in line_mutations(evidence.log):
        (evidence.path / LOG).write_text(changed)
        evidence.reseal()
        last_of_stage = int(what.split()[0]) == len(lines) - 3 and "removed" in what
        assert evidence.failed_gates() or last_of_stage, what


@pytest.mark.parametrize("name", ["usage", "refused", "load failed", "interrupted"])
def test_no_file_can_be_taken_away_or_slipped_in(sets, evidence_of, name):
    evidence = evidence_of(name)
    for path in list(evidence.path.iterdir()):
        evidence.restore()
        path.unlink()
        assert evidence.failed_gates() if path.name != RESULT else "INVALID" in printed_by(evidence)
    for file in (OUTPUTS, MARKER, NPU_SMI):
        evidence.restore()
        if not (evidence.path / file).exists():
            shutil.copy(sets["rows"] / file, evidence.path)
            assert "files" in evidence.failed_gates()


def printed_by(evidence: Copy) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert evidence.program.check(evidence.path) == 8
    return printed.getvalue()


# What of npu_smi.log is taken into the result; the rest of what npu-smi printed stands only there.
NPU_SMI_FACTS = {
    "another process": (r"(\| 0       0 +\| )PID ", r"\g<1>1 ", "npu-smi"),
    "the row is gone": (r"\| 0       0 +\| PID .*\n", "", "npu-smi"),
    "another chip": (r"\| 0       0( +\| PID )", r"| 3       0\1", "npu-smi"),
    "another memory": (r"(\| PID .* )\d+( +\|)", r"\g<1>99\2", "npu-smi"),
    "no table": (r"Process id ", "Process no ", "npu-smi"),
    "another driver": (r"Version: [\d.]+", "Version: 25.5.2", "npu-smi"),
    "another version": (r"npu-smi version: [\d.]+", "npu-smi version: 25.5.2", "npu-smi"),
    "another outcome": (r"(# npu-smi info .* outcome=).*", r"\1exit code 1", "npu-smi"),
    "another length": (r"bytes=\d+", "bytes=3", "npu-smi"),
    "another command": (r"# npu-smi info ", "# npu-smi info -m ", "npu-smi"),
    "before the start": (r" at=\S+", " at=2020-01-01T00:00:00.000000+00:00", "npu-smi"),
    "after the end": (r"(# npu-smi info at=)\S+", r"\g<1>2099-01-01T00:00:00.000000+00:00", "npu-smi"),
    "no time": (r" at=\S+", " at=x", "npu-smi"),
    "two calls": (r"(# npu-smi -v .*\n.*\n\n)", r"\1\1", "npu-smi"),
    "empty": (r"(?s).*", "", "npu-smi"),
}


@pytest.mark.parametrize("fact", NPU_SMI_FACTS)
def test_what_the_result_says_of_npu_smi_must_follow_from_its_raw_answers(evidence_of, fact):
    evidence = evidence_of("default")
    pattern, replacement, gate = NPU_SMI_FACTS[fact]
    text = (evidence.path / NPU_SMI).read_text()
    changed, count = re.subn(pattern.replace("PID", str(evidence.result["pid"])), replacement, text, count=1)
    assert count == 1 and changed != text
    # what keeps the lengths in order, so that only the meaning tells
    if fact not in ("another length", "empty"):
        parts_of = re.split(r"(?m)^(?=# npu-smi )", changed)[1:]
        changed = "".join(
            re.sub(r"bytes=\d+", f"bytes={len(part.partition(chr(10))[2].encode()) - 1}", part, count=1)
            for part in parts_of)  # fmt: skip
    (evidence.path / NPU_SMI).write_text(changed)
    evidence.reseal()
    assert evidence.failed_gates() == [gate]


def rewrite_outputs(path: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Saves the arrays of npu_outputs.npz as the program does, after a change."""
    with np.load(path) as loaded:
        arrays = dict(loaded)
    change(arrays)
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, array, version=(1, 0))


OUTPUT_CHANGES: dict[str, Callable[[dict[str, np.ndarray]], Any]] = {
    "a value that is shown": lambda arrays: arrays["value"].__setitem__((3, 0), 1.0),
    "the log_prob of a later row": lambda arrays: arrays["log_prob"].__setitem__(30, -0.7),
    "the entropy of a later row": lambda arrays: arrays["entropy"].__setitem__(30, 0.7),
    "the probabilities of a later row": lambda arrays: arrays["probs"].__setitem__((30, 0), 0.7),
    "the logits of a later row": lambda arrays: arrays["logits"].__setitem__((30, 0), 0.7),
    "the action of a later row": lambda arrays: arrays["action"].__setitem__(30, 1 - arrays["action"][30]),
    "no action": lambda arrays: arrays["action"].__setitem__(30, 7),
    "NaN in a later row": lambda arrays: arrays["value"].__setitem__((30, 0), np.nan),
    "infinity in a later row": lambda arrays: arrays["value"].__setitem__((30, 0), np.inf),
    "another type": lambda arrays: arrays.update(value=arrays["value"].astype(np.float64)),
    "another byte order": lambda arrays: arrays.update(value=arrays["value"].astype(">f4")),
    "another order": lambda arrays: arrays.update(probs=np.asfortranarray(arrays["probs"])),
    "another shape": lambda arrays: arrays.update(value=arrays["value"][:, 0]),
    "a row less": lambda arrays: arrays.update({name: array[:-1] for name, array in arrays.items()}),
    "a row less of one": lambda arrays: arrays.update(value=arrays["value"][:-1]),
    "a row more": lambda arrays: arrays.update(value=np.concatenate([arrays["value"], arrays["value"][:1]])),
    "two rows swapped": lambda arrays: arrays["probs"].__setitem__([20, 21], arrays["probs"][[21, 20]]),
    "another name": lambda arrays: arrays.update(valeur=arrays.pop("value")),
    "one less": lambda arrays: arrays.pop("entropy"),
    "one more": lambda arrays: arrays.update(cpu=arrays["value"]),
}  # fmt: skip


@pytest.mark.parametrize("what", OUTPUT_CHANGES)
def test_every_row_of_the_outputs_is_recomputed(evidence_of, what):
    evidence = evidence_of("rows")
    rewrite_outputs(evidence.path / OUTPUTS, OUTPUT_CHANGES[what])
    assert "files" in evidence.failed_gates()
    evidence.reseal()
    assert {"outputs", "distribution"} & set(evidence.failed_gates())


def test_outputs_that_are_saved_as_they_were_are_valid(evidence_of):
    """Else the changes above might be found for the way in which they are written."""
    evidence = evidence_of("rows")
    rewrite_outputs(evidence.path / OUTPUTS, lambda arrays: None)
    evidence.reseal()
    assert evidence.failed_gates() == []


def test_the_value_of_a_later_row_stands_nowhere_else(evidence_of):
    """What the checker cannot know: the value has no other witness than the hash of the file."""
    evidence = evidence_of("rows")
    rewrite_outputs(evidence.path / OUTPUTS, lambda arrays: arrays["value"].__setitem__((30, 0), 1.0))
    assert evidence.failed_gates() == ["files"]
    evidence.reseal()
    assert evidence.failed_gates() == []


@pytest.mark.parametrize("damage", ["truncated", "flipped in a member", "not a zip", "empty", "compressed"])
def test_damaged_outputs_are_found(evidence_of, damage):
    evidence = evidence_of("rows")
    data = bytearray((evidence.path / OUTPUTS).read_bytes())
    if damage == "truncated":
        data = data[:-200]
    elif damage == "flipped in a member":  # in the last row of the values, whose checksum then is wrong
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            content = archive.read("value.npy")
        data[data.index(content) + len(content) - 1] ^= 1
    elif damage == "compressed":  # a bomb would be small in the directory
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members.items():
                archive.writestr(name, content if name != "value.npy" else content + bytes(50_000_000))
        data = bytearray(packed.getvalue())
    else:
        data = bytearray(b"" if damage == "empty" else b"x" * 500)
    (evidence.path / OUTPUTS).write_bytes(data)
    evidence.reseal()
    assert "distribution" in evidence.failed_gates()


@pytest.mark.parametrize("file", [LOG, MARKER, NPU_SMI, OUTPUTS])
def test_a_file_of_another_run_is_found(cli, sets, evidence_of, tmp_path, file):
    """Of the same checkpoint and the same observations."""
    args = (*support.STANDIN_ARGS, "--observations", "rows.npy", "--hold-seconds", 0, "--log-dir", tmp_path / "again")
    done = cli(*args)
    assert done.code == 0, done.stderr
    evidence = evidence_of("rows")
    shutil.copy(tmp_path / "again" / file, evidence.path)
    if file == OUTPUTS:  # equal outputs give equal files
        assert evidence.failed_gates() == []
        shutil.copy(sets["shard"] / file, evidence.path)
    assert "files" in evidence.failed_gates()
    evidence.reseal()
    assert evidence.failed_gates()


# ----------------------------------------------------------------------------------------------------------------------
# A forger who rewrites the log and the marker as well
# ----------------------------------------------------------------------------------------------------------------------


def forge(evidence: Copy, result: dict[str, Any]) -> bool:
    """Writes the log and the marker that belong to such a result; False where there can be none."""
    program = evidence.program
    try:
        lines = [program.log_text(line) for blocks in program.LOG.values() for block in blocks.values()
                 for line in block(result)]  # fmt: skip
        marker = program.marker_text(result)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError):
        return False
    (evidence.path / LOG).write_text("\n".join([*lines, program.final_line(result)]) + "\n")
    (evidence.path / MARKER).write_text(marker)
    evidence.reseal(result)
    return True


# What a forger may say freely then: what only the machine could know. It must be found in all else.
FORGEABLE = {
    "simulator", "cwd", "environment.TASK_QUEUE_ENABLE", "environment.ACL_OP_INIT_MODE", "determinism.device",
    "npu_device_name", "device_count", "num_params", "value.*.*",
    *(f"versions.{name}" for name in ("python", "platform", "torch", "torch_npu", "cann", *PACKAGES)),
}  # fmt: skip
FORGEABLE_TOO = {
    "rows": {"observations.dtype", "observations.sha256_float32", "observation.*.*", "repeated_rows"},
    # the second third of 119 rows begins where that of 120 does but for one
    "shard": {"observations.dtype", "observations.sha256_float32", "observation.*.*", "observations.first_row"},
    "box": {"action_space.high.*"},
    "beside": {"logits.*.*"},  # of a choice so unlikely that its probability is 0 in any case
}
BESIDE = {"cpu_reference.outputs.*.max_abs_diff", "benchmark.single.p99_s", "benchmark.eager.p99_s",
          "benchmark.batches.*.p99_s"}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_even_a_forger_of_all_files_must_keep_to_what_can_be_recomputed(evidence_of, name):
    evidence = evidence_of(name)
    passed = set()
    for path, value in parts(evidence.result):
        for kind, other in mutations(value):
            forged = replaced(evidence.result, path, other)
            if kind == "changed" and forge(evidence, forged) and not evidence.failed_gates():
                passed.add(re.sub(r"(cpu_reference\.outputs)\.\w+", r"\1.*", name_of(path)))
    expected = FORGEABLE | FORGEABLE_TOO.get(name, set())
    if evidence.result["benchmark"]:
        expected |= BESIDE
    if name in ("rows", "shard"):
        expected -= {"value.*.*"}  # these the file of all rows holds as well
    # the hashes are made anew in any case
    assert {other for other in passed if not other.startswith("files.")} == expected


# ----------------------------------------------------------------------------------------------------------------------
# The project's own logs
# ----------------------------------------------------------------------------------------------------------------------


def test_sha256sums_guards_the_projects_own_logs(cli, sets, tmp_path):
    """There even the JSON has a hash, and a change of any file is found by both."""
    project = support.project_copy(tmp_path / "project")
    shutil.copy(cli.project / "inference.py", project)
    sums = project / "SHA256SUMS"
    sums.write_text("")
    done = cli(*support.STANDIN_ARGS, "--hold-seconds", 0, cwd=project, script=project / "inference.py")
    assert done.code == 0, done.stderr
    logs = project / "logs"
    assert check(project).stdout.splitlines()[-1] == "VALID"  # no directory: its own
    result = support.read_result(logs)
    result["versions"]["numpy"] = "9.9"  # what no gate could tell
    (logs / RESULT).write_text(json.dumps(result, indent=2) + "\n")
    done = check(project)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (8, "INVALID")
    assert re.search(rf"^FAIL  files: .*{RESULT} as in SHA256SUMS", done.stdout, re.M)
    digest = hashlib.sha256((logs / RESULT).read_bytes()).hexdigest()
    sums.write_text(re.sub(rf"[0-9a-f]{{64}}(?=  logs/{RESULT})", digest, sums.read_text()))
    assert check(project).stdout.splitlines()[-1] == "VALID"
    for damaged in ("", "x\n", sums.read_text()[:100], sums.read_text().replace("logs/", "other/")):
        sums.write_text(damaged)
        assert check(project).stdout.splitlines()[-1] == "INVALID"


# ----------------------------------------------------------------------------------------------------------------------
# Hostile sets
# ----------------------------------------------------------------------------------------------------------------------

HOSTILE_JSON = {
    "empty": b"", "not JSON": b"exit_code: 0", "a list": b"[]", "null": b"null", "a number": b"0",
    "cut": b'{"exit_code": 0', "NaN": b'{"exit_code": NaN}', "infinity": b'{"exit_code": -Infinity}',
    "a key twice": b'{"exit_code": 1, "exit_code": 0}', "a key twice below": b'{"exit_code": {"a": 1, "a": 2}}',
    "nested": b'{"exit_code":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested objects": b'{"a":' * 100_000,
    "a huge number": b'{"exit_code": ' + b"9" * 10_000 + b"}", "overflow": b'{"total_s": 1e999, "exit_code": 0}',
    "not UTF-8": b'{"exit_code": "\xff\xfe"}', "zeros": bytes(1000), "a mark": b"\xef\xbb\xbf{}",
    "half a surrogate": b'{"exit_code": 0, "error": null, "\\ud800": 1}', "only the code": b'{"exit_code": 0}',
    "a verdict": b'{"exit_code": 1, "error": {"stage": "x\\nVALID"}, "a\\nVALID\\u001b[2J": 1}',
    "an error that is a text": b'{"exit_code": 1, "error": "x"}', "an error of lists": b'{"error": [[]]}',
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE_JSON)
def test_a_hostile_json_is_invalid_and_no_more(cli, sets, tmp_path, what):
    directory = shutil.copytree(sets["default"], tmp_path / "set")
    (directory / RESULT).write_bytes(HOSTILE_JSON[what])
    assert_invalid(check(cli.project, directory, timeout=30))


def assert_invalid(done: subprocess.CompletedProcess[str]) -> None:
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[-1], done.stderr) == (8, "INVALID", ""), done.stdout
    assert lines.count("INVALID") == 1 and "VALID" not in lines and any(line.startswith("FAIL  ") for line in lines)
    assert done.stdout.replace("\n", "").isprintable()


HOSTILE_VALUES = {
    "10^400": 10**400, "-1": -1, "1e308": 1e308, "text": "x" * 100_000, "nested": "[" * 400 + "]" * 400, "list": [[[]]],
    "surrogate": "\ud800", "newline": "x\nVALID", "escape": "\x1b[2J", "zero": "\0", "up": "../" * 50, "true": True,
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE_VALUES)
def test_a_hostile_value_anywhere_is_found(evidence_of, what):
    evidence = evidence_of("shard")
    free = {name for name, kinds in ONCE.items() if "changed" in kinds}  # any text
    for path, value in parts(evidence.result):
        if value != HOSTILE_VALUES[what] and not (name_of(path) in free and isinstance(HOSTILE_VALUES[what], str)):
            evidence.write_result(replaced(evidence.result, path, HOSTILE_VALUES[what]))
            assert evidence.failed_gates(), path


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DISPLACED: dict[str, Callable[[Path], Any]] = {
    "missing": Path.unlink,
    "a directory": make_directory,
    "a link to nothing": lambda path: (path.unlink(), path.symlink_to("nothing")),
    "a link to itself": lambda path: (path.unlink(), path.symlink_to(path.name)),
    "a link to zeros": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "not UTF-8": lambda path: path.write_bytes(b"\xff" * 100),
    "empty": lambda path: path.write_bytes(b""),
    "large": lambda path: os.truncate(path, 300 << 20),
}


@pytest.mark.parametrize("kind", DISPLACED)
@pytest.mark.parametrize("file", [RESULT, LOG, MARKER, NPU_SMI, OUTPUTS])
def test_what_stands_in_the_place_of_a_file_is_found(cli, sets, tmp_path, file, kind):
    directory = shutil.copytree(sets["rows"], tmp_path / "set")
    DISPLACED[kind](directory / file)
    assert_invalid(check(cli.project, directory, timeout=30))


@pytest.mark.parametrize("kind", ["missing", "empty", "a file", "a link to nothing"])
def test_no_directory_is_invalid(cli, sets, tmp_path, kind):
    path = tmp_path / "set"
    if kind == "empty":
        path.mkdir()
    elif kind == "a file":
        path.write_text("{}")
    elif kind == "a link to nothing":
        path.symlink_to("nothing")
    assert_invalid(check(cli.project, path))


# ----------------------------------------------------------------------------------------------------------------------
# What the checker needs, and does
# ----------------------------------------------------------------------------------------------------------------------


def test_it_needs_nothing_but_the_standard_library_and_writes_nothing(cli, sets, tmp_path):
    """-I -S: no site-packages, so no torch and no numpy to import."""
    project = tmp_path / "project"
    project.mkdir()
    shutil.copy(cli.project / "inference.py", project)
    shutil.copytree(cli.project / "tests/data", project / "tests/data")
    directory = shutil.copytree(sets["rows"], project / "set")

    def state() -> dict[Path, tuple[bytes, int]]:
        files = [path for path in project.rglob("*") if path.is_file()]
        return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}

    before = state()
    done = subprocess.run([sys.executable, "-I", "-S", project / "inference.py", "--check", directory],
                          capture_output=True, text=True, env={}, cwd=project)  # fmt: skip
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "VALID")
    assert all(line.startswith("NOTE  ") for line in done.stderr.splitlines())
    assert state() == before


@pytest.mark.skipif(os.geteuid() != 0 and shutil.which("unshare") is None, reason="a read-only mount needs root")
def test_it_reads_a_read_only_directory(cli, sets, tmp_path):
    directory = shutil.copytree(sets["rows"], tmp_path / "set")
    for path in directory.iterdir():
        path.chmod(0o444)
    directory.chmod(0o555)
    program = faults.patched(cli.project, faults.WITHOUT_PRIVILEGES)
    done = subprocess.run([sys.executable, program, "--check", directory], capture_output=True, text=True,
                          env=support.clean_environment())  # fmt: skip
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "VALID"), done.stdout + done.stderr


def test_it_runs_when_the_locale_has_no_letters(cli, sets):
    command = [sys.executable, cli.project / "inference.py", "--check", sets["default"]]
    ascii_only = support.clean_environment() | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=ascii_only)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "VALID")


@pytest.mark.parametrize(("name", "code"), [("default", 0), ("refused", 8)])
def test_the_exit_code_is_the_verdict_also_when_nobody_reads_what_it_prints(cli, sets, name, code):
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, cli.project / "inference.py", "--check", sets[name]]
    done = subprocess.run(command, stdout=write_end, stderr=write_end, env=support.clean_environment())
    os.close(write_end)
    assert done.returncode == code


def test_a_checkpoint_that_was_named_outside_the_project_is_no_file_of_it(cli, tmp_path):
    """The same relative name may stand for another file there; and no other file of the reader's is looked into."""
    shutil.copy(cli.project / support.STANDIN, tmp_path / "README.md")
    done = cli("--checkpoint", "README.md", "--sha256", support.STANDIN_SHA256, "--hold-seconds", 0,
               "--log-dir", "logs", cwd=tmp_path)  # fmt: skip
    assert done.code == 0, done.stderr
    assert (cli.project / "README.md").exists()
    assert check(cli.project, tmp_path / "logs").returncode == 0


def test_a_slice_of_billions_is_refused_at_once(evidence_of):
    evidence = evidence_of("shard")
    changed = copy.deepcopy(evidence.result)
    changed["observations"]["shard"] = "2/99999999999"
    evidence.reseal(changed)
    assert "outputs" in evidence.failed_gates()


def test_an_npu_smi_log_of_endless_calls_is_refused_at_once(evidence_of):
    evidence = evidence_of("default")
    with open(evidence.path / NPU_SMI, "ab") as file:
        file.write(b"# npu-smi x at=2026 bytes=0 outcome=exit code 0\n\n" * 300_000)
    evidence.reseal()
    started = time.monotonic()
    assert "npu-smi" in evidence.failed_gates()
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("args", [("--check", "a", "b"), ("--log-dir", "")])
def test_a_usage_error_has_its_code_also_when_it_cannot_be_printed(cli, args):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, cli.project / "inference.py", *args], stderr=full, stdout=full,
                              env=support.clean_environment())  # fmt: skip
    assert done.returncode == 2


@pytest.mark.parametrize("option", ["-h", "--help", "--version", "--check"])
def test_a_command_line_that_asks_for_something_else_is_no_good_run(cli, evidence_of, option):
    """argparse would print its help in the middle of the check and end the process with 0."""
    evidence = evidence_of("default")
    evidence.reseal(evidence.result | {"argv": ["inference.py", option]})
    done = check(cli.project, evidence.path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (8, "INVALID")
    assert re.search("^FAIL  command line", done.stdout, re.M) and "usage:" not in done.stdout


def test_a_checkpoint_of_the_project_that_was_replaced_is_found(cli, tmp_path):
    project = support.project_copy(tmp_path / "project")
    shutil.copy(cli.project / "inference.py", project)
    done = cli(*support.STANDIN_ARGS, "--hold-seconds", 0, "--log-dir", tmp_path / "logs", cwd=project,
               script=project / "inference.py")  # fmt: skip
    assert done.code == 0, done.stderr
    assert check(project, tmp_path / "logs").returncode == 0
    with open(project / support.STANDIN, "ab") as file:
        file.write(b"x")
    assert re.search("^FAIL  checkpoint: sha256", check(project, tmp_path / "logs").stdout, re.M)


def test_no_file_outside_the_project_is_read(evidence_of):
    evidence = evidence_of("default")
    outside = evidence.path.parent / "secret"
    outside.write_text("its hash is nobody's business")
    for path in (str(outside), f"../../../../../../../../../..{outside}", "/dev/zero"):
        forged = copy.deepcopy(evidence.result)
        forged["checkpoint"]["path"] = path
        evidence.reseal(forged)
        assert "checkpoint" not in evidence.failed_gates()


@pytest.mark.parametrize("args", [("a", "b"), ("--bogus",), ("x", "--observation", "[0]"), ("x", "--hold-seconds=1")])
def test_it_goes_with_no_other_option(cli, sets, args):
    done = check(cli.project, *args)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("inference.py: usage: ") and done.stderr.count("\n") == 1
