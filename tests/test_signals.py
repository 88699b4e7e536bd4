"""Signals, the deadline, and the death of either process: a run ends at once, says so, and leaves no process behind."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import evidence, faults, support
from harness.terminal import Terminal

PROMPT_S = 2.0  # within which a signal ends a run, whatever the device does
DRIVER, KERNEL = "the driver, which keeps the GIL", "a kernel"
HANGS = {DRIVER: ("aclrtSetDevice", "npu"), KERNEL: ("exec:aclnnAddmm", "forward")}


@pytest.fixture
def start(cli, quick, tmp_path):
    def start(*args: object, env: support.Environment | None = None, patch: str = "", **options) -> support.Process:
        if patch:
            options["script"] = faults.patched(cli.project, patch)
        arguments = (*support.STANDIN_ARGS, "--hold-seconds", 0, "--log-dir", tmp_path / "logs", *args)
        return cli.start(*arguments, env={**quick, **(env or {})}, **options)

    return start


@pytest.fixture
def start_hanging(start, tmp_path):
    """A run whose device never answers: it has reached the call that hangs."""

    def start_hanging(call: str, *args: object, **options) -> support.Process:
        trace = tmp_path / "trace"
        process = start(*args, env={"CANNSIM_HANG": call, "CANNSIM_TRACE": str(trace)}, **options)
        faults.wait_for_hang(trace, process)
        return process

    return start_hanging


def ended(process: support.Process, log_dir: Path, code: int, within: float = PROMPT_S) -> support.Result:
    """Waits for the end, which must come in time, with this code, and with evidence that says so."""
    since = time.monotonic()
    result = process.wait()
    assert (result.code, evidence.problems(result, log_dir)) == (code, []), result.stderr
    assert time.monotonic() - since < within
    return result


def error_of(log_dir: Path) -> dict[str, str]:
    return dict(support.read_result(log_dir)["error"])


# A device that does not answer


@pytest.mark.parametrize(
    ("where", "number"),
    [(DRIVER, signal.SIGTERM), (DRIVER, signal.SIGINT), (KERNEL, signal.SIGTERM), (KERNEL, signal.SIGHUP)],
)
def test_a_signal_ends_a_run_whose_device_hangs(start_hanging, tmp_path, where, number):
    call, stage = HANGS[where]
    process = start_hanging(call)
    process.signal(number)
    ended(process, tmp_path / "logs", 128 + number)
    error = error_of(tmp_path / "logs")
    assert (error["stage"], error["type"]) == (stage, "Interrupted")


@pytest.mark.parametrize("where", HANGS)
def test_the_deadline_ends_a_run_whose_device_hangs_and_shows_the_line_that_hung(start, tmp_path, where):
    call, stage = HANGS[where]
    process = start("--timeout-seconds", 1.5, env={"CANNSIM_HANG": call})
    result = ended(process, tmp_path / "logs", 6, within=20)
    error = error_of(tmp_path / "logs")
    assert (error["stage"], error["type"]) == (stage, "DeviceTimeout")
    assert support.read_result(tmp_path / "logs")["worker_exit"] == "ended by SIGABRT"
    assert "Fatal Python error: Aborted" in result.stderr
    assert 'inference.py", line ' in result.stderr.partition("Fatal Python error")[2]


def test_an_impatient_second_signal_changes_nothing(start_hanging, tmp_path):
    process = start_hanging("aclrtSetDevice")
    for _ in range(20):
        process.signal(signal.SIGINT)
        time.sleep(0.005)
    ended(process, tmp_path / "logs", 130)


# Where signals come from


def test_ctrl_c_on_a_terminal(start, tmp_path):
    terminal = Terminal()
    process = start("--hold-seconds", 600, terminal=terminal)
    terminal.wait_for("npu_smi captured")
    terminal.press(b"\x03")
    assert process.wait(PROMPT_S).code == 130
    assert "inference.py: ready: interrupted by SIGINT; " in terminal.text()
    assert "Traceback" not in terminal.text()
    assert error_of(tmp_path / "logs")["type"] == "Interrupted"
    assert evidence.processes_of(process) == []


def test_a_terminal_that_is_closed(start, tmp_path):
    terminal = Terminal()
    process = start("--hold-seconds", 600, terminal=terminal)
    terminal.wait_for("npu_smi captured")
    terminal.close()
    assert process.wait(PROMPT_S).code == 129
    assert support.read_result(tmp_path / "logs")["exit_code"] == 129
    assert evidence.processes_of(process) == []


def test_nohup_stays_nohup(start, tmp_path):
    process = start("--hold-seconds", 0.5, patch="signal.signal(signal.SIGHUP, signal.SIG_IGN)")
    process.wait_for("npu_smi captured")
    process.signal(signal.SIGHUP)
    os.kill(evidence.worker_of(process), signal.SIGHUP)
    ended(process, tmp_path / "logs", 0, within=60)


def test_a_signal_for_the_whole_group_as_a_batch_system_sends_it(start, tmp_path):
    process = start("--hold-seconds", 600)
    process.wait_for("npu_smi captured")
    os.killpg(process.pid, signal.SIGTERM)
    ended(process, tmp_path / "logs", 143)


def test_the_processor_time_limit_of_a_batch_system_is_no_success(start, tmp_path):
    """SIGXCPU, and any other signal that the program does not know, ends the supervisor: nothing survives it."""
    process = start("--hold-seconds", 600)
    process.wait_for("npu_smi captured")
    process.signal(signal.SIGXCPU)
    assert process.wait().code == -signal.SIGXCPU
    assert evidence.processes_of(process) == []
    assert not (tmp_path / "logs" / evidence.RESULT).exists()


# The worker dies


def npu_smi_that_waits(directory: Path, when: str) -> dict[str, str]:
    """The Nth call of npu-smi says so and sleeps: a run that stays where it is."""
    directory.mkdir()
    (directory / "npu-smi").write_text(
        f'#!/bin/sh\necho $$ >>{directory}/calls\n[ "$(wc -l <{directory}/calls)" = {when} ] || exit 0\n'
        f"echo $$ >{directory}/waits\nexec sleep 600\n"
    )
    (directory / "npu-smi").chmod(0o755)
    return {"PATH": f"{directory}{os.pathsep}{os.environ['PATH']}"}


def at_once(start, directory: Path) -> support.Process:
    return start()


def before_the_device(start, directory: Path) -> support.Process:
    process = start(env=npu_smi_that_waits(directory / "bin", "1"))
    assert eventually(lambda: (directory / "bin/waits").exists())
    return process


def in_the_hold(start, directory: Path) -> support.Process:
    process = start("--hold-seconds", 600)
    process.wait_for("npu_smi captured")
    return process


def in_a_benchmark(start, directory: Path) -> support.Process:
    process = start("--benchmark", 100_000)
    process.wait_for("[reference]")
    return process


def in_a_call(call: str):
    def hanging(start, directory: Path) -> support.Process:
        process = start(env={"CANNSIM_HANG": call, "CANNSIM_TRACE": str(directory / "trace")})
        faults.wait_for_hang(directory / "trace", process)
        return process

    return hanging


# The moment, the signal, the exit code that the stage has, and the stage.
DEATHS = {
    "at once": (at_once, signal.SIGKILL, None),
    "before the device is taken": (before_the_device, signal.SIGSEGV, 4),
    "in the driver": (in_a_call("aclrtSetDevice"), signal.SIGABRT, 4),
    "in a copy of the load": (in_a_call("aclrtMemcpy:5"), signal.SIGSEGV, 5),
    "in the hold": (in_the_hold, signal.SIGKILL, 5),
    "in a kernel": (in_a_call("exec:aclnnAddmm"), signal.SIGABRT, 6),
    "by a signal without a name": (in_the_hold, 40, 5),
    "in the benchmark": (in_a_benchmark, signal.SIGBUS, 6),
}


@pytest.mark.parametrize("moment", DEATHS)
def test_a_worker_that_dies_leaves_a_result_that_says_so(start, tmp_path, moment):
    """abort() in CANN, the kernel's out-of-memory killer, a fault in a driver library."""
    reach, number, code = DEATHS[moment]
    process = reach(start, tmp_path)
    os.kill(evidence.worker_of(process), number)
    result = process.wait(8)
    assert evidence.problems(result, tmp_path / "logs") == [], result.stderr
    assert result.code == code or (code is None and result.code > 0)
    name = getattr(number, "name", f"SIG{number}")
    assert support.read_result(tmp_path / "logs")["worker_exit"] == f"ended by {name}"
    assert f"ended by {name}" in error_of(tmp_path / "logs")["message"]


