"""Bubble and window of a framework's trace, counted with none of the package's code.

A step is the host's own mark; a kernel belongs to the step that holds its launch. Backward is what
is launched inside autograd's functions; what the host launches from its first layer on until the
last of them is forward. The window goes from the first forward kernel to the last backward kernel
over all ranks, which share a clock. Collectives launched meanwhile count as work, messages do not.
All-to-alls and rings of context parallelism have the kernels of messages, and are collectives: the
one is named so, the other is launched by an operator of its own.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from statistics import median

from support.spans import bubble_of, merge
from support.traces.documents import ON_DEVICE, launches_of, load_all

_MESSAGES = re.compile(r"SendRecv")
_RING = re.compile(r"(autograd::engine::evaluate_function: )?Ring(Backward)?$")
_FIRST = {
    "aten::embedding", "aten::layer_norm", "aten::native_layer_norm", "aten::rms_norm",
    "aten::linear", "aten::mm", "aten::matmul",
}  # fmt: skip


class RankCount:
    """One rank's kernels by step: forward, backward, collectives."""

    def __init__(self, document):
        events = [e for e in document["traceEvents"] if e.get("ph") == "X"]
        self.marks = {
            int(e["name"].partition("#")[2]): (e["ts"], e["ts"] + e["dur"])
            for e in events
            if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep#")
        }
        autograd = {}
        for e in events:
            if e["name"].startswith("autograd::engine::evaluate_function"):
                autograd.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
        self._autograd = {thread: merge(spans) for thread, spans in autograd.items()}
        self._rings = {}
        for e in events:
            if e.get("cat") == "cpu_op" and _RING.match(e["name"]):
                self._rings.setdefault(e["tid"], []).append([e["ts"], e["ts"] + e["dur"]])
        self._optimizer = merge(
            [
                (e["ts"], e["ts"] + e["dur"])
                for e in events
                if e["name"].startswith("Optimizer.step#")
            ]
        )
        launches = launches_of(document)
        self.steps = {step: self._count(events, launches, step) for step in self.marks}

    def _count(self, events, launches, step):
        low, high = self.marks[step]
        first = [e["ts"] for e in events if e["name"] in _FIRST and low <= e["ts"] <= high]
        begin = min(first, default=low)
        found = []
        for e in events:
            if e.get("cat") not in ON_DEVICE:
                continue
            launch = launches.get(e["args"].get("correlation"))
            if launch is not None and low <= launch["ts"] <= high:
                found.append((e, launch["ts"], launch["tid"]))
        backwards = [self._in(self._autograd.get(thread, []), at) for _, at, thread in found]
        last = max((found[n][1] for n, backward in enumerate(backwards) if backward), default=0)
        kinds = {"forward": [], "backward": [], "collective": []}
        for (e, at, thread), backward in zip(found, backwards, strict=True):
            span = e["ts"], e["ts"] + e["dur"]
            if "nccl" in e["name"].lower():
                message = _MESSAGES.search(e["name"]) and not (
                    "all_to_all" in str(e["args"].get("Collective name"))
                    or self._in(merge(self._rings.get(thread, [])), at)
                )
                if not message and begin <= at <= last:
                    kinds["collective"].append(span)
            elif backward:
                kinds["backward"].append(span)
            elif begin <= at <= last and not self._in(self._optimizer, at):
                kinds["forward"].append(span)
        return kinds

    @staticmethod
    def _in(spans, moment):
        row = bisect_right(spans, moment, key=lambda span: span[0]) - 1
        return row >= 0 and moment <= spans[row][1]


def count(folder):
    """Return the bubble, collectives as work, and the window in seconds: medians over the steps."""
    ranks = [RankCount(document) for document in load_all(folder).values()]
    bubbles, windows = [], []
    for step in set.intersection(*(set(rank.steps) for rank in ranks)):
        here = [rank.steps[step] for rank in ranks]
        low = min(begin for kinds in here for begin, _ in kinds["forward"])
        high = max(end for kinds in here for _, end in kinds["backward"])
        worked = [[span for spans in kinds.values() for span in spans] for kinds in here]
        windows.append((high - low) / 1e6)
        bubbles.append(bubble_of(worked, low, high))
    return median(bubbles), median(windows)
