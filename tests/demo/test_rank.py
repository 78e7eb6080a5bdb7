from __future__ import annotations

import gzip
import json
from statistics import median

import pytest
from support.jobs.recorded_pipeline import Workload, read_truth, run_several

pytestmark = pytest.mark.slow

MS = 1_000_000
WORKLOAD = Workload()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("demo")
    run_several({"1f1b": WORKLOAD}, root)
    return root / "1f1b"


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
