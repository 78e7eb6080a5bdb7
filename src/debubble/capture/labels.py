"""A schedule in → its passes named in the trace.

`PP:{stage}{F|B|I|W}{microbatch}`, as torch's runtime schedules write it. `Schedule1F1B` and other
hand-written loops name nothing; schedules that do are left alone, told by their own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from types import CodeType
from typing import Any

from torch.profiler import record_function

from debubble.capture.hooks import wrap
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
# The methods of a stage: which pass each runs, and what torch calls its microbatch.
PASSES = {
    "forward_one_chunk": ("F", "fwd_chunk_id"),
    "backward_one_chunk": ("B", "bwd_chunk_id"),
    "backward_weight_one_chunk": ("W", "bwd_chunk_id"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A schedule, and its stages on this rank."""

    stages: tuple[Any, ...] = ()
    schedule: Any = None

    def describe(self, split: tuple[int, ...] | None) -> dict[str, Any]:
        """Return what sidecars say of it; a schedule's subclass goes by the class it came from."""
        classes = () if self.schedule is None else type(self.schedule).__mro__
        names = filter(None, (SCHEDULE_NAMES.get(base.__name__) for base in classes))
        microbatches = getattr(self.schedule, "_n_microbatches", None)
        return {
            "schedule": next(names, None),
            "microbatches": microbatches if isinstance(microbatches, int) else None,
            "split": split,
        }


def find_pipeline(schedule: Any) -> Pipeline:
    """Return what the user's schedule is made of."""
    if schedule is None:
        return Pipeline()
    stages = tuple(getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)])
    if not all(hasattr(stage, "forward_one_chunk") for stage in stages):
        raise UsageError(
            f"{type(schedule).__name__} is no schedule of torch.distributed.pipelining",
            hint="give one of those, or nothing: passes are then told by their structure",
        )
    return Pipeline(stages=stages, schedule=schedule)


@contextmanager
def label_passes(pipeline: Pipeline) -> Iterator[None]:
    """Name each pass of the stages while the context lasts; everything is as before afterwards."""
    loop = getattr(type(pipeline.schedule), "_step_microbatches", None)
    with ExitStack() as undo:
        if loop is None or not _records(loop.__code__):
            for stage in pipeline.stages:
                for method, (kind, keyword) in PASSES.items():
                    name = partial(_name_pass, int(stage.stage_index), kind, keyword)
                    wrap(stage, method, partial(_labelled, name=name), undo)
            if pipeline.schedule is not None:
                loss = partial(_labelled, name=_name_loss)
                wrap(pipeline.schedule, "_maybe_compute_loss", loss, undo)
        yield


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
    kind, microbatch = read_pass(kind, keyword, arguments, settings)
    return f"PP:{stage}{kind}{microbatch}"


def _name_loss(stage: Any, _output: Any, _targets: Any, mb_index: int, *_: Any, **__: Any) -> str:
    """Count the loss to the last stage's forward pass, which it is a part of."""
    return f"PP:{int(stage.stage_index)}F{mb_index}" if stage.is_last else ""


def _labelled(original: Callable[..., Any], *, name: Callable[..., str]) -> Callable[..., Any]:
    @wraps(original)
    def labelled(*arguments: Any, **settings: Any) -> Any:
        label = None
        # No `suppress` here: between a pass and the job stands nothing that could fail.
        try:  # noqa: SIM105
            label = _begin_label(name(*arguments, **settings))
        except Exception:  # noqa: BLE001, S110 (a pass of another signature runs all the same)
            pass
        try:
            return original(*arguments, **settings)
        finally:
            if label is not None:
                try:  # noqa: SIM105
                    label.__exit__(None, None, None)
                except Exception:  # noqa: BLE001, S110 (the pass has run)
                    pass

    return labelled


def _begin_label(text: str) -> record_function | None:
    """Begin the label of a pass; None where it needs none."""
    if not text:
        return None
    label = record_function(text)
    label.__enter__()  # type: ignore[no-untyped-call]
    return label


def _records(code: CodeType) -> bool:
    """Tell whether the loop that runs the passes puts each under a name of its own."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return "record_function" in code.co_names or any(map(_records, inner))
