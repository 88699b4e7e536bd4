"""Whether npu-smi lists this process: the right verdict and reason for every table, and for every way to misbehave."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import stat
import time
from pathlib import Path

import pytest
from harness import evidence, faults, support

PROGRAM = runpy.run_path(str(support.PROJECT / "inference.py"))
PID = 4711
REAL_TABLES = sorted((support.PROJECT.parent / "shared/npu-smi").glob("*.txt"))

DEVICES = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.5.0                   Version: 25.5.1                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B4-1             | OK            | 84.1        38                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          2870 / 32768         |
+===========================+===============+====================================================+
"""
FOUR = "| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |\n"
FIVE = FOUR.replace("|\n", "| Process id in container |\n")
NPU_ID = FIVE.replace("NPU     Chip", "NPU ID      ")
NOBODY = "| No running processes found in NPU 0                                                            |\n"


def verdict(table: str, pid: int = PID, proc_mem: str | None = None, absent_before: bool | None = True) -> dict:
    """What the program makes of this output of `npu-smi info`, and of `npu-smi info -t proc-mem`."""
    asked = []

    def ask(*arguments: str) -> object:
        asked.append(list(arguments))
        text = table if arguments == ("info",) else proc_mem
        answer = ("This device does not support it.", "exit code 1") if text is None else (text, "")
        return PROGRAM["Answer"](*answer)

    return {**PROGRAM["correlate"](str(pid), absent_before, ask), "asked": asked}


def assert_found(found: dict, line: str, matched_by: str = "process id") -> None:
    assert found["captured"] and found["pid_found"] and found["pid_absent_before"] is not False
    assert (found["pid_line"], found["matched_by"], found["reason"]) == (line.strip(), matched_by, None)


def assert_not_found(found: dict, reason: str) -> None:
    assert not found["pid_found"]
    assert [found[name] for name in ("pid_line", "matched_by", "npu_id", "chip_id")] == [None] * 4
    assert re.search(reason, found["reason"]), found["reason"]


@pytest.mark.parametrize(
    ("header", "row", "matched_by"),
    [
        (FOUR, "| 0       0                 | 4711          | python3                  | 116                     |", 0),
        (FOUR, "| 32768   1                 | 4711          |                          | 116                     |", 0),
        (FOUR, "| 0       0                 | 4711          | a|b | c                  | 116                     |", 0),
        (FOUR, "| 0       0                 | 4711          | 4712                     | 116                     |", 0),
        (FOUR, "|0 0|4711|python3|116|", 0),
        (
            FOUR,
            "  | 0       0                 | 4711          | python3         \t     | 116  \t                  |",
            0,
        ),
        (
            FIVE,
            "| 0       0                 | 4711          | python3            | 116                   | NA      |",
            0,
        ),
        (
            FIVE,
            "| 0       0                 | 815           | python3            | 116                   | 4711    |",
            1,
        ),
        (
            FIVE,
            "| 0       0                 | 815           | a|b|4712           | 116                   | 4711    |",
            1,
        ),
        (
            NPU_ID,
            "| 0                         | 4711          | python           | 7031                  | 4711    |",
            1,
        ),
        (
            NPU_ID,
            "| 0                         | 4711          | python           | 7031                  | NA      |",
            0,
        ),
    ],
)
def test_a_row_of_this_pid_is_found_in_every_layout(header, row, matched_by):
    other = header.replace("Process id in container", "NA").replace("Process id ", "9999       ")
    table = DEVICES + "stray line\n" + header + row + "\n" + other
    found = verdict(table)
    assert_found(found, row, ["process id", "process id in container"][matched_by])
    assert found["npu_id"] == row.strip("| ").split()[0].partition("|")[0]


@pytest.mark.parametrize(
    "row",
    [
        "| 0       0                 | 14711         | python3                  | 116                     |",
        "| 0       0                 | 47110         | python3                  | 116                     |",
        "| 0       0                 | 471           | 4711                     | 4711                    |",
        "| 4711    0                 | 815           | python3                  | 116                     |",
        "| 0       0                 | 815           | |4711|                   | 116                     |",
        "| 0       0                 | 47 11         | python3                  | 116                     |",
        "| 0       0                 | -4711         | python3                  | 116                     |",
        "PID 4711 is here",
        "| 0       0                 | 4711",  # cut off
        NOBODY,
        "",
    ],
)
def test_the_number_elsewhere_is_not_a_row_of_this_pid(row):
    assert_not_found(verdict(DEVICES + FOUR + row + "\n"), "not listed")


