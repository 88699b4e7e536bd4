"""Observations from files: one row or a million, a slice or all, and whatever may be wrong with them."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from harness import checkpoints, evidence, faults, support
from harness.checkpoints import Kind

OUTPUTS = evidence.OUTPUTS
TOLERANCE = 1e-4  # of outputs whose batches differ, relative above 1


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> dict[str, str]:
    return faults.quick_npu_smi(tmp_path_factory.mktemp("bin"))


@pytest.fixture(scope="module")
def observations() -> np.ndarray:
    return np.random.default_rng(11).normal(0, 1, (50, 4)).astype(np.float32)


@pytest.fixture
def run(cli, quick, tmp_path):
    """Runs a checkpoint over a file, by default the stand-in."""

    def start_and_wait(
        file: Path | None, *args: object, name: str = "logs", model: Any = support.STANDIN_ARGS,
        env: support.Environment | None = None, **options: Any,
    ) -> support.Result:  # fmt: skip
        rows = () if file is None else ("--observations", file)
        arguments = (*model, *rows, *args, "--hold-seconds", 0, "--log-dir", tmp_path / name)
        done = cli.start(*arguments, env={**quick, **(env or {})}, **options).wait()
        assert evidence.problems(done, tmp_path / name) == [], done.stderr
        return done

    return start_and_wait


def model_of(kind: Kind, directory: Path) -> tuple[Path, tuple[str, ...]]:
    path = checkpoints.make(kind, directory / "model.zip")
    return path, ("--checkpoint", str(path), "--sha256", evidence.sha256(path))


def saved(path: Path, array: np.ndarray, **options: Any) -> Path:
    with open(path, "wb") as file:
        np.lib.format.write_array(file, array, **options)
    return path


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def as_csv(array: np.ndarray) -> str:
    return "".join(",".join(map(repr, row)) + "\n" for row in array.reshape(len(array), -1).tolist())


def outputs(directory: Path) -> np.ndarray:
    """As a user reads them: mapped, one structured row for each observation."""
    return np.load(directory / OUTPUTS, mmap_mode="r", allow_pickle=False)


def assert_close(actual: np.ndarray, expected: dict[str, np.ndarray] | np.ndarray) -> None:
    names = expected if isinstance(expected, dict) else expected.dtype.names
    assert sorted(actual.dtype.names) == sorted(names)
    for name in names:
        assert actual[name].shape == expected[name].shape and actual[name].dtype == expected[name].dtype, name
        np.testing.assert_allclose(actual[name], expected[name], rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


# ----------------------------------------------------------------------------------------------------------------------
# What a file gives
# ----------------------------------------------------------------------------------------------------------------------

FORMATS = {
    "float32": lambda path, array: saved(path / "o.npy", array),
    "float64 in Fortran order, npy 2.0, upper case": lambda path, array: saved(
        path / "O.NPY", np.asfortranarray(array.astype(np.float64)), version=(2, 0)),
    "csv, blank lines, spaces, quotes and CRLF": lambda path, array: write(
        path / "o.csv", re.sub(r"(?m)^(\S+?),(.*)$", r'"\1", \2', as_csv(array)).replace("\n", "\r\n\r\n")),
    "csv as Excel writes it, no last newline": lambda path, array: write(path / "o.csv", "\ufeff" + as_csv(array)[:-1]),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_gives_the_outputs_of_sb3_on_the_cpu(run, tmp_path, observations, form):
    done = run(FORMATS[form](tmp_path, observations))
    assert done.code == 0, done.stderr
    values = outputs(tmp_path / "logs")
    assert values.dtype.descr == [
        ("action", "<i8"), ("value", "<f4", (1,)), ("log_prob", "<f4"), ("entropy", "<f4"), ("probs", "<f4", (2,)),
        ("logits", "<f4", (2,)),
    ]  # fmt: skip
    assert_close(values, checkpoints.reference(support.PROJECT / support.STANDIN, observations))
    result = support.read_result(tmp_path / "logs")
    assert (result["rows"], result["repeated_rows"], result["reference"]["rows"]) == (50, 50, 50)
    assert result["observation"] == observations[:16].tolist()
    for name in values.dtype.names:
        assert result[name] == values[name][:16].tolist()
        assert result["outputs"][name]["shape"] == list(values[name].shape)
    assert result["files"][OUTPUTS] == evidence.sha256(tmp_path / "logs" / OUTPUTS)
    assert result["observations"] == {
        "file": str(next(tmp_path.glob("[oO].*"))), "dtype": "float32" if form == "float32" else "float64",
        "shard": "1/1", "first_row": 0, "rows": 50, "total_rows": 50,
        "sha256_float32": hashlib.sha256(observations.tobytes()).hexdigest(),
    }  # fmt: skip
    log = (tmp_path / "logs" / evidence.LOG).read_text()
    assert f"[forward] observations sha256_float32={result['observations']['sha256_float32']}\n" in log


@pytest.mark.parametrize(
    ("name", "suffix"),
    [("multi-discrete", "npy"), ("observation of two dimensions", "csv")],
)
def test_every_kind_of_policy_takes_a_file(run, tmp_path, name, suffix):
    kind = checkpoints.KINDS[name]
    path, model = model_of(kind, tmp_path)
    array = checkpoints.observations(kind, 20)
    file = tmp_path / f"o.{suffix}"
    done = run(saved(file, array) if suffix == "npy" else write(file, as_csv(array)), model=model)
    assert done.code == 0, done.stderr
    assert_close(outputs(tmp_path / "logs"), checkpoints.reference(path, array))


def test_a_file_gives_what_its_rows_on_the_command_line_give(run, tmp_path, observations):
    assert run(saved(tmp_path / "o.npy", observations[:3]), name="file").code == 0
    assert run(None, "--observation", json.dumps(observations[:3].tolist()), name="line").code == 0
    file, line = (support.read_result(tmp_path / name) for name in ("file", "line"))
    for name in ("observation", "rows", "outputs", *outputs(tmp_path / "file").dtype.names):
        assert file[name] == line[name], name
    assert line["observations"] is None and not (tmp_path / "line" / OUTPUTS).exists()


def test_chunks_give_what_one_pass_gives_and_twice_the_same(cli, run, tmp_path, observations):
    """Many chunks, the last one smaller than the rest."""
    file = saved(tmp_path / "o.npy", observations)
    assert run(file, name="one").code == 0
    for name in ("many", "again"):
        assert run(file, name=name, script=faults.patched(cli.project, "inference.CHUNK_ROWS = 8")).code == 0
    assert_close(outputs(tmp_path / "many"), outputs(tmp_path / "one"))
    many, one = (support.read_result(tmp_path / name) for name in ("many", "one"))
    assert (many["repeated_rows"], one["repeated_rows"]) == (8, 50)
    assert many["observations"]["sha256_float32"] == one["observations"]["sha256_float32"]
    assert evidence.sha256(tmp_path / "many" / OUTPUTS) == evidence.sha256(tmp_path / "again" / OUTPUTS)


def test_what_is_shown_is_cut_to_a_thousand_numbers(run, tmp_path):
    """A row of 300 numbers: three are shown, and the file holds all."""
    kind = Kind(checkpoints.KINDS["discrete"].action_space, checkpoints.net(2), checkpoints.box(300))
    path, model = model_of(kind, tmp_path)
    array = checkpoints.observations(kind, 20)
    assert run(saved(tmp_path / "o.npy", array), model=model).code == 0
    assert_close(outputs(tmp_path / "logs"), checkpoints.reference(path, array))
    result = support.read_result(tmp_path / "logs")
    assert (result["rows"], result["outputs"]["value"]["shape"]) == (20, [20, 1])
    assert result["observation"] == array[:3].tolist()
    assert len(result["value"]) == len(result["probs"]) == 3


def test_a_row_wider_than_that_is_cut_itself_and_a_signal_ends_the_run_at_once(cli, quick, tmp_path):
    """A million numbers an observation: with all of them in the log, a run did not end for minutes."""
    width = 1 << 20
    kind = Kind(spaces.Discrete(2), checkpoints.net(), checkpoints.box(width))
    _, model = model_of(kind, tmp_path)
    arguments = (*model, "--log-dir", tmp_path / "logs")
    done = cli(*arguments, "--hold-seconds", 0, env=quick)
    assert (done.code, evidence.problems(done, tmp_path / "logs")) == (0, []), done.stderr
    result = support.read_result(tmp_path / "logs")
    assert result["observation"] == [[0.0] * 1000] and result["observation_shape"] == [width]
    assert len(done.stdout) < 20_000 and len((tmp_path / "logs" / evidence.LOG).read_text()) < 20_000
    process = cli.start(*arguments, "--hold-seconds", 60, env=quick)
    process.wait_for("npu_smi pid_absent_before")
    process.signal(signal.SIGTERM)
    started = time.monotonic()
    done = process.wait(30)
    assert (done.code, evidence.problems(done, tmp_path / "logs")) == (143, [])
    assert time.monotonic() - started < 2


def test_an_observation_on_the_command_line_is_never_cut_into_passes(cli, run, tmp_path, observations):
    """More rows than one chunk of a file holds."""
    script = faults.patched(cli.project, "inference.CHUNK_ROWS = 8")
    done = run(None, "--observation", json.dumps(observations.tolist()), script=script)
    result = support.read_result(tmp_path / "logs")
    assert (done.code, result["rows"], result["repeated_rows"], len(result["action"])) == (0, 50, 50, 16), done.stderr


# ----------------------------------------------------------------------------------------------------------------------
# What may be wrong with a file
# ----------------------------------------------------------------------------------------------------------------------

ZEROS = np.zeros((5, 4), np.float32)


def with_value(value: float, dtype: Any = np.float64) -> np.ndarray:
    array = np.zeros((5, 4), dtype)
    array[3, 2] = value
    return array


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array)
    return buffer.getvalue()


class Explosive:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


NUMBERS_ALONE = r"; .*to_csv\(.*index=False, header=False\)"
BAD: dict[str, tuple[str, bytes | str, str]] = {
    "columns": ("o.npy", npy(np.zeros((5, 3), np.float32)), r"shape \[5, 3\], expected \[N, 4\]"),
    "one dimension": ("o.npy", npy(np.zeros(4, np.float32)), r"shape \[4\], expected \[N, 4\]"),
    "no dimension": ("o.npy", npy(np.ones((), np.float32)), "no rows"),
    "no rows": ("o.npy", npy(ZEROS[:0]), "no rows"),
    "int64": ("o.npy", npy(np.zeros((5, 4), np.int64)), "int64, expected float32 or float64; .*astype"),
    "big-endian": ("o.npy", npy(np.zeros((5, 4), ">f4")), ">f4, expected"),
    "records": ("o.npy", npy(np.zeros(5, [("x", "f4", 4)])), "expected float32"),
    "objects": ("o.npy", npy(np.array([[Explosive()] * 4] * 5)), r"(?i)object|pickle"),
    "NaN": ("o.npy", npy(with_value(np.nan, np.float32)), "o.npy: row 3, column 2 is NaN, infinite or beyond float32;"),
    "infinity": ("o.npy", npy(with_value(-np.inf)), "row 3, column 2 is NaN, infinite"),
    "beyond float32": ("o.npy", npy(with_value(1e39)), "row 3, column 2 is NaN, infinite or beyond float32"),
    "truncated": ("o.npy", npy(ZEROS)[:-1], "damaged"),
    "half a header": ("o.npy", npy(ZEROS)[:40], "damaged"),
    "a header without sense": ("o.npy", npy(ZEROS).replace(b"{'descr'", b"{[]     "), "damaged"),
    "an endless shape": ("o.npy", npy(ZEROS).replace(b"(5, 4), }" + b" " * 20, b"(%d, 4), }" % 10**20), "damaged"),
    "a huge shape": ("o.npy", npy(ZEROS).replace(b"(5, 4), }" + b" " * 12, b"(5000000000000, 4), }"), "damaged"),
    "empty npy": ("o.npy", b"", "damaged"),
    "a pickle": ("o.npy", b"cos\nsystem\n(S'touch exploded'\ntR.", "damaged"),
    "a header that pandas wrote": ("o.csv", "0,1,2,3\n0,0,0,0\n", "row 0 is 0, 1, 2, .* pandas.*" + NUMBERS_ALONE),
    "an index that pandas wrote": ("o.csv", "0,0,0,0,0\n1,0,0,0,0\n", r"shape \[2, 5\], expected \[N, 4\]"),
    "ragged": ("o.csv", "0,0,0,0\n0,0,0\n", "o.csv: .*row 1" + NUMBERS_ALONE),
    "names": ("o.csv", "x,v,theta,omega\n0,0,0,0\n", "o.csv: .*'x'.* row 0, column 0" + NUMBERS_ALONE),
    "letters": ("o.csv", "0,0,0,0\n0,0,zero,0\n", "o.csv: .*'zero'.* row 1, column 2" + NUMBERS_ALONE),
    "an empty field": ("o.csv", "0,0,0,0\n0,,0,0\n", "o.csv: .* row 1, column 1" + NUMBERS_ALONE),
    "thousands": ("o.csv", "0,0,0,1_000\n", "o.csv: .*'1_000'.* row 0, column 3" + NUMBERS_ALONE),
    "semicolons": ("o.csv", "0;0;0;0\n", "o.csv: .*'0;0;0;0'.* row 0, column 0" + NUMBERS_ALONE),
    "NaN in csv": ("o.csv", "0,0,0,0\n0,nan,0,0\n", "row 1, column 1 is NaN"),
    "infinity in csv": ("o.csv", "0,0,0,0\n0,1e999,0,0\n", "row 1, column 1 is NaN, infinite"),
    "blank csv": ("o.csv", "\n\n\n", "no rows"),
    "not UTF-8": ("o.csv", b"\xff\xfe0,0,0,0\n", "o.csv: .*" + NUMBERS_ALONE),
    "a NUL": ("o.csv", b"0,0,\0,0\n", "o.csv: .*" + NUMBERS_ALONE),
    "an endless number": ("o.csv", "1" * 200_000 + ",0,0,0\n", "row 0, column 0"),
    "parquet": ("o.parquet", b"PAR1" + bytes(100) + b"PAR1", r"not a \.npy or \.csv file; .*to_csv"),
    "no suffix": ("o", "0,0,0,0\n", r"not a \.npy or \.csv file"),
}  # fmt: skip


def assert_refused(done: support.Result, log_dir: Path, words: str) -> None:
    """In one line of bearable length, and nothing was written."""
    assert (done.code, evidence.problems(done, log_dir), log_dir.exists()) == (2, [], False), done.stderr
    [line] = evidence.complaints_of(done)
    assert re.search(words, line), line
    assert len(line) < 1000 and done.stderr == line + "\n"


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_a_usage_error_that_says_what_is_wrong(run, cli, tmp_path, what):
    name, content, words = BAD[what]
    done = run(write(tmp_path / name, content), cold=True)
    assert_refused(done, tmp_path / "logs", words)
    assert not list(tmp_path.glob("exploded")) and not (cli.project / "exploded").exists()


def test_a_row_padded_to_16_mib_is_refused_or_read_and_takes_no_time(run, tmp_path):
    started = time.monotonic()
    done = run(write(tmp_path / "o.csv", "0,0,0," + " " * (16 << 20) + "0\n"), cold=True)
    assert done.code in (0, 2), done.stderr
    assert time.monotonic() - started < 15


@pytest.mark.parametrize(("kind", "words"), [
    ("missing", "No such file"), ("a link to itself", "Too many levels"),
    ("a directory", r": \S+/o\.\w+ is not a regular file; .*; name a file"),
    ("a pipe", r": \S+/o\.\w+ is not a regular file; .*; name a file"),
])  # fmt: skip
def test_what_is_not_a_file_is_refused_and_not_waited_for(run, tmp_path, kind, words):
    for suffix in ("npy", "csv"):
        path = tmp_path / f"o.{suffix}"
        if kind == "a directory":
            path.mkdir()
        elif kind == "a link to itself":
            path.symlink_to(path)
        elif kind == "a pipe":
            os.mkfifo(path)
        assert_refused(run(path, cold=True), tmp_path / "logs", words)


@pytest.mark.parametrize(("args", "words"), [
    (("--observation", "[0,0,0,0]"), "do not go together|not allowed with"),
    (("--shard", "0/4"), "not a slice"), (("--shard", "5/4"), "not a slice"), (("--shard", "1"), "not a slice"),
    (("--shard", "-1/4"), "not a slice|expected one"), (("--shard", "1/4/2"), "not a slice"),
    (("--shard", "1.0/4"), "not a slice"), (("--shard", "1/51"), "is empty"),
])  # fmt: skip
def test_arguments_that_do_not_go_together(run, tmp_path, observations, args, words):
    assert_refused(run(saved(tmp_path / "o.npy", observations), *args, cold=True), tmp_path / "logs", words)


# ----------------------------------------------------------------------------------------------------------------------
# Slices
# ----------------------------------------------------------------------------------------------------------------------


def test_four_slices_on_four_npus_at_once_join_to_the_whole(cli, run, tmp_path, observations):
    """As the README's launchers do it: one process each, with its own NPU and log directory."""
    file = saved(tmp_path / "o.npy", observations)
    assert run(file, name="whole").code == 0
    npu_smi = cli.environment()["PATH"]  # the simulator's own, which knows four devices

    def shard(index: int) -> support.Result:
        environment = {"CANNSIM_DEVICES": "4", "ASCEND_RT_VISIBLE_DEVICES": str(index - 1), "PATH": npu_smi}
        return run(file, "--shard", f"{index}/4", name=f"shard{index}", env=environment)

    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(shard, range(1, 5)))
    assert [each.code for each in done] == [0] * 4, [each.stderr for each in done]
    results = [support.read_result(tmp_path / f"shard{index}") for index in range(1, 5)]
    assert [result["visible_devices"] for result in results] == ["0", "1", "2", "3"]
    assert [result["npu_smi"]["npu_id"] for result in results] == ["0", "1", "2", "3"]
    assert [result["observations"]["first_row"] for result in results] == [0, 12, 25, 37]
    assert [result["observations"]["total_rows"] for result in results] == [50] * 4
    assert sum(result["rows"] for result in results) == len(observations)
    joined = np.concatenate([outputs(tmp_path / f"shard{index}") for index in range(1, 5)])
    assert_close(joined, outputs(tmp_path / "whole"))


