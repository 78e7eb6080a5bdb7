"""Passes of torch, Megatron and DeepSpeed, and messages between ranks, told by standing around."""

from __future__ import annotations

import sys
import types

import pytest
from support.process_group import Group, Work
from support.requirements import need_package

need_package("torch")

import torch
from torch.distributed import distributed_c10d
from torch.distributed.pipelining import schedules, stage

from debubble.annexes.meter import hooks as meter_hooks
from debubble.annexes.meter.hooks import Hooks, Place
from debubble.annexes.meter.record import (
    BYTES,
    END,
    MICROBATCH,
    OP,
    PEER,
    STAGE,
    START,
    HostClock,
    Recorder,
)

MIDDLE = Place(rank=1, ranks=(0, 1, 2))


@pytest.fixture
def hooks():
    made = Hooks(Recorder(HostClock()), fail=pytest.fail)
    made.place = MIDDLE
    yield made
    made.remove()


def recorded(hooks, run):
    """Run something inside a step and return the step's rows."""
    hooks.recorder.beat()
    run()
    hooks.recorder.beat()
    *_, step = hooks.recorder.finished()
    assert all(row[END] is not None for row in step.rows)
    return step.rows


def names(rows):
    return [(row[OP], row[STAGE], row[MICROBATCH]) for row in rows]


def test_megatrons_passes_are_told_by_the_output_that_each_backward_begins_with(hooks, monkeypatch):
    outputs = {}

    def forward_step(func, microbatch, vp_stage=None):
        outputs[vp_stage, microbatch] = torch.zeros(1)
        return func([outputs[vp_stage, microbatch]]), 0

    def backward_step(_input, output, _grad):
        assert output is not None

    module = types.SimpleNamespace(forward_step=forward_step, backward_step=backward_step)
    state = types.ModuleType("parallel_state")
    state.get_virtual_pipeline_model_parallel_rank = lambda: None
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    hooks._hook_megatron(module)

    def run():
        for chunk, microbatch in ((0, 0), (0, 1), (1, 0), (1, 1)):
            module.forward_step(lambda out: out, microbatch, vp_stage=chunk)
        for chunk, microbatch in ((1, 0), (0, 0), (1, 1), (0, 1)):
            module.backward_step(None, [outputs[chunk, microbatch]], None)

    assert names(recorded(hooks, run)) == [
        *[("F", 1, 0), ("F", 1, 1), ("F", 4, 0), ("F", 4, 1)],
        *[("B", 4, 0), ("B", 1, 0), ("B", 4, 1), ("B", 1, 1)],
    ]
    assert hooks.stages == {1, 4}
    hooks.remove()
    assert module.forward_step is forward_step


class ForwardPass:
    """An instruction of DeepSpeed's, as `deepspeed.runtime.pipe.schedule` has them."""


class BackwardPass:
    """Another."""


class SendGrad:
    """One that is no pass."""


class PipelineEngine:
    """Carries instructions out as DeepSpeed 0.19's does: by a table that is made with the class."""

    stage_id = 1

    def _exec_pass(self, buffer_id):
        return buffer_id

    _INSTRUCTION_MAP = dict.fromkeys((ForwardPass, BackwardPass, SendGrad), _exec_pass)

    def carry_out(self, instruction, buffer_id):
        return types.MethodType(self._INSTRUCTION_MAP[instruction], self)(buffer_id=buffer_id)


def test_deepspeeds_passes_are_counted_through_the_step(hooks):
    before = PipelineEngine._INSTRUCTION_MAP
    hooks._hook_deepspeed(types.SimpleNamespace(PipelineEngine=PipelineEngine))
    engine = PipelineEngine()

    def run():
        assert [engine.carry_out(ForwardPass, buffer) for buffer in (0, 1)] == [0, 1]
        engine.carry_out(BackwardPass, 0)
        engine.carry_out(SendGrad, 0)
        engine.carry_out(ForwardPass, 0)
        engine.carry_out(BackwardPass, 1)

    expected = [("F", 1, 0), ("F", 1, 1), ("B", 1, 0), ("F", 1, 2), ("B", 1, 1)]
    assert names(recorded(hooks, run)) == expected
    assert names(recorded(hooks, run)) == expected, "the next step counts anew"
    hooks.remove()
    assert PipelineEngine._INSTRUCTION_MAP is before


@pytest.fixture
def group(hooks, monkeypatch):
    monkeypatch.setattr(meter_hooks.dist, "get_process_group_ranks", lambda _group: [0, 1, 2, 7])
    hooks._hook_messages(types.SimpleNamespace(ProcessGroup=Group, Work=Work))
    hooks.stages.add(1)
    return Group()


