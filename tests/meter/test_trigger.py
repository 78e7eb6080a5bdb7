"""A few steps captured when it matters: by all ranks the same, once, and not too often."""

from __future__ import annotations

import time

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


def agreements(count, clock=time.monotonic):
    store = dist.HashStore()
    return [Agreement(store, count, clock) for _ in range(count)]


def test_all_ranks_take_the_step_that_one_of_them_named():
    ranks = agreements(4)
    ranks[2].ask(100, STEP_S)
    for rank in ranks:
        rank.listen()
    assert {rank.step for rank in ranks} == {ranks[2].step}
    assert ranks[0].step > 100 + trigger.POLL_S / STEP_S


def test_another_capture_is_not_asked_for_before_its_time():
    clock = Clock()
    first, second = agreements(2, clock)
    first.ask(100, STEP_S)
    second.listen()
    for rank in (first, second):
        rank.take()
    clock.now = trigger.EVERY_S - 1
    for rank in (first, second):  # the second heard of the first
        rank.ask(200, STEP_S)
        assert rank.step is None
    clock.now = trigger.EVERY_S + 1
    second.ask(300, STEP_S)
    first.listen()
    assert first.step == second.step > 300


def test_a_file_asks_once(tmp_path):
    assert not asked_by_file(tmp_path)
    (tmp_path / trigger.REQUEST_FILE).touch()
    assert asked_by_file(tmp_path)
    assert not asked_by_file(tmp_path)
