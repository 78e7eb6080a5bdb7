"""A `StreamAccount` in → its part of an answer: phases, shares, savings, causes in sentences."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from debubble.analysis import Analysis
from debubble.ledger.causes import Cause
from debubble.ledger.ledger import MATTERS
from debubble.report.answers.base import Part
from debubble.report.answers.ledger import NamedCause
from debubble.serving.account import StreamAccount, StreamSaving
from debubble.serving.hosts import measure_hosts
from debubble.serving.model import WITHOUT_PROFILER
from debubble.units import NS_PER_S, counted, show_duration, show_percent, show_times


class HostPart(Part, frozen=True, kw_only=True):
    """What the host of a rank does with the time of a batch; the parts add up to its turn."""

    rank: int
    launching_s: float
    """In the engine's label: inputs made, kernels launched."""
    handing_over_s: float
    """Until the next host takes the shapes of a batch."""
    receiving_s: float
    """Until the host before sends them."""
    kept_s: float
    """Until the device is done."""
    rest_s: float
    """Sampling, broadcast, the scheduler, and what is between."""


class SchedulerPart(Part, frozen=True, kw_only=True):
    """The turns of an engine's scheduler, as its labels tell them."""

    paths: ClassVar = {"empty_fraction": "empty_turns"}

    engine: str
    turns_out: int
    """At once, empty ones too."""
    empty_fraction: float
    on_device: int
    """Batches that the devices have at once; the others wait in the first host."""
    requests: list[int]
    """That batches decode for, in the order of a round; empty where rounds differ."""
    starved: bool
    """Too few requests for the stages."""
    notes: list[str]
    """What its settings have to do with it; nothing of this is priced."""


class ProfilerPart(Part, frozen=True, kw_only=True):
    """What the server did under the profiler and without it, by its own metrics."""

    slowdown: float | None
    """How many times longer a token took under it."""
    captured_tokens_out_per_s: float | None
    """Under it, of captured batches that all decode; null where some hold prompts."""
    tokens_out_per_s: float | None
    """Without it; so below."""
    tokens_in_per_s: float | None
    tpot_s: float | None
    ttft_s: float | None
    requests_running: float | None


_UNPRICED = "not priced: "


def answer_hosts(analysis: Analysis) -> list[HostPart]:
    """Return what hosts do with the time of a batch; nothing where no label tells their turns."""
    if analysis.stream is None:
        return []
    return [HostPart.of(host) for host in measure_hosts(analysis.stream.batches, analysis.traces)]


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
        notes.append(
            "fewer stages, with tensor parallelism in their place, serve so few requests sooner"
        )
    if not _replays_graphs(analysis) and account.shares()[Cause.HOST] > MATTERS:
        notes.append(
            "kernels are launched one by one: without --enforce-eager vLLM replays CUDA graphs"
        )
    if not batches.starved and round_ and (len(set(round_)) > 1 or batches.empty_turns > 0):
        empty = f", and {show_percent(batches.empty_turns)} of the turns have none"
        notes.append(
            f"clients are in step: batches of {', '.join(map(str, round_))} requests come round"
            + (empty if batches.empty_turns else "")
            + "; clients whose answers differ in length spread over the turns"
        )
    known = (batches.padded > 0) & (batches.tokens > 0)
    if known.any():
        more = float(batches.padded[known].sum() / batches.tokens[known].sum()) - 1
        if more > MATTERS:
            notes.append(
                f"batches are computed with {show_percent(more)} more tokens than they hold: "
                "cudagraph_capture_sizes sets the sizes of graphs"
            )
    if account.shares()[Cause.TOKEN_BROADCAST] > MATTERS:
        notes.append(
            "streams that share a queue of the device wait for each other: "
            "CUDA_DEVICE_MAX_CONNECTIONS says how many queues there are"
        )
    return [f"{_UNPRICED}{note}" for note in notes]


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
    told = notes is not None and notes.slowdown is not None
    # What the profiler itself may have made comes last, unless the server tells what it costs; of
    # an engine whose turns show what its hosts do, it counts as little as quick hosts leave of it.
    shown = account.batches.turn_known

    def weight(saving: StreamSaving) -> tuple[bool, float]:
        unsure = saving.inflated and not told
        return unsure and not shown, -saving.saved_ns / (WITHOUT_PROFILER if unsure else 1.0)

    savings = sorted(account.savings, key=weight)
    names = [rank.rank for rank in account.batches.ranks]
    return [
        NamedCause.of(
            saving,
            saved_s=saving.saved_ns / NS_PER_S,
            rank=None if saving.culprit is None else names[saving.culprit],
            stage=saving.culprit,
            culprit_saved_s=None,
            sentence=_say(analysis, account, saving),
        )
        for saving in savings
        if saving.saved_fraction >= noise and account.shares()[saving.cause] > 0
    ]


