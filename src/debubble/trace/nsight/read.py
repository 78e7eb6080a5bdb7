"""Nsight Systems exports (`nsys export --type sqlite`): one `RankTrace` per process with kernels.

One file may hold all ranks of a node. The tables are read once (`tables.py`), then cut by
process; NVTX tells what NCCL's kernels are for (`nccl.py`).
"""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from debubble.errors import Code, Gap, NotATrace, TraceError
from debubble.trace.columns import I64, UNKNOWN, Device, Header, RankTrace
from debubble.trace.nsight.process import Part, process_of, read_process
from debubble.trace.nsight.tables import (
    GRAPHS,
    KERNELS,
    STRINGS,
    Export,
    HostSpans,
    Tables,
    read_tables,
)
from debubble.units import show_count

if TYPE_CHECKING:
    from numpy.typing import NDArray

_EXPORT_HINT: Final = (
    "export the report with `nsys export --type sqlite report.nsys-rep` and give that file"
)
_PROFILE_HINT: Final = "profile with `nsys profile -t cuda,nvtx`"
_PID_MASK: Final = 0xFFFFFF
# Any of these beside StringIds makes a database an export, whatever was traced.
_MARKS: Final = re.compile(
    r"^(?:CUPTI_ACTIVITY_KIND_|NVTX_EVENTS$|TARGET_INFO_|META_DATA_CAPTURE$)"
)
_RANK: Final = re.compile(r'^RANK="?(\d{1,6})"?$')
# Sums of a base and a stamp stay inside int64; the year 2096.
_LAST_BASE: Final = 4 * 10**18
# No name is so long; a text of a broken file may be a gigabyte.
_LONGEST_VALUE: Final = 16 * 1024 * 1024
# A node has some ten. Each is cut out of the whole file, so their number must have a bound.
_MOST_PROCESSES: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    """A process with kernels, or in old exports a device: what becomes one rank."""

    key: int
    rows: NDArray[np.bool_]
    """Its rows of the device work."""
    devices: tuple[int, ...]
    order: tuple[int, int]
    """By the first device as the host counts them, then by process."""

    @property
    def pid(self) -> int:
        return self.key & _PID_MASK


def read_nsight(path: str) -> tuple[RankTrace, ...]:
    """Read an export on this machine's disk; nothing is written, neither to it nor beside it."""
    uri = f"{Path(path).absolute().as_uri()}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
            return _read(Export(connection, path), path)
    except (sqlite3.Error, UnicodeDecodeError) as error:  # its messages may quote broken names
        message = f"the database cannot be read: {error}"
        raise TraceError(message, file=path, hint=f"{_EXPORT_HINT} again") from error


def _read(export: Export, path: str) -> tuple[RankTrace, ...]:
    _check(export, path)
    tables = read_tables(export)
    devices = _read_devices(export)
    processes = _find_processes(tables, devices, path)
    ranks, assumed = _assign_ranks(export, processes, path)
    base = _read_base(export)
    gaps = (*assumed, *_no_clock(base, path))
    thread_names = _read_thread_names(export)
    host, versions = _read_host(export), _read_versions(export)
    traces = []
    for process, rank in zip(processes, ranks, strict=True):
        described = (replace(_describe(devices, process.pid, d), index=d) for d in process.devices)
        header = Header(
            rank=rank,
            devices=tuple(described),
            host=host,
            base_time_ns=base or 0,
            versions=versions,
        )
        part = Part(
            file=path,
            key=process.key,
            rows=process.rows,
            header=header,
            thread_names=thread_names,
            file_bytes=Path(path).stat().st_size,
        )
        traces.append(read_process(part, tables, gaps))
        gaps = ()  # what concerns the whole file is said once
    return tuple(traces)


def _check(export: Export, path: str) -> None:
    if not export.has(STRINGS, "id", "value") or not any(map(_MARKS.match, export.tables)):
        message = "a SQLite database, but no export of Nsight Systems"
        raise NotATrace(message, file=path, hint=_EXPORT_HINT)
    if not export.count(KERNELS) and not export.count(GRAPHS):
        raise TraceError("the export holds no CUDA kernels", file=path, hint=_PROFILE_HINT)


def _check_number(identities: I64, path: str) -> None:
    if len(identities) > _MOST_PROCESSES:
        message = f"the export claims {show_count(len(identities))} processes or devices"
        raise TraceError(message, file=path, hint=f"{_EXPORT_HINT} again")


def _find_processes(
    tables: Tables, devices: dict[tuple[int, int], Device], path: str
) -> tuple[_Process, ...]:
    """Cut the device work by process; where an old export does not name it, by device."""
    work = tables.work
    for identities in (work.process, work.device, process_of(tables.calls.thread)):
        _check_number(np.unique(identities), path)
    found = []
    known = bool(np.any(work.process[work.is_kernel] != UNKNOWN))
    labels = process_of(work.process) if known else work.device
    for label in np.unique(labels[work.is_kernel]).tolist():
        rows = labels == label
        key = label if known else _owner(work.correlation[rows], work.start[rows], tables.calls)
        used = tuple(np.unique(work.device[rows & work.is_kernel]).tolist())
        order = (_describe(devices, key & _PID_MASK, used[0]).index, key)
        found.append(_Process(key=key, rows=rows, devices=used, order=order))
    return tuple(sorted(found, key=lambda process: process.order))


