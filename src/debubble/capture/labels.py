"""A pipeline object in → its passes named in the trace.

`PP:{stage}{F|B|I|W}{microbatch}`, as torch's runtime schedules write it. `Schedule1F1B` and other
hand-written loops name nothing; schedules that do are left alone, told by their own code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from types import CodeType, FrameType
from typing import Any

from torch.profiler import record_function

from debubble.errors import UsageError

# torch's classes, as every answer of debubble spells them.
SCHEDULE_NAMES = {
    "_ScheduleForwardOnly": "forward-only",
    "ScheduleGPipe": "gpipe",
    "Schedule1F1B": "1f1b",
    "ScheduleInterleaved1F1B": "interleaved-1f1b",
    "ScheduleLoopedBFS": "looped-bfs",
    "ScheduleInterleavedZeroBubble": "interleaved-zb",
    "ScheduleZBVZeroBubble": "zbv",
    "ScheduleDualPipeV": "dualpipe-v",
}
# Where a schedule of torch runs its microbatches; a pass is called from there or a little below.
_LOOP = "_step_microbatches"
_FRAMES_BELOW_LOOP = 8
# The methods of a stage: which pass each runs, and what torch calls its microbatch.
PASSES = {
    "forward_one_chunk": ("F", "fwd_chunk_id"),
    "backward_one_chunk": ("B", "bwd_chunk_id"),
    "backward_weight_one_chunk": ("W", "bwd_chunk_id"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """What the user named: the stages of this rank, and their schedule where it is known."""

    stages: tuple[Any, ...] = ()
    schedule: Any = None

    @property
    def held_stages(self) -> list[int]:
        """The stages of this rank."""
        return [int(stage.stage_index) for stage in self.stages]

    def describe(self, split: tuple[int, ...] | None) -> dict[str, Any]:
        """Return what sidecars say of it; a schedule's subclass goes by the class it came from."""
        schedule = None if self.schedule is None else type(self.schedule)
        names = [
            SCHEDULE_NAMES.get(base.__name__) for base in (schedule.__mro__ if schedule else ())
        ]
        microbatches = getattr(self.schedule, "_n_microbatches", None)
        return {
            "schedule": next(filter(None, names), None),
            "schedule_class": schedule and schedule.__name__,
            "microbatches": microbatches if isinstance(microbatches, int) else None,
            "stages": int(self.stages[0].num_stages) if self.stages else None,
            "held_stages": self.held_stages,
            "split": split,
        }


def find_pipeline(parts: Any) -> Pipeline:
    """Return what the user's schedule, stage or list of stages is made of."""
    if parts is None:
        return Pipeline()
    if isinstance(parts, list | tuple):
        stages, schedule = tuple(parts), None
    elif hasattr(parts, "forward_one_chunk"):
        stages, schedule = (parts,), None
    else:
        stages = tuple(getattr(parts, "_stages", None) or [getattr(parts, "_stage", None)])
        schedule = parts
    if not stages or not all(hasattr(stage, "forward_one_chunk") for stage in stages):
        raise UsageError(
            f"{type(parts).__name__} is no schedule and no stage of torch.distributed.pipelining",
            hint="give one of those, or nothing: passes are then told by their structure",
        )
    return Pipeline(stages=stages, schedule=schedule)


@dataclass(slots=True)
class Labels:
    """Whether any pass had to be named."""

    added: int = 0


@contextmanager
def label_passes(pipeline: Pipeline) -> Iterator[Labels]:
    """Name each pass of the stages while the context lasts; everything is as before afterwards."""
    labels = Labels()
    with ExitStack() as undo:
        for stage in pipeline.stages:
            for method, (kind, keyword) in PASSES.items():
                name = partial(_name_pass, int(stage.stage_index), kind, keyword)
                _wrap(stage, method, name, labels, undo)
        _wrap(pipeline.schedule, "_maybe_compute_loss", _name_loss, labels, undo)
        yield labels


def read_pass(
    kind: str, keyword: str, arguments: Sequence[Any], settings: Mapping[str, Any]
) -> tuple[str, int]:
    """Tell kind and microbatch, the first argument, which may be given by its name as well."""
    microbatch = settings[keyword] if keyword in settings else arguments[0]
    if kind == "B" and not settings.get(
        "full_backward", arguments[2] if len(arguments) > 2 else True
    ):
        kind = "I"
    return kind, microbatch


def _name_pass(stage: int, kind: str, keyword: str, *arguments: Any, **settings: Any) -> str:
    told, microbatch = read_pass(kind, keyword, arguments, settings)
    return f"PP:{stage}{told}{microbatch}"


def _name_loss(stage: Any, _output: Any, _targets: Any, mb_index: int, *_: Any, **__: Any) -> str:
    """Count the loss to the last stage's forward pass, which it is a part of."""
    return f"PP:{int(stage.stage_index)}F{mb_index}" if stage.is_last else ""


def _wrap(
    owner: Any, method: str, name: Callable[..., str], labels: Labels, undo: ExitStack
) -> None:
    original = getattr(owner, method, None)
    if original is None:
        return

    @wraps(original)
    def labelled(*arguments: Any, **settings: Any) -> Any:
        label = None
        # No `suppress` here: between a pass and the job stands nothing that could fail.
        try:  # noqa: SIM105
            label = _begin_label(sys._getframe(1), name, arguments, settings)  # noqa: SLF001
        except Exception:  # noqa: BLE001, S110 (a pass of another signature runs all the same)
            pass
        try:
            return original(*arguments, **settings)
        finally:
            if label is not None:
                labels.added += 1
                try:  # noqa: SIM105
                    label.__exit__(None, None, None)
                except Exception:  # noqa: BLE001, S110 (the pass has run)
                    pass

    if method in vars(owner):
        undo.callback(setattr, owner, method, original)
    else:
        undo.callback(delattr, owner, method)
    setattr(owner, method, labelled)


def _begin_label(
    caller: FrameType, name: Callable[..., str], arguments: Any, settings: Any
) -> record_function | None:
    """Begin the label of a pass; None where it needs none."""
    text = "" if _named_already(caller) else name(*arguments, **settings)
    if not text:
        return None
    label = record_function(text)
    label.__enter__()  # type: ignore[no-untyped-call]
    return label


def _named_already(frame: FrameType | None) -> bool:
    """Tell whether the loop that runs this pass puts it under a name of its own."""
    for _ in range(_FRAMES_BELOW_LOOP):
        if frame is None:
            return False
        if frame.f_code.co_name == _LOOP:
            return _records(frame.f_code)
        frame = frame.f_back
    return False


def _records(code: CodeType) -> bool:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return "record_function" in code.co_names or any(map(_records, inner))
