"""A `StreamAccount` in → its part of an answer: phases, shares, savings, causes in sentences."""

from __future__ import annotations

import numpy as np

from debubble.analysis import Analysis
from debubble.answers.base import Part
from debubble.answers.ledger import (
    AccountPart,
    NamedCause,
    RankAccount,
    ReplayPart,
    SavingPart,
    in_seconds,
    waited_for,
)
from debubble.ledger.causes import Cause
from debubble.ledger.verdict import MATTERS
from debubble.serving.account import StreamAccount, StreamSaving
from debubble.serving.batches import phase_word
from debubble.timeline.turns import Phase
from debubble.units import NS_PER_S, show_duration, show_percent, show_times


class PhasePart(Part, frozen=True, kw_only=True):
    """The batches of one phase."""

    phase: str
    batches: int
    tokens: int | None
    """Of a batch, in the middle."""
    pass_s: list[float]
    """What a pass takes on each stage, in the middle."""
    device_s: list[float]
    """The device's part of it."""


class ProfilerPart(Part, frozen=True, kw_only=True):
    """What the server did under the profiler and without it, by its own metrics."""

    slowdown: float | None
    """How many times longer a token took under it."""
    tokens_out_per_s: float | None
    """Without it; so below."""
    tokens_in_per_s: float | None
    tpot_s: float | None
    ttft_s: float | None
    requests_running: float | None


def answer_phases(account: StreamAccount) -> list[PhasePart]:
    """Return what batches of each phase take."""
    batches, length = account.batches, account.batches.length()
    found = []
    for phase in (Phase.PREFILL, Phase.MIXED, Phase.DECODE, Phase.UNKNOWN):
        mine = (batches.phase == phase) & batches.seen
        if mine.any():
            tokens = batches.tokens[mine & (batches.tokens >= 0)]
            found.append(
                PhasePart(
                    phase=phase_word(phase),
                    batches=int(mine.sum()),
                    tokens=int(np.median(tokens)) if len(tokens) else None,
                    pass_s=(np.median(length[mine], axis=0) / NS_PER_S).tolist(),
                    device_s=(np.median(batches.busy[mine], axis=0) / NS_PER_S).tolist(),
                )
            )
    return found


def answer_profiler(analysis: Analysis) -> ProfilerPart | None:
    """Return what the server noted of itself around the capture; None where nothing was."""
    notes = analysis.server_notes
    around = notes.around if notes else None
    if notes is None or around is None:
        return None
    return ProfilerPart(
        slowdown=notes.slowdown,
        tokens_out_per_s=around.tokens_out_per_s,
        tokens_in_per_s=around.tokens_in_per_s,
        tpot_s=around.tpot_s,
        ttft_s=around.ttft_s,
        requests_running=around.requests_running,
    )


def answer_stream(account: StreamAccount) -> AccountPart:
    """Return where the time of a stream went: sums over the span, shares of it."""
    worst = {culprit.cause: culprit for culprit in reversed(account.culprits)}
    ranks = account.batches.ranks
    return AccountPart(
        total_s=len(ranks) * account.length_ns / NS_PER_S,
        steps=[],
        middle_steps=[],
        causes=in_seconds(account.causes()),
        shares={str(cause): share for cause, share in account.shares().items()},
        culprits=[waited_for(culprit) for culprit in worst.values()],
        ranks=[
            RankAccount(
                rank=rank.rank,
                stages=list(rank.stages),
                causes=in_seconds(account.causes(place)),
                shares={str(cause): share for cause, share in account.shares(place).items()},
                culprits=[],
            )
            for place, rank in enumerate(ranks)
        ],
    )


def answer_stream_savings(account: StreamAccount) -> list[SavingPart]:
    """Return what putting each cause right would buy: of the time a batch takes in turn."""
    return [
        SavingPart(
            cause=str(saving.cause),
            causes=[str(saving.cause)],
            batch_latency_s=saving.turn_ns / NS_PER_S,
            saved_s=saving.saved_ns / NS_PER_S,
            saved_fraction=saving.saved_fraction,
        )
        for saving in account.savings
    ]


def answer_stream_replay(account: StreamAccount) -> ReplayPart | None:
    """Return how the replay fits; None where too few batches were seen from end to end."""
    if account.queue is None:
        return None
    return ReplayPart(
        batch_latency_s=account.queue.turn_ns() / NS_PER_S, error_fraction=account.replay_error
    )


def answer_stream_causes(analysis: Analysis) -> list[NamedCause]:
    """Return the causes of a stream that matter, each with its sentence."""
    account = analysis.stream
    if account is None:
        return []
    noise = max(MATTERS, abs(account.replay_error or 0.0))
    notes = analysis.server_notes
    told = notes is not None and notes.slowdown is not None
    # What the profiler itself may have made comes last, unless the server tells what it costs.
    savings = sorted(account.savings, key=lambda one: (one.inflated and not told, -one.saved_ns))
    names = [rank.rank for rank in account.batches.ranks]
    return [
        NamedCause(
            cause=str(saving.cause),
            rank=None if saving.culprit is None else names[saving.culprit],
            stage=saving.culprit,
            hop=list(saving.hop) if saving.hop else None,
            saved_s=saving.saved_ns / NS_PER_S,
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
        takes = max(part.pass_s[stage] / np.mean(part.pass_s) for part in answer_phases(account))
        who = f"stage {stage} on rank {rank} takes {show_times(float(takes))} an equal share"
        layers = analysis.layers_of(stage)
        who += f" ({layers} layers)" if layers is not None else ""
    elif saving.cause is Cause.IN_FLIGHT:
        who = f"{about.blames} ({batches.in_flight})"
    elif saving.cause is Cause.UNEVEN:
        sizes = ", ".join(
            f"{part.phase} {show_duration(round(max(part.pass_s) * NS_PER_S))} a stage"
            for part in answer_phases(account)
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


def _say_host(analysis: Analysis, account: StreamAccount, rank: int | None, buys: str) -> str:
    """Say how long devices wait for launches, and what is known of the profiler's part in it."""
    share = account.shares()[Cause.HOST]
    decode = next((part for part in answer_phases(account) if part.phase == "decode"), None)
    bound = ""
    if decode is not None:
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
