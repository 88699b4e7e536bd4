"""assets/render.py, through its command line, on evidence that inference.py wrote here."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import checkpoints, support
from PIL import Image, ImageColor

THREE = ("agent_workflow.png", "npu_device_call.png", "model_result.png")
SESSION = "modelagent_live_session.png"
FILES = ("npu_inference.log", "npu_ready.marker", "npu_smi.log")
AMBER, PAGE, GOOD, BAD = (ImageColor.getrgb(name) for name in ("#ffc20a", "#f3f5f8", "#0a5cad", "#b23c0a"))


class Project:
    """A copy of the project with the evidence of a good run in logs/."""

    def __init__(self, directory: Path, cli: support.Cli) -> None:
        self.path = support.project_copy(directory)
        self.cli = cli
        shutil.rmtree(self.path / "logs", ignore_errors=True)
        (self.path / "assets").mkdir()
        shutil.copy2(support.PROJECT / "assets/render.py", self.path / "assets")
        (self.path / "SHA256SUMS").write_text("")
        self.session = self.run("logs").stdout  # what a pipe records

    def run(self, log_dir: str, *args: object, code: int = 0, **env: str) -> support.Result:
        args = (*support.STANDIN_ARGS, "--hold-seconds", 0, *args) if "--checkpoint" not in args else args
        result = self.cli(*args, "--log-dir", log_dir, env=env, cwd=self.path, script=self.path / "inference.py")
        assert result.code == code, result.stderr
        return result

    def render(self, *args: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "assets/render.py", *map(str, args)]
        done = subprocess.run(
            command, cwd=self.path, env=support.clean_environment(), capture_output=True, text=True, timeout=120
        )
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done

    def changed(self, name: str, **changes: Any) -> Path:
        """A copy of logs/ with another result, and the log and the hashes that go with it."""
        directory = self.path / name
        shutil.copytree(self.path / "logs", directory)
        write_result(directory, support.read_result(directory) | changes)
        return directory


def write_result(directory: Path, result: dict[str, Any]) -> None:
    result["files"] = {name: digest(directory / name) for name in FILES if (directory / name).exists()}
    (directory / "npu_result.json").write_text(json.dumps(result))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def project(cli, tmp_path_factory):
    return Project(tmp_path_factory.mktemp("render") / "project", cli)


def colours(path: Path) -> dict[tuple[int, ...], int]:
    with Image.open(path) as image:
        assert image.mode == "RGB"
        assert image.width == 2080
        assert not image.info  # no time, no text
        return {colour: count for count, colour in image.getcolors(1 << 24)}


def test_pictures_are_the_same_again_and_only_their_checksums_change(project):
    others = ["0" * 64 + "  assets/render.py", digest(project.path / "inference.py") + "  inference.py"]
    sums = project.path / "SHA256SUMS"
    logs = [f"{digest(path)}  logs/{path.name}" for path in sorted((project.path / "logs").iterdir())]
    stale = ["1" * 64 + f"  assets/{name}" for name in THREE[1:]]
    sums.write_text("".join(line + "\n" for line in [others[0], *stale, others[1], *logs]))
    (project.path / "session.txt").write_text(project.session)
    project.render("--session", "session.txt")
    drawn = {name: (project.path / "assets" / name).read_bytes() for name in (*THREE, SESSION)}
    lines = sums.read_text().splitlines()
    expected = {f"{hashlib.sha256(data).hexdigest()}  assets/{name}" for name, data in drawn.items()}
    assert [line for line in lines if line not in expected] == [*others, *logs]
    assert set(lines) >= expected
    assert len(lines) == len(set(lines))

    before = sums.read_bytes()
    project.render("--session", "session.txt")
    assert {name: (project.path / "assets" / name).read_bytes() for name in drawn} == drawn
    assert sums.read_bytes() == before
    assert sorted(path.name for path in (project.path / "assets").iterdir()) == sorted([*drawn, "render.py"])
    # Elsewhere: the same pictures, no checksums, and none of the session where none is given.
    done = project.render("--out", "elsewhere")
    assert {path.name: path.read_bytes() for path in (project.path / "elsewhere").iterdir()} == {
        name: drawn[name] for name in THREE
    }
    assert sums.read_bytes() == before
    assert done.stdout.count("drawn") == 3


def test_a_simulated_run_says_so_wherever_one_cuts(project):
    project.render("--out", "simulated")
    for name in THREE:
        with Image.open(project.path / "simulated" / name) as image:
            pixels = image.load()
            for y in (10, 80, image.height - 10, image.height - 80):  # both bands
                assert pixels[600, y] == AMBER
            inside = image.crop((0, 96, image.width, image.height - 96))
        page = [colour for count, colour in inside.getcolors(1 << 24) if colour != PAGE]
        assert page
        for left in (0, 2010):  # the margins have nothing but the page and the watermark
            for top in range(0, inside.height - 400, 400):
                tile = inside.crop((left, top, left + 70, top + 400))
                assert len(tile.getcolors(1 << 20)) > 1, (name, left, top)
        for left in range(80, 1500, 500):
            for top in range(0, inside.height - 400, 400):
                tile = inside.crop((left, top, left + 500, top + 400)).quantize(256).convert("RGB")
                assert any(r - b > 8 and r > 150 for _, (r, _g, b) in tile.getcolors(256)), (name, left, top)


def test_a_run_on_a_device_has_no_band(project):
    name = support.read_result(project.path / "logs")["npu_device_name"].removesuffix(" (simulated)")
    directory = project.changed("physical", simulated=False, simulator=None, npu_device_name=name)
    log = (directory / FILES[0]).read_text().replace(" (simulated)", "")
    (directory / FILES[0]).write_text("".join(x + "\n" for x in log.splitlines() if "SIMULATED" not in x))
    marker = directory / FILES[1]
    marker.write_text(marker.read_text().replace("SIMULATED=1", "SIMULATED=0"))
    write_result(directory, support.read_result(directory))
    session = project.path / "physical.txt"
    session.write_text((directory / FILES[0]).read_text())
    project.render("--logs", directory, "--session", session, "--out", "plain")
    for picture in (*THREE, SESSION):
        found = colours(project.path / "plain" / picture)
        assert AMBER not in found
        assert found[PAGE] > 100_000
        assert GOOD in found
        assert BAD not in found


def test_a_failed_run_is_drawn_as_failed(project):
    project.run("failed", code=6, CANNSIM_FAIL="exec:aclnnAddmm")
    project.render("--logs", "failed", "--out", "of-failed")
    for name in THREE:
        found = colours(project.path / "of-failed" / name)
        assert found[BAD] > 10_000  # the badge and the card of the failure
        assert AMBER in found
    # Before anything was measured: every stage is yet to come.
    project.run("usage", "--observation", "nothing", code=2)
    project.render("--logs", "usage", "--out", "of-usage")
    found = colours(project.path / "of-usage/agent_workflow.png")
    assert BAD in found
    assert GOOD not in found


def test_evidence_that_does_not_hold_together_is_refused(project, tmp_path):
    def refused(*args: object) -> str:
        error = project.render("--out", tmp_path / "out", *args, code=1).stderr
        assert error.startswith("render.py: ")
        assert error.count("\n") == 1
        assert not (tmp_path / "out").exists()
        return error

    assert "value" in refused("--logs", project.changed("other-value", value=[[500.0]]))
    assert "FAIL" in refused("--logs", project.changed("other-pid", pid=1))
    changed = project.changed("changed-log")
    with open(changed / FILES[0], "a") as log:
        log.write("[forward] one more line\n")
    assert "FAIL files" in refused("--logs", changed)
    (changed / "npu_result.json").write_text('{"exit_code": 0')
    assert "npu_result.json" in refused("--logs", changed)
    (changed / "npu_result.json").unlink()
    assert "no npu_result.json" in refused("--logs", changed)
    assert "no npu_result.json" in refused("--logs", tmp_path / "nowhere")
    assert "nothing.txt" in refused("--session", tmp_path / "nothing.txt")
    other = tmp_path / "other.txt"
    other.write_text("NPU_READY_PID=1\n")
    assert "not the session of this run" in refused("--session", other)
    assert project.render("--nonsense", code=2).stdout == ""


def test_hostile_text_neither_ends_the_drawing_nor_leaves_the_picture(project):
    name = "x\x1b[31m\a\u202ereversed\u0301\u4e2d\U0001f600 " + "long" * 900
    project.run("hostile", "--checkpoint", name, "--observation", "[" + "1e30," * 500 + "0]", code=3)
    (project.path / "table").write_bytes(
        b"\x1b]0;title\x07\xff\xfe\x00\r\n+---+\n| NPU Chip | Process id | Process name | Process memory(MB) |\n"
        b"| 0 0 | @PID@ | \xe2\x80\xae\xe4\xb8\xad\x1b[7m | 1 |\n" + b"y" * 20_000 + b"\n" * 300
    )
    smi = project.path / "bin/npu-smi"
    smi.parent.mkdir()
    smi.write_text(f'#!/bin/sh\nLC_ALL=C exec sed "s/@PID@/$PPID/" "{project.path}/table"\n')
    smi.chmod(0o755)
    project.run("table-run", PATH=f"{smi.parent}:/usr/bin:/bin")
    assert support.read_result(project.path / "table-run")["npu_smi"]["pid_found"]
    for logs in ("hostile", "table-run"):
        project.render("--logs", logs, "--out", f"of-{logs}")
        for picture in THREE:
            with Image.open(project.path / f"of-{logs}" / picture) as image:
                assert 1000 < image.height < 8000
                if logs == "hostile":  # nothing reaches the margins; it failed before it had a device
                    for left in (0, image.width - 78):
                        assert len(image.crop((left, 0, left + 78, image.height)).getcolors()) == 1


def test_a_gaussian_policy_and_more_observations_than_are_drawn(project, tmp_path):
    path = checkpoints.make(checkpoints.KINDS["box"], tmp_path / "box.zip")
    rows = json.dumps([[0.5 * row, 1.0, -1.0, 0.25] for row in range(9)])
    project.run("box", "--checkpoint", path, "--sha256", digest(path), "--hold-seconds", 0, "--observation", rows)
    project.render("--logs", "box", "--out", "of-box")
    assert GOOD in colours(project.path / "of-box/model_result.png")


def drawn_session(project: Project, directory: Path, text: str) -> Image.Image:
    """The picture of a transcript, without the checksums at its end."""
    directory.mkdir()
    (directory / "session.txt").write_bytes(text.encode())
    project.render("--session", directory / "session.txt", "--out", directory)
    with Image.open(directory / SESSION) as image:
        return image.crop((0, 0, image.width, image.height - 320)).copy()


def test_a_transcript_shows_what_its_user_saw(project, tmp_path):
    run = "".join(line + "\n" for line in project.session.splitlines() if len(line) < 100)
    typed = [
        'Script started on 2025-01-02 03:04:05+00:00 [TERM="xterm" COLUMNS="100" LINES="40"]\n',
        "\x1b]0;title\x07\x1b[?2004h$ echoo\b\x1b[K " + "a" * 93 + " \rbb\r\n\x1b[?2004l\r" + run.replace("\n", "\r\n"),
        "rows 10%\rrows 100%\r\nabcd\x1b[2D\x1b[P!\x1b[K\r\nleft\x1b[5Gright\x1b[2K\rgone\r\n\tdone\x1b(B\r\n",
        'Script done on 2025-01-02 03:04:06+00:00 [COMMAND_EXIT_CODE="0"]\n',
    ]
    plain = f"$ echo {'a' * 93}\nbb\n{run}rows 100%\nab!\ngone\n        done\n"
    first = drawn_session(project, tmp_path / "typed", "".join(typed))
    assert first.tobytes() == drawn_session(project, tmp_path / "plain", plain).tobytes()

    coloured = drawn_session(project, tmp_path / "coloured", run + "\x1b[1;91mred\x1b[0m \x1b[38;5;9mno\x1b[m\n")
    assert ImageColor.getrgb("#ffa994") in {colour for _, colour in coloured.getcolors(1 << 24)}

    long = drawn_session(project, tmp_path / "long", run + "$ seq\n" + "\n".join(map(str, range(5000))) + "z" * 9000)
    assert long.height < 5000  # lines left out, with a mark