def test_messages_are_told_with_their_peer_and_end_when_they_are_waited_for(hooks, group):
    tensor = [torch.zeros(4)]

    def run():
        received = group.recv(tensor, 0, 0)
        group.send(tensor, 2, 0)
        received.wait()
        group.recv(tensor, 2, 0).wait()
        group.send(tensor, 0, 0).wait()
        group.send(tensor, 3, 0)  # to a rank of another pipeline

    rows = recorded(hooks, run)
    assert [(row[OP], row[PEER], row[BYTES]) for row in rows] == [
        ("forward-recv", 0, 16),
        ("forward-send", 2, 16),
        ("backward-recv", 2, 16),
        ("backward-send", 0, 16),
    ]


def test_messages_of_a_batch_end_together(hooks, group):
    def run():
        group._start_coalescing("cuda")
        group.recv([torch.zeros(4)], 0, 0)
        group.recv([torch.zeros(8)], 2, 0)
        group._end_coalescing("cuda").wait()

    first, second = recorded(hooks, run)
    assert first[END] == second[END]


def test_all_is_as_it_was_once_the_meter_is_gone():
    functions = [
        (distributed_c10d.ProcessGroup, "send"),
        (distributed_c10d.ProcessGroup, "recv"),
        (distributed_c10d.ProcessGroup, "_start_coalescing"),
        (distributed_c10d.ProcessGroup, "_end_coalescing"),
        (distributed_c10d.Work, "wait"),
        (stage._PipelineStageBase, "forward_one_chunk"),
        (stage._PipelineStageBase, "backward_one_chunk"),
        (stage._PipelineStageBase, "forward_maybe_with_nosync"),
        (schedules._PipelineSchedule, "_maybe_compute_loss"),
        (torch.autograd, "_engine_run_backward"),
    ]
    before = [vars(owner)[name] for owner, name in functions]
    hooked = Hooks(Recorder(HostClock()), fail=pytest.fail)
    hooked.install()
    during = [vars(owner)[name] for owner, name in functions]
    hooked.remove()
    assert [vars(owner)[name] for owner, name in functions] == before
    assert all(now is not was for now, was in zip(during, before, strict=True))


def test_the_work_of_a_pass_tells_when_it_began_and_ended(hooks):
    moments = []

    def engine_run_backward():
        moments.append(hooks.recorder.inside[START])
        assert hooks.recorder.inside[END] is None

    module = types.SimpleNamespace(_engine_run_backward=engine_run_backward)
    hooks._hook_autograd(module)
    hooks.recorder.beat()
    row = hooks.recorder.begin("B", 0, 0, tells=True)
    assert row[START] is None
    module._engine_run_backward()
    ended = row[END]
    hooks.recorder.end(row)
    assert (row[START], row[END]) == (moments[0], ended)
    assert hooks.recorder.inside is None


@pytest.mark.parametrize("on_host", [True, False])
def test_input_gradients_begin_with_torchs_look_at_the_weights_where_that_is_work(
    hooks, monkeypatch, on_host
):
    """Views of weights are operators on a CPU, which traces begin with; a device sees none."""
    monkeypatch.setattr(hooks.recorder, "on_host", on_host)
    began = []
    module = types.SimpleNamespace(_engine_run_backward=lambda: None)
    hooks._hook_autograd(module)
    hooks.recorder.beat()
    row = hooks.recorder.begin("I", 0, 0, tells=True)
    began.append(hooks.recorder.mark())
    module._engine_run_backward()
    hooks.recorder.end(row)
    assert (row[START] < began[0]) == on_host


def test_weight_gradients_that_are_added_up_after_autograd_are_part_of_their_pass(hooks):
    ended = []

    class Stage:
        stage_index = 1

        def backward_weight_one_chunk(self, bwd_chunk_id):
            module._engine_run_backward()
            ended.append(hooks.recorder.inside[END])
            return bwd_chunk_id

    module = types.SimpleNamespace(_engine_run_backward=lambda: None)
    hooks._hook_autograd(module)
    hooks._hook_stages(types.SimpleNamespace(_PipelineStageBase=Stage))
    hooks.recorder.beat()
    assert Stage().backward_weight_one_chunk(3) == 3
    row = hooks.recorder.last
    assert (row[OP], row[STAGE], row[MICROBATCH]) == ("W", 1, 3)
    assert row[END] > ended[0]


@pytest.mark.parametrize(("computes_between", "is_known"), [(False, True), (True, False)])
def test_when_a_message_left_is_known_if_it_is_waited_for_at_once(
    hooks, group, monkeypatch, computes_between, is_known
):
    """On a device: a job that waits for its sends after the last pass tells nothing of them."""

    monkeypatch.setattr(hooks.recorder, "on_host", False)
    hooks.recorder.beat()
    work = group.send([torch.zeros(4)], 2, 0)
    sent = hooks.recorder.last
    if computes_between:
        hooks.recorder.end(hooks.recorder.begin("F", 1, 1))
    work.wait()
    assert (sent[END] is not None) == is_known
    arrives = group.recv([torch.zeros(4)], 0, 0)
    received = hooks.recorder.last
    hooks.recorder.end(hooks.recorder.begin("F", 1, 2))
    arrives.wait()
    assert received[END] is not None, "what arrives is waited for when it is needed"