def test_an_error_in_a_slice_names_the_row_of_the_file_and_one_elsewhere_is_not_this_slices(run, tmp_path):
    file = saved(tmp_path / "o.npy", with_value(np.nan))
    assert_refused(run(file, "--shard", "2/2", cold=True), tmp_path / "logs", "row 3, column 2 is NaN")
    assert run(file, "--shard", "1/2").code == 0


# ----------------------------------------------------------------------------------------------------------------------
# Long work
# ----------------------------------------------------------------------------------------------------------------------


def peak_of(command: list[object], env: dict[str, str], cwd: Path) -> float:
    """MiB: the most that a process or one that it waited for has had."""
    with subprocess.Popen(list(map(str, command)), env=env, cwd=cwd, stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL) as process:  # fmt: skip
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_maxrss / 1024


def test_memory_does_not_grow_with_the_rows(cli, quick, tmp_path):
    """From one full chunk to six, whose outputs have 83 MB, and as many numbers of the reference in float64."""
    _, model = model_of(Kind(spaces.MultiDiscrete([50, 50]), checkpoints.net(8)), tmp_path)
    peaks = []
    for rows in (20_000, 100_000):
        array = np.random.default_rng(0).normal(0, 1, (rows, 4)).astype(np.float32)
        command = [sys.executable, "inference.py", *model, "--observations", saved(tmp_path / "o.npy", array),
                   "--hold-seconds", 0, "--log-dir", tmp_path / "logs"]  # fmt: skip
        peaks.append(peak_of(command, cli.environment(quick), cli.project))
        assert outputs(tmp_path / "logs")["logits"].shape == (rows, 100)
        assert support.read_result(tmp_path / "logs")["reference"]["rows"] == rows
    assert peaks[1] - peaks[0] <= 32, peaks


