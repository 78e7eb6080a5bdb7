"""Marks of hosts and devices, read late: what a step was, without anybody waiting for it."""

from __future__ import annotations

import time
from contextlib import nullcontext

import pytest
from support.requirements import need_package

need_package("torch")

from debubble.annexes.meter import record
from debubble.annexes.meter.record import END, OP, PEER, QUEUE, START, DeviceClock, Recorder

MS = 1_000_000


class Device:
    """A device with a clock of its own: it passes a mark when its queue comes to it."""

    def __init__(self):
        self.now_ms = 0.0
        self.made = 0
        self.behind_ms = 0.0

    def event(self, *, enable_timing):
        assert enable_timing
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, device):
        self.device = device

    def record(self, queue):
        assert queue == "the current one"
        self.at = self.device.now_ms + self.device.behind_ms

    def query(self):
        return self.at <= self.device.now_ms

    def elapsed_time(self, other):
        if not (self.query() and other.query()):
            raise RuntimeError("device not ready")
        return other.at - self.at

    def synchronize(self):
        raise AssertionError("nobody waits for a device")


@pytest.fixture
def device(monkeypatch):
    device = Device()
    cuda = record.torch.cuda
    monkeypatch.setattr(cuda, "Event", device.event)
    monkeypatch.setattr(cuda, "Stream", lambda *, priority: priority)
    monkeypatch.setattr(cuda, "stream", lambda _stream: nullcontext())
    monkeypatch.setattr(cuda, "current_stream", lambda _device: "the current one")
    monkeypatch.setattr(cuda, "current_device", lambda: 0)
    inside = record.torch._C
    monkeypatch.setattr(inside, "_cuda_getCurrentRawStream", lambda _device: 77, raising=False)
    monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cuda, "synchronize", lambda: pytest.fail("nobody waits for a device"))
    return device


def run_step(recorder, device, passes=((5.0, 7.0),)):
    """Begin a step and let its passes take so many ms of the device, after so many of waiting."""
    recorder.beat()
    finished = recorder.finished()
    for waits_ms, takes_ms in passes:
        device.now_ms += waits_ms
        row = recorder.begin("F", 0, 0)
        device.now_ms += takes_ms
        if row is not None:
            recorder.end(row)
    return finished


def test_a_device_is_asked_later_and_its_times_are_its_own(device):
    recorder = Recorder(DeviceClock())
    device.behind_ms = 100.0
    assert run_step(recorder, device) == []
    assert run_step(recorder, device) == [], "the device has not come so far"
    device.behind_ms = 0.0
    device.now_ms += 200.0
    first, second = run_step(recorder, device)
    assert (first.number, second.number) == (0, 1)
    (row,) = first.rows
    assert row[END] - row[START] == pytest.approx(7 * MS, abs=10)
    assert row[START] - first.start_ns == pytest.approx(5 * MS, abs=10)


def test_a_devices_clock_is_laid_on_the_hosts(device, monkeypatch):
    hosts_ns = [10**15]
    monkeypatch.setattr(record.time, "perf_counter_ns", lambda: hosts_ns[0])
    monkeypatch.setattr(record.time, "time_ns", lambda: hosts_ns[0] + 5)
    recorder = Recorder(DeviceClock())

    def work(ms):
        device.now_ms += ms
        hosts_ns[0] += int(ms * MS)

    found = []
    for _ in range(4):
        recorder.beat()
        found += recorder.finished()
        work(2.0)
        device.behind_ms = 30.0  # the host runs ahead: this mark says nothing of the clocks
        row = recorder.begin("F", 0, 0)
        device.behind_ms = 0.0
        work(40.0)
        recorder.end(row)
    assert found[1].start_ns == found[0].end_ns
    assert found[0].start_ns == pytest.approx(10**15 + 5, abs=100)
    assert found[2].rows[0][START] == pytest.approx(10**15 + 5 + 116 * MS, abs=100)


def test_messages_of_one_queue_begin_after_each_other_and_those_of_one_batch_together(device):
    recorder = Recorder(DeviceClock())
    recorder.beat()
    posted = [recorder.begin("forward-recv", 0, -1) for _ in range(3)]
    for row, queue in zip(posted, ("batch", "batch", "batch"), strict=True):
        row[PEER], row[QUEUE] = 1, queue
    device.now_ms += 4.0
    mark = recorder.mark_arrival(None, lambda _work: None)
    posted[0][END] = posted[1][END] = mark
    device.now_ms += 3.0
    posted[2][END] = recorder.mark_arrival(None, lambda _work: None)
    device.now_ms += 1.0
    recorder.beat()
    (step,) = recorder.finished()
    lengths = [round((row[END] - row[START]) / MS) for row in step.rows]
    assert lengths == [4, 4, 3]


def test_what_was_sent_is_through_before_the_next_message_of_its_queue_however_late_asked(device):
    recorder = Recorder(DeviceClock())
    recorder.beat()
    sent = recorder.begin("forward-send", 0, -1)
    device.now_ms += 6.0
    received = recorder.begin("forward-recv", 0, -1)
    device.now_ms += 2.0
    received[END] = recorder.mark_arrival(None, lambda _work: None)
    device.now_ms += 50.0
    sent[END] = recorder.mark_arrival(None, lambda _work: None)
    sent[QUEUE] = received[QUEUE] = "batch"
    recorder.beat()
    (step,) = recorder.finished()
    assert [round((row[END] - row[START]) / MS) for row in step.rows] == [6, 2]


def test_a_step_that_does_not_fit_is_left_out_whole_and_the_next_is_there(monkeypatch):
    monkeypatch.setattr(record, "MOST_ROWS", 3)
    recorder = Recorder(record.HostClock())
    found = []
    for passes in (2, 4, 2):
        recorder.beat()
        found += recorder.finished()
        for _ in range(passes):
            row = recorder.begin("F", 0, 0)
            if row is not None:
                recorder.end(row)
    recorder.beat()
    found += recorder.finished()
    assert [step.number for step in found] == [0, 2]
    assert recorder.left_out == 1


def test_the_hosts_times_are_those_that_all_processes_share():
    recorder = Recorder(record.HostClock())
    recorder.beat()
    before = time.time_ns()
    row = recorder.begin("B", 2, 3)
    recorder.end(row)
    after = time.time_ns()
    recorder.beat()
    (step,) = recorder.finished()
    assert step.rows[0][OP] == "B"
    assert before - MS < row[START] <= row[END] < after + MS


@pytest.mark.parametrize("held_up_after", range(1, 10))
def test_a_process_held_up_between_two_looks_at_its_clocks_moves_no_step(
    monkeypatch, held_up_after
):
    """Both clocks run alike, a look takes 50 ns; after one of them the process sleeps for 5 ms."""
    now = looks = 0

    def look(base):
        nonlocal now, looks
        seen = base + now
        looks += 1
        now += 5 * MS if looks == held_up_after else 50
        return seen

    recorder = Recorder(record.HostClock())
    recorder.beat()
    recorder.end(recorder.begin("F", 0, 0))
    recorder.beat()
    monkeypatch.setattr(time, "perf_counter_ns", lambda: look(0))
    monkeypatch.setattr(time, "time_ns", lambda: look(10**18))
    (step,) = recorder.finished()
    monkeypatch.undo()
    (row,) = step.rows
    assert abs(step.start_ns - step.began - 10**18) < 100
    assert step.start_ns <= row[START] < row[END] <= step.end_ns
