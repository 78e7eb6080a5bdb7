"""A command with placeholders, filled in as it is now and as frameworks write it."""

from __future__ import annotations

import pytest

from debubble.annexes.tune.setting import Setting, read_template
from debubble.errors import UsageError
from debubble.plan.change import Change

NOW = Setting(split=(2, 3, 2, 1), microbatches=8, schedule="interleaved-1f1b")


def filled(*words, now=NOW, setting=NOW):
    return read_template(words, now).fill(setting)


def test_a_split_is_the_modules_of_torchtitan_a_word_a_stage():
    words = filled("--parallelism.module_fqns_per_model_part", "{split:torchtitan}", "--next")
    assert words[1:] == (
        "tok_embeddings,layers.0,layers.1",
        "layers.2,layers.3,layers.4",
        "layers.5,layers.6",
        "layers.7,norm,output",
        "--next",
    )


def test_braces_that_are_escaped_and_others_are_left_alone():
    assert filled("{{split:megatron}}", '{"a": 1}', "{split}") == (
        "{split:megatron}",
        '{"a": 1}',
        "2,3,2,1",
    )


def test_what_no_framework_writes_in_its_own_way_is_refused():
    with pytest.raises(UsageError, match="is nothing that a framework writes"):
        filled("{microbatches:megatron}")


def test_a_command_cannot_be_told_to_recompute():
    assert NOW.after(Change(recompute=True), 4) is None
