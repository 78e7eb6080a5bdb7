"""What the others take: the middle of their medians, the hop itself left out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from debubble.links.hop_times import middle_of_others, usual_of_others

TIMES = st.integers(1, 9).map(float)


@given(st.lists(TIMES, min_size=1, max_size=9), st.data())
def test_the_middle_of_the_others_is_that_of_a_list_without_oneself(times, data):
    own = data.draw(st.sampled_from(times))
    others = sorted(times)
    others.remove(own)
    expected = others[(len(others) - 1) // 2] if others else None
    assert middle_of_others(sorted(times), own) == expected


def test_who_has_no_figure_is_held_against_all():
    assert middle_of_others([1.0, 2.0, 4.0], None) == 2.0
    assert middle_of_others([], None) is None


def test_exchanges_as_long_both_ways_count_once_and_tell_nothing_of_each_other():
    """Both hops into rank 1 are slow, and each exchange lasts as long as the slow way."""
    lengths = {(0, 1): 7.0, (1, 0): 7.2, (1, 2): 6.8, (2, 1): 7.0, (2, 3): 2.0, (3, 2): 2.1}
    back = {hop: hop[::-1] for hop in lengths}
    usual = usual_of_others(lengths, back)
    assert [round(usual[hop], 2) for hop in ((0, 1), (2, 1), (1, 0))] == [2.05] * 3
    # Where exchanges end when their own message does, the way back is a hop like any other.
    apart = {(0, 1): 7.0, (1, 0): 2.0, (1, 2): 2.0, (2, 1): 2.0}
    assert usual_of_others(apart, {hop: hop[::-1] for hop in apart})[0, 1] == 2.0


def test_an_exchange_without_others_is_held_against_its_way_back():
    assert usual_of_others({(0, 1): 6.0, (1, 0): 5.0}, {(0, 1): (1, 0), (1, 0): (0, 1)}) == {
        (0, 1): 5.0,
        (1, 0): 6.0,
    }
