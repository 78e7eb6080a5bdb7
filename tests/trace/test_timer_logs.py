"""Durations without starts: no waits can be told, and what can be simulated is said."""

from __future__ import annotations

import re

import pytest
from support.services.console import type_command

from debubble.errors import RunNotFound
from debubble.trace.captures import recognise
from debubble.trace.run import find_run, read_run

MEGATRON = """ [2026-03-01 10:00:00] iteration 5/ 100 | elapsed time per iteration (ms): 3201.4
(min, max) time across ranks (ms):
    forward-backward ...............................: (3100.01, 3100.99)
    forward-compute ................................: (812.41, 934.07)
    backward-compute ...............................: (1500.12, 1623.80)
"""
OLD_MEGATRON = "time (ms) | forward-compute: 812.41 | backward-compute: 1623.80 | optimizer: 3.1\n"
DEEPSPEED = """[2026-03-01] [INFO] [Rank 0] time (ms) | fwd_microstep: 21.36 | bwd_microstep: 45.10
[2026-03-01] [INFO] [Rank 0] time (ms) | fwd_microstep: 21.40 | bwd_microstep: 45.30
"""


@pytest.mark.parametrize(
    ("text", "whose", "costs"),
    [
        (MEGATRON, "Megatron's timers", "--forward 934.07ms/M --backward 1623.8ms/M"),
        (OLD_MEGATRON, "Megatron's timers", "--forward 812.41ms/M --backward 1623.8ms/M"),
        (DEEPSPEED, "wall_clock_breakdown", "--forward 21.38ms --backward 45.2ms"),
    ],
    ids=["Megatron", "older Megatron", "DeepSpeed"],
)
def test_a_log_is_named_and_its_costs_are_handed_on(text, whose, costs, tmp_path):
    path = tmp_path / "train.log"
    path.write_text(text)
    with pytest.raises(RunNotFound, match=whose) as caught:
        read_run(find_run([str(path)]))
    assert costs in caught.value.hint


def test_a_log_with_one_of_the_two_is_some_other_log(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("forward-compute: 3.0\n")
    assert "a log of" not in str(recognise(str(path)).why_not)


def test_a_table_without_starts_names_the_command_that_it_is_enough_for(tmp_path):
    lines = ["step,stage,microbatch,op,duration_ms"]
    for stage, times in enumerate((1.0, 1.5)):
        for microbatch in range(4):
            lines += [
                f"0,{stage},{microbatch},F,{5 * times}",
                f"0,{stage},{microbatch},B,{9 * times}",
            ]
    (tmp_path / "costs.csv").write_text("\n".join(lines))
    refused = type_command("debubble find costs.csv", tmp_path)
    assert refused.code == 2
    command = re.search(r"`(debubble simulate .*?)`", refused.text)[1]
    assert command.endswith("--forward 5ms,7.5ms --backward 9ms,13.5ms")
    assert type_command(command, tmp_path).code == 0
