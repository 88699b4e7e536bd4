"""Observations from files: one row or a million, a slice or all, and whatever may be wrong with them."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import signal
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import checkpoints, evidence, faults, support

OUTPUTS = "npu_outputs.npz"
TOLERANCE = 1e-4  # of outputs whose batches differ, relative above 1


@pytest.fixture(scope="module")
def observations() -> np.ndarray:
    return np.random.default_rng(11).normal(0, 1, (50, 4)).astype(np.float32)


@pytest.fixture
def run(cli, tmp_path):
    """Runs a checkpoint over a file below tmp_path, by default the stand-in."""

    def start_and_wait(
        file: Path | None, *args: object, name: str = "logs", checkpoint: Any = support.STANDIN_ARGS, **options: Any
    ) -> support.Result:
        rows = () if file is None else ("--observations", file)
        return cli(*checkpoint, *rows, *args, "--hold-seconds", 0, "--log-dir", tmp_path / name, **options)

    return start_and_wait


def saved(path: Path, array: np.ndarray, **options: Any) -> Path:
    with open(path, "wb") as file:
        np.lib.format.write_array(file, array, **options)
    return path


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def as_csv(array: np.ndarray) -> str:
    return "".join(",".join(map(repr, row)) + "\n" for row in array.reshape(len(array), -1).tolist())


def outputs(directory: Path) -> dict[str, np.ndarray]:
    with np.load(directory / OUTPUTS, allow_pickle=False) as loaded:
        return dict(loaded)


def assert_close(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert sorted(actual) == sorted(expected)
    for name, values in expected.items():
        assert actual[name].shape == values.shape and actual[name].dtype == values.dtype, name
        np.testing.assert_allclose(actual[name], values, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


# ----------------------------------------------------------------------------------------------------------------------
# What a file gives
# ----------------------------------------------------------------------------------------------------------------------

FORMATS = {
    "float32": lambda path, array: saved(path / "o.npy", array),
    "float64": lambda path, array: saved(path / "o.npy", array.astype(np.float64)),
    "Fortran order": lambda path, array: saved(path / "o.npy", np.asfortranarray(array)),
    "npy 2.0": lambda path, array: saved(path / "o.npy", array, version=(2, 0)),
    "upper case": lambda path, array: saved(path / "O.NPY", array),
    "csv": lambda path, array: write(path / "o.csv", as_csv(array)),
    "csv, blank lines, spaces and CRLF": lambda path, array: write(
        path / "o.csv", "\n" + as_csv(array).replace(",", ", ").replace("\n", "\r\n\r\n")),
    "csv, no last newline": lambda path, array: write(path / "o.csv", as_csv(array)[:-1]),
    "json": lambda path, array: write(path / "o.json", json.dumps(array.tolist())),
    "json, indented": lambda path, array: write(path / "o.json", "\n" + json.dumps(array.tolist(), indent=3) + "\n"),
    "json, dense": lambda path, array: write(path / "o.json", json.dumps(array.tolist(), separators=(",", ":"))),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_gives_the_outputs_of_sb3_on_the_cpu(run, tmp_path, observations, form):
    done = run(FORMATS[form](tmp_path, observations))
    assert done.code == 0, done.stderr
    expected = checkpoints.reference(support.PROJECT / support.STANDIN, observations)
    assert_close(outputs(tmp_path / "logs"), expected)
    result = support.read_result(tmp_path / "logs")
    assert (result["rows"], result["repeated_rows"], len(result["observation"])) == (50, 50, 16)
    assert result["observation"] == observations[:16].tolist()
    for name, values in outputs(tmp_path / "logs").items():
        assert result[name] == values[:16].tolist()
        assert result["outputs"][name]["shape"] == list(values.shape)
    assert result["files"][OUTPUTS] == evidence.sha256(tmp_path / "logs" / OUTPUTS)
    stated = result["observations"]
    assert (stated["rows"], stated["first_row"], stated["shard"]) == (50, 0, "1/1")
    single = ("float32", "Fortran order", "npy 2.0", "upper case")
    assert stated["dtype"] == ("float32" if form in single else "float64")
    log = (tmp_path / "logs/npu_inference.log").read_text()
    assert f"dtype={stated['dtype']} shard=1/1 first_row=0 rows=50 sha256_float32={stated['sha256_float32']}" in log


@pytest.mark.parametrize("name", ["box", "multi-discrete", "multi-binary", "observation of two dimensions"])
@pytest.mark.parametrize("suffix", ["npy", "csv", "json"])
def test_every_kind_of_policy_takes_a_file(run, tmp_path, name, suffix):
    kind = checkpoints.KINDS[name]
    path = checkpoints.make(kind, tmp_path / "model.zip")
    array = checkpoints.observations(kind, 20)
    if suffix == "npy":
        file = saved(tmp_path / "o.npy", array)
    else:
        file = write(tmp_path / f"o.{suffix}", as_csv(array) if suffix == "csv" else json.dumps(array.tolist()))
    done = run(file, checkpoint=("--checkpoint", str(path), "--sha256", evidence.sha256(path)))
    assert done.code == 0, done.stderr
    assert_close(outputs(tmp_path / "logs"), checkpoints.reference(path, array))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_file_gives_what_its_rows_on_the_command_line_give(run, tmp_path, observations, rows):
    array = observations[:rows]
    assert run(saved(tmp_path / "o.npy", array), name="file").code == 0
    text = json.dumps((array[0] if rows == 1 else array).tolist())
    assert run(None, "--observation", text, name="line").code == 0
    file, line = (support.read_result(tmp_path / name) for name in ("file", "line"))
    for name in ("observation", "rows", "outputs", *outputs(tmp_path / "file")):
        assert file[name] == line[name], name
    assert line["observations"] is None and not (tmp_path / "line" / OUTPUTS).exists()


def test_chunks_give_what_one_pass_gives(cli, run, tmp_path, observations):
    """Many chunks, the last one smaller than the rest, and each reported."""
    file = saved(tmp_path / "o.npy", observations)
    assert run(file, name="one").code == 0
    script = faults.patched(cli.project, "inference.CHUNK_ROWS, inference.PROGRESS_S = 8, 0")
    done = run(file, name="many", script=script)
    assert done.code == 0, done.stderr
    assert_close(outputs(tmp_path / "many"), outputs(tmp_path / "one"))
    progress = re.findall(r"^\[forward\] rows=(\d+)/50 rows_per_s=\d+ left=(\d+)s$", done.stdout, re.M)
    assert [int(rows) for rows, _ in progress] == [8, 16, 24, 32, 40, 48, 50] and progress[-1][1] == "0"
    many, one = (support.read_result(tmp_path / name) for name in ("many", "one"))
    assert (many["repeated_rows"], one["repeated_rows"]) == (8, 50)
    assert many["observations"]["sha256_float32"] == one["observations"]["sha256_float32"]
    assert "rows_per_s" not in (tmp_path / "one/npu_inference.log").read_text()


def test_wide_observations_go_through_in_smaller_chunks(run, cli, tmp_path):
    """Of 30,000 numbers each, eight make up a chunk: fewer than the rows that are shown."""
    kind = checkpoints.Kind(checkpoints.KINDS["discrete"].action_space, checkpoints.net(2),
                            checkpoints.box(30_000))  # fmt: skip
    path = checkpoints.make(kind, tmp_path / "model.zip")
    array = checkpoints.observations(kind, 20)
    model = ("--checkpoint", str(path), "--sha256", evidence.sha256(path))
    done = run(saved(tmp_path / "o.npy", array), checkpoint=model)
    assert done.code == 0, done.stderr
    assert_close(outputs(tmp_path / "logs"), checkpoints.reference(path, array))
    assert cli.cold("--check", tmp_path / "logs").code == 0


def test_equal_outputs_give_equal_files(run, tmp_path, observations):
    file = saved(tmp_path / "o.npy", observations)
    for name in ("first", "second"):
        assert run(file, name=name).code == 0
    assert evidence.sha256(tmp_path / "first" / OUTPUTS) == evidence.sha256(tmp_path / "second" / OUTPUTS)


def test_the_outputs_of_an_earlier_run_are_gone_at_the_next_start(run, tmp_path, observations):
    assert run(saved(tmp_path / "o.npy", observations)).code == 0
    assert (tmp_path / "logs" / OUTPUTS).exists()
    assert run(tmp_path / "absent.npy").code == 2
    assert not (tmp_path / "logs" / OUTPUTS).exists()


def test_an_observation_on_the_command_line_is_never_cut(cli, run, tmp_path):
    """More rows than one chunk of a file holds."""
    kind = checkpoints.KINDS["observation of one"]
    path = checkpoints.make(kind, tmp_path / "model.zip")
    script = faults.patched(cli.project, "inference.CHUNK_ROWS = 8")
    array = checkpoints.observations(kind, 20)
    done = run(None, "--observation", json.dumps(array.tolist()), script=script,
               checkpoint=("--checkpoint", str(path), "--sha256", evidence.sha256(path)))  # fmt: skip
    assert done.code == 0, done.stderr
    result = support.read_result(tmp_path / "logs")
    assert len(result["observation"]) == len(result["action"]) == result["rows"] == 20


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


BAD: dict[str, tuple[str, bytes | str, str]] = {
    "columns": ("o.npy", npy(np.zeros((5, 3), np.float32)), r"the shape \[5, 3\], and the checkpoint's .* \[4\]"),
    "an endless shape": ("o.npy", npy(ZEROS).replace(b"(5, 4), }" + b" " * 20, b"(%d, 4), }" % 10**20), "damaged"),
    "a shape of truths": ("o.npy", npy(ZEROS).replace(b"(5, 4), }   ", b"(True, 4), }"), "damaged"),
    "a header without sense": ("o.npy", npy(ZEROS).replace(b"{'descr'", b"{[]     "), "damaged"),
    "nested too deep": ("o.json", "[" + "[" * 900 + "]" * 900 + "]", "damaged|row 0"),
    "one dimension": ("o.npy", npy(np.zeros(4, np.float32)), r"the shape \[4\]"),
    "three dimensions": ("o.npy", npy(np.zeros((2, 1, 4), np.float32)), r"the shape \[2, 1, 4\]"),
    "no dimension": ("o.npy", npy(np.float32(1.0) * np.ones((), np.float32)), "no rows"),
    "no rows": ("o.npy", npy(ZEROS[:0]), "no rows"),
    "int64": ("o.npy", npy(np.zeros((5, 4), np.int64)), "int64, not float32 or float64"),
    "bool": ("o.npy", npy(np.zeros((5, 4), bool)), "bool, not"),
    "float16": ("o.npy", npy(np.zeros((5, 4), np.float16)), "float16, not"),
    "big-endian": ("o.npy", npy(np.zeros((5, 4), ">f4")), ">f4, not float32"),
    "complex": ("o.npy", npy(np.zeros((5, 4), np.complex64)), "complex64, not"),
    "text": ("o.npy", npy(np.array([["1"] * 4] * 5)), "not float32"),
    "records": ("o.npy", npy(np.zeros(5, [("x", "f4", 4)])), "not float32"),
    "objects": ("o.npy", npy(np.array([[Explosive()] * 4] * 5)), r"(?i)object|pickle"),
    "NaN": ("o.npy", npy(with_value(np.nan, np.float32)), "row 3 holds NaN"),
    "infinity": ("o.npy", npy(with_value(np.inf)), "row 3 holds NaN, infinity"),
    "minus infinity": ("o.npy", npy(with_value(-np.inf, np.float32)), "row 3 holds NaN, infinity"),
    "beyond float32": ("o.npy", npy(with_value(1e39)), "row 3 holds .* a number beyond float32"),
    "truncated": ("o.npy", npy(ZEROS)[:-1], "damaged"),
    "only a header": ("o.npy", npy(ZEROS)[:128], "damaged|no rows"),
    "half a header": ("o.npy", npy(ZEROS)[:40], "damaged"),
    "empty npy": ("o.npy", b"", "damaged|no data"),
    "no npy": ("o.npy", b"0,0,0,0\n", "damaged|pickle"),
    "a zip": ("o.npy", b"PK\3\4" + bytes(100), "damaged|pickle|zip"),
    "a pickle": ("o.npy", b"cos\nsystem\n(S'touch exploded'\ntR.", "damaged|pickle"),
    "a huge shape": ("o.npy", npy(ZEROS).replace(b"(5, 4)", b"(5000000000000, 4)"), "damaged"),
    "ragged": ("o.csv", "0,0,0,0\n0,0,0\n", r"row 1 has not the shape \[4\]"),
    "header": ("o.csv", "x,v,theta,omega\n0,0,0,0\n", "could not convert string to float: 'x'"),
    "an empty cell": ("o.csv", "0,0,,0\n", "could not convert"),
    "semicolons": ("o.csv", "0;0;0;0\n", "could not convert"),
    "NaN in csv": ("o.csv", "0,0,0,0\n0,nan,0,0\n", "row 1 holds NaN|row 1 has not"),
    "infinity in csv": ("o.csv", "0,0,0,0\n0,1e999,0,0\n", "row 1 holds NaN|row 1 has not"),
    "empty csv": ("o.csv", "", "no rows"),
    "blank csv": ("o.csv", "\n\n\n", "no rows"),
    "not UTF-8": ("o.csv", b"\xff\xfe0,0,0,0\n", "damaged"),
    "a NUL": ("o.csv", b"0,0,\0,0\n", "damaged"),
    "an endless field": ("o.csv", "1" * 200_000 + ",0,0,0\n", "damaged|row 0"),
    "no list": ("o.json", '{"a": 1}', "no JSON list"),
    "an empty list": ("o.json", "[]", "no rows"),
    "one row": ("o.json", "[0, 0, 0, 0]", r"row 0 has not the shape \[4\]"),
    "nested deeper": ("o.json", "[[[0, 0, 0, 0]]]", "row 0 has not the shape"),
    "ragged json": ("o.json", "[[0, 0, 0, 0], [0, 0, 0]]", "row 1 has not the shape"),
    "text in json": ("o.json", '[[0, 0, "0", 0]]', "row 0 has not the shape .* or holds what is no number"),
    "true in json": ("o.json", "[[0, 0, true, 0]]", "row 0 has not the shape"),
    "null in json": ("o.json", "[[0, 0, null, 0]]", "row 0 has not the shape"),
    "NaN in json": ("o.json", "[[0, 0, NaN, 0]]", "row 0 "),
    "a big integer": ("o.json", f"[[0, 0, {10**400}, 0]]", "row 0 |damaged"),
    "a big number": ("o.json", "[[0, 0, 1e39, 0]]", "row 0 holds .* beyond float32"),
    "cut json": ("o.json", "[[0, 0, 0, 0], [0, 0", "no JSON list of observations"),
    "more after json": ("o.json", "[[0, 0, 0, 0]] [[1]]", "damaged|no JSON list"),
    "two commas": ("o.json", "[[0, 0, 0, 0],, [0, 0, 0, 0]]", "damaged|no JSON list"),
    "a last comma": ("o.json", "[[0, 0, 0, 0],]", "damaged|no JSON list"),
    "a list without end": ("o.json", "[[0, 0, 0, 0],", "damaged|no JSON list"),
    "no comma": ("o.json", "[[0, 0, 0, 0] [0, 0, 0, 0]]", "damaged|no JSON list"),
    "nested without end": ("o.json", "[" * 100_000, "no JSON list|row 0"),
    "empty json": ("o.json", "", "no JSON list"),
    "another suffix": ("o.txt", "0,0,0,0\n", r"no \.npy, \.csv or \.json file"),
    "no suffix": ("o", "0,0,0,0\n", r"no \.npy, \.csv or \.json file"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_a_usage_error_that_says_what_is_wrong(run, cli, tmp_path, what):
    name, content, words = BAD[what]
    done = run(write(tmp_path / name, content), timeout=30)
    assert_refused(done, tmp_path / "logs", words)
    assert not list(tmp_path.glob("exploded")) and not (cli.project / "exploded").exists()


def assert_refused(done: support.Result, log_dir: Path, words: str) -> None:
    assert (done.code, evidence.problems(done, log_dir)) == (2, []), done.stderr
    [line] = evidence.complaints_of(done)
    assert re.search(words, line), line
    result = support.read_result(log_dir)
    assert result["action"] is None and result["npu_available"] is None, "the NPU was touched"


@pytest.mark.parametrize(("kind", "words"), [
    ("missing", "No such file"), ("a directory", "regular file"), ("a link to itself", "Too many levels"),
])  # fmt: skip
@pytest.mark.parametrize("suffix", ["npy", "csv", "json"])
def test_what_is_no_file_is_refused(run, tmp_path, kind, words, suffix):
    path = tmp_path / f"o.{suffix}"
    if kind == "a directory":
        path.mkdir()
    elif kind == "a link to itself":
        path.symlink_to(path)
    assert_refused(run(path), tmp_path / "logs", words)


@pytest.mark.parametrize("suffix", ["npy", "csv", "json"])
def test_a_pipe_is_refused_and_not_waited_for(run, tmp_path, suffix):
    os.mkfifo(tmp_path / f"o.{suffix}")
    assert_refused(run(tmp_path / f"o.{suffix}", timeout=30), tmp_path / "logs", "regular file")


@pytest.mark.parametrize(("args", "words"), [
    (("--observation", "[0,0,0,0]"), "not allowed with"),
    (("--shard", "0/4"), "no slice"), (("--shard", "5/4"), "no slice"), (("--shard", "1"), "no slice"),
    (("--shard", "1/0"), "no slice"), (("--shard", "-1/4"), "no slice|expected one"), (("--shard", "a/b"), "no slice"),
    (("--shard", "1/4/2"), "no slice"), (("--shard", "1.0/4"), "no slice"), (("--shard", "1/51"), "is empty"),
])  # fmt: skip
def test_arguments_that_do_not_go_together(run, tmp_path, observations, args, words):
    done = run(saved(tmp_path / "o.npy", observations), *args)
    assert_refused(done, tmp_path / "logs", words)


def test_a_slice_needs_a_file(run, tmp_path):
    assert_refused(run(None, "--shard", "1/2"), tmp_path / "logs", "--shard needs --observations")


# ----------------------------------------------------------------------------------------------------------------------
# Slices
# ----------------------------------------------------------------------------------------------------------------------


def test_four_slices_on_four_npus_at_once_join_to_the_whole(cli, run, tmp_path, observations):
    """As the README's launchers do it: one process each, with its own NPU and log directory."""
    file = saved(tmp_path / "o.npy", observations)
    assert run(file, name="whole").code == 0

    def shard(index: int) -> support.Result:
        return run(file, "--shard", f"{index}/4", name=f"shard{index}",
                   env={"CANNSIM_DEVICES": "4", "ASCEND_RT_VISIBLE_DEVICES": str(index - 1)})  # fmt: skip

    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(shard, range(1, 5)))
    assert [each.code for each in done] == [0] * 4, [each.stderr for each in done]
    results = [support.read_result(tmp_path / f"shard{index}") for index in range(1, 5)]
    assert [result["visible_devices"] for result in results] == ["0", "1", "2", "3"]
    assert [result["npu_smi"]["npu_id"] for result in results] == ["0", "1", "2", "3"]
    assert [result["observations"]["first_row"] for result in results] == [0, 12, 25, 37]
    assert sum(result["rows"] for result in results) == len(observations)
    parts = [outputs(tmp_path / f"shard{index}") for index in range(1, 5)]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    assert_close(joined, outputs(tmp_path / "whole"))


