"""One step of a pipeline in → a picture of it: SVG, with a lane a rank.

The SVG brings its own ground, light or dark as the reader's system is, so that it can be read
wherever it is embedded. Passes of one kind are one path, and so are waits of one cause: files stay
small.
"""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from debubble.ledger.causes import Cause
from debubble.report.chrome import assign_tracks
from debubble.report.frame import Frame, decimals_of, round_distance
from debubble.report.markup import rect, safe, text
from debubble.report.palette import DARK, KINDS, LABEL_INK, LIGHT, cause_rules, hatch_patterns
from debubble.timeline.model import PassKind
from debubble.units import NS_PER_MS, show_duration, show_percent

_WIDTH, _LEFT, _RIGHT, _PADDING = 1000, 66, 84, 14
_ACROSS = _WIDTH - _LEFT - _RIGHT
_LANE, _STAGES, _GAP = 26, 12, 7
_TITLE_LETTERS, _TITLE_LINE = 110, 20
_LEGEND_LINE, _SWATCH = 20, 22
# Widths of letters differ from font to font; these are the wider ones.
_DIGIT, _LETTER = 0.57, 6.6
# Numbers on narrow passes are small print: a picture of many microbatches is zoomed into.
_PRINT = (11.0, 8.0, 5.0, 2.0)
_TICK = 80
# Narrower ones of a kind that touch are drawn as one: nobody could tell them apart.
_TOLD_APART = 1.5
# Air after each pass, so that neighbours are told apart.
_BETWEEN = 0.5
_SHOWN = ("start_ns", "end_ns", "kind", "step", "microbatch", "stage")
_XMLNS = "http://www.w3.org/2000/svg"
_SETTING = (
    'role="img" aria-labelledby="answer"'
    ' font-family="system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif"'
)
# What XML cannot hold even when escaped.
_NO_XML = re.compile("[\ufffe\uffff]")

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


def draw_svg(frame: Frame, answer: str) -> str:
    """Draw the step under the answer; without waits, the lanes are blank between passes."""
    answer = _NO_XML.sub("\ufffd", answer)
    heading = textwrap.wrap(answer.replace(" %", "\u00a0%"), _TITLE_LETTERS) or [""]
    top = _PADDING + _TITLE_LINE * (len(heading) + 1) + 10
    tops, bottom = _tops(frame, top)
    legend, height = _legend(frame, bottom + 44)
    parts = [
        f'<svg xmlns="{_XMLNS}" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" {_SETTING}>',
        f'<title id="answer">{safe(answer)}</title>',
        _style(frame),
        f"<defs>{hatch_patterns(_seen(frame))}</defs>",
        f'<rect class="page" width="{_WIDTH}" height="{height}" rx="8"/>',
        *_heading(heading, frame),
        *_axis(frame, top, bottom),
        *_waits(frame, tops),
        *_passes(frame, tops),
        *_names(frame, tops),
        *legend,
    ]
    return "\n".join([*parts, "</svg>", ""])


def _style(frame: Frame) -> str:
    def colours(ground: Mapping[str, str]) -> str:
        return (
            f".page{{fill:{ground['ground']}}}.ink{{fill:{ground['text']}}}"
            f".muted{{fill:{ground['muted']}}}.line{{stroke:{ground['line']}}}"
            f".lane{{fill:{ground['line']};fill-opacity:.25}}"
            + cause_rules(_seen(frame), in_dark=ground is DARK)
        )

    rest = f".n{{text-anchor:middle;fill:{LABEL_INK}}}.s{{text-anchor:middle}}"
    dark = f"@media(prefers-color-scheme:dark){{{colours(DARK)}}}"
    return f"<style>{colours(LIGHT)}{rest}{dark}</style>"


def _seen(frame: Frame) -> list[Cause]:
    """Return the causes of its waits, in their order."""
    causes = {wait.cause for wait in frame.waits}
    return [cause for cause in Cause if cause in causes]


