"""Logs of timers in → why they are no timeline, and the simulation that they are enough for.

Megatron's and NeMo's timers and DeepSpeed's `wall_clock_breakdown` print how long things took, and
not when. No wait can be told from that; what passes cost can, and `simulate` takes costs by hand.

    forward-compute ................................: (812.41, 934.07)       Megatron, NeMo
    time (ms) | forward-compute: 812.41 | backward-compute: 1623.80          older Megatron
    [Rank 0] time (ms) | fwd_microstep: 21.36 | bwd_microstep: 45.10         DeepSpeed
"""

from __future__ import annotations

import re
from statistics import median

from debubble.errors import TraceError
from debubble.trace.format import OTHER, Format, Reading, TraceFile
from debubble.trace.source import Limits

_DECIMAL = rb"\d{1,12}(?:\.\d{1,12})?"
_NUMBER = rb"\(?\s*(%b)(?:\s*,\s*(%b)\s*\))?" % (_DECIMAL, _DECIMAL)
_MEGATRON = {
    kind: re.compile(rb"%b-compute\s*\.*\s*:\s*%b" % (kind, _NUMBER))
    for kind in (b"forward", b"backward")
}
_DEEPSPEED = {
    kind: re.compile(rb"time \(ms\)[^\n]*?\b%b(?:_microstep)?:\s*(%b)" % (kind, _DECIMAL))
    for kind in (b"fwd", b"bwd")
}
_NEEDED = "a start of each pass is needed to tell waits: record traces with `debubble capture`"


def recognise(file: str, prefix: bytes) -> TraceFile | None:
    """Tell a log by lines that only such timers print, and say what can be made of it."""
    for whose, patterns in (("DeepSpeed's wall_clock_breakdown", _DEEPSPEED),
                            ("Megatron's timers", _MEGATRON)):  # fmt: skip
        found = [pattern.findall(prefix) for pattern in patterns.values()]
        if not all(found):
            continue
        # Of a range over ranks the upper end is the slowest stage.
        forward, backward = (
            median(
                float(one[-1] or one[0]) if isinstance(one, tuple) else float(one) for one in all_of
            )
            for all_of in found
        )
        if whose.startswith("DeepSpeed"):
            costs = f"--forward {forward:.4g}ms --backward {backward:.4g}ms"
        else:
            costs = f"--forward {forward:.5g}ms/M --backward {backward:.5g}ms/M"
        why = TraceError(
            f"is a log of {whose}: how long passes took, and not when; {_NEEDED}",
            hint=f"what they cost is enough for `debubble simulate --stages P --microbatches M "
            f"{costs}`, with your P and M put in",
            file=file,
        )
        return TraceFile(file=file, format=OTHER, why_not=why)
    return None


def read(known: TraceFile, limits: Limits) -> Reading:  # noqa: ARG001 (no log is ever read)
    """Say once more why it is none."""
    return Reading(error=known.why_not)


FORMAT = Format(
    name="timer log",
    a_file="",
    position=45,
    in_names=(),
    sign=re.compile(rb"-compute|time \(ms\)"),
    recognise=recognise,
    read=read,
    one_a_rank=False,
)
