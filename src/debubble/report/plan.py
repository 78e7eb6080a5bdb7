"""An answer of `debubble plan` in → its page for people, for a job or a captured server."""

from __future__ import annotations

from collections.abc import Iterator

from debubble.report.answers.change import say_basis
from debubble.report.answers.context_length import CachePart, LengthPart, least_left, name_length
from debubble.report.answers.ledger import say_rates, worth_cells, worth_columns
from debubble.report.answers.plan import PlanAnswer
from debubble.report.answers.server_plan import ServerPlanAnswer
from debubble.report.text import FEW, Page, Table, refused_table
from debubble.units import (
    counted,
    show_between,
    show_bytes,
    show_change,
    show_count,
    show_gain,
    show_gains,
    show_known,
    show_number,
    show_range,
    show_seconds,
    show_share,
)

# What takes less beside layers is nothing to speak of.
_LEAST_WORTH = 0.2


def plan_page(found: PlanAnswer, next_command: str = "") -> Page:
    """Lay out the plan: what to do, then all options, then what was refused.

    What is written for a framework comes after it: its last line announces that.
    """
    page = Page(answer=found.verdict, findings=list(found.findings))
    if found.options:
        page.tables += _option_tables(found)
    if found.context_length is not None:
        page.tables.append(_length_table(found, found.context_length))
    if found.kv_cache is not None:
        page.tables.append(_cache_table(found, found.kv_cache))
    if found.refused:
        page.tables.append(refused_table((one.words, one.reason) for one in found.refused))
    page.notes = [*_notes(found), *_emitted(found)]
    page.gaps = list(found.warnings)
    page.next_command = next_command
    return page


def _option_tables(found: PlanAnswer) -> Iterator[Table]:
    """Lay out the options, those with a larger batch apart."""
    now = found.baseline
    columns = (
        *("option", "batch", "four of five in", "bubble", "gain", "memory left", "do"),
        *worth_columns(found.rates),
    )
    as_it_is = (
        "as it is",
        show_seconds(now.numbers.batch_latency_s),
        "",
        show_share(now.numbers.bubble_fraction),
        "",
        least_left(now.headroom_bytes) or "unknown",
        "",
        *worth_cells(found.rates, None),
    )
    # What a day is worth follows from the gain; money and energy were asked for.
    spare = ("GPU-h a day", "bubble")
    same = Table(columns=columns, title="options, by throughput", rows=[as_it_is], spare=spare)
    larger = Table(columns=columns, title="A larger batch (changes training):", spare=spare)
    for option in found.options:
        low, high = option.interval.batch_latency_s or (0.0, 0.0)
        table = larger if option.changes_training else same
        table.add(
            f"{option.words}{' (by replay)' if option.by_replay else ''}",
            show_seconds(option.numbers.batch_latency_s),
            show_between(show_seconds(low), show_seconds(high)),
            show_share(option.numbers.bubble_fraction),
            show_change(option.throughput_gain_fraction),
            least_left(option.headroom_bytes) or "unknown",
            "try" if option.advice == "maybe" else option.advice,
            *worth_cells(found.rates, option.worth),
        )
    yield same
    if larger.rows:
        yield larger


def _length_table(found: PlanAnswer, length: LengthPart) -> Table:
    """Lay out every option at another length, beside its rank there."""
    name = name_length(length.token_scale, length.tokens)
    table = Table(
        columns=("rank there", "option", "batch", "bubble", "gain", "memory left", "there"),
        title=f"with {name}, against the unchanged run there",
    )
    for there in length.options:
        table.add(
            show_known(there.rank),
            found.options[there.option].words,
            show_seconds(there.numbers.batch_latency_s),
            show_share(there.numbers.bubble_fraction),
            show_change(there.throughput_gain_fraction),
            least_left(there.headroom_bytes) or "unknown",
            there.fate,
        )
    return table


def _cache_table(found: PlanAnswer, cache: CachePart) -> Table:
    """Lay out the splits by what a KV cache holds, the one in use among them."""
    table = Table(
        columns=("split", "KV cache tokens", "more", "limited by", "batch", "throughput"),
        title="KV cache: the rank with the least room for each of its layers limits all",
    )
    table.add(
        f"{','.join(map(str, found.baseline.split or ()))} (now)",
        show_count(cache.tokens),
        "",
        f"rank {cache.limited_by_rank}",
        show_seconds(found.baseline.numbers.batch_latency_s),
        "",
    )
    for option in cache.options:
        table.add(
            ",".join(map(str, option.change.split or ())),
            show_count(option.tokens),
            show_known(option.tokens_gain_fraction, show_change),
            f"rank {option.limited_by_rank}",
            show_seconds(option.batch_latency_s),
            show_change(option.throughput_gain_fraction),
        )
    return table


