"""Faults around the process: whatever breaks, it ends in a complete success or in a failure that says so."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import evidence, faults, support

LOCK = ".npu_inference.lock"


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> dict[str, str]:
    return faults.quick_npu_smi(tmp_path_factory.mktemp("bin"))


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


def problems(result: support.Result, log_dir: Path) -> list[str]:
    """As evidence.problems, for a run whose evidence may not be writable at all."""
    found = evidence.problems(result, log_dir)
    if result.code == 7:
        assert result.stderr.count("inference.py: ") == 1, result.stderr
        found = [problem for problem in found if problem != f"exit code 7 and no {evidence.RESULT}"]
    return found


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


@pytest.mark.parametrize("limit", [0, 1, 100, 200, 400, 800, 1200, 1600, 2000, 3000, 1 << 20])
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


# Log, marker, npu-smi log and result have a page and an inode each, and so have the directory and its parent an inode.
PAGE = os.sysconf("SC_PAGE_SIZE")
SMALL_DISKS = {f"{pages} pages": (f"size={pages * PAGE}", pages > 3) for pages in range(1, 8)} | {
    f"{inodes} inodes": (f"size=1m,nr_inodes={inodes}", inodes > 5) for inodes in range(2, 8)
}


@pytest.mark.parametrize("disk", SMALL_DISKS)
def test_a_full_disk_is_no_success_and_no_half_file(start, tmp_path, disk):
    options, may_suffice = SMALL_DISKS[disk]
    with file_system(tmp_path / "disk", options) as directory:
        result = start(log_dir=directory / "logs").wait()
        assert problems(result, directory / "logs") == []
        assert result.code in ((0, 7) if may_suffice else (7,))


def test_a_read_only_file_system_is_refused(start, tmp_path):
    with file_system(tmp_path / "disk", "size=1m") as disk:
        (disk / "logs").mkdir()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        result = start(log_dir=disk / "logs").wait()
        assert result.code == 7
        assert "Read-only file system" in result.stderr


# The Nth call of a function of `os`, once the program runs, fails as on a full or broken disk.
FAILING_CALL = """
real = os.{name}
calls = 0
def failing(*args, **kwargs):
    global calls
    calls += 1
    if calls == {nth}:
        with open({trace!r}, "w") as file:
            file.write("failed")
        raise OSError({code}, os.strerror({code}))
    return real(*args, **kwargs)
