from __future__ import annotations

import pytest

from debubble.errors import UsageError
from debubble.timeline.schedules import SCHEDULES, format_order, order_of, state_schedule


@pytest.fixture
def order_file(tmp_path):
    path = tmp_path / "order.csv"
    path.write_text(format_order(order_of("zbv", 4, 8)), "utf-8")
    return str(path)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_name_stands_for_its_order_at_the_sizes_of_the_run(name):
    assert state_schedule(name).order_for(4, 12, 1) == order_of(name, 4, 12)


def test_chunks_are_as_stated_else_as_measured_else_the_fewest():
    name = "interleaved-1f1b"
    assert state_schedule(name, 3).order_for(4, 8, 2) == order_of(name, 4, 8, 3)
    assert state_schedule(name).order_for(4, 8, 4) == order_of(name, 4, 8, 4)
    assert state_schedule(name).order_for(4, 8, 1) == order_of(name, 4, 8, 2)


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 4), (2, 8)])
def test_a_file_for_other_sizes_is_refused(order_file, ranks, microbatches):
    with pytest.raises(UsageError, match="the order is for 4 ranks and 8 microbatches"):
        state_schedule(order_file).order_for(ranks, microbatches, 2)


def test_more_chunks_than_passes_that_ran_are_refused_before_their_order_is_written(monkeypatch):
    monkeypatch.setattr("debubble.timeline.schedules.named._make", None)
    with pytest.raises(UsageError, match=r"1,000,000 chunks .* this one runs 16"):
        state_schedule("looped-bfs", 1_000_000).order_for(4, 8, 2)


def test_a_file_tells_its_chunks_itself(order_file):
    with pytest.raises(UsageError, match="by itself"):
        state_schedule(order_file, 2)
