"""Paths and URLs in → one capture of a run: all its ranks, what is missing of them, what is unread.

`find_run` recognises the files and chooses a capture, `read_run` reads it. Whatever cannot be read,
or belongs to no rank, becomes a gap with a name, and the others go on.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from debubble.errors import Code, Gap, RunNotFound, TraceError, as_gap
from debubble.trace.captures import (
    FORMATS,
    GIVE_TRACES,
    Capture,
    choose_capture,
    group_captures,
    recognise,
)
from debubble.trace.columns import (
    Operation,
    OpTable,
    RankSummary,
    RankTrace,
    join_op_tables,
    summarise,
)
from debubble.trace.digest import SUFFIX as DIGEST_SUFFIX
from debubble.trace.digest import DigestPlace, keep_digest, stamp_of, unpack_digest
from debubble.trace.engine import LOCAL, Engine, Progress, map_files
from debubble.trace.format import (
    OTHER,
    OTHER_JSON,
    PICTURE,
    Reading,
    TraceFile,
    rank_from_name,
)
from debubble.trace.laws import hold_to_laws
from debubble.trace.sidecar import Sidecar, is_sidecar, read_sidecar
from debubble.trace.source import DEFAULT_LIMITS, Limits, each, expand, inflate, is_url
from debubble.units import counted, show_first, show_ranks

_Trace = TypeVar("_Trace", RankTrace, OpTable)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The files of one capture, before they are read."""

    capture: Capture
    captures: tuple[Capture, ...]
    left_alone: tuple[str, ...]
    """JSON beside the traces that is something else."""
    gaps: tuple[Gap, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One capture, read. `ranks` is sorted; op tables hold all their ranks themselves."""

    found: RunFiles
    ranks: tuple[RankTrace, ...]
    tables: tuple[OpTable, ...]
    world_size: int | None
    missing_ranks: tuple[int, ...]
    gaps: tuple[Gap, ...]
    sidecars: tuple[Sidecar, ...] = ()
    """What the ranks said of themselves, where they did."""
    summaries: tuple[RankSummary, ...] = ()
    """Of ranks that are not held in full."""

    def summarised(self) -> tuple[RankSummary, ...]:
        """Return what each rank's trace holds."""
        return self.summaries or tuple(summarise(trace) for trace in self.ranks)


def find_run(
    places: Sequence[str], *, capture: str | None = None, limits: Limits = DEFAULT_LIMITS
) -> RunFiles:
    """Find the traces the user means; the newest complete capture where there are several."""
    files, named = expand(places)
    digest_files = [file for file in files if file.endswith(DIGEST_SUFFIX)]
    digests, left_alone, gaps = _recognise_all(digest_files, limits, named=named)
    # Digests come first, so that the traces they were made of are spared.
    digests, spared, differing = _pair_digests(digests, files, limits)
    spared = spared.union(digest_files)
    others = [
        file for file in files if file not in spared and not (is_sidecar(file) and len(files) > 1)
    ]
    traces, also_left, more = _recognise_all(others, limits, named=named)
    left_alone += also_left
    gaps += [*differing, *more]
    if not digests and not traces:
        raise _nothing_found(places, gaps, left_alone)
    order = {file: position for position, file in enumerate(files)}
    traces = sorted([*digests, *traces], key=lambda known: order[known.file])
    captures = group_captures(traces, named=named)
    chosen, more = choose_capture(captures, capture)
    return RunFiles(
        capture=chosen, captures=captures, left_alone=tuple(left_alone), gaps=(*gaps, *more)
    )


def read_run(  # noqa: PLR0913 (each may be left out)
    found: RunFiles,
    *,
    engine: Engine = LOCAL,
    limits: Limits = DEFAULT_LIMITS,
    rank: int | None = None,
    on_progress: Progress | None = None,
    digests: DigestPlace | None = None,
) -> Run:
    """Read every file of a capture; a file that cannot be read becomes a gap, the others go on.

    Where there is a place for digests, that of each file is written as it is read.
    """
    task = partial(read_file, digests=digests)
    outcomes = map_files(task, found.capture.files, engine, limits, on_progress)
    with closing(outcomes):
        readings = (
            Reading(error=outcome) if isinstance(outcome, TraceError) else outcome
            for _, outcome in outcomes
        )
        return settle_run(found, readings, rank)


def read_file(known: TraceFile, limits: Limits, digests: DigestPlace | None = None) -> Reading:
    """Read one file of any format, and keep its digest where there is a place for it.

    Errors are returned, so that they come back from workers.
    """
    try:
        reading = FORMATS[known.format].read(known, limits)
    except TraceError as error:
        if error.rank is None:
            error.rank = known.rank
        return Reading(error=error)
    beside = read_sidecar(known.named)
    traces = tuple(_with_sidecar(trace, *beside, known.rank) for trace in reading.traces)
    table = reading.table and _with_sidecar(reading.table, *beside, None)
    reading = replace(reading, traces=traces, table=table)
    gaps = keep_digest(known, reading, digests) if digests else ()
    return replace(reading, traces=tuple(map(hold_to_laws, traces)), gaps=gaps)


def _with_sidecar(
    trace: _Trace, beside: Sidecar | None, wrong: Gap | None, rank: int | None
) -> _Trace:
    """Add what lies beside a trace, else what its digest kept; what is wrong with it is a gap."""
    said = trace.gaps + ((replace(wrong, rank=rank),) if wrong else ())
    return replace(trace, sidecar=beside or trace.sidecar, gaps=said)


def settle_run(found: RunFiles, readings: Iterable[Reading], rank: int | None = None) -> Run:
    """Put what came of the files together, in whatever form their ranks come."""
    gaps = [*found.gaps, *(_duplicate(rank, files) for rank, files in found.capture.duplicates)]
    ranks: list[RankTrace] = []
    tables: list[OpTable] = []
    for reading in readings:
        gaps += reading.gaps
        if reading.error:
            gaps.append(unreadable(reading.error))
        if reading.table is not None:
            tables.append(reading.table)
        ranks += reading.traces
    ranks, more = _settle_ranks(ranks, rank)
    gaps += [gap for trace in ranks for gap in trace.gaps]
    beside = [table.sidecar for table in tables if table.sidecar and not ranks]
    if len(tables) > 1:
        joined = join_op_tables(tables)
        if joined is None:
            gaps.append(
                Gap(
                    code=Code.SEVERAL_RUNS,
                    message=f"{counted(len(tables), 'table')} hold the same ranks, and one is "
                    f"read: {tables[0].file}",
                    hint="give one of them, or tables of one rank each with a column of ranks",
                )
            )
        tables = [joined or tables[0]]
    gaps += [gap for table in tables for gap in table.gaps]
    gaps += more
    sidecars, more = _take_sidecars(ranks)
    sidecars += [said for said in beside if said.rank is not None]
    gaps += more
    if not ranks and not tables:
        raise _nothing_found([found.capture.name], gaps, ())
    missing = missing_ranks(ranks)
    if missing:
        talk = any(trace.operators.addressed.any() for trace in ranks)
        why = "which these ranks exchange data with" if talk else "which the same job ran"
        names = f"{'rank' if len(missing) == 1 else 'ranks'} {show_ranks(missing)}"
        gaps.append(
            Gap(
                code=Code.MISSING_RANKS,
                message=f"no trace of {names}, {why}",
                hint="capture all ranks of at least one pipeline",
            )
        )
    return Run(
        found=found,
        ranks=tuple(ranks),
        tables=tuple(tables),
        world_size=max((trace.header.world_size or 0 for trace in ranks), default=0) or None,
        missing_ranks=missing,
        gaps=tuple(gaps),
        sidecars=tuple(sidecars),
    )


def missing_ranks(ranks: Sequence[RankTrace]) -> tuple[int, ...]:
    """Return the ranks that the captured ones talked to, point to point, and that are not there.

    So one whole pipeline out of a larger world is complete. Where no rank sends or receives, or the
    job has no group but that of all ranks, every rank of the world is expected.
    """
    captured = {trace.rank for trace in ranks}
    worlds = [trace.header.world_size or 0 for trace in ranks]
    expected: set[int] = set()
    talks = False
    for trace in ranks:
        operators = trace.operators
        pairs = (operators.operation == Operation.SEND) | (operators.operation == Operation.RECEIVE)
        talks |= bool((pairs & operators.addressed).any())
        expected.update(operators.peer[pairs & (operators.peer >= 0)].tolist())
        for number in set(operators.group[pairs].tolist()):
            members = trace.groups[number].ranks if number >= 0 else ()
            alone = {group.ranks for group in trace.header.groups} == {members}
            if alone or len(members) < (trace.header.world_size or 0):
                expected.update(members)
    if not talks:
        expected = set(range(max(worlds, default=0)))
    return tuple(sorted(expected - captured))


def warn_of_unread(places: Sequence[str], found: RunFiles) -> RunFiles:
    """Add a warning where nothing of a place is read that the user named: it is of another run.

    One place may hold many captures over time: the newest is meant, and nothing is warned of.
    """
    if len(places) < 2 or len(found.captures) < 2:
        return found
    read = _files_of(found.capture)
    captured = set[str]().union(*map(_files_of, found.captures))
    below = {place: set(expand([place])[0]) for place in places}
    unread = [p for p, files in below.items() if files & captured and files.isdisjoint(read)]
    if not unread:
        return found
    warning = Gap(
        code=Code.SEVERAL_RUNS,
        message=f"several captures were named, and one is read: {found.capture.name}; "
        f"not read: {show_first(unread)}",
        hint="give the traces of one run, or choose with --capture NAME; "
        "`debubble compare` holds two runs against each other",
    )
    # It says the same of captures that were named.
    kept = [gap for gap in found.gaps if gap.code is not Code.NEWER_INCOMPLETE]
    return replace(found, gaps=(*kept, warning))


def _files_of(capture: Capture) -> set[str]:
    """Return its files, and the traces that digests are read for."""
    files = {name for known in capture.files for name in (known.file, known.named)}
    return files.union(*(files for _, files in capture.duplicates))


def unreadable(error: TraceError) -> Gap:
    """Name a file that could not be read."""
    gap = as_gap(error, code=Code.UNREADABLE)
    return gap if gap.rank is not None else replace(gap, rank=rank_from_name(gap.file))


def named_like_a_trace(file: str) -> bool:
    """Tell a file that should be a trace by its name, whatever is in it."""
    return any(word in file.lower() for known in FORMATS.values() for word in known.in_names)


def _recognise_all(
    files: Sequence[str], limits: Limits, *, named: bool
) -> tuple[list[TraceFile], list[str], list[Gap]]:
    """Return traces, JSON that is something else, and what a trace should be and is not."""

    def recognise_or_not(file: str) -> TraceFile | TraceError:
        try:
            return recognise(file, limits)
        except TraceError as error:
            return error

    traces, left_alone, gaps = [], [], []
    recognised = each(recognise_or_not, files, far=any(map(is_url, files)))
    for file, known in zip(files, recognised, strict=True):
        if isinstance(known, TraceError):
            if named or named_like_a_trace(file) or os.path.isdir(file):  # noqa: PTH112
                gaps.append(unreadable(known))
            continue
        is_garbage = known.format == OTHER and named_like_a_trace(file)
        if known.is_trace:
            traces.append(known)
        elif known.format == PICTURE and len(files) > 1:
            left_alone.append(file)
        elif known.why_not and (named or is_garbage):
            gaps.append(unreadable(known.why_not))
        elif known.format in {PICTURE, OTHER_JSON}:
            left_alone.append(file)
    return traces, left_alone, gaps


def _pair_digests(
    digests: Iterable[TraceFile], files: Collection[str], limits: Limits
) -> tuple[list[TraceFile], frozenset[str], list[Gap]]:
    """Take the digest where it is whole and of the very trace beside it, and otherwise the trace.

    Returned are the digests to read, the traces that need not be read for them, and what differs.
    """
    known_files = frozenset(files)
    read: list[TraceFile] = []
    spared: set[str] = set()
    gaps: list[Gap] = []
    for digest in digests:
        trace = digest.named
        if trace not in known_files or trace == digest.file:
            read.append(digest)
        elif digest.stamp is None or stamp_of(trace) != digest.stamp:
            gap = Gap(
                code=Code.DIGEST_DIFFERS,
                message="is of another recording than the trace beside it: the trace is read",
                hint="make it again with --digest beside, or remove it",
                file=digest.file,
                rank=digest.rank,
            )
            gaps.append(gap)
        else:
            try:
                unpack_digest(inflate(digest.file, limits), digest.file, limits)
            except TraceError as error:
                gaps.append(replace(unreadable(error), rank=digest.rank))
            else:
                read.append(digest)
                spared.add(trace)
    return read, frozenset(spared), gaps


# vLLM's server names its own trace so: `HOST_PID.async_llm.NS.pt.trace.json.gz`.
_FRONT_END = ".async_llm."


def _nothing_found(
    places: Sequence[str], gaps: Sequence[Gap], left_alone: Sequence[str]
) -> RunNotFound:
    """Say that nothing could be read at all."""
    if gaps:
        first, of_others = gaps[0], [gap for gap in gaps if gap.file != gaps[0].file]
        # All that is wrong with one file belongs together: what is cut off may lack its steps too.
        said = [str(first), *(gap.message for gap in gaps[1:] if gap.file == first.file)]
        more = f" (and {counted(len(of_others), 'more problem')})" if of_others else ""
        return RunNotFound(f"{'; '.join(said)}{more}", hint=first.hint)
    seen = f"; {counted(len(left_alone), 'JSON file')} there, none of them a trace"
    return RunNotFound(
        f"no traces in {', '.join(places)}{seen if left_alone else ''}",
        hint=GIVE_TRACES,
    )


def _settle_ranks(
    traces: Sequence[RankTrace], given: int | None
) -> tuple[list[RankTrace], list[Gap]]:
    """Give every trace its rank, sort them, and leave out what cannot be placed."""
    gaps: list[Gap] = []
    by_rank: dict[int, list[RankTrace]] = {}
    for trace in traces:
        rank = trace.rank if trace.rank is not None else rank_from_name(trace.file)
        if rank is None and len(traces) == 1:
            rank = given
        if rank is None:
            front_end = _FRONT_END in trace.file
            gaps.append(
                Gap(
                    code=Code.NO_RANK,
                    message="the front end's trace, of no rank: ignored"
                    if front_end
                    else "rank unknown: neither distributedInfo nor the file name has it",
                    hint='start vLLM with "ignore_frontend": true in --profiler-config'
                    if front_end
                    else "rename it to rank<N>.json.gz",
                    file=trace.file,
                )
            )
        else:
            by_rank.setdefault(rank, []).append(replace(trace, rank=rank))
    settled = []
    for rank, same in sorted(by_rank.items()):
        if len(same) > 1:
            gaps.append(_duplicate(rank, tuple(trace.file for trace in same)))
        else:
            settled += same
    kept, more = _without_fragments(settled)
    return kept, gaps + more


def _duplicate(rank: int, files: Sequence[str]) -> Gap:
    """Name a rank with several files."""
    return Gap(
        code=Code.DUPLICATE_RANK,
        message=f"{counted(len(files), 'file')} of the same rank, none of them read: "
        + show_first(files),
        hint="keep one of them, or give the files one by one",
        file=files[0],
        rank=rank,
    )


def _without_fragments(traces: list[RankTrace]) -> tuple[list[RankTrace], list[Gap]]:
    """Leave out ranks whose file ends before its kernels begin, where other ranks have some.

    What is wrong with such a file is said, and its rank counts as missing.
    """
    if not any(len(trace.kernels) for trace in traces):
        return traces, []
    kept: list[RankTrace] = []
    gaps: list[Gap] = []
    for trace in traces:
        known = {gap.code for gap in trace.gaps}
        if not len(trace.kernels) and Code.TRUNCATED in known:
            for gap in trace.gaps:
                if gap.code is Code.TRUNCATED:
                    lost = f"{gap.message}, none of them of its device: the rank counts as missing"
                    gaps.append(replace(gap, message=lost, rank=trace.rank))
                elif gap.code is not Code.NO_KERNELS:
                    gaps.append(gap)
            continue
        kept.append(trace)
        if not len(trace.kernels) and not known & {Code.NO_KERNELS, Code.FOREIGN_DEVICE}:
            gaps.append(
                Gap(
                    code=Code.NO_KERNELS,
                    message="no device kernels in it, though other ranks have some",
                    hint="record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] "
                    "on every rank",
                    file=trace.file,
                    rank=trace.rank,
                )
            )
    return kept, gaps


def _take_sidecars(ranks: Sequence[RankTrace]) -> tuple[list[Sidecar], list[Gap]]:
    """Return what ranks say of themselves; what another rank wrote is no witness."""
    sidecars: list[Sidecar] = []
    gaps: list[Gap] = []
    for trace in ranks:
        said = trace.sidecar
        if said is not None and said.rank in {None, trace.rank}:
            sidecars.append(replace(said, rank=trace.rank))
        elif said is not None:
            gaps.append(
                Gap(
                    code=Code.SIDECAR_DIFFERS,
                    message=f"was written by rank {said.rank}, beside the trace of another: "
                    "it is not used",
                    hint="put each sidecar beside its own trace",
                    file=said.file,
                    rank=trace.rank,
                )
            )
    return sidecars, gaps
