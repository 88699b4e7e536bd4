"""A checkpoint is untrusted input: none of these files runs code, exhausts the machine, or passes for a good run.

Hundreds more meet the reader alone in test_reader.py; here a few of each kind go through the command line, and both
processes report what was done to them. Each file is handed over with its own SHA256, so that the digest protects
nothing. It is refused with exit 3 and one line that names the fault, or it is loaded and its outputs equal those that
hostile.py computes from its weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import attacks, evidence, faults, hostile, support

OBSERVATIONS = np.random.default_rng(3).uniform(-1, 1, (3, 4)).astype(np.float32)
MORE_KIB = 512 << 10  # over a normal run
MORE_SECONDS = 2
LONGEST_MESSAGE = 1000
OUR_MODULES = {"encodings.unicode_escape"}  # with which the program makes text printable


@dataclasses.dataclass
class Run:
    file: bytes
    code: int
    stderr: str
    log: str
    result: dict[str, Any]
    reports: list[dict[str, Any]]  # of the worker and of the supervisor; see watched.py


@pytest.fixture(scope="module")
def run(cli, tmp_path_factory) -> Callable[..., Run]:
    """Runs a checkpoint in processes of its own that report what happened to them."""
    directory = tmp_path_factory.mktemp("hostile")
    quick = faults.quick_npu_smi(directory / "bin")

    def run(content: bytes, observe: bool = True) -> Run:
        path, report, logs = directory / "hostile.zip", directory / "report.json", directory / "logs"
        reports = [report, report.with_name("report.json.supervisor")]
        path.write_bytes(content)
        for each in reports:
            each.unlink(missing_ok=True)
        arguments = ["--checkpoint", path, "--sha256", hashlib.sha256(content).hexdigest(), "--log-dir", logs]
        if observe:
            arguments += ["--observation", json.dumps(OBSERVATIONS.tolist())]
        done = cli(
            *arguments,
            "--hold-seconds",
            0,
            timeout=60,
            rlimits={"RLIMIT_DATA": 6 << 30},  # should a bomb go off, the machine survives it
            script=support.PROJECT / "tests/harness/watched.py",
            env={**quick, "WATCHED_REPORT": str(report)},
        )
        path.unlink()
        quoted = ["the log claims success"] if b"exit_code=0" in content else []  # in the name that is refused
        assert evidence.problems(done, logs) in ([], quoted), done.stderr
        assert report.exists(), f"the worker ended with {done.code} before it could report\n{done.stderr}"
        log = (logs / evidence.LOG).read_text(encoding="utf-8")
        return Run(content, done.code, done.stderr, log, support.read_result(logs),
                   [json.loads(each.read_text()) for each in reports if each.exists()])  # fmt: skip

    return run


@pytest.fixture(scope="module")
def honest(run) -> Run:
    """A run of the stand-in itself: what is normal."""
    done = run(hostile.standin())
    assert_right(done)
    return done


def assert_right(done: Run) -> None:
    """It ran, and its outputs are those of the weights in the file."""
    assert (done.code, done.result["exit_code"], done.result["error"]) == (0, 0, None)
    expected = hostile.forward(done.file, OBSERVATIONS)
    assert done.result["action"] == expected.pop("action").tolist()
    for name, values in expected.items():
        np.testing.assert_allclose(np.asarray(done.result[name]), values, rtol=1e-4, atol=1e-4, err_msg=name)


def assert_refused(done: Run) -> None:
    """The message names the fault: in one line without control characters, of bearable length."""
    assert done.code == done.result["exit_code"] == 3, done.stderr[-2000:]
    error = done.result["error"]
    assert (error["stage"], error["type"]) == ("verify", "CheckpointRejected")
    for text in (error["message"], *(line for line in done.stderr.split("\n") if line.startswith("inference.py:"))):
        assert text.isprintable()
        assert len(text) < LONGEST_MESSAGE
    assert all(line.isprintable() for line in done.log.split("\n"))
    assert done.result["action"] is None


def assert_harmless(done: Run, honest: Run) -> None:
    """It ran nothing, imported nothing, changed nothing in either process, and cost no more than it may."""
    assert "Traceback" not in done.stderr
    for report, normal in zip(done.reports, honest.reports, strict=True):
        assert set(report["events"]) <= set(normal["events"])  # of the archive that the program writes
        assert set(report["modules"]) - set(normal["modules"]) <= OUR_MODULES
        assert report["environment"].items() <= normal["environment"].items()
        for name in ("numpy", "torch"):  # Python seeds its own anew in a process that is forked
            assert report["generators"][name] == report["generators_before"][name]
        assert report["peak_kib"] < normal["peak_kib"] + MORE_KIB
        assert report["cpu_s"] < normal["cpu_s"] + MORE_SECONDS


@pytest.fixture
def attack(run, honest, cli):
    def attack(content: bytes) -> Run:
        done = run(content)
        assert_harmless(done, honest)
        assert not list(cli.project.glob(f"{attacks.MARKER}*"))
        return done

    return attack


REFUSED = {
    "ARCHIVES": ("an archive of nothing", "a wrong CRC"),
    "TEXTS": ("objects 100,000 deep",),
    "SPACES": ("observation of dtype object",),
    "POLICIES": ("a megabyte of escape sequences", "a forged line of the log"),
    "PICKLES": ("a call of os.system in policy.pth", "a call by STACK_GLOBAL in a state dict"),
    "WEIGHTS": ("a tensor of 2^62 elements of stride 0", "NaN among them", "others for torch than for zipfile"),
    "BOMBS": ("policy.pth of 1 GiB", "a record of 1 GiB", "60 million empty lists in a pickle"),
}


@pytest.mark.parametrize(("group", "name"), [(group, name) for group, names in REFUSED.items() for name in names])
def test_a_hostile_file_is_refused_by_a_run(attack, group, name):
    assert_refused(attack(getattr(attacks, group)[name]()))


@pytest.mark.parametrize("name", [
    "pickles with a marker in every value", "schedules of no Python", "attributes of a model", "weights of no device",
    "a weight stored by columns", "binary texts",
])  # fmt: skip
def test_an_odd_file_gives_the_outputs_of_its_weights(attack, name):
    assert_right(attack(attacks.ODD[name]()))


def renamed_and_deflated() -> bytes:
    """As torch before 1.8 named its records, by addresses of memory, and with members that somebody has packed."""
    weights = hostile.standin_weights()
    entries, records = {}, {}
    for number, (name, array) in enumerate(weights.items()):
        key = str(94_593_068_362_000 + 1_040 * number)
        entries[name] = hostile.tensor(hostile.storage(key, array.size), array.shape)
        records[f"data/{key}"] = array.tobytes()
    old = hostile.members(hostile.with_pth("policy.pth", hostile.ordered(entries), records))
    return hostile.archive([hostile.Member(name, content, method=8) for name, content in old.items()])


def test_an_old_file_that_was_packed_again_gives_the_outputs_of_its_weights(attack):
    done = attack(renamed_and_deflated())
    assert_right(done)
    assert done.result["num_params"] == 9155


def test_what_was_trained_with_vec_normalize_is_said_so(attack):
    done = attack(hostile.with_data(_last_original_obs={":type:": "<class 'numpy.ndarray'>", ":serialized:": "QUJD"}))
    assert_right(done)
    [note] = done.result["notes"]
    assert re.search("VecNormalize.*normalised", note)
    assert f"[note]    {note}\n" in done.log


@pytest.mark.parametrize("make", attacks.OVERFLOWS.values(), ids=attacks.OVERFLOWS)
def test_finite_weights_whose_outputs_are_not_fail_in_the_forward(run, honest, make):
    done = run(make())
    assert_harmless(done, honest)
    assert (done.code, done.result["exit_code"], done.result["error"]["stage"]) == (6, 6, "forward")
    assert "infinite" in done.result["error"]["message"]


def test_no_pickle_in_data_runs_in_a_process_that_starts_cold(cli, tmp_path):
    """The others are forked from one that has imported everything already."""
    content = attacks.with_marked_data()
    path = tmp_path / "marked.zip"
    path.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    done = cli.cold("--checkpoint", path, "--sha256", digest, "--log-dir", tmp_path / "logs", "--hold-seconds", 0)
    assert done.code == 0, done.stderr
    assert not list(cli.project.glob(f"{attacks.MARKER}*"))


def test_the_watcher_sees_what_a_pickle_could_do(cli, tmp_path):
    """Else `assert_harmless` would assert nothing."""
    (tmp_path / "inference.py").write_text("""
