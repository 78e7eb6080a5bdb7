"""What a server would do in → its page for people."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from debubble.answers.server_plan import ServerPlanAnswer
from debubble.answers.worth import say_rates, worth_cells, worth_columns
from debubble.report.text import Page, Table
from debubble.units import show_change, show_count, show_gains, show_number, show_seconds

Number = TypeVar("Number", int, float)
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
    )
    now = found.as_is
    table.rows.append(
        (
            "as it is",
            show_number(now.tokens_out_per_s),
            "",
            "",
            _or_dash(now.ttft_s, show_seconds),
            show_seconds(now.tpot_s),
            _or_dash(now.kv_tokens, show_count),
            "",
            *worth_cells(found.rates, None),
        )
    )
    for option in found.options[:_SHOWN]:
        served = option.served
        table.rows.append(
            (
                option.what,
                show_number(served.tokens_out_per_s),
                show_change(option.gain_fraction),
                show_gains(option.low_fraction, option.high_fraction),
                _or_dash(served.ttft_s, show_seconds),
                show_seconds(served.tpot_s),
                _or_dash(served.kv_tokens, show_count),
                option.verdict,
                *worth_cells(found.rates, option.worth),
            )
        )
    page.tables = [table]
    page.findings = [
        f"{option.what}: {option.refused}." for option in found.options if option.refused
    ]
    page.notes = [
        f"the model is {show_change(found.misfit_fraction)} from what was measured",
        "TTFT: from the moment that a request has a place; KV: tokens that each stage keeps",
        *(say_rates(found.rates) if found.options else ()),
        *(f"assumed: {said}" for said in found.assumptions),
    ]
    if found.emitted is not None and found.emitted.reason:
        page.notes.append(f"not written for {found.emitted.framework}: {found.emitted.reason}")
    return page


def _or_dash(value: Number | None, show: Callable[[Number], str]) -> str:
    return "–" if value is None else show(value)
