#!/usr/bin/env python3
"""Draw the pictures of the model page from the evidence of one run, and from nothing else.

    python3 assets/render.py [--record] [--logs DIR] [--out DIR]

  agent_workflow.png           the stages of the run in order: outcome, time, and what each established
  npu_device_call.png          the device, and npu-smi's table with the row of this process marked
  model_result.png             the answer, its error against the float64 reference, and the kernels that ran
  modelagent_live_session.png  the terminal session: the run, and the verdict of tests/check_evidence.py

It needs the packages of requirements.txt. The session is assets/session.txt, and is drawn with the project's own logs.
--record makes it, and the run: it runs tests/simulate.sh --hold-seconds 8 and python3 tests/check_evidence.py logs and
keeps what they print. On a machine with an NPU, name the commands:

    python3 assets/render.py --record 'python3 inference.py --hold-seconds 8' 'python3 tests/check_evidence.py logs'

Evidence that tests/check_evidence.py calls INVALID is refused. A failed run is drawn as failed. A simulated one says so
in a band and in every part of the picture. The same evidence gives the same bytes, and the lines of the pictures in
SHA256SUMS follow. Exit codes: 0 drawn, 1 refused, 2 usage.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import os
import re
import shlex
import struct
import subprocess
import sys
import textwrap
import unicodedata
import zlib
from pathlib import Path
from typing import Any, NamedTuple

try:
    import matplotlib
    import numpy
    from matplotlib import font_manager
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Circle, FancyBboxPatch
except ImportError:
    sys.exit("render.py: matplotlib is missing; python3 -m pip install -r requirements.txt brings it")

PROJECT = Path(__file__).resolve().parent.parent
ASSETS = PROJECT / "assets"
LOGS = PROJECT / "logs"
TRANSCRIPT = ASSETS / "session.txt"
COMMANDS = ["tests/simulate.sh --hold-seconds 8", "python3 tests/check_evidence.py logs"]
RESULT, LOG, MARKER, SMI = "npu_result.json", "npu_inference.log", "npu_ready.marker", "npu_smi.log"
STAGES = ("verify", "npu", "load", "ready", "forward", "final")  # of every run; more may be recorded

# Blue and vermilion differ for every kind of colour vision, and no meaning rests on colour alone.
PAGE, CARD, EDGE, TRACK = "#f3f5f8", "#ffffff", "#d3dbe4", "#e6ebf1"
INK, MUTED, FAINT = "#16212c", "#52606d", "#8793a0"
GOOD, GOOD_TINT, BAD, BAD_TINT = "#0a5cad", "#e4eefa", "#b23c0a", "#fdeee5"
SCREEN, SCREEN_TEXT, SCREEN_DIM, SCREEN_BAD, MARKED = "#101a24", "#d6dee7", "#8fa0b1", "#ff9b7d", "#1f6fd0"
AMBER, STAMP, SCREEN_STAMP = "#ffc20a", "#d6b86e", "#74622a"
BAND = "SIMULATED NPU · nothing in this run touched a physical NPU"

# Lengths are in points, from the top left corner. A point is two pixels, so that half size is one pixel a point.
WIDTH, MARGIN, PADDING, DPI = 1040.0, 40.0, 24.0, 144
LEFT, RIGHT = MARGIN + PADDING, WIDTH - MARGIN - PADDING  # of what is in a card
CONTENT = RIGHT - LEFT

# matplotlib brings these fonts, so that a picture does not depend on those of the machine. Evidence is set in the
# monospaced one, so that its length says how wide it gets.
FONTS = Path(matplotlib.get_data_path(), "fonts/ttf")
SANS, BOLD, MONO, MONO_BOLD = (
    str(FONTS / f"DejaVu{name}.ttf") for name in ("Sans", "Sans-Bold", "SansMono", "SansMono-Bold"))
CELL = 1233 / 2048  # the width of a monospaced character at one point


class Refused(Exception):
    """Input that cannot be drawn. The text is the one line that the user reads."""


# ---- evidence -------------------------------------------------------------------------------------------------------


class Evidence(NamedTuple):
    result: dict[str, Any]
    files: dict[str, bytes]
    verdict: str  # VALID, or FAILED RUN

    def text(self, name: str) -> str:
        return self.files.get(name, b"").decode("utf-8", "replace")

    def part(self, name: str) -> dict[str, Any]:
        """An object of the result; an empty one where nothing was measured."""
        return self.result[name] or {}

    @property
    def failed(self) -> bool:
        return self.verdict != "VALID" or self.result["exit_code"] != 0

    @property
    def simulated(self) -> bool:
        """Whether any of the files says so. A run that failed before it looked for a device says nothing."""
        return (bool(self.result["simulated"] or self.result["simulator"])
                or "[npu]     SIMULATED" in self.text(LOG) or "SIMULATED=1" in self.text(MARKER))


def read_evidence(directory: Path) -> Evidence:
    verdict = check(directory)
    paths = [directory / name for name in (RESULT, LOG, MARKER, SMI)]
    files = {path.name: path.read_bytes() for path in paths if path.exists()}
    evidence = Evidence(json.loads(files[RESULT]), files, verdict)
    for name, sha256 in evidence.part("files").items():
        if name in files and hashlib.sha256(files[name]).hexdigest() != sha256:
            raise Refused(f"{directory}: {name} changed while it was checked; wait for the run to end")
    return evidence


def check(directory: Path) -> str:
    """The verdict of tests/check_evidence.py; refuse what is not the consistent evidence of a run, good or failed."""
    command = [sys.executable, str(PROJECT / "tests/check_evidence.py"), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    verdict = done.stdout.rstrip("\n").split("\n")[-1]
    if (done.returncode, verdict) in ((0, "VALID"), (1, "FAILED RUN")):
        return verdict
    failures = [line for line in done.stdout.split("\n") if line.startswith("FAIL ")]
    reason = printable("; ".join(failures[:3]) or done.stderr.strip())[:600]
    raise Refused(f"{directory}: tests/check_evidence.py refuses it: {reason or f'exit code {done.returncode}'}")


# ---- text: what can be printed, and what fits -----------------------------------------------------------------------


@functools.cache
def printable_character(character: str) -> str:
    """The character, or its escape where it has no glyph or would act on its neighbours."""
    acts = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Mn", "Me")
    if acts or not all(font_manager.get_font(face).get_char_index(ord(character)) for face in (MONO, MONO_BOLD)):
        return character.encode("unicode_escape").decode()
    return character


def printable(text: str) -> str:
    return "".join(map(printable_character, text[:4000])) + ("…" if len(text) > 4000 else "")


def shown(value: Any) -> str:
    """A value of the JSON as a person reads it; a dash for what was not measured."""
    if value is None:
        return "-"
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return printable(", ".join(value)) or "none"
    return printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def number(value: float) -> str:
    return f"{value:.6f}" if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:.4g}"


def flat(value: Any) -> list[Any]:
    return [item for part in value for item in flat(part)] if isinstance(value, list) else [value]


def fit(text: str, size: float, room: float) -> str:
    """Monospaced text, cut with a mark when it is wider than the room."""
    columns = int(room / (size * CELL))
    return text if len(text) <= columns else text[:max(0, columns - 1)] + "…"


def wrap(text: str, size: float, room: float, most: int, indent: str = "") -> list[str]:
    """Monospaced text in lines that fit into the room; the last of `most` is cut with a mark."""
    return textwrap.wrap(text, int(room / (size * CELL)), max_lines=most, placeholder=" …", subsequent_indent=indent,
                         break_on_hyphens=False) or [""]


def elided(lines: list[str], most: int, keep: int = 0) -> list[tuple[int, str]]:
    """At most so many lines with their numbers: the first, the last, those around `keep`. -1: what is left out here."""
    if len(lines) <= most:
        return list(enumerate(lines))
    part = (most - 2) // 3
    ranges = (range(part), range(keep - part // 2, keep + part // 2), range(len(lines) - part, len(lines)))
    out: list[tuple[int, str]] = []
    kept = sorted({index for several in ranges for index in several if 0 <= index < len(lines)})
    for last, index in zip([-1, *kept], kept, strict=False):
        if index > last + 1:
            out.append((-1, f"… {index - last - 1} more lines …"))
        out.append((index, lines[index]))
    return out


# ---- page: cards below each other; how tall it gets is known at the end ---------------------------------------------


class Page:
    def __init__(self, title: str, evidence: Evidence) -> None:
        self.evidence = evidence
        self.figure = Figure(dpi=DPI, facecolor=PAGE)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_axis_off()
        self.y = 0.0  # the next free height
        if evidence.simulated:
            self.box(0, 0, WIDTH, 40, AMBER, radius=0)
            self.text(WIDTH / 2, 27, BAND, BOLD, 18, anchor="center")
            self.y = 40
        self.header(title)
        if evidence.failed:
            self.failure()

    def box(self, left: float, top: float, wide: float, tall: float, fill: str, edge: str = "",
            radius: float = 3) -> None:
        style = f"round,pad=0,rounding_size={min(radius, wide / 2, tall / 2)}" if radius else "square,pad=0"
        self.axes.add_patch(FancyBboxPatch((left, top), wide, tall, boxstyle=style, facecolor=fill, lw=1 if edge else 0,
                                           edgecolor=edge or "none", zorder=1 + len(self.axes.patches) * 1e-4))

    def disc(self, x: float, y: float, radius: float, fill: str, edge: str) -> None:
        self.axes.add_patch(Circle((x, y), radius, facecolor=fill, edgecolor=edge, zorder=2.5))

    def text(self, x: float, y: float, text: str, face: str = SANS, size: float = 14, fill: str = INK,
             anchor: str = "left", rotation: float = 0) -> None:
        """One line on the baseline y."""
        self.axes.text(x, y, text, font_properties=font_manager.FontProperties(fname=face, size=size), color=fill,
                       ha=anchor, va="baseline", rotation=rotation, rotation_mode="anchor", parse_math=False)

    def rule(self, left: float, y: float, wide: float, fill: str = CARD) -> None:
        """A line across; that of a simulated run says so twice."""
        self.box(left, y, wide, 1, EDGE, radius=0)
        for x in (left + wide * 0.27, left + wide * 0.77) if self.evidence.simulated else ():
            self.box(x - 42, y, 84, 1, fill, radius=0)
            self.text(x, y + 4, "SIMULATED", BOLD, 10.5, STAMP, "center")

    def header(self, title: str) -> None:
        result, top = self.evidence.result, self.y + 32
        colour, mark = (BAD, "✗ FAILED") if self.evidence.failed else (GOOD, "✓ SUCCESS")
        badge = f"{mark} · exit code {result['exit_code']}"
        self.box(WIDTH - MARGIN - 250, top, 250, 38, colour, radius=10)
        self.text(WIDTH - MARGIN - 125, top + 24.5, badge, BOLD, 15, CARD, "center")
        self.text(MARGIN, top + 30, title, BOLD, 28)
        subject = shown(result["model_id"] or self.evidence.part("checkpoint").get("path"))
        device, moment = shown(result["npu_device_name"] or "no device"), shown(result["started_at"])[:19]
        line = f"{fit(subject, 13, 400)} · {fit(device, 13, 230)} · {moment.replace('T', ' ')} UTC"
        self.text(MARGIN, top + 62, line, MONO, 13, MUTED)
        self.text(WIDTH - MARGIN, top + 62, "SIMULATED" * self.evidence.simulated, BOLD, 13, STAMP, "right")
        self.y = top + 84

    def card(self, height: float, title: str = "", note: str = "", fill: str = CARD, edge: str = EDGE) -> float:
        """A card across the page, below the last one. Returns the top of its content."""
        top = self.y
        self.box(MARGIN, top, WIDTH - 2 * MARGIN, height, fill, edge, radius=10)
        self.y = top + height + 20
        if not title:
            return top + 20
        self.text(LEFT, top + 32, title, BOLD, 16)
        self.text(RIGHT, top + 31, fit(note, 12, CONTENT - 330), MONO, 12, MUTED, "right")
        self.rule(LEFT, top + 46, CONTENT)
        return top + 60

    def failure(self) -> None:
        """The card that says how the run failed."""
        error = {name: shown(value) for name, value in self.evidence.part("error").items()}
        message = wrap(error["message"], 13, CONTENT, 6)
        hint = wrap(f"What to do: {error['hint']}", 13, CONTENT, 4)
        y = self.card(66 + 21 * (len(message) + len(hint)), fill=BAD_TINT, edge=BAD) + 16
        self.text(LEFT, y, fit(f"✗ stage {error['stage']} · {error['type']}", 17, CONTENT), MONO_BOLD, 17, BAD)
        for index, line in enumerate([*message, *hint]):
            self.text(LEFT, y + 30 + 21 * index, line, MONO, 13, INK if index < len(message) else MUTED)

    def grid(self, title: str, facts: dict[str, Any], names: str) -> None:
        """A card of names and values in three columns."""
        y = self.card(70 + 54 * math.ceil(len(names.split()) / 3), title)
        for index, name in enumerate(names.split()):
            left, top, value = LEFT + index % 3 * CONTENT / 3, y + index // 3 * 54, facts[name]
            if index and index % 6 == 0:
                self.rule(LEFT, top - 9, CONTENT)
            self.text(left, top + 13, name, MONO, 13, MUTED)
            self.text(left, top + 33, fit(shown(value), 15, CONTENT / 3 - 16), MONO_BOLD, 15,
                      BAD if value is False else INK)

    def screen(self, title: str, size: float, rows: list[tuple[str, str]], notes: list[str]) -> None:
        """A terminal. Each row has its colour; one on MARKED is set off from the rest."""
        leading = size * 1.4
        top = self.card(62 + len(rows) * leading + (8 if notes else 0) + 22 * len(notes), fill=SCREEN, edge=SCREEN) - 20
        self.text(WIDTH / 2, top + 25, fit(title, 13, CONTENT - 160), MONO, 13, SCREEN_DIM, "center")
        y, since = top + 46, 4  # rows since the last that says SIMULATED
        for text, colour in rows:
            if colour == MARKED:
                self.box(LEFT - 4, y - 1, len(text) * size * CELL + 8, leading, MARKED)
            strong = colour in (MARKED, CARD)
            self.text(LEFT, y + size * 1.06, text, MONO_BOLD if strong else MONO, size, CARD if strong else colour)
            blanks = [match.span() for match in re.finditer(" {14,}", text.ljust(int(CONTENT / (size * CELL))))]
            since += 1
            if self.evidence.simulated and blanks and (since >= 6 or colour == MARKED):
                since, (begin, end) = 0, max(blanks, key=lambda span: span[1] - span[0])
                self.text(LEFT + (begin + end) / 2 * size * CELL, y + size * 1.03, "SIMULATED", BOLD, size * 0.85,
                          AMBER if colour == MARKED else SCREEN_STAMP, "center")
            y += leading
        for index, text in enumerate(notes):
            self.text(LEFT, y + 26 + 22 * index, text, SANS, 13, AMBER)

    def finish(self, sources: dict[str, bytes], at_least: float = 0) -> bytes:
        """Say where everything comes from, and return the file."""
        self.rule(MARGIN, self.y + 2, WIDTH - 2 * MARGIN, PAGE)
        note = "Drawn by assets/render.py from these files and nothing else; some numbers are rounded. SHA256:"
        self.text(MARGIN, self.y + 29, note, SANS, 12.5, MUTED)
        for index, (name, data) in enumerate(sources.items()):
            y = self.y + 51 + 20 * index
            self.text(MARGIN, y, fit(printable(name), 12.5, 340), MONO_BOLD, 12.5, MUTED)
            self.text(WIDTH - MARGIN, y, hashlib.sha256(data).hexdigest(), MONO, 12.5, MUTED, "right")
        height = max(at_least, round(self.y + 60 + 20 * len(sources)))
        count = max(1, round(height / 190)) if self.evidence.simulated else 0
        for index in range(count):
            for x in (MARGIN / 2 + 5, WIDTH - MARGIN / 2 + 5):
                y = 40 + (index + 0.5) * (height - 40) / count
                self.text(x, y, "SIMULATED", BOLD, 13, STAMP, "center", rotation=90)
        self.figure.set_size_inches(WIDTH / 72, height / 72)
        self.axes.set_xlim(0, WIDTH)
        self.axes.set_ylim(height, 0)
        canvas: Any = FigureCanvasAgg(self.figure)
        canvas.draw()
        return png(numpy.asarray(canvas.buffer_rgba())[:, :, :3])


def png(pixels: Any) -> bytes:
    """A PNG file with nothing but the pixels. (The bytes that Pillow writes differ with its release.)"""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, columns = pixels.shape[:2]
    rows = numpy.pad(pixels.reshape(height, columns * 3), ((0, 0), (1, 0)))  # a row begins with its filter: 0, none
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", columns, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows.tobytes(), 6)) + chunk(b"IEND", b"")


# ---- agent_workflow.png ---------------------------------------------------------------------------------------------

FACTS, FACTS_ROOM, TIME_ROOM = LEFT + 172, 584.0, 132.0
Place = tuple[float, int, str, str]  # of a fact: x, line, name, value


def established(stage: str, evidence: Evidence) -> list[Place]:
    """What a stage found out, under the names of the JSON, one after the other in running text."""
    result, checkpoint, versions, smi, reference, benchmark = (
        evidence.result, *map(evidence.part, ("checkpoint", "versions", "npu_smi", "reference", "benchmark")))
    facts: dict[str, tuple[tuple[dict[str, Any], str], ...]] = {
        "verify": ((checkpoint, "path bytes size_ok sha256_ok sha256"),),
        "npu": ((result, "npu_device npu_device_name"), (versions, "cann driver torch torch_npu")),
        "load": ((result, "policy_class num_params load_s param_devices params_match_checkpoint"),),
        "ready": ((result, "pid hold_seconds"), (smi, "captured pid_found matched_by pid_absent_before reason")),
        "forward": ((result, "action value forward_s input_device output_device bitwise_repeatable"),
                    (reference, "within_tolerance action_agreement")),
        "benchmark": ((benchmark.get("eager") or {}, "passes p50_s p90_s p99_s"),),
        "final": ((result, "worker_exit exit_code"),),
    }
    places: list[Place] = []
    x, line = 0.0, 0
    for name, value in [(name, source.get(name)) for source, names in facts.get(stage, ()) for name in names.split()]:
        text = fit(shown(value), 13, FACTS_ROOM - (len(name) + 1) * 13 * CELL)
        wide = (len(name) + 1 + len(text)) * 13 * CELL
        if value is not None:
            if x and x + wide > FACTS_ROOM:
                x, line = 0.0, line + 1
            places.append((x, line, name, text))
            x += wide + 18
    return places


def draw_workflow(evidence: Evidence) -> bytes:
    page = Page("How the run went", evidence)
    command = wrap(shlex.join(["python3", *map(shown, evidence.result["argv"])]), 14, CONTENT - 20, 4)
    y = page.card(34 + 21 * len(command), fill=SCREEN, edge=SCREEN)
    page.text(LEFT, y + 12, "$", MONO_BOLD, 14, SCREEN_DIM)
    for index, line in enumerate(command):
        page.text(LEFT + 20, y + 12 + 21 * index, line, MONO, 14, SCREEN_TEXT)

    entered, total = evidence.part("stages"), evidence.result["total_s"] or 1.0
    names = [*entered, *(name for name in STAGES if name not in entered)]
    facts = [established(name, evidence) if name in entered else [] for name in names]
    heights = [max(70, 51 + 21 * max((line for _, line, _, _ in places), default=0)) for places in facts]
    y = page.card(sum(heights) + 48)
    page.text(LEFT + 48, y + 6, "Stage", SANS, 13, MUTED)
    page.text(FACTS, y + 6, "What it established", SANS, 13, MUTED)
    page.text(RIGHT, y + 6, f"Time, of {total:.3f} s in all", SANS, 13, MUTED, "right")
    y += 20
    start = 0.0
    for index, (name, places, height) in enumerate(zip(names, facts, heights, strict=True)):
        outcome = "ok" if name in entered else "not run"
        if evidence.failed and index == len(entered) - 1:
            outcome = "failed"
        draw_stage(page, y, printable(name), outcome, places)
        if name in entered:
            wide = min(TIME_ROOM, max(4.0, entered[name] / total * TIME_ROOM))
            left = RIGHT - TIME_ROOM + min(start / total * TIME_ROOM, TIME_ROOM - wide)
            page.box(RIGHT - TIME_ROOM, y + 44, TIME_ROOM, 6, TRACK)
            page.box(left, y + 44, wide, 6, BAD if outcome == "failed" else GOOD)
            page.text(RIGHT, y + 31, f"{entered[name]:.3f} s", MONO_BOLD, 15, anchor="right")
            start += entered[name]
        if index + 1 < len(names):
            page.box(LEFT + 16, y + 47, 2, height - 36, GOOD if index + 1 < len(entered) else EDGE, radius=0)
        y += height
    return page.finish({RESULT: evidence.files[RESULT]})


def draw_stage(page: Page, y: float, name: str, outcome: str, places: list[Place]) -> None:
    colour, symbol = {"ok": (GOOD, "✓"), "failed": (BAD, "✗")}.get(outcome, (FAINT, ""))
    page.rule(LEFT + 48, y, CONTENT - 48)
    page.disc(LEFT + 17, y + 29, 14, colour if symbol else CARD, colour)
    page.text(LEFT + 17, y + 34.5, symbol, BOLD, 16, CARD, "center")
    page.text(LEFT + 48, y + 31, fit(name, 16, 118), BOLD, 16, INK if symbol else MUTED)
    page.text(LEFT + 48, y + 51, outcome, SANS, 13, colour if symbol else MUTED)
    for x, line, key, text in places:
        page.text(FACTS + x, y + 30 + 21 * line, key, MONO, 13, MUTED)
        page.text(FACTS + x + (len(key) + 1) * 13 * CELL, y + 30 + 21 * line, text, MONO_BOLD, 13,
                  BAD if text == "false" else INK)


# ---- npu_device_call.png --------------------------------------------------------------------------------------------


class Call(NamedTuple):
    command: str
    at: str
    rows: list[str]


def calls_of(log: bytes) -> list[Call]:
    """The calls in npu_smi.log. A heading says how long its output is, so that no output can pass for a heading."""
    calls, at = [], 0
    heading = re.compile(rb"# (npu-smi [^\n]*) at=(\S+) bytes=(\d{1,9}) outcome=[^\n]*\n")
    while match := heading.match(log, at):
        at = match.end() + int(match[3]) + 1
        command, moment, output = (
            data.decode("utf-8", "replace") for data in (match[1], match[2], log[match.end():at - 1]))
        rows = [printable(row.expandtabs().rstrip()) for row in re.split(r"\r?\n", output.rstrip())]
        calls.append(Call(printable(command), printable(moment), rows))
    return calls


def draw_device(evidence: Evidence) -> bytes:
    page = Page("The call on the device", evidence)
    page.grid("Device", evidence.result | evidence.part("versions"),
              "npu_device_name npu_device visible_devices cann driver npu_smi torch torch_npu device_nodes "
              "param_devices input_device output_device")
    calls = calls_of(evidence.files.get(SMI, b""))
    line = printable((evidence.part("npu_smi").get("pid_line") or "").expandtabs()).strip()
    listed = next((call for call in reversed(calls) if line and line in map(str.strip, call.rows)), None)
    draw_correlation(page, evidence, calls, listed)

    call = listed or (calls[-1] if calls else Call("npu-smi", "no time", ["it was not asked"]))
    marked = next((index for index, row in enumerate(call.rows) if listed and row.strip() == line), -2)
    rows = elided(call.rows, 48, max(0, marked))
    size = max(10.0, min(14.0, CONTENT / CELL / max(len(text) for _, text in rows)))
    colours = {marked: MARKED, -1: AMBER}
    notes = [f"Marked: this process, PID {evidence.result['pid']}."] if listed else []
    if evidence.simulated and any("Power(W)" in row for row in call.rows):
        notes += ["The simulator invents the watts, the degrees and all else here but the processes and their memory."]
    page.screen(f"$ {call.command}   at {call.at}", size,
                [(fit(text, size, CONTENT), colours.get(index, SCREEN_TEXT)) for index, text in rows], notes)
    return page.finish(evidence.files)


def draw_correlation(page: Page, evidence: Evidence, calls: list[Call], listed: Call | None) -> None:
    """The PID as each file has it, read from that file."""
    smi, pid = evidence.part("npu_smi"), str(evidence.result["pid"])
    logged = re.search(r"^\[inference\] pid +: (\d{1,10})$", evidence.text(LOG), re.MULTILINE)
    ready = re.search(r"^NPU_READY_PID=(\d{1,10})$", evidence.text(MARKER), re.MULTILINE)
    absent, how = smi.get("pid_absent_before"), shown(smi.get("matched_by") if listed else smi.get("reason"))
    before = calls[0].at[11:19] if calls else ""
    during = (listed or calls[-1]).at[11:19] if calls[1:] else ""
    parts = (
        (LOG, logged[1] if logged else "-", "what it said it is"),
        (RESULT, pid, "the process that ran"),
        (MARKER, ready[1] if ready else "-", "before the forward"),
        (f"npu-smi {before}", "absent" if absent else shown(absent), "before it ran there"),
        (f"npu-smi {during}", pid if listed else "not listed", f"by {how}" if listed else how))
    y = page.card(156, "One process", "its PID in each file; npu-smi lists it only while it holds the device")
    wide, gap = (CONTENT - 56) / 5, 14
    for index, (name, value, note) in enumerate(parts):
        left, good = LEFT + index * (wide + gap), value in (pid, "absent")
        page.box(left, y, wide, 78, GOOD_TINT if good else BAD_TINT, GOOD if good else BAD, radius=8)
        page.text(left + 12, y + 20, name, MONO, 12, MUTED)
        page.text(left + 12, y + 46, fit(value, 19, wide - 20), MONO_BOLD, 19)
        page.text(left + 12, y + 66, fit(note, 11.5, wide - 16), MONO, 11.5, MUTED)


# ---- model_result.png -----------------------------------------------------------------------------------------------

MAX_ROWS, MAX_BARS, MAX_KERNELS = 3, 8, 30  # of what is drawn; the rest is in the JSON
LOW, HIGH = -7, 2  # of the scale of the relative error: powers of ten, in percent


class Choice(NamedTuple):
    label: str
    probability: float | None  # none of a Gaussian, which has a mean and a deviation
    note: str
    chosen: bool


def choices_of(result: dict[str, Any], row: int) -> list[Choice]:
    """The distribution of one row: a choice for each action, or for each number of `probs` or of `mean`."""
    if result["mean"]:
        columns = zip(*(flat(result[name][row]) for name in ("mean", "std", "env_action")), strict=False)
        return [Choice(f"mean[{index}]", None, f"{mean:+.4f} ± {std:.4f}, to the environment {taken:+.4f}", False)
                for index, (mean, std, taken) in enumerate(columns)]
    discrete = result["action_space"]["type"] == "Discrete"
    choices = []
    for index, probability in enumerate(flat(result["probs"][row]) if result["probs"] else []):
        chosen = discrete and index == result["action"][row]
        note = number(probability) + (" ◀ chosen" if chosen else "")
        choices.append(Choice(f"action {index}" if discrete else f"probs[{index}]", probability, note, chosen))
    return choices


def draw_answer(evidence: Evidence) -> bytes:
    result = evidence.result
    page = Page("What the model answered", evidence)
    for row in range(min(MAX_ROWS, len(result["action"] or []))):
        draw_row(page, result, row)
    if evidence.part("reference"):
        draw_errors(page, evidence.part("reference"))
    if evidence.part("kernels"):
        draw_kernels(page, evidence.part("kernels"))
    page.grid(RESULT, result, "policy_class num_params params_match_checkpoint model_device input_device output_device "
                              "bitwise_repeatable load_s forward_s")
    return page.finish({RESULT: evidence.files[RESULT]})


def draw_row(page: Page, result: dict[str, Any], row: int) -> None:
    """One observation, and what the policy does about it."""
    choices, action = choices_of(result, row), flat(result["action"][row])
    drawn = sorted(choices, key=lambda choice: not choice.chosen)[:MAX_BARS] if len(choices) > MAX_BARS else choices
    y = page.card(166 + 32 * max(0, len(drawn) - 3), f"Observation {row + 1} of {result['rows']}",
                  shown(flat(result["observation"][row])))
    text = ", ".join(f"{part:.6g}" for part in action[:MAX_BARS])
    page.text(LEFT, y + 20, "action", MONO, 14, MUTED)
    for index, line in enumerate(wrap(text, 14, 136, 3)):
        page.text(LEFT, y + (68 if len(text) < 4 else 46 + 21 * index), line, BOLD, 42 if len(text) < 4 else 14, GOOD)
    for index, name in enumerate(("value", "log_prob", "entropy")):
        value = number(flat(result[name][row])[0]) if result[name] else "-"
        page.text(LEFT + 150, y + 20 + index * 32, name, MONO, 14, MUTED)
        page.text(LEFT + 345, y + 20 + index * 32, value, MONO_BOLD, 14, anchor="right")
    left, track = LEFT + 480, 210.0
    for index, choice in enumerate(drawn):
        top, face = y + 4 + index * 32, MONO_BOLD if choice.chosen else MONO
        note = left if choice.probability is None else left + track + 14
        page.text(left - 14, top + 16, fit(choice.label, 14, 100), face, 14, anchor="right")
        page.text(note, top + 16, fit(choice.note, 14, RIGHT - note), face, 14)
        if choice.probability is not None:
            page.box(left, top, track, 22, TRACK, radius=4)
            page.box(left, top, max(3, track * choice.probability), 22, GOOD if choice.chosen else FAINT, radius=4)
    if len(drawn) < len(choices):
        page.text(LEFT, y + 116, f"{len(drawn)} of {len(choices)} numbers are drawn", MONO, 13, MUTED)


def draw_errors(page: Page, reference: dict[str, Any]) -> None:
    """Each output's error against the float64 reference, on a scale that goes beyond one per cent."""
    outputs, within = reference["outputs"], shown(reference["within_tolerance"])
    y = page.card(112 + 26 * len(outputs), "Error against the float64 reference",
                  f"within {reference['tolerance']:g}: {within} · within 1 %: {shown(reference['within_1_percent'])}"
                  f" · equal actions: {100 * reference['action_agreement']:.6g} %")
    begin, bottom = LEFT + 600, y + 24 + 26 * len(outputs)
    unit = (RIGHT - begin) / (HIGH - LOW)
    for x, text in ((250.0, "max abs error"), (410.0, "max rel error"), (570.0, "cosine")):
        page.text(LEFT + x, y + 12, text, SANS, 13, MUTED, "right")
    page.text(begin, y + 12, "max rel error, log scale", SANS, 13, MUTED)
    for index, (name, errors) in enumerate(outputs.items()):
        top, relative, cosine = y + 24 + 26 * index, errors["max_rel_error_percent"], errors["cosine"]
        page.box(LEFT, top - 4, CONTENT, 1, TRACK, radius=0)
        page.text(LEFT, top + 14, fit(printable(name), 14, 120), MONO, 14)
        page.text(LEFT + 250, top + 14, f"{errors['max_abs_error']:.2e}", MONO_BOLD, 14, anchor="right")
        page.text(LEFT + 410, top + 14, f"{relative:.2e} %", MONO_BOLD, 14, anchor="right")
        page.text(LEFT + 570, top + 14, "-" if cosine is None else f"{cosine:.10f}", MONO, 14, anchor="right")
        if relative > 0:
            reach = min(HIGH, max(LOW + 0.1, math.log10(relative))) - LOW
            page.box(begin, top + 2, reach * unit, 14, GOOD if relative <= 1 else BAD)
    page.rule(LEFT, bottom + 2, 570)
    page.box(begin - LOW * unit, y + 20, 1, bottom - y - 20, BAD, radius=0)
    for power, text in ((-6, "1e-6 %"), (-4, "1e-4 %"), (-2, "0.01 %"), (0, "1 %"), (2, "100 %")):
        page.text(begin + (power - LOW) * unit, bottom + 16, text, SANS, 12, BAD if power == 0 else MUTED,
                  "right" if power == HIGH else "center")


