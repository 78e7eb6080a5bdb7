"""What the others take: the middle of their medians, the hop itself left out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from debubble.links.hop_times import middle_of_others

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