def _heading(lines: Sequence[str], frame: Frame) -> Iterator[str]:
    y = _PADDING + 12
    for line in lines:
        yield (
            f'<text class="ink" x="{_PADDING}" y="{y}" font-size="14" font-weight="600">'
            f"{safe(line)}</text>"
        )
        y += _TITLE_LINE
    yield text(_PADDING, y, f"{frame.name}: {show_duration(frame.length_ns)}", "muted", size=12)


def _tops(frame: Frame, top: int) -> tuple[dict[int, int], int]:
    """Return where each lane begins, and where the last one ends."""
    tops = {}
    for rank in frame.ranks:
        tops[rank.rank] = top
        top += _LANE + _GAP + (_STAGES if len(rank.stages) > 1 else 0)
    return tops, top


def _axis(frame: Frame, top: int, bottom: int) -> Iterator[str]:
    """Rule the lanes at round times."""
    length_ms = frame.length_ns / NS_PER_MS
    apart = round_distance(length_ms * _TICK / _ACROSS)
    places = [tick * apart for tick in range(int(length_ms / apart) + 1)]
    rules = "".join(
        f"M{_LEFT + _ACROSS * position / length_ms:.1f} {top - 4}V{bottom}" for position in places
    )
    yield f'<path class="line" d="{rules}" fill="none"/>'
    for position in places:
        x = _LEFT + _ACROSS * position / length_ms
        label = f"{position:.{decimals_of(apart)}f}{' ms' if position == 0 else ''}"
        yield text(x, bottom + 14, label, "muted", "middle", 11)


def _x(frame: Frame, moment_ns: int) -> float:
    share = (moment_ns - frame.begin_ns) / frame.length_ns
    return round(_LEFT + _ACROSS * min(max(share, 0.0), 1.0), 1)


def _waits(frame: Frame, tops: dict[int, int]) -> Iterator[str]:
    """Draw waits, of each cause one path; passes are laid over them and hide gaps inside."""
    boxes: defaultdict[Cause, list[Box]] = defaultdict(list)
    for wait in frame.waits:
        top = tops[wait.rank]
        left, right = _x(frame, wait.start_ns), _x(frame, wait.end_ns)
        boxes[wait.cause].append((left, top, right, top + _LANE))
    for rank in frame.ranks:
        yield rect(_LEFT, tops[rank.rank], _ACROSS, _LANE, "lane")
    for cause in _seen(frame):
        yield f'<path d="{_path(_join(boxes[cause]))}" fill="url(#h-{cause})"/>'


def _join(boxes: Iterable[Box]) -> list[Box]:
    """Make one of boxes that touch, and leave out what has no width."""
    joined: list[Box] = []
    for left, top, right, bottom in sorted(boxes, key=lambda box: (box[1], box[0])):
        before = joined[-1] if joined else None
        if before and before[1] == top and left <= before[2]:
            joined[-1] = (before[0], top, max(before[2], right), bottom)
        elif right > left:
            joined.append((left, top, right, bottom))
    return joined


def _path(boxes: Iterable[Box]) -> str:
    return "".join(
        f"M{left:g} {top:g}h{right - left:.4g}v{bottom - top:g}H{left:g}z"
        for left, top, right, bottom in boxes
    )