def test_a_row_with_a_container_column_belongs_to_that_pid_alone():
    """On a board with several containers, our number may be the host's PID of somebody else."""
    foreign = "| 0       0                 | 4711          | python3            | 1                     | 12      |\n"
    ours = "| 1       0                 | 815           | python3            | 2                     | 4711    |\n"
    assert_not_found(verdict(DEVICES + FIVE + foreign), "not listed")
    assert_found(verdict(DEVICES + FIVE + foreign + ours), ours, "process id in container")


def test_several_rows_of_one_process_and_of_one_device():
    rows = [f"| {npu}       0                 | {pid:<13} | python3                  | 40    |\n"
            for npu in (0, 1) for pid in (17, PID, 18)]  # fmt: skip
    found = verdict(DEVICES + FOUR + "".join(rows))
    assert_found(found, rows[1])
    assert (found["npu_id"], found["chip_id"]) == ("0", "0")


PHY_ID = """\
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
| 0     Ascend910           | OK            | 172.3       36                0    / 0             |
| 0     4711                | 4711          | 4711        4711 / 4711       4711 / 65536         |
| 0     Ascend910           | OK            | -           35                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 0           0    / 0          2865 / 65536         |
"""


def test_the_rows_of_devices_are_not_those_of_processes():
    assert_not_found(verdict(PHY_ID), "no process table")
    assert_not_found(verdict(PHY_ID + FOUR + NOBODY), "not listed")
    row = "| 0       1                 | 4711          | python3                  | 116                     |"
    found = verdict(PHY_ID + FOUR + row)
    assert_found(found, row)
    assert (found["npu_id"], found["chip_id"]) == ("0", "1")


def test_long_texts_take_no_time():
    """A driver's output is bounded in bytes alone; a search that takes the square of them would hang the run."""
    rows = DEVICES + FOUR + "|0 0|17|a|1|\n" * 30_000 + "| 0" + " " * 200_000 + "|\n"
    spaces = "npu-smi 25.5.0" + " " * 200_000
    started = time.monotonic()
    assert_not_found(verdict(rows), "not listed")
    assert PROGRAM["versions_of"](PROGRAM["Answer"](spaces, "")) == (None, None)
    assert PROGRAM["versions_of"](PROGRAM["Answer"](DEVICES, "")) == ("25.5.0", "25.5.1")
    assert time.monotonic() - started < 2


@pytest.mark.parametrize(
    "text", ["", DEVICES, "DrvMngGetConsoleLogLevel failed. (ret=4)\n", "Process id: 4711\n", "\0\xff|||\n"]
)
def test_no_table_is_not_the_same_as_not_in_the_table(text):
    found = verdict(text)
    assert found["captured"]
    assert_not_found(found, "no process table")


def rows_of(npu: int, count: int, first: int = 100) -> str:
    return "".join(f"| {npu}       0                 | {first + number:<13} | python3                  | 40   |\n"
                   for number in range(count))  # fmt: skip


def proc_mem(*pids: int) -> str:
    return "\tNPU ID                         : 1\n\tChip ID                        : 0\n" + "".join(
        f"\tProcess id:{pid}  Process name:python3  Process memory(MB):40\n" for pid in pids
    )


def test_beyond_the_eight_rows_of_a_device_its_own_list_is_asked():
    table = DEVICES + FOUR + rows_of(0, 7) + rows_of(1, 8)
    found = verdict(table, proc_mem=proc_mem(100, PID, 47110))
    assert_found(found, f"Process id:{PID}  Process name:python3  Process memory(MB):40", "proc-mem")
    assert found["npu_id"] == "1"
    assert found["asked"] == [["info"], ["info", "-t", "proc-mem", "-i", "1", "-c", "0"]]


