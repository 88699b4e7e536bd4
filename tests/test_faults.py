"""Faults around the evidence: whatever breaks, a run ends in a complete success or in a failure that says so."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from harness import checkpoints, evidence, faults, support

SUMS = "SHA256SUMS"
PROMPT_S = 8.0  # for the whole of a run that fails


@pytest.fixture
def start(cli, quick, tmp_path):
    def start(
        *args: object, log_dir: object = tmp_path / "logs", patch: str = "", env=None, **options
    ) -> support.Process:
        if patch:
            options["script"] = faults.patched(cli.project, patch)
        arguments = (*support.STANDIN_ARGS, "--hold-seconds", 0, "--log-dir", log_dir, *args)
        return cli.start(*arguments, env={**quick, **(env or {})}, **options)

    return start


@pytest.fixture
def project(tmp_path) -> Path:
    """A project of its own, whose runs write beside the program, with sums of nothing but the program."""
    project = support.project_copy(tmp_path / "project")
    shutil.rmtree(project / "logs", ignore_errors=True)
    (project / SUMS).write_text(f"{evidence.sha256(project / 'inference.py')}  inference.py\n")
    return project


@pytest.fixture
def run_in(cli, quick):
    def run_in(project: Path, *args: object, **options) -> support.Result:
        arguments = (*support.STANDIN_ARGS, "--hold-seconds", 0, *args)
        return cli(*arguments, script=project / "inference.py", cwd=project, env=quick, **options)

    return run_in


def problems(result: support.Result, log_dir: Path) -> list[str]:
    """As evidence.problems, for a run whose evidence may not be writable at all."""
    found = evidence.problems(result, log_dir)
    if result.code == 7:
        assert result.stderr.count("inference.py: ") == 1, result.stderr
        found = [problem for problem in found if problem != f"exit code 7 and no {evidence.RESULT}"]
    return found


def contents(directory: Path) -> dict[str, tuple[bytes, int, int]]:
    """The files with their inode and time: what a run that writes and removes nothing leaves as it is."""
    return {path.name: (path.read_bytes(), path.stat().st_ino, path.stat().st_mtime_ns) for path in directory.iterdir()}


@contextlib.contextmanager
def pipe() -> Iterator[tuple[int, object]]:
    read, write = os.pipe()
    try:
        with os.fdopen(write, "wb", buffering=0) as file:
            yield read, file
    finally:
        with contextlib.suppress(OSError):
            os.close(read)


# A disk that is full


@pytest.mark.parametrize("limit", [0, 400, 3000, 1 << 20])
def test_a_limit_on_the_size_of_files_is_no_success_and_no_half_file(start, tmp_path, limit):
    with pipe() as (read, write):  # to which the limit does not apply
        result = start(rlimits={"RLIMIT_FSIZE": limit}, stderr=write).wait()
        result = dataclasses.replace(result, stderr=os.read(read, 1 << 20).decode())
    assert problems(result, tmp_path / "logs") == []
    assert result.code == (0 if limit == 1 << 20 else 7)


@contextlib.contextmanager
def file_system(directory: Path, options: str) -> Iterator[Path]:
    """A small file system of its own; only root may have one."""
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


# Log, marker, npu-smi log and result have pages and an inode each, and so have the directory and its parent an inode.
PAGE = os.sysconf("SC_PAGE_SIZE")
SMALL_DISKS = {f"{pages} pages": (f"size={pages * PAGE}", pages > 3) for pages in (1, 2, 3, 5)} | {
    f"{inodes} inodes": (f"size=1m,nr_inodes={inodes}", inodes > 4) for inodes in (2, 4)
}


@pytest.mark.parametrize("disk", SMALL_DISKS)
def test_a_full_disk_is_no_success_and_no_half_file(start, tmp_path, disk):
    options, may_suffice = SMALL_DISKS[disk]
    with file_system(tmp_path / "disk", options) as directory:
        result = start(log_dir=directory / "logs").wait()
        assert problems(result, directory / "logs") == []
        assert result.code in ((0, 7) if may_suffice else (7,))
        assert result.seconds < PROMPT_S, "it waited for a worker that waits for a word"


def test_a_disk_that_rows_of_outputs_fill_is_no_success_and_no_half_file(start, tmp_path):
    np.save(tmp_path / "rows.npy", np.zeros((40_000, 4), np.float32))  # more than two chunks, and 1.4 MB of outputs
    with file_system(tmp_path / "disk", "size=1m") as directory:
        result = start("--observations", tmp_path / "rows.npy", log_dir=directory / "logs").wait()
        assert (result.code, problems(result, directory / "logs")) == (7, [])
        assert "npu_outputs.npy cannot be written: No space left on device" in result.stderr
        assert not (directory / "logs" / evidence.OUTPUTS).exists()


def test_a_read_only_file_system_is_refused(start, tmp_path):
    with file_system(tmp_path / "disk", "size=1m") as disk:
        (disk / "logs").mkdir()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        result = start(log_dir=disk / "logs").wait()
        assert result.code == 7
        assert "Read-only file system" in result.stderr


# The Nth call of a function of `os` in the process that writes the evidence fails, as on a full or broken disk.
FAILING_CALL = """
real = os.{name}
calls, writer = 0, os.getpid()
def failing(*args, **kwargs):
    global calls
    calls += os.getpid() == writer
    if calls == {nth} and os.getpid() == writer:
        calls += 1
        with open({trace!r}, "w") as file:
            file.write("failed")
        raise OSError({code}, os.strerror({code}))
    return real(*args, **kwargs)
