"""A `StreamAccount` in → its part of an answer: phases, shares, savings, causes in sentences."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from debubble.analysis import Analysis
from debubble.ledger.causes import CAUSE_OF, Cause
from debubble.ledger.ledger import MATTERS
from debubble.ledger.savings import Saving
from debubble.report.answers.base import Part
from debubble.report.answers.ledger import NamedCause
from debubble.serving.account import StreamAccount
from debubble.serving.model import WITHOUT_PROFILER
from debubble.units import NS_PER_S, counted, show_duration, show_percent, show_seconds, show_times


class SchedulerPart(Part, frozen=True, kw_only=True):
    """The turns of an engine's scheduler, as its labels tell them."""

    engine: str
    turns_out: int
    """At once, empty ones too."""
    empty_fraction: Annotated[float, "empty_turns"]
    on_device: int
    """Batches that the devices have at once; the others wait in the first host."""
    requests: list[int]
    """That batches decode for, in the order of a round; empty where rounds differ."""
    starved: bool
    """Too few requests for the stages."""
    notes: list[str]
    """Settings of the engine that matter here; their effect is not predicted."""


class ProfilerPart(Part, frozen=True, kw_only=True):
    """What the server did profiled and unprofiled, by its own metrics."""

    slowdown: float | None
    """Time per token profiled, over unprofiled."""
    captured_tokens_out_per_s: float | None
    """Profiled, of captured batches that all decode; null where some hold prompts."""
    tokens_out_per_s: float | None
    """Unprofiled; so below."""
    tokens_in_per_s: float | None
    tpot_s: float | None
    ttft_s: float | None
    requests_running: float | None


UNPRICED = "not predicted: "


def answer_scheduler(analysis: Analysis) -> SchedulerPart | None:
    """Return what an engine's labels tell of its scheduler; None where there are none."""
    account, stream = analysis.stream, analysis.pipeline.stream
    if account is None or stream is None or stream.turns_out is None:
        return None
    batches, engine = account.batches, account.batches.ranks[0].parallelism.framework
    return SchedulerPart.of(
        stream,
        engine=engine or "",
        requests=list(batches.round),
        starved=batches.starved,
        notes=_engine_notes(analysis, account),
    )


def _engine_notes(analysis: Analysis, account: StreamAccount) -> list[str]:
    """Say what settings of vLLM have to do with what was seen; nothing of it is priced."""
    batches, notes = account.batches, []
    if batches.ranks[0].parallelism.framework != "vllm":
        return []
    round_ = batches.round
    if batches.starved:
        notes.append("so few requests run faster on fewer stages with tensor parallelism")
    if not _replays_graphs(analysis) and account.shares()[Cause.HOST] > MATTERS:
        notes.append("kernels are launched one by one: remove --enforce-eager to use CUDA graphs")
    if not batches.starved and round_ and (len(set(round_)) > 1 or batches.stream.empty_turns > 0):
        empty = (
            f", and {show_percent(batches.stream.empty_turns)} of the scheduler's turns are empty"
        )
        notes.append(
            f"clients run in lockstep: batches of {', '.join(map(str, round_))} requests repeat"
            + (empty if batches.stream.empty_turns else "")
            + "; answers of different lengths would spread them"
        )
    known = (batches.padded > 0) & (batches.tokens > 0)
    if known.any():
        more = float(batches.padded[known].sum() / batches.tokens[known].sum()) - 1
        if more > MATTERS:
            notes.append(
                f"batches are padded by {show_percent(more)} more tokens: set "
                "cudagraph_capture_sizes to the sizes that occur"
            )
    if account.shares()[Cause.TOKEN_BROADCAST] > MATTERS:
        notes.append(
            "streams that share a hardware queue wait for each other: "
            "CUDA_DEVICE_MAX_CONNECTIONS sets the number of queues"
        )
    return [f"{UNPRICED}{note}" for note in notes]


def _replays_graphs(analysis: Analysis) -> bool:
    """Tell whether hosts launch CUDA graphs."""
    return any("GraphLaunch" in name for trace in analysis.traces for name in trace.names)


def answer_profiler(analysis: Analysis) -> ProfilerPart | None:
    """Return what the server noted of itself around the capture; None where nothing was."""
    notes = analysis.server_notes
    around = notes.around if notes else None
    if notes is None or around is None:
        return None
    captured = analysis.stream.tokens_out_per_s if analysis.stream else None
    return ProfilerPart.of(around, slowdown=notes.slowdown, captured_tokens_out_per_s=captured)


