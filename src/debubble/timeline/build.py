"""A run's traces in → its `Timeline` out, part by part: ranks that never talk are strangers."""

from __future__ import annotations

from collections.abc import Sequence

from debubble.timeline.from_table import build_from_table
from debubble.timeline.job import tell_memory
from debubble.timeline.model import (
    Timeline,
)
from debubble.timeline.part import build_part
from debubble.timeline.parts import all_inferred_alike, find_parts, join_parts
from debubble.timeline.peers import name_peers
from debubble.timeline.steps import marks_steps
from debubble.trace.columns import RankTrace
from debubble.trace.run import Run


def build_run(run: Run) -> Timeline:
    """Build the timeline of whatever was read: traces of ranks, or an op table."""
    if run.ranks or not run.tables:
        return tell_memory(build_timeline(run.ranks), run.sidecars)
    return build_from_table(run.tables[0])


def build_timeline(traces: Sequence[RankTrace]) -> Timeline:
    """Turn unlabelled ranks into pipelines of named passes, each on one clock."""
    named, unknown_groups = name_peers(traces)
    by_rank = {trace.rank: trace for trace in named}
    groups = [[by_rank[rank] for rank in ranks] for ranks in find_parts(named)]
    marked = any(marks_steps(trace) for trace in named)
    built = [build_part(part, marked=marked) for part in groups]
    if not all_inferred_alike(built):
        built = [build_part(part, marked=False, may_infer=False) for part in groups]
    return join_parts(built, unknown_groups)
