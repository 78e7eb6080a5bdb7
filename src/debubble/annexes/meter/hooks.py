"""A job's frameworks and its torch.distributed in → passes and messages told to a recorder.

Passes: torch.distributed.pipelining's stages, Megatron's schedules, DeepSpeed's engine. Messages:
what goes through a process group outside of passes, whoever sends it. Each hook stands around one
function, does what it did before, and is taken away when the meter ends.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, wraps
from types import ModuleType
from typing import Any, NamedTuple

import torch.distributed as dist

from debubble.annexes.meter.record import (
    BYTES,
    END,
    MICROBATCH,
    OP,
    PEER,
    QUEUE,
    STAGE,
    START,
    Recorder,
    Row,
)
from debubble.capture.hooks import after_import, wrap
from debubble.capture.labels import PASSES as METHODS
from debubble.capture.labels import read_pass

_STAGES = "torch.distributed.pipelining.stage"
_SCHEDULES = "torch.distributed.pipelining.schedules"
_AUTOGRAD = "torch.autograd"
_OPTIMIZER = "torch.optim.optimizer"
_MEGATRON = "megatron.core.pipeline_parallel.schedules"
_DEEPSPEED = "deepspeed.runtime.pipe.engine"
# Messages that nobody waits for, and outputs that nobody differentiates, are forgotten beyond this.
_MOST_OPEN = 4096
_NO_MICROBATCH = -1
_Call = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in its job this rank stands."""

    rank: int
    ranks: tuple[int, ...]
    """Of its pipeline, first to last."""

    @property
    def pipeline(self) -> int:
        """A number that no other pipeline of the job has."""
        return min(self.ranks)


