"""Durations without starts: no waits can be told, and what can be simulated is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.services.console import type_command

from debubble.errors import RunNotFound, TraceError
from debubble.trace.captures import recognise
from debubble.trace.run import find_run, read_run
from debubble.trace.timer_logs import read_stage_times

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
# As DeepSpeed 0.6 printed it; the first line is one of its optimizer's.
OLD_DEEPSPEED = """[2024-03-31] [INFO] [Rank 0] rank=0 time (ms) | optimizer_step: 46.07
[2024-03-31] [INFO] [logging.py:69:log_dist] [Rank 0] rank=0 time (ms) | forward_microstep: 21.36 \
| backward_microstep: 45.10 | backward_inner_microstep: 44.0 | backward_allreduce_microstep: 1.99
[2024-03-31] [INFO] [logging.py:69:log_dist] [Rank 0] rank=0 time (ms) | forward_microstep: 21.40 \
| backward_microstep: 45.30 | backward_inner_microstep: 44.0 | backward_allreduce_microstep: 1.99
"""


@pytest.mark.parametrize(
    "text",
    [MEGATRON, OLD_MEGATRON, DEEPSPEED, OLD_DEEPSPEED],
    ids=["Megatron", "older Megatron", "DeepSpeed", "older DeepSpeed"],
)
def test_a_log_without_ranks_is_named_with_what_it_lacks(text, tmp_path):
    path = tmp_path / "train.log"
    path.write_text(text)
    with pytest.raises(RunNotFound, match="is a log of timers") as caught:
        read_run(find_run([str(path)]))
    assert "for costs of each stage log every rank" in caught.value.hint
    with pytest.raises(TraceError, match="no rank prints"):
        read_stage_times(str(path), ranks=4, microbatches=8)


def all_ranks(times, *, iterations=3, settings=""):
    """Megatron's `all`: each rank's milliseconds of an iteration; the first takes three times."""
    lines = [settings]
    for number in range(iterations):
        slow = 3 if number == 0 else 1
        lines.append("times across ranks (ms):")
        for name, of_ranks in times.items():
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {slow * ms:.2f}" for rank, ms in enumerate(of_ranks)]
    return "\n".join(lines) + "\n"


def setting(**values):
    return "\n".join(f"  {name} {'.' * 20} {value}" for name, value in values.items())


def test_costs_of_stages_are_read_from_a_log_of_all_ranks(tmp_path):
    """Two stages of two replicas each: 5 and 7 ms forward a microbatch, twice that backward."""
    path = tmp_path / "train.log"
    forward = [40.0, 40.0, 56.0, 56.0]
    times = {"forward-compute": forward, "forward-recv": [0.5] * 4,
             "backward-compute": [2 * ms for ms in forward], "optimizer": [9.0] * 4}  # fmt: skip
    said = setting(pipeline_model_parallel_size=2, micro_batch_size=1, global_batch_size=16,
                   data_parallel_size=2)  # fmt: skip
    path.write_text(all_ranks(times, settings=said))
    found = read_stage_times(str(path))
    assert (found.ranks, found.chunks, found.microbatches) == (2, 1, 8)
    assert found.forward_ns == pytest.approx((5e6, 7e6))
    assert found.backward_ns == pytest.approx((10e6, 14e6))
    refused = recognise(str(path)).why_not
    assert "debubble simulate --costs" in refused.hint


def test_ranks_that_lie_side_by_side_are_told_by_the_setting(tmp_path):
    path = tmp_path / "train.log"
    times = {"forward-compute": [8.0, 16.0, 8.0, 16.0], "backward-compute": [8.0, 16.0] * 2}
    said = setting(use_tp_pp_dp_mapping="True", tensor_model_parallel_size=1)
    path.write_text(all_ranks(times, settings=said))
    assert read_stage_times(str(path), ranks=2, microbatches=4).forward_ns == (2e6, 4e6)


def test_chunks_of_a_rank_share_what_it_takes(tmp_path):
    path = tmp_path / "train.log"
    times = {"forward-compute": [16.0, 32.0], "backward-compute": [16.0, 32.0]}
    said = setting(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    path.write_text(all_ranks(times, settings=said))
    found = read_stage_times(str(path), microbatches=4)
    assert (found.chunks, found.forward_ns) == (2, (2e6, 4e6, 2e6, 4e6))
    answer = type_command("debubble simulate --costs train.log --microbatches 4", tmp_path)
    assert "interleaved-1f1b" in answer.text


@pytest.mark.parametrize(
    "line",
    [
        "[2026-03-01] [INFO] [Rank {}] time (ms) | fwd_microstep: {} | bwd_microstep: {}",
        "[Rank {0}] rank={0} time (ms) | forward_microstep: {1} | backward_microstep: {2}",
    ],
)
def test_deepspeed_of_all_ranks_is_read_a_microbatch_at_a_time(line, tmp_path):
    path = tmp_path / "train.log"
    path.write_text("\n".join(line.format(rank, 5 + rank, 9 + rank) for rank in (0, 1) * 3))
    found = read_stage_times(str(path), ranks=2, microbatches=4)
    assert (found.forward_ns, found.backward_ns) == ((5e6, 6e6), (9e6, 10e6))


@pytest.mark.parametrize(
    ("change", "flags", "says"),
    [
        (lambda text: text, {"microbatches": 8}, "does not say what --stages is"),
        (lambda text: text, {"ranks": 2}, "does not say what --microbatches is"),
        (lambda text: text, {"ranks": 3, "microbatches": 8}, "2 ranks of 2 print"),
        (lambda text: text.replace("rank  1", "rank  5"), {"ranks": 2, "microbatches": 8},
         "2 ranks of 6 print"),
        (lambda text: setting(pipeline_model_parallel_size=2) + text,
         {"ranks": 4, "microbatches": 8}, "the log says 2, and --stages 4"),
    ],
)  # fmt: skip
def test_a_log_that_does_not_fit_is_refused_with_the_reason(change, flags, says, tmp_path):
    path = tmp_path / "train.log"
    times = {"forward-compute": [8.0, 16.0], "backward-compute": [16.0, 32.0]}
    path.write_text(change(all_ranks(times)))
    with pytest.raises(TraceError, match=says):
        read_stage_times(str(path), **flags)


def test_a_logged_run_can_be_simulated_and_planned(tmp_path):
    log = Path("tests/data/formats/megatron.log").resolve()
    answer = type_command(f"debubble simulate --costs {log} --json", tmp_path)
    found = json.loads(answer.text)
    typed = (
        "--stages 4 --microbatches 8 --forward 20ms,20ms,20ms,25ms --backward 40ms,40ms,40ms,50ms"
    )
    same = json.loads(type_command(f"debubble simulate {typed} --json", tmp_path).text)
    assert found == same
    type_command(f"debubble simulate --costs {log} --table step.csv", tmp_path)
    planned = json.loads(
        type_command("debubble plan step.csv --layers 4,4,4,4 --json", tmp_path).text
    )
    latency = found["numbers"]["batch_latency_s"]
    assert planned["baseline"]["numbers"]["batch_latency_s"] == pytest.approx(latency, rel=1e-3)
    clash = type_command(f"debubble simulate --costs {log} --forward 5ms", tmp_path)
    assert (clash.code, "--costs and --forward exclude each other" in clash.text) == (2, True)


def test_a_log_with_one_of_the_two_is_some_other_log(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("forward-compute: 3.0\n")
    assert "a log of" not in str(recognise(str(path)).why_not)
