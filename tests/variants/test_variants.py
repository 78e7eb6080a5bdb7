"""Healthy variants of a recording are right, refused nowhere, and close no gate.

A few here; `make variants` makes all of them, of three recordings and those that are kept back.
"""

from __future__ import annotations

import pytest
from support.traces.recordings import DATA
from variants.healthy import HEALTHY, KEPT_BACK
from variants.judge import judge

FEW = (
    "rerun", "device_3x", "graphs", "overlap_6us", "chained_triggers", "flags", "threads",
    "prefetch_by_main", "checkpoint", "other_shapes_last", "whole_us", "memory_of_rank_0",
    "links_10ms", "cut_end", "back_clocks_8s", "back_prefetch_cast",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("recording", ["h200/1f1b_p2_m4", "h200/fwd_closed_m4"])
def test_healthy_variants_are_right_and_close_no_gate(tmp_path, recording):
    variants = {name: {**HEALTHY, **KEPT_BACK}[name] for name in FEW}
    problems = judge(DATA / recording, variants, tmp_path)
    assert {name: found for name, found in problems.items() if found} == {}


def test_a_variant_that_lost_its_kernels_would_be_seen(tmp_path):
    """The judge has teeth: a device that is cut off in the midst is no healthy one."""

    def without_half(replay):
        documents = replay.run()
        for document in documents.values():
            events = document["traceEvents"]
            document["traceEvents"] = [
                e for e in events if e.get("cat") != "kernel" or e["dur"] > 60
            ]
        return documents

    problems = judge(DATA / "h200" / "fwd_closed_m4", {"lost": without_half}, tmp_path)
    assert problems["lost"]