def find_place(group: Any) -> Place:
    """Ask torch.distributed for a rank's place in a group; alone, a job is one rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return Place(rank=0, ranks=(0,))
    ranks = dist.get_process_group_ranks(group) if group is not None else None
    return Place(rank=dist.get_rank(), ranks=tuple(ranks or range(dist.get_world_size())))


class _Way(NamedTuple):
    """Where messages of a group to or from a peer go."""

    seen_from: Place
    rank: int
    op: str | None
    """None: to no rank of the pipeline."""


def _find_way(group: Any, peer: int, place: Place, is_send: bool) -> _Way:
    rank = tuple(dist.get_process_group_ranks(group))[peer]
    if rank not in place.ranks:
        return _Way(place, rank, None)
    onwards = place.ranks.index(rank) > place.ranks.index(place.rank)
    op = ("forward" if onwards == is_send else "backward") + ("-send" if is_send else "-recv")
    return _Way(place, rank, op)


class Harmless:
    """Around the meter's own code in the job: what fails in it is said, and the job goes on.

    Passes of torch and messages, of which a step has thousands, have plain `try` in its place.
    """

    def __init__(self, fail: Callable[[Exception], None]) -> None:
        self._fail = fail

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        self._fail(error)
        return True


class Hooks:
    """All that stands around a job's functions, and what it knows between two calls."""

    def __init__(self, recorder: Recorder, fail: Callable[[Exception], None]) -> None:
        self.recorder = recorder
        self.fail = fail
        self.harmless = Harmless(fail)
        self.place: Place | None = None
        self.stages: set[int] = set()
        """Those of which a pass was seen."""
        self._thread = threading.get_ident()
        self._undo = ExitStack()
        self._ways: dict[tuple[int, int, bool], _Way] = {}
        """Of each group, peer and direction: asked for once."""
        self._batch: list[Row] | None = None
        self._waiting: dict[int, tuple[weakref.ref[Any], list[Row]]] = {}
        self._counted: tuple[int, Counter[tuple[str, int]]] = (-1, Counter())
        self._outputs: dict[int, tuple[int, int]] = {}

    def install(self) -> None:
        """Stand around what is loaded, and around what the job loads later."""
        self._undo.callback(self._waiting.clear)
        hooks = {
            "torch.distributed.distributed_c10d": self._hook_messages,
            _STAGES: self._hook_stages,
            _SCHEDULES: self._hook_loss,
            _AUTOGRAD: self._hook_autograd,
            _OPTIMIZER: self._hook_optimizers,
            _MEGATRON: self._hook_megatron,
            _DEEPSPEED: self._hook_deepspeed,
        }
        after_import(hooks, self._undo)

    def remove(self) -> None:
        """Leave the job as it was before."""
        self._undo.close()

    # Passes

    def begin_pass(self, kind: str, stage: int, microbatch: int | None) -> Row | None:
        """Begin a pass of a loop that says its passes itself."""
        self.stages.add(stage)
        number = self._count(kind, stage) if microbatch is None else microbatch
        return self.recorder.begin(kind, stage, number)

    def _hook_stages(self, module: ModuleType) -> None:
        base = module._PipelineStageBase  # noqa: SLF001 (no public class has all stages)
        for method, (kind, keyword) in METHODS.items():
            around = partial(self._around_stage_pass, kind=kind, keyword=keyword)
            wrap(base, method, around, self._undo)
        wrap(base, "forward_maybe_with_nosync", partial(self._around_work, kinds="F"), self._undo)

    def _around_stage_pass(self, original: _Call, *, kind: str, keyword: str) -> _Call:
        """Stand around a pass as `_wrap_pass` does, in one call: between passes caches are cold."""
        recorder, stages = self.recorder, self.stages

        @wraps(original)
        def run_pass(stage: Any, *given: Any, **named: Any) -> Any:
            row = None
            try:
                if given and kind != "B":
                    told, microbatch = kind, given[0]
                else:
                    told, microbatch = read_pass(kind, keyword, given, named)
                index = stage.stage_index
                if index not in stages:
                    stages.add(index)
                    if self.place is None:
                        self.place = find_place(getattr(stage, "group", None))
                row = recorder.begin(told, index, microbatch, tells=True)
            except Exception as error:  # noqa: BLE001 (the pass must run)
                self.fail(error)
            try:
                return original(stage, *given, **named)
            finally:
                if row is not None:
                    recorder.inside = recorder.telling = None
                    # Weight gradients are added up after autograd's work, still in their pass.
                    if told == "W" or row[START] is None or row[END] is None:
                        try:
                            row[END] = recorder.mark_again(row[END])
                            recorder.end(row)
                        except Exception as error:  # noqa: BLE001 (the pass has run)
                            self.fail(error)

        return run_pass

    def _hook_loss(self, module: ModuleType) -> None:
        """Count the loss to the last stage's forward pass, which it is a part of."""
        recorder = self.recorder

        def around(original: _Call) -> _Call:
            @wraps(original)
            def compute_loss(schedule: Any, stage: Any, *given: Any, **named: Any) -> Any:
                result = original(schedule, stage, *given, **named)
                with self.harmless:
                    row = recorder.last
                    is_its_pass = row and row[OP] == "F" and row[STAGE] == stage.stage_index
                    if row and is_its_pass and stage.is_last:
                        row[END] = recorder.mark_again(row[END])
                return result

            return compute_loss

        wrap(module._PipelineSchedule, "_maybe_compute_loss", around, self._undo)  # noqa: SLF001

    def _hook_autograd(self, module: ModuleType) -> None:
        """Time a backward pass where autograd works: around it, frameworks walk graphs."""
        wrap(module, "_engine_run_backward", partial(self._around_work, kinds="BIW"), self._undo)

    def _around_work(self, original: _Call, *, kinds: str) -> _Call:
        recorder = self.recorder

        @wraps(original)
        def work(*given: Any, **named: Any) -> Any:
            row = recorder.telling
            if row is None or row[OP] not in kinds:
                return original(*given, **named)
            try:
                if row[START] is None:
                    row[START] = recorder.mark()
            except Exception as error:  # noqa: BLE001 (the pass must run)
                self.fail(error)
            result = original(*given, **named)
            try:
                used = row[END]
                row[END] = recorder.mark() if used is None else recorder.mark_again(used)
            except Exception as error:  # noqa: BLE001 (the pass has run)
                self.fail(error)
            return result

        return work

    def _hook_megatron(self, module: ModuleType) -> None:
        """Tell passes by Megatron's two functions; a backward pass by the output it begins with."""

        def tell_forward(*_: Any, **named: Any) -> tuple[str, int, int]:
            stage = self._stage_in_megatron(named.get("vp_stage"))
            return "F", stage, self._count("F", stage)

        def tell_backward(_input: Any, output: Any, *_: Any, **__: Any) -> tuple[str, int, int]:
            known = self._outputs.pop(id(_first_tensor(output)), None)
            if known is None:
                stage = self._stage_in_megatron(None)
                known = stage, self._count("B", stage)
            return "B", *known

        def remember(row: Row, result: Any) -> None:
            if len(self._outputs) > _MOST_OPEN:
                self._outputs.clear()
            tensor = _first_tensor(result)
            if tensor is not None:
                self._outputs[id(tensor)] = row[STAGE], row[MICROBATCH]

        self._wrap_pass(module, "forward_step", tell_forward, after=remember)
        self._wrap_pass(module, "backward_step", tell_backward)

    def _stage_in_megatron(self, chunk: int | None) -> int:
        state = sys.modules["megatron.core.parallel_state"]
        if self.place is None:
            self.place = find_place(state.get_pipeline_model_parallel_group())
        if chunk is None:
            chunk = state.get_virtual_pipeline_model_parallel_rank()
        ranks = len(self.place.ranks)
        return (chunk or 0) * ranks + self.place.ranks.index(self.place.rank)

    def _hook_deepspeed(self, module: ModuleType) -> None:
        """Tell passes by DeepSpeed's instructions, which its engine looks up in a table by class.

        Nobody calls the methods by name: standing around those would see nothing.
        """

        def tell(kind: str, engine: Any) -> tuple[str, int, int]:
            if self.place is None:
                self.place = find_place(engine.grid.get_pipe_parallel_group())
            stage = int(engine.stage_id)
            return kind, stage, self._count(kind, stage)

        def around(carried_out: dict[type, _Call]) -> dict[type, _Call]:
            kinds = {"ForwardPass": "F", "BackwardPass": "B"}
            return {
                instruction: self._timed(
                    call, lambda engine, *_, _kind=kind, **__: tell(_kind, engine)
                )
                if (kind := kinds.get(instruction.__name__))
                else call
                for instruction, call in carried_out.items()
            }

        wrap(module.PipelineEngine, "_INSTRUCTION_MAP", around, self._undo)

    def _hook_optimizers(self, module: ModuleType) -> None:
        """Time the optimizer: it lies outside the pipeline's window, and inside the step."""
        begun: list[Row] = []

        def before(*_: Any) -> None:
            with self.harmless:
                row = self.recorder.begin("optimizer", min(self.stages, default=0), _NO_MICROBATCH)
                begun[:] = [] if row is None else [row]

        def after(*_: Any) -> None:
            with self.harmless:
                while begun:
                    self.recorder.end(begun.pop())

        self._undo.callback(module.register_optimizer_step_pre_hook(before).remove)
        self._undo.callback(module.register_optimizer_step_post_hook(after).remove)

    def _count(self, kind: str, stage: int) -> int:
        """Count passes of a stage and kind through the step, where nothing else tells."""
        step, counts = self._counted
        if step != self.recorder.number:
            step, counts = self._counted = self.recorder.number, Counter()
        counts[kind, stage] += 1
        return counts[kind, stage] - 1

    def _wrap_pass(
        self,
        owner: Any,
        method: str,
        tell: Callable[..., tuple[str, int, int]],
        after: Callable[[Row, Any], None] | None = None,
    ) -> None:
        wrap(owner, method, lambda original: self._timed(original, tell, after), self._undo)

    def _timed(
        self,
        original: _Call,
        tell: Callable[..., tuple[str, int, int]],
        after: Callable[[Row, Any], None] | None = None,
    ) -> _Call:
        """Return a call that runs a pass and marks its begin and end."""

        @wraps(original)
        def run_pass(*given: Any, **named: Any) -> Any:
            row: Row | None = None
            with self.harmless:
                kind, stage, microbatch = tell(*given, **named)
                self.stages.add(stage)
                row = self.recorder.begin(kind, stage, microbatch)
            try:
                result = original(*given, **named)
            finally:
                if row is not None:
                    with self.harmless:
                        self.recorder.end(row)
            if row is not None and after is not None:
                with self.harmless:
                    after(row, result)
            return result

        return run_pass

    # Messages

    def _hook_messages(self, module: ModuleType) -> None:
        group, work = module.ProcessGroup, module.Work
        wrap(group, "send", partial(self._around_post, is_send=True), self._undo)
        wrap(group, "recv", partial(self._around_post, is_send=False), self._undo)
        wrap(group, "_start_coalescing", self._around_start, self._undo)
        wrap(group, "_end_coalescing", self._around_end, self._undo)
        wrap(work, "wait", self._around_wait, self._undo)

    def _around_post(self, original: _Call, *, is_send: bool) -> _Call:
        recorder = self.recorder

        def post(group: Any, tensors: Sequence[Any], peer: int, *given: Any, **named: Any) -> Any:
            row = None
            try:
                row = self._post(group, tensors[0], peer, is_send=is_send)
            except Exception as error:  # noqa: BLE001 (the message must go)
                self.fail(error)
            work = original(group, tensors, peer, *given, **named)
            if row is not None:
                try:
                    if is_send and recorder.on_host:
                        row[END] = recorder.mark()  # it has left; when it is asked for says nothing
                    elif self._batch is not None:
                        self._batch.append(row)
                    elif work is not None:
                        self._await(work, [row])
                except Exception as error:  # noqa: BLE001 (the message is gone)
                    self.fail(error)
            return work

        return post

    def _post(self, group: Any, tensor: Any, peer: int, *, is_send: bool) -> Row | None:
        recorder, place = self.recorder, self.place
        if recorder.inside is not None or place is None or threading.get_ident() != self._thread:
            return None
        way = self._ways.get((id(group), peer, is_send))
        if way is None or way.seen_from is not place:
            way = self._ways[id(group), peer, is_send] = _find_way(group, peer, place, is_send)
        if way.op is None:
            return None
        row = recorder.begin(way.op, min(self.stages, default=0), _NO_MICROBATCH)
        if row is not None:
            row[BYTES] = tensor.nbytes
            row[PEER] = way.rank
            row[QUEUE] = id(group), (None if self._batch is not None else way.rank)
        return row

    def _await(self, work: Any, rows: list[Row]) -> None:
        if len(self._waiting) > _MOST_OPEN:
            self._waiting.clear()
        self._waiting[id(work)] = weakref.ref(work), rows

    def _around_start(self, original: _Call) -> _Call:
        def start_coalescing(group: Any, *given: Any, **named: Any) -> Any:
            self._batch = []
            return original(group, *given, **named)

        return start_coalescing

    def _around_end(self, original: _Call) -> _Call:
        def end_coalescing(group: Any, *given: Any, **named: Any) -> Any:
            work = original(group, *given, **named)
            rows, self._batch = self._batch, None
            if rows and work is not None:
                with self.harmless:
                    self._await(work, rows)
            return work

        return end_coalescing

    def _around_wait(self, original: _Call) -> _Call:
        waiting, recorder = self._waiting, self.recorder

        def wait(work: Any, *given: Any, **named: Any) -> Any:
            rows = mark = None
            if waiting:
                try:
                    held = waiting.pop(id(work), None)
                    if held is not None and held[0]() is work:
                        rows = held[1]
                        if recorder.last is not rows[-1]:
                            # Asked for after other things: when a message left is not known now.
                            rows = [row for row in rows if not row[OP].endswith("-send")]
                        if rows and not recorder.on_host:
                            mark = recorder.mark_arrival(work, original)
                except Exception as error:  # noqa: BLE001 (the job waits all the same)
                    self.fail(error)
            result = original(work, *given, **named)
            if rows:
                try:
                    mark = recorder.mark() if mark is None else mark
                    for row in rows:
                        row[END] = mark
                except Exception as error:  # noqa: BLE001 (the job has waited)
                    self.fail(error)
            return result

        return wait


def _first_tensor(parts: Any) -> Any:
    """Return the first tensor of what a pass returned, however it is wrapped."""
    while isinstance(parts, list | tuple):
        if not parts:
            return None
        parts = parts[0]
    return parts
