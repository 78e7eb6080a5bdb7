"""A trace out of a digest in → nothing, where it is what a reader promises; else it is refused.

The checksum tells damage. This is for digests that were made to mislead: whatever comes after the
readers follows indices, adds times and counts ranks without looking again.
"""

from __future__ import annotations

import math
from dataclasses import fields
from enum import IntEnum

from debubble.trace.columns import (
    MOST_RANKS,
    UNKNOWN,
    KernelKind,
    MemoryDevice,
    Operation,
    RankTrace,
    Table,
)
from debubble.trace.digest.archive import damaged
from debubble.trace.digest.tables import check_range
from debubble.trace.sidecar import Sidecar

TABLES = ("kernels", "launches", "operators", "annotations", "memory", "cpu_operators")
_KINDS: dict[str, type[IntEnum]] = {
    "kind": KernelKind,
    "operation": Operation,
    "device_type": MemoryDevice,
}


def check_trace(trace: RankTrace, file: str) -> None:
    """Refuse what no reader returns."""
    counts = (trace.header.rank, trace.header.world_size)
    if any(count is not None and not 0 <= count < MOST_RANKS for count in counts):
        raise damaged(file, "it has an absurd number of ranks")
    if trace.events < 0 or trace.inflated_bytes < 0:
        raise damaged(file, "it has a negative size")
    _check_texts(trace, file)
    sizes = {
        "name": len(trace.names),
        "dtype": len(trace.names),
        "shape": len(trace.names),
        "thread": len(trace.threads),
        "group": len(trace.groups),
        "launch": len(trace.launches),
        "kernel": len(trace.kernels),
    }
    for name in TABLES:
        table: Table = getattr(trace, name)
        if len(table):
            _check_table(table, name, sizes, file)


def check_sidecar(sidecar: Sidecar, file: str) -> None:
    """Refuse numbers that the reader of sidecars passes over: they are divided by."""
    times = [*sidecar.steps.before_s, *sidecar.steps.profiled_s, *sidecar.steps.after_s]
    medians = (sidecar.steps.unprofiled_median_s, sidecar.steps.profiled_median_s)
    times += [time for time in medians if time is not None]
    values = [getattr(sidecar, one.name) for one in fields(sidecar)]
    counts = [value for value in values if isinstance(value, int)]
    counts += [*sidecar.held_stages, *sidecar.split, *sidecar.context_lengths]
    overhead = sidecar.steps.overhead_fraction
    is_sound = all(time > 0 and math.isfinite(time) for time in times)
    is_sound &= all(count >= 0 for count in counts)
    if not is_sound or (overhead is not None and not math.isfinite(overhead)):
        raise damaged(file, "its sidecar has absurd numbers")


def _check_table(table: Table, name: str, sizes: dict[str, int], file: str) -> None:
    for column, size in sizes.items():
        values = getattr(table, column, None)
        if values is not None:
            check_range(values, UNKNOWN, size - 1, file, f"{name}.{column}")
    for column, kind in _KINDS.items():
        values = getattr(table, column, None)
        if values is not None:
            check_range(values, 0, max(kind), file, f"{name}.{column}")
    starts = table.start_ns
    durations = getattr(table, "duration_ns", None)
    is_sound = bool((starts[1:] >= starts[:-1]).all())
    if durations is not None:
        is_sound &= int(durations.min()) >= 0 and bool((starts + durations >= starts).all())
    if not is_sound:
        raise damaged(file, f"the times of its {name} contradict each other")


def _check_texts(trace: RankTrace, file: str) -> None:
    """Refuse halves of characters, which nobody can print; file names alone may hold them."""
    header = trace.header
    texts = [*trace.names, trace.format, header.host, header.backend]
    texts += [part for thread in trace.threads for part in (thread.identity, thread.name)]
    texts += [part for group in trace.groups for part in (group.name, group.description)]
    texts += [part for group in header.groups for part in (group.name, group.description)]
    texts += [device.name for device in header.devices]
    texts += [part for pair in header.versions for part in pair]
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise damaged(file, "a name in it is no text") from error
