"""A checkpoint is untrusted input: none of these files runs code, exhausts the machine, or passes for a good run.

Each is handed over with its own SHA256, so that the digest protects nothing. A file is refused with exit 3 or 5 and a
message that names the fault, or it is loaded and its outputs equal those that hostile.py computes from its weights.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import socket
import sys
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from harness import attacks, hostile, support

OBSERVATIONS = np.random.default_rng(3).uniform(-1, 1, (3, 4)).astype(np.float32)
MORE_KIB = 1 << 20  # over a normal run
MORE_SECONDS = 10
LONGEST_MESSAGE = 2000
OUR_MODULES = {"encodings.unicode_escape"}  # with which the program makes text printable


@dataclasses.dataclass
class Run:
    file: bytes
    code: int
    stderr: str
    log: str
    result: dict[str, Any]
    report: dict[str, Any]  # see watched.py


@pytest.fixture(scope="module")
def run(cli, tmp_path_factory):
    """Runs a checkpoint in a process of its own that reports what happened to it."""
    directory = tmp_path_factory.mktemp("hostile")

    def run(content: bytes, observe: bool) -> Run:
        path, report, logs = directory / "hostile.zip", directory / "report.json", directory / "logs"
        path.write_bytes(content)
        report.unlink(missing_ok=True)
        arguments = ["--checkpoint", path, "--sha256", hashlib.sha256(content).hexdigest(), "--log-dir", logs]
        arguments += ["--hold-seconds", 0]
        if observe:
            arguments += ["--observation", json.dumps(OBSERVATIONS.tolist())]
        done = cli(
            *arguments,
            timeout=60,
            rlimits={"RLIMIT_DATA": 6 << 30},  # should a bomb go off, the machine survives it
            script=support.PROJECT / "tests/harness/watched.py",
            env={"WATCHED_REPORT": str(report)},
        )
        path.unlink()
        assert report.exists(), f"the process ended with {done.code} before it could report\n{done.stderr}"
        log = (logs / "npu_inference.log").read_text(encoding="utf-8")
        return Run(content, done.code, done.stderr, log, support.read_result(logs), json.loads(report.read_text()))

    return run


@pytest.fixture(scope="module")
def honest(run) -> Run:
    """A run of the stand-in itself: what is normal."""
    done = run(hostile.standin(), observe=True)
    assert_right(done)
    return done


def assert_right(done: Run) -> None:
    """It ran, and its outputs are those of the weights in the file."""
    assert (done.code, done.result["exit_code"], done.result["error"]) == (0, 0, None)
    expected = hostile.forward(done.file, OBSERVATIONS)
    assert done.result["action"] == expected.pop("action").tolist()
    for name, values in expected.items():
        np.testing.assert_allclose(np.asarray(done.result[name]), values, rtol=1e-4, atol=1e-4, err_msg=name)


def assert_refused(done: Run, refusal: str) -> None:
    """It was refused, and the message names the fault: in one line without control characters, of bearable length."""
    assert done.code in (3, 5), done.stderr[-2000:]
    error = done.result["error"]
    assert done.result["exit_code"] == done.code
    assert error["stage"] in ("verify", "load")
    assert re.search(refusal, error["message"]), error["message"]
    for text in (error["message"], *(line for line in done.stderr.split("\n") if line.startswith("inference.py:"))):
        assert text.isprintable()
        assert len(text) < LONGEST_MESSAGE
    assert all(line.isprintable() for line in done.log.split("\n"))
    assert done.result["action"] is None


def assert_harmless(done: Run, honest: Run) -> None:
    """It ran nothing, imported nothing, changed nothing in its process, and cost no more than it may."""
    assert "Traceback" not in done.stderr
    report = done.report
    assert report["events"] == []
    assert set(report["modules"]) - set(honest.report["modules"]) <= OUR_MODULES
    assert report["environment"].items() <= honest.report["environment"].items()
    assert report["generators"] == report["generators_before"]
    assert report["peak_kib"] < honest.report["peak_kib"] + MORE_KIB
    assert report["cpu_s"] < honest.report["cpu_s"] + MORE_SECONDS


@pytest.fixture
def attack(run, honest, cli):
    """Runs a checkpoint: with a refusal it must be refused and name that, without it may give the right outputs too."""

    def attack(content: bytes, refusal: str | None = None) -> Run:
        # Where a refusal is certain, no observation: else one that does not fit would be what is refused.
        done = run(content, observe=refusal is None)
        assert_harmless(done, honest)
        assert not list(cli.project.glob(f"{attacks.MARKER}*"))
        if refusal is None and done.code == 0:
            assert_right(done)
        else:
            assert_refused(done, refusal or ".")
        return done

    return attack


def kinds_of(group: dict[str, attacks.Attack]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", group.values(), ids=map(ascii, group))


@kinds_of(attacks.ARCHIVES)
def test_an_archive_that_sb3_does_not_write_is_refused(attack, kind):
    attack(kind.make(), kind.refusal)


@kinds_of(attacks.TEXTS)
def test_data_that_is_no_json_object_is_refused(attack, kind):
    attack(kind.make(), kind.refusal)


@kinds_of(attacks.SPACES | attacks.POLICIES)
def test_a_value_that_describes_no_such_policy_is_refused_by_name(attack, kind):
    attack(kind.make(), kind.refusal)


@kinds_of(attacks.PICKLES)
def test_no_pickle_in_a_pth_runs(attack, kind):
    attack(kind.make(), kind.refusal)


@kinds_of(attacks.WEIGHTS)
def test_weights_that_are_not_the_policys_are_refused(attack, kind):
    attack(kind.make(), kind.refusal)


@kinds_of(attacks.OPTIMIZERS)
def test_a_structure_that_is_a_trap_to_walk_is_refused(attack, kind):
    attack(kind.make(), kind.refusal)


@kinds_of(attacks.BOMBS)
def test_a_file_that_grows_is_refused_before_it_does(attack, kind):
    attack(kind.make(), kind.refusal)


@pytest.mark.parametrize("make", attacks.ODD.values(), ids=attacks.ODD)
def test_an_odd_file_gives_the_outputs_of_its_weights_or_none(attack, make):
    attack(make())


def test_no_pickle_in_data_runs_in_a_process_that_starts_cold(cli, tmp_path):
    """The others are forked from one that has imported everything already."""
    content = attacks.with_marked_data()
    path = tmp_path / "marked.zip"
    path.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    done = cli.cold("--checkpoint", path, "--sha256", digest, "--log-dir", tmp_path / "logs", "--hold-seconds", 0)
    assert done.code == 0, done.stderr
    assert not list(cli.project.glob(f"{attacks.MARKER}*"))


@pytest.mark.parametrize("make", attacks.OVERFLOWS.values(), ids=attacks.OVERFLOWS)
def test_finite_weights_whose_outputs_are_not_fail_in_the_forward(run, honest, make):
    done = run(make(), observe=True)
    assert_harmless(done, honest)
    assert (done.code, done.result["exit_code"], done.result["error"]["stage"]) == (6, 6, "forward")
    assert "infinite" in done.result["error"]["message"]


@pytest.mark.parametrize(
    "place",
    [
        ("observation_space", ":type:"),
        ("observation_space", "dtype"),
        ("action_space", "n"),
        ("policy_class", "__init__"),
        ("policy_kwargs", "net_arch"),
        ("policy_kwargs", "x"),
    ],
)
def test_nesting_that_is_just_too_deep_for_something_is_refused(program, verified, place):
    """What json.loads still takes may be too much for str(), a few calls further down."""
    refused = 0
    key, name = place
    text = hostile.members(hostile.with_entry(key, **{name: "@"}))["data"]
    for depth in range(900, 1000):
        nested = text.replace(b'"@"', b"[" * depth + b"]" * depth)
        refused += isinstance(verified(hostile.checkpoint({"data": nested})), program.CheckpointRejected)
    assert refused == 100


def test_the_watcher_sees_what_a_pickle_could_do(cli, tmp_path):
    """Else `assert_harmless` would assert nothing."""
    (tmp_path / "inference.py").write_text("""