def _passes(frame: Frame, tops: dict[int, int]) -> Iterator[str]:
    """Draw passes, of each kind one path, then their numbers.

    Where a rank runs passes side by side, its lane is cut into as many.
    """
    boxes: defaultdict[tuple[int, bool], list[Box]] = defaultdict(list)
    labels: defaultdict[tuple[str, float], list[str]] = defaultdict(list)
    # As many for all, so that passes as long as each other are written alike.
    digits = len(str(frame.passes.microbatch.max(initial=0)))
    blur = frame.length_ns // (2 * _ACROSS)
    for rank in frame.ranks:
        passes = frame.passes.where(frame.passes.rank == rank.rank)
        until = np.maximum(passes.end_ns - blur, passes.start_ns)
        tracks = assign_tracks(passes.start_ns, until)
        height = _LANE / (1 + max(tracks, default=0))
        columns = [getattr(passes, name).tolist() for name in _SHOWN]
        for track, row in zip(tracks, zip(*columns, strict=True), strict=True):
            start, end, kind, step, microbatch, stage = row
            left, right = _x(frame, start), _x(frame, end)
            top = tops[rank.rank] + track * height
            boxes[kind, step != frame.step].append((left, top, right, top + height))
            room = right - left - _BETWEEN
            size = next((size for size in _PRINT if digits * _DIGIT * size + 0.4 <= room), None)
            if size is None or microbatch < 0:
                continue
            middle = left + room / 2
            label = text(middle, top + height / 2 + 0.36 * size, microbatch)
            labels["n", size].append(label)
            if len(rank.stages) > 1 and track == 0:
                below = text(middle, tops[rank.rank] + _LANE + 9, stage)
                labels["s muted", min(size, 9.0)].append(below)
    for (kind, other), drawn in boxes.items():
        pale = ' opacity=".4"' if other else ""
        narrow = _join(box for box in drawn if box[2] - box[0] <= _TOLD_APART)
        cut = [
            (left, top, right - _BETWEEN, bottom)
            for left, top, right, bottom in drawn
            if right - left > _TOLD_APART
        ]
        fill = KINDS[PassKind(kind)].fill
        yield f'<path d="{_path([*cut, *narrow])}" fill="{fill}"{pale}/>'
    for (style, size), texts in labels.items():
        yield f'<g class="{style}" font-size="{size:g}">{"".join(texts)}</g>'


def _names(frame: Frame, tops: dict[int, int]) -> Iterator[str]:
    """Write each rank's name before its lane, and after it how much of the step it waits."""
    for rank in frame.ranks:
        y = tops[rank.rank] + _LANE / 2 + 4
        name = f"rank {rank.rank}"
        size = min(12.0, (_LEFT - 8) / (_DIGIT * len(name)))
        yield text(_LEFT - 8, y, name, "ink", "end", size)
        if len(rank.stages) > 1:
            yield text(_LEFT - 8, tops[rank.rank] + _LANE + 9, "stage", "muted", "end", 9)
        if frame.waits:
            waited = sum(w.end_ns - w.start_ns for w in frame.waits if w.rank == rank.rank)
            words = f"waits {show_percent(waited / frame.length_ns)}"
            yield text(_LEFT + _ACROSS + 8, y, words, "muted", size=12)


def _legend(frame: Frame, y: int) -> tuple[list[str], int]:
    """Explain colours and hatches that were used, and return how high the picture gets."""
    entries = [
        (look.fill, look.word, kind.name)
        for kind, look in KINDS.items()
        if (frame.passes.kind == kind).any()
    ]
    entries += [(f"url(#h-{cause})", cause.word, "") for cause in _seen(frame)]
    parts, x = [], float(_PADDING)
    for fill, words, letter in entries:
        width = _SWATCH + 6 + _LETTER * len(words) + 16
        if x + width > _WIDTH:
            x, y = _PADDING, y + _LEGEND_LINE
        parts.append(rect(x, y - 12, _SWATCH, 16, fill=fill))
        if letter:
            parts.append(text(x + _SWATCH / 2, y, letter, "n", size=11))
        parts.append(text(x + _SWATCH + 6, y, words, "ink", size=12))
        x += width
    notes = ["numbers: microbatches"]
    if (frame.passes.step != frame.step).any():
        notes.append("pale: another step")
    notes.append("hatched: waits, by cause" if frame.waits else "blank: no pass")
    y += _LEGEND_LINE
    parts.append(text(_PADDING, y, "; ".join(notes), "muted", size=12))
    return parts, y + _PADDING
