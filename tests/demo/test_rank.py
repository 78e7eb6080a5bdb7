from __future__ import annotations

import gzip
import json
from itertools import pairwise
from statistics import median

import pytest

from debubble.annexes.demo import Workload, run_workload
from debubble.annexes.demo.layers import read_truth

pytestmark = pytest.mark.slow

MS = 1_000_000
WORKLOAD = Workload()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("1f1b")
    run_workload(WORKLOAD, out)
    return out


@pytest.fixture(scope="module")
def traces(folder):
    return [
        json.loads(gzip.decompress((folder / f"rank{rank}.pt.trace.json.gz").read_bytes()))
        for rank in range(4)
    ]


@pytest.fixture(scope="module")
def truths(folder):
    return [read_truth(folder / f"truth{rank}.json") for rank in range(4)]


def named(trace, name):
    return [event for event in trace["traceEvents"] if event["name"] == name]


def test_a_run_leaves_traces_and_truths_and_neither_processes_nor_scratch(folder, ranks_alive):
    expected = [f"rank{rank}.pt.trace.json.gz" for rank in range(4)]
    expected += [f"truth{rank}.json" for rank in range(4)]
    assert sorted(file.name for file in folder.iterdir()) == expected
    assert ranks_alive(folder) == []


def test_each_trace_says_which_rank_it_is(traces):
    for rank, trace in enumerate(traces):
        assert trace["distributedInfo"]["rank"] == rank
        assert trace["distributedInfo"]["world_size"] == 4


def test_each_trace_holds_the_profiled_steps_and_no_other(traces):
    for trace in traces:
        steps = [e for e in trace["traceEvents"] if e["name"].startswith("ProfilerStep#")]
        assert len(steps) == WORKLOAD.steps


def test_each_layer_of_each_microbatch_is_an_operator_in_the_trace(traces):
    times = WORKLOAD.microbatches * WORKLOAD.steps
    for rank, trace in enumerate(traces):
        for name in ("layer", "layer_backward", "weight_backward"):
            events = named(trace, f"debubble_demo::{name}")
            assert len(events) == WORKLOAD.layers[rank] * times


@pytest.mark.parametrize("name", ["layer", "layer_backward", "weight_backward"])
def test_an_operator_lasts_in_the_trace_as_long_as_was_set(traces, name):
    for trace in traces:
        durations = [event["dur"] for event in named(trace, f"debubble_demo::{name}")]
        assert min(durations) == pytest.approx(4_000, rel=0.3)


def test_each_rank_talks_to_its_neighbours_once_a_microbatch_and_direction(traces):
    times = WORKLOAD.microbatches * WORKLOAD.steps
    for rank, trace in enumerate(traces):
        for name in ("c10d::send", "c10d::recv_"):
            peers = [int(event["args"]["Concrete Inputs"][2]) for event in named(trace, name)]
            neighbours = [peer for peer in (rank - 1, rank + 1) if 0 <= peer < 4]
            assert {peer: peers.count(peer) for peer in set(peers)} == dict.fromkeys(
                neighbours, times
            )


def test_the_truth_holds_each_pass_once_and_in_the_order_of_1f1b(truths):
    for rank, truth in enumerate(truths):
        assert truth.rank == rank
        assert truth.stages == (rank,)
        assert truth.workload == WORKLOAD
        assert len(truth.profiled) == WORKLOAD.steps
        ahead = 4 - rank
        for step in truth.profiled:
            order = [(done.kind, done.microbatch) for done in step.passes]
            assert order == one_forward_one_backward(ahead, WORKLOAD.microbatches)


def one_forward_one_backward(ahead, microbatches):
    """Warm up with `ahead` forwards, then alternate, then drain."""
    forwards = [("F", index) for index in range(microbatches)]
    backwards = [("B", index) for index in range(microbatches)]
    order, forwards = forwards[:ahead], forwards[ahead:]
    for backward in backwards:
        order.append(backward)
        if forwards:
            order.append(forwards.pop(0))
    return order


def test_the_truth_and_the_trace_tell_of_the_same_calls_on_the_same_clock(truths, traces):
    for truth, trace in zip(truths, traces, strict=True):
        base = trace["baseTimeNanoseconds"]
        traced = sorted(e["ts"] * 1e3 + base for e in named(trace, "debubble_demo::layer"))
        calls = [call for step in truth.profiled for call in step.calls]
        known = sorted(call.start_ns for call in calls if call.part == "forward")
        assert len(known) == len(traced)
        # A call begins within its event; the clocks agree to far less than a layer.
        shifts = [k - t for k, t in zip(known, traced, strict=True)]
        assert abs(median(shifts)) < MS / 2


def test_calls_do_not_overlap_and_last_as_long_as_was_set(truths):
    for truth in truths:
        calls = [call for step in truth.profiled for call in step.calls]
        assert all(one.end_ns <= other.start_ns for one, other in pairwise(calls))
        assert min(call.end_ns - call.start_ns for call in calls) >= 3.9 * MS
        assert min(call.end_ns - call.start_ns for call in calls) == pytest.approx(4 * MS, rel=0.3)


def test_no_microbatch_is_computed_before_its_neighbour_was_through_with_it(truths):
    for upper, lower in pairwise(truths):
        for before, after in zip(upper.profiled, lower.profiled, strict=True):
            for microbatch in range(WORKLOAD.microbatches):
                assert ends(before, "F", microbatch) < starts(after, "F", microbatch)
                assert ends(after, "B", microbatch) < starts(before, "B", microbatch)


def starts(step, kind, microbatch):
    return min(c.start_ns for c in step.calls if (c.kind, c.microbatch) == (kind, microbatch))


def ends(step, kind, microbatch):
    return max(c.end_ns for c in step.calls if (c.kind, c.microbatch) == (kind, microbatch))


def test_the_pipeline_learns_what_one_process_learns(truths):
    import torch  # noqa: PLC0415

    from debubble.annexes.demo.layers import build_stage, make_batch  # noqa: PLC0415
    from debubble.annexes.demo.rank import LEARNING_RATE  # noqa: PLC0415

    quick = Workload(forward_ms=0, backward_ms=0)
    model = torch.nn.Sequential(*(build_stage(quick, stage) for stage in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(WORKLOAD.all_steps):
        x, target = make_batch(quick, step)
        loss = torch.nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert [step.loss for step in truths[3].steps] == pytest.approx(losses, rel=1e-5)
    assert truths[0].steps[0].loss is None


def test_a_split_backward_costs_half_for_each_half(tmp_path):
    workload = Workload(
        ranks=2, layers=(2, 2, 2, 2), microbatches=4, schedule="zbv", steps=1, warmup=1
    )
    run_workload(workload, tmp_path)
    truth = read_truth(tmp_path / "truth1.json")
    assert truth.stages == (1, 2)
    (step,) = truth.profiled
    for kind, part in (("F", "forward"), ("I", "input"), ("W", "weight")):
        passes = [done for done in step.passes if done.kind == kind]
        calls = [call for call in step.calls if call.kind == kind]
        assert len(passes) == 2 * workload.microbatches
        assert len(calls) == 2 * len(passes)
        assert {call.part for call in calls} == {part}
        # The shortest: the others may have waited for a core.
        assert min(c.end_ns - c.start_ns for c in calls) == pytest.approx(4 * MS, rel=0.3)
    # The V brings the last stage, and so the loss, back to the first rank.
    assert read_truth(tmp_path / "truth0.json").profiled[0].loss is not None
