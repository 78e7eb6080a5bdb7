"""Batch and microbatch after a change of their number: right where known, arithmetic where not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.emitted_text import comments_of, paste_flags

from debubble.errors import UsageError
from debubble.plan.change import Change, Setting
from debubble.plan.emit import emit
from debubble.plan.emit.aim import python_shrunk, shrunk_size

HELD = Change(microbatches=16, hold="batch")


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
def test_a_held_batch_has_as_many_samples_as_before_or_is_refused(now, then, size):
    change = Change(microbatches=then, hold="batch")
    run = Setting(ranks=2, microbatches=now, microbatch_size=size)
    if now * size % then:
        with pytest.raises(UsageError, match="is not divisible by"):
            shrunk_size(change, run)
    else:
        assert shrunk_size(change, run) * then == now * size


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 8))
def test_of_unknown_size_it_is_arithmetic_that_comes_out_the_same(now, then, factor):
    size = factor * then
    change, run = Change(microbatches=then, hold="batch"), Setting(ranks=2, microbatches=now)
    expression = python_shrunk(change, run, "size")
    assert eval(expression, {"size": size}) * then == now * size  # noqa: S307


@pytest.mark.slow
def test_a_shell_calculates_an_unknown_size():
    text = emit("megatron", HELD, Setting(ranks=4, microbatches=12))
    assert "The size of a microbatch as it is now must divide by 4." in comments_of(text)
    assert paste_flags(text, MICROBATCH_SIZE=8)[-2:] == ["--micro-batch-size", "6"]