def test_an_error_in_a_slice_names_the_row_of_the_file(run, tmp_path):
    done = run(saved(tmp_path / "o.npy", with_value(np.nan)), "--shard", "2/2")
    assert_refused(done, tmp_path / "logs", "row 3 holds NaN")


def test_an_error_elsewhere_is_not_this_slices(run, tmp_path):
    assert run(saved(tmp_path / "o.npy", with_value(np.nan)), "--shard", "1/2").code == 0


# ----------------------------------------------------------------------------------------------------------------------
# Long work
# ----------------------------------------------------------------------------------------------------------------------

def test_memory_does_not_grow_with_the_rows(cli, tmp_path):
    """The peak of a process of its own, from 1,000 to 100,000 rows."""
    script = faults.patched(cli.project, """
import resource
commit = inference.Evidence.commit
def report(evidence):
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr, flush=True)
    commit(evidence)
inference.Evidence.commit = report
""")
    peaks = []
    for rows in (1_000, 100_000):
        file = saved(tmp_path / f"{rows}.npy", np.random.default_rng(0).normal(0, 1, (rows, 4)).astype(np.float32))
        args = (*support.STANDIN_ARGS, "--observations", file, "--hold-seconds", 0, "--log-dir", tmp_path / "logs")
        done = cli.cold(*args, script=script, timeout=300)
        assert done.code == 0, done.stderr
        assert outputs(tmp_path / "logs")["value"].shape == (rows, 1)
        peaks.append(int(re.search(r"^peak (\d+)$", done.stderr, re.M)[1]))  # KiB
    assert peaks[1] - peaks[0] <= 64 << 10, peaks