import os, pickle, random
def main():
    pickle.loads(b"cthis_module_of_the_test\\nname\\n.")
    import numpy, torch
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    os.environ["CHANGED"] = "1"
    os.system("true")
    bytearray(1 << 29)
    os._exit(0)
""")
    (tmp_path / "this_module_of_the_test.py").write_text("name = 1")
    report = tmp_path / "report.json"
    script = support.PROJECT / "tests/harness/watched.py"
    done = cli(cwd=tmp_path, script=script, env={"WATCHED_REPORT": str(report)})
    assert done.code == 0, done.stderr
    seen = json.loads(report.read_text())
    assert [event.split()[0] for event in seen["events"]] == ["pickle.find_class", "os.system"]
    assert "this_module_of_the_test" in seen["modules"]
    assert seen["environment"] == {"CHANGED": "1"}
    assert all(seen["generators"][name] != state for name, state in seen["generators_before"].items())
    assert seen["peak_kib"] > 1 << 19


def test_the_honest_file_is_not_refused(honest):
    """Else nothing here would mean anything."""
    assert honest.code == 0
    assert honest.report["events"] == []


# Damage at every place: stage verify alone, in this process


@pytest.fixture(scope="module")
def program() -> Iterator[types.ModuleType]:
    spec = importlib.util.spec_from_file_location("inference_under_test", support.PROJECT / "inference.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def verified(program, tmp_path):
    """What stage verify makes of these bytes: the checkpoint, or its refusal."""
    path = tmp_path / "damaged.zip"

    def verified(content: bytes) -> Any:
        path.write_bytes(content)
        args = argparse.Namespace(checkpoint=str(path), sha256=hashlib.sha256(content).hexdigest())
        try:
            return program.verify(args, mock.MagicMock(result={}))
        except program.CheckpointRejected as refusal:
            return refusal

    return verified


def seams(content: bytes) -> list[int]:
    """Where the parts of an archive, and of the archives in it, begin and end, and a byte to each side."""
    signatures = (b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\7\10")
    starts = [match.start() for match in re.finditer(b"|".join(map(re.escape, signatures)), content)]
    with zipfile.ZipFile(support.PROJECT / support.STANDIN) as archive:
        starts += [info.header_offset + 30 + len(info.filename) for info in archive.infolist()]
    return sorted({place + by for place in [0, *starts, len(content)] for by in (-1, 0, 1)} & set(range(len(content))))


def test_a_file_cut_anywhere_is_refused(program, verified):
    whole = hostile.standin()
    assert not isinstance(verified(whole), BaseException)
    cuts = sorted({*seams(whole), *range(0, len(whole), 1009), *range(len(whole) - 25, len(whole))})
    assert len(cuts) > 150
    assert [cut for cut in cuts if not isinstance(verified(whole[:cut]), program.CheckpointRejected)] == []


@pytest.mark.parametrize("cut", [0, 22, 15_000, 60_000, 139_000])
def test_a_file_cut_anywhere_is_refused_by_a_run(cli, tmp_path, cut):
    path = tmp_path / "cut.zip"
    path.write_bytes(hostile.standin()[:cut])
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    done = cli.cold("--checkpoint", path, "--sha256", digest, "--log-dir", tmp_path / "logs")
    assert done.code == support.read_result(tmp_path / "logs")["exit_code"] == 3
    assert done.stderr.count("\n") == 1
    assert "zip" in done.stderr


def test_a_flipped_bit_is_refused_or_of_no_consequence(program, verified):
    """In every header, and at places in between. The checksums of the archive are left as they are."""
    whole = hostile.standin()
    honest = verified(whole)
    places = sorted({*seams(whole), *range(0, len(whole), 1511), *range(len(whole) - 400, len(whole))})
    survivors = []
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        outcome = verified(bytes(damaged))
        if not isinstance(outcome, program.CheckpointRejected) and differs(outcome, honest):
            survivors.append(place)
    assert survivors == []


def differs(checkpoint: Any, other: Any) -> bool:
    """Two verified checkpoints, all but the bytes that they were read from."""
    mine, others = (dataclasses.replace(each, raw=b"") for each in (checkpoint, other))
    return bool(mine != others)


def flipped(member: str, place: int) -> bytes:
    """The stand-in with a bit of a member flipped, and the checksum corrected."""
    content = bytearray(hostile.members()[member])
    content[place % len(content)] ^= 1 << place % 8
    return hostile.checkpoint({member: bytes(content)})


FLIPS = [(member, int(place)) for member, count in (("policy.pth", 30), ("data", 15), ("policy.optimizer.pth", 5))
         for place in np.random.default_rng(7).integers(0, 1 << 30, count)]  # fmt: skip


@pytest.mark.parametrize(("member", "place"), FLIPS)
def test_a_flipped_bit_behind_a_corrected_checksum_gives_what_the_file_says_or_nothing(attack, member, place):
    attack(flipped(member, place))


# What is no file of reasonable size


@contextlib.contextmanager
def bound_socket(path: Path) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as bound, contextlib.chdir(path.parent):  # a socket's path must be short
        bound.bind(path.name)
        yield


@pytest.mark.parametrize(
    "kind", ["directory", "fifo", "device", "loop", "dangling", "missing", "huge", "socket", "no-permission"]
)
def test_what_is_no_checkpoint_file_is_refused_at_once(cli, tmp_path, kind):
    path = tmp_path / kind
    with contextlib.ExitStack() as stack:
        match kind:
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
            case "no-permission":
                if os.geteuid() == 0:
                    pytest.skip("root may read everything")
                path.touch(mode=0)
        done = cli("--checkpoint", path, "--sha256", "0" * 64, "--log-dir", tmp_path / "logs", timeout=30)
    assert done.code == support.read_result(tmp_path / "logs")["exit_code"] == 3
    assert path.name in done.stderr
    assert "Traceback" not in done.stderr
