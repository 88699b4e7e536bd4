#!/usr/bin/env python3
"""Draw the pictures of the model page from the evidence of one run, and from nothing else.

    python3 assets/render.py [--logs DIR] [--session FILE] [--out DIR]

  agent_workflow.png          the stages of the run in order, each with its outcome, its time and what it established
  npu_device_call.png         the device, and the live npu-smi table with the row of this process marked
  model_result.png            the answer of the forward, and the key fields of npu_result.json
  modelagent_live_session.png a terminal session recorded by `script` or a pipe; drawn only with --session

Evidence that `inference.py --check` finds inconsistent is refused; a failed run is drawn as failed, a simulated one
under a band and a watermark. The same evidence gives the same bytes. Exit codes: 0 drawn, 1 refused, 2 usage.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

try:
    from PIL import Image, ImageDraw, ImageFont
except ImportError:
    sys.exit("render.py: Pillow is missing: python3 -m pip install pillow, or use an interpreter below .venv")

PROJECT = Path(__file__).resolve().parent.parent
ASSETS = PROJECT / "assets"
RESULT, LOG, MARKER, SMI = "npu_result.json", "npu_inference.log", "npu_ready.marker", "npu_smi.log"
WORKFLOW, DEVICE, ANSWER, SESSION = (
    "agent_workflow.png", "npu_device_call.png", "model_result.png", "modelagent_live_session.png")
STAGES = ("verify", "npu", "load", "ready", "forward", "final")  # of every run; more may be recorded
MAX_BYTES, MAX_SESSION_BYTES = 16 << 20, 1 << 20  # of one input file

# Blue and vermilion differ for every kind of colour vision, and no meaning rests on colour alone.
PAGE, CARD, EDGE = "#f3f5f8", "#ffffff", "#d8dfe7"
INK, MUTED, FAINT = "#16212c", "#56636f", "#8793a0"
GOOD, GOOD_TINT, BAD, BAD_TINT = "#0a5cad", "#e4eefa", "#b23c0a", "#fdeee5"
AMBER, SCREEN, SCREEN_TEXT, SCREEN_DIM, MARKED = "#ffc20a", "#101a24", "#d6dee7", "#8fa0b1", "#1f6fd0"

WIDTH, MARGIN, SCALE = 1040, 40, 2  # in points; a point is SCALE pixels, so that half size is one pixel a point
INNER = WIDTH - 2 * MARGIN


class Refused(Exception):
    """Input that cannot be drawn. The text is the one line that the user reads."""


# ---------------------------------------------------------------------------------------------------------------------
# Evidence
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Evidence:
    result: dict[str, Any]
    texts: dict[str, str]
    digests: dict[str, str]

    @property
    def failed(self) -> bool:
        return bool(self.result["exit_code"])

    @property
    def simulated(self) -> bool:
        """Whether any of the files says so. A run that failed before it looked for a device says nothing."""
        return bool(self.result["simulated"] or self.result["simulator"]) or any(
            hint in self.texts.get(name, "") for name, hint in ((MARKER, "SIMULATED=1"), (LOG, "[npu]     SIMULATED")))


def read_evidence(directory: Path) -> Evidence:
    contents = read_files(directory)
    check(directory)
    if read_files(directory) != contents:
        raise Refused(f"{directory}: the evidence changed while it was checked; wait for the run to end")
    return Evidence(json.loads(contents[RESULT]),
                    {name: data.decode("utf-8", "replace") for name, data in contents.items()},
                    {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()})


def read_files(directory: Path) -> dict[str, bytes]:
    if not (directory / RESULT).is_file():
        raise Refused(f"{directory}: no {RESULT}; run inference.py first, or name its directory with --logs")
    return {name: read_file(directory / name) for name in (RESULT, LOG, MARKER, SMI) if (directory / name).is_file()}


def read_file(path: Path, most: int = MAX_BYTES) -> bytes:
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise Refused(f"{path}: larger than {most >> 20} MiB")
    return data


def check(directory: Path) -> None:
    """Refuse what inference.py would not call the consistent evidence of a run, good or failed."""
    program = PROJECT / "inference.py"
    done = subprocess.run([sys.executable, str(program), "--check", str(directory)], capture_output=True, text=True,
                          errors="replace", stdin=subprocess.DEVNULL, check=False)
    lines = done.stdout.splitlines()
    if (done.returncode, *lines[-1:]) in ((0, "VALID"), (8, "FAILED RUN")):
        return
    failures = [" ".join(line.split()) for line in lines if line.startswith("FAIL ")]
    reason = "; ".join(failures[:3]) or done.stderr.strip().split("\n")[-1] or f"exit code {done.returncode}"
    raise Refused(f"{directory}: inference.py --check refuses it: {printable(reason)[:600]}")


def flat(value: Any) -> list[Any]:
    return [item for part in value for item in flat(part)] if isinstance(value, list) else [value]


# ---------------------------------------------------------------------------------------------------------------------
# Text: fonts, what can be printed, what fits
# ---------------------------------------------------------------------------------------------------------------------


@functools.cache
def font(name: str, size: float) -> ImageFont.FreeTypeFont:
    spec = importlib.util.find_spec("matplotlib")  # found, not imported, which would take a second
    if spec is None or not spec.submodule_search_locations:
        raise Refused("the fonts are missing: python3 -m pip install -r requirements.txt brings matplotlib's")
    path = Path(spec.submodule_search_locations[0], "mpl-data", "fonts", "ttf", f"DejaVu{name}.ttf")
    return ImageFont.truetype(str(path), round(size * SCALE), layout_engine=ImageFont.Layout.BASIC)


SANS, SANS_BOLD, MONO, MONO_BOLD = "Sans", "Sans-Bold", "SansMono", "SansMono-Bold"


@functools.cache
def printable_character(character: str) -> str:
    """The character, or its escape where it has no glyph or would act on its neighbours."""
    if " " <= character <= "~":
        return character
    mono = font(MONO, 14)
    if (unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Mn", "Me")
            or bytes(mono.getmask(character)) == bytes(mono.getmask("\uffff"))):
        return character.encode("unicode_escape").decode()
    return character


def printable(text: str) -> str:
    return "".join(map(printable_character, text[:4000])) + ("…" if len(text) > 4000 else "")


def shown(value: Any) -> str:
    """A value of the JSON as it is written there, strings without quotes; a dash for what was not measured."""
    if value is None:
        return "-"
    return printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def number(value: float) -> str:
    return f"{value:.6f}" if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:.6g}"


def duration(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def length(text: str, face: str, size: float) -> float:
    return font(face, size).getlength(text) / SCALE


def fit(text: str, face: str, size: float, width: float) -> str:
    """The text, cut with a mark when it is wider."""
    if length(text, face, size) <= width:
        return text
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if length(text[:middle] + "…", face, size) <= width else (low, middle - 1)
    return text[:low] + "…"


def wrap(text: str, face: str, size: float, width: float, most: int) -> list[str]:
    """Lines no wider than `width`, broken at spaces where there are any; the last of `most` is cut with a mark."""
    lines: list[str] = []
    while text and len(lines) < most - 1 and length(text, face, size) > width:
        cut = max(1, len(fit(text, face, size, width)) - 1)
        space = text.rfind(" ", cut // 2, cut + 1)
        lines.append(text[:space] if space > 0 else text[:cut])
        text = text[space + 1:] if space > 0 else text[cut:]
    return [*lines, fit(text, face, size, width)]


def elided(lines: Sequence[Any], most: int, keep: int | None = None) -> list[Any]:
    """At most so many lines: the first, the last, and those around `keep`; an int says how many were left out."""
    if len(lines) <= most:
        return list(lines)
    third = most // 3
    kept = set(range(most - third)) | set(range(len(lines) - third, len(lines)))
    if keep is not None and keep not in kept:
        kept = (set(range(third)) | set(range(keep - third // 2, keep + third // 2))
                | set(range(len(lines) - third, len(lines))))
    out: list[Any] = []
    for index, line in enumerate(lines):
        if index in kept:
            out.append(line)
        elif out and isinstance(out[-1], int):
            out[-1] += 1
        else:
            out.append(1)
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Canvas: what is drawn is noted first and painted when the height is known
# ---------------------------------------------------------------------------------------------------------------------


@functools.cache
def disc(radius: int) -> Image.Image:
    """The mask of an anti-aliased disc (Pillow's own shapes have jagged edges)."""
    mask = Image.new("L", (radius * 8, radius * 8))
    ImageDraw.Draw(mask).ellipse((0, 0, radius * 8 - 1, radius * 8 - 1), fill=255)
    return mask.reduce(4)


class Canvas:
    def __init__(self) -> None:
        self.steps: list[Callable[[Image.Image, ImageDraw.ImageDraw], None]] = []
        self.y = 0.0  # the next free height

    def box(self, x: float, y: float, width: float, height: float, fill: str, edge: str = "", radius: int = 0) -> None:
        """A rectangle with round corners and, with `edge`, a border."""
        if edge:
            self.box(x, y, width, height, edge, radius=radius)
            x, y, width, height, radius = x + 1, y + 1, width - 2, height - 2, max(0, radius - 1)
        left, top, right, bottom = (round(value * SCALE) for value in (x, y, x + width, y + height))
        r = min(radius * SCALE, (right - left) // 2, (bottom - top) // 2)

        def paint(image: Image.Image, draw: ImageDraw.ImageDraw) -> None:
            if right - 2 * r > left:
                draw.rectangle((left + r, top, right - r - 1, bottom - 1), fill=fill)
            if bottom - 2 * r > top:
                draw.rectangle((left, top + r, right - 1, bottom - r - 1), fill=fill)
            if r:
                for x in (left, right - 2 * r):
                    for y in (top, bottom - 2 * r):
                        image.paste(fill, (x, y), disc(r))
        self.steps.append(paint)

    def text(self, x: float, y: float, text: str, face: str = SANS, size: float = 14, fill: str = INK,
             anchor: str = "l") -> float:
        """One line, y being its baseline; anchor l, m or r. Returns the width."""
        self.steps.append(lambda image, draw: draw.text((round(x * SCALE), round(y * SCALE)), text, fill,
                                                        font(face, size), anchor=anchor + "s"))
        return length(text, face, size)

    def lines(self, x: float, y: float, lines: Iterable[str], face: str = SANS, size: float = 14, fill: str = INK,
              leading: float = 1.5) -> float:
        """Lines from the top y downwards. Returns the height below the last."""
        for line in lines:
            self.text(x, y + size * 1.1, line, face, size, fill)
            y += size * leading
        return y

    def card(self, height: float, title: str = "", fill: str = CARD, edge: str = EDGE) -> tuple[float, float]:
        """A card across the page, below the last one. Returns the place of its content."""
        x, y = MARGIN, self.y
        self.box(x, y, INNER, height, fill, edge, radius=10)
        if title:
            self.text(x + 24, y + 32, title, SANS_BOLD, 15)
        self.y = y + height + 20
        return x + 24, y + (50 if title else 22)

    def pairs(self, x: float, y: float, width: float, pairs: Iterable[tuple[str, Any]], size: float = 13) -> float:
        """`key value` after `key value` in running text. Returns the height below."""
        at, bottom = x, y
        for key, value in pairs:
            name, text = key + " ", shown(value)
            wide = length(name, MONO, size)
            text = fit(text, MONO_BOLD, size, width - wide)
            needed = wide + length(text, MONO_BOLD, size)
            if at > x and at + needed > x + width:
                at, bottom = x, bottom + size * 1.6
            self.text(at, bottom + size * 1.1, name, MONO, size, MUTED)
            self.text(at + wide, bottom + size * 1.1, text, MONO_BOLD, size, BAD if value is False else INK)
            at += needed + 18
        return bottom + size * 1.6

    def header(self, title: str, evidence: Evidence) -> None:
        result, code = evidence.result, evidence.result["exit_code"]
        checkpoint = result["checkpoint"] or {}
        subject = result["model_id"] or checkpoint.get("path")
        self.y += 36
        badge = f"✗ FAILED · exit code {code}" if code else "✓ SUCCESS · exit code 0"
        wide = length(badge, SANS_BOLD, 15) + 36
        self.text(MARGIN, self.y + 30, title, SANS_BOLD, 30)
        self.box(WIDTH - MARGIN - wide, self.y, wide, 38, BAD if code else GOOD, radius=19)
        self.text(WIDTH - MARGIN - wide / 2, self.y + 24.5, badge, SANS_BOLD, 15, CARD, "m")
        rest = "".join(f" · {shown(part)}" for part in (result["npu_device_name"], started(result)) if part)
        subject = fit(shown(subject), SANS, 15, max(200.0, INNER - length(rest, SANS, 15)))
        self.text(MARGIN, self.y + 62, fit(subject + rest, SANS, 15, INNER), SANS, 15, MUTED)
        self.y += 88

    def failure(self, evidence: Evidence) -> None:
        """The card that says how the run failed."""
        if not evidence.failed:
            return
        error = evidence.result["error"] or {}
        message = wrap(shown(error.get("message")), MONO, 14, INNER - 48, 6)
        hint = wrap("What to do: " + shown(error.get("hint") or None), SANS, 14, INNER - 48, 4)
        x, y = self.card(66 + 21 * (len(message) + len(hint)), fill=BAD_TINT, edge=BAD)
        title = f"✗ Failed in stage {shown(error.get('stage'))} · {shown(error.get('type'))}"
        y = self.lines(x, y - 4, [fit(title, SANS_BOLD, 17, INNER - 48)], SANS_BOLD, 17, BAD)
        self.lines(x, self.lines(x, y + 4, message, MONO) + 4, hint, SANS, 14, MUTED)

    def screen(self, title: str, columns: int, rows: Sequence[Sequence[Run] | int]) -> None:
        """A terminal. A row is its runs of one style each, or the number of lines that are left out here."""
        size = next((size for size in (15, 14.5, 14, 13.5, 13, 12.5, 12, 11.5, 11, 10.5, 10)
                     if columns * length("M", MONO, size) <= INNER - 48), 10)
        step, leading = length("M" * 64, MONO, size) / 64, size * 1.42
        x, top = MARGIN, self.y
        height = 44 + 24 + len(rows) * leading + 18
        self.box(x, top, INNER, height, SCREEN, radius=10)
        self.box(x + 1, top + 44, INNER - 2, 1, "#2a3846")
        for dot in range(3):
            self.box(x + 24 + dot * 20, top + 16, 12, 12, "#46566a", radius=6)
        self.text(WIDTH / 2, top + 27, fit(title, MONO, 13, INNER - 220), MONO, 13, SCREEN_DIM, "m")
        y = top + 44 + 18
        for row in rows:
            if isinstance(row, int):
                gap = f"… {row} more line{'s' if row > 1 else ''} in the file …"
                self.text(x + 24, y + size * 1.08, gap, MONO, size, AMBER)
            else:
                for run in row:
                    left, wide = x + 24 + run.column * step, len(run.text) * step
                    if run.mark:
                        self.box(left - 5, y - size * 0.08, wide + 10, leading, MARKED, radius=3)
                    self.text(left, y + size * 1.08, run.text, MONO_BOLD if run.bold else MONO, size, run.fill)
            y += leading
        self.y = top + height + 20

    def footer(self, evidence: Evidence, names: Iterable[str], note: str = "") -> None:
        """Where everything comes from."""
        self.box(MARGIN, self.y + 4, INNER, 1, EDGE)
        drawn = "Drawn by assets/render.py from these files and nothing else" + (f"; {note}" if note else "")
        self.text(MARGIN, self.y + 30, fit(drawn + ". SHA256:", SANS, 12.5, INNER), SANS, 12.5, MUTED)
        self.y += 40
        for name in names:
            if name in evidence.digests:
                self.text(MARGIN, self.y + 13, fit(printable(name), MONO_BOLD, 12.5, 340), MONO_BOLD, 12.5, MUTED)
                self.text(WIDTH - MARGIN, self.y + 13, evidence.digests[name], MONO, 12.5, MUTED, "r")
                self.y += 20
        self.y += 24

    def png(self, simulated: bool) -> bytes:
        """The picture; that of a simulated run between two bands and under a watermark."""
        band = 48 if simulated else 0
        size = WIDTH * SCALE, round(self.y * SCALE)
        page = Image.new("RGB", size, PAGE)
        draw = ImageDraw.Draw(page)
        for step in self.steps:
            step(page, draw)
        image = Image.new("RGB", (size[0], size[1] + 2 * band * SCALE), AMBER)
        if simulated:
            watermark(page)
            for top in (0, size[1] + band * SCALE):
                image.paste(simulated_band(band), (0, top))
        image.paste(page, (0, band * SCALE))
        data = io.BytesIO()
        image.save(data, "PNG", compress_level=6)
        return data.getvalue()


@dataclass
class Run:
    """Text of one style in a row of a terminal; `mark` sets it off from the rest."""

    column: int
    text: str
    fill: str = SCREEN_TEXT
    bold: bool = False
    mark: bool = False


def watermark(page: Image.Image) -> None:
    """SIMULATED NPU across the page, so often that no part worth showing is without it."""
    face = font(SANS_BOLD, 30)
    left, top, right, bottom = (round(value) for value in face.getbbox("SIMULATED NPU"))
    word = Image.new("L", (right - left, bottom - top))
    ImageDraw.Draw(word).text((-left, -top), "SIMULATED NPU", 38, face)
    word = word.rotate(24, Image.Resampling.BICUBIC, expand=True)
    for row, y in enumerate(range(-word.height // 2, page.height, word.height + 16 * SCALE)):
        for x in range(-(word.width // 2) * (row % 2) - 20 * SCALE, page.width, word.width + 40 * SCALE):
            page.paste("#a87900", (x, y), word)


@functools.cache
def simulated_band(height: int) -> Image.Image:
    fine = 4
    width, tall = WIDTH * SCALE, height * SCALE
    stripes = Image.new("RGB", (width * fine, tall * fine), AMBER)
    draw = ImageDraw.Draw(stripes)
    step = 28 * SCALE * fine
    for x in range(-tall * fine, width * fine, step):
        draw.polygon(((x, tall * fine), (x + tall * fine, 0), (x + tall * fine + step // 2, 0),
                      (x + step // 2, tall * fine)), fill=INK)
    band = stripes.reduce(fine)
    draw, face = ImageDraw.Draw(band), font(SANS_BOLD, 19)
    text = "SIMULATED NPU · nothing in this run touched a physical NPU"
    half = round(face.getlength(text) / 2) + 28 * SCALE
    draw.rectangle((width // 2 - half, 0, width // 2 + half, tall), fill=AMBER)
    draw.text((width // 2, tall // 2 + 1), text, INK, face, anchor="mm")
    return band


def started(result: dict[str, Any]) -> str:
    at = moment(result["started_at"])
    return at.strftime("%Y-%m-%d %H:%M:%S UTC") if at else ""


def moment(text: Any) -> datetime | None:
    with contextlib.suppress(TypeError, ValueError):
        at = datetime.fromisoformat(text)
        return at if at.tzinfo else None
    return None


# ---------------------------------------------------------------------------------------------------------------------
# agent_workflow.png
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Stage:
    name: str
    outcome: str  # ok, failed, not run
    start: float = 0.0
    seconds: float = 0.0


def stages_of(result: dict[str, Any]) -> list[Stage]:
    """The stages that the run recorded, one after the other, and those that it did not come to."""
    stages: list[Stage] = []
    for entry in result["stages"] or []:
        start = stages[-1].start + stages[-1].seconds if stages else 0.0
        outcome = "ok" if entry.get("outcome") == "ok" else "failed"
        stages.append(Stage(shown(entry.get("name")), outcome, start, entry.get("elapsed_s", 0.0)))
    reached = {stage.name for stage in stages}
    return stages + [Stage(name, "not run") for name in STAGES if name not in reached]


def established(stage: str, result: dict[str, Any]) -> list[tuple[str, Any]]:
    """What a stage found out, under the names of the JSON."""
    checkpoint, versions, smi, benchmark = (
        result[name] or {} for name in ("checkpoint", "versions", "npu_smi", "benchmark"))

    def of(source: dict[str, Any], names: str) -> list[tuple[str, Any]]:
        return [(name, source.get(name)) for name in names.split() if source.get(name) is not None]

    return {
        "verify": lambda: [("checkpoint", checkpoint.get("path")), *of(checkpoint, "bytes size_ok sha256_ok sha256")],
        "npu": lambda: [*of(result, "npu_device npu_device_name"), *of(versions, "cann driver torch torch_npu")],
        "load": lambda: of(result, "policy_class num_params load_s param_devices params_match_checkpoint"),
        "ready": lambda: [*of(result, "pid hold_seconds"), *of(smi, "captured pid_found matched_by reason")],
        "forward": lambda: of(result, "action value forward_s input_device output_device bitwise_repeatable"),
        "benchmark": lambda: [(name, number(value)) for name, value in of(benchmark["single"], "p50_s p90_s p99_s")]
        if benchmark else [],
        "final": lambda: [*of(result, "exit_code"), ("files", list(result["files"] or {}))],
    }.get(stage, list)()


def draw_workflow(evidence: Evidence) -> bytes:
    result, canvas = evidence.result, Canvas()
    canvas.header("How the run went", evidence)
    command = wrap(" ".join(["$ python3", *map(shown, result["argv"] or [])]), MONO, 14, INNER - 48, 4)
    x, y = canvas.card(30 + 21 * len(command), fill=SCREEN, edge=SCREEN)
    canvas.lines(x, y - 6, command, MONO, 14, SCREEN_TEXT)
    canvas.failure(evidence)

    stages, total = stages_of(result), result["total_s"] or 0.0
    facts = [established(stage.name, result) if stage.outcome != "not run" else [] for stage in stages]
    heights = [max(68.0, Canvas().pairs(0, 0, FACTS, pairs) + 28) for pairs in facts]
    x, y = canvas.card(sum(heights) + 54)
    canvas.text(x + 52, y + 8, "Stage", SANS, 12.5, MUTED)
    canvas.text(x + 180, y + 8, "What it established", SANS, 12.5, MUTED)
    canvas.text(x + INNER - 48, y + 8, f"Time, of {duration(total)} in all", SANS, 12.5, MUTED, "r")
    y += 24
    for index, (stage, pairs, height) in enumerate(zip(stages, facts, heights, strict=True)):
        if index:
            canvas.box(x + 17, y - heights[index - 1] + 47, 2, heights[index - 1] - 36,
                       EDGE if stage.outcome == "not run" else GOOD)
        draw_stage(canvas, x, y, stage, pairs, total)
        y += height
    canvas.footer(evidence, [RESULT])
    return canvas.png(evidence.simulated)


FACTS = 580  # the width of what a stage established


def draw_stage(canvas: Canvas, x: float, y: float, stage: Stage, pairs: list[tuple[str, Any]], total: float) -> None:
    colour, text, symbol = {"ok": (GOOD, INK, "✓"), "failed": (BAD, INK, "✗")}.get(stage.outcome, (FAINT, MUTED, ""))
    canvas.box(x + 52, y, INNER - 100, 1, EDGE)
    canvas.box(x + 4, y + 15, 28, 28, colour if symbol else CARD, colour, radius=14)
    canvas.text(x + 18, y + 35, symbol, SANS_BOLD, 16, CARD, "m")
    canvas.text(x + 52, y + 31, fit(stage.name, SANS_BOLD, 17, 110), SANS_BOLD, 17, text)
    canvas.text(x + 52, y + 50, stage.outcome, SANS, 13, colour if symbol else MUTED)
    if not symbol:
        return
    canvas.pairs(x + 180, y + 16, FACTS, pairs)
    right, track = x + INNER - 48, 132.0
    canvas.text(right, y + 31, duration(stage.seconds), MONO_BOLD, 15, INK, "r")
    if total > 0:
        begin = min(stage.start / total, 0.97) * track
        wide = max(4.0, min(stage.seconds / total * track, track - begin))
        canvas.box(right - track, y + 44, track, 6, EDGE, radius=3)
        canvas.box(right - track + begin, y + 44, wide, 6, colour, radius=3)


# ---------------------------------------------------------------------------------------------------------------------
# npu_device_call.png
# ---------------------------------------------------------------------------------------------------------------------


def draw_device(evidence: Evidence) -> bytes:
    result, canvas = evidence.result, Canvas()
    versions = result["versions"] or {}
    canvas.header("The call on the device", evidence)
    canvas.failure(evidence)
    facts = [
        ("Device name", result["npu_device_name"]), ("Logical device", result["npu_device"]),
        ("ASCEND_RT_VISIBLE_DEVICES", result["visible_devices"]), ("CANN", versions.get("cann")),
        ("Driver", versions.get("driver")), ("npu-smi", versions.get("npu_smi")), ("torch", versions.get("torch")),
        ("torch_npu", versions.get("torch_npu")), ("Device nodes held open", result["device_nodes"]),
        ("Parameters on", result["param_devices"]), ("Input on", result["input_device"]),
        ("Outputs on", result["output_device"])]
    x, y = canvas.card(50 + 54 * 4 + 8, "Device")
    column = (INNER - 48) / 3
    for index, (label, value) in enumerate(facts):
        left, top = x + index % 3 * column, y + index // 3 * 54
        canvas.text(left, top + 14, label, SANS, 12.5, MUTED)
        canvas.text(left, top + 35, fit(shown(value), MONO_BOLD, 15, column - 16), MONO_BOLD, 15)
    draw_correlation(canvas, evidence)

    line = (result["npu_smi"] or {}).get("pid_line")
    heading, rows = npu_smi_block(evidence.texts.get(SMI, ""), line)
    marked = next((index for index, row in enumerate(rows) if line and row.strip() == line), None)
    widest = max([len(row) for row in rows] + [40])
    columns = max(60, min(widest, 116))
    screen: list[list[Run] | int] = [
        item if isinstance(item, int) else
        [Run(0, cut(item[1], columns), "#ffffff", True, True) if item[0] == marked else Run(0, cut(item[1], columns))]
        for item in elided(list(enumerate(rows)), 72, marked)]
    if marked is not None:
        screen += [[], [Run(0, f"marked: this process, PID {shown(result['pid'])}", SCREEN_DIM)]]
    canvas.screen(heading or "npu-smi", columns, screen or [[Run(0, "npu-smi was not called in this run", SCREEN_DIM)]])
    canvas.footer(evidence, [RESULT, LOG, MARKER, SMI])
    return canvas.png(evidence.simulated)


def cut(text: str, columns: int) -> str:
    return text if len(text) <= columns else text[:columns - 1] + "…"


def draw_correlation(canvas: Canvas, evidence: Evidence) -> None:
    """The PID as each file has it."""
    smi = evidence.result["npu_smi"] or {}

    def found(name: str, pattern: str) -> str:
        match = re.search(pattern, evidence.texts.get(name, ""), re.MULTILINE | re.ASCII)
        return match[1][:20] if match else ""

    ours = shown(evidence.result["pid"])
    listed = ours if smi.get("pid_found") is True and str(smi.get("pid_line")) in evidence.texts.get(SMI, "") else ""
    if listed:
        how = f"by {shown(smi.get('matched_by'))}"
    else:
        how = ": ".join(shown(smi[key]) for key in ("reason", "detail") if smi.get(key)) or "npu-smi was not called"
    boxes = [(LOG, found(LOG, r"^\[inference\] pid\s*: (\d+)$"), "what it said it is"),
             (RESULT, ours, "what it wrote at the end"),
             (MARKER, found(MARKER, r"^NPU_READY_PID=(\d+)$"), "before the forward"),
             (SMI, listed, how)]
    x, y = canvas.card(156, "One process: its PID in each file")
    gap = 36.0
    wide = (INNER - 48 - 3 * gap) / 4
    for index, (name, pid, note) in enumerate(boxes):
        left, same = x + index * (wide + gap), pid == ours
        canvas.box(left, y, wide, 84, GOOD_TINT if same else BAD_TINT, GOOD if same else BAD, radius=8)
        canvas.text(left + 14, y + 23, name, MONO, 12.5, MUTED)
        canvas.text(left + 14, y + 50, pid or "no PID", MONO_BOLD, 20 if len(pid) < 10 else 13, INK if same else BAD)
        note = note if name in evidence.texts else "no such file in this run"
        canvas.text(left + 14, y + 71, fit(note, SANS, 12, wide - 28), SANS, 12, MUTED)
        if index:
            canvas.text(left - gap / 2, y + 49, "=" if same else "≠", SANS_BOLD, 20, MUTED if same else BAD, "m")


def npu_smi_block(text: str, line: str | None) -> tuple[str, list[str]]:
    """The heading and the raw lines of the call that shows the process; else of the last `npu-smi info`."""
    blocks: list[list[str]] = []
    for row in text.split("\n"):
        if row.startswith("# npu-smi "):
            blocks.append([])
        if blocks:
            blocks[-1].append(row)
    info = [block for block in blocks if block[0].startswith("# npu-smi info")]
    with_line = [block for block in info if line and line in (row.strip() for row in block)]
    chosen = (with_line or info or blocks or [[""]])[-1]
    rows = [printable(row.rstrip()) for row in chosen[1:]]
    while rows and not rows[-1]:
        rows.pop()
    return printable(chosen[0].removeprefix("# ")), rows


# ---------------------------------------------------------------------------------------------------------------------
# model_result.png
# ---------------------------------------------------------------------------------------------------------------------

MAX_OBSERVATIONS, MAX_ROWS = 6, 10


def draw_answer(evidence: Evidence) -> bytes:
    result, canvas = evidence.result, Canvas()
    answers = result["action"] or []
    canvas.header("What the model answered" if answers else "The model gave no answer", evidence)
    canvas.failure(evidence)
    for index in range(min(len(answers), MAX_OBSERVATIONS)):
        draw_observation(canvas, result, index, max(result["rows"] or 0, len(answers)))
    rows = max(result["rows"] or 0, len(answers))
    if answers and rows > MAX_OBSERVATIONS:
        canvas.text(WIDTH / 2, canvas.y + 6, f"… {rows - MAX_OBSERVATIONS} more observations in this run …", SANS, 14,
                    MUTED, "m")
        canvas.y += 32
    draw_fields(canvas, result)
    canvas.footer(evidence, [RESULT], "numbers are rounded here" if answers else "")
    return canvas.png(evidence.simulated)


def draw_observation(canvas: Canvas, result: dict[str, Any], index: int, count: int) -> None:
    """One observation: the action, the numbers beside it, and the distribution that it was taken from."""
    bars = choices(result, index)
    left_out = len(bars) - MAX_ROWS
    if left_out > 0:  # the likeliest, in their order
        bars = [bar for bar in bars if bar in sorted(bars, key=lambda bar: -bar.rank)[:MAX_ROWS]]
    spread = max((abs(bar.value) + 2 * bar.std for bar in bars if bar.std is not None), default=0.0)
    notes = [f"… {left_out} less likely or smaller in {RESULT}"] if left_out > 0 else []
    if spread:
        notes.append("dot mean, bar ± 1 std, line ± 2 std, → env_action")
    height = max(158, 76 + 34 * len(bars) + 22 * len(notes))
    title = "observation" if count == 1 else f"observation {index + 1} of {count}"
    x, y = canvas.card(height)
    wide = canvas.text(x, y + 10, title, SANS_BOLD, 15)
    observation = shown((result["observation"] or [])[index:index + 1] or None)
    observation = observation[1:-1] if observation.startswith("[[") else observation
    canvas.text(x + wide + 14, y + 10, fit(observation, MONO, 13, INNER - 62 - wide), MONO, 13, MUTED)
    y += 26
    canvas.box(x, y, INNER - 48, 1, EDGE)
    canvas.text(x, y + 28, "action", SANS, 13, MUTED)
    action = flat(result["action"][index])
    if len(action) == 1:
        text = shown(action[0]) if isinstance(action[0], int) else number(action[0])
        size = 40 if length(text, SANS_BOLD, 40) <= 118 else 22
        canvas.text(x, y + 34 + size * 0.85, fit(text, SANS_BOLD, size, 118), SANS_BOLD, size, GOOD)
    else:
        parts = [shown(part) if isinstance(part, int) else number(part) for part in action]
        for row, text in enumerate(elided(parts, max(4, round(1.4 * len(bars))))):
            text = f"… {text} more" if isinstance(text, int) else f"[{row}] {text}"
            canvas.text(x, y + 52 + row * 22, fit(text, MONO_BOLD, 14, 118), MONO_BOLD, 14, GOOD)
    for row, name in enumerate(("value", "log_prob", "entropy")):
        numbers = flat((result[name] or [])[index:index + 1])
        canvas.text(x + 128, y + 28 + row * 30, name, SANS, 13, MUTED)
        canvas.text(x + 302, y + 28 + row * 30, number(numbers[0]) if numbers else "-", MONO_BOLD, 14, INK, "r")
    left, track = x + 428, 236.0 if spread else 300.0
    for row, bar in enumerate(bars):
        top = y + 14 + row * 34
        canvas.text(left - 14, top + 15, fit(bar.label, MONO, 14, 92), MONO_BOLD if bar.chosen else MONO, 14, INK, "r")
        canvas.box(left, top, track, 22, "#e9edf2", radius=4)
        if bar.std is None:
            canvas.box(left, top, max(3.0, track * min(1.0, max(0.0, bar.value))), 22, GOOD if bar.chosen else FAINT,
                       radius=4)
        else:
            middle, unit = left + track / 2, track / 2 / (spread or 1.0)
            canvas.box(middle, top, 1, 22, FAINT)
            canvas.box(middle + (bar.value - 2 * bar.std) * unit, top + 10, 4 * bar.std * unit, 2, GOOD)
            canvas.box(middle + (bar.value - bar.std) * unit, top + 7, 2 * bar.std * unit, 8, GOOD, radius=2)
            canvas.box(middle + bar.value * unit - 6, top + 5, 12, 12, INK, CARD, radius=6)
        canvas.text(left + track + 12, top + 16, bar.note, MONO_BOLD if bar.chosen else MONO, 14)
    for row, note in enumerate(notes):
        canvas.text(left, y + 28 + len(bars) * 34 + row * 22, note, SANS, 12.5, MUTED)


@dataclass
class Bar:
    """One probability, or the mean and standard deviation of one Gaussian."""

    label: str
    value: float
    note: str
    chosen: bool
    std: float | None = None

    @property
    def rank(self) -> float:
        return abs(self.value) + (1 if self.chosen else 0)


def choices(result: dict[str, Any], index: int) -> list[Bar]:
    action, space = flat(result["action"][index]), result["action_space"]
    if result["mean"]:
        gaussians = zip(*(flat(result[name][index]) for name in ("mean", "std", "env_action")), strict=True)
        return [Bar(f"a[{part}]", mean, f"{mean:+.4f} ± {std:.4f} → {taken:+.4f}", False, std)
                for part, (mean, std, taken) in enumerate(gaussians)]
    probs = flat(result["probs"][index])
    if space["type"] == "MultiBinary":
        return [Bar(f"P(a[{part}]=1)", prob, f"{number(prob)} ◀ {taken:.0f}", bool(taken))
                for part, (prob, taken) in enumerate(zip(probs, action, strict=True))]
    sizes = space.get("nvec") or [len(probs)]  # MultiDiscrete: one distribution beside the other
    bars: list[Bar] = []
    for part, size in enumerate(sizes):
        for choice in range(size):
            chosen = action[part] == choice
            label = f"a[{part}]={choice}" if len(sizes) > 1 else f"action {choice}"
            bars.append(Bar(label, probs[len(bars)], number(probs[len(bars)]) + " ◀ chosen" * chosen, chosen))
    return bars


def draw_fields(canvas: Canvas, result: dict[str, Any]) -> None:
    """The fields of the JSON that carry the claim, in two columns."""
    checkpoint, versions, reference, cpu = (
        result[name] or {} for name in ("checkpoint", "versions", "reference", "cpu_reference"))

    def fields(names: str) -> list[tuple[str, Any]]:
        return [(name, result.get(name)) for name in names.split()]

    columns: tuple[list[tuple[str, list[tuple[str, Any]]]], ...] = (
        [("Where it ran", fields("engine npu_device_name npu_device model_device input_device output_device "
                                 "all_params_on_npu all_outputs_on_npu")),
         ("Time", fields("load_s forward_s hold_seconds total_s"))],
        [("What ran", [*fields("policy_class num_params source_revision"),
                       ("checkpoint.sha256", checkpoint.get("sha256")), *((name, versions.get(name)) for name in (
                           "torch", "torch_npu", "cann", "stable_baselines3"))]),
         ("Outcome", [*fields("exit_code simulated params_match_checkpoint bitwise_repeatable"),
                      *((f"{name}.within_tolerance", compared.get("within_tolerance"))
                        for name, compared in (("reference", reference), ("cpu_reference", cpu)) if compared)])])
    tall = max(sum(34 + 24 * len(pairs) for _, pairs in groups) for groups in columns)
    x, top = canvas.card(tall + 64, RESULT)
    wide = (INNER - 48 - 40) / 2
    for column, groups in enumerate(columns):
        left, y = x + column * (wide + 40), top + 4
        for title, pairs in groups:
            canvas.text(left, y + 14, title, SANS_BOLD, 13, GOOD)
            y += 24
            for key, value in pairs:
                canvas.box(left, y, wide, 1, "#e9edf2")
                used = canvas.text(left, y + 17, key, MONO, 13, MUTED)
                text = fit(shown(value), MONO_BOLD, 13, wide - used - 16)
                canvas.text(left + wide, y + 17, text, MONO_BOLD, 13, BAD if value is False and key != "simulated"
                            else INK, "r")
                y += 24
            y += 10


# ---------------------------------------------------------------------------------------------------------------------
# modelagent_live_session.png
# ---------------------------------------------------------------------------------------------------------------------

ANSI = ("#5d6b7a", "#ff8a70", "#7fd3a8", "#ffd166", "#7db8ff", "#d3a6ff", "#6fd6e0", "#d6dee7",
        "#8fa0b1", "#ffa994", "#a5e8c4", "#ffe08f", "#a8d0ff", "#e4c8ff", "#9be8ef", "#ffffff")
SEQUENCE = re.compile(
    r"\x1b\[(?P<args>[0-9;:?<=>]*)[ -/]*(?P<kind>[@-~])|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)|\x1b[ -/]+[0-~]|\x1b.|\x1b$",
    re.DOTALL)
Style = tuple[str, bool]  # colour, bold
PLAIN: Style = (SCREEN_TEXT, False)
MAX_COLUMNS, MAX_LINES = 120, 54


class Terminal:
    """Just enough of a terminal to show what its user saw: lines, the cursor, colours, erasing."""

    def __init__(self, columns: int | None) -> None:
        self.columns = columns
        self.rows: list[list[tuple[str, Style]]] = [[]]
        self.row = self.column = 0
        self.fill, self.bold, self.dim = "", False, False

    def feed(self, text: str) -> None:
        at = 0
        for match in SEQUENCE.finditer(text):
            self.write(text[at:match.start()])
            if match["kind"]:
                self.control(match["kind"], match["args"])
            at = match.end()
        self.write(text[at:])

    def write(self, text: str) -> None:
        for character in text:
            if character == "\n":
                self.move(self.row + 1, 0)
            elif character == "\r":
                self.column = 0
            elif character == "\b":
                self.column = max(0, self.column - 1)
            elif character == "\t":
                self.column += 8 - self.column % 8
            elif character >= " " and character != "\x7f":
                for part in printable_character(character):
                    self.put(part)

    def put(self, character: str) -> None:
        if self.columns and self.column >= self.columns:
            self.move(self.row + 1, 0)
        line = self.rows[self.row]
        line.extend([(" ", PLAIN)] * (self.column + 1 - len(line)))
        line[self.column] = (character, self.style())
        self.column += 1

    def style(self) -> Style:
        return self.fill or (SCREEN_DIM if self.dim else SCREEN_TEXT), self.bold

    def move(self, row: int, column: int) -> None:
        self.row, self.column = max(0, row), min(max(0, column), 1000)
        self.rows.extend([] for _ in range(min(self.row, 100_000) + 1 - len(self.rows)))
        self.row = min(self.row, len(self.rows) - 1)

    def control(self, kind: str, args: str) -> None:
        numbers = [int(part) if part.isdecimal() else 0 for part in re.split("[;:]", args[:200])]
        count = min(max(1, numbers[0]), 1000)
        line = self.rows[self.row]
        if kind == "m" and not args.startswith(("?", ">")):
            self.colour(numbers)
        elif kind in "AB":
            self.move(self.row + (count if kind == "B" else -count), self.column)
        elif kind in "CD":
            self.move(self.row, self.column + (count if kind == "C" else -count))
        elif kind == "G":
            self.move(self.row, count - 1)
        elif kind == "K":
            if numbers[0] == 0:
                del line[self.column:]
            else:
                end = self.column + 1 if numbers[0] == 1 else len(line)
                line[:end] = [(" ", PLAIN)] * min(end, len(line))
        elif kind == "P":
            del line[self.column:self.column + count]
        elif kind == "@":
            line[self.column:] = [(" ", PLAIN)] * count + line[self.column:self.column + 1000]
        elif kind == "J" and numbers[0] == 0:
            del line[self.column:], self.rows[self.row + 1:]
        elif kind == "J":  # `clear`: what was seen before stays part of the record
            self.move(len(self.rows) - 1 + bool(self.rows[-1]), 0)

    def colour(self, numbers: list[int]) -> None:
        """The sixteen colours, bold and dim; of the rest only as much as it takes to step over it."""
        codes = iter(numbers)
        for code in codes:
            if code == 0:
                self.fill, self.bold, self.dim = "", False, False
            elif code in (1, 2, 22):
                self.bold, self.dim = code == 1, code == 2
            elif code in (38, 48):
                for _ in range({5: 1, 2: 3}.get(next(codes, 0), 0)):
                    next(codes, 0)
            elif 30 <= code <= 37 or 90 <= code <= 97:
                self.fill = ANSI[code % 10 + (8 if code >= 90 else 0)]
            elif code == 39:
                self.fill = ""

    def lines(self) -> list[list[tuple[str, Style]]]:
        for line in self.rows:
            while line and line[-1][0] == " ":
                line.pop()
        while self.rows and not self.rows[-1]:
            self.rows.pop()
        return self.rows


def draw_session(evidence: Evidence, name: str, data: bytes) -> bytes:
    text = data.decode("utf-8", "replace")
    pid = evidence.result["pid"]
    if not re.search(rf"(?m)(?:^\[inference\] pid\s*: |NPU_READY_PID=){pid}\b", text):
        raise Refused(f"{name}: not the session of this run: PID {pid} does not log its start in it")
    header = re.match(r"Script started on [^\n]*\n", text)
    columns = re.search(r'COLUMNS="(\d{2,3})"', header[0]) if header else None
    text = text[header.end():] if header else text
    terminal = Terminal(int(columns[1]) if columns else None)
    terminal.feed(re.sub(r"\n?Script done on [^\n]*\n?$", "", text))
    lines = terminal.lines()
    prompt = re.compile(r"^\S{0,60}[$#] \S")  # what a command printed is cut in its middle, never a whole command
    starts = [index for index, line in enumerate(lines) if prompt.match("".join(cell[0] for cell in line[:64]))]
    rows: list[list[Run] | int] = []
    for begin, end in zip([0, *starts], [*starts, len(lines)], strict=True):
        block = [part for line in lines[begin:end] for part in wrapped(line)]
        rows += [part if isinstance(part, int) else runs(part) for part in elided(block, MAX_LINES)]
    canvas = Canvas()
    canvas.header("The session, as it was recorded", evidence)
    canvas.failure(evidence)
    widest = max((part.column + len(part.text) for row in rows if not isinstance(row, int) for part in row), default=0)
    canvas.screen(f"terminal · {printable(name)}", max(80, widest), elided(rows, 400))
    evidence.digests[name] = hashlib.sha256(data).hexdigest()
    canvas.footer(evidence, [name, RESULT])
    return canvas.png(evidence.simulated or "SIMULATED" in text)


def wrapped(line: list[tuple[str, Style]]) -> list[list[tuple[str, Style]]]:
    """A line of the terminal in lines of the picture; one that is far too long is cut with a mark."""
    if len(line) <= MAX_COLUMNS:
        return [line]
    indent: list[tuple[str, Style]] = [("↳", (SCREEN_DIM, False)), (" ", PLAIN)]
    parts, rest = [line[:MAX_COLUMNS]], line[MAX_COLUMNS:]
    while rest and len(parts) < 5:
        parts.append(indent + rest[:MAX_COLUMNS - 2])
        rest = rest[MAX_COLUMNS - 2:]
    if rest:
        parts[-1][-1] = ("…", (AMBER, True))
    return parts


def runs(line: list[tuple[str, Style]]) -> list[Run]:
    out: list[Run] = []
    for column, (character, (fill, bold)) in enumerate(line):
        if out and (out[-1].fill, out[-1].bold) == (fill, bold):
            out[-1].text += character
        else:
            out.append(Run(column, character, fill, bold))
    return out


# ---------------------------------------------------------------------------------------------------------------------
# The whole
# ---------------------------------------------------------------------------------------------------------------------


def replace_file(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.render.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def refresh_sums(pictures: dict[str, bytes]) -> None:
    """The lines of these pictures in the project's SHA256SUMS; every other line stays as it is."""
    sums = PROJECT / "SHA256SUMS"
    if not sums.exists():
        return
    lines = {f"assets/{name}": f"{hashlib.sha256(data).hexdigest()}  assets/{name}" for name, data in pictures.items()}
    kept = [lines.pop(line[66:], line) for line in sums.read_text("utf-8").splitlines()]
    replace_file(sums, "".join(line + "\n" for line in [*kept, *lines.values()]).encode())


def main() -> int:
    parser = argparse.ArgumentParser("render.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", metavar="DIR", type=Path, default=PROJECT / "logs",
                        help="the evidence (default: logs of the project)")
    parser.add_argument("--session", metavar="FILE", type=Path, help="the transcript of a terminal session of this run")
    parser.add_argument("--out", metavar="DIR", type=Path, default=ASSETS,
                        help="where the pictures go (default: assets of the project)")
    args = parser.parse_args()
    try:
        evidence = read_evidence(args.logs)
        pictures = {WORKFLOW: draw_workflow(evidence), DEVICE: draw_device(evidence), ANSWER: draw_answer(evidence)}
        if args.session:
            pictures[SESSION] = draw_session(evidence, args.session.name, read_file(args.session, MAX_SESSION_BYTES))
        args.out.mkdir(parents=True, exist_ok=True)
        for name, data in pictures.items():
            replace_file(args.out / name, data)
            print(f"{name}: drawn")
        if args.out.resolve() == ASSETS:
            refresh_sums(pictures)
    except Refused as error:
        print(f"render.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"render.py: {error.filename or ''}: {error.strerror or error}", file=sys.stderr)
        return 1
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        # what --check lets pass in the evidence of a failed run need not be of any shape
        print(f"render.py: {RESULT}: cannot be drawn ({type(error).__name__}: {error})", file=sys.stderr)
        return 1
    if not args.session and (args.out / SESSION).exists():
        print(f"{SESSION}: left as it is; --session FILE draws it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