@pytest.mark.parametrize("answer", [None, proc_mem(), proc_mem(47110, 14711), f"Process name:{PID}"])
def test_beyond_the_eight_rows_and_not_in_its_own_list_is_not_listed(answer):
    found = verdict(DEVICES + FOUR + rows_of(0, 8), proc_mem=answer)
    assert_not_found(found, "not listed")
    assert len(found["asked"]) == 2


def test_many_full_chips_are_not_all_asked():
    found = verdict(DEVICES + FOUR + "".join(rows_of(npu, 8) for npu in range(100)), proc_mem=proc_mem())
    assert_not_found(found, "not listed")
    assert len(found["asked"]) == 9


@pytest.mark.parametrize(("absent", "listed"), [(True, True), (None, True), (False, False)])
def test_a_pid_that_was_listed_before_the_device_was_taken_is_anothers(absent, listed):
    """None: npu-smi could not be asked then."""
    row = "| 0       0                 | 4711          | python3                  | 116                     |\n"
    found = verdict(DEVICES + FOUR + row, absent_before=absent)
    assert (found["pid_found"], found["pid_absent_before"]) == (listed, absent)
    if listed:
        assert_found(found, row)
    else:
        assert_not_found(found, "before the device was taken")


def test_below_eight_rows_and_when_found_nothing_more_is_asked():
    assert verdict(DEVICES + FOUR + rows_of(0, 7))["asked"] == [["info"]]
    assert verdict(DEVICES + FOUR + rows_of(0, 8, PID))["asked"] == [["info"]]


# Tables from the field, where they are at hand


