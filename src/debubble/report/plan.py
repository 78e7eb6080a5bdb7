"""An answer of `debubble plan` in → its page for people, for a job or a captured server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from debubble.report.answers.change import say_basis
from debubble.report.answers.ledger import say_rates, worth_cells, worth_columns
from debubble.report.answers.plan import OptionPart, PlanAnswer
from debubble.report.answers.server_plan import ServerOptionPart, ServerPlanAnswer
from debubble.report.answers.serving import UNPRICED
from debubble.report.text import FEW, MOST_FINDINGS, Page, Table, refused_table
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
# What lies between batches and is less of a batch than this does not show in a gain.
_LEAST_BETWEEN = 0.02
# Of the short answer: options, those of them with a larger batch, assumptions.
_MOST_OPTIONS, _MOST_LARGER, _MOST_ASSUMED = 5, 2, 3


def plan_page(answer: PlanAnswer, next_command: str = "", *, details: bool = True) -> Page:
    """Lay out the plan: what to do, then all options, then what was refused.

    The short answer has the best options, and assumptions that these rest on. What is written for
    a framework comes after the page: its last line announces that.
    """
    page = Page(answer=answer.verdict, findings=list(answer.findings), next_command=next_command)
    page.gaps = list(answer.warnings)
    notes = _notes(answer) if details else _few_notes(answer)
    if not details:
        page.findings = page.findings[:MOST_FINDINGS]
        if next_command:
            notes.append("all options, refused options, assumptions, memory: --details")
    if answer.options:
        page.tables += _option_tables(answer) if details else [_best_table(answer)]
    if answer.refused and details:
        page.tables.append(
            refused_table((refused.words, refused.reason) for refused in answer.refused)
        )
    page.notes = [*notes, *_emitted(answer)]
    return page


def _shown_first(answer: PlanAnswer) -> list[OptionPart]:
    """Return the best options with this global batch size, then the best of larger ones."""
    same = [option for option in answer.options if not option.changes_training]
    larger = [option for option in answer.options if option.changes_training]
    return [*same, *larger[:_MOST_LARGER]][:_MOST_OPTIONS]


def _few_notes(answer: PlanAnswer) -> list[str]:
    """Return on which basis times are, and what the first options assume."""
    every = [sentences for option in _shown_first(answer) for sentences in option.assumptions]
    assumed = list(dict.fromkeys(every))[:_MOST_ASSUMED]
    basis = say_basis(answer.basis, answer.baseline.without_profiler)
    assumed = [f"assumed: {sentences}" for sentences in assumed]
    return [basis, *_between_steps(answer), *assumed, *_memory_notes(answer)]


def _between_steps(answer: PlanAnswer) -> list[str]:
    """Say that the gain is of whole steps, where these are longer than the batch."""
    numbers, count = answer.baseline.numbers, answer.baseline.microbatches
    if not (numbers.microbatches_per_s and numbers.batch_latency_s and count):
        return []
    between_s = count / numbers.microbatches_per_s - numbers.batch_latency_s
    if between_s < _LEAST_BETWEEN * numbers.batch_latency_s:
        return []
    return [f"gain: of whole steps, with the {show_seconds(between_s)} between batches"]


_COLUMNS = ("option", "batch", "80 % interval", "bubble", "gain", "headroom", "do")


def _unchanged_cells(answer: PlanAnswer) -> tuple[str, ...]:
    now = answer.baseline
    split = f" (split {','.join(map(str, now.split))})" if now.split else ""
    return (
        f"unchanged{split}",
        show_seconds(now.numbers.batch_latency_s),
        "",
        show_share(now.numbers.bubble_fraction),
        "",
        least_left(now.headroom_bytes) or "unknown",
        "",
    )


def least_left(headroom: Sequence[int | None] | None) -> str | None:
    """Say what the fullest rank has left of its memory; None where that is not known."""
    left = [rank for rank in headroom or () if rank is not None]
    return show_bytes(min(left)) if left else None


def _option_cells(option: OptionPart, *, mark: bool) -> tuple[str, ...]:
    low, high = option.interval.batch_latency_s or (0.0, 0.0)
    name = f"{option.words}{' (by replay)' if option.by_replay else ''}"
    return (
        f"{name} (larger batch)" if mark and option.changes_training else name,
        show_seconds(option.numbers.batch_latency_s),
        show_between(show_seconds(low), show_seconds(high)),
        show_share(option.numbers.bubble_fraction),
        show_change(option.throughput_gain_fraction),
        least_left(option.headroom_bytes) or "unknown",
        "try" if option.advice == "maybe" else option.advice,
    )


def _best_table(answer: PlanAnswer) -> Table:
    """Lay out the options of the short answer, with their worth where a price was given."""
    priced = answer.rates is not None and answer.rates.price_per_gpu_hour is not None
    rates = answer.rates if priced else None
    table = Table(columns=(*_COLUMNS, *worth_columns(rates)), spare=("bubble",))
    table.add(*_unchanged_cells(answer), *worth_cells(rates, None))
    for option in _shown_first(answer):
        table.add(*_option_cells(option, mark=True), *worth_cells(rates, option.worth))
    return table.without_unknown()


def _option_tables(answer: PlanAnswer) -> Iterator[Table]:
    """Lay out the options, those with a larger batch apart."""
    columns = (*_COLUMNS, *worth_columns(answer.rates))
    as_it_is = (*_unchanged_cells(answer), *worth_cells(answer.rates, None))
    # What a day is worth follows from the gain; money and energy were asked for.
    spare = ("GPU-h/day", "bubble")
    same = Table(columns=columns, title="options, by throughput", rows=[as_it_is], spare=spare)
    larger = Table(columns=columns, title="A larger batch (changes training):", spare=spare)
    for option in answer.options:
        table = larger if option.changes_training else same
        table.add(*_option_cells(option, mark=False), *worth_cells(answer.rates, option.worth))
    yield same
    if larger.rows:
        yield larger


def _notes(answer: PlanAnswer) -> list[str]:
    base = answer.baseline
    notes = [say_basis(answer.basis, base.without_profiler), *_between_steps(answer)]
    notes += [f"{answer.left_out.sentence}; --for any includes them"] if answer.left_out else []
    notes += list(say_rates(answer.rates)) if answer.options else []
    sizes = [size for size in base.per_microbatch_bytes if size is not None]
    if sizes:
        few = " ".join(map(show_bytes, sizes))
        shown = few if len(sizes) <= FEW else show_range(sizes, show_bytes)
        notes.append(f"memory of a microbatch in flight, by rank: {shown}")
    assumed = {sentences for option in answer.options for sentences in option.assumptions}
    notes += [f"assumed: {sentences}" for sentences in sorted(assumed)]
    notes += _memory_notes(answer)
    if answer.quickest_split is not None and answer.lower_bound_s is not None:
        split = ",".join(map(str, answer.quickest_split.split))
        proof = f"no split beats {split} by 3 % or more"
        if not answer.quickest_split.exact:
            bound = show_seconds(answer.lower_bound_s)
            proof = f"best split found: {split}; no split takes less than {bound}"
        notes.append(proof)
    return notes + _name_ends(answer)


def _memory_notes(answer: PlanAnswer) -> list[str]:
    """Say what is unknown of memory, so that options may not fit."""
    if answer.baseline.predicted_peak_bytes is None:
        return ["memory: growth unknown from these traces; options are not checked against a limit"]
    if None in answer.baseline.limit_bytes:
        return ["memory: limit unknown; give it with --memory-limit"]
    return []


def _name_ends(answer: PlanAnswer) -> list[str]:
    """Say what the ends do besides their layers, now and with the quickest split."""
    base, quickest = answer.baseline, answer.quickest_split
    split = base.split or []
    ends = ((0, "embedding", base.embedding_layers), (len(split) - 1, "head", base.head_layers))
    sentences = []
    for stage, what, worth in ends if split else ():
        if not worth or worth < _LEAST_WORTH:
            continue
        besides = f"{what} (worth {worth:.1f} layers)"
        now = f"stage {stage}: {counted(split[stage], 'layer')} + {besides}"
        if quickest is not None and quickest.split[stage] != split[stage]:
            layers = counted(quickest.split[stage], "layer")
            now += f"; with split {','.join(map(str, quickest.split))} it has {layers}"
        sentences.append(now)
    return sentences


def _emitted(answer: PlanAnswer) -> list[str]:
    """Say what is written for a framework, and what must be known of it."""
    emitted = answer.emitted
    if emitted is None:
        return []
    if emitted.option is None:
        return ["", f"for {emitted.framework}: nothing to write ({emitted.reason})"]
    option, sentences = answer.options[emitted.option], [""]
    if emitted.reason:
        sentences.append(f"better options cannot be written: {emitted.reason}")
    if not option.recommended:
        low, high = option.interval.throughput_gain_fraction or (0.0, 0.0)
        gain = show_gain(option.throughput_gain_fraction, low, high)
        kind = "fits, but is slower" if high < 0 else "may be within the noise"
        sentences.append(f"this option {kind}: {gain}")
    return [*sentences, f"for {emitted.framework}, {option.words}:"]


def server_plan_page(
    answer: ServerPlanAnswer, next_command: str = "", *, details: bool = True
) -> Page:
    """Lay out the answer: what it does unchanged, then each change with what it would do."""
    page = Page(answer=answer.verdict, gaps=list(answer.warnings), next_command=next_command)
    page.tables = [_server_table(answer, answer.options[: None if details else _MOST_OPTIONS])]
    page.findings = [
        f"{option.what}: {option.refused}." for option in answer.options if option.refused
    ]
    notes = [f"model error on the captured batches: {show_gain(answer.misfit_fraction)}"]
    assumed = [
        sentences if sentences.startswith(UNPRICED) else f"assumed: {sentences}"
        for sentences in answer.assumptions
    ]
    if details:
        notes.append("TTFT: after queueing; KV: tokens in each stage's cache")
        notes += say_rates(answer.rates) if answer.options else ()
    else:
        assumed = assumed[:_MOST_ASSUMED]
        assumed += ["all changes and assumptions: --details"] if next_command else []
    page.notes = notes + assumed
    if answer.emitted is not None and answer.emitted.reason:
        page.notes.append(f"not written for {answer.emitted.framework}: {answer.emitted.reason}")
    return page


def _server_table(answer: ServerPlanAnswer, options: Sequence[ServerOptionPart]) -> Table:
    now = answer.as_is
    table = Table(
        columns=(
            *("what if", "tokens/s out", "gain", "80 % interval", "TTFT", "TPOT", "KV", "sure"),
            *worth_columns(answer.rates),
        ),
        title="changes, by tokens/s" if len(answer.options) > 1 else "",
        spare=("GPU-h/day", "KV"),
    )
    layers = answer.setting.layers
    table.add(
        f"unchanged (layers {','.join(map(str, layers))})" if layers else "unchanged",
        show_number(now.tokens_out_per_s),
        "",
        "",
        show_known(now.ttft_s, show_seconds),
        show_seconds(now.tpot_s),
        show_known(now.kv_tokens, show_count),
        "",
        *worth_cells(answer.rates, None),
    )
    for option in options:
        served = option.served
        table.add(
            option.what,
            show_number(served.tokens_out_per_s),
            show_change(option.gain_fraction),
            show_gains(option.low_fraction, option.high_fraction),
            show_known(served.ttft_s, show_seconds),
            show_seconds(served.tpot_s),
            show_known(served.kv_tokens, show_count),
            "try" if option.verdict == "maybe" else option.verdict,
            *worth_cells(answer.rates, option.worth),
        )
    return table.without_unknown()