def _notes(found: PlanAnswer) -> list[str]:
    base, length, cache = found.baseline, found.context_length, found.kv_cache
    notes = [say_basis(found.basis, base.without_profiler)]
    notes += [f"{found.left_out.sentence}; --for any weighs all"] if found.left_out else []
    notes += list(say_rates(found.rates)) if found.options else []
    each = [size for size in base.per_microbatch_bytes if size is not None]
    if each:
        few = " ".join(map(show_bytes, each))
        shown = few if len(each) <= FEW else show_range(each, show_bytes)
        notes.append(f"memory: a microbatch in flight takes {shown}, rank by rank")
    assumed = {said for option in found.options for said in option.assumptions}
    assumed |= set(length.assumptions if length else ())
    assumed |= set(cache.assumptions if cache else ())
    notes += [f"assumed: {said}" for said in sorted(assumed)]
    if base.predicted_peak_bytes is None:
        notes.append(
            "memory: unknown, the traces do not tell how it grows; nothing is held against it"
        )
    elif None in base.limit_bytes:
        notes.append("memory: the limit of a device is unknown; say it with --memory-limit")
    if found.quickest_split is not None and found.lower_bound_s is not None:
        split = ",".join(map(str, found.quickest_split.split))
        proof = "no split is quicker by 3 %"
        if not found.quickest_split.exact:
            bound = show_seconds(found.lower_bound_s)
            proof = f"the quickest split found; it is sure that none takes less than {bound}"
        notes.append(f"split {split}: {proof}")
    return notes + _name_ends(found)


def _name_ends(found: PlanAnswer) -> list[str]:
    """Say what the ends do besides their layers, now and with the quickest split."""
    base, quickest = found.baseline, found.quickest_split
    split = base.split or []
    ends = ((0, "embedding", base.embedding_layers), (len(split) - 1, "head", base.head_layers))
    said = []
    for stage, what, worth in ends if split else ():
        if not worth or worth < _LEAST_WORTH:
            continue
        besides = f"{worth:.1f} layers' worth of {what}"
        now = f"stage {stage} = {counted(split[stage], 'layer')} + {besides}"
        if quickest is not None and quickest.split[stage] != split[stage]:
            layers = counted(quickest.split[stage], "layer")
            now += f"; with split {','.join(map(str, quickest.split))} it has {layers}"
        said.append(now)
    return said


def _emitted(found: PlanAnswer) -> list[str]:
    """Say what is written for a framework, and what must be known of it."""
    emitted = found.emitted
    if emitted is None:
        return []
    if emitted.option is None:
        return ["", f"for {emitted.framework}: nothing to write ({emitted.reason})"]
    option, said = found.options[emitted.option], [""]
    if emitted.reason:
        said.append(f"the options before it cannot be written: {emitted.reason}")
    if not option.recommended:
        low, high = option.interval.throughput_gain_fraction or (0.0, 0.0)
        gain = show_gain(option.throughput_gain_fraction, low, high)
        kind = "fits, and is slower" if high < 0 else "may be within the noise of a run"
        said.append(f"this one {kind}: {gain}")
    return [*said, f"for {emitted.framework}, {option.words}:"]


_SHOWN = 8


def server_plan_page(found: ServerPlanAnswer, next_command: str = "") -> Page:
    """Lay out the answer: what it does as it is, then each change with what it would do."""
    page = Page(answer=found.verdict, gaps=list(found.warnings), next_command=next_command)
    table = Table(
        columns=(
            *("with", "tokens/s out", "gain", "four of five", "TTFT", "TPOT", "KV", "sure"),
            *worth_columns(found.rates),
        ),
        title="what it would do, the most tokens first" if len(found.options) > 1 else "",
        spare=("GPU-h a day", "KV"),
    )
    now = found.as_is
    table.add(
        "as it is",
        show_number(now.tokens_out_per_s),
        "",
        "",
        show_known(now.ttft_s, show_seconds),
        show_seconds(now.tpot_s),
        show_known(now.kv_tokens, show_count),
        "",
        *worth_cells(found.rates, None),
    )
    for option in found.options[:_SHOWN]:
        served = option.served
        table.add(
            option.what,
            show_number(served.tokens_out_per_s),
            show_change(option.gain_fraction),
            show_gains(option.low_fraction, option.high_fraction),
            show_known(served.ttft_s, show_seconds),
            show_seconds(served.tpot_s),
            show_known(served.kv_tokens, show_count),
            option.verdict,
            *worth_cells(found.rates, option.worth),
        )
    page.tables = [table]
    page.findings = [
        f"{option.what}: {option.refused}." for option in found.options if option.refused
    ]
    page.notes = [
        f"the model is {show_gain(found.misfit_fraction)} from what was measured",
        "TTFT: from the moment that a request has a place; KV: tokens that each stage keeps",
        *(say_rates(found.rates) if found.options else ()),
        *(f"assumed: {said}" for said in found.assumptions),
    ]
    if found.emitted is not None and found.emitted.reason:
        page.notes.append(f"not written for {found.emitted.framework}: {found.emitted.reason}")
    return page
