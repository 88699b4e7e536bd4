"""README.md: its commands run, and its tables say what the program says."""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import support

README = (support.PROJECT / "README.md").read_text(encoding="utf-8")
PROGRAM = runpy.run_path(str(support.PROJECT / "inference.py"))
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)

# Blocks that no test can run, by their first line. Any other block is run.
NOT_RUN = {
    "source /usr/local/Ascend/cann/set_env.sh": "needs CANN, its device, a package index and the model hub",
    "tests/run.sh": "is what runs this test",
    "tests/bench.sh": "minutes to hours: the benchmark, the version matrix and the sweep",
}

HOLD_S = 2.0  # at most, of a run by way of the desk
BLOCK_TIMEOUT_S = 120

delivered = pytest.mark.skipif(not (support.PROJECT / "logs/npu_result.json").exists(), reason="no committed run yet")


def section(name: str) -> str:
    """What stands between <!-- name:begin --> and <!-- name:end -->."""
    match = re.search(rf"<!-- {name}:begin -->\n(.*?)<!-- {name}:end -->", README, re.DOTALL)
    assert match, f"README.md has no section {name}"
    return match[1]


def table(name: str) -> dict[str, list[str]]:
    """The rows of a section's tables: first cell, without backticks: the others."""
    rows: dict[str, list[str]] = {}
    for line in section(name).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and not re.match(r"\|-", line):
            key = cells[0].replace("`", "")
            assert key not in rows, f"{key} stands twice"
            rows[key] = cells[1:]
    return rows


def first_line(block: str) -> str:
    return block.partition("\n")[0]


# The commands, in the order of the page ------------------------------------------------------------------------------

# python3 of the blocks. inference.py runs in a process that has torch imported (see Desk), all else in Python itself.
# The first lines are shell, for a path with a space in it.
SHIM = """#!/bin/sh
'''exec' "{python}" -IS "$0" "$@"
' '''
import json, os, socket, sys
if sys.argv[1:2] != ["inference.py"]:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as desk:
    desk.connect({address!r})
    request = json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(desk, [request], [0, 1, 2])
    code = int(desk.recv(16))
sys.exit(code if code >= 0 else 128 - code)
"""


class Desk:
    """Takes calls of the shim and runs them with `cli`. The stand-in is run where the page means the pinned file."""

    def __init__(self, cli: support.Cli, directory: Path) -> None:
        self.cli = cli
        self.address = f"\0test-readme-{os.getpid()}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.bind(self.address)
        self.socket.listen()
        directory.mkdir()
        shim = directory / "python3"
        shim.write_text(SHIM.format(python=sys.executable, address=self.address))
        shim.chmod(0o755)
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self.socket.accept()
                threading.Thread(target=self.answer, args=(connection,), daemon=True).start()

    def answer(self, connection: socket.socket) -> None:
        with connection, contextlib.ExitStack() as files:
            request, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 3)
            stdin, stdout, stderr = (files.enter_context(os.fdopen(fd, "r+b", buffering=0)) for fd in descriptors)
            args, cwd, env = json.loads(request)
            if "--check" not in args:
                standin = support.STANDIN_ARGS if "--checkpoint" not in args else ()
                hold = float(args[args.index("--hold-seconds") + 1]) if "--hold-seconds" in args else HOLD_S
                args = [*standin, *args, "--hold-seconds", f"{min(hold, HOLD_S):g}"]  # the last one counts
            process = self.cli.start(*args, env=env, cwd=Path(cwd), script=Path(cwd, "inference.py"), stdin=stdin,
                                     stdout=stdout, stderr=stderr)  # fmt: skip
            connection.send(b"%d" % process.wait(BLOCK_TIMEOUT_S).code)


