"""The frameworks by name, and what holds for the text of all of them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from debubble.errors import UsageError
from debubble.plan.change import Change, Setting
from debubble.plan.emit import EMITTERS, emit

RUN = Setting(ranks=4, layers=32, microbatches=8, schedule="1f1b", microbatch_size=2)


def test_an_unknown_name_is_refused_with_the_list():
    with pytest.raises(UsageError, match="no framework is called 'jax'") as caught:
        emit("jax", Change(split=(8,) * 4), RUN)
    assert caught.value.hint == f"one of {', '.join(EMITTERS)}"


@pytest.mark.parametrize("framework", sorted(set(EMITTERS) - {"csv"}))
def test_a_split_can_be_written_everywhere_and_says_what_it_assumes(framework):
    serves = framework in {"vllm", "sglang", "tensorrt-llm"}
    run = replace(RUN, schedule="forward-only") if serves else RUN
    text = emit(framework, Change(split=(7, 8, 9, 8)), run)
    assert text.endswith("\n")
    assert re.search(r"^# .*(Assumes|stays on the first rank)", text, re.MULTILINE)


def written_or_refused(framework, change, run):
    try:
        return emit(framework, change, run)
    except UsageError as refusal:
        return refusal.message and refusal.hint


@pytest.mark.parametrize("framework", EMITTERS)
@pytest.mark.parametrize("run", [RUN, Setting(ranks=4, layers=32)])
@pytest.mark.parametrize(
    "change",
    [
        Change(microbatches=16),
        Change(microbatches=16, hold="batch"),
        Change(schedule="zbv"),
        Change(schedule="forward-only"),
        Change(overlap=True),
        Change(overlap=False),
        Change(split=(4,) * 8, schedule="interleaved-1f1b", microbatches=12, overlap=True),
    ],
)
def test_every_change_is_written_or_refused_in_words(framework, change, run):
    assert written_or_refused(framework, change, run).strip()