def draw_kernels(page: Page, kernels: dict[str, int]) -> None:
    most, drawn = max(kernels.values()), list(kernels.items())[:MAX_KERNELS]
    rows = math.ceil(len(drawn) / 3)
    y = page.card(72 + 24 * rows, "Kernels of one pass on the device",
                  f"by torch's profiler: {sum(kernels.values())} launches of {len(kernels)} kinds"
                  + (f", {len(drawn)} of them drawn" if len(drawn) < len(kernels) else ""))
    wide = (CONTENT + 30) / 3
    for index, (name, count) in enumerate(drawn):
        left, top = LEFT + index // rows * wide, y + index % rows * 24
        page.text(left, top + 14, fit(printable(name), 13, 204), MONO, 13)
        page.text(left + 226, top + 14, str(count), MONO_BOLD, 13, anchor="right")
        page.box(left + 235, top + 4, (wide - 265) * count / most, 11, GOOD)


# ---- modelagent_live_session.png ------------------------------------------------------------------------------------

SESSION_SIZE, SESSION_ROWS = 12.0, 98  # the picture is then at most twice as tall as wide
OF_THE_LOG = re.compile(r"\[(inference|verify|note|npu|load|model|ready|forward|reference|published|error|final)\] ")
LINE_COLOURS = {"$ ": CARD, "VALID": AMBER, "FAILED RUN": AMBER, "INVALID": SCREEN_BAD, "FAIL ": SCREEN_BAD,
                "[error]": SCREEN_BAD, "Warning: ": SCREEN_DIM, "[W": SCREEN_DIM}  # the last two are torch_npu's