def test_what_ran_is_what_is_hashed_when_a_file_changes_during_the_run(cli, quick, tmp_path, observations):
    file = saved(tmp_path / "o.npy", observations)
    args = (*support.STANDIN_ARGS, "--observations", file, "--hold-seconds", 0.5, "--log-dir", tmp_path / "logs")
    process = cli.start(*args, env=quick)
    process.wait_for("holding")
    changed = observations + 1
    with open(file, "r+b") as opened:
        opened.seek(128)
        opened.write(changed.tobytes())
    done = process.wait()
    assert (done.code, evidence.problems(done, tmp_path / "logs")) == (0, []), done.stderr
    stated = support.read_result(tmp_path / "logs")["observations"]["sha256_float32"]
    assert stated == hashlib.sha256(changed.tobytes()).hexdigest()
    assert_close(outputs(tmp_path / "logs"), checkpoints.reference(support.PROJECT / support.STANDIN, changed))


def test_a_file_that_shrinks_during_the_run_is_no_success(cli, quick, tmp_path, observations):
    """The kernel ends a process that reads beyond the end of what it has mapped."""
    file = saved(tmp_path / "o.npy", observations)
    args = (*support.STANDIN_ARGS, "--observations", file, "--hold-seconds", 0.5, "--log-dir", tmp_path / "logs")
    process = cli.start(*args, env=quick)
    process.wait_for("holding")
    os.truncate(file, 0)
    done = process.wait()
    assert done.code in (1, 2, 6) and evidence.problems(done, tmp_path / "logs") == [], done.stderr
    assert not (tmp_path / "logs" / OUTPUTS).exists()


