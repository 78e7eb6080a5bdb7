"""What a capture of vLLM holds, counted from its events alone: nothing of debubble is in it."""

import bisect
import collections
import re
from pathlib import Path
from statistics import median

from support.spans import bubble_of, covered
from support.traces.documents import launches_of, load_all, on_device

LABEL = re.compile(r"execute_context_(\d+)\((\d+)\)_generation_(\d+)\((\d+)\)")


def labels_of(document):
    """When each label of a batch begins and ends, and what it says."""
    return sorted(
        (event["ts"], event["ts"] + event["dur"], LABEL.match(event["name"]))
        for event in document["traceEvents"]
        if event.get("cat") == "user_annotation" and LABEL.match(event["name"])
    )


class Count:
    """One capture: all its ranks share a machine, and so a clock."""

    def __init__(self, folder):
        self.ranks = []
        for document in load_all(Path(folder)).values():
            launched = launches_of(document)
            device = [
                (
                    event["ts"],
                    event["ts"] + event["dur"],
                    "nccl" in event["name"],
                    launched.get(event["args"].get("correlation"), {}).get("ts"),
                )
                for event in on_device(document)
            ]
            self.ranks.append((labels_of(document), device))

    def bubble(self):
        """Kernels and copies without NCCL's, over the span that all ranks share."""
        spans = [[(b, e) for b, e, nccl, _ in device if not nccl] for _, device in self.ranks]
        begin = max(min(b for b, _ in rank) for rank in spans)
        end = min(max(e for _, e in rank) for rank in spans)
        return bubble_of(spans, begin, end)

    def tokens(self):
        """Of the first rank's turns, in their order."""
        return [int(label[2]) + int(label[4]) for _, _, label in self.ranks[0][0]]

    def phases(self):
        found = collections.Counter()
        for _, _, label in self.ranks[0][0]:
            prompts, decoded = int(label[2]), int(label[4])
            if prompts or decoded:
                found["mixed" if prompts and decoded else "prefill" if prompts else "decode"] += 1
        return found

    def kernels_of(self, rank):
        """By turn: when the kernels ran that its host launched in it."""
        labels, device = self.ranks[rank]
        begins, found = [begin for begin, _, _ in labels], collections.defaultdict(list)
        for begin, end, nccl, launch in device:
            if not nccl and launch is not None:
                turn = bisect.bisect_right(begins, launch) - 1
                if turn >= 0:
                    found[turn].append((begin, end))
        return found

    def compute_ms(self):
        """Of a decode batch in the middle, on each stage."""
        found = []
        for rank, (labels, _) in enumerate(self.ranks):
            kernels = self.kernels_of(rank)
            found.append(
                median(
                    covered(kernels[turn]) / 1000
                    for turn, (_, _, label) in enumerate(labels)
                    if label[1] == "0" and label[3] != "0" and kernels[turn]
                )
            )
        return found

    def in_flight(self):
        """Batches that the first host began and the last rank has not ended when one more begins.

        Both hosts take the same turns in the same order, and vLLM begins all captures at one turn.
        """
        (first, _), (last, _) = self.ranks[0], self.ranks[-1]
        names = [[label.string for _, _, label in labels] for labels in (first, last)]
        assert all(one == other for one, other in zip(*names, strict=False))
        kernels = self.kernels_of(len(self.ranks) - 1)
        given = [turn for turn, size in enumerate(self.tokens()) if size]
        left = {turn: max(end for _, end in kernels[turn]) for turn in given if kernels[turn]}
        known = given[: sum(turn in left for turn in given)]
        out = []
        for place, turn in enumerate(known):
            if place >= 8:
                moment = first[turn][0]
                out.append(1 + sum(left[other] > moment for other in known[:place]))
        return median(out)