def answer_stream_causes(analysis: Analysis) -> list[NamedCause]:
    """Return the causes of a stream that matter, each with its sentence."""
    account = analysis.stream
    if account is None:
        return []
    noise = max(MATTERS, abs(account.replay_error or 0.0))
    notes = analysis.server_notes
    overhead = notes is not None and notes.slowdown is not None

    def weight(saving: Saving) -> float:
        # What the profiler may have made counts as little as quick hosts leave of it, unless the
        # server tells what it costs.
        unsure = saving.cause == Cause.HOST and not overhead
        return saving.saved_ns / (WITHOUT_PROFILER if unsure else 1.0)

    shares, names = account.shares(), [rank.rank for rank in account.ranks]
    named = []
    for saving in sorted(account.savings, key=weight, reverse=True):
        cause = CAUSE_OF[saving.cause]
        if saving.saved_fraction < noise or not shares[cause]:
            continue
        stage, slow = account.whose.get(cause), account.slow if cause is Cause.SLOW_LINK else ()
        named.append(
            NamedCause(
                cause=saving.cause,
                rank=None if stage is None else names[stage],
                stage=stage,
                hop=names[slow[0] - 1 : slow[0] + 1] if slow else None,
                saved_s=saving.saved_ns / NS_PER_S,
                culprit_saved_s=None,
                sentence=_say(analysis, account, saving, stage),
            )
        )
    return named


def _say(analysis: Analysis, account: StreamAccount, saving: Saving, stage: int | None) -> str:
    """Say a cause of a stream, whose it is, and what putting it right would buy."""
    buys = f"{show_duration(saving.saved_ns)} a batch ({show_percent(saving.saved_fraction)})"
    cause, batches = CAUSE_OF[saving.cause], account.batches
    about, rank = cause.about, None
    if stage is not None:
        rank = batches.ranks[stage].rank
    if cause is Cause.HOST:
        return _say_host(analysis, account, rank, buys)
    if cause is Cause.IMBALANCE and stage is not None:
        takes = max(part.pass_s[stage] / np.mean(part.pass_s) for part in analysis.phases)
        who = f"stage {stage} on rank {rank} takes {show_times(float(takes))} the average stage"
        layers = analysis.layers_of(stage)
        who += f" ({layers} layers)" if layers is not None else ""
    elif cause is Cause.TOKEN_BROADCAST:
        who = about.blames + _of_longest(analysis, stage)
    elif cause is Cause.NO_WORK:
        who = (
            f"{counted(batches.requests, 'request')} cannot fill "
            f"{counted(batches.stages, 'stage')}: "
            f"{show_percent(batches.stream.empty_turns)} of the scheduler's turns are empty"
        )
    elif cause is Cause.IN_FLIGHT:
        who = f"{about.blames} ({batches.in_flight})"
    elif cause is Cause.UNEVEN:
        sizes = ", ".join(
            f"{part.phase} {show_seconds(max(part.pass_s))} a stage" for part in analysis.phases
        )
        who = f"{about.blames} ({sizes})"
    elif cause is Cause.SLOW_LINK:
        slow = account.slow[0]
        hop = f"hop {batches.ranks[slow - 1].rank} → {batches.ranks[slow].rank}"
        who = f"{hop} is slower than its peers"
    else:
        most = next((culprit for culprit in account.culprits if culprit.cause is cause), None)
        hop = f"hop {most.hop[0]} → {most.hop[1]}" if most and most.hop else "some hop"
        who = about.blames.format(rank=rank, hop=hop, setting="")
    return f"{who}; {about.remedied}: saves {buys}"


def _of_longest(analysis: Analysis, stage: int | None) -> str:
    """Say for whose passes they mostly stand there."""
    parts = analysis.phases
    if stage is None or not parts:
        return ""
    part = max(parts, key=lambda phase: phase.batches)
    takes, layers = part.device_s[stage], analysis.layers_of(stage)
    overhead = f", {layers} layers" if layers is not None else ""
    return (
        f", mostly until stage {stage} has sampled (it computes "
        f"{show_seconds(takes)} a {part.phase} batch, "
        f"{show_times(float(takes / np.mean(part.device_s)))} the average stage{overhead})"
    )


def _say_host(analysis: Analysis, account: StreamAccount, rank: int | None, buys: str) -> str:
    """Say how long devices wait for launches, and what is known of the profiler's part in it."""
    share = account.shares()[Cause.HOST]
    decode = next((part for part in analysis.phases if part.phase == "decode"), None)
    bound = ""
    slowest = next((host for host in analysis.hosts if host.rank == rank), None)
    if slowest is not None:
        bound = (
            f" (its host needs {show_seconds(slowest.launching_s)} a batch to prepare inputs "
            "and launch)"
        )
    elif decode is not None:
        longest = int(np.argmax(decode.pass_s))
        bound = (
            f" (decode computes {show_seconds(decode.device_s[longest])} of "
            f"{show_seconds(decode.pass_s[longest])} a pass)"
        )
    notes = analysis.server_notes
    slowdown = notes.slowdown if notes else None
    overhead = (
        f"; unprofiled, a token took {1 / slowdown:.2f} of its profiled time"
        if slowdown
        else "; less unprofiled: the profiler slows launches"
    )
    if all(rank.device[1] < 0 for rank in account.batches.ranks):
        return (
            f"{show_percent(share)} of the time is between operators, most on rank {rank}"
            f"{bound}; without these gaps: saves at most {buys}{overhead}"
        )
    return (
        f"hosts launch too late: devices wait {show_percent(share)} of the time, most on rank "
        f"{rank}{bound}; zero-cost launches: saves at most {buys}{overhead}"
    )
