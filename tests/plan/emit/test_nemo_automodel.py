"""NeMo Automodel's YAML, read back by its rules."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from support.emitted_text import setting_for, splits

from debubble.errors import UsageError
from debubble.plan.change import Change, Setting
from debubble.plan.emit import emit

RUN = Setting(ranks=4, layers=32, microbatches=8, schedule="1f1b", microbatch_size=2)


def read(change, run=RUN):
    return yaml.safe_load(emit("nemo@automodel", change, run))


@given(splits(empty_ends=True))
def test_stages_hold_all_modules_and_as_many_layers_as_the_split_says(sizes):
    ranks, chunks, split = sizes
    schedule = "1f1b" if chunks == 1 else "looped-bfs"
    change = Change(split=split, schedule=schedule, chunks=chunks)
    recipe = read(change, setting_for(ranks, split, microbatches=ranks))
    stages = recipe["distributed"]["pipeline"]["module_fqns_per_model_part"]
    assert recipe["distributed"]["pp_size"] == ranks
    assert len(stages) == ranks * chunks
    assert [sum(".layers." in m for m in stage) for stage in stages] == list(split)
    assert all(stage[-1] == "model.rotary_emb" for stage in stages)
    once = [module for stage in stages for module in stage[:-1]]
    layers = [f"model.layers.{number}" for number in range(sum(split))]
    assert once == ["model.embed_tokens", *layers, "model.norm", "lm_head"]


@pytest.mark.parametrize(("hold", "size", "batch"), [("microbatch", 2, 32), ("batch", 1, 16)])
def test_the_batch_is_a_multiple_of_the_microbatch(hold, size, batch):
    recipe = read(Change(microbatches=16, hold=hold))
    assert recipe["distributed"]["pipeline"]["pp_microbatch_size"] == size
    assert recipe["step_scheduler"]["local_batch_size"] == batch


def test_yaml_cannot_calculate_so_the_size_must_be_known():
    with pytest.raises(UsageError, match="the samples of a microbatch are unknown"):
        read(Change(microbatches=16), Setting(ranks=4, microbatches=8, schedule="1f1b"))


def test_torchs_schedules_go_by_torchs_names():
    assert read(Change(schedule="zbv"))["distributed"]["pipeline"]["pp_schedule"] == "ZBVZeroBubble"


def test_gpipe_needs_a_microbatch_for_each_rank():
    with pytest.raises(UsageError, match="a microbatch for each of 4 ranks, not 3"):
        read(Change(schedule="gpipe", microbatches=3))
