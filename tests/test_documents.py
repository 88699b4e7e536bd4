"""What the pages say is what the programs say: tables, figures, files, links, and how the pages are written."""

from __future__ import annotations

import errno
import json
import os
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import checkpoints, evidence, faults, figures, support

PAGES = {"README.md": 270, "logs/README.md": 250, "tests/README.md": 250, ".github/CONTRIBUTING.md": 25,
         ".github/SECURITY.md": 25, "tests/data/README.md": 40}  # with the lines that each may have
TEXT = {page: (support.PROJECT / page).read_text(encoding="utf-8") for page in PAGES}
README = TEXT["README.md"]
SOURCE = (support.PROJECT / "inference.py").read_text(encoding="utf-8")
PROGRAM = runpy.run_path(str(support.PROJECT / "inference.py"))
CHECKER = runpy.run_path(str(support.PROJECT / "tests/check_evidence.py"))
CHINESE = r"[\u4e00-\u9fff]"
FIGURES = ("bench", "sweep", "matrix", "slurm", "sb3")


def section(page: str, name: str) -> str:
    """What stands between <!-- name:begin --> and <!-- name:end -->."""
    match = re.search(rf"<!-- {name}:begin -->\n(.*?)<!-- {name}:end -->", TEXT[page], re.DOTALL)
    assert match, f"{page} has no section {name}"
    return match[1]


