"""Traces of several ranks that somebody merged into one file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from support.simulator.analysis import setup_of
from support.simulator.devices import Play
from support.simulator.written_traces import Writing, write_run

import debubble
from debubble.errors import RunNotFound
from debubble.trace.captures import recognise
from debubble.trace.run import find_run, read_run


@pytest.fixture
def folder(tmp_path):
    write_run(Play(setup_of("1f1b", 3, 4, fused=True, steps=3)), tmp_path / "run", Writing())
    return tmp_path


def merge(folder, tag):
    """Merge as SGLang's merger does: a tag before each process, the rest of the first file."""
    merged = {"traceEvents": []}
    for rank, file in enumerate(sorted((folder / "run").glob("*.json*"))):
        opened = gzip.open if file.suffix == ".gz" else open
        with opened(file, "rt") as stream:
            said = json.load(stream)
        for event in said.pop("traceEvents"):
            merged["traceEvents"].append({**event, "pid": f"{tag(rank)} {event.get('pid', 0)}"})
        merged = {**said, **merged}
    path = folder / "merged.trace.json"
    path.write_text(json.dumps(merged))
    return str(path)


TAGS = {
    "SGLang": lambda rank: f"[TP00-PP{rank:02d}]",
    "by tensor": lambda rank: f"[TP{rank:02d}]",
    "by rank": lambda rank: f"rank {rank}:",
}


@pytest.mark.parametrize("tag", TAGS.values(), ids=TAGS)
def test_a_merged_file_is_as_many_ranks_and_answers_alike(tag, folder):
    merged = debubble.analyse(merge(folder, tag))
    apart = debubble.analyse(str(folder / "run"))
    assert [rank.rank for rank in merged.pipeline.ranks] == [0, 1, 2]
    assert merged.pipeline.bubble_fraction == apart.pipeline.bubble_fraction
    assert merged.pipeline.batch_latency_ns == apart.pipeline.batch_latency_ns


def test_a_merged_file_that_is_cut_says_what_to_give_instead(folder):
    path = folder / "cut.json"
    path.write_text(Path(merge(folder, TAGS["SGLang"])).read_text()[:-200])
    with pytest.raises(RunNotFound, match="cannot be taken apart") as caught:
        read_run(find_run([str(path)]))
    assert "merged from" in caught.value.hint


def test_one_rank_alone_is_no_merged_file(folder):
    first = next((folder / "run").glob("*.json*"))
    assert recognise(str(first)).format == "kineto"
