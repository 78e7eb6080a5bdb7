"""csv: the order of the run after the change."""

from __future__ import annotations

import pytest

from debubble.errors import CannotBeTold, UsageError
from debubble.plan.change import Change, Setting
from debubble.plan.emit import emit
from debubble.plan.emit.order_file import order_text
from debubble.timeline.schedules import format_order, order_of, parse_order

RUN = Setting(ranks=4, microbatches=8, schedule="1f1b")


@pytest.mark.parametrize(
    ("change", "order"),
    [
        (Change(schedule="zb-h1"), ("zb-h1", 4, 8)),
        (Change(microbatches=16), ("1f1b", 4, 16)),
        (Change(schedule="interleaved-1f1b", chunks=3), ("interleaved-1f1b", 4, 8, 3)),
        (Change(schedule="zbv"), ("zbv", 4, 8)),
    ],
)
def test_the_order_is_that_of_the_run_after_the_change(change, order):
    assert parse_order(emit("csv", change, RUN)) == order_of(*order)


@pytest.mark.parametrize(
    ("change", "order"),
    [
        (Change(overlap=True), ("1f1b", 4, 8)),
        (Change(schedule="zb-h2", split=(1, 2, 3, 4)), ("zb-h2", 4, 8)),
    ],
)
def test_the_order_beside_what_another_framework_is_told_is_no_whole_option(change, order):
    assert parse_order(order_text(change, RUN)) == order_of(*order)
    with pytest.raises(CannotBeTold, match="an order of passes has no setting"):
        emit("csv", change, RUN)


def test_an_order_in_a_file_is_written_again(tmp_path):
    file = tmp_path / "mine.csv"
    text = format_order(order_of("zbv", 4, 8))
    file.write_text(text, "utf-8")
    assert emit("csv", Change(schedule=str(file)), RUN) == text


@pytest.mark.parametrize(
    ("change", "run", "message"),
    [
        (Change(split=(1, 2, 3, 4)), RUN, "an order of passes has no setting for a split"),
        (Change(microbatches=8), Setting(ranks=4), "the schedule of the run is unknown"),
        (Change(schedule="gpipe"), Setting(ranks=4), "how many microbatches the run has"),
        (Change(schedule="dualpipe-v", microbatches=4), RUN, "dualpipe-v needs a microbatch"),
    ],
)
def test_what_has_no_order_is_refused(change, run, message):
    with pytest.raises(UsageError, match=message):
        emit("csv", change, run)
