"""A `Ledger` in → its part of an answer: shares, culprits, causes in sentences, and savings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

from debubble.analysis import Analysis
from debubble.ledger.account import Accounts, find_culprits
from debubble.ledger.causes import CAUSE_OF, Cause
from debubble.ledger.ledger import MATTERS, Ledger
from debubble.ledger.savings import HEAD_OF_LINE
from debubble.ledger.verdict import Bottleneck, MainCause
from debubble.measure.worth import Rates, Worth
from debubble.report.answers.base import Part
from debubble.report.answers.change import describe, say_gain
from debubble.report.answers.microbatches import answer_more_microbatches
from debubble.serving.account import StreamAccount
from debubble.timeline.meetings import LateRank, latest_in_collectives
from debubble.timeline.steps import numbered
from debubble.units import (
    NS_PER_S,
    counted,
    show_duration,
    show_number,
    show_percent,
    show_price,
    show_times,
)


def worth_columns(rates: Rates | None) -> tuple[str, ...]:
    """Name the columns of a table that has savings."""
    if rates is None:
        return ()
    money = () if rates.price_per_gpu_hour is None else ("cost/day",)
    energy = () if rates.watts_per_gpu is None else ("kWh/day",)
    return ("GPU-h/day", *money, *energy)


def worth_cells(rates: Rates | None, worth: Worth | None) -> tuple[str, ...]:
    """Write what a saving is worth, a cell a column; empty where there is no saving."""
    columns = worth_columns(rates)
    if rates is None or worth is None:
        return ("",) * len(columns)
    cells = [show_number(worth.gpu_hours_per_day)]
    if worth.money_per_day is not None:
        cells.append(show_price(worth.money_per_day, rates.currency))
    if worth.kwh_per_day is not None:
        cells.append(show_number(worth.kwh_per_day))
    return tuple(cells[: len(columns)])


def say_rates(rates: Rates | None) -> Iterable[str]:
    """Say what a day is counted by."""
    if rates is None:
        return
    sentence = f"GPU-h/day: GPU-hours saved per day, for a job on {counted(rates.gpus, 'GPU')}"
    if rates.price_per_gpu_hour is not None:
        sentence += f", at {show_price(rates.price_per_gpu_hour, rates.currency)} per GPU-hour"
    if rates.watts_per_gpu is not None:
        sentence += f", {show_number(rates.watts_per_gpu)} W per GPU (measured)"
    yield sentence


SCHEDULE = "schedule"
"""Warm-up, turnaround and drain together: what the order of passes costs, in `named`."""
_OF_SCHEDULE = (Cause.WARM_UP, Cause.TURNAROUND, Cause.DRAIN)
_WHERE = {"batch": "at the same global batch size", "microbatch": "with a larger batch"}
_CULPRITS_A_RANK = 8
# Less than this of a layer is not worth a word.
_WORTH_A_WORD = 0.1
WITHOUT_TRACE = "waits for ranks without a trace are unexplained"
REMEDIES = {str(cause): cause.about.remedied for cause in Cause} | {
    HEAD_OF_LINE: "without head-of-line blocking",
}
_BOTTLENECKS = {str(cause): cause.about.bottleneck for cause in Cause if cause.about.bottleneck} | {
    "gaps": "gaps between small kernels inside passes",
    "data_loading": "data loading between steps",
    "optimizer": "the optimizer between steps",
    "reduction": "reductions between steps",
    "clipping": "clipping between steps",
    "other": "unnamed time between steps",
}


class WaitExample(Part, frozen=True, kw_only=True):
    """A wait to look at in a viewer."""

    file: str | None
    ts_us: float
    dur_us: float
    waits_for: str | None


class WaitedFor(Part, frozen=True, kw_only=True):
    """Whom ranks waited for under a cause, and where to look."""

    cause: str
    rank: int
    stage: int | None
    pass_: Annotated[str | None, "kind"] = msgspec.field(name="pass")
    hop: list[int] | None
    wait_s: float
    examples: list[WaitExample]


class RankAccount(Part, frozen=True, kw_only=True):
    """Where the time of one rank went."""

    rank: int
    stages: list[int]
    causes: dict[str, float]
    shares: dict[str, float]
    culprits: list[WaitedFor]


class AccountPart(Part, frozen=True, kw_only=True):
    """Every nanosecond under one cause: sums over `steps`, shares of the batch in their middle."""

    total_s: float
    steps: list[int]
    middle_steps: list[int]
    causes: dict[str, float]
    shares: dict[str, float]
    culprits: list[WaitedFor]
    """Of each cause, what was waited for longest."""
    ranks: list[RankAccount]
    late_in_collectives: list[LateRank]


class SavingPart(Part, frozen=True, kw_only=True):
    """What removing a cause, or two at once, would buy."""

    cause: str
    causes: list[str]
    batch_latency_s: float
    saved_s: float
    saved_fraction: float
    worth: Worth | None = None
    """What it saves per day; null where no GPU is known."""


class ReplayPart(Part, frozen=True, kw_only=True):
    """The replay of the unchanged steps, and its error."""

    batch_latency_s: float
    error_fraction: float | None


class NamedCause(Part, frozen=True, kw_only=True):
    """A cause that matters, as data and as a sentence."""

    cause: str
    rank: int | None
    stage: int | None
    hop: list[int] | None
    saved_s: Annotated[float, "buys_ns"]
    culprit_saved_s: float | None
    sentence: str


class BottleneckPart(Part, frozen=True, kw_only=True):
    """What takes more of a step than waiting does."""

    what: str
    length_s: float
    waits_s: float
    sentence: str


def answer_account(account: Accounts) -> AccountPart:
    """Return where the time went."""
    worst = {culprit.cause: culprit for culprit in reversed(account.culprits)}
    steps = [step.roots.step for step in account.accounts]
    in_steps = None not in steps
    return AccountPart(
        total_s=account.total_ns / NS_PER_S,
        steps=[step for step in steps if step is not None],
        middle_steps=[step for row in account.middle if (step := steps[row]) is not None],
        causes=_in_seconds(account.causes()),
        shares={str(cause): share for cause, share in account.shares().items()},
        culprits=[WaitedFor.of(culprit) for culprit in worst.values()],
        ranks=[
            RankAccount.of(
                rank,
                causes=_in_seconds(account.causes(rank_index)),
                shares={str(cause): share for cause, share in account.shares(rank_index).items()},
                culprits=_culprits_of(account, rank_index),
            )
            for rank_index, rank in enumerate(account.ranks)
        ],
        late_in_collectives=[
            late for rank in account.ranks if in_steps and (late := latest_in_collectives(rank))
        ],
    )


def _culprits_of(account: Accounts, rank_index: int) -> list[WaitedFor]:
    """Return whom a rank waited for most."""
    most = _CULPRITS_A_RANK
    culprits = find_culprits(account.accounts, account.ranks, waiter=rank_index, most=most)
    return [WaitedFor.of(culprit) for culprit in culprits]


def _in_seconds(causes: Mapping[Cause, int]) -> dict[str, float]:
    """Return what causes take, by their names."""
    return {str(cause): length / NS_PER_S for cause, length in causes.items()}


def answer_savings(account: Accounts, step_ns: int | None, rates: Rates | None) -> list[SavingPart]:
    """Return what removing each cause would buy, in the order of what it buys, and its worth.

    That is of whole steps where these are known, else of batches.
    """
    parts = []
    for saving in account.savings:
        share = saving.saved_ns / step_ns if step_ns else saving.saved_fraction
        worth = rates.worth_of(share) if rates else None
        parts.append(SavingPart.of(saving, worth=worth))
    return parts


def answer_replay(account: Ledger | StreamAccount) -> ReplayPart | None:
    """Return how the replay fits; None where there is none to hold against what was measured."""
    if isinstance(account, StreamAccount):
        if account.queue is None:
            return None
        latency_ns = account.queue.turn_ns()
    elif account.replays:
        windows = sorted(replay.unchanged_ns for replay in account.replays)
        latency_ns = windows[len(windows) // 2]
    else:
        return None
    return ReplayPart(batch_latency_s=latency_ns / NS_PER_S, error_fraction=account.replay_error)


def answer_causes(analysis: Analysis) -> list[NamedCause]:
    """Return the causes that matter, each with its sentence, the largest saving first."""
    ledger = analysis.ledger
    if ledger is None:
        return []
    named = [
        NamedCause.of(matter, sentence=say_cause(ledger, matter) + _say_split(analysis, matter))
        for matter in analysis.causes
    ]
    return sorted([*named, *_name_schedule(analysis, ledger)], key=lambda part: -part.saved_s)


def _name_schedule(analysis: Analysis, ledger: Ledger) -> list[NamedCause]:
    """Name the schedule where more microbatches would shorten the waits that it causes."""
    priced = analysis.doubled_microbatches
    best = max((option.throughput_gain for option in priced.options), default=0.0)
    if best < MATTERS:
        return []
    shares = ledger.shares()
    waits = show_percent(sum(shares[cause] for cause in _OF_SCHEDULE))
    parts = answer_more_microbatches(priced).options
    gains = [
        f"{say_gain(option)} {_WHERE[part.hold]}"
        + (" (changes training)" if part.changes_training else "")
        for part, option in zip(parts, priced.options, strict=True)
    ]
    return [
        NamedCause(
            cause=SCHEDULE,
            rank=None,
            stage=None,
            hop=None,
            saved_s=ledger.job_latency_ns * (1 - 1 / (1 + best)) / NS_PER_S,
            culprit_saved_s=None,
            sentence=f"the schedule makes ranks wait {waits} of the batch; throughput with "
            f"{parts[0].microbatches} microbatches: {', '.join(gains)}",
        )
    ]


def _say_split(analysis: Analysis, matter: MainCause) -> str:
    """Say what moving layers away from a slow device would do, as `plan` has it."""
    if matter.slower_layers is None:
        return ""
    return "".join(
        f"; {describe(option.change)}: {say_gain(option)}"
        for option in analysis.other_split.options
    )


def answer_bottleneck(bottleneck: Bottleneck | None) -> BottleneckPart | None:
    """Return what to work on instead of the bubble; None where the bubble is it."""
    if bottleneck is None:
        return None
    waits = show_duration(bottleneck.waits_ns)
    name = _BOTTLENECKS.get(bottleneck.what, bottleneck.what.replace("_", " "))
    if bottleneck.what == "compute":
        says = f": compute is (ranks wait {waits} a step)"
    else:
        takes = f"{show_duration(bottleneck.length_ns)} a step"
        says = f"; larger: {name}, {takes} (ranks wait for each other: {waits})"
    return BottleneckPart.of(bottleneck, sentence=f"the bubble is not your bottleneck{says}")


def say_remedy(causes: str) -> str:
    """Say what a saving supposes."""
    return ", ".join(REMEDIES[cause] for cause in causes.split("+"))


def say_cause(ledger: Ledger, named: MainCause) -> str:
    """Say a cause, whose it is, and what putting it right would buy, in a sentence."""
    before = ledger.job_latency_ns
    culprit, saving = _say_culprit(ledger, named), named.saving
    if named.culprit_saved_ns is not None and named.slow_hops:
        share = named.culprit_saved_ns / max(before, 1)
        amount = f"{show_duration(named.culprit_saved_ns)} ({show_percent(share)})"
        hops = "it" if len(named.slow_hops) == 1 else "them"
        return f"{culprit}; repairing {hops} saves {amount}"
    buys = f"{show_duration(saving.saved_ns)} ({show_percent(saving.saved_fraction)})"
    if len(saving.causes) > 1:
        remedies = " and ".join(REMEDIES[cause] for cause in named.cause.split("+"))
        return f"two causes fixed together save {buys}: {remedies}; either alone saves less"
    if named.slower_layers is not None and named.culprit_saved_ns is not None:
        alike = show_duration(named.culprit_saved_ns)
        share_alike = show_percent(named.culprit_saved_ns / max(before, 1))
        return f"{culprit}; fixing that saves {alike} ({share_alike})"
    alone = ""
    if named.workers and named.culprit_saved_ns is not None:
        alone = f", this one alone {show_duration(named.culprit_saved_ns)}"
    elif named.cause == Cause.DATA and named.culprit_saved_ns is not None:
        alone = f"; without the longest ones: {show_duration(named.culprit_saved_ns)}"
    return f"{culprit}; {REMEDIES[named.cause]}: saves {buys}{alone}"


def _say_culprit(ledger: Ledger, named: MainCause) -> str:
    """Say whose a cause is, or mostly is."""
    hop = f"hop {named.hop[0]} → {named.hop[1]}" if named.hop else "some hop"
    if named.times_equal is not None and named.stage is not None:
        where = f"stage {named.stage} on rank {named.rank}"
        more = f"{show_times(named.times_equal)} the average stage"
        if named.slower_layers is None:
            return f"{where} takes {more}{_besides(ledger, named.stage)}"
        slower = show_times(named.slower_layers)
        return f"rank {named.rank} is a slow device: its layers take {slower} those of other stages"
    if named.slow_hops:
        return _say_slow(named)
    if named.workers:
        return _say_workers(ledger, named)
    if named.cause == Cause.DATA:
        longest = f"up to {named.times_expected:.1f} times the median"
        return f"some microbatches take {longest} on every stage: their data differ"
    megatron = any(rank.parallelism.framework == "megatron" for rank in ledger.ranks)
    setting = " after each exchange (Megatron's batch_p2p_sync)" if megatron else ""
    if named.cause == HEAD_OF_LINE:
        blames = "messages queue behind others (head-of-line blocking), most behind {hop}"
    elif len(named.saving.causes) > 1:
        blames = named.cause
    else:
        about = CAUSE_OF[named.cause].about
        blames = about.blames or named.cause
        if named.rank is None and "{rank}" in blames:  # nobody in particular
            blames = f"ranks wait for {about.meaning}"
    return blames.format(rank=named.rank, hop=hop, setting=setting)


def _say_workers(ledger: Ledger, named: MainCause) -> str:
    """Name slow devices, the first with its host and what it holds."""
    first = named.workers[0]
    line = next((rank for rank in ledger.ranks if rank.rank == first.rank), None)
    host = f" on {line.device[0]}" if line is not None and line.device[0] else ""
    stages = " and ".join(map(str, first.stages))
    held = f"stage {stages}" if len(first.stages) == 1 else f"stages {stages}"
    same = "the same stage does" if len(first.stages) == 1 else "the same stages do"
    also = sorted(worker.rank for worker in named.workers[1:])
    are = "as is that" if len(also) == 1 else "as are those"
    others = f" ({are} of {numbered('rank', also)})" if also else ""
    return (
        f"the device of rank {first.rank}{host} is slow{others}: {held} of pipeline "
        f"{first.pipeline} takes {show_times(first.times)} as long as {same} elsewhere; no split "
        "fixes that"
    )


def _besides(ledger: Ledger, stage: int) -> str:
    """Say what a stage has that is no layer: an embedding, or a head with its loss."""
    every = (layers for rank in ledger.ranks for layers in rank.layers)
    held = next((layers for layers in every if layers.stage == stage), None)
    if held is None or held.rest_ns < _WORTH_A_WORD * held.layer_ns:
        return ""
    part = "head and loss" if held.after_ns >= held.before_ns else "embedding"
    whole = held.layers * held.layer_ns + held.rest_ns
    rest = max(held.after_ns, held.before_ns)
    return f" ({part}: {show_duration(rest)} of {show_duration(whole)} forward)"


def _say_slow(named: MainCause) -> str:
    """Name slow hops; of several, the rank that all of them come from or go to."""
    names = [f"{here} → {there}" for here, there in named.slow_hops]
    if len(names) == 1:
        return f"hop {names[0]} takes {named.times_expected:.1f} times as long as its peers"
    hops = f"hops {', '.join(names[:-1])} and {names[-1]}"
    senders, receivers = ({hop[end] for hop in named.slow_hops} for end in (0, 1))
    whose = ""
    if len(receivers) == 1:
        whose = f": rank {receivers.pop()} receives slowly"
    elif len(senders) == 1:
        whose = f": rank {senders.pop()} sends slowly"
    return f"{hops} take up to {named.times_expected:.1f} times as long as their peers{whose}"
