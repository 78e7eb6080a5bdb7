"""A `Ledger` in → its tables, its sentences and its JSON out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from debubble.ledger.culprits import Culprit, find_culprits
from debubble.ledger.ledger import Ledger, Saving
from debubble.ledger.model import Cause
from debubble.ledger.savings import ALL, HEAD_OF_LINE, SCHEDULE
from debubble.ledger.verdict import (
    LITTLE,
    MATTERS,
    Bottleneck,
    Named,
    find_bottleneck,
    name_causes,
)
from debubble.report.text import Table
from debubble.units import NS_PER_S, show_duration, show_share

# As many ranks as fit beside each other on a terminal.
_RANK_COLUMNS = 8
# Of more ranks, so many: then nothing wraps.
_FOLDED_COLUMNS = 5
_CULPRITS_IN_JSON = 8

# Less than this of a layer is not worth a word.
_WORTH_A_WORD = 0.1
WITHOUT_TRACE = (
    "waits for ranks without a trace cannot be told from gaps inside passes: they are unexplained"
)
_REMEDIES = {
    Cause.IMBALANCE: "equal stages",
    Cause.JITTER: "passes that take as long as they mostly do",
    Cause.TRANSFER: "healthy transfers that take no time",
    Cause.SLOW_LINK: "every transfer as fast as those of its peers",
    Cause.HOST: "hosts that issue in time",
    Cause.HOST_SYNC: "hosts that run ahead of their devices",
    Cause.COLLECTIVE: "no collectives inside passes",
    Cause.DATA_PARALLEL: "gathers and reductions that passes cover",
    HEAD_OF_LINE: "messages that do not queue behind others",
    SCHEDULE: "twice as many microbatches, the same work",
}
_BOTTLENECKS = {
    "host": "hosts that launch too late",
    "host_sync": "hosts that their devices keep",
    "collective": "collectives inside passes",
    "data_parallel": "gathers and reductions that no compute covers",
    "gaps": "gaps between small kernels inside passes",
    "data_loading": "data loading between steps",
    "optimizer": "the optimizer between steps",
    "reduction": "reductions between steps",
    "clipping": "clipping between steps",
    "other": "what lies between steps and has no name",
}


def ledger_findings(ledger: Ledger, outside_ns: dict[str, int]) -> list[str]:
    """Say what matters, first things first, each in a sentence."""
    found = find_bottleneck(ledger, outside_ns)
    named = [f"{say_named(ledger, one)}." for one in name_causes(ledger)]
    sentences = [*([f"{say_bottleneck(found)}."] if found else []), *named]
    if ledger.absent:
        sentences.append(f"{WITHOUT_TRACE}.")
    return [f"{sentence[:1].upper()}{sentence[1:]}" for sentence in sentences]


def ledger_tables(ledger: Ledger) -> list[Table]:
    """Lay out where the time went, and what it would buy to have it back."""
    savings = saving_table(ledger)
    return [cause_table(ledger), *([savings] if savings else [])]


def ledger_json(ledger: Ledger | None, outside_ns: dict[str, int]) -> dict[str, Any]:
    """Return the account, savings and what matters as data; nulls where there is none."""
    if ledger is None:
        return {"ledger": None, "savings": None, "replay": None, "named": [], "bottleneck": None}
    found = find_bottleneck(ledger, outside_ns)
    return {
        "ledger": _account_json(ledger),
        "savings": _savings_json(ledger),
        "replay": _replay_json(ledger),
        "named": [_named_json(ledger, one) for one in name_causes(ledger)],
        "bottleneck": None
        if found is None
        else {
            "what": found.what,
            "length_s": found.length_ns / NS_PER_S,
            "waits_s": found.waits_ns / NS_PER_S,
            "sentence": say_bottleneck(found),
        },
    }


def cause_table(ledger: Ledger) -> Table:
    """Lay out causes by rank, as shares of the window, with whom was waited for most."""
    by_wait = sorted(
        range(len(ledger.ranks)), key=lambda place: ledger.causes(place)[Cause.COMPUTE]
    )
    few = len(ledger.ranks) <= _RANK_COLUMNS
    shown = sorted(by_wait[: _RANK_COLUMNS if few else _FOLDED_COLUMNS])
    title = "where the time goes, share of the batch"
    if len(shown) < len(ledger.ranks):
        title += f" ({len(shown)} of {len(ledger.ranks)} ranks: those that wait most)"
    table = Table(
        columns=(
            "cause",
            *(f"rank {ledger.ranks[place].rank}" for place in shown),
            "all",
            "a step",
            "waited for most",
        ),
        title=title,
    )
    ranks = [ledger.causes(place) for place in shown]
    length = ledger.total_ns / len(ledger.ranks)
    every = ledger.causes()
    for cause in Cause:
        if every[cause]:
            table.rows.append(
                (
                    cause.replace("_", " "),
                    *(show_share(causes[cause] / length) for causes in ranks),
                    show_share(every[cause] / ledger.total_ns),
                    show_duration(every[cause] / len(ledger.ranks) / len(ledger.steps)),
                    _most_waited_for(ledger, cause),
                )
            )
    return table


def _most_waited_for(ledger: Ledger, cause: Cause) -> str:
    found = next((one for one in ledger.culprits if one.cause is cause), None)
    return _who(found) if found else ""


def _who(one: Culprit) -> str:
    if one.hop is not None:
        return f"{one.hop[0]} → {one.hop[1]}"
    if one.stage is not None:
        return f"{one.kind} of stage {one.stage} (rank {one.rank})"
    return f"host of rank {one.rank}"


def saving_table(ledger: Ledger) -> Table | None:
    """Lay out what removing each cause would buy; None where nothing would."""
    worth = [
        one for one in ledger.savings if one.saved_fraction >= MATTERS / 2 and one.cause != ALL
    ]
    if not worth:
        return None
    error = show_share(abs(ledger.replay_error or 0.0))
    table = Table(
        columns=("with", "batch latency", "saved", "share"),
        title=f"what it would buy, by replaying the measured steps (error of the replay: {error})",
    )
    for one in worth:
        table.rows.append(
            (
                say_remedy(one.cause),
                show_duration(one.batch_latency_ns),
                show_duration(one.saved_ns),
                show_share(one.saved_fraction),
            )
        )
    return table


def say_remedy(cause: str) -> str:
    """Say what a saving supposes."""
    return _REMEDIES[cause]


def say_named(ledger: Ledger, named: Named) -> str:
    """Say a cause, whose it is, and what fixing it would buy, in a sentence."""
    culprit, buys = _culprit(ledger, named), _buys(named.saving)
    if named.culprit_saved_ns is not None and named.slow_hops:
        before = named.saving.batch_latency_ns + named.saving.saved_ns
        share = named.culprit_saved_ns / max(before, 1)
        little = "would buy little: " if share < LITTLE else "would save "
        amount = f"{show_duration(named.culprit_saved_ns)} of {show_duration(before)}"
        them = "it" if len(named.slow_hops) == 1 else "them"
        return f"{culprit}; repairing {them} {little}{amount} ({_percent(share)})"
    if named.cause == SCHEDULE:
        return f"{culprit}; twice as many microbatches would save {buys} on the same work"
    return f"{culprit}; {_REMEDIES[named.cause]} would save {buys}"


def _culprit(ledger: Ledger, named: Named) -> str:
    """Say whose a cause is, or mostly is."""
    hop = f"hop {named.hop[0]} → {named.hop[1]}" if named.hop else "some hop"
    if named.cause == Cause.IMBALANCE and named.stage is not None:
        times = _times_equal(ledger, named.stage)
        besides = _besides_layers(ledger, named.stage)
        where = f"stage {named.stage} on rank {named.rank}"
        return f"{where} takes {times:.1f} times an equal share{besides}"
    if named.slow_hops:
        return _say_slow(named)
    sentences = {
        Cause.SLOW_LINK: f"single transfers take far longer than most, most of them over {hop}",
        Cause.TRANSFER: f"transfers are waited for, most over {hop}",
        Cause.JITTER: f"passes of rank {named.rank} vary",
        Cause.HOST: f"the host of rank {named.rank} issues too late",
        Cause.HOST_SYNC: f"hosts wait until their devices are done{_setting_of(ledger)}, "
        f"most on rank {named.rank}",
        Cause.COLLECTIVE: f"collectives inside passes, most on rank {named.rank}",
        Cause.DATA_PARALLEL: "gathers of parameters and reductions of gradients are waited for, "
        f"most on rank {named.rank}",
        HEAD_OF_LINE: "messages stand behind others in a queue (head-of-line blocking), "
        f"most behind {hop}",
        SCHEDULE: "the schedule itself makes ranks wait",
    }
    return sentences.get(named.cause, str(named.cause).replace("_", " "))


def _besides_layers(ledger: Ledger, stage: int) -> str:
    """Say what a stage has that is no layer: an embedding, or a head with its loss."""
    found = next((one for rank in ledger.ranks for one in rank.layers if one.stage == stage), None)
    if found is None or found.rest_ns < _WORTH_A_WORD * found.layer_ns:
        return ""
    what = "head and loss" if found.after_ns >= found.before_ns else "embedding"
    whole = found.layers * found.layer_ns + found.rest_ns
    rest = max(found.after_ns, found.before_ns)
    return f" ({what}: {show_duration(rest)} of {show_duration(whole)} forward)"


def _setting_of(ledger: Ledger) -> str:
    """Name what makes hosts synchronise, where the framework has a setting for it."""
    megatron = any(rank.parallelism.framework == "megatron" for rank in ledger.ranks)
    return " after each exchange (Megatron's batch_p2p_sync)" if megatron else ""


def _say_slow(named: Named) -> str:
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


def _times_equal(ledger: Ledger, stage: int) -> float:
    costs = ledger.remedies[0].costs
    kinds = [key for key in costs.median if key[0] == stage]
    equal = sum(costs.equal[key] for key in kinds)
    return sum(costs.median[key] for key in kinds) / max(equal, 1)


def _buys(saving: Saving) -> str:
    before = saving.batch_latency_ns + saving.saved_ns
    share = _percent(saving.saved_fraction)
    return f"{show_duration(saving.saved_ns)} of {show_duration(before)} ({share})"


def say_bottleneck(found: Bottleneck) -> str:
    """Say that the bubble is not what to work on, and what is."""
    waits = show_duration(found.waits_ns)
    if found.what == "compute":
        return f"the bubble is not your bottleneck: compute is; ranks wait {waits} a step"
    what = _BOTTLENECKS.get(found.what, found.what.replace("_", " "))
    return (
        f"the bubble is not your bottleneck: {what} take{'s' if what[:4] == 'the ' else ''} "
        f"{show_duration(found.length_ns)} a step, ranks wait for each other {waits}"
    )


def _account_json(ledger: Ledger) -> dict[str, Any]:
    """Return the account as data: sums over all steps, in seconds."""
    return {
        "total_s": ledger.total_ns / NS_PER_S,
        "steps": [step.number for step in ledger.steps],
        "causes": _causes_json(ledger.causes()),
        "ranks": [
            {
                "rank": rank.rank,
                "stages": list(rank.stages),
                "causes": _causes_json(ledger.causes(place)),
                "culprits": [
                    _culprit_json(one)
                    for one in find_culprits(
                        ledger.steps, ledger.accounts, ledger.ranks, waiter=place
                    )[:_CULPRITS_IN_JSON]
                ],
            }
            for place, rank in enumerate(ledger.ranks)
        ],
    }


def _causes_json(causes: Mapping[Cause, int]) -> dict[str, float]:
    return {str(cause): length / NS_PER_S for cause, length in causes.items()}


def _culprit_json(one: Culprit) -> dict[str, Any]:
    """Return whom a rank waited for, and where to look."""
    return {
        "cause": str(one.cause),
        "rank": one.rank,
        "stage": one.stage,
        "pass": one.kind,
        "hop": list(one.hop) if one.hop else None,
        "wait_s": one.wait_ns / NS_PER_S,
        "examples": [
            {
                "file": example.file or None,
                "ts_us": example.ts_us,
                "dur_us": example.dur_us,
                "waits_for": example.waits_for or None,
            }
            for example in one.examples
        ],
    }


def _savings_json(ledger: Ledger) -> list[dict[str, Any]]:
    """Return what removing each cause would buy, medians over the steps."""
    return [
        {
            "cause": str(one.cause),
            "batch_latency_s": one.batch_latency_ns / NS_PER_S,
            "saved_s": one.saved_ns / NS_PER_S,
            "saved_fraction": one.saved_fraction,
        }
        for one in ledger.savings
    ]


def _replay_json(ledger: Ledger) -> dict[str, Any] | None:
    """Return how well the replay of the unchanged steps lands on what was measured."""
    if not ledger.replays:
        return None
    windows = sorted(one.unchanged_ns for one in ledger.replays)
    return {
        "batch_latency_s": windows[len(windows) // 2] / NS_PER_S,
        "error_fraction": ledger.replay_error,
    }


def _named_json(ledger: Ledger, named: Named) -> dict[str, Any]:
    """Return a cause that matters, as data and as a sentence."""
    alone = named.culprit_saved_ns
    return {
        "cause": str(named.cause),
        "rank": named.rank,
        "stage": named.stage,
        "hop": list(named.hop) if named.hop else None,
        "saved_s": named.saving.saved_ns / NS_PER_S,
        "culprit_saved_s": None if alone is None else alone / NS_PER_S,
        "sentence": say_named(ledger, named),
    }


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"
