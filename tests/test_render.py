"""assets/render.py on evidence that inference.py wrote here: its command line, and what it puts on each page."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from harness import checkpoints, support
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image, ImageColor

THREE = ("agent_workflow.png", "npu_device_call.png", "model_result.png")
SESSION = "modelagent_live_session.png"
FILES = ("npu_inference.log", "npu_ready.marker", "npu_smi.log")
AMBER, GOOD, BAD = (ImageColor.getrgb(name) for name in ("#ffc20a", "#0a5cad", "#b23c0a"))
CHECK = "python3 tests/check_evidence.py logs"


class Project:
    """A copy of the project in which a session was recorded and drawn: `render.py --record`, with no hold."""

    def __init__(self, directory: Path, cli: support.Cli) -> None:
        self.path = support.project_copy(directory)
        self.cli = cli
        self.assets = self.path / "assets"
        self.assets.mkdir()
        shutil.copy2(support.PROJECT / "assets/render.py", self.assets)
        shutil.copy2(support.PROJECT / "tests/check_evidence.py", self.path / "tests")
        shutil.rmtree(self.path / "logs", ignore_errors=True)
        self.other_sums = ["0" * 64 + "  inference.py", "1" * 64 + "  README.md"]
        stale = ["2" * 64 + "  assets/model_result.png"]
        (self.path / "SHA256SUMS").write_text("\n".join([self.other_sums[0], *stale, self.other_sums[1]]) + "\n")
        run = f"python3 inference.py {' '.join(support.STANDIN_ARGS)} --hold-seconds 0"
        self.recorded = self.render("--record", run, CHECK)
        self.module = load(self.assets / "render.py")

    def run(self, log_dir: str, *args: object, code: int = 0, **env: str) -> Path:
        args = args if "--checkpoint" in args else (*support.STANDIN_ARGS, *args)
        result = self.cli(*args, "--hold-seconds", 0, "--log-dir", log_dir, env=env, cwd=self.path,
                          script=self.path / "inference.py")  # fmt: skip
        assert result.code == code, result.stderr
        return self.path / log_dir

    def render(self, *args: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "assets/render.py", *map(str, args)]
        done = subprocess.run(
            command, cwd=self.path, env=self.cli.environment(), capture_output=True, text=True, timeout=120
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done

    def refused(self, *args: object) -> str:
        """The one line that says why; nothing is drawn."""
        before = {path: path.read_bytes() for path in self.assets.iterdir()}
        error = self.render(*args, code=1).stderr
        assert {path: path.read_bytes() for path in self.assets.iterdir()} == before
        assert error.startswith("render.py: ")
        assert error.count("\n") == 1
        return error

    def pages(self, logs: Path) -> dict[str, Page]:
        """What the three pictures of a set are made of; of the project's own set, the four."""
        evidence = self.module.read_evidence(logs)
        module = self.module
        pages = [
            drawn(module, lambda draw=draw: draw(evidence))
            for draw in (module.draw_workflow, module.draw_device, module.draw_answer)
        ]
        if logs == self.path / "logs":
            session = (self.assets / "session.txt").read_bytes()
            pages.append(drawn(module, lambda: module.draw_session(evidence, session)))
        return dict(zip((*THREE, SESSION), pages, strict=False))

    def changed(self, name: str, change: Callable[[dict[str, Any], dict[str, str]], None]) -> Path:
        """A copy of logs/ with another result and other files, and the hashes that go with them."""
        directory = self.path / name
        shutil.copytree(self.path / "logs", directory)
        result = support.read_result(directory)
        texts = {file: (directory / file).read_text() for file in FILES}
        change(result, texts)
        for file, text in texts.items():
            (directory / file).write_text(text)
        result["files"] = {file: digest((directory / file).read_bytes()) for file in FILES}
        (directory / "npu_result.json").write_text(json.dumps(result))
        return directory


