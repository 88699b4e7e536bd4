"""The other tests rest on this: a forked case behaves as `python3 SCRIPT` does."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from harness import support

BOTH = pytest.mark.parametrize("cold", [False, True], ids=["forked", "cold"])


@pytest.fixture
def script(tmp_path: Path):
    def write(source: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(source)
        return path

    return write


def lives(pid: int) -> bool:
    """Whether the process runs; one that only waits for its parent to read its status does not."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
    return "State:\tZ" not in status


@BOTH
def test_the_program_sees_what_python_would_give_it(cli, script, tmp_path, monkeypatch, cold):
    monkeypatch.setenv("CANNSIM_FAIL", "of the tester's own shell")
    source = """
import os, sys, __main__
print([__name__, __file__, sys.argv, os.getcwd(), sys.path[0], __main__.sys is sys, sys.stdin.read()])
print([os.environ.get(name) for name in ("CANNSIM_FAIL", "TASK_QUEUE_ENABLE", "HOME", "NEW")])
print("error", file=sys.stderr)
"""
    path = script(source)
    process = cli.start("--x", 1, script=path, cwd=tmp_path, env={"HOME": None, "NEW": "1"}, cold=cold)
    result = process.wait()
    assert result.stdout.splitlines() == [
        f"['__main__', {str(path)!r}, ['script.py', '--x', '1'], {str(tmp_path)!r}, {str(tmp_path)!r}, True, '']",
        "[None, None, None, '1']",
    ]
    assert (result.code, result.stderr) == (0, "error\n")


@BOTH
@pytest.mark.parametrize(
    ("ending", "code", "error"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('words')", 1, "words\n"),
        ("import os; os._exit(130)", 130, ""),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV, ""),
        ("import atexit, os; atexit.register(os._exit, 9)", 9, ""),
    ],
)
def test_the_exit_code_is_the_programs(cli, script, cold, ending, code, error):
    result = cli.start(script=script(ending), cold=cold).wait()
    assert result.code == code
    assert result.stderr.endswith(error)


@BOTH
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_running_program(cli, script, cold, number):
    path = script("import time; print('ready', flush=True)\nwhile True: time.sleep(0.01)")
    process = cli.start(script=path, cold=cold)
    process.wait_for("ready")
    process.signal(number)
    result = process.wait()
    assert result.code == -number
    assert ("KeyboardInterrupt" in result.stderr) == (number == signal.SIGINT)


@BOTH
def test_a_program_that_hangs_is_killed_and_reported(cli, script, cold):
    process = cli.start(script=script("import time; print('in', flush=True); time.sleep(600)"), cold=cold)
    process.wait_for("in")
    with pytest.raises(AssertionError, match="still running"):
        process.wait(0.1)
    assert not process.running()
    assert not lives(process.pid)


def test_several_programs_run_at_once(cli, script, tmp_path):
    source = "import os, sys, time\nprint('in', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
    path = script(source + "sys.exit(int(sys.argv[1]))")
    processes = [cli.start(code, script=path, cwd=tmp_path) for code in range(6)]
    for process in processes:
        process.wait_for("in")
    (tmp_path / "go").touch()
    assert [process.wait().code for process in processes] == list(range(6))


@BOTH
def test_limits_and_full_files_are_the_programs_own(cli, script, tmp_path, cold):
    path = script("with open('big', 'wb') as file: file.write(bytes(5000))")
    result = cli.start(script=path, cwd=tmp_path, rlimits={"RLIMIT_FSIZE": 1000}, cold=cold).wait()
    assert "File too large" in result.stderr
    with open("/dev/full", "w") as full:
        result = cli.start(script=script("print('x', flush=True)"), stdout=full, cold=cold).wait()
    assert "No space left on device" in result.stderr


def test_what_the_fork_cannot_change_is_refused(cli, script):
    with pytest.raises(ValueError, match="cold"):
        cli(script=script(""), env={"LD_LIBRARY_PATH": None})
    result = cli.cold(script=script("import os; print('LD_LIBRARY_PATH' in os.environ)"), env={"LD_LIBRARY_PATH": None})
    assert result.stdout == "False\n"


def test_a_forked_program_is_spared_the_imports(cli, script):
    result = cli(script=script("import sys; print({'torch', 'torch_npu', 'stable_baselines3'} <= set(sys.modules))"))
    assert result.stdout == "True\n"
    cold = cli.cold(script=script("import sys; print('torch' in sys.modules)"))
    assert cold.stdout == "False\n"


def test_the_death_of_the_server_is_reported(simulator, script, tmp_path):
    runner = support.Cli(simulator, tmp_path / "project")
    path = script("import os, signal, time; time.sleep(1); os.kill(os.getppid(), signal.SIGKILL); time.sleep(600)")
    process = runner.start(script=path)
    with pytest.raises(RuntimeError, match=f"fork server ended with -{int(signal.SIGKILL)}"):
        process.wait(20)
    deadline = time.monotonic() + 5
    while lives(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not lives(process.pid), "the child outlived its server"
    with pytest.raises(RuntimeError, match="fork server ended"):
        runner.start(script=path)
    runner.close()


def test_closing_ends_what_still_runs(simulator, script, tmp_path):
    runner = support.Cli(simulator, tmp_path / "project")
    path = script("import time; print('in', flush=True); time.sleep(600)")
    processes = [runner.start(script=path), runner.start(script=path, cold=True)]
    for process in processes:
        process.wait_for("in")
    runner.close()
    assert not any(lives(process.pid) for process in processes)