def table(page: str, name: str) -> list[list[str]]:
    """The rows of a section's table, a list of cells each, without its head."""
    lines = [line for line in section(page, name).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# The program ---------------------------------------------------------------------------------------------------------


def test_the_flags_are_those_of_help():
    parser = PROGRAM["create_parser"]()
    rows = {cells[0].replace("`", ""): cells[1:] for cells in table("README.md", "flags")}
    shown = re.findall(r"^  ((?:-h, )?--[a-z0-9-]+(?: \S+)?)(?:  |$)", parser.format_help(), re.MULTILINE)
    assert sorted(rows) == sorted(shown)
    for action in parser._actions:
        if isinstance(action.default, float):
            cell = next(cells[0] for flag, cells in rows.items() if flag.split()[0] in action.option_strings)
            assert cell == f"{action.default:g}"


# Flags of other programs that the pages name.
FOREIGN_FLAGS = {"--revision", "--local-dir", "--strict", "--device", "--list", "--only"}


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_that_is_named_is_one_of_a_program(page):
    known = set(PROGRAM["create_parser"]()._option_string_actions) | {"--json", "--record", "--keep"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", TEXT[page])) <= known | FOREIGN_FLAGS


def test_the_exit_codes_are_the_programs():
    rows = [number for cells in table("README.md", "exit-codes") for number in cells[0].split(", ")]
    failure = PROGRAM["Failure"]
    codes = {value.code for value in PROGRAM.values()
             if isinstance(value, type) and issubclass(value, failure) and hasattr(value, "code")}
    codes |= {0} | {128 + number for number in PROGRAM["SIGNALS"]}
    assert sorted(map(int, rows)) == sorted(codes)
    in_docstring = PROGRAM["__doc__"].partition("Exit codes:")[2].partition("\n\n")[0]
    assert set(map(int, re.findall(r"(?<=[ \n/])\d+(?=[ /])", in_docstring))) == codes


def test_the_published_result_is_that_of_the_program():
    words = " ".join(README.split())
    for name, value in PROGRAM["PUBLISHED"].items():
        assert f"{name} `{json.dumps(value)}`" in words
    assert f"within {PROGRAM['TOLERANCE']:g}, relative above 1." in words


def test_the_model_is_the_pinned_one():
    words = README.replace("\\\n  ", "")
    assert (f"hf download {PROGRAM['MODEL_ID']} {PROGRAM['CHECKPOINT_NAME']} --revision {PROGRAM['SOURCE_REVISION']} "
            "--local-dir .") in words


def test_the_limits_are_those_of_the_program():
    limits = {
        "README.md": (
            f"Files above {PROGRAM['MAX_CHECKPOINT_BYTES'] >> 20} MiB are refused",
            f"bounded to {PROGRAM['NPU_SMI_TIMEOUT_S']:g} s and {PROGRAM['NPU_SMI_BYTES'] >> 20} MiB a call"),
        "logs/README.md": (
            f"at most {PROGRAM['SHOWN_ROWS']}, and at most {PROGRAM['SHOWN_NUMBERS']} numbers",
            f"or to {PROGRAM['SMALL']} where that is smaller", f"a mean is {PROGRAM['SATURATED']:g} or more",
            f"runs {PROGRAM['WARM_UP']} passes of warm-up"),
    }
    for page, sentences in limits.items():
        for words in sentences:
            assert words in " ".join(TEXT[page].split())
    assert SOURCE.count("at_least_s=120") == 2 and "imports have at least 120 s" in TEXT["logs/README.md"]


def test_the_messages_are_those_of_the_program():
    for code, seen, *_ in table("logs/README.md", "failures"):
        for words in quoted(seen):
            assert words in SOURCE.replace("\\", "") or words == os.strerror(errno.ENOENT), words
        for number in re.findall(r"\d+", code.partition(",")[0]):
            assert number in section("README.md", "exit-codes"), code


# The evidence --------------------------------------------------------------------------------------------------------


def key_rows() -> dict[str, set[str]]:
    """The keys of npu_result.json, and of each the keys within it."""
    rows: dict[str, set[str]] = {}
    for keys, parts, _ in table("logs/README.md", "keys"):
        for key in quoted(keys):
            assert key not in rows, f"{key} stands twice"
            rows[key] = set(quoted(parts))
    return rows


def test_the_keys_are_those_of_the_result():
    assert sorted(key_rows()) == sorted(PROGRAM["RESULT_KEYS"].split())


def names_within(value: Any, leave_out: set[str]) -> Iterator[str]:
    """The keys of nested objects."""
    if isinstance(value, list):
        for item in value:
            yield from names_within(item, leave_out)
    elif isinstance(value, dict):
        for name, item in value.items():
            if name not in leave_out:
                yield name
            yield from names_within(item, leave_out)


# The stand-in in the place of the pinned file, and its answer in the place of the published one.
AS_THE_PINNED_FILE = f"""
inference.CHECKPOINT_SHA256, inference.CHECKPOINT_BYTES = {support.STANDIN_SHA256!r}, 139220
inference.PUBLISHED = {{
    "action": [0], "value": [[182.5192]], "log_prob": [-0.596498], "probs": [[0.550737, 0.449263]],
    "logits": [[-0.596498, -0.800147]], "entropy": [0.68799]}}
"""


@pytest.fixture(scope="module")
def results(cli, tmp_path_factory) -> list[dict[str, Any]]:
    """Runs that have, taken together, every key within a key."""
    directory = tmp_path_factory.mktemp("results")
    quick = faults.quick_npu_smi(directory / "bin")
    rows = directory / "rows.csv"
    rows.write_text("0.1,0.2,0.3,0.4\n0,0,0,0\n")
    kinds = {name: checkpoints.make(checkpoints.KINDS[name], directory / f"{name}.zip")
             for name in ("box", "multi-discrete")}
    pinned = {"script": faults.patched(cli.project, AS_THE_PINNED_FILE)}
    models = {name: ("--checkpoint", path, "--sha256", evidence.sha256(path)) for name, path in kinds.items()}
    runs: dict[str, tuple[tuple[object, ...], dict[str, Any]]] = {
        "file": ((*support.STANDIN_ARGS, "--observations", rows, "--benchmark", 2), {}),
        "box": (models["box"], {}), "multi-discrete": (models["multi-discrete"], {}),
        "pinned": (("--checkpoint", support.STANDIN), pinned),
        "failed": ((*support.STANDIN_ARGS,), {"env": {"CANNSIM_FAIL": "exec:aclnnRelu"}}),
    }
    found = []
    for name, (arguments, options) in runs.items():
        env = {**quick, **options.pop("env", {})}
        done = cli(*arguments, "--hold-seconds", 0, "--log-dir", directory / name, env=env, **options)
        assert done.code == (6 if name == "failed" else 0), done.stderr
        found.append(support.read_result(directory / name))
    return found


def test_the_keys_within_keys_are_those_of_real_results(results):
    rows = key_rows()
    actual: dict[str, set[str]] = {key: set() for key in rows}
    for result in results:
        assert set(result) == set(rows)
        outputs = set(result["outputs"] or {})
        for key, value in result.items():
            if key not in ("kernels", "files"):  # whose keys are names of kernels and files
                by_output = key in ("outputs", "reference", "published")
                actual[key] |= set(names_within(value, outputs if by_output else set()))
    assert actual == rows


def test_the_gates_are_those_of_the_checker():
    assert [cells[0] for cells in table("logs/README.md", "gates")] == [gate[0] for gate in CHECKER["GATES"]]


def test_what_no_reader_can_know_is_listed():
    chapter = TEXT["logs/README.md"].partition("\n## What no reader can know")[2].partition("\n## ")[0]
    assert re.search(r"^(?:- |\| )", chapter, re.MULTILINE)


def test_the_files_are_those_of_a_run():
    listed = re.findall(r"^\| `(npu_\w+\.\w+)` \|", TEXT["logs/README.md"], re.MULTILINE)
    assert sorted(listed) == sorted(PROGRAM[name] for name in ("LOG", "MARKER", "NPU_SMI", "OUTPUTS", "RESULT"))


def test_the_errors_are_those_of_the_committed_run():
    """If not: python3 tests/harness/figures.py"""
    result = support.read_result(support.PROJECT / "logs")
    assert result["schema"] == PROGRAM["SCHEMA"], "logs/ is of another program: run tests/simulate.sh --hold-seconds 8"
    assert section("README.md", "error") == figures.error_section(result)


def test_an_answer_of_every_kind_has_a_table_of_errors(results):
    for result in results:
        if result["exit_code"] == 0:
            lines = figures.error_section(result).splitlines()
            rows = [line.split(" | ")[0] for line in lines if line.startswith("| `")]
            assert sorted(rows) == sorted(f"| `{name}`" for name in result["outputs"])
            assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


# The simulator and what is measured ----------------------------------------------------------------------------------


def test_the_variables_are_those_of_the_simulator():
    rows = {quoted(cells[0])[0]: cells[1] for cells in table("tests/README.md", "cannsim")}
    control = (support.PROJECT / "tests/cannsim/control.cpp").read_text()
    assert set(rows) == set(re.findall(r'"(CANNSIM_[A-Z_]+)"', control))
    for name, default in rows.items():
        defaults = re.findall(rf'variable\("{name}", "([^"]+)"\)', control)
        assert default == (defaults[0] if defaults else "")
    for page, text in TEXT.items():
        assert set(re.findall(r"\bCANNSIM_[A-Z_]+", text)) <= set(rows), page


@pytest.mark.parametrize("name", FIGURES)
def test_every_measurement_names_its_command_and_shows_its_figures(name):
    chapters = re.split(r"^### ", TEXT["tests/README.md"], flags=re.MULTILINE)
    chapter = next(chapter for chapter in chapters if f"<!-- figures: {name} -->" in chapter)
    commands = re.findall(r"`(?:python3 )?(tests/measure/\w+\.(?:sh|py))`", chapter)
    assert commands
    assert (support.PROJECT / commands[0]).is_file()
    shown = chapter.partition(f"<!-- figures: {name} -->")[2]
    assert re.search(r"^(\||    )", shown, re.MULTILINE), f"no figures of {commands[0]} yet"


# The pages -----------------------------------------------------------------------------------------------------------


def headings(page: str) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", TEXT[page], flags=re.MULTILINE | re.DOTALL)
    if text.startswith("---\n"):
        text = text.partition("\n---\n")[2]
    return re.findall(r"^##* (.*)$", text, re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if page != "tests/data/README.md"])
def test_every_heading_is_in_both_languages(page):
    for heading in headings(page):
        assert re.search(r"[A-Za-z]", heading), heading
        assert re.search(CHINESE, heading), heading


def anchors(page: str) -> set[str]:
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings(page)}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXT[page]):
        file, _, anchor = target.partition("#")
        path = Path(os.path.normpath(Path(page).parent / file)) if file else Path(page)
        assert (support.PROJECT / path).is_file(), target
        assert not anchor or anchor in anchors(str(path)), target


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_is_named_exists(page):
    path = r"(?:`|\bpython3 |^)((?:tests|assets|logs|\.github|\.ci)/[\w./-]*\w)(?=[`\s])"
    named = re.findall(path, TEXT[page], re.MULTILINE)
    of_a_run = {f"logs/{name}" for name in (evidence.RESULT, evidence.OUTPUTS, *evidence.FILES)}
    for name in sorted(set(named) - of_a_run):
        assert (support.PROJECT / name).exists(), name
        if name.endswith(".sh") and name != "tests/setup.sh":  # which the others read
            assert os.access(support.PROJECT / name, os.X_OK), name


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_short_and_its_lines_too(page):
    lines = TEXT[page].splitlines()
    assert len(lines) <= PAGES[page]
    wide = [line for line in lines if len(line) > 120 and not line.startswith("|")]
    assert not wide