os.{name} = failing
"""


@pytest.mark.parametrize(
    ("name", "step", "code"),
    [("open", 1, errno.EMFILE), ("fsync", 1, errno.EIO), ("replace", 1, errno.EIO), ("unlink", 1, errno.EROFS),
     ("write", 7, errno.ENOSPC), ("dup", 1, errno.EMFILE), ("fstat", 1, errno.EIO)],
)  # fmt: skip
def test_each_system_call_on_the_evidence_may_fail(cli, quick, tmp_path, name, step, code):
    """One after the other, until a run needs no more of them."""
    failed = 0

    def attempt(nth: int) -> bool:
        trace, log_dir = tmp_path / f"trace-{nth}", tmp_path / f"logs-{nth}"
        patch = FAILING_CALL.format(name=name, nth=nth, code=code, trace=str(trace))
        arguments = (*support.STANDIN_ARGS, "--hold-seconds", 0, "--log-dir", log_dir)
        result = cli(*arguments, env=quick, script=faults.patched(cli.project, patch))
        found = problems(result, log_dir)
        if name in ("unlink", "fstat"):  # an unlocked lock file may stay
            found = [problem for problem in found if LOCK not in problem]
        assert found == [], (nth, result.code, result.stderr)
        assert result.code != 1, (nth, result.stderr)
        return trace.exists()

    with ThreadPoolExecutor(2) as pool:
        for first in itertools.count(1, 2 * step):
            happened = list(pool.map(attempt, (first, first + step)))
            failed += sum(happened)
            if not all(happened):
                break
    assert failed > 0


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


def test_a_linked_logs_directory_of_the_project_has_its_sums_and_no_path_in_the_evidence(cli, quick, tmp_path):
    project = support.project_copy(tmp_path / "project")
    shutil.rmtree(project / "logs", ignore_errors=True)
    (tmp_path / "elsewhere").mkdir()
    (project / "logs").symlink_to(tmp_path / "elsewhere")
    (project / "SHA256SUMS").write_text(f"{'0' * 64}  logs/npu_result.json\n")
    result = cli(*support.STANDIN_ARGS, "--hold-seconds", 0, script=project / "inference.py", cwd=project, env=quick)
    assert (result.code, problems(result, project / "logs")) == (0, [])
    subprocess.run(["sha256sum", "-c", "--strict", "SHA256SUMS"], cwd=project, check=True)
    for file in (project / "logs").iterdir():
        assert str(tmp_path) not in file.read_text(), file.name


@pytest.mark.parametrize("content", [b"\xff\xfe\0", b"no sum at all\n", b""], ids=["binary", "text", "empty"])
def test_odd_sums_are_no_obstacle(cli, quick, tmp_path, content):
    project = support.project_copy(tmp_path / "project")
    (project / "SHA256SUMS").write_bytes(content)
    result = cli(*support.STANDIN_ARGS, "--hold-seconds", 0, script=project / "inference.py", cwd=project, env=quick)
    assert result.code in (0, 7)
    assert problems(result, project / "logs") == []
    assert result.code == 7 or (project / "SHA256SUMS").read_bytes().startswith(content)


# What an earlier run, or anybody, left in the place of the evidence

NAMES = [evidence.RESULT, *evidence.FILES, LOCK, *(f".{name}.tmp" for name in (evidence.RESULT, *evidence.FILES))]


@pytest.mark.parametrize("name", NAMES)
def test_a_directory_in_the_place_of_a_file_is_refused_or_goes(start, tmp_path, name):
    log_dir = tmp_path / "logs"
    (log_dir / name / "precious").mkdir(parents=True)
    result = start().wait()
    assert result.code == 7, result.stderr
    assert (log_dir / name / "precious").is_dir()
    assert "Traceback" not in result.stderr
    assert len(evidence.complaints_of(result)) == 1
    if name != evidence.RESULT and (log_dir / evidence.RESULT).exists():
        assert support.read_result(log_dir)["exit_code"] == 7


@pytest.mark.parametrize("kind", ["link to a file", "link to nothing", "named pipe", "hard link", "read-only"])
def test_whatever_else_stands_in_the_place_of_the_files_is_replaced_and_never_followed(start, tmp_path, kind):
    log_dir, precious = tmp_path / "logs", tmp_path / "precious"
    log_dir.mkdir()
    precious.write_text("precious")
    for name in NAMES:
        path = log_dir / name
        if kind == "link to a file" and name != LOCK:
            path.symlink_to(precious)
        elif kind == "link to nothing" and name != LOCK:
            path.symlink_to(tmp_path / "nothing")
        elif kind == "named pipe":
            os.mkfifo(path)
        elif kind == "hard link":
            path.hardlink_to(precious)
        elif kind == "read-only":
            path.write_text("{}")
            path.chmod(0o444)
    result = start(patch=faults.WITHOUT_PRIVILEGES if kind != "read-only" else "").wait(60)
    assert (result.code, problems(result, log_dir)) == (0, []), result.stderr
    assert all(
        (log_dir / name).is_file() and not (log_dir / name).is_symlink() for name in (evidence.RESULT, *evidence.FILES)
    )
    assert precious.read_text() == "precious"
    assert not (tmp_path / "nothing").exists()


def test_a_linked_lock_is_not_followed(start, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / LOCK).symlink_to(tmp_path / "nothing")
    assert start().wait().code == 7
    assert not (tmp_path / "nothing").exists()


# Killed at any moment


class Reader(threading.Thread):
    """Reads the evidence of a project over and over, as a wrapper would, and keeps what was not whole."""

    def __init__(self, project: Path) -> None:
        super().__init__()
        self.project = project
        self.torn: list[str] = []
        self.reads = 0
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(0.001):
            self.look()

    def look(self) -> None:
        for name, whole in (
            ("logs/npu_result.json", whole_result),
            ("logs/npu_ready.marker", whole_marker),
            ("SHA256SUMS", whole_sums),
        ):
            try:
                text = (self.project / name).read_text()
            except FileNotFoundError:
                if name == "SHA256SUMS":
                    self.torn.append("SHA256SUMS was gone")
                continue
            self.reads += 1
            if not whole(text):
                self.torn.append(f"{name}: {text!r}")


def whole_result(text: str) -> bool:
    try:
        return text.endswith("}\n") and {"exit_code", "error", "files"} <= set(json.loads(text))
    except ValueError:
        return False


def whole_marker(text: str) -> bool:
    return bool(re.fullmatch(r"NPU_READY_PID=\d+\nDEVICE=npu:0\nHOLD_SECONDS=\S+\nREADY_AT=\S+\nSIMULATED=1\n", text))


def whole_sums(text: str) -> bool:
    return bool(re.fullmatch(r"([0-9a-f]{64}  \S+\n)+", text)) and "  inference.py\n" in text


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_at_any_moment_it_leaves_nothing_half_and_the_next_run_is_clean(cli, quick, tmp_path, seed):
    project = support.project_copy(tmp_path / "project")
    (project / "SHA256SUMS").write_text(f"{evidence.sha256(project / 'inference.py')}  inference.py\n")
    log_dir = project / "logs"

    def start() -> support.Process:
        arguments = (*support.STANDIN_ARGS, "--hold-seconds", 0)
        return cli.start(*arguments, script=project / "inference.py", cwd=project, env=quick)

    good = start().wait()
    assert (good.code, problems(good, log_dir)) == (0, [])
    moments = random.Random(seed)
    reader = Reader(project)
    reader.start()
    killed = 0
    try:
        for _ in range(50):
            process = start()
            time.sleep(moments.uniform(0, good.seconds))
            if process.running():
                process.kill()
            result = process.wait()
            killed += result.code == -signal.SIGKILL
            if (log_dir / evidence.RESULT).exists() and support.read_result(log_dir)["pid"] == result.pid:
                # the moment was past the commit point: what stands there is true
                assert support.read_result(log_dir)["exit_code"] == 0
                assert problems_but_the_lock(result, log_dir) == []
            else:
                assert result.code == -signal.SIGKILL
            assert evidence.processes_of_session(result.pid) == []
    finally:
        reader.stopped.set()
        reader.join()
    assert reader.torn == []
    assert reader.reads > 100
    assert killed > 20
    last = start().wait()
    assert (last.code, problems(last, log_dir)) == (0, [])
    subprocess.run(["sha256sum", "-c", "--strict", "--quiet", "SHA256SUMS"], cwd=project, check=True)


def problems_but_the_lock(result: support.Result, log_dir: Path) -> list[str]:
    document = support.read_result(log_dir)
    return evidence.problems_of_success(result, document, log_dir)


@pytest.mark.parametrize("function", ["replace_file", "final"])
def test_killed_just_before_the_commit_it_has_not_succeeded(cli, start, tmp_path, function):
    patch = faults.stall(function) if function == "final" else STALL_AT_RESULT
    process = start(patch=patch)
    process.wait_for(faults.STALLED)
    process.kill()
    assert not (tmp_path / "logs" / evidence.RESULT).exists()
    assert eventually(lambda: "no result was written" in process.stderr)
    result = start().wait()
    assert (result.code, problems(result, tmp_path / "logs")) == (0, [])


STALL_AT_RESULT = f"""
real = os.replace
def replace(source, target):
    if str(target).endswith("npu_result.json"):
        print({faults.STALLED!r}, flush=True)
        time.sleep(float(os.environ.get("STALL_S", "600")))
    real(source, target)
