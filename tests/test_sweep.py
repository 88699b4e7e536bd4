"""No single failing or hanging call into CANN, out of all that a good run makes, ends in a false success."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from harness import support
from measure import sweep


@pytest.fixture(scope="module")
def sweeper(simulator, tmp_path_factory) -> Iterator[sweep.Sweep]:
    cli = support.Cli(simulator, tmp_path_factory.mktemp("sweep") / "project")
    yield sweep.Sweep(cli, tmp_path_factory.mktemp("traces"))
    cli.close()


@pytest.fixture(scope="module")
def outcomes(sweeper) -> list[sweep.Outcome]:
    found = list(sweeper.outcomes(jobs=os.cpu_count() or 1))
    sweep.write_table(sweep.TABLE, found)
    print(sweep.summary(found))
    return found


def test_every_call_is_swept(sweeper, outcomes):
    failed = {(outcome.case.name, outcome.case.nth) for outcome in outcomes if outcome.case.kind == "fail"}
    assert failed == set(sweeper.calls)
    assert len(failed) > 500
    for name in ("aclrtMemcpy", "aclnnAddmm", "aclnnAddmmGetWorkspaceSize", "exec:aclnnAddmm"):
        assert (name, 1) in failed


def test_no_failing_call_ends_in_a_false_success_or_any_other_improper_way(outcomes):
    violations = [outcome for outcome in outcomes if outcome.case.kind == "fail" and outcome.problems]
    assert violations == []


def test_no_hanging_call_outlives_the_timeout_or_ends_in_any_improper_way(outcomes):
    violations = [outcome for outcome in outcomes if outcome.case.kind == "hang" and outcome.problems]
    assert violations == []


def test_what_is_tolerated_does_happen_and_is_rare(outcomes):
    tolerated = collections.Counter(outcome.case.name for outcome in outcomes if outcome.code == 0)
    assert set(tolerated) == set(sweep.TOLERATED)
    assert tolerated.total() < 20


def test_the_sweep_finds_a_false_success(sweeper, monkeypatch):
    monkeypatch.setattr(sweep, "TOLERATED", {})
    assert "FALSE SUCCESS" in sweeper.outcome(sweep.Case("fail", "aclrtSetDeviceSatMode", 1)).problems


def test_the_sweep_finds_an_untrue_statement(sweeper, monkeypatch):
    monkeypatch.setitem(sweeper.good, "device_count", 2)
    assert "states device_count=1" in sweeper.outcome(sweep.Case("fail", "aclrtSetDeviceSatMode", 1)).problems


def test_the_sweep_finds_a_call_that_was_not_made(sweeper):
    outcome = sweeper.outcome(sweep.Case("fail", "aclrtMemcpy", 100_000))
    assert "the call was not made, or more than one failed" in outcome.problems


def test_the_command_of_the_readme_says_what_it_does():
    done = subprocess.run([sys.executable, sweep.__file__, "--help"], capture_output=True, text=True, check=True)
    assert "--table" in done.stdout
    assert "--jobs" in done.stdout
