"""Steps timed where they happen: on the device's own clock, where a process uses one."""

from __future__ import annotations

import pytest
import torch

from debubble.capture.session import StepClock


class Event:
    """An event in the queue of a device that is slower than its host: no GPU is here."""

    now_ms = 0.0

    def __init__(self, *, enable_timing):
        assert enable_timing

    def record(self):
        self.at_ms = Event.now_ms

    def elapsed_time(self, other):
        return other.at_ms - self.at_ms


def test_without_a_device_the_host_times_steps():
    clock = iter([1.0, 1.5, 2.0, 2.25])
    steps = StepClock(lambda: next(clock))
    for _ in range(2):
        steps.begin()
        steps.end()
    assert steps.lengths() == [0.5, 0.25]


def test_with_a_device_its_queue_times_them(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(Event.now_ms))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    steps = StepClock(lambda: pytest.fail("the host's clock tells when work was issued"))
    for length in (20.0, 30.0):
        steps.begin()
        Event.now_ms += length
        steps.end()
    assert steps.lengths() == [0.02, 0.03]
    assert waited == [0.0, 50.0]