class Reader:
    """Someone with a copy of the project who types what the page says."""

    def __init__(self, cli: support.Cli, directory: Path, desk: Desk, commands: Path) -> None:
        self.project = support.project_copy(directory)
        shutil.rmtree(self.project / "logs", ignore_errors=True)
        shutil.copytree(support.PROJECT / "assets", self.project / "assets")
        tests = self.project / "tests"
        for script in (support.PROJECT / "tests").glob("*.sh"):
            shutil.copy2(script, tests)
        shutil.copytree(support.PROJECT / "tests/cannsim", tests / "cannsim", ignore=shutil.ignore_patterns("build"))
        # the simulator is built already
        (tests / "cannsim/build").symlink_to(support.PROJECT / "tests/cannsim/build")
        shutil.copy2(self.project / support.STANDIN, self.project / "my_ppo.zip")
        sums = subprocess.run(["sha256sum", "inference.py", "requirements.txt", "README.md"], cwd=self.project,
                              check=True, capture_output=True).stdout  # fmt: skip
        (self.project / "SHA256SUMS").write_bytes(sums)
        environment = cli.environment({"PYTHON": sys.executable, "CANNSIM_DEVICES": "4", "SLURM_ARRAY_TASK_ID": "2"})
        self.environment = environment | {"PATH": f"{commands}{os.pathsep}{environment['PATH']}"}

    def types(self, block: str) -> str:
        """Runs a block. Returns "" or what went wrong."""
        shell = subprocess.Popen(["bash", "-eu", "-o", "pipefail", "-c", block], cwd=self.project, env=self.environment,
                                 stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                 start_new_session=True)  # fmt: skip
        try:
            output, _ = shell.communicate(timeout=BLOCK_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(shell.pid, signal.SIGKILL)
            output, _ = shell.communicate()
        if shell.returncode == 0:
            return ""
        return f"exit code {shell.returncode} of\n{block}{output.decode('utf-8', 'replace')[-3000:]}"

    def knows_simulate_sh(self) -> None:
        """tests/simulate.sh has run as it is, in full: from here on it starts inference.py at once."""
        (self.project / "tests/simulate.sh").write_text('#!/bin/sh\nexec python3 inference.py "$@"\n')


@pytest.fixture(scope="module")
def reader(cli: support.Cli, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """After every block of the page that can run here has run, in order."""
    directory = tmp_path_factory.mktemp("reader")
    desk = Desk(cli, directory / "bin")
    someone = Reader(cli, directory / "a clone", desk, directory / "bin")
    for block in BLOCKS:
        if first_line(block) not in NOT_RUN:
            problem = someone.types(block)
            assert not problem, problem
            if block.startswith("tests/simulate.sh"):
                someone.knows_simulate_sh()
    yield someone
    desk.socket.close()


def test_every_block_that_can_run_here_runs(reader):
    """The fixture has run them; these are the marks that they left."""
    runs = {path.parent.name: support.read_result(path.parent) for path in reader.project.rglob("npu_result.json")}
    assert set(runs) == {"logs", "all", "watched", "compared", "failed", "1", "2", "3", "4", "slurm-2"}
    assert {name: run["exit_code"] for name, run in runs.items() if run["exit_code"]} == {"failed": 6}
    assert [runs[name]["visible_devices"] for name in ("1", "4", "slurm-2")] == ["0", "3", "1"]
    assert runs["logs"]["observation"] == [[pytest.approx(value) for value in (0.1, 0.0, -0.02, 0.3)]]
    with open(reader.project / "actions.npy", "rb") as file:
        assert b"(1000,)" in file.read(128)


def test_every_block_that_is_not_run_is_there_and_is_shell(tmp_path):
    assert sorted(NOT_RUN) == sorted(first for block in BLOCKS if (first := first_line(block)) in NOT_RUN)
    for block in BLOCKS:
        subprocess.run(["bash", "-n", "-c", block], check=True)


def test_every_fence_is_shell():
    """Nothing passes for a command, or for its output, that no test looks at."""
    assert set(re.findall(r"^ *(?:```|~~~)(.*)$", README, re.MULTILINE)) == {"bash", ""}
    assert README.count("```") == 2 * len(BLOCKS)


# The tables ----------------------------------------------------------------------------------------------------------


def test_the_flags_are_those_of_help():
    parser = PROGRAM["create_parser"]()
    rows = table("flags")
    rows.pop("flag")
    shown = re.findall(r"^  ((?:-h, )?--[a-z0-9-]+(?: \S+)?)(?:  |$)", parser.format_help(), re.MULTILINE)
    assert sorted(rows) == sorted(shown)
    for action in parser._actions:
        if isinstance(action.default, float):
            cell = next(cells[0] for flag, cells in rows.items() if flag.split()[0] in action.option_strings)
            assert cell == f"{action.default:g}"


def test_the_exit_codes_are_the_programs():
    rows = table("exit-codes")
    rows.pop("code")
    failure = PROGRAM["Failure"]
    codes = {value.code for value in PROGRAM.values() if isinstance(value, type) and issubclass(value, failure)}
    codes |= {0, 8} | {128 + number for number in PROGRAM["SIGNALS"]}
    assert set(map(int, rows)) == codes
    in_docstring = PROGRAM["__doc__"].partition("Exit codes:")[2].partition("\n\n")[0]
    assert set(map(int, re.findall(r"(?<=[ \n/])\d+(?=[ /])", in_docstring))) == codes


def key_rows() -> dict[str, list[str]]:
    return {key: cells for key, cells in table("keys").items() if re.fullmatch(r"[a-z0-9_]+", key)}


def test_the_keys_are_those_of_the_result():
    assert sorted(key_rows()) == sorted(PROGRAM["STAGE_OF_KEY"])


def names_within(value: Any, of_outputs: set[str]) -> Iterator[str]:
    """The keys of nested objects, but for those that are the name of an output or of a file."""
    if isinstance(value, list):
        for item in value:
            yield from names_within(item, of_outputs)
    elif isinstance(value, dict):
        for name, item in value.items():
            if name not in of_outputs and "." not in name:
                yield name
            yield from names_within(item, of_outputs)


def test_the_keys_within_keys_are_named(reader):
    rows = key_rows()
    for run in ("logs", "runs/compared", "runs/failed"):
        result = support.read_result(reader.project / run)
        outputs = set(result["outputs"] or {})
        for key, value in result.items():
            for name in names_within(value, outputs if key in ("outputs", "cpu_reference") else set()):
                assert f"`{name}`" in rows[key][0], f"{key}.{name} is not explained"


def test_the_variables_are_those_of_the_simulator():
    rows = table("cannsim")
    rows.pop("variable")
    sources = [path for path in (support.PROJECT / "tests/cannsim").iterdir() if path.suffix == ".cpp"]
    sources.append(support.PROJECT / "tests/cannsim/npu-smi")
    read = set(re.findall(r'"(CANNSIM_[A-Z_]+)"', "".join(path.read_text() for path in sources)))
    assert set(rows) == read
    control = (support.PROJECT / "tests/cannsim/control.cpp").read_text()
    for name, cells in rows.items():
        defaults = re.findall(rf'variable\("{name}", "([^"]+)"\)', control)
        assert cells[0] == (defaults[0] if defaults else "")


# The figures ---------------------------------------------------------------------------------------------------------


def test_the_published_figures_are_those_of_the_program():
    rows = table("published")
    rows.pop("output")
    assert {key: json.loads(cells[0].strip("`")) for key, cells in rows.items()} == PROGRAM["PUBLISHED"]


def test_the_model_is_the_pinned_one():
    for name in ("MODEL_ID", "SOURCE_REVISION", "CHECKPOINT_NAME", "CHECKPOINT_SHA256"):
        assert f"`{PROGRAM[name]}`" in README
    assert f"{PROGRAM['CHECKPOINT_BYTES']} bytes" in README


def test_the_limits_are_those_of_the_program():
    for words in (
        f"files larger than {PROGRAM['MAX_CHECKPOINT_BYTES'] >> 20} MiB",
        f"in time ({PROGRAM['NPU_SMI_TIMEOUT_S']:g} s) and output ({PROGRAM['NPU_SMI_MAX_BYTES'] >> 20} MiB)",
        f"the first {PROGRAM['SHOWN_ROWS']} rows",
        f"{PROGRAM['BENCHMARK_WARM_UP']} passes of warm-up",
        "the rest within {:.0e}".format(PROGRAM["TOLERANCE"]).replace("e-0", "e-"),
    ):
        assert words in " ".join(README.split())


@delivered
def test_the_simulated_figures_are_those_of_the_committed_run():
    result = support.read_result(support.PROJECT / "logs")
    assert result["simulated"] is True, "the table says that the run in logs/ was simulated"
    rows = table("simulated")
    rows.pop("key")
    actual = {}
    for path in rows:
        value: Any = result
        for name in path.split("."):
            value = value[name]
        actual[path] = f"`{json.dumps(value)}`"
    assert {path: cells[0] for path, cells in rows.items()} == actual, "\n".join(
        f"| `{path}` | {value} |" for path, value in actual.items()
    )


@delivered
@pytest.mark.parametrize("name", ["bench", "matrix", "sweep"])
def test_the_measured_tables_are_filled_in(name):
    assert section(name).strip()


# The page ------------------------------------------------------------------------------------------------------------


def headings() -> list[str]:
    text = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^##* (.*)$", text.partition("\n---\n")[2], re.MULTILINE)


def test_every_heading_is_in_both_languages():
    for heading in headings():
        assert re.search(r"[A-Za-z]", heading), heading
        assert re.search(r"[\u4e00-\u9fff]", heading), heading


def test_every_link_leads_somewhere():
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings()}
    for target in re.findall(r"(?<!!)\[[^]]+\]\(([^)]+)\)", README):
        assert (target[1:] in anchors if target.startswith("#") else (support.PROJECT / target).exists()), target


@delivered
def test_every_file_that_is_named_exists():
    named = set(re.findall(r"(?:`|\(|\bpython3 |^)((?:tests|assets|logs)/[\w./-]+)", README, re.MULTILINE))
    assert {"assets/npu_device_call.png", "tests/simulate.sh", "tests/bench.sh"} <= named
    for name in sorted(named | {"SHA256SUMS", "requirements.txt"}):
        assert (support.PROJECT / name).exists(), name
        if name.endswith(".sh"):
            assert os.access(support.PROJECT / name, os.X_OK), name


def test_every_picture_is_marked_as_simulated():
    pictures = re.findall(r"^!\[(.*)\]\(assets/(\w+)\.png\)\n\n\*A \*\*simulated\*\* run", README, re.MULTILINE)
    assert sorted(name for _, name in pictures) == [
        "agent_workflow", "model_result", "modelagent_live_session", "npu_device_call"]  # fmt: skip
    assert len(pictures) == README.count("![")
    assert all(text.endswith("simulated run") for text, _ in pictures)


def test_the_front_matter_declares_no_licence():
    front = README.split("---\n")[1]
    fields = dict(re.findall(r"^(\w+): *(.*)$", front, re.MULTILINE))
    assert (fields["license"], fields["license_name"]) == ("other", PROGRAM["LICENSE"])
    assert (fields["library_name"], fields["pipeline_tag"]) == ("stable-baselines3", "reinforcement-learning")
    assert fields["base_model"] == PROGRAM["MODEL_ID"]
    assert {"npu", "ascend", "torch_npu", "ppo"} <= set(re.findall(r"^  - (\S+)$", front, re.MULTILINE))