os.{name} = failing
"""
FAILING_CALLS = [("open", 6, errno.EMFILE), ("fsync", 3, errno.EIO), ("replace", 1, errno.EIO),
                 ("unlink", 5, errno.EROFS), ("write", 24, errno.ENOSPC), ("pwrite", 8, errno.ENOSPC),
                 ("ftruncate", 1, errno.EIO), ("pipe", 1, errno.EMFILE), ("fork", 1, errno.EAGAIN)]  # fmt: skip


@pytest.mark.parametrize(("name", "step", "code"), FAILING_CALLS)
def test_each_system_call_on_the_evidence_may_fail(cli, quick, tmp_path, name, step, code):
    """One after the other, until a run needs no more of them."""
    failed = 0
    for nth in range(1, 100, step):
        trace, log_dir = tmp_path / f"trace-{nth}", tmp_path / f"logs-{nth}"
        patch = FAILING_CALL.format(name=name, nth=nth, code=code, trace=str(trace))
        arguments = (*support.STANDIN_ARGS, "--hold-seconds", 0, "--log-dir", log_dir)
        result = cli(*arguments, env=quick, script=faults.patched(cli.project, patch))
        found = problems(result, log_dir)
        if name == "unlink":  # what cannot be removed stays
            found = [problem for problem in found if not problem.startswith("left in the log directory")]
        assert found == [], (nth, result.code, result.stderr)
        assert result.code != 1, (nth, result.stderr)
        if name == "fork" and result.code == 7:  # nothing was begun
            assert not log_dir.exists()
        if name == "replace" and (log_dir / evidence.RESULT).exists():
            assert evidence.verdict(log_dir, "--checkpoint", cli.project / support.STANDIN) in ("VALID", "FAILED RUN")
        if not trace.exists():
            break
        failed += 1
    assert failed > 0


# One short write to the log, as on a disk that is full for a moment, or from then on.
SHORT_WRITE = """
real = os.pwrite
def short(fd, data, offset):
    if {lasting} and os.path.exists({trace!r}):
        raise OSError(28, os.strerror(28))
    if not data.startswith(b"[ready]") or b"holding" not in data or os.path.exists({trace!r}):
        return real(fd, data, offset)
    open({trace!r}, "w").close()
    return real(fd, data[:20], offset)
