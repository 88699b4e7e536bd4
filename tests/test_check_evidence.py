"""The checker of evidence: a good set is VALID, and no fact that a set states twice, or that can be recomputed from
the rest, changes unnoticed, not even when the hashes are made anew."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import importlib.util
import io
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
import pytest
from harness import checkpoints, faults, support

RESULT, LOG, MARKER, NPU_SMI, OUTPUTS = (
    "npu_result.json", "npu_inference.log", "npu_ready.marker", "npu_smi.log", "npu_outputs.npy",
)  # fmt: skip
ROWS = 40  # of a file of observations: more than the sixteen that the result shows
THREE = json.dumps(np.random.default_rng(5).normal(0, 2, (3, 4)).astype(np.float32).tolist())

KINDS = ("box", "gSDE, squash_output", "multi-discrete", "multi-binary")
GOOD = ("default", "rows", "shard", "timed", "many", "wide", "normalised", *KINDS)
# The stage in which each run fails, with its exit code.
FAILED = {
    "refused": ("verify", 3), "no device": ("npu", 4), "hung": ("npu", 6), "load failed": ("load", 5),
    "interrupted": ("ready", 143), "not finite": ("forward", 6), "wrong answer": ("forward", 6),
    "wrong rows": ("forward", 6), "benchmark failed": ("benchmark", 6),
}  # fmt: skip


def normalised(path: Path) -> tuple[str, ...]:
    """The arguments for a stand-in that was trained on normalised observations, which the evidence must say."""
    with zipfile.ZipFile(support.PROJECT / support.STANDIN) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name == "data":
                content = json.dumps(json.loads(content) | {"_last_original_obs": {":type:": "array"}}).encode()
            new.writestr(name, content)
    return ("--checkpoint", path.name, "--sha256", hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.fixture(scope="module")
def sets(cli, tmp_path_factory) -> dict[str, Path]:
    """An evidence set of each kind, by name; not to be written to."""
    shutil.copy(support.PROJECT / "tests/check_evidence.py", cli.project / "tests")
    rng = np.random.default_rng(6)
    np.save(cli.project / "rows.npy", rng.normal(0, 2, (ROWS, 4)).astype(np.float32))
    np.save(cli.project / "more.npy", rng.normal(0, 2, (3 * ROWS - 1, 4)))

    def kind(name: str, made: checkpoints.Kind) -> tuple[str, ...]:
        path = checkpoints.make(made, cli.project / f"{name}.zip")
        return ("--checkpoint", path.name, "--sha256", hashlib.sha256(path.read_bytes()).hexdigest())

    standin = support.STANDIN_ARGS
    wide = checkpoints.Kind(gymnasium.spaces.MultiBinary(1200), observation_space=checkpoints.box(1500))
    runs: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
        "default": (standin, {}),
        "rows": ((*standin, "--observations", "rows.npy"), {}),
        "shard": ((*standin, "--observations", "more.npy", "--shard", "2/3", "--benchmark", "2"), {}),
        "first shard": ((*standin, "--observations", "more.npy", "--shard", "1/3"), {}),
        "last shard": ((*standin, "--observations", "more.npy", "--shard", "3/3"), {}),
        "timed": ((*standin, "--observation", THREE, "--benchmark", "2", "--tolerance", "0.01"), {}),
        "many": ((*standin, f"--observation={rng.normal(0, 2, (20, 4)).tolist()}"), {}),
        "wide": (kind("wide", wide), {}),
        "normalised": ((*normalised(cli.project / "normalised.zip"), "--observations", "rows.npy"), {}),
        **{name: ((*kind(name, checkpoints.KINDS[name]), "--observation", THREE), {}) for name in KINDS},
        "refused": (("--checkpoint", "tests/data/README.md"), {}),
        "no device": (standin, {"CANNSIM_DEVICES": "0"}),
        "hung": ((*standin, "--timeout-seconds", "1"), {"CANNSIM_HANG": "aclrtSetDevice"}),
        "load failed": (standin, {"CANNSIM_FAIL": "aclrtMemcpy:10"}),
        "not finite": ((*standin, "--observation", "[3e38, 3e38, 3e38, 3e38]"), {}),
        "wrong answer": (standin, {"CANNSIM_CORRUPT": "exec:aclnnAddmm:*:zero"}),
        "wrong rows": ((*standin, "--observations", "rows.npy"), {"CANNSIM_CORRUPT": "exec:aclnnAddmm:*:zero"}),
        "benchmark failed": ((*standin, "--benchmark", "200"), {"CANNSIM_CORRUPT": "exec:aclnnAddmm:300"}),
    }  # fmt: skip

    def make(name: str) -> Path:
        args, variables = runs[name]
        directory = Path("evidence", re.sub(r"\W", "-", name))
        done = cli(*args, "--hold-seconds", 0, "--log-dir", directory, env=variables)
        assert done.code == FAILED.get(name, ("", 0))[1], (name, done.stderr)
        return cli.project / directory

    interrupted = cli.start(*standin, "--hold-seconds", 600, "--log-dir", "evidence/interrupted")
    with ThreadPoolExecutor(2) as pool:
        made = dict(zip(runs, pool.map(make, runs), strict=True))
    interrupted.wait_for("npu_id=")
    interrupted.signal(signal.SIGTERM)
    assert interrupted.wait().code == FAILED["interrupted"][1]
    return {**made, "interrupted": cli.project / "evidence/interrupted"}


@pytest.fixture(scope="module")
def checker(cli, sets) -> ModuleType:
    """tests/check_evidence.py as a module: some ten thousand checks are too many for a process each."""
    spec = importlib.util.spec_from_file_location("checker", cli.project / "tests/check_evidence.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    program = module.program()
    program.read_checkpoint = functools.cache(program.read_checkpoint)  # the same few files, again and again
    return module


class Copy:
    """An evidence set to be tampered with."""

    def __init__(self, checker: ModuleType, original: Path, directory: Path) -> None:
        self.checker, self.original = checker, original
        self.path = directory / "copy"
        shutil.copytree(original, self.path)
        self.result: dict[str, Any] = json.loads((original / RESULT).read_text())

    def write_result(self, result: dict[str, Any]) -> None:
        (self.path / RESULT).write_text(json.dumps(result, indent=2) + "\n")

    def reseal(self, result: dict[str, Any] | None = None) -> None:
        """Makes the hashes of the files anew, as an attacker would."""
        result = copy.deepcopy(self.result if result is None else result)
        present = [name for name in (LOG, NPU_SMI, MARKER, OUTPUTS) if (self.path / name).exists()]
        result["files"] = {name: hashlib.sha256((self.path / name).read_bytes()).hexdigest() for name in present}
        self.write_result(result)

    def report(self, *args: object) -> dict[str, Any]:
        """Checks the set. Whatever it holds: exit code, verdict and gates agree, and nothing is printed beside."""
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()) as errors:
            code = self.checker.main([str(self.path), "--json", *map(str, args)])
        [report] = json.loads(printed.getvalue())["sets"]
        failed = any(gate["problems"] for gate in report["gates"])
        assert errors.getvalue() == "" and (code == 0) == (report["verdict"] == "VALID")
        assert failed == (report["verdict"] == "INVALID")
        return report

    def failed_gates(self, *args: object) -> list[str]:
        """The gates that fail; none when the verdict is that of the original."""
        report = self.report(*args)
        failed = [gate["gate"] for gate in report["gates"] if gate["problems"]]
        expected = "FAILED RUN" if self.result["error"] else "VALID"
        assert failed or report["verdict"] == expected
        return failed

    def forge_log(self, result: dict[str, Any]) -> None:
        """Writes the log and the marker that belong to such a result, as a forger would who knows the format."""
        lines = [self.checker.one_line(line) for stage in result["stages"]
                 for line in self.checker.lines_of(result, stage)]  # fmt: skip
        (self.path / LOG).write_text("\n".join([*lines, (self.path / LOG).read_text().splitlines()[-1]]) + "\n")
        (self.path / MARKER).write_text(
            f"NPU_READY_PID={result['pid']}\nDEVICE={result['npu_device']}\nHOLD_SECONDS={result['hold_seconds']}\n"
            f"READY_AT={result['ready_at']}\nSIMULATED={int(result['simulated'])}\n")  # fmt: skip
        self.reseal(result)

    def restore(self) -> None:
        shutil.rmtree(self.path)
        shutil.copytree(self.original, self.path)


@pytest.fixture
def evidence_of(checker, sets, tmp_path) -> Callable[[str], Copy]:
    return lambda name: Copy(checker, sets[name], tmp_path)


def check(project: Path, *args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """`python3 tests/check_evidence.py ARGS`, and no simulator near."""
    command = [sys.executable, project / "tests/check_evidence.py", *args]
    return subprocess.run(command, capture_output=True, text=True, env=support.clean_environment(), **options)


# ----------------------------------------------------------------------------------------------------------------------
# The verdicts, and what is printed beside them
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*GOOD, *FAILED])
def test_the_evidence_of_a_run_is_consistent(cli, sets, name):
    done = check(cli.project, sets[name])
    verdict = done.stdout.splitlines()[-1]
    expected = "FAILED RUN" if name in FAILED else "VALID"
    assert (verdict, done.returncode, done.stderr) == (expected, int(name in FAILED), ""), done.stdout
    error = support.read_result(sets[name])["error"]
    assert (error and error["stage"]) == FAILED.get(name, (None,))[0]


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
    other: dict[type, list[Callable[[Any], Any]]] = {
        bool: [int], int: [float, str], float: [str], str: [lambda text: [text]], type(None): [],
        list: [lambda value: {"0": value}, str], dict: [lambda value: list(value.values()), str]}  # fmt: skip
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
        yield "less", value / 2 if isinstance(value, float) else value - 1
        if isinstance(value, float):
            yield "nudged", math.nextafter(value, math.inf)
            yield "last digit", round(value + 1e-6, 6)
            yield "retyped", round(value)
    elif isinstance(value, str):
        yield "changed", value + "x"
        yield "emptied", ""
        if digits := re.search(r"\d(?=\D*$)", value):
            yield "last digit", value[: digits.start()] + str((int(digits[0]) + 1) % 10) + value[digits.end() :]
    elif value:
        yield "emptied", type(value)()
    if isinstance(value, dict):
        yield "added", {**value, "another": 1}
    elif isinstance(value, list):
        yield "added", [*value, value[-1] if value else "x"]
        if value != value[::-1]:
            yield "reordered", value[::-1]


def with_part(document: dict[str, Any], path: Path_, *value: Any) -> dict[str, Any]:
    """The document with another value in this place; without one, without the key."""
    changed = copy.deepcopy(document)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    if value:
        parent[path[-1]] = value[0]
    else:
        del parent[path[-1]]
    return changed


def name_of(path: Path_) -> str:
    name = ".".join("*" if isinstance(key, int) else key for key in path)
    name = re.sub(r"^(stages|outputs)\.\w+", r"\1.*", name)
    return re.sub(r"^reference\.outputs\.\w+", "reference.outputs.*", name)


def survivors(evidence: Copy, only: tuple[str, ...] = ()) -> dict[str, set[str]]:
    """The changes of the JSON that are not found: {name of the value: kinds of change}."""
    found: dict[str, set[str]] = {}
    for path, value in parts(evidence.result):
        if only and path[0] not in only:
            continue
        changed = [(kind, with_part(evidence.result, path, other)) for kind, other in mutations(value)
                   if other != value or type(other) is not type(value)]  # fmt: skip
        for kind, document in [*changed, ("removed", with_part(evidence.result, path))]:
            evidence.write_result(document)
            if not evidence.failed_gates():
                found.setdefault(name_of(path), set()).add(kind)
    return found


def each(names: str, *kinds: str) -> dict[str, set[str]]:
    return {name: set(kinds) for name in names.split()}


# Of the clock: read to the microsecond, and shown in the log to a tenth of a millisecond.
CLOCK = each("total_s stages.* load_s forward_s reference.elapsed_s", "last digit")
# Of the benchmark the mean stands in the JSON alone, and percentiles in the log to a tenth of a microsecond.
BENCHMARK = {
    **{f"benchmark.{way}.{name}": {"nudged"} for way in ("eager", "graph") for name in ("p50_s", "p90_s", "p99_s")},
    **each("benchmark.eager.mean_s benchmark.graph.mean_s", "last digit", "changed", "less", "nudged"),
}  # fmt: skip
OF_THE_ANSWER = (
    "action_space", "observation", "outputs", "reference", "rows", "repeated_rows", "num_params", "action", "value",
    "log_prob", "entropy", "probs", "logits", "mean", "std", "env_action", "observations", "notes",
)  # fmt: skip


@pytest.mark.parametrize("name", ["default", "shard"])
def test_every_change_of_a_fact_in_the_json_is_found_but_of_those_that_no_reader_can_know(evidence_of, name):
    expected = CLOCK | (BENCHMARK if name == "shard" else {})
    found = survivors(evidence_of(name))
    assert set(found) <= set(expected) and all(kinds <= expected[name] for name, kinds in found.items()), found


@pytest.mark.parametrize("name", ["many", "normalised", *KINDS])
def test_every_change_of_an_answer_in_the_json_is_found(evidence_of, name):
    assert set(survivors(evidence_of(name), OF_THE_ANSWER)) <= {"reference.elapsed_s"}


# What the last stage of a run that failed had measured, and not yet said in the log, stands once; so does how its
# process ended. What it would have measured had it gone on may be claimed: it is no fact of a good run.
ENDED = CLOCK | each("worker_exit", "last digit")
NPU_STARTED = {
    **each("simulated npu_available", "null", "changed"), **each("simulator", "null", "last digit"),
    **each("environment", "null"),
    **each("versions.stable_baselines3 versions.gymnasium versions.numpy versions.cloudpickle visible_devices "
           "environment.ASCEND_RT_VISIBLE_DEVICES environment.TASK_QUEUE_ENABLE environment.ACL_OP_INIT_MODE "
           "environment.TORCH_NPU_FALLBACK_CPU_DISABLE environment.TORCH_DEVICE_BACKEND_AUTOLOAD "
           "environment.KINETO_LOG_LEVEL", "null", "last digit", "changed", "emptied"),
    **each("versions.cann versions.npu_smi versions.driver npu_device npu_device_name device_count device_nodes "
           "determinism", "claimed"),
}  # fmt: skip
ANSWERED = {
    **each("published mean std env_action", "claimed"), "outputs.*": {"removed"},
    **each("output_device outputs.*.dtype outputs.*.device", "changed", "null", "last digit", "emptied"),
    "outputs.*.shape": {"added", "emptied", "reordered"}, "outputs.*.shape.*": {"changed", "less", "removed"},
}  # fmt: skip
SURVIVORS_OF_FAILED = {
    "refused": each("model_id source_revision license observation_shape action_space rows", "claimed")
    | each("notes", "added")
    | {f"versions.{name}": {"claimed"} for name in ("torch", "torch_npu", "cann", "npu_smi", "driver", "numpy",
                                                     "stable_baselines3", "gymnasium", "cloudpickle")},
    "no device": NPU_STARTED,
    "hung": NPU_STARTED,
    "load failed": each("policy_class num_params param_devices all_params_on_npu params_match_checkpoint model_device "
                        "load_s", "claimed"),
    "interrupted": {},
    "not finite": each("params_match_after_forward input_device inputs_match_host output_device all_outputs_on_npu "
                       "bitwise_repeatable repeated_rows observation action value log_prob entropy probs logits mean "
                       "std env_action outputs kernels forward_s", "claimed"),
    "wrong answer": ANSWERED,
    "wrong rows": ANSWERED,
    "benchmark failed": each("benchmark", "claimed"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILED)
def test_a_failed_run_claims_nothing_beyond_the_stage_in_which_it_failed(evidence_of, name):
    """Nor is it ever taken for a good run, whatever is changed in its JSON: `failed_gates` asserts that."""
    expected = ENDED | SURVIVORS_OF_FAILED[name]
    found = survivors(evidence_of(name))
    assert set(found) <= set(expected) and all(kinds <= expected[name] for name, kinds in found.items()), found


@pytest.mark.parametrize("name", FAILED)
def test_a_failed_run_cannot_be_declared_a_success(evidence_of, name):
    evidence = evidence_of(name)
    evidence.write_result(evidence.result | {"exit_code": 0})
    assert "outcome" in evidence.failed_gates()
    evidence.result |= {"exit_code": 0, "error": None}
    evidence.write_result(evidence.result)
    assert "INVALID" in evidence.report()["verdict"]


# ----------------------------------------------------------------------------------------------------------------------
# The other files: every line
# ----------------------------------------------------------------------------------------------------------------------


def line_mutations(text: str) -> Iterator[tuple[str, str]]:
    """(what was done to which line, the text after that)"""
    lines = text.split("\n")[:-1]
    for number, line in enumerate(lines):
        before, after = lines[:number], lines[number + 1 :]
        another = "[forward] action=[1] shape=(1,) dtype=torch.int64 device=npu:0"
        others = {"changed": [[line + "x"], [line.swapcase()], [line + "\r"], [" " + line]], "removed": [[]],
                  "doubled": [[line, line]], "added": [[another, line], ["", line]]}  # fmt: skip
        digits = [match.start() for match in re.finditer(r"\d", line)]
        for at in {digits[0], digits[-1]} if digits else ():
            others["changed"].append([f"{line[:at]}{(int(line[at]) + 1) % 10}{line[at + 1 :]}"])
        if after:
            others["swapped"] = [[after[0], line]]
        for kind, replacements in others.items():
            for replacement in replacements:
                rest = after[1:] if kind == "swapped" else after
                changed = "".join(f"{line}\n" for line in [*before, *replacement, *rest])
                if changed != text:
                    yield f"{number} {kind}: {line[:60]}", changed


def write(path: Path, text: str) -> None:
    path.write_bytes(text.encode())  # as it is: with newline="" Path.write_text would do, from Python 3.10


@pytest.mark.parametrize("file", [LOG, MARKER, NPU_SMI])
def test_every_change_of_a_file_is_found_by_its_hash(evidence_of, file):
    evidence = evidence_of("default")
    for what, changed in line_mutations((evidence.path / file).read_text()):
        write(evidence.path / file, changed)
        assert "files" in evidence.failed_gates(), what


@pytest.mark.parametrize("name", ["default", "shard", "box", "many"])
@pytest.mark.parametrize("file", [LOG, MARKER])
def test_every_change_of_a_line_is_found_even_with_the_hashes_made_anew(evidence_of, file, name):
    evidence = evidence_of(name)
    for what, changed in line_mutations((evidence.path / file).read_text()):
        write(evidence.path / file, changed)
        evidence.reseal()
        assert evidence.failed_gates(), what


def test_of_npu_smi_what_no_other_file_repeats_may_be_changed_and_nothing_else(evidence_of):
    """Health, power, temperature, memory and the frame of the tables, as long as the length stays."""
    evidence = evidence_of("default")
    survived = []
    for what, changed in line_mutations((evidence.path / NPU_SMI).read_text()):
        write(evidence.path / NPU_SMI, changed)
        evidence.reseal()
        if not evidence.failed_gates():
            survived.append(what)
    figures = re.compile(r"\d+ (changed|swapped): (# npu-smi info at=|\+[-=+]+|cannsim: |\| (NPU|Chip|npu-smi|\d |No))")
    assert survived and all(map(figures.match, survived)), survived
    assert not any(re.search(rf"changed: .*\| {evidence.result['pid']} +\|", what) for what in survived), survived


@pytest.mark.parametrize("name", ["load failed", "interrupted", "wrong answer", "hung"])
def test_the_log_of_a_failed_run_is_compared_as_well(evidence_of, name):
    evidence = evidence_of(name)
    log = (evidence.path / LOG).read_text()
    for what, changed in line_mutations(log):
        write(evidence.path / LOG, changed)
        evidence.reseal()
        last_of_stage = int(what.split()[0]) == log.count("\n") - 3 and "removed" in what
        assert evidence.failed_gates() or last_of_stage, what


@pytest.mark.parametrize("name", ["default", "rows", "refused", "load failed", "interrupted"])
def test_no_file_can_be_taken_away_or_slipped_in(sets, evidence_of, name):
    evidence = evidence_of(name)
    for path in sorted(evidence.path.iterdir()):
        evidence.restore()
        if path.name != RESULT:
            path.unlink()
            assert "files" in evidence.failed_gates(), path.name
            evidence.reseal()
            assert evidence.failed_gates(), path.name
    for file in (OUTPUTS, MARKER, NPU_SMI):
        evidence.restore()
        if not (evidence.path / file).exists():
            shutil.copy(sets["rows"] / file, evidence.path)
            assert "files" in evidence.failed_gates(), file
            evidence.reseal()
            assert "files" in evidence.failed_gates(), file


# What of npu_smi.log is taken into the result; the rest of what npu-smi printed stands only there.
NPU_SMI_FACTS = {
    "another process": (r"(\| 0       0 +\| )PID ", r"\g<1>1 "),
    "the row is gone": (r"\| 0       0 +\| PID .*\n", ""),
    "another chip": (r"\| 0       0( +\| PID )", r"| 3       0\1"),
    "another memory": (r"(\| PID .* )\d+( +\|)", r"\g<1>99\2"),
    "no table": (r"(?s)(READY.*)Process id ", r"\1Process no "),
    "another driver": (r"Version: [\d.]+", "Version: 25.5.2"),
    "another version": (r"npu-smi [\d.]+ ", "npu-smi 25.5.2 "),
    "another name": (r"910B4-1", "310P3"),
    "another outcome": (r"(?s)(# npu-smi .*# npu-smi info .* outcome=)exit code 0", r"\1exit code 1"),
    "could not be asked before": (r"(# npu-smi info .* outcome=)exit code 0", r"\1exit code 1"),
    "listed before": (r"(\| NPU     Chip .*\n.*\n)", r"\1| 0       0 | PID | python3 | 2 |\n"),
    "another length": (r"bytes=\d+", "bytes=3"),
    "another command": (r"# npu-smi info ", "# npu-smi info -m "),
    "before the start": (r" at=\S+", " at=2020-01-01T00:00:00.000000+00:00"),
    "after the end": (r"(?s)(# npu-smi .*# npu-smi info at=)\S+", r"\g<1>2099-01-01T00:00:00.000000+00:00"),
    "before the marker": (r"(?s)(at=)(\S+)(.*# npu-smi info at=)\S+", r"\1\2\3\2"),
    "no time": (r" at=\S+", " at=x"),
    "two calls": (r"(?s)(# npu-smi .*\n\n)(# npu-smi .*)", r"\1\1\2"),
    "a call more": (r"(?s)(# npu-smi .*\n\n)(# npu-smi .*)", r"\1\2\2"),
    "one call": (r"(?s)(# npu-smi .*\n\n)(# npu-smi .*)", r"\1"),
    "empty": (r"(?s).*", ""),
}  # fmt: skip


@pytest.mark.parametrize("fact", NPU_SMI_FACTS)
def test_what_the_result_says_of_npu_smi_must_follow_from_its_raw_answers(evidence_of, fact):
    evidence = evidence_of("default")
    pattern, replacement = (text.replace("PID", str(evidence.result["pid"])) for text in NPU_SMI_FACTS[fact])
    text = (evidence.path / NPU_SMI).read_text()
    if fact == "no table":  # in the hold, not before
        before, after = text.rsplit("# npu-smi", 1)
        changed, count = f"{before}# npu-smi{after.replace('Process id', 'Process no')}", 1
    else:
        changed, count = re.subn(pattern, replacement, text, count=1)
    assert count == 1 and changed != text
    # what keeps the lengths in order, so that only the meaning tells
    if fact not in ("another length", "empty"):
        changed = "".join(
            re.sub(r"bytes=\d+", f"bytes={len(part.partition(chr(10))[2].encode()) - 1}", part, count=1)
            for part in re.split(r"(?m)^(?=# npu-smi )", changed)[1:])  # fmt: skip
    write(evidence.path / NPU_SMI, changed)
    evidence.reseal()
    assert evidence.failed_gates() == ["npu-smi"]


def test_a_run_asks_about_every_chip_that_is_full_also_when_the_first_lists_the_pid(checker):
    chips = ["0 0", "1 0"]
    rows = [f"| {chip} | {100 * number} | python3 | 40 |" for chip in chips for number in range(1, 9)]
    table = "\n".join(["| NPU Chip | Process id | Process name | Process memory(MB) |", *rows])
    answers = {"info -t proc-mem -i 0 -c 0": "Process id:77  Process name:python3", "info -t proc-mem -i 1 -c 0": ""}
    asked = [("info", table), ("info", table), *answers.items()]
    calls = [checker.Call(arguments, "", "exit code 0", text) for arguments, text in asked]
    found, wanted = checker.correlate("77", calls)
    assert wanted == [arguments for arguments, _ in asked]
    assert (found["pid_found"], found["npu_id"], found["matched_by"]) == (True, "0", "proc-mem")


# ----------------------------------------------------------------------------------------------------------------------
# The outputs of a file of observations: every row
# ----------------------------------------------------------------------------------------------------------------------


def field(table: np.ndarray, name: str, row: int, value: Any) -> np.ndarray:
    table[name][row] = value
    return table


def retyped(table: np.ndarray, change: Callable[[list[tuple[Any, ...]]], list[tuple[Any, ...]]]) -> np.ndarray:
    """The same rows, with other columns."""
    columns = [(name, table.dtype[name].base.str, table.dtype[name].shape) for name in table.dtype.names]
    wanted = np.zeros(len(table), change(columns))
    for name in set(wanted.dtype.names) & set(table.dtype.names):
        wanted[name] = table[name].reshape(wanted[name].shape)
    return wanted


OUTPUT_CHANGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "a value that is shown": lambda table: field(table, "value", 3, 1.0),
    "the log_prob of a later row": lambda table: field(table, "log_prob", 30, -0.7),
    "the entropy of a later row": lambda table: field(table, "entropy", 30, 0.7),
    "the probabilities of a later row": lambda table: field(table, "probs", 30, [0.7, 0.3]),
    "the logits of a later row": lambda table: field(table, "logits", 30, [-0.1, -0.7]),
    "the action of a later row": lambda table: field(table, "action", 30, 1 - table["action"][30]),
    "no action": lambda table: field(table, "action", 30, 7),
    "NaN in a later row": lambda table: field(table, "value", 30, np.nan),
    "infinity in a later row": lambda table: field(table, "value", 30, np.inf),
    "another type": lambda table: retyped(table, lambda columns: [
        (name, "<f8" if name == "value" else kind, shape) for name, kind, shape in columns]),
    "another byte order": lambda table: retyped(table, lambda columns: [
        (name, kind.replace("<f", ">f"), shape) for name, kind, shape in columns]),
    "another order": lambda table: retyped(table, lambda columns: columns[::-1]),
    "another shape": lambda table: retyped(table, lambda columns: [
        (name, kind, () if name == "value" else shape) for name, kind, shape in columns]),
    "a row less": lambda table: table[:-1],
    "a row more": lambda table: np.concatenate([table, table[:1]]),
    "another name": lambda table: retyped(table, lambda columns: [
        ("valeur" if name == "value" else name, kind, shape) for name, kind, shape in columns]),
    "one less": lambda table: retyped(table, lambda columns: [column for column in columns if column[0] != "entropy"]),
    "one more": lambda table: retyped(table, lambda columns: [*columns, ("cpu", "<f4", ())]),
}  # fmt: skip


@pytest.mark.parametrize("what", OUTPUT_CHANGES)
def test_every_row_of_the_outputs_is_recomputed(evidence_of, what):
    evidence = evidence_of("rows")
    table = np.load(evidence.path / OUTPUTS)
    np.save(evidence.path / OUTPUTS, OUTPUT_CHANGES[what](table))
    assert "files" in evidence.failed_gates()
    evidence.reseal()
    assert {"files", "rows"} & set(evidence.failed_gates())


def test_outputs_that_are_saved_as_they_were_are_valid(evidence_of):
    """Else the changes above might be found for the way in which they are written."""
    evidence = evidence_of("rows")
    np.save(evidence.path / OUTPUTS, np.load(evidence.path / OUTPUTS))
    evidence.reseal()
    assert evidence.failed_gates() == []


def test_the_value_of_a_later_row_is_recomputed_where_the_observations_are_at_hand(cli, evidence_of):
    """Without them it has no other witness than the hash of the file, and what the errors allow."""
    evidence = evidence_of("rows")
    table = np.load(evidence.path / OUTPUTS)
    np.save(evidence.path / OUTPUTS, field(table, "value", 30, table["value"][30] + 1))
    assert evidence.failed_gates() == ["files"]
    evidence.reseal()
    assert evidence.failed_gates() == []
    assert evidence.failed_gates("--observations", cli.project / "rows.npy") == ["answers"]


@pytest.mark.parametrize("name", ["rows", "shard"])
def test_with_the_file_of_observations_every_row_is_recomputed(cli, evidence_of, name):
    evidence, file = evidence_of(name), cli.project / {"rows": "rows.npy", "shard": "more.npy"}[name]
    assert evidence.failed_gates("--observations", file) == []
    notes = " ".join(evidence.report()["notes"])
    assert "--observations" in notes and "--observations" not in " ".join(
        evidence.report("--observations", file)["notes"])  # fmt: skip
    changed = copy.deepcopy(evidence.result)
    changed["observations"]["sha256_float32"] = "0" * 64
    evidence.forge_log(changed)
    assert evidence.failed_gates() == []
    assert evidence.failed_gates("--observations", file) == ["answers"]
    other = np.load(file)
    other[-1 if name == "rows" else 50, 0] += 1
    np.save(evidence.path.parent / "other.npy", other)
    evidence.restore()
    assert evidence.failed_gates("--observations", evidence.path.parent / "other.npy") == ["answers"]
    np.save(evidence.path.parent / "fewer.npy", other[1:])
    fewer = evidence.path.parent / "fewer.npy"
    assert evidence.failed_gates("--observations", fewer) == ["answers"]
    assert "another file of observations" in str(evidence.report("--observations", fewer)["gates"][-1])


def test_a_csv_of_observations_is_read_as_the_run_reads_it(cli, evidence_of, sets, tmp_path):
    rows = cli.project / "rows.csv"
    rows.write_text("\ufeff" + "".join(f'"{row}",0.5,-1e-3,2\r\n' for row in range(5)))
    done = cli(*support.STANDIN_ARGS, "--observations", rows.name, "--shard", "2/2", "--hold-seconds", 0,
               "--log-dir", tmp_path / "set")  # fmt: skip
    assert done.code == 0, done.stderr
    done = check(cli.project, tmp_path / "set", "--observations", rows)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "VALID"), done.stdout
    assert "PASS  answers" in done.stdout and "--observations" not in done.stdout
    rows.write_text(rows.read_text().replace("0.5", "0.25"))
    assert "FAIL  answers" in check(cli.project, tmp_path / "set", "--observations", rows).stdout


@pytest.mark.parametrize("damage", ["truncated", "flipped", "not numpy", "empty", "a zip"])
def test_damaged_outputs_are_found(evidence_of, damage):
    evidence = evidence_of("rows")
    data = bytearray((evidence.path / OUTPUTS).read_bytes())
    if damage == "truncated":
        data = data[:-200]
    elif damage == "flipped":
        data[-1] ^= 0x40
    elif damage == "a zip":
        np.savez_compressed(evidence.path / "bomb.npz", value=np.zeros(50_000_000, np.float32))
        data = bytearray((evidence.path / "bomb.npz").read_bytes())
        (evidence.path / "bomb.npz").unlink()
    else:
        data = bytearray(b"" if damage == "empty" else b"x" * 500)
    (evidence.path / OUTPUTS).write_bytes(data)
    evidence.reseal()
    assert {"files", "rows"} & set(evidence.failed_gates())


@pytest.mark.parametrize("file", [LOG, MARKER, NPU_SMI, OUTPUTS])
def test_a_file_of_another_run_is_found(cli, sets, evidence_of, tmp_path, file):
    """Of the same checkpoint and the same observations."""
    evidence = evidence_of("rows")
    other = "shard" if file == OUTPUTS else "first shard"
    shutil.copy(sets[other] / file, evidence.path)
    assert "files" in evidence.failed_gates()
    evidence.reseal()
    assert evidence.failed_gates()


# ----------------------------------------------------------------------------------------------------------------------
# A forger who rewrites the log and the marker as well
# ----------------------------------------------------------------------------------------------------------------------

# What a forger may say freely then, and to any reader: what only the machine could know.
FORGEABLE = {
    "cwd", "environment.TASK_QUEUE_ENABLE", "environment.ACL_OP_INIT_MODE", "determinism.allow_hf32_conv",
    "determinism.device", "worker_exit", "started_at", "simulator",
    *(f"versions.{name}" for name in ("python", "platform", "torch", "torch_npu", "cann", "stable_baselines3",
                                      "gymnasium", "numpy", "cloudpickle")),
    *(f"kernels.{name}" for name in ("aclnnAddmm",)),
    "forward_s", "reference.elapsed_s",  # where the stage was long enough
}  # fmt: skip


def forged(evidence: Copy, *args: object) -> set[str]:
    """The values that can be changed together with the log and the marker."""
    passed = set()
    for path, value in parts(evidence.result):
        for kind, other in mutations(value):
            if kind != "changed" or path[0] in ("files", "argv"):
                continue
            changed = with_part(evidence.result, path, other)
            try:
                evidence.forge_log(changed)
            except (TypeError, KeyError, ValueError, AttributeError):
                continue  # there is no log for such a result
            if not evidence.failed_gates(*args):
                passed.add(re.sub(r"kernels\.\w+", "kernels.aclnnAddmm", name_of(path)))
    return passed


@pytest.mark.parametrize("name", ["default", "box", "many"])
def test_even_a_forger_of_all_files_must_keep_to_what_can_be_recomputed(evidence_of, name):
    # of twenty rows without a file, four are shown to nobody
    free = FORGEABLE | ({"reference.outputs.*.max_abs_error"} if name == "many" else set())
    passed = forged(evidence_of(name))
    assert passed <= free, passed - free


def rewrite_answer(evidence: Copy, what: str) -> dict[str, Any]:
    """Another answer, with all that follows from it, as a forger would make it who has no checkpoint."""
    result = copy.deepcopy(evidence.result)
    if what == "value":
        result["value"] = [[value + 5.0] for [value] in result["value"]]
        return result
    logits = np.array([[math.log(0.3), math.log(0.7)]], np.float32).astype(float)
    probs = np.exp(logits)
    result.update(logits=logits.tolist(), probs=probs.astype(np.float32).astype(float).tolist(), action=[1],
                  log_prob=np.float32(logits[:, 1]).astype(float).tolist(),
                  entropy=np.float32(-(probs * logits).sum(axis=1)).astype(float).tolist())  # fmt: skip
    return result


@pytest.mark.parametrize("what", ["value", "logits"])
def test_an_answer_that_is_rewritten_everywhere_is_found_where_the_checkpoint_is_at_hand(
    cli, evidence_of, tmp_path, what
):
    evidence = evidence_of("default")
    forgery = rewrite_answer(evidence, what)
    evidence.forge_log(forgery)
    assert "answers" in evidence.failed_gates()
    # where it is not, a note says so
    if what == "logits":  # the angle between them and the reference, which is near 0 by its cosine
        for errors in forgery["reference"]["outputs"].values():
            errors.update(max_abs_error=0.9e-3, mean_abs_error=0.9e-3, max_rel_error_percent=0.3)
        evidence.forge_log(forgery)
    project = support.project_copy(tmp_path / "project")
    shutil.copy(cli.project / "inference.py", project)
    shutil.copy(support.PROJECT / "tests/check_evidence.py", project / "tests")
    standin = (project / support.STANDIN).rename(tmp_path / "standin.zip")
    done = check(project, evidence.path)
    assert done.returncode == 0 and "NOTE  the checkpoint is not at hand: the answers were not" in done.stdout
    done = check(project, evidence.path, "--checkpoint", standin)
    assert done.returncode == 1 and "FAIL  answers: " in done.stdout
    standin.write_bytes(standin.read_bytes() + b"x")
    assert "FAIL  checkpoint: " in check(project, evidence.path, "--checkpoint", standin).stdout


INCONSISTENT: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a ragged value": lambda r: r.update(value=[r["value"][0], [*r["value"][1], 1.0], *r["value"][2:]]),
    "a ragged observation": lambda r: r.update(observation=[r["observation"][0], r["observation"][1][:3]]),
    "errors beside agreement": lambda r: r["reference"].update(action_agreement=0.5),
    "ties beside agreement": lambda r: r["reference"].update(ties=1),
    "more devices than are visible": lambda r: r.update(device_count=7),
    "another chip": lambda r: r.update(npu_device_name="Ascend310P3 (simulated)"),
    "other parameters": lambda r: r.update(num_params=r["num_params"] + 1),
    "more repeated than ran": lambda r: r.update(repeated_rows=r["repeated_rows"] + 1),
    "a low cosine": lambda r: r["reference"]["outputs"]["value"].update(cosine=0.5),
    "a large error": lambda r: r["reference"]["outputs"]["value"].update(max_abs_error=3.0),
    "no error": lambda r: [errors.update(max_abs_error=0.0, mean_abs_error=0.0, max_rel_error_percent=0.0)
                           for errors in r["reference"]["outputs"].values()],
    "a small relative error": lambda r: r["reference"]["outputs"]["value"].update(max_rel_error_percent=0.0),
    "a wrong limit of a percent": lambda r: r["reference"].update(within_1_percent=False),
    "another dtype": lambda r: r["outputs"]["value"].update(dtype="torch.float16"),
    "another digest": lambda r: r["checkpoint"].update(sha256="A" * 64),
    "a physical NPU": lambda r: r.update(simulated=False, simulator=None, npu_device_name="Ascend910B4-1"),
    "no kernels": lambda r: r.update(kernels={}),
    "a kernel of the CPU": lambda r: r.update(kernels={"aten::_to_cpu": 1}),
    "published": lambda r: r.update(published={"tolerance": 0.001, "within_tolerance": True, "action_equal": True,
                                               "outputs": {"value": 0.0}}),
}  # fmt: skip


@pytest.mark.parametrize("what", INCONSISTENT)
def test_a_fact_that_another_contradicts_is_found_although_the_log_repeats_it(evidence_of, what):
    evidence = evidence_of("timed")
    forgery = copy.deepcopy(evidence.result)
    INCONSISTENT[what](forgery)
    evidence.forge_log(forgery)
    assert evidence.failed_gates()


# ----------------------------------------------------------------------------------------------------------------------
# The project's own logs, and the program
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def project(cli, sets, tmp_path) -> Path:
    """A project of its own, with a good run in its logs."""
    project = support.project_copy(tmp_path / "the project")
    shutil.copy(cli.project / "inference.py", project)  # the one that the fork server knows
    shutil.copy(support.PROJECT / "tests/check_evidence.py", project / "tests")
    (project / "SHA256SUMS").write_text("")
    done = cli(*support.STANDIN_ARGS, "--hold-seconds", 0, cwd=project, script=project / "inference.py")
    assert done.code == 0, done.stderr
    return project


def test_sha256sums_guards_the_projects_own_logs(project):
    """There even the JSON has a hash, and a change of any file is found by both."""
    sums, logs = project / "SHA256SUMS", project / "logs"
    assert check(project).stdout.splitlines()[-1] == "VALID"  # no directory: its own
    result = support.read_result(logs)
    result["stages"]["final"] = round(result["stages"]["final"] + 1e-6, 6)  # what no other gate could tell
    (logs / RESULT).write_text(json.dumps(result, indent=2) + "\n")
    done = check(project)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "INVALID")
    assert re.search(rf"^FAIL  files: {RESULT}: SHA256SUMS [0-9a-f]{{64}}, the file [0-9a-f]{{64}}", done.stdout, re.M)
    digest = hashlib.sha256((logs / RESULT).read_bytes()).hexdigest()
    sums.write_text(re.sub(rf"[0-9a-f]{{64}}(?=  logs/{RESULT})", digest, sums.read_text()))
    assert check(project).stdout.splitlines()[-1] == "VALID"
    listed, more = sums.read_text(), f"{'0' * 64}  logs/{OUTPUTS}\n"
    for damaged in ("", "x\n", listed[:100], listed.replace("logs/", "other/"), listed + more):
        sums.write_text(damaged)
        assert check(project).stdout.splitlines()[-1] == "INVALID", damaged


def test_a_set_of_another_program_names_the_version_that_made_it(project):
    source = (project / "inference.py").read_text()
    (project / "inference.py").write_text(source + "# changed\n")
    assert re.search("^FAIL  program: script_sha256: JSON '[0-9a-f]{64}', inference.py '[0-9a-f]{64}'$",
                     check(project).stdout, re.M)  # fmt: skip
    (project / "inference.py").write_text(re.sub('^VERSION = ".*"', 'VERSION = "9.9"', source, flags=re.M))
    made_by = support.read_result(project / "logs")["script_version"]
    assert re.search(rf"^FAIL  program: .*made by inference.py {made_by} with SHA256 [0-9a-f]{{64}}, .* has 9.9",
                     check(project).stdout, re.M)  # fmt: skip


def test_a_set_of_an_older_form_is_said_to_be_so(evidence_of):
    evidence = evidence_of("default")
    evidence.write_result({"schema": "npu-inference-evidence/1", "exit_code": 0})
    [gate] = evidence.report()["gates"]
    assert "of another version of inference.py" in gate["problems"][0]


def test_a_checkpoint_of_the_project_that_was_replaced_is_found(project):
    with open(project / support.STANDIN, "ab") as file:
        file.write(b"x")
    done = check(project).stdout
    assert re.search("^FAIL  checkpoint: another checkpoint: bytes, sha256: JSON .*, standin-\\S+ ", done, re.M)
    named = check(project, "--checkpoint", project / support.STANDIN).stdout
    assert "FAIL  checkpoint: another checkpoint" in named and "not at hand" not in named


def test_a_simulated_run_holds_no_device_open(evidence_of):
    evidence = evidence_of("default")
    evidence.forge_log(evidence.result | {"device_nodes": ["/dev/davinci0"]})
    assert evidence.failed_gates() == ["device"]


def test_the_numbers_of_devices_are_written_as_cann_reads_them(evidence_of):
    evidence = evidence_of("default")
    environment = evidence.result["environment"] | {"ASCEND_RT_VISIBLE_DEVICES": "\u0660"}
    evidence.forge_log(evidence.result | {"visible_devices": "\u0660", "environment": environment})
    assert evidence.failed_gates() == ["device"]


def test_observations_that_are_not_looked_at_are_said_to_be_so(cli, sets, tmp_path):
    """Rows are recomputed from the checkpoint's bytes; elsewhere than in the project those are not at hand."""
    shutil.copy(cli.project / support.STANDIN, tmp_path / "elsewhere.zip")
    done = cli("--checkpoint", "elsewhere.zip", "--sha256", support.STANDIN_SHA256, "--hold-seconds", 0, "--log-dir",
               "set", "--observations", cli.project / "rows.npy", cwd=tmp_path)  # fmt: skip
    assert done.code == 0, done.stderr
    (tmp_path / "x.npy").write_text("not an array")
    done = check(cli.project, tmp_path / "set", "--observations", tmp_path / "x.npy")
    assert "NOTE  without the checkpoint, " in done.stdout and "x.npy was not looked at" in done.stdout, done.stdout