os.replace = replace
"""


def eventually(value, patience: float = 10):
    """The value once it is true; a guard needs a moment to see that its process has died."""
    deadline = time.monotonic() + patience
    while not value() and time.monotonic() < deadline:
        time.sleep(0.01)
    return value()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_during_the_commit_comes_too_late(start, tmp_path, number):
    process = start(patch=STALL_AT_RESULT, env={"STALL_S": "0.7"})
    process.wait_for(faults.STALLED)
    process.signal(number)
    result = process.wait()
    assert (result.code, problems(result, tmp_path / "logs")) == (0, [])


@pytest.mark.parametrize("late", ["1.5", "2.5", "4"])
def test_a_slow_commit_past_the_timeout_has_one_outcome(start, tmp_path, late):
    """The two guards step in one second and two seconds after the timeout."""
    result = start("--timeout-seconds", 3, patch=STALL_AT_RESULT, env={"STALL_S": str(2 + float(late))}).wait()
    assert result.code in (0, 6)
    assert problems(result, tmp_path / "logs") == []


FILES_OF_A_HOLD = ["npu_ready.marker", "npu_inference.log", "npu_smi.log"]


@pytest.mark.parametrize("how", ["removed", "changed", "replaced"])
@pytest.mark.parametrize("name", FILES_OF_A_HOLD)
def test_a_run_whose_files_others_touch_is_no_success(start, tmp_path, name, how):
    process = start("--hold-seconds", 1.5)
    process.wait_for("npu_smi captured")
    path = tmp_path / "logs" / name
    if how == "removed":
        path.unlink()
    elif how == "changed":
        with open(path, "a") as file:
            file.write("more\n")
    else:
        os.replace(shutil.copy(path, tmp_path / "copy"), path)
    result = process.wait()
    # a copy with the same bytes is as good as the file, unless more is written to the file that it replaced
    assert result.code == (0 if how == "replaced" and name != "npu_inference.log" else 7), result.stderr
    assert result.code == 0 or "changed or removed by others during the run" in result.stderr
    if (name, how) != ("npu_inference.log", "replaced"):  # its last lines go to the one replaced
        assert problems(result, tmp_path / "logs") == []


def test_a_result_that_others_put_there_is_not_taken_for_this_runs(start, tmp_path):
    process = start("--hold-seconds", 1.5)
    process.wait_for("npu_smi captured")
    (tmp_path / "logs" / evidence.RESULT).write_text('{"exit_code": 42}')
    result = process.wait()
    assert (result.code, problems(result, tmp_path / "logs")) == (0, [])
    assert support.read_result(tmp_path / "logs")["pid"] == process.pid


def test_a_run_whose_directory_was_taken_away_leaves_that_of_the_next_alone(start, tmp_path):
    first = start("--hold-seconds", 600)
    first.wait_for("npu_smi captured")
    shutil.rmtree(tmp_path / "logs")
    second = start()
    result = second.wait()
    first.signal(signal.SIGTERM)
    assert first.wait().code == 143
    assert (result.code, problems(result, tmp_path / "logs")) == (0, [])
    assert support.read_result(tmp_path / "logs")["pid"] == second.pid


def test_a_run_whose_lock_was_taken_away_is_no_success(start, tmp_path):
    process = start("--hold-seconds", 1.5)
    process.wait_for("npu_smi captured")
    (tmp_path / "logs" / LOCK).unlink()
    result = process.wait()
    assert (result.code, problems(result, tmp_path / "logs")) == (7, [])


def test_what_a_killed_run_has_forked_does_not_keep_its_directory(start, tmp_path):
    """CANN's operator compiler forks a pool of processes, which may outlive a run that is killed."""
    process = start("--hold-seconds", 600, patch=faults.during("ready", "if not os.fork(): time.sleep(8); os._exit(0)"))
    process.wait_for("npu_smi captured")
    process.kill()
    result = start().wait()
    assert (result.code, problems(result, tmp_path / "logs")) == (0, []), result.stderr


