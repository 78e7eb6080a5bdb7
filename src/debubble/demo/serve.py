"""A server of forward passes: the first rank keeps some batches in flight, the last one answers."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from debubble.demo.layers import build_stage, make_batch

if TYPE_CHECKING:
    from debubble.demo.truth import Phase, Recorder, TrueStep
    from debubble.demo.workload import Workload

# A token, say: what an answer weighs does not matter, when it comes does.
_ANSWER_SHAPE = (1,)


class Server:
    """One stage that receives a batch, computes it and passes it on, batch after batch.

    Messages are tagged with the number of their batch, so that a trace tells which one each is for.
    """

    def __init__(self, workload: Workload, rank: int, recorder: Recorder) -> None:
        self.workload = workload
        self.rank = rank
        self.recorder = recorder
        self.stage = build_stage(workload, rank)
        self.last = workload.ranks - 1
        self.begun = 0
        self.answered = 0
        self.sent: deque[tuple[Any, torch.Tensor]] = deque()

    def run_step(self, step: int, phase: Phase) -> TrueStep:
        """Run one batch through this rank's stage; later ranks get to it in their own time."""
        start_ns = time.time_ns()
        with torch.no_grad():
            x = self._take(step)
            with self.recorder.record_pass("F", self.rank, 0):
                y = self.stage(x)
            self._pass_on(y)
        self.begun += 1
        return self.recorder.end_step(
            step=step, phase=phase, start_ns=start_ns, end_ns=time.time_ns(), loss=None
        )

    def settle(self) -> None:
        """Wait for what was sent.

        Messages that outlived the profiler are what we suspect of a crash in a later profiler of
        the same process (`free(): invalid size`, seen once; not again since they are waited for).
        """
        for work, _ in self.sent:
            work.wait()

    def finish(self) -> None:
        """Take the answers that are still to come."""
        while self.rank == 0 and self.answered < self.begun:
            self._take_answer()

    def _take(self, step: int) -> torch.Tensor:
        batch, _ = make_batch(self.workload, step)
        if self.rank:
            # Over what every rank could make for itself.
            dist.recv(batch, src=self.rank - 1, tag=self.begun)
            return batch
        while self.begun - self.answered >= (self.workload.in_flight or 1):
            self._take_answer()
        return batch

    def _take_answer(self) -> None:
        dist.recv(torch.empty(_ANSWER_SHAPE), src=self.last, tag=self.answered)
        self.answered += 1

    def _pass_on(self, y: torch.Tensor) -> None:
        """Send without waiting: the next stage may be busy with an earlier batch."""
        answers = self.rank == self.last
        message = torch.zeros(_ANSWER_SHAPE) if answers else y
        work = dist.isend(message, dst=0 if answers else self.rank + 1, tag=self.begun)
        self.sent.append((work, message))
        while self.sent and self.sent[0][0].is_completed():
            self.sent.popleft()
