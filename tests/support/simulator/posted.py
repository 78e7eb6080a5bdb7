"""A planned program in → what hosts run and post, in torch's words."""

from __future__ import annotations

from debubble.timeline.model import PassKind


def words_of(program, rank):
    """What a rank's host runs and posts, in its order and torch's words: a list of each batch."""
    passes, batches, messages = program.passes, program.batches, program.messages
    posted = [[] for _ in range(len(batches))]
    for row in range(len(messages)):
        producer = messages.producer[row]
        stage, number = passes.stage[producer], passes.microbatch[producer]
        way, to = ("F", 1) if passes.kind[producer] == PassKind.F else ("B", -1)
        posted[messages.sent[row]].append(f"{stage}SEND_{way}{number}")
        posted[messages.received[row]].append(f"{stage + to}RECV_{way}{number}")
    after = {}
    for row in range(len(batches)):
        if batches.place[row] == rank:
            after.setdefault(int(batches.after[row]), []).append(posted[row])
    said = after.get(-1, [])
    for row in range(len(passes)):
        if passes.place[row] == rank:
            kind = PassKind(passes.kind[row]).name
            said.append([f"{passes.stage[row]}{kind}{passes.microbatch[row]}"])
            said += after.get(row, [])
    return said
