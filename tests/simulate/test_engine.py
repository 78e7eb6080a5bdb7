"""The engine takes short cuts: it must land where the plain definition lands, event by event."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import debubble.simulate.events
from debubble.simulate.communication import OF_ONE_SCHEDULE, Communication
from debubble.simulate.engine import Engine
from debubble.simulate.events import NEVER_NS, EventGraph, OrderCycle
from debubble.simulate.planned import plan_program
from debubble.simulate.program import Lengths, SyncTable
from debubble.timeline.schedules import order_of

ALL = [way for way in Communication if way not in OF_ONE_SCHEDULE]
FIELDS = ("pass_start", "pass_end", "batch_start", "batch_end")


def plainly(program, lengths):  # noqa: C901, PLR0912 (one rule after the other)
    """Push every start and end back until nothing moves any more: the definition, word by word."""
    passes, batches, messages = program.passes, program.batches, program.messages
    start, end = lengths.pass_floor.copy(), np.full(len(passes), NEVER_NS)
    posted, done = lengths.batch_floor.copy(), np.full(len(batches), NEVER_NS)
    calls, over = program.syncs, lengths.sync_floor.copy()
    for _ in range(2 * (len(passes) + len(batches))):
        before = [moments.copy() for moments in (start, end, posted, done)]
        for row in range(len(passes)):
            end[row] = max(end[row], start[row] + lengths.passes[row])
            if passes.before[row] >= 0:
                start[row] = max(start[row], end[passes.before[row]] + lengths.pass_gaps[row])
        for taker, maker in program.needs:
            start[taker] = max(start[taker], end[maker] + lengths.pass_gaps[taker])
        for waiting, batch in program.waits:
            start[waiting] = max(start[waiting], done[batch] + lengths.pass_gaps[waiting])
        for row in np.flatnonzero(batches.launched_after >= 0):
            begun = posted[batches.launched_after[row]]
            posted[row] = max(posted[row], begun + lengths.batch_gaps[row])
        for row in range(len(batches)):
            for other, ends in ((batches.after[row], end), (batches.before[row], done)):
                if other >= 0:
                    posted[row] = max(posted[row], ends[other] + lengths.batch_gaps[row])
        for row in range(len(messages)):
            sent, received, taker = (
                messages.sent[row],
                messages.received[row],
                messages.consumer[row],
            )
            done[sent] = max(done[sent], posted[sent] + lengths.sending[row])
            if messages.rendezvous[row]:
                done[sent] = max(done[sent], posted[received] + lengths.sending[row])
            arrival = max(posted[received] + lengths.drain[row], posted[sent] + lengths.wire[row])
            done[received] = max(done[received], arrival)
            start[taker] = max(start[taker], done[received] + lengths.pass_gaps[taker])
        for row in range(len(calls)):
            if calls.before[row] >= 0:
                over[row] = max(over[row], over[calls.before[row]] + lengths.sync_host[row])
            if calls.after[row] >= 0:
                since = start if calls.inside[row] else end
                over[row] = max(over[row], since[calls.after[row]] + lengths.sync_tail[row])
        for row, batch in calls.batches:
            over[row] = max(over[row], done[batch] + lengths.sync_tail[row])
        for moments, call, lag in (
            (start, calls.pass_call, lengths.pass_lag),
            (posted, calls.batch_call, lengths.batch_lag),
        ):
            for row in np.flatnonzero(call >= 0):
                moments[row] = max(moments[row], over[call[row]] + lag[row])
        if all((a == b).all() for a, b in zip(before, (start, end, posted, done), strict=True)):
            return start, end, posted, done
    raise AssertionError("never comes to rest")


def drawn(program, seed, *, held, runs=()):
    """Lengths at random; with hosts that hold things up, or with none."""
    draw = np.random.default_rng(seed)

    def some(rows, most):
        return draw.integers(0, most, (rows, *runs))

    passes, batches, messages = len(program.passes), len(program.batches), len(program.messages)
    first = np.where(program.passes.before < 0, 0, NEVER_NS)
    return Lengths(
        passes=some(passes, 50),
        pass_gaps=some(passes, 3),
        batch_gaps=some(batches, 3),
        sending=some(messages, 9),
        wire=some(messages, 9),
        drain=some(messages, 9),
        pass_floor=some(passes, 300) if held else first,
        batch_floor=some(batches, 300) if held else np.full(batches, NEVER_NS),
    )


CASES = [
    *((name, way) for name in ("1f1b", "zbv", "dualpipe-v") for way in ALL),
    *((name, way) for way, name in OF_ONE_SCHEDULE.items()),
]


@pytest.mark.parametrize("held", [False, True], ids=["free", "held up by hosts"])
@pytest.mark.parametrize(("name", "communication"), CASES)
def test_every_moment_is_that_of_the_plain_definition(name, communication, held):
    program = plan_program(order_of(name, 3, 6), communication)
    lengths = drawn(program, 0, held=held)
    times = Engine(program).run(lengths)
    found = (times.pass_start, times.pass_end, times.batch_start, times.batch_end)
    for moments, expected in zip(found, plainly(program, lengths), strict=True):
        came = expected > NEVER_NS // 2
        assert moments[came].tolist() == expected[came].tolist()
        assert (moments[~came] < NEVER_NS // 2).all()


def with_calls(program, draw):
    """Let every host be kept after every other pass, in its midst or until it and messages end."""
    passes, batches = program.passes, program.batches
    pass_call, batch_call = np.full(len(passes), -1), np.full(len(batches), -1)
    rows = []
    for place in np.unique(passes.place).tolist():
        mine = np.flatnonzero(passes.place == place)
        previous = -1
        for row, following in zip(mine[:-1:2], mine[1::2], strict=False):
            waits = np.flatnonzero((batches.place == place) & (batches.after == row - 1))
            inside = bool(draw.integers(2))
            rows.append((place, previous, row, inside, () if inside else tuple(waits)))
            previous = len(rows) - 1
            pass_call[following] = previous
            batch_call[(batches.place == place) & (batches.after == following)] = previous
    columns = list(zip(*rows, strict=True))
    return SyncTable(
        place=np.array(columns[0], dtype=np.int32),
        before=np.array(columns[1]),
        after=np.array(columns[2]),
        inside=np.array(columns[3]),
        batches=np.array(
            [(call, batch) for call, waits in enumerate(columns[4]) for batch in waits],
            dtype=np.int64,
        ).reshape(-1, 2),
        pass_call=pass_call,
        batch_call=batch_call,
    )


@pytest.mark.parametrize("seed", range(4))
def test_hosts_that_their_devices_keep_follow_them_as_the_plain_definition_says(seed):
    draw = np.random.default_rng(seed)
    program = plan_program(order_of("1f1b", 3, 6), Communication.BATCHED)
    program = replace(program, syncs=with_calls(program, draw))
    calls = program.syncs
    lengths = replace(
        drawn(program, seed, held=False),
        pass_lag=draw.integers(0, 9, len(program.passes)),
        batch_lag=draw.integers(0, 9, len(program.batches)),
        sync_host=draw.integers(0, 30, len(calls)),
        sync_tail=draw.integers(0, 5, len(calls)),
        sync_floor=np.where(calls.before < 0, draw.integers(0, 50, len(calls)), NEVER_NS),
    )
    times = Engine(program).run(lengths)
    found = (times.pass_start, times.pass_end, times.batch_start, times.batch_end)
    for moments, expected in zip(found, plainly(program, lengths), strict=True):
        assert moments.tolist() == expected.tolist()
    # Longer passes move everything that a host issues after them.
    later = Engine(program).run(replace(lengths, passes=lengths.passes + 100))
    assert later.window_ns > times.window_ns + 100


@pytest.mark.parametrize("held", [False, True], ids=["free", "held up by hosts"])
@pytest.mark.parametrize("communication", ALL)
@pytest.mark.parametrize("runs", [1, 300])
def test_windows_of_many_runs_are_those_of_each(communication, held, runs):
    program = plan_program(order_of("1f1b", 3, 4), communication)
    engine = Engine(program)
    lengths = drawn(program, 1, held=held, runs=(runs,))
    windows = engine.windows(lengths)
    assert windows.shape == (runs,)
    assert windows.tolist() == engine.run(lengths).window_ns.tolist()
    for run in (0, runs - 1):
        own = {n: c[:, run] if c.ndim > 1 else c for n, c in lengths.columns().items()}
        assert windows[run] == engine.run(Lengths(**own)).window_ns


@pytest.mark.parametrize("communication", ALL)
def test_one_run_of_few_events_a_level_needs_no_levels(communication, monkeypatch):
    program = plan_program(order_of("1f1b", 4, 6), communication)
    lengths = drawn(program, 4, held=False)
    expected = Engine(program).run(lengths)
    monkeypatch.setattr(debubble.simulate.events, "_LOOK_EVERY", 1)
    monkeypatch.setattr(debubble.simulate.events, "_WIDE", 20)
    engine = Engine(program)
    for field in FIELDS:
        assert getattr(engine.run(lengths), field).tolist() == getattr(expected, field).tolist()
    with monkeypatch.context() as patched:
        patched.setattr(EventGraph, "run_delays", None)
        assert engine.windows(lengths).tolist() == [int(expected.window_ns)]
    twice = replace(lengths, passes=np.stack((lengths.passes, lengths.passes), axis=1))
    assert engine.windows(twice).tolist() == [int(expected.window_ns)] * 2


def test_an_order_that_waits_in_a_circle_is_refused_when_run():
    program = plan_program(order_of("1f1b", 2, 4), Communication.POSTED, rendezvous=True)
    with pytest.raises(OrderCycle, match="circle"):
        Engine(program).run(drawn(program, 3, held=False))