os.pwrite = short
"""


def test_a_line_of_the_log_that_was_written_in_part_is_taken_back_also_when_nothing_follows(start, tmp_path):
    result = start(patch=SHORT_WRITE.format(trace=str(tmp_path / "trace"), lasting=True)).wait()
    assert result.code == 7, result.stderr
    log = (tmp_path / "logs" / evidence.LOG).read_text()
    assert "MARKER=" in log.splitlines()[-1]
    assert log.endswith("\n")


def test_a_line_of_the_log_that_was_written_in_part_is_taken_back(cli, start, tmp_path):
    result = start(patch=SHORT_WRITE.format(trace=str(tmp_path / "trace"), lasting=False)).wait()
    assert (result.code, problems(result, tmp_path / "logs")) == (7, []), result.stderr
    assert "holding" not in (tmp_path / "logs" / evidence.LOG).read_text()
    assert evidence.verdict(tmp_path / "logs", "--checkpoint", cli.project / support.STANDIN) == "FAILED RUN"


# Where the evidence should go


def directory_of_another(path: Path) -> None:
    path.mkdir(mode=0o755)
    os.chown(path, 65534, 65534)


PLACES = {
    "a file": lambda path: path.write_text("precious"),
    "below a file": lambda path: path.parent.joinpath("file").write_text("precious"),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path),
    "read-only": lambda path: path.mkdir(mode=0o555),
    "another user's": directory_of_another,
    "a name too long": lambda path: None,
    "a device": lambda path: None,
}


@pytest.mark.parametrize("place", PLACES)
def test_a_directory_that_cannot_be_written_is_refused(start, tmp_path, place):
    if place == "another user's" and os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    log_dir = tmp_path / "logs"
    PLACES[place](log_dir)
    log_dir = {"below a file": tmp_path / "file/logs", "a name too long": tmp_path / ("x" * 300),
               "a device": Path("/dev/null")}.get(place, log_dir)  # fmt: skip
    result = start(log_dir=log_dir, patch=faults.WITHOUT_PRIVILEGES).wait()
    assert result.code == 7, result.stderr
    [complaint] = evidence.complaints_of(result)
    assert "--log-dir" in complaint
    assert "Traceback" not in result.stderr
    assert [file.read_text() for file in tmp_path.iterdir() if file.is_file()] in ([], ["precious"])


def test_directories_are_made_and_links_to_directories_followed(start, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    result = start(log_dir=tmp_path / "link/a/b").wait()
    assert (result.code, problems(result, tmp_path / "real/a/b")) == (0, [])


def test_a_linked_logs_directory_of_the_project_has_its_sums_and_no_path_in_the_evidence(project, run_in, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (project / "logs").symlink_to(tmp_path / "elsewhere")
    result = run_in(project)
    assert (result.code, problems(result, project / "logs")) == (0, [])
    subprocess.run(["sha256sum", "-c", "--strict", SUMS], cwd=project, check=True)
    for file in (project / "logs").iterdir():
        assert str(tmp_path) not in file.read_text(), file.name


@pytest.mark.parametrize("content", [b"\xff\xfe\0", b"no sum at all\n", b""], ids=["binary", "text", "empty"])
def test_odd_sums_are_no_obstacle(project, run_in, content):
    (project / SUMS).write_bytes(content)
    result = run_in(project)
    assert (result.code, problems(result, project / "logs")) == (0, [])
    assert (project / SUMS).read_bytes().startswith(content)


# What an earlier run, or anybody, left in the place of the evidence

RESULTS = [evidence.RESULT, evidence.MARKER, evidence.NPU_SMI, evidence.OUTPUTS]
NAMES = [evidence.LOG, *RESULTS, *(f".{name}.tmp" for name in RESULTS)]


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.npy"
    np.save(path, np.zeros((3, 4), np.float32))
    return path


@pytest.mark.parametrize("name", NAMES)
def test_a_directory_in_the_place_of_a_file_is_refused_and_stays(start, rows_file, tmp_path, name):
    log_dir = tmp_path / "logs"
    (log_dir / name / "precious").mkdir(parents=True)
    result = start("--observations", rows_file).wait()
    assert result.code == 7, result.stderr
    assert (log_dir / name / "precious").is_dir()
    assert "Traceback" not in result.stderr and "Fatal Python error" not in result.stderr
    assert result.seconds < PROMPT_S
    assert len(evidence.complaints_of(result)) == 1
    if name != evidence.RESULT and (log_dir / evidence.RESULT).exists():
        assert support.read_result(log_dir)["exit_code"] == 7


def plant(path: Path, kind: str, precious: Path) -> None:
    if kind == "link to a file":
        path.symlink_to(precious)
    elif kind == "link to nothing":
        path.symlink_to(precious.with_name("nothing"))
    elif kind == "link to itself":
        path.symlink_to(path)
    elif kind == "named pipe":
        os.mkfifo(path)
    elif kind == "hard link":
        path.hardlink_to(precious)
    elif kind == "read-only file":
        path.write_text("{}")
        path.chmod(0o444)


KINDS = ["link to a file", "link to nothing", "link to itself", "named pipe", "hard link", "read-only file"]


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_stands_in_the_place_of_the_files_is_replaced_and_never_followed(
    project, run_in, rows_file, tmp_path, kind
):
    """A FIFO nobody writes to must not hang a run; what a link points to is somebody else's."""
    log_dir, precious = project / "logs", tmp_path / "precious"
    log_dir.mkdir()
    precious.write_text("precious")
    for name in NAMES:
        plant(log_dir / name, kind, precious)
    plant(project / f".{SUMS}.tmp", kind, precious)
    result = run_in(project, "--observations", rows_file, timeout=30)
    assert (result.code, problems(result, log_dir)) == (0, []), result.stderr
    for name in (evidence.RESULT, evidence.OUTPUTS, *evidence.FILES):
        assert (log_dir / name).is_file() and not (log_dir / name).is_symlink(), name
        assert (log_dir / name).stat().st_nlink == 1, name
    assert precious.read_text() == "precious"
    assert not (tmp_path / "nothing").exists()
    assert not (project / f".{SUMS}.tmp").is_symlink()
    subprocess.run(["sha256sum", "-c", "--strict", "--quiet", SUMS], cwd=project, check=True)


