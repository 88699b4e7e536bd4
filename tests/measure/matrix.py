"""Runs the end-to-end case on the simulated NPU in one environment after the other, and prints a table of them.

An environment is made in a temporary directory (TMPDIR says where; up to 8 GB) and removed before the next one, also
when this is interrupted. pip's own variables and configuration say where packages come from. The case, through
simulate.sh: the stand-in checkpoint and a Gaussian one made there and then, each compared with the CPU and checked by
--check.

Exit code: 0 when all that could be installed is green, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import support

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
    "python-3.13": Environment("3.13", "2.13.0"),
    "python-3.13-newest": Environment("3.13", NEWEST, UNPINNED),
    "python-3.14-newest": Environment("3.14", NEWEST, UNPINNED),
}
COLUMNS = ("environment", "Python", "torch", "torch_npu", "SB3", "gymnasium", "numpy", "outcome", "seconds")

CUDA_NOTE = """\
`+cu`: a CUDA build, since the package index has no other torch for x86-64. The simulator makes room for it; without
that, torch_npu 2.13.0 and 2.14.0 abort beside one, so on a real NPU install the CPU build (`+cpu`) from PyTorch's own
index."""
NOTE_2_9 = """\
The x86-64 wheel of torch_npu 2.9.0 asks for torch 2.9.0+cpu, and does not ask for PyYAML, which it imports. Beside any
other torch 2.9.0: `pip install pyyaml` and `pip install --no-deps torch_npu==2.9.0`."""


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
    failed: bool = False

    def cells(self) -> list[str]:
        npu = self.environment.torch_npu or "newest"
        asked = {"python": self.environment.python, "torch_npu": npu, "torch": re.sub(r"\.post\d+$", "", npu)}
        for requirement in self.environment.requirements():
            name, version = re.findall(r"^([\w-]+)(.*)$", requirement)[0]
            asked[name.replace("-", "_")] = version.removeprefix("==") or "newest"
        versions = asked | self.versions
        names = ("python", "torch", "torch_npu", "stable_baselines3", "gymnasium", "numpy")
        return [f"`{self.name}`", *(versions[name] for name in names), self.outcome.replace("|", "\\|"), self.seconds]


def main() -> int:
    parser = argparse.ArgumentParser("tests/matrix.sh", description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the environments and end")
    parser.add_argument("--only", metavar="NAME", choices=ENVIRONMENTS, action="append", help="just this; repeatable")
    args = parser.parse_args()
    if args.list:
        for name, environment in ENVIRONMENTS.items():
            print(f"{name:<23}{environment}")
        return 0
    for number in SIGNALS:
        signal.signal(number, interrupted)

    rows: list[Row] = []
    try:
        for name in args.only or ENVIRONMENTS:
            row = Row(name, ENVIRONMENTS[name])
            rows.append(row)
            say(f"{name}: {row.environment}")
            measure(row)
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


def measure(row: Row) -> None:
    try:
        with tempfile.TemporaryDirectory(prefix="matrix-", ignore_cleanup_errors=True) as name:
            directory = Path(name)
            python = install(row.environment, directory)
            run_case(row, python, directory)
        row.outcome = "green"
    except NotInstalled as reason:
        row.outcome = f"not installed: {reason}"
    except Failed as reason:
        row.outcome, row.failed = f"FAILED: {reason}", True


# An environment -------------------------------------------------------------------------------------------------------


def install(environment: Environment, directory: Path) -> Path:
    """A virtual environment with the packages. Returns its interpreter."""
    base = find_python(environment.python)
    if shutil.disk_usage(directory).free < DISK_BYTES:
        raise NotInstalled(f"less than {DISK_BYTES >> 30} GB are free in {tempfile.gettempdir()}")
    python = directory / "venv/bin/python3"
    code, output = run([base, "-m", "venv", directory / "venv"], INSTALL_TIMEOUT_S)
    if code:
        raise NotInstalled(last_line(output))
    pip = [python, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
    pip += ["--only-binary=:all:"]  # else a release without a wheel is compiled, or fails to be, for long
    requirements = environment.requirements()
    if environment.torch_npu == NEWEST:
        commands = [[*pip, "torch_npu", *requirements]]
    else:
        # The wheel of 2.9.0 for x86-64 asks for torch 2.9.0+cpu, which the package index has not, and does not ask for
        # PyYAML, which it imports.
        torch = re.sub(r"\.post\d+$", "", environment.torch_npu)
        commands = [[*pip, "--no-deps", f"torch_npu=={environment.torch_npu}"],
                    [*pip, f"torch=={torch}", "pyyaml", *requirements]]  # fmt: skip
    for command in commands:
        code, output = run(command, INSTALL_TIMEOUT_S)
        if code:
            raise NotInstalled(why_not(output, environment.python))
    return python


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
    simulate(python, "--help")  # builds the simulator, so that the run alone is timed
    result = good_run(python, directory / "standin")
    row.seconds = f"{result['total_s']:.1f}"
    row.versions = result["versions"]
    if result["action"] != [0] or abs(result["value"][0][0] - VALUE) > 1e-3:
        raise Failed(f"action {result['action']}, value {result['value']}")

    checkpoint = directory / "gaussian.zip"
    make = "import sys, pathlib, checkpoints as c; c.make(c.KINDS['box'], pathlib.Path(sys.argv[1]))"
    environment = {"PYTHONPATH": str(TESTS), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    code, output = run([python, "-c", make, checkpoint], RUN_TIMEOUT_S, environment)
    if code:
        raise Failed(f"SB3 cannot make a Gaussian checkpoint: {last_line(output)}")
    digest = hashlib.sha256(checkpoint.read_bytes()).hexdigest()
    result = good_run(python, directory / "gaussian", "--checkpoint", checkpoint, "--sha256", digest,
                      "--observation", "[0.5, -1.0, 2.0, -0.25]")  # fmt: skip
    if not result["mean"] or not result["std"]:
        raise Failed("a Gaussian checkpoint without mean and std")


def good_run(python: Path, log_dir: Path, *args: object) -> dict[str, Any]:
    """A run of inference.py that is good by its exit code, by its evidence and by --check."""
    code, output = simulate(python, "--log-dir", log_dir, "--hold-seconds", 1, "--compare-cpu", *args)
    if code:
        raise Failed(f"exit code {code}: {last_line(output)}")
    result = support.read_result(log_dir)
    gates = {
        "simulated": result["simulated"],
        "all_params_on_npu": result["all_params_on_npu"],
        "all_outputs_on_npu": result["all_outputs_on_npu"],
        "pid_found": result["npu_smi"]["pid_found"],
        "within_tolerance": result["cpu_reference"]["within_tolerance"],
    }
    if bad := [name for name, good in gates.items() if good is not True]:
        raise Failed(f"not true: {', '.join(bad)}")
    code, output = simulate(python, "--check", log_dir)
    if code or output.splitlines()[-1] != "VALID":
        raise Failed(f"--check: {last_line(output)}")
    return result


def simulate(python: Path, *args: object) -> tuple[int, str]:
    return run([TESTS / "simulate.sh", *args], RUN_TIMEOUT_S, {"PYTHON": str(python)})


def run(command: list[Any], timeout: float, variables: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Exit code and output. The command gets a session of its own, which ends with it or with this process."""
    process = subprocess.Popen(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=support.clean_environment() | dict(variables or {}),
        cwd=support.PROJECT,
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
