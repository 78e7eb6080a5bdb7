"""The ways in which messages travel: when frameworks post them, and what waits for them.

A host runs cells, a pass or a pair that overlaps, and between them posts messages. The last rank of
1F1B in three of the ways (`S` is a send, `R` a receive, `+` one batch):

    posted       R F0 | F 0 | B 0 | S B0 | R F1 | F 1    each receive just before its pass
    fused        R F0 | F 0 | B 0 | S B0 + R F1 | F 1    the send waits for the receive
    overlapped   R F0 | F 0 | R F1 | B 0 | S B0 | F 1    received while the other way computes

`planned.py` writes this order down. What goes wrong with messages (waits in a circle, one in front
of others that are ready) follows from it alone: docs/explanation/how-predictions-are-made.md, "How
messages travel".
"""

from __future__ import annotations

from enum import StrEnum


class Communication(StrEnum):
    """When messages are posted, and what they wait for."""

    LATENCY = "latency"
    """As papers have it: a delay on every hop, no queue, nobody blocked."""
    FUSED = "fused"
    """As torch's Schedule1F1B: between a forward and a backward pass the send and the next receive
    go in one batch, and are waited for at once; other sends are waited for later."""
    BATCHED = "batched"
    """As Megatron's batched p2p: the same, and a send alone is waited for at once, too."""
    OVERLAPPED = "overlapped"
    """As Megatron's interleaved schedule with overlapped p2p: the next input's receive is posted
    with the send of a result, a queue to each neighbour, and a device starts what it is given in
    that order. A pass waits for the output that was sent before it (recorded)."""
    GROUPED = "grouped"
    """As the same schedule without overlap: one batch after each pass of warm-up and drain, and
    after each pair of passes between them, with all that goes and comes, waited for at once."""
    BLOCKING = "blocking"
    """As DeepSpeed: each message by itself on one queue and waited for at once, a gradient received
    before an output is sent."""
    POSTED = "posted"
    """As torch's GPipe: a receive is posted just before its pass, a send right after; one queue."""
    RUNTIME = "runtime"
    """As torch's runtime schedules: a receive is posted as soon as its sender is scheduled."""
    SLOTS = "slots"
    """As torch's looped schedules before 2.12 (`PipelineScheduleMulti`): ranks go through slots,
    and after each one a rank sends and receives, in one batch that is waited for."""
    ASYNCHRONOUS = "asynchronous"
    """Free overlap: receives are always there, each way between two ranks is a queue."""


# No framework sends so: papers do, and plans of what overlap would buy.
MADE_UP = frozenset({Communication.LATENCY, Communication.ASYNCHRONOUS})

# The ways of frameworks that run a schedule of their own: other orders may wait in a circle there.
OF_ONE_SCHEDULE = {
    Communication.BLOCKING: "1f1b",
    Communication.OVERLAPPED: "interleaved-1f1b",
    Communication.GROUPED: "interleaved-1f1b",
}
# Several messages in one batch.
TOGETHER = frozenset(
    {Communication.FUSED, Communication.BATCHED, Communication.GROUPED, Communication.SLOTS}
)
# Transfers that no compute runs beside, for they are waited for at once.
WAITED = frozenset(
    {
        Communication.FUSED,
        Communication.POSTED,
        Communication.BATCHED,
        Communication.GROUPED,
        Communication.SLOTS,
        Communication.BLOCKING,
    }
)
# Of torch. Its other schedules are run by its runtime; those with a loop were run slot by slot
# before 2.12, and no trace tells its version.
_LOOPED = (Communication.RUNTIME, Communication.SLOTS)
_OF_SCHEDULE = {
    "forward-only": (Communication.POSTED,),
    "gpipe": (Communication.POSTED,),
    "1f1b": (Communication.FUSED,),
    "interleaved-1f1b": _LOOPED,
    "looped-bfs": _LOOPED,
    "interleaved-zb": _LOOPED,
}
# The ways of other frameworks, the usual one first. Megatron overlaps only what is interleaved, and
# that unless told otherwise.
_OF_FRAMEWORK: dict[str, dict[str, tuple[Communication, ...]]] = {
    "deepspeed": {"1f1b": (Communication.BLOCKING,)},
    "megatron": {
        "1f1b": (Communication.BATCHED,),
        "interleaved-1f1b": (Communication.OVERLAPPED, Communication.GROUPED),
    },
}


def usual_communication(schedule: str, framework: str | None = None) -> Communication:
    """Return how a framework communicates when it runs a schedule; torch, where none is known."""
    return possible_ways(schedule, framework)[0]


def runs(framework: str | None, schedule: str) -> bool:
    """Tell whether a framework has a schedule."""
    known = _OF_FRAMEWORK.get(framework or "")
    return known is None or schedule in known


def possible_ways(schedule: str, framework: str | None) -> tuple[Communication, ...]:
    """Return the ways in which a run may have communicated, the usual one first.

    What a framework cannot run is taken as torch would run it.
    """
    torchs = _OF_SCHEDULE.get(schedule, (Communication.RUNTIME,))
    return _OF_FRAMEWORK.get(framework or "", {}).get(schedule, torchs)


def beside_compute(schedule: str, framework: str | None) -> Communication:
    """Return how a framework sends messages that are not waited for; else freely."""
    ways = _OF_FRAMEWORK.get(framework or "", {}).get(schedule, ())
    return next((way for way in ways if way not in WAITED), Communication.ASYNCHRONOUS)
