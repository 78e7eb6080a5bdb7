"""What messages took, by what they met: a few transfers set by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.timelines.by_hand import MS, a_timeline

from debubble.simulate.costs.wire_pools import Slower, SlowHop, pool_wires
from debubble.timeline.model import Transfers, join_columns

PASSES = [(rank, rank, "F", 0, 0, 0, 1) for rank in range(3)]
LARGE = 100 * 1024**2


def sent(source, destination, send, receive, *, fused=False, size=LARGE, queues=(0, 0), step=0):
    """One message; `send` and `receive` are its two kernels, from and to, in milliseconds."""
    columns = {
        "source": np.int32(source),
        "destination": np.int32(destination),
        "step": np.int32(step),
        "message_bytes": np.int64(size),
        "send_start_ns": np.int64(round(send[0] * MS)),
        "send_end_ns": np.int64(round(send[1] * MS)),
        "receive_start_ns": np.int64(round(receive[0] * MS)),
        "receive_end_ns": np.int64(round(receive[1] * MS)),
        "fused": np.bool_(fused),
        "send_issued_ns": np.int64(round(send[0] * MS)),
        "receive_issued_ns": np.int64(round(receive[0] * MS)),
        "send_queue": np.int32(queues[0]),
        "receive_queue": np.int32(queues[1]),
        "send_waited_ns": np.int64(0),
        "receive_waited_ns": np.int64(0),
    }
    return Transfers(**{name: np.array([value]) for name, value in columns.items()})


def pools_of(*messages, slow=None):
    timeline = a_timeline(PASSES, stages=((0,), (1,), (2,)))
    transfers = join_columns(messages, by="receive_end_ns") if messages else timeline.transfers
    return pool_wires(replace(timeline, transfers=transfers), 0, slow)


def slower(times):
    alike = Slower(wire=times, drain=times, sending=1.0)
    return SlowHop(times=times, alone=alike, exchanged=alike)


def in_ms(pool):
    return (np.sort(pool) / MS).tolist()


def often(count, *hop, length, begin=0, step=0):
    """Messages that a receiver waited for, each at a time of its own."""
    moments = [begin + 100 * n for n in range(1, count + 1)]
    return [sent(*hop, (at, at + length), (at - 1, at + length), step=step) for at in moments]


EARLY = sent(0, 1, (0, 2), (7, 10))
"""Sent, and over, before its receive begins: messages of its run are buffered."""


class TestWhatIsSeen:
    def test_a_message_that_was_waited_for_takes_from_its_sends_start_to_its_receives_end(self):
        pools = pools_of(
            *[sent(0, 1, (10 * n, 10 * n + 2), (10 * n - 3, 10 * n + 4)) for n in range(1, 5)]
        )
        assert pools.one_way == 4 * MS
        assert pools.sending == 2 * MS
        assert not pools.buffers
        assert not pools.batched

    def test_one_that_was_there_already_tells_its_drain_and_its_sending_and_no_wire(self):
        pools = pools_of(*often(4, 0, 1, length=6), EARLY, EARLY)
        assert pools.drain == 3 * MS
        assert pools.one_way == 6 * MS
        # Four sends that lasted 6, and two that lasted 2: the middle of all.
        assert pools.sending == 6 * MS
        assert pools_of(EARLY, *often(1, 0, 1, length=6), EARLY).sending == 2 * MS
        assert pools.buffers

    def test_of_one_that_was_on_its_way_only_the_rest_is_seen_and_it_tells_nothing_typical(self):
        pools = pools_of(*often(4, 0, 1, length=6), EARLY, *[sent(0, 1, (0, 5), (3, 7))] * 9)
        assert pools.one_way == 6 * MS
        assert pools.drain == 3 * MS

    def test_where_none_is_ever_buffered_a_sender_waits_and_counts_from_its_receiver(self):
        late = [sent(0, 1, (100 * n, 100 * n + 54), (100 * n + 50, 100 * n + 54)) for n in range(4)]
        pools = pools_of(*late, *often(4, 1, 2, length=4, begin=5000))
        assert (pools.one_way, pools.sending) == (4 * MS, 4 * MS)
        assert pools.body.tolist() == [1.0] * 8
        assert not pools.tail_ns.any()
        assert not pools.buffers

    def test_an_exchange_takes_from_when_both_were_there(self):
        pools = pools_of(
            sent(0, 1, (0, 9), (4, 9), fused=True), sent(1, 0, (4, 9), (0, 9), fused=True)
        )
        assert pools.both_ways == 5 * MS
        assert pools.batched

    def test_messages_in_one_kernel_with_a_third_rank_count_from_when_all_were_there(self):
        """Rank 1 sends to 2 and receives from 0 in one kernel from 0 to 9; rank 0 comes at 6."""
        ahead = sent(1, 2, (0, 9), (0, 8), queues=(5, 7))
        pools = pools_of(ahead, sent(0, 1, (6, 9), (0, 9), queues=(4, 5)))
        assert pools.batched
        # From 6 on both: to rank 2 until the earlier of its ends, 8; from rank 0 until 9.
        assert pools.one_way == (2 + 3) / 2 * MS
        apart = pools_of(ahead, sent(0, 1, (6, 9), (0, 9), queues=(4, 6)))
        assert not apart.batched
        assert apart.one_way == (3 + 8) / 2 * MS

    def test_only_the_largest_messages_are_pooled(self):
        pools = pools_of(*often(4, 0, 1, length=6), *[sent(0, 1, (0, 1), (0, 1), size=8)] * 9)
        assert pools.message_bytes == LARGE
        assert pools.one_way == 6 * MS
        assert len(pools.body) == 4


class TestWhatIsNotSeen:
    """What one kind of message took the others take as well, and it is said."""

    def exchanges(self, count):
        begins = [1000 + 10 * n for n in range(count)]
        return [sent(0, 1, (at, at + 4), (at, at + 4), fused=True) for at in begins]

    def test_of_a_run_of_exchanges_one_way_takes_as_long_and_so_do_its_ends(self):
        pools = pools_of(*self.exchanges(4))
        assert {pools.one_way, pools.drain, pools.sending} == {4 * MS}
        assert pools.assumed == ("a one-way transfer takes as long as a two-way exchange",)

    def test_of_a_run_without_exchanges_they_take_what_one_way_takes(self):
        pools = pools_of(*often(4, 0, 1, length=6))
        assert pools.both_ways == 6 * MS
        assert pools.assumed == ("a two-way exchange takes as long as a one-way transfer",)

    def test_where_all_were_there_already_their_drain_tells(self):
        pools = pools_of(EARLY, EARLY)
        assert pools.one_way == pools.both_ways == 3 * MS
        assert pools.assumed == (
            "a one-way transfer takes the receive time of a message that has arrived",
            "a two-way exchange takes as long as a one-way transfer",
        )

    def test_where_no_message_was_seen_they_take_no_time_and_it_is_said(self):
        pools = pools_of()
        assert pools.one_way == pools.both_ways == pools.drain == pools.sending == 0.0
        assert pools.assumed == ("transfers take no time: none was measured",)
        assert pools.message_bytes == -1
        body, tail = pools.draw(np.random.default_rng(0), 3, 2)
        assert body.tolist() == [[1.0, 1.0]] * 3
        assert not tail.any()


class TestTails:
    def test_of_a_message_that_takes_twice_its_time_or_more_all_beyond_its_time_is_a_tail(self):
        lengths = (8, 10, 10, 12, 20, 50)
        messages = [often(1, 0, 1, length=ms, begin=100 * n) for n, ms in enumerate(lengths)]
        pools = pools_of(*[message for (message,) in messages])
        assert pools.one_way == 11 * MS
        bodies = [8 / 11, 10 / 11, 10 / 11, 1, 12 / 11, 20 / 11]
        assert np.sort(pools.body).tolist() == pytest.approx(bodies)
        assert in_ms(pools.tail_ns) == pytest.approx([0, 0, 0, 0, 0, 50 - 11])
        assert pools.mean_body == pytest.approx((8 + 10 + 10 + 12 + 20 + 11) / 11 / 6)

    def test_a_stall_that_the_receiver_came_too_late_to_see_from_its_start_counts_too(self):
        calm = [*often(4, 0, 1, length=10), sent(0, 1, (0, 10), (17, 20))]
        stalled = pools_of(*calm, sent(0, 1, (900, 935), (901, 936)))
        assert stalled.one_way == 10 * MS
        assert in_ms(stalled.tail_ns) == [0] * 5 + [36 - 10]
        on_time = pools_of(*calm, sent(0, 1, (900, 910), (901, 910)))
        assert not on_time.tail_ns.any()
        assert on_time.body.tolist() == [1.0] * 6

    def test_one_that_was_sent_early_tells_a_stall_by_its_sending(self):
        early = [sent(0, 1, (100 * n, 100 * n + 2), (100 * n + 50, 100 * n + 53)) for n in range(9)]
        stalled = sent(0, 1, (5000, 5030), (5050, 5053))
        pools = pools_of(*early, stalled)
        assert pools.sending == 2 * MS
        assert in_ms(pools.tail_ns) == [0] * 9 + [30 - 2]


class TestDraws:
    """Step 0 has no tails; in step 1 every other message stalls for 90 ms beyond 10."""

    def stalls(self, count=8, calm=8):
        stalled = often(count // 2, 0, 1, length=100, begin=3000, step=1)
        rest = often(count - count // 2, 0, 1, length=10, begin=5000, step=1)
        pools = pools_of(*often(calm, 0, 1, length=10), *stalled, *rest)
        return (pools.draw(np.random.default_rng(0), 200, 2000)[1] > 0).mean(axis=0)

    def test_messages_of_a_run_are_drawn_from_one_step_so_that_runs_stall_often_or_never(self):
        stalls = self.stalls()
        assert np.mean(stalls == 0) == pytest.approx(0.5, abs=0.04)
        assert stalls[stalls > 0] == pytest.approx(np.full((stalls > 0).sum(), 0.5), abs=0.15)


class TestSlowHops:
    def test_messages_of_a_slow_hop_are_in_no_pool_of_the_others(self):
        messages = *often(4, 0, 1, length=10), *often(4, 1, 2, length=25, begin=5)
        pools = pools_of(*messages, slow={(1, 2): slower(2.5)})
        assert pools.slow == {(1, 2): slower(2.5)}
        assert pools.one_way == 10 * MS
        assert len(pools.body) == 4

    def test_where_all_hops_are_slow_their_messages_tell_what_they_should_take(self):
        pools = pools_of(*often(4, 0, 1, length=25), slow={(0, 1): slower(2.5)})
        assert pools.one_way == 10 * MS
        assert len(pools.body) == 4

    @pytest.mark.parametrize(("back", "usual"), [(29, 10), (12, 11)])
    def test_exchanges_that_a_slow_hop_holds_up_tell_nothing_of_the_way_back(self, back, usual):
        both_ways = [
            sent(*hop, (at, at + length), (at, at + length), fused=True)
            for hop, length in (((1, 2), 30), ((2, 1), back))
            for at in range(0, 800, 100)
        ]
        others = [sent(0, 1, (at, at + 10), (at, at + 10), fused=True) for at in range(0, 800, 100)]
        pools = pools_of(*both_ways, *others, slow={(1, 2): slower(3.0)})
        assert pools.both_ways == usual * MS


class TestSizes:
    def test_of_one_size_messages_grow_in_proportion_and_tails_do_not(self):
        pools = pools_of(*often(5, 0, 1, length=10), EARLY, *often(1, 0, 1, length=90, begin=900))
        larger = pools.of_size(16.0)
        for name in ("one_way", "both_ways", "drain", "sending"):
            assert getattr(larger, name) == pytest.approx(16 * getattr(pools, name))
        assert larger.tail_ns.tolist() == pools.tail_ns.tolist()
        assert larger.body.tolist() == pools.body.tolist()
        assert larger.tail_ns.any()