def table_of(path: Path) -> tuple[str, int]:
    """The text below the line that names its source, and the index of the header row, or -1."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)[1:]
    heads = [number for number, line in enumerate(lines) if re.search(r"\|\s*Process id\s*\|", line)]
    return "".join(lines), heads[0] if heads else -1


def row_for(header: str, pid: int, inside: str) -> str:
    """A row with the columns and widths of the header."""
    cells = header.strip().strip("|").split("|")
    values = ["7" if "ID" in cells[0] else "7       0", str(pid), "python3", "116", inside]
    return "|" + "|".join(f" {value}".ljust(len(cell)) for value, cell in zip(values, cells, strict=False)) + "|\n"


@pytest.mark.parametrize("path", REAL_TABLES or [None], ids=lambda path: path.stem if path else "none")
def test_real_tables_with_this_pid_and_without(path):
    if path is None:
        pytest.skip("../shared/npu-smi is not here")
    text, head = table_of(path)
    assert str(PID) not in text
    found = verdict(text)
    assert_not_found(found, "no process table" if head < 0 else "not listed")
    if head < 0:
        return
    lines = text.splitlines(keepends=True)
    five = "container" in lines[head]
    for inside, pid in (("NA", PID), (str(PID), 815)) if five else (("", PID),):
        row = row_for(lines[head], pid, inside)
        for place in (head + 1, len(lines)):
            found = verdict("".join([*lines[:place], row, *lines[place:]]))
            assert_found(found, row, "process id in container" if inside == str(PID) else "process id")
            assert found["npu_id"] == "7"
    listed = re.findall(r"^\|[^|]*\|\s*(\d+)\s*\|", text, re.MULTILINE)
    for pid in set(listed):
        assert verdict(text, int(pid))["pid_found"], pid


# Through the program


@pytest.fixture
def npu_smi_of(cli, tmp_path):
    """What a run states about npu-smi; `quick` shortens the patience with it from 20 s to 1."""

    def state(env: dict[str, str | None], quick: bool = False) -> tuple[dict, str]:
        log_dir = tmp_path / "logs"
        options = {"script": faults.patched(cli.project, "inference.NPU_SMI_TIMEOUT_S = 1")} if quick else {}
        started = time.monotonic()
        result = cli(*support.STANDIN_ARGS, "--hold-seconds", 0, "--log-dir", log_dir, env=env, **options)
        assert evidence.problems(result, log_dir) == []
        assert result.code == 0, result.stderr
        assert time.monotonic() - started < 30
        document = support.read_result(log_dir)
        stated = document["npu_smi"]
        log = (log_dir / "npu_inference.log").read_text()
        assert f"captured={stated['captured']} pid_found={stated['pid_found']}" in log
        assert f"npu_smi pid_absent_before={stated['pid_absent_before']} matched_by={stated['matched_by']}" in log
        assert stated["pid_found"] or "[ready]   npu_smi reason=" in log
        return {**stated, "pid": document["pid"]}, (log_dir / "npu_smi.log").read_bytes().decode("utf-8", "replace")

    return state


def calls_in(log: str) -> list[str]:
    return re.findall(r"^# npu-smi (.*?) at=", log, re.MULTILINE)


@pytest.mark.parametrize(
    ("mode", "matched_by"), [("25", "process id"), ("container", "process id in container")]
)
def test_the_simulated_npu_lists_the_run(npu_smi_of, mode, matched_by):
    found, log = npu_smi_of({"CANNSIM_NPU_SMI": mode})
    assert_found(found, found["pid_line"], matched_by)
    assert found["pid_absent_before"] is True
    assert str(found["pid"]) in found["pid_line"]
    before, after = re.split("^# npu-smi info .*\n", log, flags=re.MULTILINE)[1:]
    assert found["pid_line"] in after and found["pid_line"] not in before
    assert calls_in(log) == ["info", "info"]


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("none", "no process table"),
        ("error", "exit code 1: dcmi module initialize failed. ret is -8005"),
        ("hang", "no answer within"),
    ],
)
def test_why_a_run_is_not_listed_is_told_apart(npu_smi_of, mode, reason):
    found, _ = npu_smi_of({"CANNSIM_NPU_SMI": mode}, quick=True)
    assert_not_found(found, reason)
    assert found["captured"] == (mode == "none")
    assert found["pid_absent_before"] is None


def test_a_file_with_the_pid_in_it_is_found(npu_smi_of, tmp_path):
    (tmp_path / "table").write_text(DEVICES + FOUR + "| 3       1      | @PID@    |   | 1  |\n")
    found, _ = npu_smi_of({"CANNSIM_NPU_SMI": f"file:{tmp_path / 'table'}"})
    assert_found(found, f"| 3       1      | {found['pid']}    |   | 1  |")
    assert (found["npu_id"], found["chip_id"]) == ("3", "1")


def npu_smi_script(directory: Path, source: str) -> dict[str, str | None]:
    """The environment in which npu-smi is this shell script."""
    directory.mkdir()
    script = directory / "npu-smi"
    script.write_text(f"#!/bin/sh\n{source}\n")
    script.chmod(0o755)
    return {"PATH": f"{directory}{os.pathsep}{os.environ['PATH']}"}


def printed(text: str) -> str:
    """A shell command that prints it."""
    return f"cat <<'END'\n{text}END\n"


# Prints a row for the worker: the other child of the process that started this script.
ROW_OF_WORKER = """
for pid in $(cat /proc/$PPID/task/$PPID/children); do
  [ "$pid" = $$ ] || [ "$(cat /proc/$pid/comm)" = cat ] || echo "| 0       0    | $pid    | python3   | 1  |"
done
"""


def test_a_foreign_process_of_the_same_number_is_not_taken_for_this_one(npu_smi_of, tmp_path):
    """In a privileged container npu-smi lists the host's PIDs: ours was there before the device was taken."""
    found, log = npu_smi_of(npu_smi_script(tmp_path / "bin", printed(DEVICES + FOUR) + ROW_OF_WORKER))
    assert log.count(f"| {found['pid']} ") == 2, "the table did not hold the PID"
    assert_not_found(found, "before the device was taken")
    assert found["pid_absent_before"] is False


def test_npu_smi_is_asked_for_its_table_and_for_full_chips_alone(npu_smi_of, tmp_path):
    """It may change the device as well (`npu-smi set`), and must not be asked more than it can bear."""
    rows = "".join(rows_of(npu, 8) for npu in range(3000)).replace("                 ", "").replace("   ", "")
    journal = tmp_path / "calls"
    source = f'echo "$*" >>{journal}\n[ "$*" = info ] || {{ echo no such process; exit; }}\n'
    found, log = npu_smi_of(npu_smi_script(tmp_path / "bin", source + printed(DEVICES + FOUR + rows)))
    asked = journal.read_text().splitlines()
    assert asked == calls_in(log)
    assert asked[:2] == ["info", "info"]
    assert asked[2:] == [f"info -t proc-mem -i {npu} -c 0" for npu in range(8)]
    assert_not_found(found, "not listed")


