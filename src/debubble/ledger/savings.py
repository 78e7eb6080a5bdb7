"""A measured step in → what removing each cause would buy, by replaying it without.

Time in a cause is not time one gets back: where one wait ends another may begin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from debubble.links.hop_times import ExpectedTimes
from debubble.simulate.costs.passes import PassCosts
from debubble.simulate.costs.wire_pools import SLOW
from debubble.simulate.engine import Engine
from debubble.simulate.events import NEVER_NS
from debubble.simulate.lengths import hop_of
from debubble.simulate.measured import MeasuredStep
from debubble.simulate.program import Lengths, Times
from debubble.simulate.shared_device import run_shared, trailing_activity
from debubble.timeline.model import I64, Flags

HEAD_OF_LINE, ALL = "head_of_line", "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What a step, or a batch of a stream in turn, would take without a cause or two: medians."""

    causes: tuple[str, ...]
    batch_latency_ns: int
    """The measured batch without what is saved: one baseline for all of them."""
    saved_ns: int

    @property
    def cause(self) -> str:
        """As it is written: `imbalance`, `imbalance+slow_link`."""
        return "+".join(self.causes)

    @property
    def saved_fraction(self) -> float:
        """Of the measured batch."""
        return self.saved_ns / max(self.batch_latency_ns + self.saved_ns, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replays:
    """Windows of one step, replayed unchanged and with changes."""

    measured_ns: int
    unchanged_ns: int
    without_ns: dict[tuple[str, ...], int]
    """By what was removed: a cause, two at once, `head_of_line`, or `all`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedies:
    """The lengths of a step with one thing put right at a time."""

    step: MeasuredStep
    costs: PassCosts
    collectives_ns: I64
    """Inside each pass: of its own."""
    data_ns: I64
    """Inside each pass: gathers and reductions that run beside passes."""
    late_ns: I64
    """Inside each pass: its host had not launched what runs next."""
    kept_ns: I64
    """Inside each pass: nor could it, for it had been kept until its device was done."""
    expected: ExpectedTimes
    slope: float
    """What each rank at work adds to the passes of the others; 0 unless they share a device."""
    even_data: Mapping[int, float]
    """By kind, what microbatches of the step would take of the usual if all held as much."""

    def replay(self, many: Sequence[Lengths], *, queues: bool = True) -> list[int]:
        """Return the window of each, all run in one go; without `queues` messages overtake."""
        columns = [lengths.columns() for lengths in many]
        together = Lengths(
            **{name: np.stack([column[name] for column in columns], axis=1) for name in columns[0]}
        )
        windows: list[int] = self.run(together, queues=queues).window_ns.tolist()
        return windows

    def run(self, lengths: Lengths, *, queues: bool = True) -> Times:
        """Return when everything happens; a second dimension of the lengths holds many runs."""
        engine = Engine(self.step.program, queues=queues)
        if not self.slope:
            return engine.run(lengths)
        as_it_was = Engine(self.step.program).run(self.step.lengths)
        activity = trailing_activity(as_it_was.pass_start, as_it_was.pass_end)
        return run_shared(engine, lengths, measured_activity=activity, slope=self.slope)

    def equal_stages(self) -> Lengths:
        """Let every stage take as long as any other."""
        costs = self.costs
        return self._scaled([costs.equal[key] / max(costs.sound[key], 1) for key in self._keys()])

    def stage_faster(self, stage: int, times: float) -> Lengths:
        """Let the passes of one stage be so many times as fast."""
        return self._scaled([1 / times if key[0] == stage else 1.0 for key in self._keys()])

    def sound_workers(self, place: int | None = None) -> Lengths:
        """Let every device be as fast as those of other replicas; or let one of them."""
        costs = self.costs
        of_rank = _of(self.step.program.passes.place, place).tolist()
        return self._scaled(
            [
                costs.heavy * costs.sound[key] / max(costs.median[key], 1) if here else 1.0
                for key, here in zip(self._keys(), of_rank, strict=True)
            ]
        )

    def spread_data(self) -> Lengths:
        """Let all microbatches of a step hold as much: the work stays, spread evenly."""
        return self._scaled(
            [
                self.even_data.get(key[1], 1.0) / times if times else 1.0
                for key, times in zip(self._keys(), self._data_times(), strict=True)
            ]
        )

    def usual_data(self) -> Lengths:
        """Let no microbatch take longer than most do: what lies in its data is gone."""
        times = [max(data or 1.0, 1.0) for data in self._data_times()]
        return self._scaled([1.0 / data for data in times])

    def no_jitter(self, place: int | None = None) -> Lengths:
        """Let every pass take the median of its stage and kind, and what its data make of it."""
        passes = self.step.program.passes
        typical = [
            self.costs.typical(key, number) / self.costs.heavy * (times or 1.0)
            for key, number, times in zip(
                self._keys(), passes.microbatch.tolist(), self._data_times(), strict=True
            )
        ]
        steady = np.rint(typical).astype(np.int64) + self.collectives_ns + self.data_ns
        if place is not None:
            steady = np.where(passes.place == place, steady, self.step.lengths.passes)
        return replace(self.step.lengths, passes=steady)

    def no_collectives(self) -> Lengths:
        """Let no pass wait in a collective of its own."""
        return replace(self.step.lengths, passes=self.step.lengths.passes - self.collectives_ns)

    def no_data_parallel(self) -> Lengths:
        """Let no pass wait for a gather or reduction, in its midst or before it."""
        lengths = self.step.lengths
        return replace(
            lengths,
            passes=lengths.passes - self.data_ns,
            pass_gaps=lengths.pass_gaps - self.step.data_gaps_ns,
        )

    def free_wire(self) -> Lengths:
        """Let no message take time but what it takes beyond its peers."""
        lengths = self.step.lengths
        wire, drain = self._limits()
        return replace(
            lengths,
            sending=np.maximum(lengths.sending - wire, 0),
            wire=np.maximum(lengths.wire - wire, 0),
            drain=np.maximum(lengths.drain - drain, 0),
        )

    def repaired_hops(self, hops: Mapping[int, float | None]) -> Lengths:
        """Let some hops be as their peers are, whose messages have bad moments, too.

        Or let their messages take a share of what they do, where something else tells it.
        """
        expected, hop = self.expected, hop_of(self.step.program)
        lengths = {name: getattr(self.step.lengths, name) for name in ("sending", "wire", "drain")}
        for number, share in hops.items():
            of_hop = hop == number
            # An exchange ends when both its messages are there: where the way back is as slow, it
            # only waited for this one.
            dragged = self._way_back(of_hop) & (expected.wire.times > SLOW)
            affected = (of_hop | dragged) & ~expected.other_way
            for name, took in lengths.items():
                repaired = getattr(expected, name).repaired
                if share is not None:
                    repaired = np.where(of_hop, np.rint(took * share).astype(np.int64), repaired)
                lengths[name] = np.where(affected, np.minimum(took, repaired), took)
        return replace(self.step.lengths, **lengths)

    def _way_back(self, of_hop: Flags) -> Flags:
        """Return the messages that share an exchange with some."""
        messages = self.step.program.messages
        size = len(self.step.program.batches)
        there = messages.sent[of_hop] * size + messages.received[of_hop]
        back: Flags = np.isin(messages.received * size + messages.sent, there)
        return back

    def expected_wires(self) -> Lengths:
        """Let no message take longer than its peers do."""
        lengths = self.step.lengths
        wire, drain = self._limits()
        return replace(
            lengths,
            sending=np.minimum(lengths.sending, wire),
            wire=np.minimum(lengths.wire, wire),
            drain=np.minimum(lengths.drain, drain),
        )

    def nothing_wrong(self) -> Lengths:
        """Let stages be equal and steady, wires free, hosts in time, passes without collectives."""
        free = np.zeros(len(self.step.program.messages), dtype=np.int64)
        numbers = self.step.program.passes.microbatch.tolist()
        costs = self.costs
        passes = [
            costs.typical(key, number)
            * (costs.equal[key] / max(costs.median[key], 1))
            * self.even_data.get(key[1], 1.0)
            for key, number in zip(self._keys(), numbers, strict=True)
        ]
        lengths = self.no_host()
        return replace(
            lengths,
            passes=np.rint(passes).astype(np.int64),
            pass_gaps=lengths.pass_gaps - self.step.data_gaps_ns,
            pass_lag=np.full(len(lengths.pass_lag), NEVER_NS),
            batch_lag=np.full(len(lengths.batch_lag), NEVER_NS),
            sending=free,
            wire=free,
            drain=free,
        )

    def no_host(self, place: int | None = None) -> Lengths:
        """Let every host issue in time; or one of them."""
        lengths, program = self.step.lengths, self.step.program
        passes, batches = _of(program.passes.place, place), _of(program.batches.place, place)
        if self.step.on_host:
            return replace(
                lengths,
                pass_gaps=np.where(passes, 0, lengths.pass_gaps),
                batch_gaps=np.where(batches, 0, lengths.batch_gaps),
            )
        # A rank's first pass waits for what the rank did before the step, whoever issued it.
        begins = np.where(program.passes.before < 0, np.minimum(lengths.pass_floor, 0), NEVER_NS)
        # What a host issues after a call that kept it is late by that call, not of itself.
        return replace(
            lengths,
            passes=lengths.passes - np.where(passes, self.late_ns, 0),
            pass_floor=np.where(passes, begins, lengths.pass_floor),
            batch_floor=np.where(batches, NEVER_NS, lengths.batch_floor),
        )

    def no_sync(self) -> Lengths:
        """Let no call keep a host until its device is done: hosts run ahead."""
        lengths = self.step.lengths
        never = np.full(len(lengths.sync_tail), NEVER_NS)
        return replace(lengths, passes=lengths.passes - self.kept_ns, sync_tail=never)

    def _keys(self) -> list[tuple[int, int]]:
        passes = self.step.program.passes
        return list(zip(passes.stage.tolist(), passes.kind.tolist(), strict=True))

    def _data_times(self) -> list[float | None]:
        """Return what each pass takes of the usual by its data; None where that is not known."""
        passes, data = self.step.program.passes, self.costs.data
        columns = (passes.kind.tolist(), passes.microbatch.tolist())
        return [
            data.get((self.step.number, kind, number))
            for kind, number in zip(*columns, strict=True)
        ]

    def _scaled(self, scale: Sequence[float]) -> Lengths:
        """Let the own part of each pass take so many times as long."""
        held = self.collectives_ns + self.data_ns
        own = self.step.lengths.passes - held
        scaled = np.rint(own * np.array(scale)).astype(np.int64) + held
        return replace(self.step.lengths, passes=scaled)

    def _limits(self) -> tuple[I64, I64]:
        """Return the expected wire and drain; where both sides meet there is no difference."""
        meets = self.step.program.messages.rendezvous
        wire = self.expected.wire.usual
        return wire, np.where(meets, wire, self.expected.drain.usual)


def _of(places: np.ndarray[tuple[int], np.dtype[np.int32]], place: int | None) -> Flags:
    every: Flags = np.ones(len(places), dtype=bool) if place is None else places == place
    return every


_Cause = TypeVar("_Cause", bound=str)
Remedy = Callable[[Remedies], Lengths]
"""Returns the lengths of a step with something put right."""


def replay_step(
    remedies: Remedies, by_cause: Mapping[_Cause, Remedy], pairs: Sequence[tuple[_Cause, _Cause]]
) -> Replays:
    """Replay a step unchanged, without each cause, and without some pairs of them."""
    step = remedies.step
    alone = {cause: remedy(remedies) for cause, remedy in by_cause.items()}
    changes: dict[tuple[str, ...], Lengths] = {
        (str(cause),): lengths for cause, lengths in alone.items()
    }
    changes[(ALL,)] = remedies.nothing_wrong()
    for first, second in pairs:
        changes[str(first), str(second)] = _both(step.lengths, alone[first], alone[second])
    unchanged, *windows = remedies.replay([step.lengths, *changes.values()])
    without = dict(zip(changes, windows, strict=True))
    (without[(HEAD_OF_LINE,)],) = remedies.replay([step.lengths], queues=False)
    return Replays(
        measured_ns=int(step.times.window_ns), unchanged_ns=unchanged, without_ns=without
    )


def _both(unchanged: Lengths, first: Lengths, second: Lengths) -> Lengths:
    """Let each remedy do to a length what it does alone; both, where both shorten it."""
    others, more = first.columns(), second.columns()
    combined = {}
    for name, length in unchanged.columns().items():
        alone, beside = others[name], more[name]
        share = np.minimum(alone, beside) / np.maximum(length, 1)
        both = np.where(length > 0, np.rint(np.maximum(alone, beside) * share), alone)
        either = np.where(alone == length, beside, np.where(beside == length, alone, both))
        combined[name] = either.astype(np.int64)
    return Lengths(**combined)
