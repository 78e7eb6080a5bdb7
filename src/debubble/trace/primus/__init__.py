"""Primus's dumps of passes (`pp_rank_3.json`) in → `OpTable` out: a file a rank, timed by Megatron.

    {"2": {"total": 3193.6, "memory": 102.3, "fwd_start": [0.04, 63.3, …], "fwd_end": […],
           "bwd_start": […], "bwd_end": […]}, "3": …}

Milliseconds from the start of each iteration, GiB reserved. `total` is when the rank was through
with the iteration: what it does after its last pass lies outside the batch. How many ranks and
chunks there are is in `config.json` beside them; passes come in Megatron's order: as many
microbatches as there are ranks go through one chunk, then through the next, backward passes from
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
_FIRST = re.compile(rb'^\s*\{\s*"\d+"\s*:\s*\{[^{}]*"(?:fwd|bwd)_(?:start|end)"\s*:\s*\[')


class _Iteration(msgspec.Struct):
    """One iteration of one rank."""

    fwd_start: list[float]
    fwd_end: list[float]
    bwd_start: list[float] = []
    bwd_end: list[float] = []
    memory: float | None = None
    total: float | None = None


class _Sizes(msgspec.Struct):
    """What `config.json` says of the job."""

    pp_size: int
    vp_size: int | None = 1


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
    ranks, chunks = (sizes.pp_size, sizes.vp_size or 1) if sizes else (0, 1)
    rows = list(_rows(known.file, said, rank, (ranks, chunks)))
    if not rows:
        raise TraceError("the dump has no passes", file=known.file)
    table = table_of_passes(rows, file=known.file, format=NAME, inflated_bytes=len(data), gaps=gaps)
    return Reading(table=table)


def _rows(
    file: str, said: dict[str, _Iteration], rank: int, sizes: tuple[int, int]
) -> Iterator[dict[str, int | str]]:
    """Yield the passes of all iterations; `sizes` are ranks, and chunks of each."""
    ranks, chunks = sizes
    for name, iteration in said.items():
        if not name.isdecimal() or len(name) > _LONGEST:
            raise TraceError(f"{name[:40]!r} is no iteration", file=file)
        known = iteration.memory is not None and isfinite(iteration.memory)
        memory = round((iteration.memory or 0.0) * _GIB) if known else -1
        for op, starts, ends in (
            ("forward", iteration.fwd_start, iteration.fwd_end),
            ("backward", iteration.bwd_start, iteration.bwd_end),
        ):
            if len(starts) != len(ends):
                message = f"iteration {name} begins {len(starts)} {op} passes and ends {len(ends)}"
                raise TraceError(message, file=file, hint="copy it again: it is damaged")
            if not all(map(isfinite, (*starts, *ends))):
                raise TraceError(f"iteration {name} has a time that is none", file=file)
            for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
                chunk, microbatch = 0, number
                if chunks > 1:
                    group, within = divmod(number, ranks * chunks)
                    chunk, microbatch = divmod(within, ranks)
                    chunk = chunks - 1 - chunk if op == "backward" else chunk
                    microbatch += group * ranks
                yield {
                    "step": int(name),
                    "rank": rank,
                    "stage": chunk * ranks + rank,
                    "microbatch": microbatch,
                    "op": op,
                    "start": round(start * _NS_PER_MS),
                    "duration": round((end - start) * _NS_PER_MS),
                    "memory": memory,
                }
        ended = max(iteration.fwd_end + iteration.bwd_end, default=0.0)
        total = ended if iteration.total is None else iteration.total
        if not isfinite(total):
            raise TraceError(f"iteration {name} has a time that is none", file=file)
        if total > ended:
            yield {
                "step": int(name),
                "rank": rank,
                "stage": rank,
                "op": _AFTER,
                "start": round(ended * _NS_PER_MS),
                "duration": round((total - ended) * _NS_PER_MS),
            }


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
            hint="put Primus's config.json, with pp_size and vp_size, beside them",
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
