"""How many batches of a stream are in flight: what captures show, and what they do not.

The moments are those of our engine on an H200, four stages, in hundredths of a millisecond.
"""

from dataclasses import replace

import numpy as np
import pytest

from debubble.timeline.figures import measure_stream
from debubble.timeline.model import union_of
from debubble.timeline.transfers import find_shift
from debubble.timeline.work import Messages
from tests.support.timelines.by_hand import a_timeline

# Chunks of 256, four in flight: when batches began and ended on the first stage, and on the last.
# The first stage sets the pace; after a while three of them are under way when one enters.
FIRST = [
    (0, 694), (804, 1459), (1566, 2221), (2333, 2989), (3112, 3708), (3832, 4465), (4586, 5188),
    (5309, 5918), (6039, 6660), (6784, 7372), (7495, 8100), (8205, 8782), (8896, 9526),
    (9661, 10291), (10413, 11016), (11135, 11734), (11850, 12471), (12583, 13183), (13287, 13926),
    (14043, 14653),
]  # fmt: skip
LAST = [
    (2191, 2872), (3010, 3526), (3672, 4090), (4450, 4867), (5146, 5572), (5852, 6274),
    (6555, 6956), (7228, 7666), (7874, 8282), (8508, 8925), (9149, 9566), (9803, 10327),
    (10550, 10975), (11265, 11677), (12004, 12419), (12709, 13108), (13407, 13817), (14156, 14582),
    (14877, 15290), (15627, 16375),
]  # fmt: skip


def stream_of(first, last):
    """Measure what two ranks show: spans of each, and the number of their first batch."""
    rows = [(0, 0, "F", first[0] + at, 0, *span) for at, span in enumerate(first[1])]
    rows += [(1, 1, "F", last[0] + at, 0, *span) for at, span in enumerate(last[1])]
    timeline = a_timeline(rows)
    ranks = []
    for rank in timeline.ranks:
        mine = timeline.passes.where(timeline.passes.rank == rank.rank)
        ran = union_of(mine.start_ns, mine.end_ns)
        ranks.append(replace(rank, members=(0, 1), busy=ran, occupied=ran, apparent=ran))
    return measure_stream(replace(timeline, ranks=tuple(ranks), steps=()), 0)


@pytest.mark.parametrize(("kept", "least"), [(slice(0, 20), 4), (slice(9, 19), 3)])
def test_a_first_stage_that_is_never_kept_waiting_shows_the_least_number_alone(kept, least):
    """Most enter with three in flight, but none of them has waited for another to leave."""
    stream = stream_of((kept.start, FIRST[kept]), (kept.start, LAST[kept]))
    assert stream.first_sets_pace
    assert stream.usual_in_flight == least


def test_batches_that_wait_for_another_to_leave_show_how_many_may_be_in_flight():
    """Layers 3,3,3,7, four in flight: each enters 1.2 ms after the fourth before it has left."""
    first = [
        (2327, 2674), (3148, 3486), (3874, 4226), (4615, 4972), (5393, 5745), (6167, 6540),
        (7014, 7360), (8284, 8622), (9534, 9880), (10782, 11185), (11567, 11909), (12386, 12794),
    ]  # fmt: skip
    last = [
        (1531, 2197), (2285, 3021), (3087, 3762), (3829, 4482), (4582, 5279), (5357, 6049),
        (6144, 6898), (6990, 8163), (8263, 9417), (9534, 10642), (10717, 11450), (11528, 12256),
    ]  # fmt: skip
    stream = stream_of((8, first), (4, last))
    assert not stream.first_sets_pace
    assert (stream.usual_in_flight, stream.steady, stream.sure) == (4, True, True)


def messages_of(spans, *, is_send):
    start, end = (np.array(moments, dtype=np.int64) for moments in zip(*spans, strict=True))
    count = len(spans)
    return Messages(
        issued_ns=start,
        peer=np.full(count, 1 if is_send else 0, dtype=np.int32),
        is_send=np.full(count, is_send),
        start_ns=start,
        end_ns=end,
        message_bytes=np.full(count, 32_768, dtype=np.int64),
        fused=np.zeros(count, dtype=bool),
        queue=np.zeros(count, dtype=np.int32),
        tag=np.full(count, -1, dtype=np.int32),
        timed=np.ones(count, dtype=bool),
        waited_ns=start,
        step=np.zeros(count, dtype=np.int32),
    )


@pytest.mark.parametrize("cut_off", [-2, 0, 3])
def test_receives_that_never_wait_are_paired_by_no_rhythm(cut_off):
    """Sends and receives keep one rhythm: a batch on or back, ways are as alike as before."""
    turn = 5_900_000
    sent = [(turn * at, turn * at + 90_000) for at in range(20)]
    taken = [(moment + 26_000_000, moment + 26_100_000) for moment, _ in sent]
    sends = messages_of(sent[max(-cut_off, 0) :], is_send=True)
    receives = messages_of(taken[max(cut_off, 0) :], is_send=False)
    shift = find_shift({0: sends, 1: receives}, 0, 1)
    assert not shift.sure
    assert not shift.waited
    assert shift.least is None
    assert shift.most >= cut_off
