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
from math import isfinite

import msgspec

from debubble.errors import Code, Gap, TraceError
from debubble.trace.format import Format, Reading, TraceFile, rank_from_name
from debubble.trace.optable import table_of_passes
from debubble.trace.source import Limits, Source

NAME = "Primus timers"
_LONGEST = 9
_NS_PER_MS, _GIB = 1_000_000, 1024**3
_AFTER = "after the last pass"
_CONFIG = "put Primus's config.json, with pp_size and vp_size, beside them"
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
    total: float | None = None


class _Sizes(msgspec.Struct):
    """What `config.json` says of the job."""

    pp_size: int
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
    data = b"".join(Source(known.file, limits).pieces())
    try:
        said = msgspec.json.decode(data, type=dict[str, _Iteration])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        hint = "copy it again: Primus writes fwd_start, fwd_end, bwd_start, bwd_end"
        raise TraceError(f"the dump cannot be read: {error}", file=known.file, hint=hint) from error
    rank = known.rank
    if rank is None:
        raise TraceError("no rank in its name", file=known.file, hint="call it pp_rank_3.json")
    sizes, gaps = _read_sizes(known.file, limits)
    ranks, chunks = (sizes.pp_size, sizes.vp_size or sizes.vpp_size or 1) if sizes else (0, 1)
    rows = list(_rows(known.file, said, rank, (ranks, chunks)))
    if not rows:
        raise TraceError("the dump has no passes", file=known.file)
    table = table_of_passes(rows, file=known.file, format=NAME, inflated_bytes=len(data), gaps=gaps)
    return Reading(table=table)


def _rows(
    file: str, said: dict[str, _Iteration], rank: int, sizes: tuple[int, int]
) -> Iterator[dict[str, int | str]]:
    """Yield the passes of all iterations; `sizes` are ranks, and chunks of each."""
    for name, iteration in said.items():
        if not name.isdecimal() or len(name) > _LONGEST:
            raise TraceError(f"{name[:40]!r} is no iteration", file=file)
        known = iteration.memory is not None and isfinite(iteration.memory)
        memory = round((iteration.memory or 0.0) * _GIB) if known else -1
        about: dict[str, int | str] = {"step": int(name), "rank": rank}
        backward = "input-grad" if iteration.wgrad_start else "backward"
        for op, key in (("forward", "fwd"), (backward, "bwd"), ("weight-grad", "wgrad")):
            for chunk, passed in _passes(file, f"iteration {name}", iteration, (op, key), sizes):
                yield {**about, **passed, "stage": chunk * sizes[0] + rank, "memory": memory}
        ended = max(iteration.fwd_end + iteration.bwd_end + iteration.wgrad_end, default=0.0)
        total = ended if iteration.total is None else iteration.total
        if not isfinite(total):
            raise TraceError(f"iteration {name} has a time that is none", file=file)
        if total > ended:
            yield {
                **about,
                "stage": rank,
                "op": _AFTER,
                "start": round(ended * _NS_PER_MS),
                "duration": round((total - ended) * _NS_PER_MS),
            }


def _passes(
    file: str, name: str, iteration: _Iteration, kind: tuple[str, str], sizes: tuple[int, int]
) -> Iterator[tuple[int, dict[str, int | str]]]:
    """Yield the chunk of each pass of one kind, and which microbatch and when."""
    (op, key), (ranks, chunks) = kind, sizes
    starts, ends, microbatches, held = (
        getattr(iteration, f"{key}_{what}") for what in ("start", "end", "minibatch", "chunk")
    )
    again = "copy it again: it is damaged"
    if len(starts) != len(ends):
        message = f"{name} begins {len(starts)} {op} passes and ends {len(ends)}"
        raise TraceError(message, file=file, hint=again)
    if not {len(microbatches), len(held)} <= {0, len(starts)}:
        message = f"{name} does not name each of its {len(starts)} {op} passes"
        raise TraceError(message, file=file, hint=again)
    if not all(map(isfinite, (*starts, *ends))):
        raise TraceError(f"{name} has a time that is none", file=file)
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
        yield (
            held[number] if held else chunk,
            {
                "microbatch": microbatches[number] if microbatches else microbatch,
                "op": op,
                "start": round(start * _NS_PER_MS),
                "duration": round((end - start) * _NS_PER_MS),
            },
        )


def _read_sizes(file: str, limits: Limits) -> tuple[_Sizes | None, tuple[Gap, ...]]:
    """Read `config.json` beside a dump; without it a rank is taken to hold one stage."""
    folder = re.split(r"[^/\\]*$", file, maxsplit=1)[0]
    try:
        content = b"".join(Source(f"{folder}config.json", limits).pieces())
        return msgspec.json.decode(content, type=_Sizes), ()
    except (TraceError, msgspec.DecodeError, UnicodeDecodeError):
        gap = Gap(
            code=Code.STAGES_ASSUMED,
            message="no config.json beside the dumps: a rank is taken to hold one stage",
            hint=_CONFIG,
        )
        return None, (gap,)


FORMAT = Format(
    name=NAME,
    a_file="a dump of Primus's timers",
    position=35,
    in_names=("pp_rank_",),
    sign=(_FIRST,),
    recognise=recognise,
    read=read,
)