def test_sums_that_are_a_pipe_do_not_hang_a_run(project, run_in):
    (project / SUMS).unlink()
    os.mkfifo(project / SUMS)
    result = run_in(project, timeout=30)
    assert (result.code, problems(result, project / "logs")) == (0, [])


# Another run


def test_of_two_runs_at_once_the_second_is_refused_and_touches_nothing(start, tmp_path):
    first = start("--hold-seconds", 600)
    first.wait_for("npu_smi captured")
    before = contents(tmp_path / "logs")
    second = start().wait()
    assert second.code == 7
    assert "another run is writing its evidence" in second.stderr
    assert contents(tmp_path / "logs") == before
    first.signal(signal.SIGTERM)
    ended = first.wait()
    assert (ended.code, problems(ended, tmp_path / "logs")) == (143, [])


def test_of_many_runs_started_together_one_at_a_time_writes(start, tmp_path):
    with ThreadPoolExecutor(5) as pool:
        results = list(pool.map(lambda _: start().wait(), range(5)))
    assert {result.code for result in results} == {0, 7}
    assert evidence.verdict(tmp_path / "logs", "--checkpoint", support.PROJECT / support.STANDIN) == "VALID"


def test_the_end_of_a_run_that_hangs_leaves_no_core(start):
    """SIGABRT shows the line that hung. The memory of a process on an NPU is a gigabyte."""
    process = start("--hold-seconds", 1, rlimits={"RLIMIT_CORE": 1 << 30})
    process.wait_for("npu_smi captured")
    limits = Path(f"/proc/{evidence.worker_of(process)}/limits").read_text()
    assert re.search(r"Max core file size +0 ", limits), limits
    assert process.wait().code == 0


def test_a_usage_error_leaves_no_directory(start, tmp_path):
    result = start("--observation", "[1]", log_dir=tmp_path / "a/b/c").wait()
    assert (result.code, list(tmp_path.iterdir())) == (2, [])


@pytest.mark.parametrize("name", ["logs", "two\nlines", os.fsdecode(b"not UTF-8 \xff")], ids=ascii)
def test_what_is_in_the_way_is_named_in_one_line(start, tmp_path, name):
    (tmp_path / name / evidence.RESULT / "precious").mkdir(parents=True)
    result = start(log_dir=tmp_path / name).wait()
    [complaint] = evidence.complaints_of(result)
    assert result.code == 7 and f"{evidence.RESULT} cannot be written: Is a directory" in complaint, complaint
    result = start("--checkpoint", "nowhere.zip", log_dir=tmp_path / name).wait()
    [complaint] = evidence.complaints_of(result)
    assert result.code == 3 and "(no result: " in complaint, complaint


def test_what_a_script_has_left_running_before_it_became_the_program_goes_on(cli, quick, tmp_path):
    """Its orphans are not the run's to end."""
    arguments = (*support.STANDIN_ARGS, "--hold-seconds", "1", "--log-dir", str(tmp_path / "logs"))
    script = '(setsid sleep 60 & echo $! >"$1"; sleep 0.5) & shift; exec "$@"'
    done = subprocess.run(["bash", "-c", script, "bash", tmp_path / "pid", sys.executable, "inference.py", *arguments],
                          cwd=cli.project, env=cli.environment(quick), stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL, timeout=60)  # fmt: skip
    assert done.returncode == 0
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)  # it is there, or this fails


def test_what_a_killed_run_left_does_not_keep_the_directory(start, tmp_path):
    process = start("--hold-seconds", 600)
    process.wait_for("npu_smi captured")
    process.kill()
    assert not (tmp_path / "logs" / evidence.RESULT).exists()
    for name in NAMES[1:]:
        (tmp_path / "logs" / name).write_text("{}")
    result = start().wait()
    assert (result.code, problems(result, tmp_path / "logs")) == (0, [])
    assert not (tmp_path / "logs" / evidence.OUTPUTS).exists()


