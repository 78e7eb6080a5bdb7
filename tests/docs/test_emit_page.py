"""docs/reference/emit.md: each framework has its heading, each text shown is what is written."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support.services.console import REPOSITORY

from debubble.plan.change import Change, ServingSetting, Setting
from debubble.plan.emit import EMITTERS, SERVERS, emit, emit_serving

PAGE = (REPOSITORY / "docs" / "reference" / "emit.md").read_text("utf-8")
BLOCK = re.compile(r"^```(?:sh|yaml|python|text)\n(.*?)^```", re.MULTILINE | re.DOTALL)

# The run and the changes that the page says it shows.
RUN = Setting(ranks=4, layers=12, microbatches=8, schedule="1f1b")
SERVED = ServingSetting(stages=4, layers=(2, 4, 4, 2), in_flight=4, requests_a_batch=16, chunk=512)
SPLIT = Change(split=(2, 4, 4, 2))
MICROBATCHES = Change(microbatches=16)
INTERLEAVED = Change(schedule="interleaved-1f1b", split=(1, 1, 2, 2, 2, 2, 1, 1))
OVERLAP = Change(overlap=True)
SHOWN = {
    "vllm": [SPLIT],
    "sglang": [SPLIT, MICROBATCHES],
    "tensorrt-llm": [SPLIT],
    "megatron": [INTERLEAVED, MICROBATCHES],
    "torchtitan": [SPLIT, MICROBATCHES, OVERLAP],
    "torchtitan@0.2.2": [],
    "torchtitan@main": [MICROBATCHES],
    "torch": [INTERLEAVED],
    "deepspeed": [SPLIT, MICROBATCHES],
    "nemo": [SPLIT],
    "nemo@automodel": [SPLIT],
    "csv": [Change(schedule="zb-h1", microbatches=4)],
}


def section(framework):
    """The part of the page under a framework's heading."""
    parts = re.split(r"^## (.*)$", PAGE, flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    [found] = [text for title, text in sections.items() if f"`{framework}`" in title]
    return found


@pytest.mark.parametrize("framework", EMITTERS)
def test_each_text_shown_is_what_is_written(framework):
    run = replace(RUN, schedule="forward-only") if framework in SERVERS else RUN
    texts = [emit(framework, change, run) for change in SHOWN[framework]]
    if framework in SERVERS:
        texts.append(emit_serving(framework, SERVED))
    assert BLOCK.findall(section(framework)) == texts


def test_no_heading_is_about_a_framework_that_does_not_exist():
    titles = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    assert set(re.findall(r"`([^`]+)`", " ".join(titles))) == set(EMITTERS)
