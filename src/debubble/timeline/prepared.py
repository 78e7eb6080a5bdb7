"""One rank on the way to the timeline: its work and messages, and the step of each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from debubble.timeline.model import I32, UNKNOWN
from debubble.timeline.steps import Steps
from debubble.timeline.work import Messages, Work, find_messages, find_waits, tell_waits
from debubble.trace.columns import RankTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A rank whose passes are still to be told."""

    trace: RankTrace
    rank: int
    work: Work
    messages: Messages
    work_step: I32
    message_step: I32
    steps: Steps

    def in_steps(self, steps: Steps) -> Prepared:
        """Return the same rank with other steps."""
        return replace(
            self,
            steps=steps,
            work_step=steps.at(self.work.issued_ns),
            message_step=steps.at(self.messages.issued_ns),
        )


def prepare(trace: RankTrace, work: Work, steps: Steps) -> Prepared:
    """List what a rank did, and in which step."""
    messages = tell_waits(find_messages(trace), work, find_waits(trace))
    return Prepared(
        trace=trace,
        rank=trace.rank if trace.rank is not None else UNKNOWN,
        work=work,
        messages=messages,
        work_step=steps.at(work.issued_ns),
        message_step=steps.at(messages.issued_ns),
        steps=steps,
    )