@pytest.mark.parametrize("function", ["import_torch_npu", "simulator_version"])
def test_a_library_that_takes_over_the_signals_does_not_keep_them(start, tmp_path, function):
    """CANN sets handlers of its own when it is loaded and when it starts."""
    handlers = "[signal.signal(s, signal.SIG_IGN) for s in (signal.SIGTERM, signal.SIGINT)]"
    patch = faults.during(function, handlers)
    if function == "import_torch_npu":
        process = start(patch=patch, env={"CANNSIM_HANG": "aclrtSetDevice", "CANNSIM_TRACE": str(tmp_path / "trace")})
        faults.wait_for_hang(tmp_path / "trace", process)
    else:
        process = start("--hold-seconds", 600, patch=patch)
        process.wait_for("npu_smi captured")
    process.signal(signal.SIGTERM)
    result = process.wait(20)
    assert (result.code, problems(result, tmp_path / "logs")) == (143, [])


def test_a_verdict_of_the_guard_process_stands_also_when_it_is_killed_before_it_ends_the_run(start, tmp_path):
    patch = """
end_descendants, run = inference.end_descendants, os.getpid()
def killed_first(pid):
    if os.getpid() != run:
        os.kill(os.getpid(), signal.SIGKILL)
    end_descendants(pid)
inference.end_descendants = killed_first
"""
    patch += faults.during("policy_outputs", "time.sleep(4)")  # long after the guard's verdict the device answers
    result = start("--timeout-seconds", 2, patch=patch).wait()
    assert (result.code, problems(result, tmp_path / "logs")) == (6, [])


