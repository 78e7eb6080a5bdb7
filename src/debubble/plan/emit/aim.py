"""A change in → what a framework is to be told: sizes, refusals, text.

Traces seldom tell how many samples a microbatch has. Where it is not known, sizes are written as
arithmetic over a name that the user sets, and that fails loudly where it is not set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod

from debubble.errors import CannotBeTold, UsageError
from debubble.plan.baseline import even_split
from debubble.plan.change import SEARCHED, Change, ServingSetting, Setting
from debubble.timeline.schedules import SCHEDULES, Order, Placement, placement_of, state_schedule
from debubble.timeline.schedules.named import can_have_chunks
from debubble.units import counted

MICROBATCH_SIZE = "MICROBATCH_SIZE"
DATA_PARALLEL = "DATA_PARALLEL"
_MEANING = {
    MICROBATCH_SIZE: "the samples of one microbatch as the run is now",
    DATA_PARALLEL: "the replicas of the model, each with a share of the batch",
}


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
    order: Order | None = None
    """The passes of each rank, where the schedule has no name."""

    @property
    def in_a_new_file(self) -> bool:
        """Whether its order is in no file yet, and one has to be written where one is needed."""
        return self.schedule in SCHEDULES or self.schedule == SEARCHED

    @property
    def stages(self) -> int:
        """Return the stages of the whole pipeline."""
        return self.ranks * self.chunks


def aim_of(change: Change, setting: Setting, *, layers_matter: bool = True) -> Aim:
    """Put a change upon a run; refuse one that no framework could run."""
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
    schedule = change.schedule or setting.schedule
    microbatches = change.microbatches or setting.microbatches
    order: Order | None = None
    if schedule is None or schedule in SCHEDULES:
        chunks = _chunks_of(change, setting)
        placement = None if schedule is None else placement_of(schedule, setting.ranks, chunks)
    else:
        order = _order_in_file(schedule, change, setting)
        microbatches = 1 + max(action.microbatch for actions in order for action in actions)
        placement = tuple(tuple(sorted({action.stage for action in actions})) for actions in order)
        chunks = len(placement[0])
    return Aim(
        ranks=setting.ranks,
        chunks=chunks,
        split=_split_of(change, setting, chunks) if layers_matter else None,
        microbatches=microbatches,
        schedule=schedule,
        placement=placement,
        order=order,
    )


def serving_setting(framework: str, change: Change, setting: Setting) -> ServingSetting:
    """Put a change upon a run of an engine that serves: its schedule is its own, a stage a rank."""
    aim = aim_of(change, setting)
    known = SCHEDULES.get(setting.schedule or "")
    if known is not None and known.kinds != {"F"}:
        raise cannot(
            framework,
            f"to train: it serves, and the run has backward passes ({setting.schedule})",
            "name what trains it: torch, torchtitan, megatron, deepspeed, nemo",
        )
    if change.schedule is not None or change.chunks is not None or aim.chunks != 1:
        hint = f"change the split: a rank holds one stage in {framework}"
        raise cannot(framework, "a schedule or stages a rank", hint)
    refuse_overlap(framework, change, "change the split, or the batches in flight")
    if 0 in (aim.split or ()):
        raise cannot(framework, "a stage without layers", "give each rank one layer or more")
    requests = None
    if change.microbatches is not None and change.hold == "batch":
        requests = shrunk_size(change, setting)
    if isinstance(requests, tuple):
        raise UsageError(
            "how many requests a microbatch has is not known",
            hint="hold the microbatch instead of the batch",
        )
    return ServingSetting(
        stages=aim.ranks,
        layers=aim.split,
        in_flight=change.microbatches,
        requests_a_batch=requests,
    )


def partition_variable(framework: str, variable: str, layers: Sequence[int]) -> str:
    """Write the environment variable that sets the split of an engine that serves."""
    return (
        comment(
            f"{framework}: set this the same on every node, before the server starts.",
            "The embedding stays on the first rank, norm and head on the last.",
        )
        + f'export {variable}="{",".join(map(str, layers))}"\n'
    )


def only_splits(change: Change) -> bool:
    """Tell whether nothing but the split is new."""
    return change == Change(split=change.split, hold=change.hold)


def _chunks_of(change: Change, setting: Setting) -> int:
    """Return the stages a rank: as said, else as now, else as few as the schedule can have."""
    if change.chunks is not None:
        return change.chunks
    if change.schedule is None or can_have_chunks(change.schedule, setting.chunks):
        return setting.chunks
    return SCHEDULES[change.schedule].least_chunks


def _order_in_file(file: str, change: Change, setting: Setting) -> Order:
    order = change.order if file == SEARCHED else state_schedule(file, change.chunks).order
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
    split, stages, layers = change.split, setting.ranks * chunks, setting.layers
    if split is None and chunks == setting.chunks:
        return None
    if layers is None:
        raise UsageError("the number of layers is unknown", hint="give --layers")
    if split is None:
        return even_split(layers, stages)
    if len(split) != stages:
        raise UsageError(
            f"the split has {counted(len(split), 'entry', 'entries')} for "
            f"{counted(stages, 'stage')}",
            hint="give the layers of each stage, one entry a stage",
        )
    empty = [stage for stage, own in enumerate(split) if own < (0 < stage < stages - 1)]
    if empty or max(split) < 1:
        raise UsageError(
            f"stage {(empty or [0])[0]} of the split has no layer",
            hint="only the first and the last stage, with embedding and head, can do without",
        )
    if sum(split) != layers:
        raise UsageError(
            f"the split has {counted(sum(split), 'layer')}, the model {layers}",
            hint="let the entries of the split add up to the layers of the model",
        )
    return split


def cannot(framework: str, what: str, hint: str) -> CannotBeTold:
    """Return the refusal of something that a framework cannot be told."""
    setting = what if what.startswith("to ") else f"for {what}"
    return CannotBeTold(f"{framework} has no setting {setting}", hint=hint)


def refuse_overlap(framework: str, change: Change, hint: str) -> None:
    """Refuse any change of overlap."""
    if change.overlap is not None:
        raise cannot(framework, "to overlap transfers, or not to", hint)


def microbatches_of(aim: Aim) -> int:
    """Return the microbatches of the run after the change, which must be known."""
    if aim.microbatches is None:
        raise UsageError(
            "how many microbatches the run has is not known", hint="give --microbatches"
        )
    return aim.microbatches


def schedule_of(aim: Aim) -> str:
    """Return the schedule of the run after the change, which must be known."""
    if aim.schedule is None:
        raise UsageError("the schedule of the run is unknown", hint="give --schedule")
    return aim.schedule


def comment(*lines: str) -> str:
    """Write each line as a comment, for shell, YAML and Python alike."""
    return "".join(f"# {line}\n" for line in lines)


def flags(words: Sequence[str]) -> str:
    """Write the flags of a launch line, one a line, to stand at its end."""
    return " \\\n".join(words) + "\n"


def shrunk_size(change: Change, setting: Setting) -> tuple[int, int] | int:
    """Return the size of a microbatch if the batch is held; where unknown, the ratio to now."""
    now, then = setting.microbatches, change.microbatches
    if now is None or then is None:
        raise UsageError(
            "how many microbatches the run has is not known",
            hint="hold the microbatch instead of the batch",
        )
    if setting.microbatch_size is None:
        common = gcd(now, then)
        return now // common, then // common
    batch = now * setting.microbatch_size
    if batch % then:
        raise UsageError(
            f"a global batch of {batch} samples is not divisible by {then}",
            hint="hold the microbatch instead, or take a number that divides the batch",
        )
    return batch // then


def shell_shrunk(change: Change, setting: Setting, name: str = MICROBATCH_SIZE) -> str:
    """Write the size of a microbatch, if the batch is held, for a shell."""
    size = shrunk_size(change, setting)
    if isinstance(size, int):
        return str(size)
    return f"$(({_scaled(f'${{{name}:?}}', size, '/')}))"


def python_shrunk(change: Change, setting: Setting, now: str) -> str:
    """Write the size of a microbatch, if the batch is held, for Python; `now` is what it is."""
    size = shrunk_size(change, setting)
    return str(size) if isinstance(size, int) else _scaled(now, size, "//")


def divides_note(change: Change, setting: Setting) -> list[str]:
    """Return what an unknown size must divide by, as a line, if the batch is held."""
    size = shrunk_size(change, setting)
    if isinstance(size, int) or size[1] == 1:
        return []
    return [f"The size of a microbatch as it is now must divide by {size[1]}."]


def batch_factors(setting: Setting) -> dict[str, int | None]:
    """Return what microbatches are multiplied by for the global batch."""
    return {MICROBATCH_SIZE: setting.microbatch_size, DATA_PARALLEL: setting.data_parallel}


def shell_product(microbatches: int, factors: dict[str, int | None]) -> str:
    """Write microbatches times further factors, each known or a name, for a shell."""
    known, names = _parts(microbatches, factors)
    if not names:
        return str(known)
    return f"$(({' * '.join([str(known), *(f'${{{name}:?}}' for name in names)])}))"


def python_product(microbatches: int, factors: dict[str, int | None]) -> str:
    """Write microbatches times further factors, each known or a name, for Python."""
    known, names = _parts(microbatches, factors)
    return " * ".join([str(known), *names])


def explain_names(text: str) -> list[str]:
    """Return a line for each name in a text that the user has to set."""
    return [f"Set {name} first: {meaning}." for name, meaning in _MEANING.items() if name in text]


def _scaled(now: str, ratio: tuple[int, int], divided_by: str) -> str:
    times = "" if ratio[0] == 1 else f" * {ratio[0]}"
    return f"{now}{times}" + ("" if ratio[1] == 1 else f" {divided_by} {ratio[1]}")


def _parts(microbatches: int, factors: dict[str, int | None]) -> tuple[int, list[str]]:
    known = prod((size for size in factors.values() if size is not None), start=microbatches)
    return known, [name for name, size in factors.items() if size is None]