@pytest.mark.parametrize("again", [False, True], ids=["gone", "made again by another run"])
def test_a_run_whose_directory_was_taken_away_is_no_success(start, tmp_path, again):
    """And where another run has made it anew, that run's evidence stays as it is."""
    process = start("--hold-seconds", 1.5)
    process.wait_for("npu_smi captured")
    shutil.rmtree(tmp_path / "logs")
    if again:
        result = start().wait()
        assert (result.code, problems(result, tmp_path / "logs")) == (0, [])
        before = contents(tmp_path / "logs")
    result = process.wait()
    assert result.code == 7, result.stderr
    assert len(evidence.complaints_of(result)) == 1
    if again:
        assert contents(tmp_path / "logs") == before


# A run that was never meant


@pytest.fixture(scope="module")
def old_set(cli, quick, tmp_path_factory) -> Path:
    log_dir = tmp_path_factory.mktemp("old") / "logs"
    result = cli(*support.STANDIN_ARGS, "--hold-seconds", 0, "--log-dir", log_dir, env=quick)
    assert (result.code, evidence.problems(result, log_dir)) == (0, [])
    return log_dir


MISTYPED = {
    "a flag without its value": ["--log-dir"],
    "a flag in the place of a value": ["--checkpoint", "-h"],
    "an observation of the wrong length": ["--observation", "[1, 2, 3]"],
    "a file that is not there": ["--observations", "absent.npy"],
}


@pytest.mark.parametrize("what", MISTYPED)
def test_a_usage_error_leaves_the_evidence_of_the_project_as_it_is(project, run_in, old_set, what):
    """SHA256SUMS included; also an error that is found late, when the observations are read for the checkpoint."""
    shutil.copytree(old_set, project / "logs")
    sums = (project / SUMS).read_bytes()
    before = contents(project / "logs")
    result = run_in(project, *MISTYPED[what])
    [complaint] = evidence.complaints_of(result)
    assert (result.code, "nothing was run" in complaint) == (2, True), complaint
    assert evidence.processes_of(result) == []
    assert (contents(project / "logs"), (project / SUMS).read_bytes()) == (before, sums)


@pytest.mark.parametrize("args", [["--help"], ["--version"]], ids=str)
def test_a_question_to_the_program_leaves_the_last_run_alone(start, old_set, args):
    before = contents(old_set)
    assert start(*args, log_dir=old_set).wait().code == 0
    assert contents(old_set) == before


# Standard streams


@pytest.mark.parametrize("closed", [[1], [0, 1, 2]], ids=str)
def test_closed_streams_change_nothing(start, tmp_path, closed):
    result = start(patch="".join(f"os.close({number})\n" for number in closed)).wait()
    assert (result.code, problems(result, tmp_path / "logs")) == (0, [])


def test_closed_streams_of_a_shell_change_nothing(cli, quick, tmp_path):
    """With `>&-` Python itself starts without sys.stdout."""
    log_dir = tmp_path / "logs"
    arguments = (*support.STANDIN_ARGS, "--hold-seconds", "0", "--log-dir", str(log_dir))
    done = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "inference.py", *arguments],
                          cwd=cli.project, env=cli.environment(quick), timeout=120)  # fmt: skip
    assert done.returncode == 0
    assert evidence.problems(support.Result(0, "", "", -1, 0), log_dir) == []


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_full_device_behind_a_stream_changes_nothing(start, tmp_path, stream):
    with open("/dev/full", "wb") as full:
        result = start(**{stream: full}).wait()
    assert (result.code, problems(result, tmp_path / "logs")) == (0, [])


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_goes_away_changes_nothing(start, tmp_path, stream):
    """inference.py | head -1"""
    with pipe() as (read, write):
        process = start(**{stream: write})
        write.close()
        assert select.select([read], [], [], 60)[0]
        os.read(read, 1)
        os.close(read)
        result = process.wait()
    assert (result.code, problems(result, tmp_path / "logs")) == (0, [])


def test_a_reader_that_reads_nothing_stalls_no_failure(start, tmp_path):
    with faults.full_pipe() as write:
        result = start(env={"CANNSIM_FAIL": "exec:aclnnAddmm"}, stderr=write).wait(30)
    found = problems(result, tmp_path / "logs")
    assert (result.code, [problem for problem in found if not problem.startswith("on stderr")]) == (6, [])


def test_a_flood_that_nobody_reads_stalls_nothing_and_is_not_kept(start, tmp_path):
    """A worker whose libraries print 64 MiB, and nobody reads: neither time nor memory goes into it."""
    flood = "if os.getpid() != supervisor: [os.write(2, bytes(1 << 16)) for _ in range(1024)]"
    patch = f"supervisor = os.getpid()\n{faults.during('forward', flood)}"
    with faults.full_pipe() as pipe:
        result = start(patch=patch, stdout=pipe, stderr=pipe).wait(30)
    assert (result.code, problems(result, tmp_path / "logs")) == (0, [])
    assert result.seconds < 20