def _owner(correlation: I64, start: I64, calls: HostSpans) -> int:
    """Find the process whose calls explain the most kernels: launched by them, and before."""
    best, most = UNKNOWN, 0
    for key in np.unique(process_of(calls.thread)).tolist():
        mine = np.flatnonzero(process_of(calls.thread) == key)
        mine = mine[np.argsort(calls.correlation[mine], kind="stable")]
        ids = calls.correlation[mine]
        row = np.minimum(np.searchsorted(ids, correlation), len(ids) - 1)
        explained = int(np.sum((ids[row] == correlation) & (calls.start[mine[row]] <= start)))
        if explained > most:
            best, most = key, explained
    return best


def _assign_ranks(
    export: Export, processes: tuple[_Process, ...], path: str
) -> tuple[tuple[int | None, ...], tuple[Gap, ...]]:
    if len(processes) == 1:
        return (_read_rank(export),), ()
    who = ", ".join(
        f"process {p.pid} (device {p.devices[0]}) is rank {rank}"
        for rank, p in enumerate(processes)
    )
    gap = Gap(
        code=Code.RANK_ASSUMED,
        message=f"the export does not tell the ranks of its processes; by device: {who}",
        hint="profile each rank into a file of its own: `nsys profile -o report_rank%q{RANK}`",
        file=path,
    )
    return tuple(range(len(processes))), (gap,)


def _read_rank(export: Export) -> int | None:
    """Read RANK from the recorded environment, and nothing else of it: it holds secrets."""
    if not export.has("META_DATA_CAPTURE", "name", "value"):
        return None
    rows = export.rows(
        "SELECT value FROM META_DATA_CAPTURE"
        " WHERE name GLOB 'PROCESS_*:ENVIRONMENT_VARIABLE' AND value GLOB 'RANK=*'"
    )
    found = {match[1] for (value,) in rows if (match := _RANK.match(str(value)))}
    return int(found.pop()) if len(found) == 1 else None


def _read_base(export: Export) -> int | None:
    """Read when the capture began, in UTC: what joins the clocks of several files."""
    if not export.has("TARGET_INFO_SESSION_START_TIME", "utcEpochNs"):
        return None
    (epochs,) = export.integers("TARGET_INFO_SESSION_START_TIME", "utcEpochNs")
    base = int(epochs[0]) if len(epochs) else 0
    return base if 0 < base < _LAST_BASE else None


def _no_clock(base: int | None, path: str) -> tuple[Gap, ...]:
    if base is not None:
        return ()
    message = "the export does not say when the capture began: its times start at zero"
    return (Gap(code=Code.NO_CLOCK, message=message, file=path, hint="export with a newer nsys"),)


def _describe(devices: dict[tuple[int, int], Device], pid: int, index: int) -> Device:
    found = devices.get((pid, index)) or devices.get((UNKNOWN, index))
    return found or Device(index=index, name="")


def _read_devices(export: Export) -> dict[tuple[int, int], Device]:
    """Read the devices by (pid, index as that process counts them), indexed as the host does."""
    if not export.has("TARGET_INFO_GPU", "id", "name"):
        return {}
    ids, memory, multiprocessors = export.integers(
        "TARGET_INFO_GPU", "id", "totalMemory", "smCount"
    )
    described = {
        identity: Device(
            index=identity,
            name=name,
            memory_bytes=size if size > 0 else None,
            multiprocessors=count if count > 0 else None,
        )
        for identity, size, count, name in zip(
            ids.tolist(),
            memory.tolist(),
            multiprocessors.tolist(),
            export.texts("TARGET_INFO_GPU", "name"),
            strict=True,
        )
    }
    return _by_process(export, described)


def _by_process(export: Export, described: dict[int, Device]) -> dict[tuple[int, int], Device]:
    if not export.has("TARGET_INFO_CUDA_DEVICE", "gpuId", "cudaId", "pid"):
        return {(UNKNOWN, index): device for index, device in described.items()}
    gpus, cudas, pids = export.integers("TARGET_INFO_CUDA_DEVICE", "gpuId", "cudaId", "pid")
    rows = zip(gpus.tolist(), cudas.tolist(), pids.tolist(), strict=True)
    return {(pid, cuda): described[gpu] for gpu, cuda, pid in rows if gpu in described}


def _read_thread_names(export: Export) -> dict[int, str]:
    """Read the names of threads by global id; the strongest where one has several."""
    if not export.has("ThreadNames", "nameId", "globalTid"):
        return {}
    ids, priority, thread = export.integers("ThreadNames", "nameId", "priority", "globalTid")
    texts = export.strings(np.unique(ids).tolist())
    order = np.argsort(priority, kind="stable")
    return {int(thread[row]): texts.get(int(ids[row]), "") for row in order.tolist()}


def _read_host(export: Export) -> str:
    if not export.has("TARGET_INFO_SYSTEM_ENV", "name", "value"):
        return ""
    rows = export.rows("SELECT value FROM TARGET_INFO_SYSTEM_ENV WHERE name = 'Hostname' LIMIT 1")
    return str(rows[0][0]) if rows else ""


def _read_versions(export: Export) -> tuple[tuple[str, str], ...]:
    if not export.has("META_DATA_EXPORT", "name", "value"):
        return ()
    rows = export.rows("SELECT value FROM META_DATA_EXPORT WHERE name = 'EXPORT_PRODUCT_VERSION'")
    return tuple(("nsight", str(value)) for (value,) in rows[:1])