import os, pickle, random, sys
def main():
    pickle.loads(b"cthis_module_of_the_test\\nname\\n.")
    import numpy, torch
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    os.environ["CHANGED"] = "1"
    os.system("true")
    bytearray(1 << 29)
    return 0
""")
    (tmp_path / "this_module_of_the_test.py").write_text("name = 1")
    report = tmp_path / "report.json"
    script = support.PROJECT / "tests/harness/watched.py"
    done = cli(cwd=tmp_path, script=script, env={"WATCHED_REPORT": str(report)})
    assert done.code == 0, done.stderr
    [path] = tmp_path.glob("report.json*")
    seen = json.loads(path.read_text())
    assert [event.split()[0] for event in seen["events"]] == ["pickle.find_class", "os.system"]
    assert "this_module_of_the_test" in seen["modules"]
    assert seen["environment"] == {"CHANGED": "1"}
    assert all(seen["generators"][name] != state for name, state in seen["generators_before"].items())
    assert seen["peak_kib"] > 1 << 19


# What is not a file of reasonable size


@contextlib.contextmanager
def bound_socket(path: Path) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as bound, contextlib.chdir(path.parent):  # a socket's path must be short
        bound.bind(path.name)
        yield


KINDS_OF_FILE = ("empty", "directory", "fifo", "device", "loop", "dangling", "missing", "huge", "socket")


@pytest.mark.parametrize("kind", KINDS_OF_FILE)
def test_what_is_not_a_checkpoint_file_is_refused_at_once(cli, tmp_path, kind):
    path = tmp_path / kind
    with contextlib.ExitStack() as stack:
        match kind:
            case "empty":
                path.touch()
            case "directory":
                path.mkdir()
            case "fifo":
                os.mkfifo(path)
            case "device":
                path = Path("/dev/zero")
            case "loop":
                path.symlink_to(path)
            case "dangling":
                path.symlink_to(tmp_path / "nowhere")
            case "huge":
                with open(path, "wb") as file:
                    file.truncate(1 << 40)
            case "socket":
                stack.enter_context(bound_socket(path))
        digest = hashlib.sha256(b"").hexdigest()
        done = cli.cold("--checkpoint", path, "--sha256", digest, "--log-dir", tmp_path / "logs", timeout=30)
    assert done.code == support.read_result(tmp_path / "logs")["exit_code"] == 3
    assert path.name in done.stderr or kind == "empty"
    assert done.stderr.count("\n") == 1