def test_an_observation_that_is_wide_is_cut_in_what_is_shown(cli, quick, tmp_path):
    """300,000 numbers in a row: the log, the result and the pipe of the worker carry a thousand of each output."""
    kind = checkpoints.Kind(checkpoints.spaces.Discrete(2), checkpoints.net(), checkpoints.box(300_000))
    path = checkpoints.make(kind, tmp_path / "wide.zip")
    arguments = ("--checkpoint", path, "--sha256", evidence.sha256(path), "--log-dir", tmp_path / "logs")
    with faults.full_pipe() as write:
        result = cli(*arguments, "--hold-seconds", 0, env=quick, stdout=write, timeout=30)
    assert (result.code, problems(result, tmp_path / "logs")) == (0, [])
    assert sum(file.stat().st_size for file in (tmp_path / "logs").iterdir()) < 200_000
    stated = support.read_result(tmp_path / "logs")
    assert (len(stated["observation"][0]), stated["observation_shape"]) == (1000, [300_000])


def test_an_unfinished_line_of_the_worker_does_not_swallow_the_message(start, tmp_path):
    patch = faults.during("forward", "os.write(2, b'an unfinished line')")
    result = start(patch=patch, env={"CANNSIM_FAIL": "exec:aclnnAddmm"}).wait()
    assert (result.code, problems(result, tmp_path / "logs")) == (6, []), result.stderr


# The program that runs is the program that the evidence names


