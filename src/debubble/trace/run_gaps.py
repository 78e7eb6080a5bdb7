"""What is missing or broken in a run, as it is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from debubble.errors import Code, Gap, RunNotFound, TraceError, as_gap
from debubble.trace.columns import RankTrace
from debubble.trace.formats import rank_from_name
from debubble.trace.sidecar import Sidecar
from debubble.units import counted

# Thousands of names make no message clearer.
_FILES_SHOWN = 20


def of_another_rank(said: Sidecar, trace: RankTrace) -> Gap:
    """Name a sidecar that another rank wrote."""
    return Gap(
        code=Code.SIDECAR_DIFFERS,
        message=f"was written by rank {said.rank}, beside the trace of another: it is not used",
        hint="put each sidecar beside its own trace",
        file=said.file,
        rank=trace.rank,
    )


def unreadable(error: TraceError) -> Gap:
    """Name a file that could not be read."""
    gap = as_gap(error, code=Code.UNREADABLE)
    return gap if gap.rank is not None else replace(gap, rank=rank_from_name(gap.file))


def nothing_found(
    places: Sequence[str], gaps: Sequence[Gap], left_alone: Sequence[str]
) -> RunNotFound:
    """Say that nothing could be read at all."""
    if gaps:
        more = f" (and {counted(len(gaps) - 1, 'more problem')})" if len(gaps) > 1 else ""
        return RunNotFound(f"{gaps[0]}{more}", hint=gaps[0].hint)
    seen = f"; {counted(len(left_alone), 'JSON file')} there, none of them a trace"
    return RunNotFound(
        f"no traces in {', '.join(places)}{seen if left_alone else ''}",
        hint="give torch.profiler's Chrome traces, `nsys export --type sqlite` files, or op tables",
    )


def duplicate(rank: int, files: Sequence[str]) -> Gap:
    """Name a rank with several files."""
    return Gap(
        code=Code.DUPLICATE_RANK,
        message=f"{counted(len(files), 'file')} of the same rank, none of them read: "
        + ", ".join(files[:_FILES_SHOWN])
        + (", …" if len(files) > _FILES_SHOWN else ""),
        hint="keep one of them, or give the files one by one",
        file=files[0],
        rank=rank,
    )


def no_rank(trace: RankTrace) -> Gap:
    """Name a trace that nothing gives a rank."""
    return Gap(
        code=Code.NO_RANK,
        message="no rank: neither distributedInfo nor the file name tells it",
        hint="rename it to rank<N>.json.gz, or give it alone with --rank N",
        file=trace.file,
    )


def no_kernels(trace: RankTrace) -> Gap:
    """Name a rank without device work beside others that have some."""
    return Gap(
        code=Code.NO_KERNELS,
        message="no device kernels in it, though other ranks have some",
        hint="record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] on every rank",
        file=trace.file,
        rank=trace.rank,
    )


def of_fragment(trace: RankTrace) -> list[Gap]:
    """Say what is wrong with a file that ends before its kernels: its rank counts as missing."""
    said = []
    for gap in trace.gaps:
        if gap.code is Code.TRUNCATED:
            lost = f"{gap.message}, none of them of its device: the rank counts as missing"
            said.append(replace(gap, message=lost, rank=trace.rank))
        elif gap.code is not Code.NO_KERNELS:
            said.append(gap)
    return said


def no_trace_of(missing: Sequence[int], ranks: Sequence[RankTrace]) -> Gap:
    """Name ranks that belong to the run and have no trace."""
    names = f"{'rank' if len(missing) == 1 else 'ranks'} {show_ranks(missing)}"
    talk = any(trace.operators.addressed.any() for trace in ranks)
    why = "which these ranks exchange data with" if talk else "which the same job ran"
    return Gap(
        code=Code.MISSING_RANKS,
        message=f"no trace of {names}, {why}",
        hint="capture all ranks of at least one pipeline",
    )


def show_ranks(ranks: Sequence[int]) -> str:
    """Write ranks briefly: `0-3, 7`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