class Page:
    """A picture, and the texts in it with their places, in points from the top left corner."""

    def __init__(self, page: Any, png: bytes) -> None:
        renderer = FigureCanvasAgg(page.figure).get_renderer()
        self.height = page.figure.get_figheight() * 72
        self.png = png
        self.texts: list[str] = []
        self.places: list[tuple[float, float, float, float]] = []  # left, top, right, bottom
        for text in page.axes.texts:
            if text.get_text().strip():
                box = text.get_window_extent(renderer)
                self.texts.append(text.get_text())
                self.places.append((box.x0 / 2, self.height - box.y1 / 2, box.x1 / 2, self.height - box.y0 / 2))

    def problems(self) -> list[str]:
        """Texts that are cut off, and texts that cross one another; SIMULATED may stand in the blanks of a row."""
        found = []
        for text, (left, top, right, bottom) in zip(self.texts, self.places, strict=True):
            margin = 8 if text.startswith("SIMULATED") else 38
            if left < margin or right > 1040 - margin or top < 4 or bottom > self.height - 4:
                found.append(f"cut off: {text[:60]} {left, top, right, bottom}")
            for other, place in zip(self.texts, self.places, strict=True):
                across = min(right, place[2]) - max(left, place[0])
                along = min(bottom, place[3]) - max(top, place[1])
                if across <= 1 or along <= 3 or place == (left, top, right, bottom):
                    continue
                stamp = text == "SIMULATED" and in_blanks(left, right, other, place)
                if not stamp and other != "SIMULATED":  # which is looked at from its own side
                    found.append(f"crossed: {text[:60]} | {other[:60]}")
        return found


def in_blanks(left: float, right: float, row: str, place: tuple[float, float, float, float]) -> bool:
    cell = (place[2] - place[0]) / len(row)
    first, last = int((left - place[0]) / cell), int((right - place[0]) / cell) + 1
    return first >= 0 and not row[first:last].strip()


def load(path: Path) -> ModuleType:
    sys.dont_write_bytecode = True  # nothing is left beside the program
    spec = importlib.util.spec_from_file_location("render", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawn(module: ModuleType, draw: Callable[[], bytes]) -> Page:
    finished: list[Any] = []
    finish = module.Page.finish

    def noting(page: Any, *args: Any, **options: Any) -> bytes:
        finished.append(page)
        return bytes(finish(page, *args, **options))

    module.Page.finish = noting
    try:
        png = draw()
    finally:
        module.Page.finish = finish
    return Page(finished[0], png)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="module")
def project(cli: support.Cli, tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("render") / "a project", cli)


@pytest.fixture(scope="module")
def good(project: Project) -> dict[str, Page]:
    return project.pages(project.path / "logs")


def test_one_command_records_draws_and_refreshes_its_checksums_alone(project):
    session = (project.assets / "session.txt").read_text()
    assert session.startswith("$ python3 inference.py --checkpoint tests/data/")
    assert f"\n$ {CHECK}\n" in session
    assert session.endswith("VALID\n")
    assert all(line in project.recorded.stdout for line in session.splitlines())
    names = ["session.txt", "render.py", *THREE, SESSION]
    assert sorted(path.name for path in project.assets.iterdir()) == sorted(names)
    lines = (project.path / "SHA256SUMS").read_text().splitlines()
    own = [f"{digest((project.assets / name).read_bytes())}  assets/{name}" for name in names]
    assert set(own) < set(lines)
    assert [line for line in lines if "  logs/" not in line and line not in own] == project.other_sums
    assert len(lines) == len({line[66:] for line in lines})


def test_the_same_evidence_gives_the_same_bytes(project, good, monkeypatch, tmp_path):
    before = {path.name: path.read_bytes() for path in project.assets.iterdir()}
    sums = (project.path / "SHA256SUMS").read_bytes()
    assert {name: page.png for name, page in good.items()} == {name: before[name] for name in (*THREE, SESSION)}
    # Another user: other settings of matplotlib, another hash seed, another locale.
    settings = "savefig.dpi: 55\nfont.size: 30\ntext.hinting: none\npatch.antialiased: False\n"
    (tmp_path / "matplotlibrc").write_text(settings)
    changes = {"MATPLOTLIBRC": str(tmp_path), "PYTHONHASHSEED": "7", "LC_ALL": "C"}
    environment = project.cli.environment
    monkeypatch.setattr(project.cli, "environment", lambda: environment(changes))
    project.render()
    assert {path.name: path.read_bytes() for path in project.assets.iterdir()} == before
    assert (project.path / "SHA256SUMS").read_bytes() == sums