def test_a_worker_that_is_told_to_end_by_somebody_else_is_no_success(start, tmp_path):
    process = in_the_hold(start, tmp_path)
    os.kill(evidence.worker_of(process), signal.SIGTERM)
    ended(process, tmp_path / "logs", 5, within=20)
    assert support.read_result(tmp_path / "logs")["worker_exit"] == "exit code 143"


def test_the_deadline_that_is_named_is_the_one_that_was_in_force(start, tmp_path):
    """Imports have two minutes, however short --timeout-seconds is; two seconds here."""
    patch = faults.during("prepare_environment", "time.sleep(60)") + """
real = inference.Supervisor.enter
def enter(self, stage, at_least_s):
    real(self, stage, at_least_s and min(at_least_s, 2))
inference.Supervisor.enter = enter
"""
    process = start("--timeout-seconds", 0.5, patch=patch)
    result = ended(process, tmp_path / "logs", 6, within=20)
    assert "did not answer within 2 s" in result.stderr


# The teardown after a good forward: a fact of the run, not a reason to fail


def test_a_teardown_that_fails_fails_no_run(start, tmp_path):
    for call in ("aclrtResetDevice", "aclFinalize", "aclrtFree"):
        trace = tmp_path / f"trace of {call}"
        process = start(env={"CANNSIM_FAIL": call, "CANNSIM_TRACE": str(trace)})
        ended(process, tmp_path / "logs", 0, within=60)
        assert '"injected":' in trace.read_text(), call


