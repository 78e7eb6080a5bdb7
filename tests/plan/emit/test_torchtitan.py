"""torchtitan's flags, read back by its own rules, in the words of each version."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.emitted_text import comments_of, flags_of, paste_flags, setting_for, splits

from debubble.errors import UsageError
from debubble.plan.change import Change, Setting
from debubble.plan.emit import emit
from debubble.timeline.schedules import format_order, order_of

DIALECTS = {
    "torchtitan@0.2.2": ("--parallelism.module_fqns_per_model_part", "output"),
    "torchtitan": ("--parallelism.module_fqns_per_model_part", "lm_head"),
    "torchtitan@main": ("--parallelism.pipeline_parallel_module_fqns_per_model_part", "lm_head"),
}
RUN = Setting(ranks=4, layers=32, microbatches=8, schedule="1f1b")
SCHEDULE = "--parallelism.pipeline_parallel_schedule"
ORDER = "--parallelism.pipeline_parallel_schedule_csv"


@pytest.mark.slow
@pytest.mark.parametrize("framework", DIALECTS)
@given(splits(empty_ends=True))
def test_stages_hold_all_modules_once_and_as_many_layers_as_the_split_says(framework, sizes):
    ranks, chunks, split = sizes
    run = setting_for(ranks, split, microbatches=ranks)
    schedule = "1f1b" if chunks == 1 else "looped-bfs"
    text = emit(framework, Change(split=split, schedule=schedule, chunks=chunks), run)
    flag, head = DIALECTS[framework]
    flags = flags_of(text)
    stages = [part.split(",") for part in flags[flag]]
    layers = [f"layers.{number}" for number in range(sum(split))]
    assert sum(stages, []) == ["tok_embeddings", *layers, "norm", head]  # noqa: RUF017
    assert [sum(m.startswith("layers.") for m in stage) for stage in stages] == list(split)
    assert flags["--parallelism.pipeline_parallel_degree"] == [str(ranks)]
    assert len(stages) == ranks * chunks


@pytest.mark.parametrize("framework", ["torchtitan", "torchtitan@0.2.2"])
@given(st.integers(4, 64), st.integers(1, 9))
def test_batch_over_microbatch_size_is_the_number_of_microbatches(framework, microbatches, size):
    run = Setting(ranks=4, microbatches=8, schedule="1f1b", microbatch_size=size)
    flags = flags_of(emit(framework, Change(microbatches=microbatches), run))
    assert flags["--training.local_batch_size"] == [str(microbatches * size)]
    assert "--parallelism.pipeline_parallel_microbatch_size" not in flags


@pytest.mark.slow
def test_a_held_batch_changes_the_size_of_microbatches_alone():
    text = emit("torchtitan", Change(microbatches=16, hold="batch"), RUN)
    assert "--training.local_batch_size" not in flags_of(text)
    given = paste_flags(text, MICROBATCH_SIZE=4)
    assert given[given.index("--parallelism.pipeline_parallel_microbatch_size") + 1] == "2"


@pytest.mark.slow
def test_main_with_the_batch_held_takes_fewer_tokens_a_microbatch():
    text = emit("torchtitan@main", Change(microbatches=16, hold="batch"), RUN)
    given = paste_flags(text, TOKENS_PER_MICROBATCH=4096)
    flag = "--training.num_tokens_per_microbatch_per_dp_rank"
    assert given[given.index(flag) + 1] == "2048"
    assert paste_flags(text) is None
    odd = Setting(ranks=4, microbatches=8, schedule="1f1b", microbatch_size=1)
    with pytest.raises(UsageError, match="8 samples is not divisible by 16"):
        emit("torchtitan@main", Change(microbatches=16, hold="batch"), odd)


@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        ("gpipe", "GPipe"),
        ("1f1b", "1F1B"),
        ("interleaved-1f1b", "Interleaved1F1B"),
        ("looped-bfs", "LoopedBFS"),
        ("interleaved-zb", "InterleavedZeroBubble"),
        ("zbv", "ZBVZeroBubble"),
        ("dualpipe-v", "DualPipeV"),
    ],
)
def test_torchs_schedules_go_by_torchs_names(schedule, name):
    flags = flags_of(emit("torchtitan", Change(schedule=schedule), RUN))
    assert flags[SCHEDULE] == [name]
    assert ORDER not in flags


def test_schedules_that_torch_lacks_run_from_an_order_file():
    text = emit("torchtitan", Change(schedule="zb-h1"), RUN)
    flags = flags_of(text)
    assert flags[SCHEDULE] == ["PipelineScheduleSingle"]
    assert flags[ORDER] == ["order.csv"]
    assert any(one.startswith("order.csv: the order of passes") for one in comments_of(text))


@pytest.mark.parametrize(
    ("schedule", "chunks", "name"),
    [
        ("1f1b", 1, "PipelineScheduleSingle"),
        ("looped-bfs", 3, "PipelineScheduleMulti"),
        ("zbv", 2, "ZBVZeroBubble"),
    ],
)
def test_an_order_of_your_own_is_given_with_what_places_its_stages(
    schedule, chunks, name, tmp_path
):
    file = tmp_path / "my order.csv"
    file.write_text(format_order(order_of(schedule, 4, 8, chunks)), "utf-8")
    run = Setting(ranks=4, layers=48, microbatches=8, schedule="1f1b")
    flags = flags_of(emit("torchtitan", Change(schedule=str(file)), run))
    assert flags[SCHEDULE] == [name]
    assert flags[ORDER] == [str(file)]


def test_an_order_that_torchtitan_cannot_place_is_refused(tmp_path):
    file = tmp_path / "order.csv"
    file.write_text("1F0,1B0\n0F0,0B0\n", "utf-8")
    with pytest.raises(UsageError, match="in a loop or in a V"):
        emit("torchtitan", Change(schedule=str(file)), Setting(ranks=2, microbatches=1))