def test_a_process_beyond_the_eight_rows_is_found_by_a_run(npu_smi_of, tmp_path):
    source = f"""
if [ "$*" = info ]; then
{printed(DEVICES + FOUR + rows_of(0, 8))}else
  for pid in $(cat /proc/$PPID/task/$PPID/children); do
    [ "$pid" = $$ ] || echo "	Process id:$pid  Process name:python3  Process memory(MB):40"
  done
fi
"""
    found, log = npu_smi_of(npu_smi_script(tmp_path / "bin", source))
    assert_found(found, f"Process id:{found['pid']}  Process name:python3  Process memory(MB):40", "proc-mem")
    assert calls_in(log) == ["info", "info", "info -t proc-mem -i 0 -c 0"]


# What a foreign npu-smi does, the reason that is given, and whether waiting for it takes patience.
MISBEHAVIOUR = {
    "floods": ("yes '| 0 0 | 1 | python3 | 1 |'", "more than 1048576 bytes", False),
    "fails, and reads stdin": ("cat; echo broken >&2; exit 3", "exit code 3: broken", False),
    "killed": ("kill -SEGV $$", "-11", False),
    "30,000 rows, and a run of spaces": (
        printed("| npu-smi 25.5.1" + " " * 200_000 + "|\n" + FOUR + "|0 0|17|a|1|\n" * 30_000), "not listed", False),
    "ignores SIGTERM": ("trap '' TERM INT HUP; while :; do echo .; sleep 0.2; done", "no answer", True),
    "closes and stays": ("exec >&- 2>&-; sleep 600", "no answer", True),
}  # fmt: skip


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_a_misbehaving_npu_smi_is_bounded_and_told_apart(npu_smi_of, tmp_path, name):
    source, reason, slow = MISBEHAVIOUR[name]
    found, log = npu_smi_of(npu_smi_script(tmp_path / "bin", source), quick=slow)
    assert_not_found(found, reason)
    assert len(found["reason"]) < 400 and found["reason"] == found["reason"].rstrip(": ")
    assert len(log) < 3 << 20
    assert not processes_with(str(tmp_path / "bin"))


def test_what_npu_smi_has_started_is_ended_also_in_a_session_of_its_own(npu_smi_of, tmp_path):
    table = printed(DEVICES + FOUR + NOBODY)
    child = f"sh -c 'sleep 600; : {tmp_path / 'bin'}'"
    source = f"{child} &\nsetsid {child} &\n{table}"
    found, log = npu_smi_of(npu_smi_script(tmp_path / "bin", source), quick=True)
    assert not found["pid_found"]
    assert "910B4-1" in log
    assert not processes_with(str(tmp_path / "bin"))


def processes_with(words: str, patience: float = 5) -> list[str]:
    """The processes whose command line holds these words."""
    deadline = time.monotonic() + patience
    while True:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if words.encode() in path.read_bytes():
                    found.append(path.parent.name)
            except (FileNotFoundError, ProcessLookupError):
                continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


@pytest.mark.parametrize("kind", ["absent", "not executable"])
def test_a_missing_npu_smi_is_said_to_be_missing(npu_smi_of, tmp_path, kind):
    if shutil.which("npu-smi", path="/usr/local/bin:/usr/local/sbin"):
        pytest.skip("this machine has an npu-smi of its own, where inference.py looks last")
    place = tmp_path / "bin/npu-smi"
    place.parent.mkdir()
    if kind == "not executable":
        place.write_text("#!/bin/sh\n")
        place.chmod(stat.S_IRUSR)
    found, _ = npu_smi_of({"PATH": str(place.parent)})
    assert not found["captured"]
    assert_not_found(found, "it is not on PATH")


def test_an_npu_smi_that_cannot_be_started_has_failed(npu_smi_of, tmp_path):
    place = tmp_path / "bin/npu-smi"
    place.parent.mkdir()
    place.write_bytes(b"\x7fELF and no more")
    place.chmod(0o755)
    found, _ = npu_smi_of({"PATH": str(place.parent)})
    assert_not_found(found, "it cannot be started: Exec format error")