def record(commands: list[str]) -> None:
    """Run the commands in the project, and keep what they print, each below its prompt."""
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    text = ""
    for command in commands:
        print(f"$ {command}", flush=True)
        done = subprocess.run(shlex.split(command), cwd=PROJECT, env=os.environ | {"PATH": search}, check=False,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        output = done.stdout.decode("utf-8", "replace")
        print(output, end="")
        text += f"$ {command}\n{output}"
    TRANSCRIPT.write_text(text, "utf-8")


def check_session(evidence: Evidence, lines: list[str]) -> None:
    """Refuse the session of another run, one with lines that the log does not have, and one without the verdict."""
    logged = set(evidence.text(LOG).split("\n"))
    shortened = evidence.result["observations"] is not None  # the rows of a file, on stdout
    foreign = [line for line in lines if OF_THE_LOG.match(line) and line not in logged
               and not (shortened and "..." in line)]
    missing = {f"[inference] pid               : {evidence.result['pid']}", evidence.verdict}.difference(lines)
    if foreign or missing:
        problem = f"{LOG} does not have its line" if foreign else "it does not have the line"
        raise Refused(f"{TRANSCRIPT.name} is not the session of this run: {problem} "
                      f"{printable([*foreign, *missing][0])[:120]!r}; --record makes a run and its session")


def draw_session(evidence: Evidence, data: bytes) -> bytes:
    text = data.decode("utf-8", "replace")
    check_session(evidence, text.split("\n"))
    blocks = [block.rstrip("\n").split("\n") for block in re.split(r"^(?=\$ )", text, flags=re.MULTILINE) if block]
    rows: list[tuple[str, str]] = []
    for index in reversed(range(len(blocks))):  # the last is short and complete; the first gets what is left
        printed = [row for line in blocks[index] for row in session_rows(line)]
        kept = elided([row for row, _ in printed], max(8, (SESSION_ROWS - len(rows)) // (index + 1)))
        rows = [(row, printed[at][1] if at >= 0 else AMBER) for at, row in kept] + rows
    page = Page("The session, as recorded", evidence)
    page.screen(f"terminal · assets/{TRANSCRIPT.name}", SESSION_SIZE, rows, [])
    return page.finish({TRANSCRIPT.name: data, RESULT: evidence.files[RESULT]}, at_least=WIDTH / 2)


def session_rows(line: str) -> list[tuple[str, str]]:
    """A line of the session in rows of the picture, and their colour."""
    colours = [colour for prefix, colour in LINE_COLOURS.items() if line.startswith(prefix)]
    colour = colours[0] if colours else AMBER if "SIMULATED" in line else SCREEN_TEXT
    return [(row, colour) for row in wrap(printable(line.expandtabs()), SESSION_SIZE, CONTENT, 3, " " * 10)]


# ---- the whole ------------------------------------------------------------------------------------------------------


def refresh_sums(files: dict[str, bytes]) -> None:
    """The lines of these files of assets/ in the project's SHA256SUMS; every other line stays as it is."""
    sums = PROJECT / "SHA256SUMS"
    lines = {f"assets/{name}": f"{hashlib.sha256(data).hexdigest()}  assets/{name}" for name, data in files.items()}
    kept = [lines.pop(line[66:], line) for line in sums.read_text("utf-8").splitlines()]
    sums.write_text("".join(line + "\n" for line in [*kept, *lines.values()]), "utf-8")


def draw(args: argparse.Namespace) -> None:
    if args.record is not None:
        record(args.record or COMMANDS)
    evidence = read_evidence(args.logs)
    pictures = {"agent_workflow.png": draw_workflow(evidence), "npu_device_call.png": draw_device(evidence),
                "model_result.png": draw_answer(evidence)}
    if args.logs.resolve() == LOGS:
        pictures["modelagent_live_session.png"] = draw_session(evidence, TRANSCRIPT.read_bytes())
    args.out.mkdir(parents=True, exist_ok=True)
    for name, data in pictures.items():
        (args.out / name).write_bytes(data)
        print(f"{name}: drawn")
    if args.out.resolve() == ASSETS:
        sources = {path.name: path.read_bytes() for path in (Path(__file__), TRANSCRIPT) if path.exists()}
        refresh_sums(sources | pictures)


def main() -> int:
    parser = argparse.ArgumentParser("render.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", metavar="COMMAND", nargs="*", help="first run these commands, and record them")
    parser.add_argument("--logs", metavar="DIR", type=Path, default=LOGS, help="the evidence (default: logs)")
    parser.add_argument("--out", metavar="DIR", type=Path, default=ASSETS, help="for the pictures (default: assets)")
    args = parser.parse_args()
    matplotlib.rcdefaults()  # whatever the user's matplotlibrc says
    try:
        draw(args)
    except (Refused, OSError) as error:
        print(f"render.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