@pytest.mark.parametrize("name", ["o.csv", "o.json"])
def test_a_mark_of_the_byte_order_at_the_start_is_no_part_of_the_first_number(run, tmp_path, observations, name):
    """Excel writes one into a CSV file in UTF-8."""
    text = as_csv(observations) if name == "o.csv" else json.dumps(observations.tolist())
    done = run(write(tmp_path / name, "\ufeff" + text))
    assert done.code == 0, done.stderr
    assert_close(outputs(tmp_path / "logs"), checkpoints.reference(support.PROJECT / support.STANDIN, observations))


@pytest.mark.parametrize("how", ["other rows", "truncated", "removed"])
def test_a_file_that_changes_during_the_run_changes_nothing(cli, tmp_path, observations, how):
    """What was checked and hashed is what runs; and a file that shrinks below its mapping would kill the process."""
    file = saved(tmp_path / "o.npy", observations)
    args = (*support.STANDIN_ARGS, "--observations", file, "--hold-seconds", 1, "--log-dir", tmp_path / "logs")
    process = cli.start(*args)
    process.wait_for("holding")
    if how == "other rows":
        with open(file, "r+b") as opened:
            opened.seek(128)
            opened.write((observations + 1).tobytes())
    elif how == "truncated":
        os.truncate(file, 0)
    else:
        file.unlink()
    done = process.wait()
    assert (done.code, evidence.problems(done, tmp_path / "logs")) == (0, []), done.stderr
    stated = support.read_result(tmp_path / "logs")["observations"]["sha256_float32"]
    assert stated == hashlib.sha256(observations.tobytes()).hexdigest()
    assert_close(outputs(tmp_path / "logs"), checkpoints.reference(support.PROJECT / support.STANDIN, observations))