def sha256_of(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


REPLACED = """
import os
with open("inference.py", encoding="utf-8") as file:
    code = compile(file.read(), os.path.abspath("inference.py"), "exec", dont_inherit=True)
with open("other.py", "w", encoding="utf-8") as file:
    file.write({other})
os.replace("other.py", "inference.py")
exec(code, {{"__name__": "__main__", "__file__": os.path.abspath("inference.py")}})
"""


OTHERS = {"another program": "'print(1)\\n'", "a later version": "open('inference.py').read() + '\\nprint(1)\\n'"}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_program_that_is_replaced_while_python_reads_it_is_refused(project, cli, quick, other):
    """The race of an update with a start: the hash of a file that did not run is no evidence."""
    script = project / "start.py"
    script.write_text(REPLACED.format(other=other))
    result = cli(*support.STANDIN_ARGS, "--hold-seconds", 0, script=script, cwd=project, env=quick)
    assert result.code == 2, result.stdout
    [complaint] = evidence.complaints_of(result)
    assert "; nothing was run; " in complaint
    assert not (project / "logs").exists()


def test_a_program_that_is_replaced_after_its_start_is_named_as_it_was(project, run_in, cli, quick):
    sha256 = evidence.sha256(project / "inference.py")
    arguments = (*support.STANDIN_ARGS, "--hold-seconds", 1)
    process = cli.start(*arguments, script=project / "inference.py", cwd=project, env=quick)
    process.wait_for("[verify]")
    (project / "inference.py").unlink()
    (project / "inference.py").write_text("print('another program')")
    assert process.wait().code == 0
    assert support.read_result(project / "logs")["script_sha256"] == sha256


def test_a_program_out_of_a_named_pipe_is_refused(cli, tmp_path):
    """It has no bytes that anybody could hash later: python3 <(curl ...)"""
    command = '"$0" <(cat inference.py) "$@"'
    arguments = (*support.STANDIN_ARGS, "--hold-seconds", "0", "--log-dir", str(tmp_path / "logs"))
    done = subprocess.run(["bash", "-c", command, sys.executable, *arguments], cwd=cli.project, text=True,
                          capture_output=True, env=cli.environment(), timeout=30)  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    [complaint] = done.stderr.splitlines()
    assert "; nothing was run; " in complaint
    assert not (tmp_path / "logs").exists()


# The device's memory, between the load's check and the forward


def test_weights_that_change_on_the_device_after_their_check_are_no_success(start, tmp_path):
    """One bit of one weight, in the memory of the simulated device, by another process's hand."""
    process = start("--hold-seconds", 1, env={"CANNSIM_HBM_MB": "64"})
    process.wait_for("npu_smi captured")
    flip_a_weight_on_the_device(evidence.worker_of(process))
    result = process.wait()
    assert (result.code, problems(result, tmp_path / "logs")) == (6, []), result.stderr
    assert "weights changed on the device" in result.stderr
    assert support.read_result(tmp_path / "logs")["params_match_after_forward"] is False


def flip_a_weight_on_the_device(pid: int) -> None:
    tensors = faults.program()["read_checkpoint"]((support.PROJECT / support.STANDIN).read_bytes()).tensors
    weight = tensors["value_net.weight"].tobytes()
    found = 0
    with open(f"/proc/{pid}/maps", encoding="ascii") as maps, open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for line in maps:
            where, access, *_ = line.split()
            if access == "rw-s":  # the simulator's own window on the device's memory
                start, end = (int(address, 16) for address in where.split("-"))
                memory.seek(start)
                content = memory.read(end - start)
                for match in re.finditer(re.escape(weight), content):  # also where PPO.load had it on its way
                    memory.seek(start + match.start())
                    memory.write(bytes([weight[0] ^ 1]))  # the last bit of the first number
                    found += 1
    assert found > 0


# The environment


@pytest.mark.parametrize(
    "env",
    [
        {"HOME": None, "USER": None, "LOGNAME": None, "LC_ALL": "C", "LANG": "C"},
        {"HOME": "/nonexistent", "TMPDIR": "/nonexistent", "LC_ALL": "tr_TR.UTF-8", "LANGUAGE": "xx"},
        {"LC_ALL": "no such locale", "TZ": "Asia/Kathmandu", "COLUMNS": "0", "LINES": "junk", "TERM": "dumb"},
    ],
    ids=lambda env: " ".join(env),
)
def test_an_unusual_environment_changes_nothing(start, tmp_path, env):
    result = start(env=env).wait()
    assert (result.code, problems(result, tmp_path / "logs")) == (0, [])


def test_an_ascii_interpreter_copes_with_any_name(cli, quick, tmp_path):
    """Read at the start of Python: needs a process of its own."""
    directory = tmp_path / os.fsdecode(b"caf\xe9 \xe4\xb8\xad\xe6\x96\x87")
    directory.mkdir()
    checkpoint = shutil.copy(support.PROJECT / support.STANDIN, directory / "模型.zip")
    arguments = ("--checkpoint", checkpoint, "--sha256", support.STANDIN_SHA256, "--hold-seconds", 0)
    env = {**quick, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii:strict"}
    result = cli.cold(*arguments, "--log-dir", directory / "logs", env=env)
    assert (result.code, problems(result, directory / "logs")) == (0, []), result.stderr


def test_a_deleted_current_directory_matters_to_relative_names_only(start, tmp_path):
    patch = f"os.chdir({str(tmp_path / 'gone')!r})\nos.rmdir({str(tmp_path / 'gone')!r})\n"
    checkpoint = ("--checkpoint", support.PROJECT / support.STANDIN)
    for arguments, log_dir, code in (
        (checkpoint, tmp_path / "logs", 0), (checkpoint, "logs", 7), ((), tmp_path / "logs", 3)
    ):  # fmt: skip
        (tmp_path / "gone").mkdir()
        result = start(*arguments, log_dir=log_dir, patch=patch).wait()
        assert (result.code, problems(result, tmp_path / log_dir if code != 7 else tmp_path / "none")) == (code, [])


CLOCK_SET_BACK = """
import datetime as datetime_module
back = 0
class Clock(datetime_module.datetime):
    @classmethod
    def now(cls, tz=None):
        global back
        back += 1
        return datetime_module.datetime.now(tz) - datetime_module.timedelta(hours=back)
inference.datetime = Clock
real_time = time.time
time.time = lambda: real_time() - 3600 * back
"""


def test_a_clock_that_is_set_back_breaks_no_order(start, tmp_path):
    result = start("--hold-seconds", 0.2, patch=CLOCK_SET_BACK).wait()
    assert (result.code, problems(result, tmp_path / "logs")) == (0, [])
    stated = support.read_result(tmp_path / "logs")
    asked_at = re.findall(r"^# npu-smi .* at=(\S+)", (tmp_path / "logs/npu_smi.log").read_text(), re.MULTILINE)
    assert len(asked_at) == 2
    times = [stated["started_at"], asked_at[0], stated["ready_at"], asked_at[1], stated["finished_at"]]
    assert times == sorted(times)
    assert 0 < stated["load_s"] < stated["total_s"] < 60


@pytest.mark.parametrize("limit", [12, 24, 64])
def test_a_lack_of_descriptors_is_a_proper_end(start, tmp_path, limit):
    result = start(rlimits={"RLIMIT_NOFILE": limit}).wait()
    assert problems(result, tmp_path / "logs") == []
    assert "Traceback" not in result.stderr


def test_more_descriptors_than_select_knows_change_nothing(start, tmp_path):
    patch = """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
"""
    result = start(patch=patch).wait()
    assert (result.code, problems(result, tmp_path / "logs")) == (0, [])


def test_a_failing_npu_smi_is_seen_where_the_end_of_children_is_ignored(cli, tmp_path):
    """A daemon may hand that down; Python then takes every child for one that ended well."""
    script = faults.patched(cli.project, "signal.signal(signal.SIGCHLD, signal.SIG_IGN)")
    result = cli(*support.STANDIN_ARGS, "--hold-seconds", 0, "--log-dir", tmp_path / "logs", script=script,
                 env={"CANNSIM_NPU_SMI": "error"})  # fmt: skip
    assert (result.code, problems(result, tmp_path / "logs")) == (0, [])
    assert support.read_result(tmp_path / "logs")["npu_smi"]["captured"] is False


# Little memory, as `ulimit -v` sets it, beyond what a process has that has imported torch.
LITTLE_MEMORY = """
import resource
with open("/proc/self/statm") as file:
    size = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + {more}, size + {more}))
"""


@pytest.mark.parametrize("more", [0, 1 << 20, 4 << 20, 12 << 20, 40 << 20, 90 << 20, 200 << 20])
def test_a_lack_of_memory_is_a_proper_end(start, tmp_path, more):
    result = start(patch=LITTLE_MEMORY.format(more=more), env={"CANNSIM_HBM_MB": "32"}).wait(60)
    assert "Traceback" not in result.stderr
    assert (result.code > 0) == (more < 200 << 20)
    assert len(evidence.complaints_of(result)) == (result.code > 0)
    assert [problem for problem in problems(result, tmp_path / "logs") if f"no {evidence.RESULT}" not in problem] == []


def test_a_lack_of_memory_from_the_start_is_a_proper_end(cli, quick, tmp_path):
    """`ulimit -v 400000` in a shell: torch cannot even be loaded."""
    result = cli.cold(*support.STANDIN_ARGS, "--hold-seconds", 0, "--log-dir", tmp_path / "logs", env=quick,
                      rlimits={"RLIMIT_AS": 400_000 << 10})  # fmt: skip
    assert (result.code, problems(result, tmp_path / "logs")) == (4, []), result.stderr


# The order of what is written


STALL_AT_RESULT = """
real = os.replace
def replace(source, target):
    if str(target).endswith("npu_result.json"):
        print("stalled", flush=True)
        time.sleep(float(os.environ.get("STALL_S", "600")))
    real(source, target)
os.replace = replace
"""


def test_killed_just_before_the_commit_it_has_not_succeeded(start, tmp_path):
    process = start(patch=STALL_AT_RESULT)
    process.wait_for("stalled")
    process.kill()
    assert not (tmp_path / "logs" / evidence.RESULT).exists()
    result = start().wait()
    assert (result.code, problems(result, tmp_path / "logs")) == (0, [])


def test_a_signal_during_the_commit_comes_too_late(start, tmp_path):
    process = start(patch=STALL_AT_RESULT, env={"STALL_S": "0.5"})
    process.wait_for("stalled")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        process.signal(number)
    result = process.wait()
    assert (result.code, problems(result, tmp_path / "logs")) == (0, [])


def test_readers_never_see_half_a_file(project, run_in):
    """A wrapper may read result, marker and sums at any time."""
    whole = {
        "logs/npu_result.json": whole_result,
        "logs/npu_ready.marker": re.compile(
            r"NPU_READY_PID=\d+\nDEVICE=npu:0\nHOLD_SECONDS=\S+\nREADY_AT=\S+\nSIMULATED=1\n").fullmatch,
        SUMS: re.compile(r"[0-9a-f]{64}  inference.py\n([0-9a-f]{64}  \S+\n)*").fullmatch,
    }  # fmt: skip
    torn, reads = [], 0
    with ThreadPoolExecutor(1) as pool:
        runs = pool.submit(lambda: [run_in(project).code for _ in range(3)])
        while not runs.done():
            for name, is_whole in whole.items():
                with contextlib.suppress(FileNotFoundError):
                    text = (project / name).read_text()
                    reads += 1
                    if not is_whole(text):
                        torn.append((name, text))
            time.sleep(0.001)
    assert (torn, runs.result()) == ([], [0, 0, 0])
    assert reads > 300


def whole_result(text: str) -> bool:
    try:
        return text.endswith("}\n") and {"exit_code", "error", "files"} <= set(json.loads(text))
    except ValueError:
        return False
