"""What a job's own timers cannot show is neither named nor priced."""

from __future__ import annotations

import re

from support.services.console import type_command

import debubble
from debubble.ledger.causes import OF_KERNELS_AND_HOSTS

STAGES, MICROBATCHES, GAP = 3, 4, 4_000


def table(folder, gap=GAP):
    """Write passes alone, a pause before each that nothing explains."""
    lines = ["step,stage,microbatch,op,start_us,duration_us"]
    for step in range(3):
        at = dict.fromkeys(range(STAGES), 100_000 * step)
        for kind, order in (("F", range(STAGES)), ("B", range(STAGES - 1, -1, -1))):
            for microbatch in range(MICROBATCHES):
                ready = at[order[0]]
                for stage in order:
                    start = max(at[stage], ready) + gap
                    at[stage] = ready = start + (1_000 if kind == "F" else 2_000)
                    lines.append(f"{step},{stage},{microbatch},{kind},{start},{ready - start}")
    path = folder / "ops.csv"
    path.write_text("\n".join(lines))
    return path


def test_no_kernels_and_no_hosts_are_spoken_of(tmp_path):
    table(tmp_path)
    text = type_command("debubble find ops.csv", tmp_path).text
    assert not re.search(r"kernel|host|None|dashboard", text), text


def test_what_timers_cannot_show_has_no_price(tmp_path):
    analysis = debubble.analyse(str(table(tmp_path)))
    priced = {saving.cause for saving in analysis.ledger.savings}
    assert not priced & {*OF_KERNELS_AND_HOSTS, "head_of_line"}
    assert analysis.bottleneck is None or analysis.bottleneck.what != "gaps"
    assert analysis.ledger.shares()["unexplained"] > 0.2


def test_what_nothing_explains_is_a_wait_and_the_bubble_is_the_bottleneck(tmp_path):
    assert debubble.analyse(str(table(tmp_path))).bottleneck is None


def test_a_hop_cannot_be_set_where_nobody_wrote_bytes(tmp_path):
    table(tmp_path)
    answer = type_command("debubble simulate ops.csv --hop 0:1=1GB/s", tmp_path)
    assert "column of bytes" in answer.text
    assert "record_shapes" not in answer.text
