from __future__ import annotations

import pytest

from debubble.errors import UsageError
from debubble.timeline.schedules import SCHEDULES, candidate_orders, order_of, placement_of


@pytest.mark.parametrize("name", SCHEDULES)
def test_without_a_word_a_rank_has_as_few_chunks_as_the_schedule_can_do_with(name):
    order = order_of(name, 2, 4)
    least = 1 if name in {"forward-only", "gpipe", "1f1b", "zb-h1", "zb-h2"} else 2
    for actions, stages in zip(order, placement_of(name, 2), strict=True):
        assert {action.stage for action in actions} == set(stages)
        assert len(stages) == least


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (("zb-v", 4, 8), "no schedule is called 'zb-v'", "one of forward-only, 1f1b, gpipe"),
        (("zbv", 4, 8, 1), "zbv needs 2 chunks a rank, not 1", "use --chunks 2"),
        (("dualpipe-v", 4, 8, 3), "dualpipe-v needs 2 chunks a rank, not 3", "use --chunks 2"),
        (("gpipe", 4, 8, 2), "gpipe needs 1 chunk a rank, not 2", "use --chunks 1"),
        (
            ("looped-bfs", 4, 8, 1),
            "looped-bfs needs 2 chunks or more a rank, not 1",
            "use --chunks 2",
        ),
        (
            ("dualpipe-v", 4, 7),
            "dualpipe-v needs a microbatch for each of 8 stages, not 7",
            "give 8 microbatches or more",
        ),
        (
            ("interleaved-1f1b", 4, 9),
            "interleaved-1f1b cannot cut 9 microbatches into 2 equal rounds",
            "give a multiple of 4 microbatches",
        ),
        (("1f1b", 0, 8), "8 microbatches on 0 ranks make no step", "give one or more of each"),
        (("1f1b", 4, 0), "0 microbatches on 4 ranks make no step", "give one or more of each"),
    ],
)
def test_what_cannot_be_is_refused_with_a_way_out(arguments, message, hint):
    with pytest.raises(UsageError) as caught:
        order_of(*arguments)
    assert caught.value.message == message
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize(
    ("like", "chunks", "kinds", "microbatches", "expected"),
    [
        ("1f1b", 1, "F", 8, ["forward-only"]),
        ("1f1b", 1, "FB", 8, ["1f1b", "gpipe"]),
        ("zb-h1", 1, "FIW", 8, ["zb-h1", "zb-h2"]),
        ("looped-bfs", 3, "FB", 8, ["interleaved-1f1b", "looped-bfs"]),
        ("looped-bfs", 3, "FB", 9, ["looped-bfs"]),
        ("looped-bfs", 2, "FIW", 8, ["interleaved-zb"]),
        ("zbv", 2, "FIW", 8, ["zbv"]),
        ("zbv", 2, "FBIW", 8, ["dualpipe-v"]),
        ("zbv", 2, "FBIW", 7, []),
        ("zbv", 2, "FB", 8, []),
    ],
)
def test_only_schedules_that_fit_are_tried(like, chunks, kinds, microbatches, expected):
    placement = placement_of(like, 4, chunks)
    found = dict(candidate_orders(placement, frozenset(kinds), microbatches))
    assert list(found) == expected
    for name, order in found.items():
        assert order == order_of(name, 4, microbatches, chunks)
