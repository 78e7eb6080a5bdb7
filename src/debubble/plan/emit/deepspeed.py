"""DeepSpeed: a subclass for the split, which it has no setting for; accumulation steps for m."""

from __future__ import annotations

from debubble.plan.change import Change, Setting
from debubble.plan.emit.aim import (
    aim_of,
    cannot,
    comment,
    divides_note,
    python_shrunk,
    refuse_overlap,
)

_NAME = "DeepSpeed"

_SUBCLASS = """from itertools import accumulate

from deepspeed.pipe import PipelineModule


class SplitPipelineModule(PipelineModule):
    SPLIT = {split}  # transformer layers of each stage
    BEFORE = 1  # entries of `layers` ahead of the first transformer layer

    def _partition_layers(self, method="parameters"):
        cuts = list(accumulate(self.SPLIT, initial=self.BEFORE))[1:-1]
        self.parts = [0, *cuts, len(self._layer_specs)]
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])
"""


def emit(change: Change, setting: Setting) -> str:
    """Write the Python that brings the change about."""
    aim = aim_of(change, setting)
    if change.schedule not in {None, "1f1b"}:
        raise cannot(_NAME, f"to run {change.schedule}", "it always runs 1f1b")
    if aim.chunks != 1:
        raise cannot(_NAME, "to put two stages on a rank", "use --chunks 1")
    refuse_overlap(_NAME, change, "change the split or the microbatches")
    parts: list[str] = []
    if aim.split is not None:
        parts += [
            comment(
                "DeepSpeed has no setting for a split: use this class for PipelineModule,",
                f"with num_stages={aim.ranks}. Its partition_method is then not looked at.",
                "Assumes that `layers` has one entry ahead of the transformer layers (the",
                "embedding), an entry a layer, then the rest (norm, head): else set BEFORE.",
            )
            + _SUBCLASS.format(split=aim.split)
        ]
    if change.microbatches is not None:
        parts.append(_accumulation(change, setting, change.microbatches))
    if not parts:
        parts.append(comment("DeepSpeed always runs 1F1B: there is nothing to set."))
    return "\n\n".join(parts)


def _accumulation(change: Change, setting: Setting, microbatches: int) -> str:
    """Write the entries of the configuration, a dict called `config`."""
    size = "train_micro_batch_size_per_gpu"
    notes: list[str] = []
    lines = [
        f'config["gradient_accumulation_steps"] = {microbatches}',
        'config.pop("train_batch_size", None)',
    ]
    if change.hold == "batch":
        now = f'config["{size}"]'
        notes = divides_note(change, setting)
        lines.insert(0, f"{now} = {python_shrunk(change, setting, now)}")
    return (
        comment(
            "DeepSpeed's microbatches are its accumulation steps; `config` is its configuration.",
            "train_batch_size follows from them: it goes out, so as not to disagree.",
            *notes,
        )
        + "\n".join(lines)
        + "\n"
    )


def recompute(on: bool) -> str:
    """Write what lets backward passes recompute, or keep, activations."""
    return comment("DeepSpeed: layers between checkpoints; 0 keeps everything.") + (
        f"module = PipelineModule(..., activation_checkpoint_interval={int(on)})\n"
    )


EMITTERS = {"deepspeed": emit}
