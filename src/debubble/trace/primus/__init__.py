"""Primus's dumps of passes (`pp_rank_3.json`) in → `OpTable` out: a file a rank, timed by Megatron.

    {"2": {"total": 3193.6, "memory": 102.3, "fwd_start": [0.04, 63.3, …], "fwd_end": […],
           "bwd_start": […], "bwd_end": […], "wgrad_start": […], "wgrad_end": […],
           "fwd_minibatch": [0, 1, …], "fwd_chunk": [0, 0, …], …}, "3": …}

Milliseconds from the start of each iteration, GiB reserved. `total` is when the rank was through
with the iteration: what it does after its last pass lies outside the batch. How many ranks and
chunks there are is in `config.json` beside them. Primus's own schedules write which microbatch and
chunk a pass is of, and weight gradients apart. Megatron's do not: there passes come in order, as
many microbatches as there are ranks through one chunk, then through the next, backward passes from
the last chunk on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from debubble.errors import Code, Gap, TraceError
from debubble.trace.format import Format, Reading, TraceFile, decode_json, rank_from_name
from debubble.trace.optable import RawTable, make_op_table
from debubble.trace.source import Limits, inflate

NAME = "Primus timers"
_GIB = 1024**3
_AFTER = "after the last pass"
_CONFIG = "put Primus's config.json, with pp_size and vp_size, beside them"
_AGAIN = "copy it again: Primus writes fwd_start, fwd_end, bwd_start, bwd_end"
_FIRST = re.compile(rb'^\s*\{\s*"\d+"\s*:\s*\{[^{}]*"(?:fwd|bwd)_(?:start|end)"\s*:\s*\[')


class _Iteration(msgspec.Struct):
    """One iteration of one rank."""

    fwd_start: list[float]
    fwd_end: list[float]
    bwd_start: list[float] = []
    bwd_end: list[float] = []
    wgrad_start: list[float] = []
    wgrad_end: list[float] = []
    fwd_minibatch: list[int] = []
    fwd_chunk: list[int] = []
    bwd_minibatch: list[int] = []
    bwd_chunk: list[int] = []
    wgrad_minibatch: list[int] = []
    wgrad_chunk: list[int] = []
    memory: float | None = None
    """GiB reserved."""
    total: float | None = None


class _Sizes(msgspec.Struct):
    """What `config.json` says of the job."""

    pp_size: int = 0
    """0: not known."""
    vp_size: int | None = None
    vpp_size: int | None = None
    """Its name in dumps of Primus's simulator."""


def recognise(file: str, prefix: bytes) -> TraceFile | None:
    """Tell a dump by its first iteration."""
    if not _FIRST.match(prefix):
        return None
    return TraceFile(file=file, format=NAME, rank=rank_from_name(file))


def read(known: TraceFile, limits: Limits) -> Reading:
    """Read the passes of one rank."""
    data = inflate(known.file, limits)
    iterations = decode_json(
        data, dict[str, _Iteration], known.file, problem="the dump cannot be read", hint=_AGAIN
    )
    rank = known.rank
    if rank is None:
        raise TraceError("no rank in its name", file=known.file, hint="call it pp_rank_3.json")
    sizes, gaps = _read_sizes(known.file, limits)
    rows = [
        row
        for step, iteration in iterations.items()
        for row in _rows(known.file, step, iteration, rank, sizes)
    ]
    if not rows:
        raise TraceError("the dump has no passes", file=known.file)
    table = RawTable.of_rows(rows, file=known.file, format=NAME, file_bytes=len(data))
    return Reading(table=make_op_table(table, gaps))


def _rows(
    file: str, step: str, iteration: _Iteration, rank: int, sizes: _Sizes
) -> Iterator[dict[str, Any]]:
    """Yield the passes of an iteration, and what comes after the last of them."""
    ranks, chunks = sizes.pp_size, sizes.vp_size or sizes.vpp_size or 1
    about: dict[str, Any] = {"step": step, "rank": rank, "stage": rank}
    if iteration.memory is not None:
        about["memory_bytes"] = round(iteration.memory * _GIB)
    backward = "input-grad" if iteration.wgrad_start else "backward"
    for op, key in (("forward", "fwd"), (backward, "bwd"), ("weight-grad", "wgrad")):
        starts, ends, microbatches, held = (
            getattr(iteration, f"{key}_{what}") for what in ("start", "end", "minibatch", "chunk")
        )
        if len(starts) != len(ends):
            message = f"iteration {step} begins {len(starts)} {op} passes and ends {len(ends)}"
            raise TraceError(message, file=file, hint=_AGAIN)
        if not {len(microbatches), len(held)} <= {0, len(starts)}:
            message = f"iteration {step} does not name each of its {len(starts)} {op} passes"
            raise TraceError(message, file=file, hint=_AGAIN)
        if max(held, default=0) and not ranks:
            message = "several chunks a rank, and no config.json says of how many ranks"
            raise TraceError(message, file=file, hint=_CONFIG)
        for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
            chunk, microbatch = 0, number
            if chunks > 1:
                group, within = divmod(number, ranks * chunks)
                chunk, microbatch = divmod(within, ranks)
                chunk = chunk if op == "forward" else chunks - 1 - chunk
                microbatch += group * ranks
            yield {
                **about,
                "stage": (held[number] if held else chunk) * ranks + rank,
                "microbatch": microbatches[number] if microbatches else microbatch,
                "op": op,
                "start_ms": start,
                "duration_ms": end - start,
            }
    ended = max(iteration.fwd_end + iteration.bwd_end + iteration.wgrad_end, default=0.0)
    after = (iteration.total or ended) - ended
    if after > 0:
        yield {**about, "op": _AFTER, "start_ms": ended, "duration_ms": after}


def _read_sizes(file: str, limits: Limits) -> tuple[_Sizes, tuple[Gap, ...]]:
    """Read `config.json` beside a dump; without it a rank is taken to hold one stage."""
    folder = re.split(r"[^/\\]*$", file, maxsplit=1)[0]
    try:
        return msgspec.json.decode(inflate(f"{folder}config.json", limits), type=_Sizes), ()
    except (TraceError, msgspec.DecodeError, UnicodeDecodeError):
        gap = Gap(
            code=Code.STAGES_ASSUMED,
            message="no config.json beside the dumps: a rank is taken to hold one stage",
            hint=_CONFIG,
        )
        return _Sizes(), (gap,)


FORMAT = Format(
    name=NAME,
    position=35,
    in_names=("pp_rank_",),
    recognise=recognise,
    read=read,
)
