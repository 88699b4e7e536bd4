"""Runs the end-to-end case on the simulated NPU in one environment after the other, and prints a table of them.

An environment is made in a temporary directory (TMPDIR says where; up to 8 GB) and removed before the next one, also
when this is interrupted. With --keep all of them stay in the directory that it names (40 GB), and the next call has
nothing to install. pip's own variables and configuration say where packages come from.

The case, through simulate.sh: the stand-in checkpoint and a Gaussian one made there and then, each within the tolerance
of the float64 reference and VALID by check_evidence.py.

While a run goes on it is looked at from outside: CANN's operator compiler must not have left anything there, no
kernel_meta, no child process of the worker, no signal handler. torch_npu 2.9.0 starts that compiler when
torch.npu.conv.allow_hf32 is set. A copy of inference.py that sets it must be caught: the look can fail.

Exit code: 0 when all that could be installed is green, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import compiler, support

TESTS = support.PROJECT / "tests"
DISK_BYTES = 9 << 30
INSTALL_TIMEOUT_S = 3600
RUN_TIMEOUT_S = 600
VALUE = 182.5192  # of the stand-in checkpoint on zeros
NEWEST = ""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

UNPINNED = {"stable-baselines3": "", "gymnasium": "", "numpy": ">=2", "cloudpickle": "", "pandas": "", "matplotlib": ""}


@dataclasses.dataclass(frozen=True)
class Environment:
    python: str
    torch_npu: str
    changes: Mapping[str, str] = dataclasses.field(default_factory=dict)  # to the pins of requirements.txt

    def requirements(self) -> list[str]:
        lines = (support.PROJECT / "requirements.txt").read_text(encoding="utf-8").splitlines()
        pins = dict(re.findall(r"^([\w-]+)(==\S+)", line)[0] for line in lines if line and not line.startswith("#"))
        if unknown := self.changes.keys() - pins.keys():
            raise ValueError(f"requirements.txt has no {unknown}")
        return [name + version for name, version in (pins | dict(self.changes)).items()]

    @property
    def torch(self) -> str:
        return re.sub(r"\.post\d+$", "", self.torch_npu)

    @property
    def directory(self) -> str:
        """The name of the directory that is kept. Those that differ in nothing but torch_npu share it."""
        return "-".join([f"python{self.python}", f"torch{self.torch or '-newest'}", *self.changes])

    def contents(self) -> dict[str, Any]:
        return {"python": self.python, "torch": self.torch, "requirements": self.requirements()}

    def __str__(self) -> str:
        changes = ", ".join(f"{name}{version or ' newest'}" for name, version in self.changes.items())
        return f"Python {self.python}, torch_npu {self.torch_npu or 'newest'}, pins{changes and ' but ' + changes}"


ENVIRONMENTS = {
    "torch_npu-2.13.0": Environment("3.11", "2.13.0"),
    "torch_npu-2.9.0": Environment("3.11", "2.9.0"),
    "torch_npu-2.9.0.post9": Environment("3.11", "2.9.0.post9"),
    "torch_npu-newest": Environment("3.11", NEWEST),
    "numpy-2": Environment("3.11", "2.13.0", {"numpy": ">=2"}),
    "sb3-newest": Environment("3.11", "2.13.0", UNPINNED),
    "python-3.10": Environment("3.10", "2.13.0"),
    "python-3.12": Environment("3.12", "2.13.0"),
    "python-3.13-newest": Environment("3.13", NEWEST, UNPINNED),
}
STARTS_COMPILER = ("2.9.0",)  # releases of torch_npu in which this makes CANN start its operator compiler:
SETTING = "torch.npu.conv.allow_hf32 = False"
TRACES = {"child processes", "a handler for SIGINT", "a handler for SIGQUIT", "kernel_meta"}
LOOKS = 20  # at a run that holds for a second: at least so many, else nothing was shown
COLUMNS = ("environment", "Python", "torch", "torch_npu", "SB3", "gymnasium", "numpy", "outcome", "seconds")

CUDA_NOTE = """\
`+cu`: a CUDA build, since the package index has no other torch for x86-64. The simulator makes room for it; without
that, torch_npu 2.13.0 and 2.14.0 abort beside one, so on a real NPU install the CPU build (`+cpu`) from PyTorch's own
index."""
NOTE_2_9 = """\
The x86-64 wheel of torch_npu 2.9.0 asks for torch 2.9.0+cpu, and does not ask for PyYAML, which it imports. Beside any
other torch 2.9.0: `pip install pyyaml` and `pip install --no-deps torch_npu==2.9.0`."""

NOTE_COMPILER = f"""\
No green run shows a trace of CANN's operator compiler: {", ".join(sorted(TRACES))}.
With torch_npu 2.9.0 and `{SETTING}` in a copy of inference.py, all of them are there."""


class NotInstalled(Exception):
    pass


class Failed(Exception):
    pass


@dataclasses.dataclass
class Row:
    name: str
    environment: Environment
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    outcome: str = ""
    seconds: str = ""
    looks: int = 0  # at its runs, without a trace of the operator compiler
    failed: bool = False

    def cells(self) -> list[str]:
        npu = self.environment.torch_npu or "newest"
        asked = {"python": self.environment.python, "torch_npu": npu, "torch": self.environment.torch or "newest"}
        for requirement in self.environment.requirements():
            name, version = re.findall(r"^([\w-]+)(.*)$", requirement)[0]
            asked[name.replace("-", "_")] = version.removeprefix("==") or "newest"
        versions = asked | self.versions
        names = ("python", "torch", "torch_npu", "stable_baselines3", "gymnasium", "numpy")
        return [f"`{self.name}`", *(versions[name] for name in names), self.outcome.replace("|", "\\|"), self.seconds]


def main() -> int:
    parser = argparse.ArgumentParser("tests/measure/matrix.sh", description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the environments and end")
    parser.add_argument("--only", metavar="NAME", choices=ENVIRONMENTS, action="append", help="just this; repeatable")
    kept = "make the environments there and leave them; one that is there is used as it is, however old its newest are"
    parser.add_argument("--keep", metavar="DIRECTORY", type=Path, help=kept)
    args = parser.parse_args()
    if args.list:
        for name, environment in ENVIRONMENTS.items():
            print(f"{name:<23}{environment}")
        return 0
    for number in SIGNALS:
        signal.signal(number, interrupted)

    rows: list[Row] = []
    try:
        with tempfile.TemporaryDirectory(prefix="matrix-", ignore_cleanup_errors=True) as directory:
            for name in args.only or ENVIRONMENTS:
                row = Row(name, ENVIRONMENTS[name])
                rows.append(row)
                say(f"{name}: {row.environment}")
                packages = Path(directory, "environment")
                if args.keep:
                    packages = args.keep.resolve() / row.environment.directory
                measure(row, packages, Path(directory))
                say(f"{name}: {row.outcome}")
    except KeyboardInterrupt:
        rows[-1].outcome = rows[-1].outcome or "interrupted"
        return 130
    finally:
        print_table(rows)
    return int(any(row.failed for row in rows))


def interrupted(*_: object) -> None:
    for number in SIGNALS:  # gigabytes are being removed
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def say(line: str) -> None:
    print(f"matrix: {line}", file=sys.stderr, flush=True)


def print_table(rows: list[Row]) -> None:
    today = datetime.datetime.now(datetime.timezone.utc).date()
    print(f"{today}, Linux on {platform.machine()}, simulated NPU. Seconds: the stand-in's run, 1 of them its hold.\n")
    print(f"| {' | '.join(COLUMNS)} |")
    print(f"|{'---|' * len(COLUMNS)}")
    for row in rows:
        print(f"| {' | '.join(row.cells())} |")
    if any("+cu" in row.versions.get("torch", "") for row in rows):
        print(f"\n{CUDA_NOTE}")
    if any(row.versions.get("torch_npu") == "2.9.0" for row in rows):
        print(f"\n{NOTE_2_9}")
    if any(row.environment.torch_npu in STARTS_COMPILER and row.outcome == "green" for row in rows):
        print(f"\n{NOTE_COMPILER}")


def measure(row: Row, packages: Path, directory: Path) -> None:
    try:
        python = install(row.environment, packages)
        with tempfile.TemporaryDirectory(dir=directory) as name:
            run_case(row, python, Path(name))
        row.outcome = "green"
        say(f"{row.name}: no trace of CANN's operator compiler in {row.looks} looks at its runs")
    except NotInstalled as reason:
        row.outcome = f"not installed: {reason}"
    except Failed as reason:
        row.outcome, row.failed = f"FAILED: {reason}", True


# An environment -------------------------------------------------------------------------------------------------------


def install(environment: Environment, directory: Path) -> Path:
    """Makes the directory a virtual environment with the packages. Returns its interpreter."""
    python = directory / "bin/python3"
    record = directory / "installed.json"  # written last
    contents, torch_npu = json.loads(record.read_text(encoding="utf-8")) if record.exists() else (None, None)
    alike = contents == environment.contents()
    if alike and torch_npu == environment.torch_npu:
        return python
    record.unlink(missing_ok=True)

    pip = [python, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
    pip += ["--only-binary=:all:"]  # else a release without a wheel is compiled, or fails to be, for long
    # The wheel of 2.9.0 for x86-64 asks for torch 2.9.0+cpu, which the package index has not, and does not ask for
    # PyYAML, which it imports.
    commands = [[*pip, "--no-deps", f"torch_npu=={environment.torch_npu}"],
                [*pip, f"torch=={environment.torch}", "pyyaml", *environment.requirements()]]  # fmt: skip
    if environment.torch_npu == NEWEST:
        commands = [[*pip, "torch_npu", *environment.requirements()]]
    if alike:
        commands = commands[:1]  # gigabytes less to download
    else:
        make_environment(environment.python, directory)
    for command in commands:
        code, output = run(command, INSTALL_TIMEOUT_S)
        if code:
            raise NotInstalled(why_not(output, environment.python))
    record.write_text(json.dumps([environment.contents(), environment.torch_npu]), encoding="utf-8")
    return python


def make_environment(version: str, directory: Path) -> None:
    base = find_python(version)
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(directory.parent).free < DISK_BYTES:
        raise NotInstalled(f"less than {DISK_BYTES >> 30} GB are free in {directory.parent}")
    code, output = run([base, "-m", "venv", directory], INSTALL_TIMEOUT_S)
    if code:
        raise NotInstalled(last_line(output))


def find_python(version: str) -> Path:
    """An interpreter of that version that can make virtual environments: on PATH, or one of pyenv's."""
    probe = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = [Path(sys.executable), *sorted(pyenv.glob(f"{version}.*/bin/python{version}"))]
    if on_path := shutil.which(f"python{version}"):
        found.insert(1, Path(on_path))
    for python in found:
        code, output = run([python, "-c", probe], RUN_TIMEOUT_S)
        if code == 0 and output.strip() == version:
            return python
    raise NotInstalled(f"no Python {version} on this machine")