def test_a_checkpoint_outside_the_project_is_named_as_it_was_typed(cli, tmp_path):
    shutil.copy(cli.project / support.STANDIN, tmp_path / "a.zip")
    for typed in ("./a", ".//a.zip", f"../{tmp_path.name}/./a.zip"):
        done = cli("--checkpoint", typed, "--sha256", support.STANDIN_SHA256, "--hold-seconds", 0, "--log-dir", "set",
                   cwd=tmp_path)  # fmt: skip
        assert done.code == 0, done.stderr
        assert check(cli.project, tmp_path / "set").returncode == 0, typed


@pytest.mark.parametrize("way", [
    "other directory", "dot slash", "absolute", "with equals signs", "linked checkpoint", "linked program",
    "outside the project", "unusual names", "linked logs", "without .zip", "no flag of its own",
])  # fmt: skip
def test_good_evidence_is_valid_however_the_run_was_started(cli, sets, tmp_path, way):
    """The paths in it are rewritten, so that they tell nothing of the machine: the check must not trip over that."""
    project = support.project_copy(tmp_path / "the project")
    shutil.copy(cli.project / "inference.py", project)
    shutil.copy(support.PROJECT / "tests/check_evidence.py", project / "tests")
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
    elif way == "without .zip":
        names[0] = "model"
    if way in ("linked logs", "no flag of its own"):
        names[2], logs = "", project / "logs"
    flags = [("--checkpoint", names[0]), ("--observations", names[1]), ("--log-dir", names[2])]
    args = [text for flag, name in flags if name
            for text in ([f"{flag}={name}"] if way == "with equals signs" else [flag, name])]  # fmt: skip
    done = cli(*args, "--sha256", support.STANDIN_SHA256.upper(), "--hold-seconds", 0, **options)
    assert done.code == 0, done.stderr
    checked = check(project, *([logs] if names[2] else []))
    assert (checked.returncode, checked.stdout.splitlines()[-1]) == (0, "VALID"), checked.stdout
    for path in logs.iterdir():
        assert str(tmp_path).encode() not in path.read_bytes(), path.name


