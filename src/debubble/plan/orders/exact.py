"""A small pipeline of one stage a rank in → the quickest order there is, or word that none is.

Orders are grown pass by pass on all ranks at once. Two of them that have run the same passes differ
only in when ranks are free and results arrive: where one is no later in any of that, the other can
be forgotten. What is left of a few microbatches on a few ranks is some thousand orders.
"""

from __future__ import annotations

from dataclasses import dataclass

from debubble.plan.orders.pipeline import B, F, I, Pipeline, Rows, W

# Beyond so many microbatches on all ranks together there are too many.
MOST_CELLS = 12
# More orders than this that none is ahead of: then it is given up.
_MOST_GROWN = 60_000


@dataclass(slots=True)
class _Grown:
    """An order so far."""

    done: tuple[tuple[int, int, int], ...]
    """Of each rank, how many F, gradients and weight gradients."""
    free: tuple[int, ...]
    forward: tuple[tuple[int, ...], ...]
    """When inputs that each rank has not used yet arrive."""
    backward: tuple[tuple[int, ...], ...]
    apart: tuple[tuple[int, ...], ...]
    """Microbatches of each rank that wait for their W."""
    cut: tuple[int, ...]
    """How many gradients of each rank were made apart."""
    last: tuple[int, int] | None
    """The rank that ran a pass last, and that pass."""
    before: _Grown | None

    def is_ahead_of(self, other: _Grown) -> bool:
        """Tell whether nothing of it is later; both have run the same passes.

        Which microbatches wait for their W does not matter, for they are alike.
        """
        mine = (self.cut, self.free, *self.forward, *self.backward)
        others = (other.cut, other.free, *other.forward, *other.backward)
        return all(
            one <= two
            for a, b in zip(mine, others, strict=True)
            for one, two in zip(a, b, strict=True)
        )


def quickest(pipeline: Pipeline, below: int) -> Rows | None:
    """Return the quickest order whose window is under a limit; None where there is none.

    It is not looked for in pipelines that are too large, or have several stages a rank.
    """
    ranks, count = len(pipeline.placement), pipeline.microbatches
    if ranks * count > MOST_CELLS or len(pipeline.stages) != ranks:
        return None
    nothing: tuple[tuple[int, ...], ...] = ((),) * ranks
    layer = {
        ((0, 0, 0),) * ranks: [
            _Grown(
                done=((0, 0, 0),) * ranks,
                free=(0,) * ranks,
                forward=((0,) * count, *nothing[1:]),
                backward=nothing,
                apart=nothing,
                cut=(0,) * ranks,
                last=None,
                before=None,
            )
        ]
    }
    best: _Grown | None = None
    complete, made = ((count, count, count),) * ranks, 0
    while layer:
        grown: dict[tuple[tuple[int, int, int], ...], list[_Grown]] = {}
        for order in (order for alike in layer.values() for order in alike):
            for longer in _grow(pipeline, order, below):
                if longer.done == complete:
                    if max(longer.free) < below:
                        best, below = longer, max(longer.free)
                    continue
                alike = grown.setdefault(longer.done, [])
                if any(other.is_ahead_of(longer) for other in alike):
                    continue
                alike[:] = [other for other in alike if not longer.is_ahead_of(other)]
                alike.append(longer)
                made += 1
        if made > _MOST_GROWN:
            return None
        layer = grown
    return None if best is None else _rows_of(best, ranks)


def _grow(pipeline: Pipeline, order: _Grown, below: int) -> list[_Grown]:
    """Return the order with one more pass, of every kind and rank that can run one."""
    found = []
    count, block, changes = pipeline.microbatches, pipeline.block, pipeline.changes
    last_rank = len(order.free) - 1
    for rank, (begun, returned, weighed) in enumerate(order.done):
        apart = order.apart[rank]
        cost = pipeline.stages[rank]
        held = begun * (cost.held + cost.kept_forward) - weighed * cost.held
        held += len(apart) * cost.halfway + order.cut[rank] * cost.kept_input
        most = pipeline.limits[rank] * (1 + 1e-9)
        choices = []
        if begun < count and order.forward[rank]:
            choices.append(F)
        if returned < begun and (rank == last_rank or order.backward[rank]):
            choices += [B] if rank in pipeline.whole else [B, I]
        if apart:
            choices.append(W)
        for kind in choices:
            microbatch = {F: begun, W: apart[0] if apart else 0}.get(kind, returned)
            number = kind * block + rank * count + microbatch
            if kind != W and held + changes[number] > most:
                continue
            longer = _with(pipeline, order, rank, number)
            begun_then, returned_then, _ = longer.done[rank]
            left = (count - begun_then) * cost.forward
            left += (count - returned_then) * min(
                cost.backward, cost.input_gradient + cost.weight_gradient
            )
            left += len(longer.apart[rank]) * cost.weight_gradient
            if longer.free[rank] + left < below:
                found.append(longer)
    return found


def _with(pipeline: Pipeline, order: _Grown, rank: int, number: int) -> _Grown:
    """Return the order with one pass more, which runs as soon as it can."""
    kind, microbatch = pipeline.kind(number), number % pipeline.microbatches
    forward, backward, apart = list(order.forward), list(order.backward), list(order.apart)
    cut = list(order.cut)
    begun, returned, weighed = order.done[rank]
    now, last_rank = order.free[rank], len(order.free) - 1
    if kind == F:
        now = max(now, forward[rank][0]) + pipeline.lengths[number]
        forward[rank] = forward[rank][1:]
        begun += 1
        if rank < last_rank:
            forward[rank + 1] = (*forward[rank + 1], now + pipeline.up[rank])
    elif kind == W:
        now += pipeline.lengths[number]
        apart[rank] = apart[rank][1:]
        weighed += 1
    else:
        if rank < last_rank:
            now = max(now, backward[rank][0])
            backward[rank] = backward[rank][1:]
        now += pipeline.lengths[number]
        returned += 1
        if kind == B:
            weighed += 1
        else:
            apart[rank] = (*apart[rank], microbatch)
            cut[rank] += 1
        if rank:
            backward[rank - 1] = (*backward[rank - 1], now + pipeline.down[rank])
    return _Grown(
        done=(*order.done[:rank], (begun, returned, weighed), *order.done[rank + 1 :]),
        free=(*order.free[:rank], now, *order.free[rank + 1 :]),
        forward=tuple(forward),
        backward=tuple(backward),
        apart=tuple(apart),
        cut=tuple(cut),
        last=(rank, number),
        before=order,
    )


def _rows_of(order: _Grown, ranks: int) -> Rows:
    rows: list[list[int]] = [[] for _ in range(ranks)]
    step: _Grown | None = order
    while step is not None and step.last is not None:
        rank, number = step.last
        rows[rank].append(number)
        step = step.before
    return tuple(tuple(reversed(row)) for row in rows)