def test_a_failing_npu_smi_is_seen_where_the_end_of_children_is_ignored(cli, tmp_path):
    """A daemon may hand that down; Python then takes every child for one that ended well."""
    script = faults.patched(cli.project, "signal.signal(signal.SIGCHLD, signal.SIG_IGN)")
    result = cli(*support.STANDIN_ARGS, "--hold-seconds", 0, "--log-dir", tmp_path / "logs", script=script,
                 env={"CANNSIM_NPU_SMI": "error"})  # fmt: skip
    assert (result.code, problems(result, tmp_path / "logs")) == (0, [])
    assert support.read_result(tmp_path / "logs")["npu_smi"]["captured"] is False


def test_without_a_thread_to_be_had_it_ends_properly(start, tmp_path):
    patch = """
def refused(thread):
    raise RuntimeError("can't start new thread")
inference.threading.Thread.start = refused
"""
    result = start(patch=patch).wait()
    assert (result.code, problems(result, tmp_path / "logs")) == (7, [])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_without_its_guard_process_a_signal_ends_a_run_all_the_same(start, tmp_path, number):
    process = start("--hold-seconds", 600)
    process.wait_for("npu_smi captured")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    assert eventually(lambda: "State:\tZ" in Path(f"/proc/{children[0]}/status").read_text())
    process.signal(number)
    result = process.wait(20)
    assert (result.code, problems(result, tmp_path / "logs")) == (128 + number, [])


def test_a_signal_while_the_process_leaves_changes_nothing(start, tmp_path):
    patch = """
original = inference.Evidence.unlock
def unlock(evidence):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.3)
    original(evidence)
inference.Evidence.unlock = unlock
"""
    result = start(patch=patch).wait()
    assert (result.code, problems(result, tmp_path / "logs")) == (0, [])


def test_without_its_guard_process_a_run_still_ends_properly(cli, start, tmp_path):
    process = start("--hold-seconds", 2)
    process.wait_for("holding")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert children
    os.kill(int(children[0]), signal.SIGKILL)
    result = process.wait()
    assert problems(result, tmp_path / "logs") == []
    assert "Traceback" not in result.stderr


def test_a_kill_after_the_commit_is_not_said_to_have_lost_the_result(cli, tmp_path):
    script = faults.patched(cli.project, "inference.leave = lambda *_: os.kill(os.getpid(), signal.SIGKILL)")
    process = cli.start(*support.STANDIN_ARGS, "--hold-seconds", 0, "--log-dir", tmp_path / "logs", script=script)
    assert process.wait().code == -signal.SIGKILL
    assert support.read_result(tmp_path / "logs")["exit_code"] == 0
    assert eventually(lambda: "its result was written" in process.stderr), process.stderr


def test_a_slow_npu_smi_is_no_hung_device(cli, tmp_path):
    script = faults.patched(cli.project, "inference.NPU_SMI_TIMEOUT_S = 4.0")
    done = cli(*support.STANDIN_ARGS, "--hold-seconds", 0, "--timeout-seconds", 3, "--log-dir", tmp_path / "logs",
               script=script, env={"CANNSIM_NPU_SMI": "hang"})  # fmt: skip
    assert done.code == 0, done.stderr
    assert support.read_result(tmp_path / "logs")["npu_smi"]["reason"] == "npu-smi failed"


