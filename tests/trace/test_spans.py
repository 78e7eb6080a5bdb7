"""Chrome traces whose spans are passes, as frameworks' own tools write them."""

from __future__ import annotations

import json

import pytest
from support.traces.kineto_events import document, kernel, write

import debubble
from debubble.errors import RunNotFound
from debubble.trace.captures import recognise
from debubble.trace.optable import Op
from debubble.trace.run import find_run, read_run

RANKS, MICROBATCHES, STEPS = 3, 4, 3


def passes():
    """Yield step, rank, microbatch, kind, start and length of GPipe over equal stages, in us."""
    for step in range(STEPS):
        for rank in range(RANKS):
            for number in range(MICROBATCHES):
                begin = 200 * step
                yield step, rank, number, "F", begin + 10 * (rank + number), 10
                turn = begin + 10 * (RANKS + MICROBATCHES - 1)
                yield step, rank, number, "B", turn + 20 * (RANKS - 1 - rank + number), 20


WORDS = {"F": "forward", "B": "backward"}


def whole(step, rank, number, kind, start, length):
    args = {"microbatch": number, "iteration": step}
    yield {"name": WORDS[kind], "ph": "X", "ts": start, "dur": length, "pid": rank, "args": args}


def begin_and_end(step, rank, number, kind, start, length):
    args = {"mb_id": str(number), "step": step}
    for phase, at, more in (("B", start, {"args": args}), ("E", start + length, {})):
        yield {"name": WORDS[kind], "ph": phase, "ts": at, "pid": f"rank {rank}", "tid": 1, **more}


def by_argument(step, rank, number, kind, start, length):
    args = {"rank": 8 + rank, "pp_rank": rank, "dp_rank": 0, "global_step": step}
    name = f"{kind}{number}"
    yield {
        "name": name,
        "ph": "X",
        "ts": start,
        "dur": length,
        "pid": 77,
        "tid": rank,
        "args": args,
    }


def counted(step, rank, number, kind, start, length):
    del step, number
    name = f"{WORDS[kind]}_step"
    yield {"name": name, "ph": "X", "ts": start, "dur": length, "pid": rank, "args": {}}


def trace(way):
    events = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "stage 0"}}]
    return events + [event for one in passes() for event in way(*one)]


def put(folder, events, name="timeline.json"):
    path = folder / name
    path.write_text(json.dumps(events))
    return str(path)


@pytest.mark.parametrize("way", [whole, begin_and_end, by_argument])
@pytest.mark.parametrize("bare", [True, False])
def test_spans_are_passes(way, bare, tmp_path):
    events = trace(way)
    figures = debubble.analyse(put(tmp_path, events if bare else {"traceEvents": events})).pipeline
    bubble = (RANKS - 1) / (RANKS + MICROBATCHES - 1)
    assert figures.bubble_fraction == pytest.approx(bubble, abs=1e-6)
    assert figures.batch_latency_ns == 30_000 * (RANKS + MICROBATCHES - 1)
    assert (figures.microbatches, figures.schedule) == (MICROBATCHES, "gpipe")
    assert [window.step for window in figures.windows] == [0, 1, 2]
    first = 8 if way is by_argument else 0
    assert [rank.rank for rank in figures.ranks] == [first, first + 1, first + 2]


def test_without_microbatches_they_are_counted_in_their_order(tmp_path):
    table = read_run(find_run([put(tmp_path, trace(counted))])).tables[0]
    assert sorted(set(table.microbatch.tolist())) == list(range(MICROBATCHES * STEPS))


def test_chunks_are_stages_of_their_own(tmp_path):
    def span(name, ts, rank, chunk):
        args = {"chunk": chunk}
        return {"name": name, "ph": "X", "ts": ts, "dur": 10, "pid": rank, "args": args}

    places = [(chunk, rank) for chunk in range(2) for rank in range(2)]
    events = [span("F0", 10 * (2 * chunk + rank), rank, chunk) for chunk, rank in places]
    events.append(span("B0", 90, 0, 0))
    table = read_run(find_run([put(tmp_path, events)])).tables[0]
    assert table.stage.tolist() == [0, 1, 2, 3, 0]
    assert table.rank.tolist() == [0, 1, 0, 1, 0]


