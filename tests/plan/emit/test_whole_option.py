"""Whatever is written is the whole of an option, and the option that was ranked."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from support.traces.read_once import analyse_recording
from support.traces.recordings import DATA, H200

from debubble import api
from debubble.errors import UsageError
from debubble.plan.change import Change, Setting
from debubble.plan.emit import EMITTERS, emit
from debubble.plan.emit.order_file import order_beside

pytestmark = pytest.mark.slow

LAYERS = (4, 8, 8, 4)
TRAINED = Setting(ranks=4, layers=24, microbatches=8, schedule="1f1b", microbatch_size=4)
SERVED = replace(TRAINED, schedule="forward-only")
PARTS = [
    {"split": LAYERS},
    {"microbatches": 16},
    {"microbatches": 16, "hold": "batch"},
    {"schedule": "gpipe", "chunks": 1},
    {"schedule": "zb-h1", "chunks": 1},
    {"schedule": "interleaved-1f1b", "chunks": 3, "split": (1, 2, 3) * 4},
    {"overlap": True},
    {"overlap": False},
    {"recompute": True},
]
# An order knows passes by their numbers: how large a microbatch is, is no part of it.
NO_SIZES = {"csv"}


def changes():
    """Every part, and every two that are not about the same thing, as names and values."""
    yield from PARTS
    for one, other in combinations(PARTS, 2):
        if not set(one) & set(other):
            yield {**one, **other}


def text_of(framework, change, run):
    """What is written, with the order where a file of it is named."""
    try:
        text = emit(framework, change, run)
    except UsageError:
        return None
    return text + (order_beside(text, change, run) or "")


@pytest.mark.parametrize("run", [TRAINED, SERVED], ids=["trained", "served"])
@pytest.mark.parametrize("framework", EMITTERS)
def test_each_part_of_a_change_leaves_its_mark_or_the_whole_is_refused(framework, run):
    for parts in changes():
        whole = text_of(framework, Change(**parts), run)
        if whole is None:
            continue
        for part in parts:
            if (part == "hold" and framework in NO_SIZES) or (part, parts[part]) == ("chunks", 1):
                continue
            rest = Change(**{name: value for name, value in parts.items() if name != part})
            without = None if rest == Change(hold=rest.hold) else text_of(framework, rest, run)
            assert whole != without, (parts, part)


def test_stages_that_layers_do_not_fill_evenly_are_written_as_they_were_predicted():
    run = replace(TRAINED, layers=13)
    text = emit("megatron", Change(schedule="interleaved-1f1b", chunks=3), run)
    assert "'Et*2|(t|)*10,tL'" in text


RECORDINGS = [H200 / "1f1b_p3_m7", H200 / "fwd_closed_m4", DATA / "frameworks" / "mg_2321"]


@pytest.mark.parametrize("framework", ["megatron", "torchtitan", "torch", "deepspeed", "vllm"])
@pytest.mark.parametrize("folder", RECORDINGS, ids=lambda folder: folder.name)
def test_the_option_that_is_written_is_the_first_that_was_ranked(folder, framework):
    found = api.plan(analyse_recording(folder), frameworks=(framework,), emit=framework)
    assert found.planned_for == framework
    # Nothing is ranked that could not be written: a repair is no framework's.
    assert all(framework in one.apply for one in found.options if "repair" not in one.words)
    ranked = [one for one in found.options if not one.changes_training]
    ranked.sort(key=lambda one: not one.recommended)
    gaining = [one for one in ranked if one.advice in {"yes", "maybe"}]
    if not gaining:
        # What is within the noise is not there to be pasted: the first line says "nothing".
        assert found.emitted.option is None
        assert found.emitted.reason
        return
    first = next(one for one in gaining if one.apply)
    assert found.options[found.emitted.option] == first
    assert found.emitted.text == first.apply[framework]
    assert not found.emitted.reason or first is not gaining[0]
