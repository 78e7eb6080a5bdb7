"""Host programs in → the same for ranks that share each stage and pass blocks around a ring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from support.simulator.host_programs import Block, Kernel, Message

from debubble.timeline.schedules import Action

RING_STREAM = 30


def is_ring(kernel: Kernel) -> bool:
    return bool(kernel.messages) and kernel.messages[0].what[0].startswith("ring")


def put_in_lane(blocks: list[Block], rank: int, lane: int, lanes: int) -> list[Block]:
    """Count ranks over all lanes, those of one stage side by side, and add their ring."""
    posted = {id(item): item for block in blocks for _, item in block.items if item.messages}
    for kernel in posted.values():
        kernel.messages = tuple(
            Message(m.source * lanes + lane, m.destination * lanes + lane, m.what)
            for m in kernel.messages
        )
    here, first = rank * lanes + lane, rank * lanes
    after, before = first + (lane + 1) % lanes, first + (lane - 1) % lanes
    for block in blocks:
        block.items = list(_with_ring(block.items, here, before, after))
    return blocks


def _with_ring(
    items: list[tuple[str, Kernel]], here: int, before: int, after: int
) -> Iterator[tuple[str, Kernel]]:
    """Pass a block on after each kernel of a pass but its last, which waits for all of them.

    So the first is covered by compute, the last one by nothing.
    """
    left = Counter(item.action for _, item in items if item.action)
    pending: dict[Action, list[Kernel]] = {action: [] for action in left}
    for verb, item in items:
        if item.action and left[item.action] == 1:
            yield from (("wait", ring) for ring in pending[item.action])
        yield verb, item
        if item.action:
            left[item.action] -= 1
            if left[item.action]:
                what = (f"ring{item.action.kind}", *item.action[:1], item.action.microbatch,
                        left[item.action])  # fmt: skip
                both = Message(here, after, what), Message(before, here, what)
                # As Transformer Engine does it: odd ranks receive first.
                both = both[::-1] if here % 2 else both
                ring = Kernel(RING_STREAM, item.thread, item.action, both)
                pending[item.action].append(ring)
                yield "run", ring