def test_a_kill_takes_a_hanging_npu_smi_with_it(cli, start, tmp_path):
    directory = tmp_path / "bin"
    directory.mkdir()
    (directory / "npu-smi").write_text(
        f'#!/bin/sh\n[ "$1" = info ] || exit 0\necho $$ >{directory}/pid\nexec sleep 600\n'
    )
    (directory / "npu-smi").chmod(0o755)
    process = start(env={"PATH": f"{directory}{os.pathsep}{os.environ['PATH']}"})
    assert eventually(lambda: (directory / "pid").exists() and (directory / "pid").read_text().strip(), 60)
    process.kill()
    pid = (directory / "pid").read_text().strip()
    assert eventually(
        lambda: not Path(f"/proc/{pid}").exists() or "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    )


# Standard streams


@pytest.mark.parametrize("closed", [[0], [1], [2], [0, 1, 2]], ids=str)
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
    pid = support.read_result(log_dir)["pid"]
    assert evidence.problems(support.Result(0, "", "", pid, 0), log_dir) == []


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


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("fails", [False, True], ids=["good run", "failed run"])
def test_a_reader_that_reads_nothing_stalls_nothing(start, tmp_path, stream, fails):
    with pipe() as (_, write):
        os.set_blocking(write.fileno(), False)
        with contextlib.suppress(BlockingIOError):
            while write.write(bytes(65536)):
                pass
        os.set_blocking(write.fileno(), True)
        env = {"CANNSIM_FAIL": "exec:aclnnAddmm"} if fails else {}
        result = start("--timeout-seconds", 20, env=env, **{stream: write}).wait(60)
    assert result.code == (6 if fails else 0)
    found = [
        problem
        for problem in problems(result, tmp_path / "logs")
        if stream == "stdout" or not problem.startswith("on stderr")
    ]
    assert found == []
    if fails:
        assert "did not answer in time" not in support.read_result(tmp_path / "logs")["error"]["message"]
    assert result.seconds < 60


# The environment


@pytest.mark.parametrize(
    "env",
    [
        {"HOME": None, "USER": None, "LOGNAME": None},
        {"HOME": "/nonexistent", "TMPDIR": "/nonexistent"},
        {"LC_ALL": "C", "LANG": "C"},
        {"LC_ALL": "tr_TR.UTF-8", "LANGUAGE": "xx"},
        {"LC_ALL": "no such locale"},
        {"TZ": "Asia/Kathmandu"},
        {"COLUMNS": "0", "LINES": "junk", "TERM": "dumb"},
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
    (tmp_path / "gone").mkdir()
    patch = f"os.chdir({str(tmp_path / 'gone')!r})\nos.rmdir({str(tmp_path / 'gone')!r})\n"
    checkpoint = ("--checkpoint", support.PROJECT / support.STANDIN)
    result = start(*checkpoint, patch=patch).wait()
    assert (result.code, problems(result, tmp_path / "logs")) == (0, [])
    (tmp_path / "gone").mkdir()
    result = start(*checkpoint, log_dir="logs", patch=patch).wait()
    assert (result.code, len(evidence.complaints_of(result))) == (7, 1), result.stderr
    (tmp_path / "gone").mkdir()
    result = start(patch=patch).wait()
    assert (result.code, problems(result, tmp_path / "logs")) == (3, [])


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


@pytest.mark.parametrize("limit", [{"RLIMIT_NOFILE": 24}, {"RLIMIT_NOFILE": 64}], ids=str)
def test_a_lack_of_descriptors_is_a_proper_end(start, tmp_path, limit):
    result = start(rlimits=limit).wait()
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


def test_without_another_process_to_be_had_it_ends_properly(start, tmp_path):
    patch = "def fork():\n    raise BlockingIOError(11, os.strerror(11))\nos.fork = fork\n"
    result = start(patch=patch).wait()
    assert problems(result, tmp_path / "logs") == []
    assert "Traceback" not in result.stderr
