"""A change that cannot be is refused before any framework is asked, with the rule and a way out."""

from __future__ import annotations

import pytest

from debubble.errors import UsageError
from debubble.plan.change import Change, Setting
from debubble.plan.emit import EMITTERS, emit
from debubble.plan.emit.aim import aim_of
from debubble.timeline.schedules import format_order, order_of

RUN = Setting(ranks=4, layers=32, microbatches=8, schedule="1f1b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Change(), "there is no change to write down"),
        (Change(hold="batch"), "there is no change to write down"),
        (Change(split=(8, 8, 8, 7)), "the split has 31 layers, the model 32"),
        (Change(split=(16, 16)), "the split has 2 entries for 4 stages"),
        (Change(split=(16, 16, 0, 0)), "stage 2 of the split has no layer"),
        (Change(split=(8, 8, 8, 8), schedule="zbv"), "the split has 4 entries for 8 stages"),
        (Change(microbatches=0), "0 microbatches make no pipeline"),
        (Change(chunks=0), "0 chunks make no pipeline"),
        (Change(schedule="zbv", chunks=3), "zbv needs 2 chunks a rank, not 3"),
        (
            Change(schedule="interleaved-1f1b", chunks=9),
            "32 layers cannot fill 36 stages",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_rule_in_every_framework(change, message):
    for framework in EMITTERS:
        if framework.startswith("csv"):
            continue
        with pytest.raises(UsageError, match=message) as caught:
            emit(framework, change, RUN)
        assert caught.value.hint


def test_a_split_needs_the_number_of_layers():
    with pytest.raises(UsageError, match="the number of layers is unknown"):
        aim_of(Change(split=(8,) * 4), Setting(ranks=4))


def test_chunks_stay_where_the_schedule_can_have_them_and_are_the_fewest_where_not():
    run = Setting(ranks=4, layers=48, microbatches=8, schedule="interleaved-1f1b", chunks=3)
    assert aim_of(Change(schedule="looped-bfs"), run).chunks == 3
    assert aim_of(Change(schedule="zbv"), run).chunks == 2
    assert aim_of(Change(schedule="1f1b"), run).chunks == 1


def write_order(folder, order):
    file = folder / "mine.csv"
    file.write_text(format_order(order), "utf-8")
    return str(file)


def test_an_order_in_a_file_tells_microbatches_and_stages(tmp_path):
    file = write_order(tmp_path, order_of("zbv", 4, 12))
    aim = aim_of(Change(schedule=file), RUN)
    assert (aim.microbatches, aim.chunks) == (12, 2)
    assert aim.placement == ((0, 7), (1, 6), (2, 5), (3, 4))


@pytest.mark.parametrize(
    ("ranks", "microbatches", "change"), [(3, 12, {}), (4, 12, {"microbatches": 16})]
)
def test_an_order_of_other_sizes_is_refused(ranks, microbatches, change, tmp_path):
    file = write_order(tmp_path, order_of("1f1b", ranks, microbatches))
    with pytest.raises(UsageError, match=f"the order is for {ranks} ranks and 12 microbatches"):
        aim_of(Change(schedule=file, **change), RUN)


def test_an_order_with_more_stages_on_one_rank_is_refused(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text("0F0,2F0,2B0,0B0\n1F0,1B0\n", "utf-8")
    with pytest.raises(UsageError, match="more stages on one rank than on another"):
        aim_of(Change(schedule=str(file)), Setting(ranks=2, layers=6, microbatches=1))