def test_a_full_disk_ends_the_run_and_leaves_no_outputs(run, tmp_path):
    """The outputs of 20,000 rows are larger than any file may become, their observations are not."""
    file = saved(tmp_path / "o.npy", np.zeros((20_000, 4), np.float32))
    done = run(file, rlimits={"RLIMIT_FSIZE": 500_000})
    assert done.code == 7, done.stderr
    assert not evidence.problems(done, tmp_path / "logs")
    assert not (tmp_path / "logs" / OUTPUTS).exists()
    assert OUTPUTS in evidence.complaints_of(done)[0]


def test_after_a_run_that_was_killed_amid_its_outputs_the_next_starts_clean(cli, run, tmp_path, observations):
    file = saved(tmp_path / "o.npy", observations)
    script = faults.patched(cli.project, faults.stall("shutil.copyfileobj"))  # into the zip
    args = (*support.STANDIN_ARGS, "--observations", file, "--hold-seconds", 0, "--log-dir", tmp_path / "logs")
    process = cli.start(*args, script=script)
    process.wait_for(faults.STALLED)
    process.signal(signal.SIGKILL)
    assert process.wait().code == -signal.SIGKILL
    left = {path.name for path in (tmp_path / "logs").iterdir()}
    assert not left & {"npu_result.json", OUTPUTS} and f".{OUTPUTS}.tmp" in left
    assert run(file).code == 0
    assert not evidence.leftovers(tmp_path / "logs")
    assert_close(outputs(tmp_path / "logs"), checkpoints.reference(support.PROJECT / support.STANDIN, observations))


def test_the_members_are_stored_as_numpy_writes_them(run, tmp_path, observations):
    """numpy.load maps and any unzip reads them: no compression, one array a member."""
    assert run(saved(tmp_path / "o.npy", observations)).code == 0
    with zipfile.ZipFile(tmp_path / "logs" / OUTPUTS) as archive:
        assert archive.testzip() is None
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
        names = ["action", "value", "log_prob", "entropy", "probs", "logits"]
        assert archive.namelist() == [f"{name}.npy" for name in names]