@pytest.mark.parametrize("page", PAGES)
def test_no_line_ends_within_a_chinese_phrase(page):
    """A line break becomes a space, which belongs nowhere between two Chinese characters."""
    assert not re.findall(rf"{CHINESE}\n *{CHINESE}", TEXT[page])


@pytest.mark.parametrize("page", PAGES)
def test_english_says_is_not_a(page):
    """"is not a zip archive", rather than "is no zip archive"."""
    assert not re.findall(r"(?<!there )\b(?:is|are|was|were) no [a-z]+", TEXT[page])


def test_every_picture_is_there_and_marked_as_simulated():
    names = {"agent_workflow", "model_result", "modelagent_live_session", "npu_device_call"}
    assert set(re.findall(r"assets/(\w+)\.png\)", README + TEXT["logs/README.md"])) == names
    shown = re.findall(r"^!\[(.*)\]\(assets/\w+\.png\)\n\n\*A \*\*simulated\*\* run", README, re.MULTILINE)
    assert len(shown) == README.count("![") > 0
    assert all(text.endswith("simulated run") for text in shown)
    assert "marked as **simulated**" in TEXT["logs/README.md"]


def test_the_front_matter_declares_no_licence():
    front = README.split("---\n")[1].replace("\n       ", " ")
    fields = dict(re.findall(r"^(\w+): *(.*)$", front, re.MULTILINE))
    assert (fields["license"], fields["license_name"]) == ("other", PROGRAM["LICENSE"])
    assert (fields["library_name"], fields["pipeline_tag"]) == ("stable-baselines3", "reinforcement-learning")
    assert (fields["base_model"], fields["hardware"]) == (PROGRAM["MODEL_ID"], "NPU")
    tags = set(fields["tags"].strip("[]").split(", "))
    assert {"NPU", "Ascend", "ascend-npu", "npu", "ascend", "torch_npu", "ppo"} <= tags
    assert "\n#+NPU\n" in README


def test_continuous_integration_runs_what_a_developer_runs():
    workflow = (support.PROJECT / ".github/workflows/ci.yml").read_text()
    assert re.search(r"^      - run: \.ci/run$", workflow, re.MULTILINE)
    assert os.access(support.PROJECT / ".ci/run", os.X_OK)
    assert "tests/run.sh" in (support.PROJECT / ".ci/run").read_text()
