"""A change and the run it changes in → what will run afterwards, checked against itself."""

from __future__ import annotations

from dataclasses import dataclass

from debubble.errors import UsageError
from debubble.plan.change import Change, Setting
from debubble.schedules import SCHEDULES, Order, Placement, placement_of, state_schedule
from debubble.schedules.registry import can_have_chunks
from debubble.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """A run after a change: what stays the same and what is new, together."""

    ranks: int
    chunks: int
    split: tuple[int, ...] | None
    """Only where it is new: the change says so, or the number of stages is another."""
    microbatches: int | None
    schedule: str | None
    placement: Placement | None
    """The stages of each rank, where the schedule is known."""

    @property
    def stages(self) -> int:
        """Return the stages of the whole pipeline."""
        return self.ranks * self.chunks


def aim_of(change: Change, setting: Setting, *, layers_matter: bool = True) -> Aim:
    """Put a change upon a run; refuse one that no framework could run."""
    _check_counts(change, setting)
    schedule = change.schedule or setting.schedule
    microbatches = change.microbatches or setting.microbatches
    if schedule is None or schedule in SCHEDULES:
        chunks = _chunks_of(change, setting)
        placement = None if schedule is None else placement_of(schedule, setting.ranks, chunks)
    else:
        order = _order_in_file(schedule, change, setting)
        microbatches = 1 + max(action.microbatch for actions in order for action in actions)
        placement = tuple(tuple(sorted({action.stage for action in actions})) for actions in order)
        chunks = len(placement[0])
    split = _split_of(change, setting, chunks) if layers_matter else None
    return Aim(
        ranks=setting.ranks,
        chunks=chunks,
        split=split,
        microbatches=microbatches,
        schedule=schedule,
        placement=placement,
    )


def _check_counts(change: Change, setting: Setting) -> None:
    if change == Change(hold=change.hold):
        raise UsageError("there is no change to write down", hint="name a lever: a split, say")
    counts = {
        "ranks": setting.ranks,
        "layers": setting.layers,
        "microbatches": change.microbatches,
        "microbatches now": setting.microbatches,
        "chunks": change.chunks,
        "chunks now": setting.chunks,
        "samples a microbatch": setting.microbatch_size,
        "replicas": setting.data_parallel,
    }
    for name, count in counts.items():
        if count is not None and count < 1:
            raise UsageError(f"{count} {name} make no pipeline", hint="give one or more")


def _chunks_of(change: Change, setting: Setting) -> int:
    """Return the stages a rank: as said, else as now, else as few as the schedule can have."""
    if change.chunks is not None:
        return change.chunks
    if change.schedule is None or can_have_chunks(change.schedule, setting.chunks):
        return setting.chunks
    return SCHEDULES[change.schedule].least_chunks


def _order_in_file(file: str, change: Change, setting: Setting) -> Order:
    order = state_schedule(file, change.chunks).order
    if order is None:  # pragma: no cover: a file always holds one
        raise ValueError(file)
    written = 1 + max(action.microbatch for actions in order for action in actions)
    if len(order) != setting.ranks or change.microbatches not in {None, written}:
        raise UsageError(
            f"the order is for {counted(len(order), 'rank')} and "
            f"{counted(written, 'microbatch', 'microbatches')}",
            hint="give an order of the same sizes as the change",
            file=file,
        )
    if len({len({action.stage for action in actions}) for actions in order}) != 1:
        raise UsageError(
            "the order puts more stages on one rank than on another",
            hint="no framework takes it so: give each rank as many",
            file=file,
        )
    return order


def _split_of(change: Change, setting: Setting, chunks: int) -> tuple[int, ...] | None:
    """Return the split, where it is new: as said, or even where there are other stages."""
    stages = setting.ranks * chunks
    if change.split is not None:
        _check_split(change.split, setting, stages)
        return change.split
    return None if chunks == setting.chunks else _even_split(setting, stages)


def _even_split(setting: Setting, stages: int) -> tuple[int, ...]:
    layers = _layers_of(setting)
    if layers % stages:
        raise UsageError(
            f"{counted(layers, 'layer')} do not divide into {counted(stages, 'equal stage')}",
            hint="give the split as well",
        )
    return (layers // stages,) * stages


def _check_split(split: tuple[int, ...], setting: Setting, stages: int) -> None:
    layers = _layers_of(setting)
    if len(split) != stages:
        raise UsageError(
            f"the split has {counted(len(split), 'entry', 'entries')} for "
            f"{counted(stages, 'stage')}",
            hint="give the layers of each stage, one entry a stage",
        )
    if min(split) < 1:
        raise UsageError(
            f"stage {split.index(min(split))} of the split has no layer",
            hint="give each stage one layer or more",
        )
    if sum(split) != layers:
        raise UsageError(
            f"the split has {counted(sum(split), 'layer')}, the model {layers}",
            hint="let the entries of the split add up to the layers of the model",
        )


def _layers_of(setting: Setting) -> int:
    if setting.layers is None:
        raise UsageError("how many layers the model has is not known", hint="say it with --layers")
    return setting.layers
