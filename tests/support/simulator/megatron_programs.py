"""Megatron's interleaved schedule: each forward and backward pass, then one batch of messages.

As `forward_backward_pipelining_with_interleaving` does it: in the steady state a forward and a
backward pass follow each other with nothing between them, and one batch carries what both send and
what the next two receive. The first rank takes a microbatch from the last one as soon as that has
sent it, long before it is due: the last rank is as many passes behind as there are ranks but one.
"""

from __future__ import annotations

from collections.abc import Iterator

from support.simulator.host_programs import Block, Kernel, Message, Programs

from debubble.timeline.schedules import Action


class MegatronPrograms(Programs):
    """Writes the host program of each rank as Megatron runs it."""

    def _asynchronous(self, rank: int, groups: list[tuple[Action, ...]]) -> Iterator[Block]:
        actions = [action for (action,) in groups]
        kernels = self._post(self._receive(rank, "F", 0) if rank else [])
        yield Block("", [("run", kernel) for kernel in kernels])
        done = {"F": 0, "B": 0}
        for slot in _slots(actions):
            yield Block("", [("wait", kernel) for kernel in kernels] + self._both(slot))
            batch = [message for action in slot for message in self._sends(rank, action)]
            for action in slot:
                done[action.kind] += 1
                batch += self._receive(rank, action.kind, done[action.kind])
            if slot == [actions[_warm_up(actions) - 1]]:
                batch += self._receive(rank, "B", 0)
            kernels = self._post(batch)
            yield Block("", [("run", kernel) for kernel in kernels])

    def _both(self, slot: list[Action]) -> list[tuple[str, Kernel]]:
        return [item for action in slot for item in self._run((action,))]

    def _receive(self, rank: int, kind: str, number: int) -> list[Message]:
        """Return what is received before the pass of a number; at the ends, what is sent then."""
        end = 0 if kind == "F" else self.setup.ranks - 1
        if rank != end:
            mine = [action for action in self.order[rank] if action.kind == kind]
            return self._needs(rank, mine[number]) if number < len(mine) else []
        sender = self.setup.ranks - 1 - end
        theirs = [action for action in self.order[sender] if action.kind == kind]
        sent = number - self.setup.ranks
        return self._sends(sender, theirs[sent]) if 0 <= sent < len(theirs) else []


def _warm_up(actions: list[Action]) -> int:
    """Return how many forward passes run before the first that a backward pass follows."""
    return next(n for n, action in enumerate(actions) if action.kind == "B") - 1


def _slots(actions: list[Action]) -> Iterator[list[Action]]:
    """Put a forward and a backward pass of the steady state together."""
    rest = actions[_warm_up(actions) :]
    yield from ([action] for action in actions[: _warm_up(actions)])
    while rest:
        size = 2 if rest[0].kind == "F" else 1
        yield rest[:size]
        rest = rest[size:]
