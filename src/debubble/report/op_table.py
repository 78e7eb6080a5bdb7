"""A simulated step in → an op table: every verb reads it like a run of its own."""

from __future__ import annotations

import csv
import io

import numpy as np

from debubble.simulate.program import Program, Times
from debubble.timeline.model import PassKind
from debubble.units import NS_PER_US

_OPS = {
    PassKind.F: "forward",
    PassKind.B: "backward",
    PassKind.I: "input-grad",
    PassKind.W: "wgrad",
}


def write_table(program: Program, times: Times, message_bytes: float | None) -> str:
    """Write a simulated step as an op table: every verb reads it like a run of its own."""
    passes, messages, batches = program.passes, program.messages, program.batches
    begin = int(times.pass_start.min())
    rows: list[tuple[int, int, int, str, int, int, int | str, int | str]] = []
    columns = (passes.place, passes.stage, passes.microbatch, passes.kind)
    spans = zip(times.pass_start.tolist(), times.pass_end.tolist(), strict=True)
    of_pass = list(zip(*(column.tolist() for column in columns), strict=True))
    for (rank, stage, microbatch, kind), (start, end) in zip(of_pass, spans, strict=True):
        rows.append((rank, stage, microbatch, _OPS[PassKind(kind)], start, end, "", ""))
    size = "" if message_bytes is None else round(message_bytes)
    index = batches.place.tolist()
    start, end = np.maximum(times.batch_start, begin).tolist(), times.batch_end.tolist()
    ends = (messages.producer.tolist(), messages.sent.tolist(), messages.received.tolist())
    for producer, sent, received in zip(*ends, strict=True):
        _, stage, microbatch, kind = of_pass[producer]
        way, next_stage = ("forward", stage + 1) if kind == PassKind.F else ("backward", stage - 1)
        for at, number, row, peer, op in (
            (index[sent], stage, sent, index[received], "send"),
            (index[received], next_stage, received, index[sent], "receive"),
        ):
            rows.append((at, number, microbatch, f"{way}-{op}", start[row], end[row], size, peer))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head = ("step", "rank", "stage", "microbatch", "op", "start_us", "duration_us", "bytes", "peer")
    writer.writerow(head)
    for rank, stage, microbatch, op, began, ended, length, peer in sorted(rows, key=lambda r: r[4]):
        times_us = ((began - begin) / NS_PER_US, (ended - began) / NS_PER_US)
        writer.writerow((0, rank, stage, microbatch, op, *times_us, length, peer))
    return text.getvalue()
