"""A hop that is slower than the others is found where it was planted, and nowhere else."""

from __future__ import annotations

import pytest
from support.traces.read_once import build_recording

from debubble.costs.wire_pools import pool_wires


@pytest.mark.parametrize(
    ("name", "slow"),
    [
        ("1f1b_m8_slow23", [(2, 3)]),
        ("fwd_closed_m8_slow12", [(1, 2)]),
        ("1f1b_m8", []),
        ("gpipe_m8", []),
        ("zbv_m8", []),
        ("fwd_closed_m8_t512", []),
    ],
)
def test_slow_hops_are_those_that_were_paced(name, slow, recorded_data):
    pools = pool_wires(build_recording(recorded_data / name), 0)
    assert sorted(pools.slow) == slow
    assert all(times > 3 for times in pools.slow.values())
