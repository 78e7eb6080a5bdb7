"""Chrome traces whose spans are passes, as frameworks' own tools write them."""

from __future__ import annotations

import json

import pytest
from support.traces.kineto_events import document, kernel, write

import debubble
from debubble.errors import RunNotFound
from debubble.trace.captures import recognise
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
        (lambda events: events[1]["args"].update(rank=-4), "negative rank"),
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