def test_a_teardown_that_hangs_fails_no_run_and_is_recorded(start, tmp_path):
    process = start("--timeout-seconds", 1.5, env={"CANNSIM_HANG": "aclFinalize"})
    ended(process, tmp_path / "logs", 0, within=60)
    assert support.read_result(tmp_path / "logs")["worker_exit"] == "ended by SIGABRT"


def test_a_teardown_that_crashes_fails_no_run_and_is_recorded(start_hanging, tmp_path):
    process = start_hanging("aclFinalize")
    os.kill(evidence.worker_of(process), signal.SIGSEGV)
    ended(process, tmp_path / "logs", 0, within=20)
    assert support.read_result(tmp_path / "logs")["worker_exit"] == "ended by SIGSEGV"


def test_a_signal_in_the_teardown_ends_the_run_before_it_has_succeeded(start_hanging, tmp_path):
    process = start_hanging("aclFinalize")
    process.signal(signal.SIGTERM)
    ended(process, tmp_path / "logs", 143)


# The supervisor dies


@pytest.mark.parametrize("moment", ["before the device is taken", "in the driver", "in a kernel"])
def test_nothing_survives_a_supervisor_that_is_killed(start, tmp_path, moment):
    process = DEATHS[moment][0](start, tmp_path)
    processes = evidence.processes_of(process, patience=0)
    assert len(processes) >= 2 + (moment == "before the device is taken"), "supervisor, worker, and npu-smi"
    os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 1
    while any(map(evidence.is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(evidence.is_alive, processes))
    assert process.wait().code == -signal.SIGKILL
    assert evidence.processes_of(process) == []
    assert not (tmp_path / "logs" / evidence.RESULT).exists()


@pytest.mark.parametrize(("stream", "ending"), [("stdout", "killed"), ("stdout", "in time"), ("stderr", "in time")])
def test_docker_stop_with_output_that_nobody_reads_leaves_no_process(start_hanging, tmp_path, stream, ending):
    """SIGTERM, and SIGKILL for what has not ended by then."""
    with faults.full_pipe() as pipe:
        process = start_hanging("exec:aclnnAddmm", **{stream: pipe})
        process.signal(signal.SIGTERM)
        if ending == "killed":
            time.sleep(0.02)
            process.kill()
        result = process.wait(PROMPT_S)
    assert evidence.processes_of(result) == []
    if ending == "in time":
        assert result.code == 143
        assert support.read_result(tmp_path / "logs")["exit_code"] == 143
    elif (tmp_path / "logs" / evidence.RESULT).exists():
        assert support.read_result(tmp_path / "logs")["exit_code"] == 143


# A run that is stopped, as by Ctrl-Z, is no device that hangs


@pytest.mark.parametrize("who", ["the supervisor", "all of them"])
def test_time_that_a_run_was_stopped_is_not_the_devices(start, tmp_path, who):
    process = start("--timeout-seconds", 1, "--benchmark", 200)
    process.wait_for("[reference]")
    stopped = [process.pid] if who == "the supervisor" else evidence.processes_of(process, patience=0)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(1.8)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    ended(process, tmp_path / "logs", 0, within=60)


def test_a_stopped_run_can_be_ended(start, tmp_path):
    process = in_the_hold(start, tmp_path)
    processes = evidence.processes_of(process, patience=0)
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    os.kill(process.pid, signal.SIGTERM)
    os.kill(process.pid, signal.SIGCONT)  # as kill of a shell does for a stopped job
    ended(process, tmp_path / "logs", 143, within=PROMPT_S + 1)


# At any moment


def test_ended_at_any_moment_it_leaves_nothing_half_and_the_next_run_is_clean(cli, quick, tmp_path):
    """What is left is a success, a failure that says so, or no result; and SHA256SUMS is whole."""
    project = support.project_copy(tmp_path / "project")
    (project / "SHA256SUMS").write_text(f"{evidence.sha256(project / 'inference.py')}  inference.py\n")
    log_dir = project / "logs"
    shutil.rmtree(log_dir, ignore_errors=True)

    def start() -> support.Process:
        arguments = (*support.STANDIN_ARGS, "--hold-seconds", 0)
        return cli.start(*arguments, script=project / "inference.py", cwd=project, env=quick)

    good = start().wait()
    assert (good.code, evidence.problems(good, log_dir)) == (0, [])
    moments, codes = random.Random(20), []
    for number in itertools.islice(itertools.cycle((signal.SIGKILL, signal.SIGTERM, signal.SIGINT)), 9):
        process = start()
        time.sleep(moments.uniform(0.02, 0.8 * good.seconds))
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
        result = process.wait(good.seconds + PROMPT_S + 1)
        codes.append(result.code)
        if result.code == -signal.SIGKILL:
            assert evidence.processes_of(result) == []
        elif result.code not in (-signal.SIGINT, -signal.SIGTERM):  # before the program was there to take a signal
            assert evidence.problems(result, log_dir) == []
            assert result.code in (0, 128 + number)
        if (log_dir / evidence.RESULT).exists():  # of this run, or of the one before when this one had not begun
            checkpoint = ("--checkpoint", project / support.STANDIN)
            assert evidence.verdict(log_dir, *checkpoint) in ("VALID", "FAILED RUN")
    assert len(codes) - codes.count(0) > 1, codes
    last = start().wait()
    assert (last.code, evidence.problems(last, log_dir)) == (0, [])
    subprocess.run(["sha256sum", "-c", "--strict", "--quiet", "SHA256SUMS"], cwd=project, check=True)


def eventually(value, patience: float = 60):
    """The value once it is true."""
    deadline = time.monotonic() + patience
    while not value() and time.monotonic() < deadline:
        time.sleep(0.01)
    return value()


# From a shell, as processes of their own


def test_the_exit_code_is_what_a_shell_sees(cli, quick, tmp_path):
    """A signal before torch is imported, in a process that nothing was imported for."""
    log_dir = tmp_path / "logs"
    arguments = (*support.STANDIN_ARGS, "--hold-seconds", "600", "--log-dir", str(log_dir))
    script = '"$@" & sleep 1.5; kill -TERM $!; wait $!; echo "code $?"'
    done = subprocess.run(["sh", "-c", script, "sh", sys.executable, "inference.py", *arguments], cwd=cli.project,
                          env=cli.environment(quick), capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.stdout.endswith("code 143\n"), done.stdout + done.stderr
    assert support.read_result(log_dir)["exit_code"] == 143
