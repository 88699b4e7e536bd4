"""A sample of tests/measure/sweep.py: no fault of the device, alone or with another one, ends in a false success."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from harness import evidence
from measure import sweep

JOBS = 2 * (os.cpu_count() or 1)  # many of the runs wait


@pytest.fixture(scope="module")
def sweeper(cli, tmp_path_factory) -> sweep.Sweep:
    return sweep.Sweep(cli, tmp_path_factory.mktemp("traces"))


def violations(outcomes) -> list[tuple[str, int, str]]:
    return [(outcome.case.label, outcome.code, outcome.verdict) for outcome in outcomes if outcome.problems]


def test_a_call_that_fails_or_hangs_ends_in_no_false_success(sweeper):
    """Some of all calls, of each that torch_npu can do without, and of each after the program's last word."""
    known = [case for case in sweeper.failures() if case.name in sweep.TOLERATED and case.nth == 1]
    last = [sweep.Case("fail", name, nth) for name, nth in sorted(sweeper.teardown())[::2]]
    outcomes = list(sweeper.outcomes([*known, *last, *sweeper.failures()[7::150], *sweeper.hangs()[3::15]], JOBS))
    assert violations(outcomes) == []
    assert {outcome.case.name for outcome in outcomes if outcome.code == 0} >= set(sweep.TOLERATED)
    assert sum(outcome.code != 0 for outcome in outcomes) >= 6


def test_data_that_is_corrupted_ends_in_no_false_success(sweeper):
    """Once, where two passes differ or a read-back does, and every time, where only the reference can tell."""
    cases = [case for case in sweeper.corruptions() if case.nth == 0 and case.subject == "Discrete"]
    whole = [case for case in cases if case.name in ("exec:aclnnAddmm", "exec:aclnnRelu", "exec:aclnnSoftmax")]
    outcomes = list(sweeper.outcomes([*whole[::2], *sweeper.corruptions()[11::229]], JOBS))
    assert violations(outcomes) == []
    caught = {outcome.verdict for outcome in outcomes}
    assert {"float64 reference", "repeatability", "bits of the weights, after the load"} <= caught


def test_an_upload_of_a_second_chunk_that_is_lost_is_found(sweeper):
    copies = [line for line in sweeper.traces["two chunks"] if line["name"] == "aclrtMemcpy"]
    [upload] = [number for number, line in enumerate(copies, 1)
                if line["bytes"] == 16 * (sweep.FILE_ROWS - 16384) and line["direction"] == "h2d"]  # fmt: skip
    cases = [sweep.Case("corrupt", "aclrtMemcpy", upload, how, "two chunks") for how in ("bit", "stale")]
    outcomes = list(sweeper.outcomes(cases, JOBS))
    assert violations(outcomes) == []
    assert [outcome.verdict for outcome in outcomes] == ["observations read back"] * 2


def test_two_things_at_once_end_in_no_false_success(sweeper):
    outcomes = list(sweep.Pairs(sweeper, seed=0).outcomes(16, JOBS))
    assert violations(outcomes) == []
    assert len({outcome.code for outcome in outcomes}) >= 4, "the pairs do too little"


# The sweep itself


def test_every_call_of_a_good_run_is_swept(sweeper):
    assert {(case.name, case.nth) for case in sweeper.failures()} == set(sweeper.calls())
    assert len(sweeper.failures()) > 500
    for name in ("aclrtMemcpy", "aclnnAddmm", "aclnnAddmmGetWorkspaceSize", "exec:aclnnAddmm"):
        assert (name, 1) in sweeper.calls()
    swept = {(case.name, case.nth, case.how) for case in sweeper.corruptions() if case.subject == "Discrete"}
    for name in ("aclrtMemcpy", "exec:aclnnAddmm", "exec:aclnnArgMax"):
        assert {(name, nth, how) for nth in (0, 1) for how in sweep.KINDS} <= swept


def test_the_sweep_finds_a_false_success(sweeper, monkeypatch):
    monkeypatch.setattr(sweep, "TOLERATED", {})
    problems = sweeper.outcome(sweep.Case("fail", "aclrtSetDeviceSatMode", 1)).problems
    assert "FALSE SUCCESS: the call is needed" in problems


def test_the_sweep_finds_an_answer_that_is_wrong(sweeper, monkeypatch):
    """By its own reference, in every row of the result and of a file."""
    for name, at in (("Discrete", (1, 0)), ("two chunks", (sweep.FILE_ROWS - 1, 0))):
        of = sweeper.subjects[name]
        monkeypatch.setitem(of.reference, "value", of.reference["value"].copy())
        of.reference["value"][at] *= 1.002
        result, _ = sweeper.run("wrong", of, {})
        assert result.code == 0
        assert sweep.wrong_outputs(of, sweeper.log_dir("wrong")) == ["value"]


def test_the_sweep_finds_an_untrue_statement(sweeper, monkeypatch):
    monkeypatch.setitem(sweeper.good["Discrete"], "device_count", 2)
    assert "states device_count=1" in sweeper.outcome(sweep.Case("fail", "aclrtSetDeviceSatMode", 1)).problems


def test_the_sweep_finds_a_call_that_was_not_made(sweeper):
    assert "the call was made 0 times" in sweeper.outcome(sweep.Case("fail", "aclrtMemcpy", 100_000)).problems


def test_the_sweep_finds_a_process_that_is_left_and_a_stage_that_is_late(sweeper, tmp_path):
    result, _ = sweeper.run("late", sweeper.subjects["Discrete"], {})
    sleeper = subprocess.Popen(["sleep", "60"], env={**os.environ, "TEST_RUN": result.mark})
    assert any(problem.startswith("left running") for problem in evidence.problems(result, sweeper.log_dir("late")))
    sleeper.kill()
    sleeper.wait()
    assert sweep.too_late(sweeper.log_dir("late"), -5) != []
    assert sweep.too_late(sweeper.log_dir("late"), 60) == []


def test_the_command_of_the_readme_says_what_it_does(simulator):
    done = subprocess.run([sys.executable, sweep.__file__, "--help"], capture_output=True, text=True, check=True)
    for option in ("--table", "--jobs", "--only", "--cases", "--seed"):
        assert option in done.stdout