def _say(analysis: Analysis, account: StreamAccount, saving: StreamSaving) -> str:
    """Say a cause of a stream, whose it is, and what putting it right would buy."""
    now = saving.turn_ns + saving.saved_ns
    buys = (
        f"{show_duration(round(saving.saved_ns))} of {show_duration(round(now))} a batch "
        f"({show_percent(saving.saved_fraction)})"
    )
    about, batches = saving.cause.about, account.batches
    stage, rank = saving.culprit, None
    if stage is not None:
        rank = batches.ranks[stage].rank
    if saving.cause is Cause.HOST:
        return _say_host(analysis, account, rank, buys)
    if saving.cause is Cause.IMBALANCE and stage is not None:
        takes = max(part.pass_s[stage] / np.mean(part.pass_s) for part in analysis.phases)
        who = f"stage {stage} on rank {rank} takes {show_times(float(takes))} the average stage"
        layers = analysis.layers_of(stage)
        who += f" ({layers} layers)" if layers is not None else ""
    elif saving.cause is Cause.TOKEN_BROADCAST:
        who = about.blames + _of_longest(analysis, account)
    elif saving.cause is Cause.NO_WORK:
        who = (
            f"{counted(batches.requests, 'request')} cannot fill "
            f"{counted(batches.stages, 'stage')}: "
            f"{show_percent(batches.empty_turns)} of the scheduler's turns are empty"
        )
    elif saving.cause is Cause.IN_FLIGHT:
        who = f"{about.blames} ({batches.in_flight})"
    elif saving.cause is Cause.UNEVEN:
        sizes = ", ".join(
            f"{part.phase} {show_duration(round(max(part.pass_s) * NS_PER_S))} a stage"
            for part in analysis.phases
        )
        who = f"{about.blames} ({sizes})"
    elif saving.cause is Cause.SLOW_LINK and saving.hop is not None:
        who = f"hop {saving.hop[0]} → {saving.hop[1]} is slower than its peers"
    else:
        most = next(
            (culprit for culprit in account.culprits if culprit.cause is saving.cause), None
        )
        hop = f"hop {most.hop[0]} → {most.hop[1]}" if most and most.hop else "some hop"
        who = about.blames.format(rank=rank, hop=hop, setting="")
    return f"{who}; {about.remedied} would save {buys}"


def _of_longest(analysis: Analysis, account: StreamAccount) -> str:
    """Say for whose passes they mostly stand there."""
    most = next((one for one in account.culprits if one.cause is Cause.TOKEN_BROADCAST), None)
    parts = analysis.phases
    if most is None or most.stage is None or not parts:
        return ""
    part = max(parts, key=lambda phase: phase.batches)
    takes, layers = part.device_s[most.stage], analysis.layers_of(most.stage)
    told = f", {layers} layers" if layers is not None else ""
    return (
        f", most until stage {most.stage} has sampled (it computes "
        f"{show_duration(round(takes * NS_PER_S))} a {part.phase} batch, "
        f"{show_times(float(takes / np.mean(part.device_s)))} the average stage{told})"
    )


def _say_host(analysis: Analysis, account: StreamAccount, rank: int | None, buys: str) -> str:
    """Say how long devices wait for launches, and what is known of the profiler's part in it."""
    share = account.shares()[Cause.HOST]
    decode = next((part for part in analysis.phases if part.phase == "decode"), None)
    bound = ""
    hosts = {host.rank: host for host in measure_hosts(account.batches, analysis.traces)}
    slowest = hosts.get(rank) if rank is not None else None
    if slowest is not None:
        bound = (
            f" (its host needs {show_duration(slowest.launching_ns)} a batch to make inputs and "
            "launch)"
        )
    elif decode is not None:
        longest = int(np.argmax(decode.pass_s))
        bound = (
            f" (decode computes {show_duration(round(decode.device_s[longest] * NS_PER_S))} of "
            f"{show_duration(round(decode.pass_s[longest] * NS_PER_S))} a pass)"
        )
    notes = analysis.server_notes
    slowdown = notes.slowdown if notes else None
    told = (
        f"without the profiler a token took {1 / slowdown:.2f} of that"
        if slowdown
        else "the profiler slows launches, by how much is not known here: so it is an upper bound"
    )
    if all(rank.device[1] < 0 for rank in account.batches.ranks):
        return (
            f"{show_percent(share)} of the time lies between two operators, most on rank {rank}"
            f"{bound}; operators that follow at once would save up to {buys}; {told}"
        )
    return (
        f"hosts launch too late: devices wait {show_percent(share)} of the time for their next "
        f"kernel, most on rank {rank}{bound}; launches that take no time, as CUDA graphs nearly "
        f"do, would save up to {buys}; {told}"
    )
