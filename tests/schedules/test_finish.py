from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from debubble.errors import UsageError
from debubble.timeline.schedules import SCHEDULES, Action, can_finish, check_order, order_of


@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 12),
    st.integers(1, 40),
    st.integers(1, 4),
)
def test_every_schedule_can_finish(name, ranks, microbatches, chunks):
    try:
        order = order_of(name, ranks, microbatches, chunks)
    except UsageError:
        assume(False)
    check_order(order)
    assert len(order) == ranks
    assert {action.kind for actions in order for action in actions} <= SCHEDULES[name].kinds


def read(*ranks):
    """Read `0F0 0B0`; a `&` makes a pass overlap with the one after it."""
    return [
        [
            Action(int(word[0]), word[1], int(word[2:].rstrip("&")), word.endswith("&"))
            for word in rank.split()
        ]
        for rank in ranks
    ]


@pytest.mark.parametrize(
    ("ranks", "fault"),
    [
        ([], "it is empty"),
        ([""], "it is empty"),
        (["0F0 0B0 0B0"], "0B0 is there twice"),
        (["0F0 0F0& 0B0"], "0F0 is there twice"),
        (["0F0 0I0 0W0 0B0"], "stage 0 has B and F and I and W of microbatch 0"),
        (["0F0 0I0"], "stage 0 has F and I of microbatch 0"),
        (["0F0 0B0", "1F0"], "stage 1 has F of microbatch 0"),
        (["0F0 0F1", "1F0"], "stage 1 has nothing of microbatch 1"),
        (["0F1"], "stage 0 has nothing of microbatch 0"),
        (["0F0", "2F0"], "no rank has stage 1"),
        (["0F0", "0F1"], "stage 0 is on ranks 0, 1"),
        (["0F0&"], "0F0 is to overlap, but no B comes after it"),
        (["0B0 0F0"], "rank 0 waits at 0B0 for 0F0, which never comes"),
        (["0F0 0W0 0I0"], "rank 0 waits at 0W0 for 0B0, which never comes"),
        # Each waits for the other: rank 0 wants to see a gradient before it sends microbatch 1.
        (
            ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"],
            "rank 0 waits at 0B0 for 1B0, which never comes",
        ),
        # Apart they would finish: but as a pair, 0F1 stays until a gradient comes that needs it.
        (["0F0 0F1& 0B0 0B1", "1F0 1F1 1B0 1B1"], "rank 0 waits at 0F1 for 1B0, which never comes"),
    ],
)
def test_an_order_that_cannot_finish_says_why(ranks, fault):
    order = read(*ranks)
    assert not can_finish(order)
    with pytest.raises(UsageError) as caught:
        check_order(order)
    assert caught.value.message == f"this order cannot finish: {fault}"
    assert caught.value.hint


def test_one_rank_run_backwards_is_found_among_many():
    order = order_of("interleaved-zb", 16, 64, 4)
    assert can_finish(order)
    order[11].reverse()
    assert not can_finish(order)