def test_a_full_disk_ends_the_run_and_leaves_no_outputs(run, tmp_path):
    """The outputs of 20,000 rows are larger than any file may become, their observations are not."""
    file = saved(tmp_path / "o.npy", np.zeros((20_000, 4), np.float32))
    done = run(file, rlimits={"RLIMIT_FSIZE": 500_000})
    assert done.code == 7, done.stderr
    assert not (tmp_path / "logs" / OUTPUTS).exists()
    assert OUTPUTS in evidence.complaints_of(done)[0]


def test_after_a_run_that_was_killed_amid_its_outputs_the_next_starts_clean(cli, quick, run, tmp_path, observations):
    file, trace = saved(tmp_path / "o.npy", observations), tmp_path / "trace"
    args = (*support.STANDIN_ARGS, "--observations", file, "--hold-seconds", 0, "--log-dir", tmp_path / "logs")
    process = cli.start(*args, script=faults.patched(cli.project, "inference.CHUNK_ROWS = 8"),
                        env={**quick, "CANNSIM_HANG": "exec:aclnnAddmm:20", "CANNSIM_TRACE": str(trace)})  # fmt: skip
    faults.wait_for_hang(trace, process)
    process.signal(signal.SIGKILL)
    assert process.wait().code == -signal.SIGKILL
    left = {path.name for path in (tmp_path / "logs").iterdir()}
    assert not left & {evidence.RESULT, OUTPUTS} and f".{OUTPUTS}.tmp" in left
    assert run(file).code == 0
    assert_close(outputs(tmp_path / "logs"), checkpoints.reference(support.PROJECT / support.STANDIN, observations))