def test_a_checkpoint_that_was_named_outside_the_project_is_no_file_of_it(cli, sets, tmp_path):
    """The same relative name may stand for another file there; and no other file of the reader's is looked into."""
    shutil.copy(cli.project / support.STANDIN, tmp_path / "README.md")
    done = cli("--checkpoint", "README.md", "--sha256", support.STANDIN_SHA256, "--hold-seconds", 0,
               "--log-dir", "logs", cwd=tmp_path)  # fmt: skip
    assert done.code == 0, done.stderr
    assert (cli.project / "README.md").exists()
    assert "NOTE  the checkpoint is not at hand" in check(cli.project, tmp_path / "logs").stdout


def test_no_file_outside_the_project_is_read(evidence_of):
    evidence = evidence_of("default")
    outside = evidence.path.parent / "secret"
    outside.write_text("its hash is nobody's business")
    for path in (str(outside), f"../../../../../../../../../..{outside}", "/dev/zero"):
        forgery = copy.deepcopy(evidence.result)
        forgery["checkpoint"]["path"] = path
        evidence.reseal(forgery)
        assert "checkpoint" not in evidence.failed_gates()


# ----------------------------------------------------------------------------------------------------------------------
# What is printed
# ----------------------------------------------------------------------------------------------------------------------


def test_the_head_says_what_the_set_is_about(cli, sets):
    head = check(cli.project, sets["many"]).stdout.partition("PASS")[0]
    assert support.STANDIN in head and support.STANDIN_SHA256 in head and "not the pinned one" in head
    assert "Ascend910B4-1 (simulated), SIMULATED" in head
    assert re.search(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d UTC", head)
    assert re.search(r"action +\[[01], .*\(20 rows\)", head)
    assert re.search(r"error +at most [\d.e-]+ % of the float64 reference \(\w+\), tolerance 0.001", head)


def test_good_evidence_passes_every_gate_that_there_is(checker, evidence_of):
    """But for the comparison with the published result, which is of the pinned checkpoint alone."""
    report = evidence_of("shard").report()
    assert [gate["gate"] for gate in report["gates"]] == [name for name, _, _ in checker.GATES if name != "published"]


NOTES = {
    "default": ["simulated"], "shard": ["simulated", "of the rows of the file"],
    "timed": ["simulated", "the run allowed itself errors of 0.01"],
    "refused": ["the run failed in stage verify"], "not finite": ["the run failed in stage forward", "simulated"],
}  # fmt: skip


@pytest.mark.parametrize("name", NOTES)
def test_what_a_consistent_set_does_not_show_is_said_beside_the_verdict(evidence_of, name):
    notes = evidence_of(name).report()["notes"]
    assert len(notes) == len(NOTES[name]) and all(map(str.startswith, notes, NOTES[name])), notes


@pytest.mark.parametrize(("mode", "words"), [
    ("none", "npu-smi did not list the process: this board or driver has no process table"),
    ("error", "npu-smi did not list the process: npu-smi info: "),
    ("none", "npu-smi could not be asked for the PID before the device was taken"),
    ("26", ""), ("container", ""),
])  # fmt: skip
def test_what_npu_smi_did_not_say_is_a_note(cli, sets, tmp_path, mode, words):
    done = cli(*support.STANDIN_ARGS, "--hold-seconds", 0, "--log-dir", tmp_path, env={"CANNSIM_NPU_SMI": mode})
    assert done.code == 0
    done = check(cli.project, tmp_path)
    assert done.stdout.splitlines()[-1] == "VALID", done.stdout
    assert f"NOTE  {words}" in done.stdout or not words
    assert "npu-smi did not" in done.stdout or not words


def test_a_fail_names_the_two_witnesses(evidence_of, cli):
    evidence = evidence_of("default")
    forgery = copy.deepcopy(evidence.result)
    forgery["npu_smi"].update(pid_found=False)
    evidence.reseal(forgery)
    printed = check(cli.project, evidence.path).stdout
    assert "\nFAIL  npu-smi: pid_found: JSON False, npu_smi.log True" in printed


def test_json_is_one_object_with_the_same_content(cli, sets):
    text, strict = check(cli.project, sets["refused"]), check(cli.project, sets["refused"], "--json")
    document = json.loads(strict.stdout)
    [report] = document["sets"]
    assert (strict.returncode, document["exit_code"], report["verdict"]) == (1, 1, "FAILED RUN")
    assert report["directory"] == str(sets["refused"]) and document["shards"] is None
    passed = [f"PASS  {gate['gate']}" for gate in report["gates"]]
    assert passed == re.findall("^PASS  .*$", text.stdout, re.M)
    assert report["head"]["date"] in text.stdout and all(note in text.stdout for note in report["notes"])


SHARDS: dict[str, tuple[list[str], str]] = {
    "complete": (["first shard", "shard", "last shard"], r"SHARDS COMPLETE: 119 of 119 rows"),
    "in another order": (["last shard", "first shard", "shard"], r"SHARDS COMPLETE: 119 of 119 rows"),
    "the first is missing": (["shard", "last shard"], r"SHARDS INCOMPLETE: 80 of 119 rows; rows 0 to 39 are missing"),
    "the last is missing": (["first shard", "shard"], r"SHARDS INCOMPLETE: 79 of 119 rows; rows 79 to 119 are missing"),
    "one is missing": (["first shard", "last shard"], r"SHARDS INCOMPLETE: .*; rows 39 to 79 are missing"),
    "one stands twice": (["first shard", "shard", "shard", "last shard"], r"SHARDS INCOMPLETE: .* are there twice"),
    "one is of another file": (["first shard", "shard", "last shard", "rows"], r"INCOMPLETE: .*not one file: "),
    "one is of no file": (["first shard", "shard", "last shard", "default"], r"INCOMPLETE: .*no file of observations"),
    "no shards": (["default", "many"], r"VALID$"),
}  # fmt: skip


@pytest.mark.parametrize("what", SHARDS)
def test_slices_of_a_file_must_be_complete(cli, sets, what):
    names, expected = SHARDS[what]
    done = check(cli.project, *(sets[name] for name in names))
    assert re.search(expected, done.stdout.splitlines()[-1]), done.stdout
    assert done.stdout.splitlines().count("VALID") == len(names)
    assert done.returncode == int("INCOMPLETE" in expected)


def test_one_bad_set_of_several_is_enough(cli, sets, tmp_path):
    assert check(cli.project, sets["default"], sets["refused"]).returncode == 1
    shutil.copytree(sets["default"], tmp_path / "set")
    (tmp_path / "set" / MARKER).unlink()
    done = check(cli.project, sets["default"], tmp_path / "set")
    assert done.returncode == 1 and re.findall("^(?:IN)?VALID$", done.stdout, re.M) == ["VALID", "INVALID"]


def test_shards_of_another_checkpoint_are_not_one(cli, sets, tmp_path):
    path = checkpoints.make(checkpoints.Kind(gymnasium.spaces.Discrete(2)), cli.project / "another.zip")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    done = cli("--checkpoint", path.name, "--sha256", digest, "--observations", "more.npy", "--shard", "2/3",
               "--hold-seconds", 0, "--log-dir", tmp_path)  # fmt: skip
    assert done.code == 0, done.stderr
    done = check(cli.project, sets["first shard"], tmp_path, sets["last shard"])
    assert done.returncode == 1 and "not one checkpoint" in done.stdout.splitlines()[-1]


USAGE = {
    "no such directory": (["nowhere"], "nowhere is not a directory with a npu_result.json: name one"),
    "another directory": (["tests"], "tests is not a directory with a npu_result.json: name one"),
    "a file": (["README.md"], "README.md is not a directory with a npu_result.json: name one"),
    "an unknown flag": (["--bogus"], "unrecognized arguments: --bogus"),
    "no checkpoint": (["evidence/default", "--checkpoint", "nowhere.zip"], "nowhere.zip: no such file"),
    "no observations": (["evidence/default", "--observations", "nowhere.npy"], "nowhere.npy: no such file"),
    "text": (["evidence/rows", "--observations", "README.md"], "README.md is not a .npy or .csv file of numbers"),
    "a name that lies": (["evidence/rows", "--observations", "x.npy"], "x.npy is not a .npy or .csv file of numbers"),
    "another name that lies": (["evidence/rows", "--observations", "z.npy"], "z.npy is a .npz file"),
}  # fmt: skip


@pytest.mark.parametrize("what", USAGE)
def test_a_usage_error_says_so_in_one_line(cli, sets, what):
    args, words = USAGE[what]
    (cli.project / "x.npy").write_text("not an array")
    with open(cli.project / "z.npy", "wb") as file:
        np.savez(file, rows=np.zeros((ROWS, 4), np.float32))
    done = check(cli.project, *args, cwd=cli.project)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr and done.stderr.count("\n") == 1


# ----------------------------------------------------------------------------------------------------------------------
# Hostile sets: bounded in time and memory, and INVALID
# ----------------------------------------------------------------------------------------------------------------------

HOSTILE_JSON: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"", "not JSON": lambda: b"exit_code: 0", "a list": lambda: b"[]", "null": lambda: b"null",
    "a number": lambda: b"0", "cut": lambda: b'{"exit_code": 0', "NaN": lambda: b'{"exit_code": NaN}',
    "infinity": lambda: b'{"exit_code": -Infinity}', "a key twice": lambda: b'{"exit_code": 1, "exit_code": 0}',
    "a key twice below": lambda: b'{"exit_code": {"a": 1, "a": 2}}',
    "nested": lambda: b'{"exit_code":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "nested objects": lambda: b'{"a":' * 100_000, "a huge number": lambda: b'{"exit_code": ' + b"9" * 10_000_000 + b"}",
    "overflow": lambda: b'{"total_s": 1e999, "exit_code": 0}', "not UTF-8": lambda: b'{"exit_code": "\xff\xfe"}',
    "zeros": lambda: bytes(1000), "a mark": lambda: b"\xef\xbb\xbf{}",
    "half a surrogate": lambda: b'{"exit_code": 0, "error": null, "\\ud800": 1}',
    "only the code": lambda: b'{"exit_code": 0}', "an error that is a text": lambda: b'{"exit_code": 1, "error": "x"}',
    "a verdict": lambda: b'{"exit_code": 1, "error": {"stage": "x\\nVALID"}, "a\\nVALID\\u001b[2J": 1}',
    "an error of lists": lambda: b'{"error": [[]]}', "16 MiB of lists": lambda: b"[" + b"[]," * 5_500_000 + b"0]",
    "250 MiB of lists": lambda: b"[" + b"[]," * (83 << 20) + b"0]",
    "16 MiB of objects": lambda: b"[" + b'{"a":0},' * 2_000_000 + b"0]",
    "16 MiB of digits": lambda: b'{"total_s": 0.' + b"1" * (15 << 20) + b"}",
    "16 MiB of text": lambda: b'{"schema": "' + b"x" * (15 << 20) + b'"}',
}  # fmt: skip


def limited() -> None:
    """1 GiB and 10 s of computing: what a set without outputs may cost."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    resource.setrlimit(resource.RLIMIT_CPU, (10, 10))


def refuse(project: Path, directory: Path) -> str:
    environment = support.clean_environment() | {"OPENBLAS_NUM_THREADS": "1"}  # its buffers, not the checker's
    done = subprocess.run([sys.executable, project / "tests/check_evidence.py", directory], capture_output=True,
                          text=True, env=environment, timeout=120, preexec_fn=limited)  # fmt: skip
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[-1:], done.stderr) == (1, ["INVALID"], ""), done.stdout[-2000:]
    assert lines.count("INVALID") == 1 and "VALID" not in lines and any(line.startswith("FAIL  ") for line in lines)
    assert done.stdout.replace("\n", "").isprintable() and len(done.stdout) < 100_000
    return done.stdout


@pytest.mark.parametrize("what", HOSTILE_JSON)
def test_a_hostile_json_is_invalid_and_no_more(cli, sets, tmp_path, what):
    directory = shutil.copytree(sets["default"], tmp_path / "set")
    (directory / RESULT).write_bytes(HOSTILE_JSON[what]())
    refuse(cli.project, directory)


HOSTILE_VALUES = {
    "10^400": 10**400, "-1": -1, "1e308": 1e308, "text": "x" * 100_000, "nested": "[" * 400 + "]" * 400, "list": [[[]]],
    "surrogate": "\ud800", "newline": "x\nVALID", "escape": "\x1b[2J", "zero": "\0", "up": "../" * 50, "true": True,
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE_VALUES)
def test_a_hostile_value_anywhere_is_found(evidence_of, what):
    evidence = evidence_of("shard")
    for path, value in parts(evidence.result):
        if value != HOSTILE_VALUES[what] and path[-1] != "mean_s":
            evidence.write_result(with_part(evidence.result, path, HOSTILE_VALUES[what]))
            assert evidence.failed_gates(), path


def test_a_slice_of_billions_is_refused_at_once(cli, evidence_of):
    evidence = evidence_of("shard")
    forgery = copy.deepcopy(evidence.result)
    forgery["observations"]["shard"] = "2/99999999999"
    forgery["argv"] = [argument.replace("2/3", "2/99999999999") for argument in forgery["argv"]]
    evidence.forge_log(forgery)
    refuse(cli.project, evidence.path)


BILLION = 10**9
HOSTILE_FACTS: dict[str, dict[str, Any]] = {
    "200,000 arguments": {"argv": ["inference.py", *["--benchmark", "1"] * 100_000]},
    "an observation of many numbers": {"argv": ["inference.py", "--observation", "[" + "0," * 5_000_000 + "0]"]},
    "a nested observation": {"argv": ["inference.py", "--observation", "[" * 100_000 + "]" * 100_000]},
    "80,000 NPUs": {"visible_devices": ",".join(map(str, range(80_000))), "device_count": 80_000},
    "300,000 device nodes": {"device_nodes": [f"/dev/davinci{number}" for number in range(300_000)]},
    "an observation of billions": {"observation_shape": [BILLION, BILLION]},
    "an observation of many dimensions": {"observation_shape": [1] * 300_000},
    "large dimensions": {"observation_shape": [10**30] * 30_000},
    "billions of choices": {"action_space": {"type": "Discrete", "n": BILLION}},
    "300,000 choices": {"action_space": {"type": "MultiDiscrete", "nvec": [2] * 300_000}},
    "a box of billions": {"action_space": {"type": "Box", "shape": [BILLION], "low": [0.0], "high": [0.0],
                                           "squashed": False}},
    "a space of lists": {"action_space": {"type": [], "n": 1}},
    "62 million rows": {"rows": 62_000_000},
    "negative rows": {"rows": -1},
    "300,000 notes": {"notes": ["x"] * 300_000},
    "a note of megabytes": {"notes": ["x" * (10 << 20)]},
    "300,000 kernels": {"kernels": {f"aclnnA{number}": 1 for number in range(300_000)}},
    "300,000 stages": {"stages": {f"s{number}": 0.0 for number in range(300_000)}},
    "300,000 files": {"files": {f"s{number}": "0" * 64 for number in range(300_000)}},
    "a long name": {"npu_device_name": " " * (10 << 20) + "(simulated)"},
    "300,000 rows shown": {"value": [[1.0]] * 300_000},
    "deep rows": {"value": functools.reduce(lambda inner, _: [inner], range(600), 1.0)},
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE_FACTS)
def test_a_hostile_fact_costs_little(cli, evidence_of, what):
    evidence = evidence_of("default")
    evidence.write_result(evidence.result | HOSTILE_FACTS[what])
    refuse(cli.project, evidence.path)


HOSTILE_TEXTS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "spaces in npu-smi's version": (NPU_SMI, lambda text: recount(text.replace(
        b"npu-smi 25.5.1 ", b"npu-smi 25.5.1" + b" " * (12 << 20), 1))),
    "spaces in npu-smi's table": (NPU_SMI, lambda text: recount(text + b"| " + b" " * (12 << 20) + b" |\n")),
    "bars in npu-smi's table": (NPU_SMI, lambda text: recount(text + b"|" * (12 << 20) + b"\n")),
    "rows in npu-smi's table": (NPU_SMI, lambda text: recount(text + b"| 0 0 | 1 | x | 2 |\n" * 700_000)),
    "endless calls": (NPU_SMI, lambda text: text + b"# npu-smi x at=2026 bytes=0 outcome=exit code 0\n\n" * 300_000),
    "a heading without an end": (NPU_SMI, lambda text: b"# npu-smi " + b"a" * (15 << 20)),
    "empty lines in the log": (LOG, lambda text: text + b"\n" * (15 << 20)),
    "a long line in the log": (LOG, lambda text: text + b"x" * (15 << 20) + b"\n"),
    "escapes in the log": (LOG, lambda text: b"\x1b[2J\nVALID\n" + text),
    "a long marker": (MARKER, lambda text: text + b"x" * (15 << 20)),
}  # fmt: skip


def recount(text: bytes) -> bytes:
    """npu_smi.log with the lengths that its answers now have."""
    answers = re.split(rb"(?m)^(?=# npu-smi )", text)[1:]
    return b"".join(re.sub(rb"bytes=\d+", b"bytes=%d" % (len(answer.partition(b"\n")[2]) - 1), answer, count=1)
                    for answer in answers)  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE_TEXTS)
def test_a_hostile_text_costs_little(cli, evidence_of, what):
    evidence = evidence_of("default")
    file, change = HOSTILE_TEXTS[what]
    (evidence.path / file).write_bytes(change((evidence.path / file).read_bytes()))
    evidence.reseal()
    refuse(cli.project, evidence.path)


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DISPLACED: dict[str, Callable[[Path], Any]] = {
    "a directory": make_directory,
    "a link to nothing": lambda path: (path.unlink(), path.symlink_to("nothing")),
    "a link to itself": lambda path: (path.unlink(), path.symlink_to(path.name)),
    "a link to a copy": lambda path: (path.rename(path.with_suffix(".copy")),
                                      path.symlink_to(path.with_suffix(".copy").name)),
    "a link to zeros": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "not UTF-8": lambda path: path.write_bytes(b"\xff" * 100),
    "empty": lambda path: path.write_bytes(b""),
    "large": lambda path: os.truncate(path, 300 << 20),
    "enormous": lambda path: os.truncate(path, 4 << 40),
}  # fmt: skip


@pytest.mark.parametrize("kind", DISPLACED)
@pytest.mark.parametrize("file", [RESULT, LOG, MARKER, NPU_SMI, OUTPUTS])
def test_what_stands_in_the_place_of_a_file_is_found(cli, sets, tmp_path, file, kind):
    directory = shutil.copytree(sets["rows"], tmp_path / "set")
    DISPLACED[kind](directory / file)
    refuse(cli.project, directory)


def test_rows_by_the_million_million_in_a_file_of_holes_are_refused_at_once(cli, evidence_of):
    evidence = evidence_of("rows")
    table = np.load(evidence.path / OUTPUTS)
    rows = 10**11
    forgery = copy.deepcopy(evidence.result)
    forgery["rows"] = forgery["observations"]["rows"] = forgery["observations"]["total_rows"] = rows
    with open(evidence.path / OUTPUTS, "wb") as file:
        np.lib.format.write_array_header_1_0(file, {
            "descr": np.lib.format.dtype_to_descr(table.dtype), "fortran_order": False, "shape": (rows,)})  # fmt: skip
        file.write(table.tobytes())
        file.truncate(file.tell() - table.nbytes + rows * table.dtype.itemsize)
    evidence.write_result(forgery)
    assert "a hole at" in refuse(cli.project, evidence.path)


def test_three_million_rows_are_checked_in_seconds_and_flat_memory(cli, evidence_of):
    evidence = evidence_of("rows")
    table, rows = np.load(evidence.path / OUTPUTS), 3_000_000
    forgery = copy.deepcopy(evidence.result)
    forgery["rows"] = forgery["observations"]["rows"] = forgery["observations"]["total_rows"] = rows
    forgery["reference"]["rows"] = rows
    forgery["repeated_rows"] = 16384
    for output in forgery["outputs"].values():
        output["shape"][0] = rows
    np.save(evidence.path / OUTPUTS, np.tile(table, rows // len(table)))
    evidence.forge_log(forgery)

    def bounded() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        resource.setrlimit(resource.RLIMIT_CPU, (60, 60))

    environment = support.clean_environment() | {"OPENBLAS_NUM_THREADS": "1"}
    started = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, cli.project / "tests/check_evidence.py", evidence.path], text=True,
                          capture_output=True, env=environment, preexec_fn=bounded)  # fmt: skip
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "VALID"), done.stdout
    assert used.ru_utime + used.ru_stime - started.ru_utime - started.ru_stime < 20


# ----------------------------------------------------------------------------------------------------------------------
# What the checker needs, and does
# ----------------------------------------------------------------------------------------------------------------------


def test_it_needs_nothing_but_numpy_and_writes_nothing(project):
    """No torch, no CANN, no environment; and not even a .pyc stays."""

    def state() -> dict[Path, tuple[bytes, int]]:
        files = [path for path in project.rglob("*") if path.is_file()]
        return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}

    before = state()
    code = (
        "import sys, runpy\nfor name in ('torch', 'torch_npu', 'stable_baselines3', 'gymnasium'):\n"
        "    sys.modules[name] = None\nsys.argv = ['check_evidence.py']\n"
        "runpy.run_path('tests/check_evidence.py', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={}, cwd=project)
    assert (done.returncode, done.stdout.splitlines()[-1], done.stderr) == (0, "VALID", "")
    assert state() == before


def test_without_numpy_it_names_an_interpreter_that_has_it_as_a_shell_takes_it(project):
    command = [sys.executable, "-I", "-S", "tests/check_evidence.py"]
    done = subprocess.run(command, capture_output=True, text=True, env={}, cwd=project)
    assert (done.returncode, done.stdout) == (2, "") and "has no numpy: python3 -m pip install numpy" in done.stderr
    python = project / ".venv/any/bin/python3"
    python.parent.mkdir(parents=True)
    python.touch()
    done = subprocess.run(command, capture_output=True, text=True, env={}, cwd=project)
    assert f"has no numpy: use '{python}'" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root would be let in in any case")
def test_it_reads_a_read_only_directory(cli, sets, tmp_path):
    directory = shutil.copytree(sets["rows"], tmp_path / "set")
    for path in directory.iterdir():
        path.chmod(0o444)
    directory.chmod(0o555)
    code = (
        f"import ctypes, runpy, sys\n{faults.WITHOUT_PRIVILEGES}\nsys.argv[1:] = [{str(directory)!r}]\n"
        f"runpy.run_path({str(cli.project / 'tests/check_evidence.py')!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=support.clean_environment())
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "VALID"), done.stdout + done.stderr


def test_a_usage_error_has_its_code_also_when_it_cannot_be_printed(cli, sets):
    command = [sys.executable, cli.project / "tests/check_evidence.py", "nowhere"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stderr=full, stdout=full, env=support.clean_environment())
    assert done.returncode == 2


def test_it_runs_when_the_locale_has_no_letters(cli, sets):
    command = [sys.executable, cli.project / "tests/check_evidence.py", sets["default"]]
    ascii_only = support.clean_environment() | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=ascii_only)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "VALID")


@pytest.mark.parametrize(("name", "code"), [("default", 0), ("refused", 1)])
@pytest.mark.parametrize("where", ["a closed pipe", "/dev/full"])
def test_the_exit_code_is_the_verdict_also_when_nobody_reads_what_it_prints(cli, sets, name, code, where):
    command = [sys.executable, cli.project / "tests/check_evidence.py", sets[name]]
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open("/dev/full", "w") as full:
        target = write_end if where == "a closed pipe" else full.fileno()
        done = subprocess.run(command, stdout=target, stderr=target, env=support.clean_environment())
    os.close(write_end)
    assert done.returncode == code


@pytest.mark.parametrize("option", ["-h", "--help", "--version", "--check", "--hold-secs=1", "--", "--benchmark"])
def test_a_command_line_that_asks_for_something_else_is_no_good_run(evidence_of, option):
    evidence = evidence_of("default")
    evidence.reseal(evidence.result | {"argv": ["inference.py", option]})
    assert "command line" in evidence.failed_gates()


def test_a_progress_line_is_shown_on_a_terminal_alone(cli, sets):
    controller, terminal = os.openpty()
    command = [sys.executable, cli.project / "tests/check_evidence.py", sets["rows"]]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal, env=support.clean_environment(), text=True)
    assert done.stdout.splitlines()[-1] == "VALID"
    assert b"\r0 of 40 rows" in os.read(controller, 10_000)
    os.close(terminal)
    os.close(controller)


def test_the_list_of_what_no_reader_can_know_stays_short():
    """Each has its reason in logs/README.md."""
    names = {re.sub(r"\b(eager|graph)\b", "*", name) for name in {**CLOCK, **BENCHMARK}}
    assert len(names) <= 10
