from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import support


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


@pytest.fixture(scope="session", autouse=True)
def no_core_dumps() -> None:
    """Some tests make a process die on purpose."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
