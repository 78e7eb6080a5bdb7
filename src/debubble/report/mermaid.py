"""A measured pipeline in → a Mermaid diagram out: each stage's time, each hop's, each wait.

It comes in the fence that GitHub and GitLab draw. No colours but those of the culprits' frames, so
that it fits their light and dark pages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby

from debubble.errors import UsageError
from debubble.ledger.causes import CAUSE_OF, Cause
from debubble.ledger.causes import CAUSES as ALL_CAUSES
from debubble.ledger.ledger import Ledger
from debubble.ledger.verdict import MATTERS, Named
from debubble.report.palette import CAUSES, Look
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.model import PassKind, RankTimeline
from debubble.timeline.transfers import HopFigures
from debubble.units import printable, show_bytes, show_duration, show_share

# What Mermaid draws by default, as GitHub has it; beyond, it shows an error instead.
MOST_EDGES = 500
# Of a rank's step: less is left to `find`, else a diagram is all small print.
_WORTH_A_LINE = 0.01
# What every pipeline has is nobody's fault.
_FRAMED = (Cause.IMBALANCE, Cause.JITTER, Cause.SLOW_LINK)
_ESCAPES = {'"': "quot", "<": "lt", ">": "gt", "&": "amp", "#": "35", "`": "96"}


Blamed = tuple[Named, Look, str]


def draw_mermaid(
    pipeline: PipelineFigures, ledger: Ledger | None, causes: Sequence[Named], answer: str
) -> str:
    """Draw ranks with their stages and waits, and a line for each hop and direction."""
    edges = [(hop, pair) for hop in pipeline.hops for pair in hop.stages]
    if len(edges) > MOST_EDGES:
        raise UsageError(
            f"Mermaid draws no more than {MOST_EDGES} lines, and this pipeline has {len(edges)}",
            hint="draw it with --svg",
        )
    blamed = _blamed(causes)
    lines = ["```mermaid", "---", f"title: {json.dumps(printable(answer))}", "---", "flowchart LR"]
    for rank in pipeline.ranks:
        lines += [f"    {line}" for line in _rank(pipeline, ledger, rank, blamed)]
    for hop, (source, to) in edges:
        why = [words for named, _, words in blamed if named.hop == (hop.source, hop.destination)]
        label = _lines([*_hop(hop), *why])
        arrow = "-->" if to > source else "-.->"
        lines.append(f'    s{source} {arrow}|"{label}"| s{to}')
    lines += [f"    {line}" for line in _frames(blamed, edges)]
    return "\n".join([*lines, "```"])


def _rank(
    pipeline: PipelineFigures, ledger: Ledger | None, rank: RankTimeline, blamed: Sequence[Blamed]
) -> Iterator[str]:
    rows = [row for row in pipeline.stages if row.rank == rank.rank]
    yield f'subgraph r{rank.rank}["rank {rank.rank}"]'
    for stage, own in groupby(rows, lambda row: row.stage):
        why = [words for culprit, _, words in blamed if culprit.stage == stage]
        took = [f"{PassKind(row.kind).name} {show_duration(row.median_ns)}" for row in own]
        yield f'    s{stage}["{_lines([f"stage {stage}", *took, *why])}"]'
    waits = _waits(pipeline, ledger, rank)
    if waits:
        yield f'    w{rank.rank}("{_lines(waits)}")'
    yield "end"


def _waits(pipeline: PipelineFigures, ledger: Ledger | None, rank: RankTimeline) -> list[str]:
    """Say how much of a step a rank waits, and why, the longest first."""
    if ledger is None:
        share = next(own.bubble_fraction for own in pipeline.shares if own.rank == rank.rank)
        return [] if share is None else [f"waits {show_share(share)}"]
    batch = ledger.batch_latency_ns
    waits = {
        cause: share
        for cause, share in ledger.shares(ledger.ranks.index(rank)).items()
        if ALL_CAUSES.index(cause) > ALL_CAUSES.index(Cause.COLLECTIVE)
    }
    largest = sorted(waits.items(), key=lambda item: -item[1])
    whole = sum(waits.values())
    return [
        f"waits {show_duration(whole * batch)} ({show_share(whole)})",
        *(
            f"{CAUSES[cause].word} {show_duration(share * batch)}"
            for cause, share in largest
            if share > _WORTH_A_LINE
        ),
    ]


def _hop(hop: HopFigures) -> list[str]:
    wire = "wire hidden" if hop.wire_ns is None else f"wire {show_duration(hop.wire_ns)}"
    size = [show_bytes(hop.message_bytes)] if hop.message_bytes >= 0 else []
    return [*size, wire, f"wait {show_duration(hop.wait_ns)}"]


def _blamed(causes: Sequence[Named]) -> list[Blamed]:
    """Return the stages and hops that cost enough to be framed, how they look, and why in words."""
    found = []
    for named in causes:
        whole = named.saving.batch_latency_ns + named.saving.saved_ns
        saved = named.saving.saved_ns if named.culprit_saved_ns is None else named.culprit_saved_ns
        if named.cause in _FRAMED and saved >= MATTERS * whole:
            look = CAUSES[CAUSE_OF[named.cause]]
            found.append((named, look, f"{look.word}: {show_duration(saved)}"))
    return found


def _frames(
    blamed: Sequence[Blamed], edges: Sequence[tuple[HopFigures, tuple[int, int]]]
) -> Iterator[str]:
    for named, look, _ in blamed:
        frame = f"stroke:{look.colour},stroke-width:4px"
        if named.stage is not None:
            yield f"style s{named.stage} {frame}"
        for place, (hop, _) in enumerate(edges):
            if (hop.source, hop.destination) == named.hop:
                yield f"linkStyle {place} {frame}"


def _lines(parts: Sequence[str]) -> str:
    """Write a label, with Mermaid's codes for what would end it or be taken for HTML."""
    return "<br/>".join(
        "".join(f"#{_ESCAPES[sign]};" if sign in _ESCAPES else sign for sign in printable(part))
        for part in parts
    )