def test_a_file_a_rank_is_one_run(tmp_path):
    for rank in range(RANKS):
        mine = [event for one in passes() if one[1] == rank for event in by_argument(*one)]
        put(tmp_path, mine, f"rank{rank}.json")
    assert debubble.analyse(str(tmp_path)).pipeline.schedule == "gpipe"


def test_spans_that_never_end_are_named(tmp_path):
    events = trace(begin_and_end)
    run = read_run(find_run([put(tmp_path, events[:-1])]))
    assert [gap.code for gap in run.gaps] == ["open_ranges"]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda events: events[2].update(ts="soon"), "told by its spans of passes"),
        (lambda events: events.append(dict(events[3])), "is there twice"),
        (lambda events: events[1]["args"].update(rank=-4), "is out of range"),
    ],
)
def test_a_broken_one_says_what_is_wrong(damage, says, tmp_path):
    events = trace(whole)
    damage(events)
    with pytest.raises(RunNotFound, match=says):
        read_run(find_run([put(tmp_path, events)]))


def test_traces_of_the_profiler_stay_what_they_are(tmp_path):
    events = [kernel(), {**kernel(), "name": "forward"}, {**kernel(), "name": "backward"}]
    assert recognise(write(tmp_path / "a.json", document(events))).format == "kineto"


def bytedance(step, rank, number, kind, start, length, *, replica=0):
    """As its to_timeline writes it: a process a replica, five threads a rank."""
    args = {"step": step, "model_chunk": 0, "mb_id": number, "seq_id": number}
    name = f"{WORDS[kind]}-compute"
    thread = 5 * (2 * rank + replica)
    yield {"name": name, "cat": name, "ph": "X", "ts": start, "dur": length, "pid": replica,
           "tid": thread, "args": args}  # fmt: skip


def called(replica):
    for rank in range(RANKS):
        for number, kind in enumerate(("compute", "pp-comm")):
            name = f"PP rank {rank}, TP rank 0, {kind}"
            yield {"name": "thread_name", "ph": "M", "pid": replica,
                   "tid": 5 * (2 * rank + replica) + number, "args": {"name": name}}  # fmt: skip
    args = {"name": f"DP rank [{replica}]"}
    yield {"name": "process_name", "ph": "M", "pid": replica, "args": args}


def test_a_timeline_of_bytedance_has_a_process_a_replica_and_threads_that_say_whose(tmp_path):
    events = [
        event
        for replica in range(2)
        for one in passes()
        for event in bytedance(*one, replica=replica)
    ]
    events += [event for replica in range(2) for event in called(replica)]  # they come last
    analysis = debubble.analyse(put(tmp_path, events))
    assert [pipeline.schedule for pipeline in analysis.pipelines] == ["gpipe", "gpipe"]
    assert [rank.rank for rank in analysis.pipelines[1].ranks] == [3, 4, 5]
    bubble = (RANKS - 1) / (RANKS + MICROBATCHES - 1)
    assert analysis.pipeline.bubble_fraction == pytest.approx(bubble, abs=1e-6)


def megatron_app(step, rank, number, kind, start, length, *, tensor=0):
    """As its aggregate.py writes it; neither microbatch nor chunk, and spans inside spans."""
    args = {
        "iteration": step,
        "dp_rk": 0,
        "pp_rk": rank,
        "tp_rk": tensor,
        "g_rk": 2 * rank + tensor,
    }
    warm = number < RANKS - rank
    name = ("forward-warmup" if warm else "forward") if kind == "F" else "backward-cooldown"
    whole = {"name": name, "ph": "X", "ts": start, "dur": length, "pid": 2 * rank + tensor,
             "tid": 0, "args": args, "cname": "thread_state_running"}  # fmt: skip
    yield whole
    yield whole | {"name": "attention", "dur": length / 2}


