"""DeepSpeed's subclass upon a stand-in for PipelineModule; its configuration upon a dict."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

from hypothesis import given
from support.emitted_text import setting_for, splits

from debubble.plan.change import Change, Setting
from debubble.plan.emit import emit

RUN = Setting(ranks=4, layers=32, microbatches=8, schedule="1f1b")


class PipelineModule:
    """What DeepSpeed's does with a partition: it asks for it, and builds what lies between."""

    def __init__(self, layers, num_stages, rank):
        self._layer_specs = layers
        self._topo = SimpleNamespace(get_coord=lambda rank: SimpleNamespace(pipe=rank))
        self.global_rank = rank
        self._partition_layers(method="parameters")
        assert len(self.parts) == num_stages + 1

    def _set_bounds(self, start, stop):
        self.built = self._layer_specs[start:stop]


def run_text(text, **names):
    """Run the text with a package in place of DeepSpeed, and return what it defines."""
    package = ModuleType("deepspeed.pipe")
    package.PipelineModule = PipelineModule
    before = {name: sys.modules.get(name) for name in ["deepspeed", "deepspeed.pipe"]}
    sys.modules |= {"deepspeed": ModuleType("deepspeed"), "deepspeed.pipe": package}
    try:
        exec(text, names)  # noqa: S102
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module
    return names


@given(splits(most_chunks=1, empty_ends=True))
def test_each_stage_builds_its_layers_and_the_ends_build_the_rest(sizes):
    ranks, _, split = sizes
    text = emit("deepspeed", Change(split=split), setting_for(ranks, split))
    made = run_text(text)["SplitPipelineModule"]
    specs = ["embedding", *range(sum(split)), "norm", "head"]
    stages = [made(specs, ranks, rank).built for rank in range(ranks)]
    assert sum(stages, []) == specs  # noqa: RUF017
    assert [sum(isinstance(spec, int) for spec in stage) for stage in stages] == list(split)


def test_microbatches_are_accumulation_steps_and_nothing_disagrees_with_them():
    config = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}
    run_text(emit("deepspeed", Change(microbatches=16), RUN), config=config)
    assert config == {"gradient_accumulation_steps": 16, "train_micro_batch_size_per_gpu": 4}


def test_a_held_batch_makes_the_microbatch_smaller():
    config = {"train_micro_batch_size_per_gpu": 4}
    run_text(emit("deepspeed", Change(microbatches=16, hold="batch"), RUN), config=config)
    assert config == {"gradient_accumulation_steps": 16, "train_micro_batch_size_per_gpu": 2}