def test_pictures_show_the_values_of_the_evidence(project, good):
    result = support.read_result(project.path / "logs")
    assert all(page.problems() == [] for page in good.values())
    texts = {name: page.texts for name, page in good.items()}
    for page in texts.values():
        assert "✓ SUCCESS · exit code 0" in page
        assert not {"[]", '["npu:0"]', "['npu:0']"} & set(page)

    for name in ("verify", "npu", "load", "ready", "forward", "final"):
        assert name in texts[THREE[0]]
        assert f"{result['stages'][name]:.3f} s" in texts[THREE[0]]

    device = texts[THREE[1]]
    assert device.count(str(result["pid"])) == 4  # the log, the JSON, the marker, npu-smi
    assert {"absent", "none", "npu:0", result["versions"]["cann"], result["npu_smi"]["pid_line"]} <= set(device)
    assert any("invents the watts, the degrees" in text for text in device)

    answer = texts[THREE[2]]
    numbers = (result["value"][0][0], result["log_prob"][0], result["entropy"][0])
    assert {f"{number:.6f}" for number in numbers} <= set(answer)
    assert {f"{result['probs'][0][0]:.6f} ◀ chosen", f"{result['probs'][0][1]:.6f}"} <= set(answer)
    for name, errors in result["reference"]["outputs"].items():
        assert {name, f"{errors['max_abs_error']:.2e}", f"{errors['max_rel_error_percent']:.2e} %"} <= set(answer)
    assert set(result["kernels"]) <= set(answer)
    launches = f"{sum(result['kernels'].values())} launches of {len(result['kernels'])} kinds"
    assert any(launches in text for text in answer)

    session = texts[SESSION]
    assert {f"$ {CHECK}", "VALID", f"[inference] pid               : {result['pid']}"} <= set(session)
    for name, page in texts.items():  # the hashes of what it was drawn from
        assert digest((project.path / "logs/npu_result.json").read_bytes()) in page, name


def test_a_simulated_run_says_so_wherever_one_cuts(project, good):
    for name, page in good.items():
        assert page.texts.count("SIMULATED") <= 40, name  # none across another text: `problems` has looked
        with Image.open(project.assets / name) as image:
            pixels = np.asarray(image)[::2, ::2].astype(np.int16)  # one of each point
        height, width = pixels.shape[:2]
        stamped = np.zeros((height, width), bool)
        for colour in (project.module.STAMP, project.module.SCREEN_STAMP, project.module.AMBER):
            stamped |= (abs(pixels - ImageColor.getrgb(colour)) <= 3).all(axis=2)
        parts = [(60, top, width - 60, top + 240) for top in range(0, height - 240, 20)]
        corners = [(left, top) for left in range(0, width - 600, 40) for top in range(0, height - 350, 40)]
        parts += [(left, top, left + 600, top + 350) for left, top in corners if name != SESSION]
        sums = np.pad(stamped.astype(np.int32).cumsum(axis=0).cumsum(axis=1), ((1, 0), (1, 0)))
        for left, top, right, bottom in parts:
            found = sums[bottom, right] - sums[top, right] - sums[bottom, left] + sums[top, left]
            assert found > 35, (name, left, top, right, bottom)
        band = (pixels == AMBER).all(axis=2).mean(axis=1)
        assert band[:40].min() > 0.5  # one band, at the top
        assert band[40:].max() < 0.5


def test_a_run_on_a_device_has_no_band_and_no_invented_watts(project):
    def physical(result: dict[str, Any], texts: dict[str, str]) -> None:
        name = result["npu_device_name"].removesuffix(" (simulated)")
        result.update(simulated=False, simulator=None, npu_device_name=name, device_nodes=["/dev/davinci0"])
        log = texts["npu_inference.log"].replace(" (simulated)", "")
        log = log.replace("device_nodes=[]", "device_nodes=['/dev/davinci0']")
        texts["npu_inference.log"] = "".join(f"{line}\n" for line in log.splitlines() if "SIMULATED" not in line)
        texts["npu_ready.marker"] = texts["npu_ready.marker"].replace("SIMULATED=1", "SIMULATED=0")
        smi = texts["npu_smi.log"]  # the last line of each output is the simulator's
        note = next(line for line in smi.splitlines(keepends=True) if line.startswith("cannsim: "))
        smi = re.sub(r"bytes=(\d+)", lambda size: f"bytes={int(size[1]) - len(note)}", smi.replace(note, ""))
        texts["npu_smi.log"] = smi

    pages = project.pages(project.changed("physical", physical))
    for name, page in pages.items():
        assert page.problems() == []
        assert not any("simulat" in text.lower() for text in page.texts), name
    assert "/dev/davinci0" in pages[THREE[1]].texts


