"""The command line: what its help says, what it answers to a wrong one, and how it shows the paths that were typed."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest
from harness import evidence, support


@pytest.fixture(scope="module")
def program() -> dict:
    return runpy.run_path(str(support.PROJECT / "inference.py"))


@pytest.fixture(scope="module")
def helped(cli) -> str:
    result = cli.cold("--help", env={"COLUMNS": "80"})
    assert (result.code, result.stderr) == (0, "")
    return result.stdout


def test_the_help_fits_a_terminal_of_80_columns(helped):
    assert [line for line in helped.splitlines() if len(line) > 80] == []


def test_the_help_groups_and_explains_every_option(program, helped):
    heads = re.findall(r"^(\S.*):$", helped, re.MULTILINE)
    assert {"the model", "the observations", "the run"} <= set(heads)
    actions = program["create_parser"]()._actions
    assert len(actions) > 10
    for action in actions:
        assert re.search(rf"^  (-h, )?{action.option_strings[-1]}\b.*?\n? +\w", helped, re.MULTILINE), action
        assert action.help


def test_the_help_states_every_exit_code(program, helped):
    text = re.sub(r"\s+", " ", helped.partition("Exit codes")[2])
    failures = [item for item in program.values() if isinstance(item, type) and issubclass(item, program["Failure"])]
    codes = {failure.code for failure in failures if hasattr(failure, "code")} | {0, 129, 130, 143}
    assert codes >= set(range(8))
    assert [code for code in sorted(codes) if not re.search(rf"(?<!\d){code}(?!\d)", text)] == []


def test_the_examples_of_the_help_are_commands_that_the_program_takes(program, helped):
    examples = re.findall(r"^ +python3 inference\.py (.*)$", helped.replace("\\\n", ""), re.MULTILINE)
    assert len(examples) >= 2
    for example in examples:
        arguments = shlex.split(re.sub(r'"\$\(.*?\)"', "0" * 64, example))
        assert program["create_parser"]().parse_args(arguments)


def test_the_version_is_the_one_of_the_evidence(cli, program):
    result = cli.cold("--version")
    assert (result.code, result.stdout, result.stderr) == (0, f"inference.py {program['VERSION']}\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--hold", "1"), r"--hold \(did you mean --hold-seconds\?\)|--hold 1 \(did you mean --hold-seconds\?\)"),
        (("--hold-second=1",), r"did you mean --hold-seconds\?"),
        (("--observaton", "[0]"), r"did you mean --observations?\?"),
        (("--xyz",), r"unrecognized arguments: --xyz; "),
        (("--shard", "3"), "--shard '3' is not a slice I/N"),
        (("stray",), "unrecognized arguments: stray"),
        (("--checkpoint",), "--checkpoint: expected one argument"),
        (("--checkpoint", "--sha256"), "--checkpoint: expected one argument"),
        (("--hold-seconds", "1e9"), "--hold-seconds takes seconds from 0 to 86400"),
        (("--tolerance", "-1"), "--tolerance takes a number above 0|--tolerance: expected"),
        (("--benchmark", "many"), "--benchmark: invalid int value: 'many'"),
        (("--sha256", "0" * 63), "is not a SHA256: 64 hexadecimal digits"),
        (("--log-dir", ""), "a path is empty"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, tuple) else "",
)
def test_a_wrong_call_is_one_line_that_points_to_the_help(cli, tmp_path, arguments, words):
    result = cli.cold("--log-dir", tmp_path / "logs", *arguments)
    assert (result.code, evidence.problems(result, tmp_path / "logs")) == (2, [])
    [line] = result.stderr.splitlines()
    assert line.startswith("inference.py: usage: ") and re.search(words, line), line
    assert line.endswith("; nothing was run; see python3 inference.py --help")
    assert result.stdout == "" and not (tmp_path / "logs").exists()


def test_paths_are_shown_as_they_were_typed_or_relative_to_the_project(cli, tmp_path):
    """Evidence is made to be published: no directory above the project is in it."""
    standin = cli.project / support.STANDIN
    (tmp_path / "model.zip").symlink_to(standin)
    for typed, where, shown in (
        (standin, cli.project, support.STANDIN),
        ("./" + support.STANDIN, cli.project, support.STANDIN),
        ("../project/" + support.STANDIN, cli.project, support.STANDIN),
        ("model.zip", tmp_path, None),
    ):
        result = cli.cold("--checkpoint", typed, "--sha256", "0" * 64, f"--log-dir={tmp_path / 'logs'}", cwd=where,
                          script=cli.project / "inference.py")  # fmt: skip
        document = support.read_result(tmp_path / "logs")
        assert (result.code, document["exit_code"]) == (3, 3)
        stated = document["checkpoint"]["path"]
        assert stated == (shown or stated) and stated in (support.STANDIN, "model.zip")
        assert document["argv"] == ["inference.py", "--checkpoint", stated, "--sha256", "0" * 64,
                                    f"--log-dir={tmp_path / 'logs'}"]  # fmt: skip
        assert document["cwd"] == ("." if where == cli.project else "outside the project")
        assert f"inference.py: verify: {stated} has" in result.stderr


def test_a_program_without_a_file_of_its_own_refuses(cli, tmp_path):
    """Piped into python3, or replaced since it was started: its hash would be another program's."""
    with open(cli.project / "inference.py", "rb") as source:
        result = cli.cold("--log-dir", tmp_path / "logs", script=Path("-"), stdin=source)
    assert result.code == 2 and "nothing was run" in result.stderr, result.stderr
    assert not (tmp_path / "logs").exists()
    replaced = cli.project / "replaced.py"
    replaced.write_text(f"import os\nwith open(__file__, 'w') as own: own.write('another')\n"
                        f"exec(compile({(cli.project / 'inference.py').read_text()!r}, __file__, 'exec'))\n")
    result = cli.cold(*support.STANDIN_ARGS, "--log-dir", tmp_path / "logs", script=replaced)
    assert result.code == 2 and "nothing was run" in result.stderr, result.stderr
    assert not (tmp_path / "logs").exists()
