"""A few steps captured when it matters: by all ranks the same, once, and not too often."""

from __future__ import annotations

from support.requirements import need_package

need_package("torch")

import torch.distributed as dist

from debubble.annexes.meter import trigger
from debubble.annexes.meter.trigger import Agreement, asked_by_file

STEP_S = 0.3


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def agreements(count, every_s=600.0):
    store = dist.HashStore()
    return [Agreement(store, count, every_s) for _ in range(count)]


def test_all_ranks_take_the_step_that_one_of_them_named():
    ranks = agreements(4)
    assert ranks[2].ask(100, STEP_S)
    for rank in ranks:
        rank.listen()
    assert {rank.step for rank in ranks} == {ranks[2].step}
    assert ranks[0].step > 100 + trigger.POLL_S / STEP_S


def test_another_capture_is_not_asked_for_before_its_time():
    clock = Clock()
    first, second = agreements(2)
    assert first.ask(100, STEP_S, clock=clock)
    second.listen(clock=clock)
    for rank in (first, second):
        rank.take()
    clock.now = 599.0
    assert not first.ask(200, STEP_S, clock=clock)
    assert not second.ask(200, STEP_S, clock=clock), "it heard of the first"
    clock.now = 601.0
    assert second.ask(300, STEP_S, clock=clock)
    first.listen(clock=clock)
    assert first.step == second.step > 300


def test_a_file_asks_once(tmp_path):
    assert not asked_by_file(tmp_path)
    (tmp_path / trigger.REQUEST_FILE).touch()
    assert asked_by_file(tmp_path)
    assert not asked_by_file(tmp_path)
