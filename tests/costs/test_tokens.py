"""How passes grow with tokens: by the rule for one run, and by the line through two."""

from __future__ import annotations

import numpy as np
import pytest

from debubble.simulate.costs.passes import Growth, grow_by_one_run, grow_by_two_runs
from debubble.timeline.model import PassKind

F, B, W = int(PassKind.F), int(PassKind.B), int(PassKind.W)


def logs(**times):
    """`B0_1=3.0` is B of rank 1, of the first microbatch."""
    kinds = {"F": F, "B": B, "W": W}
    return {
        (kinds[name[0]], name[1] == "0", int(name[-1])): float(np.log(time))
        for name, time in times.items()
    }


def test_only_adding_to_gradients_does_not_grow_with_tokens():
    growth = grow_by_one_run(logs(F_0=1.0, B0_0=1.6, B_0=2.0, B0_1=2.4, B_1=3.0))
    assert growth[F, False] == Growth()
    assert growth[B, True] == Growth()
    assert growth[B, False].constant == pytest.approx(0.4 / 2.0)
    assert growth[F, False].times(2) == pytest.approx(2.0)
    assert growth[B, False].times(2) == pytest.approx(0.2 + 0.8 * 2)


def test_no_more_than_a_pass_stays():
    assert grow_by_one_run(logs(B0_0=1e-9, B_0=2.0))[B, False].constant == pytest.approx(1.0)


def test_a_first_pass_that_happens_to_be_slower_is_no_negative_constant():
    assert grow_by_one_run(logs(B0_0=2.2, B_0=2.0))[B, False].constant == 0.0


@pytest.mark.parametrize(("tokens", "other"), [(1024, 512), (512, 1024), (100, 3200)])
def test_two_runs_give_back_the_line_that_made_them(tokens, other):
    def takes(count):
        return 0.3 + 0.002 * count

    growth = grow_by_two_runs(
        logs(F_0=takes(tokens)), logs(F_0=takes(other)), ratio=other / tokens
    )[F, False]
    for count in (64, 768, 4096):
        assert growth.times(count / tokens) * takes(tokens) == pytest.approx(takes(count))


def test_what_grows_faster_than_tokens_has_a_square_and_never_becomes_negative():
    def takes(count):
        return 0.001 * count + 1e-6 * count * count

    growth = grow_by_two_runs(logs(F_0=takes(1000)), logs(F_0=takes(2000)), ratio=2.0)[F, False]
    assert growth.constant == 0.0
    assert growth.times(4) * takes(1000) == pytest.approx(takes(4000))
    scales = np.array([growth.times(scale) for scale in np.linspace(0.01, 8, 50)])
    assert (scales > 0).all()
    assert (np.diff(scales) > 0).all()


def test_what_gets_quicker_with_more_tokens_is_taken_to_stay_as_it_is():
    growth = grow_by_two_runs(logs(F_0=2.0), logs(F_0=1.8), ratio=2.0)[F, False]
    assert growth.times(8) == pytest.approx(1.0)


def test_what_only_one_run_has_grows_as_by_one_run():
    growth = grow_by_two_runs(logs(F_0=1.0, W0_0=0.9, W_0=1.0), logs(F_0=1.9), ratio=2.0)
    assert growth[F, False].constant == pytest.approx(0.1)
    assert growth[W, False].constant == pytest.approx(0.1)