def why_not(output: str, python: str) -> str:
    """One line out of pip's."""
    # As pip writes it when there are wheels, but none for this Python and machine.
    pattern = r"Could not find a version that satisfies the requirement ([\w.-]+)==(\S+) .*\(from versions: (?!none)"
    if match := re.search(pattern, output):
        return f"no wheel of {match[1]} {match[2]} for Python {python} on {platform.machine()}"
    errors = [line for line in output.splitlines() if line.startswith("ERROR: ")]
    return last_line("\n".join(errors) or output)


def last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no output"]
    return re.sub(r"(https?|file)://\S+", "(address)", lines[-1]).removeprefix("ERROR: ")[:200]


# The case -------------------------------------------------------------------------------------------------------------


def run_case(row: Row, python: Path, directory: Path) -> None:
    # The simulator is built first, so that the run alone is timed.
    code, output = run(["bash", "-c", f"source {shlex.quote(str(TESTS / 'setup.sh'))} && setup_runtime"], RUN_TIMEOUT_S,
                       {"PYTHON": str(python)})  # fmt: skip
    if code:
        raise Failed(f"setup: {last_line(output)}")
    result = good_run(row, python, directory / "standin")
    row.seconds = f"{result['total_s']:.1f}"
    row.versions = result["versions"]
    if result["action"] != [0] or abs(result["value"][0][0] - VALUE) > 1e-3:
        raise Failed(f"action {result['action']}, value {result['value']}")

    checkpoint = directory / "gaussian.zip"
    make = "import sys; from harness import checkpoints as c; c.make(c.KINDS['box'], c.Path(sys.argv[1]))"
    environment = {"PYTHONPATH": str(TESTS), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    code, output = run([python, "-c", make, checkpoint], RUN_TIMEOUT_S, environment)
    if code:
        raise Failed(f"SB3 cannot make a Gaussian checkpoint: {last_line(output)}")
    digest = hashlib.sha256(checkpoint.read_bytes()).hexdigest()
    result = good_run(row, python, directory / "gaussian", "--checkpoint", checkpoint, "--sha256", digest,
                      "--observation", "[0.5, -1.0, 2.0, -0.25]")  # fmt: skip
    if not result["mean"] or not result["std"]:
        raise Failed("a Gaussian checkpoint without mean and std")
    if row.environment.torch_npu in STARTS_COMPILER:
        see_compiler(row, python, directory)


def good_run(row: Row, python: Path, log_dir: Path, *args: object) -> dict[str, Any]:
    """A run of inference.py that is good by its exit code, by its evidence, by the checker, and seen from outside."""
    with compiler.Watch(log_dir, log_dir.parent) as watch:
        code, output = simulate(python, "--log-dir", log_dir, "--hold-seconds", 1, *args, cwd=log_dir.parent)
    if code:
        raise Failed(f"exit code {code}: {last_line(output)}")
    if watch.found or watch.looks < LOOKS:
        for child in sorted(watch.children):
            say(f"{row.name}: a child process: {child}")
        raise Failed(f"seen in {watch.looks} looks: {', '.join(sorted(watch.found)) or 'too few'}")
    row.looks += watch.looks
    result = support.read_result(log_dir)
    gates = {
        "simulated": result["simulated"],
        "all_params_on_npu": result["all_params_on_npu"],
        "all_outputs_on_npu": result["all_outputs_on_npu"],
        "pid_found": result["npu_smi"]["pid_found"],
        "within_tolerance": result["reference"]["within_tolerance"],
    }
    if bad := [name for name, good in gates.items() if good is not True]:
        raise Failed(f"not true: {', '.join(bad)}")
    named = args[1] if args else support.PROJECT / support.STANDIN
    code, output = run([python, TESTS / "check_evidence.py", log_dir, "--checkpoint", named], RUN_TIMEOUT_S)
    if code or output.splitlines()[-1] != "VALID":
        failed = [line for line in output.splitlines() if line.startswith("FAIL")]
        raise Failed(f"check_evidence.py: {(failed or [last_line(output)])[0]}")
    return result


def see_compiler(row: Row, python: Path, directory: Path) -> None:
    """A copy of inference.py that sets what it must leave alone has the traces that no run has."""
    before = '    return {**settings, "allow_hf32_conv"'
    source = (support.PROJECT / "inference.py").read_text(encoding="utf-8")
    if source.count(before) != 1:
        raise Failed(f"inference.py has no line {before.strip()!r} to put {SETTING!r} before")
    copy, log_dir = directory / "copy/inference.py", directory / "copy/logs"
    copy.parent.mkdir()
    copy.write_text(source.replace(before, f"    {SETTING}\n{before}"), encoding="utf-8")
    standin = support.PROJECT / support.STANDIN
    command = [python, copy, "--checkpoint", standin, "--sha256", support.STANDIN_SHA256, "--log-dir", log_dir,
               "--hold-seconds", 1]  # fmt: skip
    shell = f"source {shlex.quote(str(TESTS / 'setup.sh'))} && setup_runtime && use_simulator && exec \"$@\""
    with compiler.Watch(log_dir, copy.parent) as watch:
        code, output = run(["bash", "-c", shell, "bash", *command], RUN_TIMEOUT_S, {"PYTHON": str(python)}, copy.parent)
    say(f"{row.name}: with {SETTING}: exit code {code}, seen: {', '.join(sorted(watch.found)) or 'nothing'}")
    if missed := TRACES - watch.found:
        raise Failed(f"with {SETTING} not seen: {', '.join(sorted(missed))} (exit code {code}: {last_line(output)})")


def simulate(python: Path, *args: object, cwd: Path) -> tuple[int, str]:
    return run([TESTS / "simulate.sh", *args], RUN_TIMEOUT_S, {"PYTHON": str(python)}, cwd)


def run(
    command: list[Any], timeout: float, variables: Mapping[str, str] | None = None, cwd: Path = support.PROJECT
) -> tuple[int, str]:
    """Exit code and output. The command gets a session of its own, which ends with it or with this process."""
    process = subprocess.Popen(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=support.clean_environment() | dict(variables or {}),
        cwd=cwd,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end(process)
        return -signal.SIGKILL, f"did not end within {timeout:.0f} s"
    except BaseException:
        end(process)
        raise
    return process.returncode, output


def end(process: subprocess.Popen[str]) -> None:
    """End the session: politely, since inference.py has processes to end itself, then by force."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=10)


if __name__ == "__main__":
    sys.exit(main())
