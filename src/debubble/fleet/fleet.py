"""The files of many ranks in → each rank as a digest, and what the run must know of all of them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from debubble.errors import Gap, TraceError
from debubble.fleet.part import PartOrder
from debubble.fleet.question import Question
from debubble.fleet.scout import Interning, Scout, scout_file
from debubble.fleet.spool import Place, Spool
from debubble.timeline.build import find_parts
from debubble.timeline.chain import choose_groups, rank_of, translate_peers
from debubble.trace.columns import UNKNOWN
from debubble.trace.digest.place import DigestPlace
from debubble.trace.engine import Engine, Progress, map_files
from debubble.trace.formats import Format, Recognised
from debubble.trace.reading import Reading
from debubble.trace.run import Found, Run, settle_run, show_ranks
from debubble.trace.source import Limits
from debubble.trace.summary import RankSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A run of many ranks."""

    run: Run
    """With light ranks."""
    places: dict[int, Place]
    """Where each rank lies."""
    marked: bool
    """Some rank marks steps."""
    limits: Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What is remembered of a rank until it is settled which one it is."""

    place: Place | None
    marked: bool
    summary: RankSummary


def read_fleet(  # noqa: PLR0913 (one argument a question)
    found: Found,
    spool: Spool | None,
    *,
    engine: Engine,
    limits: Limits,
    rank: int | None,
    on_progress: Progress | None,
    digests: DigestPlace | None,
) -> Fleet:
    """Scout every file, wherever the engine's workers are; without a spool, for summaries alone."""
    interning = Interning()
    readings: list[Reading] = []
    seen: dict[tuple[str, int | None], _Seen] = {}
    task = partial(scout_file, digests=digests)
    scouting = map_files(task, found.capture.files, engine, limits, on_progress, ordered=True)
    with closing(scouting):
        for known, outcome in scouting:
            if isinstance(outcome, TraceError):
                readings.append(Reading(error=outcome))
                continue
            traces = tuple(interning.intern(trace) for trace in outcome.reading.traces)
            readings.append(replace(outcome.reading, traces=traces))
            for scout in outcome.scouts:
                place = _keep(known, scout, spool)
                key = (scout.light.file, scout.light.rank)
                seen[key] = _Seen(place=place, marked=scout.marked, summary=scout.summary)
    run = settle_run(found, readings, rank)
    marked = False
    places, summaries = {}, []
    for trace in run.ranks:
        number = rank_of(trace)
        told = seen.get((trace.file, trace.rank)) or seen[trace.file, None]
        marked |= told.marked
        summaries.append(replace(told.summary, rank=number))
        if told.place is not None:
            places[number] = replace(told.place, rank=number)
    run = replace(run, summaries=tuple(summaries))
    return Fleet(run=run, places=places, marked=marked, limits=limits)


def _keep(known: Recognised, scout: Scout, spool: Spool | None) -> Place | None:
    if spool is None:
        return None
    if scout.digest is None:
        return Place(file=known.file, rank=UNKNOWN)
    return spool.put(scout.digest, UNKNOWN)


def order_parts(fleet: Fleet, question: Question) -> tuple[list[PartOrder], tuple[Gap, ...]]:
    """Tell which ranks talk to each other, and order each such part to be measured."""
    members, gaps = choose_groups(fleet.run.ranks)
    named = [translate_peers(trace, members.get(rank_of(trace))) for trace in fleet.run.ranks]
    sidecars = {one.rank: one for one in fleet.run.sidecars}
    orders = [
        PartOrder(
            file=f"ranks {show_ranks(ranks)}",
            format=Format.DIGEST,
            places=tuple(fleet.places[rank] for rank in ranks),
            members=tuple((rank, members[rank]) for rank in ranks if rank in members),
            sidecars=tuple(sidecars[rank] for rank in ranks if rank in sidecars),
            marked=fleet.marked,
            question=question,
        )
        for ranks in find_parts(named)
    ]
    return orders, gaps
