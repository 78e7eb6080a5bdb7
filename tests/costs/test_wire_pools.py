"""What messages took, by what they met: a few transfers set by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.timelines.by_hand import MS, a_timeline

from debubble.costs.wire_pools import BUFFERED_BYTES, join_pools, pool_wires
from debubble.timeline.model import Transfers, join_columns

PASSES = [(rank, rank, "F", 0, 0, 0, 1) for rank in range(3)]
LARGE = 100 * 1024**2


def sent(source, destination, send, receive, *, fused=False, size=LARGE, queues=(0, 0)):
    """One message; `send` and `receive` are its two kernels, from and to, in milliseconds."""
    columns = {
        "source": np.int32(source),
        "destination": np.int32(destination),
        "step": np.int32(0),
        "message_bytes": np.int64(size),
        "send_start_ns": np.int64(send[0] * MS),
        "send_end_ns": np.int64(send[1] * MS),
        "receive_start_ns": np.int64(receive[0] * MS),
        "receive_end_ns": np.int64(receive[1] * MS),
        "fused": np.bool_(fused),
        "send_issued_ns": np.int64(send[0] * MS),
        "receive_issued_ns": np.int64(receive[0] * MS),
        "send_queue": np.int32(queues[0]),
        "receive_queue": np.int32(queues[1]),
        "send_waited_ns": np.int64(0),
        "receive_waited_ns": np.int64(0),
    }
    return Transfers(**{name: np.array([value]) for name, value in columns.items()})


def pools_of(*messages):
    timeline = a_timeline(PASSES, stages=((0,), (1,), (2,)))
    transfers = join_columns(messages, by="receive_end_ns") if messages else timeline.transfers
    return pool_wires(replace(timeline, transfers=transfers), 0)


def in_ms(pool):
    return (np.sort(pool) / MS).tolist()


def often(count, *hop, length, begin=0):
    """Messages that a receiver waited for, each at a time of its own."""
    moments = [begin + 100 * n for n in range(1, count + 1)]
    return [sent(*hop, (at, at + length), (at - 1, at + length)) for at in moments]


def test_a_message_that_was_waited_for_takes_from_its_sends_start_to_its_receives_end():
    pools = pools_of(
        *[sent(0, 1, (10 * n, 10 * n + 2), (10 * n - 3, 10 * n + 4)) for n in range(1, 5)]
    )
    assert in_ms(pools.one_way) == [4, 4, 4, 4]
    assert in_ms(pools.sending) == [2, 2, 2, 2]
    assert not pools.buffers
    assert not pools.batched


def test_one_that_was_there_already_tells_what_taking_it_in_takes_and_no_wire():
    pools = pools_of(*often(4, 0, 1, length=6), sent(0, 1, (0, 2), (7, 10)))
    assert in_ms(pools.drain) == [3]
    assert in_ms(pools.one_way) == [6, 6, 6, 6]
    assert pools.buffers


def test_of_one_that_was_on_its_way_only_the_rest_is_seen_and_it_tells_nothing():
    pools = pools_of(*often(4, 0, 1, length=6), sent(0, 1, (0, 5), (3, 7)))
    assert in_ms(pools.one_way) == [6, 6, 6, 6]
    assert len(pools.seen["drain"]) == 0


def test_unless_all_were_on_their_way_then_they_count_from_their_sends():
    pools = pools_of(
        *[sent(0, 1, (10 * n, 10 * n + 5), (10 * n + 3, 10 * n + 7)) for n in range(4)]
    )
    assert in_ms(pools.one_way) == [7, 7, 7, 7]


def test_an_exchange_takes_from_when_both_were_there():
    pools = pools_of(sent(0, 1, (0, 9), (4, 9), fused=True), sent(1, 0, (4, 9), (0, 9), fused=True))
    assert in_ms(pools.both_ways) == [5, 5]
    assert pools.batched
    assert len(pools.seen["sending"]) == 0


def test_one_way_is_quicker_than_an_exchange_and_taking_in_is_half_of_it_where_none_was_seen():
    pools = pools_of(
        *[sent(0, 1, (10 * n, 10 * n + 4), (10 * n, 10 * n + 4), fused=True) for n in range(4)]
    )
    assert pools.one_way == pytest.approx(pools.both_ways / 1.15)
    assert pools.drain == pytest.approx(pools.one_way / 2)
    assert pools.sending.tolist() == pools.one_way.tolist()
    assert pools.assumed == ("one way takes what both ways at once take, over 1.15",)


def test_an_exchange_is_slower_than_one_way_where_none_was_seen():
    pools = pools_of(*often(4, 0, 1, length=6))
    assert pools.both_ways == pytest.approx(pools.one_way * 1.15)
    assert pools.assumed == ("both ways at once take 1.15 times one way",)


def test_three_messages_one_way_are_no_sample_beside_exchanges():
    exchanges = [
        sent(0, 1, (1000 + 10 * n, 1004 + 10 * n), (1000 + 10 * n, 1004 + 10 * n), fused=True)
        for n in range(2)
    ]
    pools = pools_of(*often(3, 0, 1, length=50), *exchanges)
    assert pools.one_way == pytest.approx([4 * MS / 1.15] * 2)
    assert in_ms(pools_of(*often(4, 0, 1, length=50), *exchanges).one_way) == [50] * 4


def test_where_no_message_was_seen_they_take_no_time_and_it_is_said():
    pools = pools_of()
    assert pools.one_way.tolist() == pools.both_ways.tolist() == pools.drain.tolist() == [0.0]
    assert pools.assumed[0] == "transfers take no time: none was seen"
    assert pools.message_bytes == -1


def test_only_the_largest_messages_are_pooled():
    pools = pools_of(*often(4, 0, 1, length=6), sent(0, 1, (0, 1), (0, 1), size=8))
    assert pools.message_bytes == LARGE
    assert in_ms(pools.one_way) == [6] * 4


def test_messages_in_one_kernel_with_a_third_rank_count_from_when_all_were_there():
    """Rank 1 sends to 2 and receives from 0 in one kernel from 0 to 9; rank 0 comes at 6."""
    ahead = sent(1, 2, (0, 9), (0, 8), queues=(5, 7))
    pools = pools_of(ahead, sent(0, 1, (6, 9), (0, 9), queues=(4, 5)))
    assert pools.batched
    # From 6 on both: to rank 2 until the earlier of its ends, 8; from rank 0 until 9.
    assert in_ms(pools.seen["one_way"]) == [2, 3]
    apart = pools_of(ahead, sent(0, 1, (6, 9), (0, 9), queues=(4, 6)))
    assert not apart.batched
    assert in_ms(apart.seen["one_way"]) == [3, 8]


class TestSlowHops:
    def test_a_hop_nearly_all_of_whose_messages_take_twice_as_long_is_kept_apart(self):
        pools = pools_of(*often(4, 0, 1, length=10), *often(4, 1, 2, length=25, begin=5))
        assert pools.slow == {(1, 2): pytest.approx(2.5)}
        assert in_ms(pools.one_way) == [10] * 4

    def test_twice_as_long_is_not_more_than_twice_as_long(self):
        pools = pools_of(*often(4, 0, 1, length=10), *often(4, 1, 2, length=20, begin=5))
        assert pools.slow == {}
        assert len(pools.one_way) == 8

    def test_a_tail_alone_does_not_make_a_hop_slow(self):
        quick, late = often(3, 1, 2, length=10, begin=5), often(5, 1, 2, length=90, begin=2005)
        assert pools_of(*often(8, 0, 1, length=10), *quick, *late).slow == {}

    def test_three_messages_are_no_sample(self):
        assert pools_of(*often(4, 0, 1, length=10), *often(3, 1, 2, length=99, begin=5)).slow == {}

    def test_of_messages_that_were_there_already_what_was_buffered_is_added(self):
        size = round(2 * BUFFERED_BYTES)

        def early(hop, length, begin):
            return [
                sent(*hop, (begin + 100 * n, begin + 100 * n + 1),
                     (begin + 100 * n + 2, begin + 100 * n + 2 + length), size=size)
                for n in range(4)
            ]  # fmt: skip

        pools = pools_of(*early((0, 1), 10, 0), *early((1, 2), 30, 50))
        # Half of each message is underway before it is received; there is nothing else to go by.
        assert pools.slow == {(1, 2): pytest.approx(30 / 0.5 / 10)}


def test_two_runs_put_together_have_the_messages_of_both():
    one = pools_of(*often(4, 0, 1, length=10))
    other = pools_of(*often(4, 0, 1, length=12), sent(0, 1, (0, 2), (7, 10)))
    both = join_pools(one, other)
    assert in_ms(both.one_way) == [10] * 4 + [12] * 4
    assert in_ms(both.drain) == [3]
    assert both.buffers
    assert (one.buffers, other.buffers) == (False, True)
    assert in_ms(one.drain) == [5] * 4


def test_messages_of_another_size_take_in_proportion_where_only_one_was_measured():
    pools = pools_of(*often(4, 0, 1, length=10))
    assert in_ms(pools.of_size(3).one_way) == [30] * 4
    assert in_ms(pools.of_size(0.5).sending) == [5] * 4
    assert pools.of_size(1.0) is pools
