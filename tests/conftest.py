from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import faults, support


@pytest.fixture(scope="session")
def simulator() -> Path:
    """The build of tests/cannsim, with bin/npu-smi, that this session runs on."""
    directory = os.environ.get("TEST_SIMULATOR")
    if not directory or not Path(directory, "libascendcl.so").exists():
        pytest.exit("the tests need the simulated NPU: run tests/run.sh [ARGUMENTS OF pytest]", returncode=4)
    return Path(directory)


@pytest.fixture(scope="session")
def cli(simulator: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[support.Cli]:
    """Runs inference.py; see support.Cli."""
    runner = support.Cli(simulator, tmp_path_factory.mktemp("project", numbered=False))
    yield runner
    runner.close()


@pytest.fixture(scope="session")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a run whose npu-smi is quick; see faults.quick_npu_smi."""
    return faults.quick_npu_smi(tmp_path_factory.mktemp("bin"))


@pytest.fixture(scope="session", autouse=True)
def as_at_a_terminal() -> None:
    """No core dumps, since some tests make a process die on purpose; and signals that a shell's `&` ignores work."""
    for number in (signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
