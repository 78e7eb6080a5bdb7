"""What passes and hops are said to take in → the `Lengths` of a planned program out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from debubble.simulate.events import NEVER_NS
from debubble.simulate.program import Lengths, Program, in_exchange
from debubble.timeline.model import I64, PassKind

PerHop = I64 | int
"""Of the hop from each stage to the next, or one number for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenCosts:
    """Nanoseconds by stage or hop, the first dimension; a second one holds many candidates."""

    passes: Mapping[PassKind, I64]
    """Of each stage; a kind that the program does not run may be left out."""
    first: Mapping[PassKind, I64] = field(default_factory=dict)
    """Of a step's first microbatch, where that differs: it has no gradients to add its own to."""
    one_way: PerHop = 0
    both_ways: PerHop | None = None
    """Of an exchange; None: as long as one way."""
    sending: PerHop | None = None
    """What a send of a buffered message takes its queue; None: as long as its wire."""
    drain: PerHop = 0
    """What it takes to receive a buffered message that is there already."""
    pass_gap: I64 | int = 0
    """From when a pass could start to its start; one number, or one a rank."""
    batch_gap: I64 | int = 0
    pair_share: float = 1.0
    """What a pair that overlaps takes, as a share of its two passes one after the other."""


def give_lengths(program: Program, costs: GivenCosts) -> Lengths:
    """Give each pass and message of a program what its stage or hop takes."""
    passes, batches, messages = program.passes, program.batches, program.messages
    exchanged = in_exchange(messages.sent, messages.received)
    hop = _hops(program)
    one_way = _of_hops(costs.one_way, hop)
    both = one_way if costs.both_ways is None else _of_hops(costs.both_ways, hop)
    wire = _where(exchanged, both, one_way)
    sending = wire if costs.sending is None else _of_hops(costs.sending, hop)
    return Lengths(
        passes=_of_passes(program, costs),
        pass_gaps=_of_ranks(costs.pass_gap, passes.place),
        batch_gaps=_of_ranks(costs.batch_gap, batches.place),
        sending=_where(messages.rendezvous, wire, sending),
        wire=wire,
        drain=_where(messages.rendezvous, wire, _of_hops(costs.drain, hop)),
        pass_floor=np.where(passes.before < 0, 0, NEVER_NS),
        batch_floor=np.full(len(batches), NEVER_NS),
    )


def _of_passes(program: Program, costs: GivenCosts) -> I64:
    passes = program.passes
    unknown = sorted(set(passes.kind.tolist()) - set(costs.passes))
    if unknown:
        raise ValueError(f"no length for {', '.join(PassKind(kind).name for kind in unknown)}")
    tables = [costs.passes, {**costs.passes, **costs.first}]
    given = [(first, kind, table[kind]) for first, table in enumerate(tables) for kind in table]
    stages = max(len(of_stage) for _, _, of_stage in given)
    wide = max(of_stage.shape[1:] for _, _, of_stage in given)
    table = np.zeros((len(tables), len(PassKind), stages, *wide), dtype=np.int64)
    for first, kind, of_stage in given:
        rows = of_stage[:, None] if of_stage.ndim <= len(wide) else of_stage
        table[first, kind, : len(rows)] = rows
    # One look-up of rows: with many candidates it is what takes the time.
    row = (passes.microbatch == 0).astype(np.int64) * len(PassKind) + passes.kind
    lengths: I64 = table.reshape(-1, *wide)[row * stages + passes.stage]
    if len(program.pairs) and costs.pair_share != 1:
        forward, backward = lengths[program.pairs], lengths[program.pairs + 1]
        lengths[program.pairs] = np.rint(forward * costs.pair_share)
        both = np.rint((forward + backward) * costs.pair_share)
        lengths[program.pairs + 1] = both - lengths[program.pairs]
    return lengths


def _hops(program: Program) -> I64:
    """Return the hop of each message: from which stage to the next, one way or back."""
    maker = program.messages.producer
    stage = program.passes.stage[maker].astype(np.int64)
    return np.where(program.passes.kind[maker] == PassKind.F, stage, stage - 1)


def _of_hops(given: PerHop, hop: I64) -> I64:
    return np.full(len(hop), given) if isinstance(given, int) else given[hop]


def _of_ranks(given: I64 | int, place: np.ndarray[tuple[int], np.dtype[np.int32]]) -> I64:
    return np.full(len(place), given) if isinstance(given, int) else given[place]


def _where(rows: np.ndarray[tuple[int], np.dtype[np.bool_]], some: I64, others: I64) -> I64:
    """Choose row by row, whichever of the two has candidates."""
    wide = max(some.ndim, others.ndim)
    deep = [one[:, None] if one.ndim < wide else one for one in (some, others)]
    return np.where(rows[:, None] if wide > 1 else rows, *deep)