def test_a_failed_run_is_drawn_as_failed(project, tmp_path):
    wrong = project.run("wrong", code=6, CANNSIM_CORRUPT="exec:aclnnAddmm:*")
    early = project.run("early", "--checkpoint", "nothing.zip", code=3)
    for logs, stage, code, passed in ((wrong, "forward", 6, 4), (early, "verify", 3, 0)):
        pages = project.pages(logs)
        for page in pages.values():
            assert page.problems() == []
            assert f"✗ FAILED · exit code {code}" in page.texts
            assert any(text.startswith(f"✗ stage {stage} · ") for text in page.texts)
        workflow = pages[THREE[0]].texts
        assert (workflow.count("ok"), workflow.count("failed"), workflow.count("not run")) == (passed, 1, 5 - passed)
    project.render("--logs", early, "--out", tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {name: pages[name].png for name in THREE}
    with Image.open(tmp_path / THREE[0]) as image:
        counts = {colour: count for count, colour in image.getcolors(1 << 24)}
    assert counts[BAD] > 10_000
    assert GOOD not in counts


def test_evidence_that_does_not_hold_together_is_refused(project, tmp_path):
    def value(result: dict[str, Any], texts: dict[str, str]) -> None:
        result["value"] = [[500.0]]

    assert "FAIL" in project.refused("--logs", project.changed("other value", value))
    changed = project.changed("other log", lambda result, texts: None)
    with open(changed / FILES[0], "a") as log:
        log.write("[forward] one more line\n")
    assert "FAIL" in project.refused("--logs", changed)
    assert "nowhere" in project.refused("--logs", tmp_path / "nowhere")
    assert project.render("--nonsense", code=2).stdout == ""


def test_the_session_is_that_of_the_run(project):
    session = (project.assets / "session.txt").read_text()
    evidence = project.module.read_evidence(project.path / "logs")

    def refused(text: str) -> str:
        with pytest.raises(project.module.Refused) as caught:
            project.module.draw_session(evidence, text.encode())
        return str(caught.value)

    pid = evidence.result["pid"]
    assert "pid               : 1'" in refused(session.replace(f" : {pid}\n", " : 1\n"))
    assert f"pid               : {pid}'" in refused(session.replace(f"[inference] pid               : {pid}\n", ""))
    assert "value=[[500.0]]" in refused(session.replace(CHECK, "true\n[forward] value=[[500.0]]"))
    assert "VALID" in refused(session.replace("\nVALID\n", "\n"))
    assert "session.txt" in refused("")


def test_a_session_of_any_length_keeps_its_shape(project):
    evidence = project.module.read_evidence(project.path / "logs")
    session = (project.assets / "session.txt").read_text()
    noise = "\x1b[31mred\x07 \u202ereversed 中文 \U0001f600" + "z" * 9000 + "\n"
    long = session.replace("[final]", "".join(f"{line}\n" for line in range(5000)) + noise * 30 + "[final]", 1)
    short = f"[inference] pid               : {evidence.result['pid']}\nVALID"
    for text in (long, short):
        page = drawn(project.module, lambda text=text: project.module.draw_session(evidence, text.encode()))
        assert page.problems() == []
        assert 0.5 <= page.height / 1040 <= 2
        assert any("more lines" in row for row in page.texts) == (text is long)


def test_hostile_text_neither_ends_the_drawing_nor_leaves_the_picture(project):
    name = "x$\\nosuch$\x1b[31m\a\u202ereversed\u0301中\U0001f600 " + "long" * 50
    hostile = project.run("hostile", "--checkpoint", name, "--observation", "[" + "1e30," * 500 + "0]", code=3)
    (project.path / "table.txt").write_bytes(
        b"\x1b]0;title\x07\xff\xfe\x00\r\n+---+\n| NPU Chip | Process id | Process name | Process memory(MB) |\n"
        b"| 0 0 | @PID@ | \xe2\x80\xae\xe4\xb8\xad\x1b[7m | 1 |\n" + b"y" * 20_000 + b"\n" * 300
        + b"# npu-smi info at=2000 bytes=5 outcome=exit code 0\nwrong\n"
    )  # fmt: skip
    table = project.run("table", CANNSIM_NPU_SMI=f"file:{project.path / 'table.txt'}")
    for logs in (hostile, table):
        for page in project.pages(logs).values():
            assert page.problems() == []
            assert 300 < page.height < 2000
            assert all(character.isprintable() for text in page.texts for character in text)
            assert "$ npu-smi info   at 2000" not in page.texts


def test_a_gaussian_policy_and_more_rows_than_are_drawn(project, tmp_path):
    path = checkpoints.make(checkpoints.KINDS["box"], tmp_path / "policy.zip")
    rows = json.dumps([[0.5 * row, 1.0, -1.0, 0.25] for row in range(9)])
    logs = project.run("box", "--checkpoint", path, "--sha256", digest(path.read_bytes()), "--observation", rows)
    pages = project.pages(logs)
    assert all(page.problems() == [] for page in pages.values())
    answer = pages[THREE[2]].texts
    headings = [text for text in answer if text.startswith("Observation")]
    assert headings == [f"Observation {row} of 9" for row in (1, 2, 3)]
    result = support.read_result(logs)
    mean, std = result["mean"][0][0], result["std"][0][0]
    assert any(text.startswith(f"{mean:+.4f} ± {std:.4f}, ") for text in answer)