def test_megatron_app_is_told_by_its_short_names_and_one_tensor_rank_is_read(tmp_path):
    events = [
        event
        for tensor in range(2)
        for one in passes()
        for event in megatron_app(*one, tensor=tensor)
    ]
    path = put(tmp_path, events)
    figures = debubble.analyse(path).pipeline
    assert (figures.microbatches, figures.schedule) == (MICROBATCHES, "gpipe")
    assert [rank.rank for rank in figures.ranks] == [0, 2, 4]
    assert [gap.code for gap in read_run(find_run([path])).gaps] == ["stages_shared"]


def test_what_megatron_app_records_of_one_rank_is_refused_with_what_puts_ranks_together(tmp_path):
    own = {"dp_rk": 0, "pp_rk": 1, "tp_rk": 0, "g_rk": 1}
    records = [{"name": "iteration", "ph": "B", "pad_before": 0}]
    for name, ph, at in (("forward", "B", 5), ("forward", "E", 9), ("backward", "B", 9)):
        records.append({"name": name, "ph": ph, "rel_ts": at, **own})
    path = put(tmp_path, records, "benchmark-data-0-pipeline-1-tensor-0.json")
    with pytest.raises(RunNotFound, match="MegatronApp records of one rank") as caught:
        find_run([path])
    assert "aggregate.py" in caught.value.hint


def zero_bubble():
    """As its load_nsys_events.py writes it: F, B and W of each device, steps ended by Optimizer."""
    devices = []
    for rank in range(RANKS):
        spans = []
        for step in range(STEPS):
            at = 1_000_000 * step + 10_000 * rank
            spans += [(at + 10_000 * number, "F") for number in range(MICROBATCHES)]
            at = 1_000_000 * step + 10_000 * (RANKS + MICROBATCHES - 1)
            at += 20_000 * (RANKS - 1 - rank)
            for number in range(MICROBATCHES):
                spans += [(at + 20_000 * number, "B"), (at + 20_000 * number + 10_000, "W")]
            spans.append((1_000_000 * step + 300_000, "Optimizer"))
        devices.append(
            [{"type": kind, "start_time": at, "end_time": at + 10_000} for at, kind in spans]
        )
    return devices


def test_spans_of_devices_of_zero_bubble_are_passes_and_its_b_is_the_input_gradient(tmp_path):
    figures = debubble.analyse(put(tmp_path, zero_bubble())).pipeline
    assert {(row.stage, row.kind.name) for row in figures.stages} == {
        (stage, kind) for stage in range(RANKS) for kind in "FIW"
    }
    assert figures.microbatches == MICROBATCHES
    assert figures.batch_latency_ns == 30_000 * (RANKS + MICROBATCHES - 1)
    assert [window.step for window in figures.windows] == [0, 1, 2]


def test_a_broken_list_of_devices_says_what_it_needs(tmp_path):
    devices = zero_bubble()
    del devices[0][3]["end_time"]
    with pytest.raises(RunNotFound, match="cannot be read") as caught:
        read_run(find_run([put(tmp_path, devices)]))
    assert "start_time and end_time" in caught.value.hint


def test_ranks_may_be_threads_of_one_process(tmp_path):
    events = [{**event, "pid": 7, "tid": event["pid"]} for one in passes() for event in whole(*one)]
    assert debubble.analyse(put(tmp_path, events)).pipeline.schedule == "gpipe"


def test_an_exchange_is_a_send_and_a_receive(tmp_path):
    def span(name, ts, dur, rank):
        args = {"microbatch": 0, "iteration": 0}
        return {"name": name, "ph": "X", "ts": ts, "dur": dur, "pid": rank, "args": args}

    events = [span("forward", 10 * rank, 10, rank) for rank in range(2)]
    events += [span("backward", 50 - 20 * rank, 20, rank) for rank in range(2)]
    events += [span("exchange-next", 10, 2, 0), span("forward-send-backward-recv", 30, 2, 0)]
    table = read_run(find_run([put(tmp_path, events)])).tables[0]
    ops = [op for op in table.op.tolist() if op not in {Op.FORWARD, Op.BACKWARD}]
    assert sorted(ops) == [Op.FORWARD_SEND] * 2 + [Op.BACKWARD_RECEIVE] * 2
