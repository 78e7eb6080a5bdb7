"""Megatron's layout, read back by its grammar as written down in its documentation."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.emitted_text import code_of, flags_of, paste_flags, setting_for, splits

from debubble.errors import UsageError
from debubble.plan.change import Change, Setting
from debubble.plan.emit import emit
from debubble.timeline.schedules import order_of

RUN = Setting(ranks=4, layers=32, microbatches=8, schedule="1f1b")
VIRTUAL = Setting(ranks=4, layers=32, microbatches=8, schedule="interleaved-1f1b", chunks=2)


def unroll(layout):
    """Megatron's own two substitutions, in its order, one pass each: no nested parentheses."""
    layout = layout.replace(",", "")
    for pattern in [r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"]:
        layout = re.sub(pattern, lambda found: found[1] * int(found[2]), layout)
    return layout.split("|")


def check_layout(layout, ranks, layers):
    """Megatron's rules for a decoder without multi-token prediction; the layers of each stage."""
    stages = unroll(layout)
    whole = "".join(stages)
    assert set(whole) <= set("EtL")
    assert whole[0] == "E"
    assert whole[-1] == "L"
    assert (whole.count("E"), whole.count("L"), whole.count("t")) == (1, 1, layers)
    assert len(stages) % ranks == 0
    assert all(stages), "empty stages are reported to hang"
    return [stage.count("t") for stage in stages]


def layout_in(framework, text):
    if framework == "megatron":
        return flags_of(text)["--pipeline-model-parallel-layout"][0]
    return run_config(text).model.pipeline_model_parallel_layout


def run_config(text, **known):
    """The assignments, run upon an empty configuration."""
    config = SimpleNamespace(
        model=SimpleNamespace(),
        train=SimpleNamespace(micro_batch_size=6),
        comm_overlap=SimpleNamespace(),
    )
    exec(text, {"cfg": config, **known})  # noqa: S102
    return config


@pytest.mark.parametrize("framework", ["megatron", "nemo"])
@given(splits(empty_ends=True))
def test_every_split_comes_back_from_its_layout(framework, sizes):
    ranks, chunks, split = sizes
    run = setting_for(ranks, split, microbatches=ranks)
    schedule = "1f1b" if chunks == 1 else "interleaved-1f1b"
    text = emit(framework, Change(split=split, schedule=schedule, chunks=chunks), run)
    assert check_layout(layout_in(framework, text), ranks, sum(split)) == list(split)


@pytest.mark.slow
def test_a_shell_leaves_the_layout_alone():
    text = emit("megatron", Change(split=(7, 9, 9, 7)), RUN)
    assert "Et*7|(t*9|)*2,t*7L" in paste_flags(text)


@pytest.mark.parametrize(
    "flag",
    [
        "--num-layers-per-virtual-pipeline-stage",
        "--num-virtual-stages-per-pipeline-rank",
        "--decoder-first-pipeline-num-layers",
        "--decoder-last-pipeline-num-layers",
    ],
)
def test_flags_that_exclude_a_layout_are_named_and_not_given(flag):
    text = emit("megatron", Change(split=(7, 9, 9, 7)), RUN)
    assert flag in text
    assert flag not in code_of(text)


@pytest.mark.slow
def test_the_batch_is_microbatches_times_size_times_replicas():
    text = emit("megatron", Change(microbatches=16), RUN)
    assert paste_flags(text, MICROBATCH_SIZE=2, DATA_PARALLEL=8)[-1] == "256"
    assert paste_flags(text, MICROBATCH_SIZE=2) is None
    run = Setting(ranks=4, microbatches=8, microbatch_size=2, data_parallel=8)
    flags = flags_of(emit("megatron", Change(microbatches=16), run))
    assert flags["--global-batch-size"] == ["256"]
    assert "--micro-batch-size" not in flags


def test_a_held_batch_changes_the_size_of_microbatches_alone():
    flags = flags_of(emit("megatron", Change(microbatches=16, hold="batch"), RUN))
    assert "--global-batch-size" not in flags
    assert "--micro-batch-size" in flags


@given(st.integers(2, 6), st.integers(1, 40))
def test_groups_of_microbatches_obey_megatron_and_are_those_of_the_order(ranks, microbatches):
    run = Setting(ranks=ranks, layers=2 * ranks, microbatches=microbatches, schedule="1f1b")
    change = Change(schedule="interleaved-1f1b")
    if microbatches < ranks or microbatches % (microbatches // ranks):
        with pytest.raises(UsageError, match="into equal groups"):
            emit("megatron", change, run)
        return
    flags = flags_of(emit("megatron", change, run))
    name = "--microbatch-group-size-per-virtual-pipeline-stage"
    group = int(flags[name][0]) if name in flags else ranks
    assert ranks <= group <= microbatches
    assert microbatches % group == 0
    first = order_of("interleaved-1f1b", ranks, microbatches, 2)[0]
    ahead = [action.stage for action in first if action.kind == "F"][: group + 1]
    assert ahead[:group] == [0] * group
    assert ahead[group:] == [ranks]


def test_virtual_stages_need_a_second_rank():
    with pytest.raises(UsageError, match="no virtual stages on one rank"):
        emit(
            "megatron",
            Change(schedule="interleaved-1f1b"),
            Setting(ranks=1, layers=4, microbatches=4),
        )


def test_two_ranks_with_virtual_stages_must_overlap():
    run = Setting(ranks=2, layers=8, microbatches=8, schedule="interleaved-1f1b", chunks=2)
    assert emit("megatron", Change(overlap=True), run)
    with pytest.raises(UsageError, match="needs 3 ranks or more"):
        emit("megatron", Change(overlap=False), run)


def test_nemo_says_how_many_virtual_stages_there_are_and_clears_what_excludes_a_layout():
    config = run_config(emit("nemo", Change(split=(4,) * 8), VIRTUAL))
    assert config.model.pipeline_model_parallel_size == 4
    assert config.model.virtual_pipeline_model_parallel_size == 2
    assert config.model.num_layers_in_first_pipeline_stage is None
    assert config.model.account_for_loss_in_pipeline_split is False
    plain = run_config(emit("nemo", Change(split=(8,) * 4), RUN))
    assert plain.model.virtual_pipeline_model_parallel_size is None


def test_nemo_sizes_are_python():
    text = emit("nemo", Change(microbatches=16), RUN)
    assert run_config(text, MICROBATCH_SIZE=2, DATA_PARALLEL=8).train.global_batch_size == 256
    held = emit("nemo", Change(microbatches=16, hold="batch"), RUN)
    assert run_config(held).train.micro_batch_size == 3


def test_nemo_overlap_is_one_of_two_that_exclude_each_other():
    config = run_config(emit("nemo", Change(overlap=True), VIRTUAL))
    assert config.comm_overlap.overlap_p2p_comm is True
    assert config.comm_overlap.batch_p2p_comm is False
