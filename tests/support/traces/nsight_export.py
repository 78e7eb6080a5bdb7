"""A small Nsight Systems export, written table by table."""

from __future__ import annotations

import sqlite3
from typing import Any

BASE = 1_700_000_000_000_000_000
_WORK = (
    "start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, correlationId INTEGER, "
    "globalPid INTEGER"
)
SCHEMA = f"""
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({_WORK}, demangledName INTEGER, shortName INTEGER,
  graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY ({_WORK}, bytes INTEGER, copyKind INTEGER,
  srcDeviceId INTEGER, dstDeviceId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET ({_WORK}, bytes INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE ({_WORK}, graphId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER,
  correlationId INTEGER, nameId INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT,
  globalTid INTEGER, textId INTEGER, domainId INTEGER);
CREATE TABLE ThreadNames (nameId INTEGER, priority INTEGER, globalTid INTEGER);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER);
CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT, totalMemory INTEGER, smCount INTEGER);
CREATE TABLE TARGET_INFO_CUDA_DEVICE (gpuId INTEGER, cudaId INTEGER, pid INTEGER);
CREATE TABLE META_DATA_CAPTURE (name TEXT, value TEXT);
"""
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096>)"


def global_id(pid: int, tid: int = 0) -> int:
    """Return the id of a process or thread, as Nsight writes it."""
    return (1 << 48) | (pid << 24) | tid


class NsightExport:
    """An export in the making."""

    def __init__(self, path: str = ":memory:") -> None:
        self.db = sqlite3.connect(path)
        self.db.executescript(SCHEMA)
        self.insert("TARGET_INFO_SESSION_START_TIME", BASE)
        self._strings: dict[str, int] = {}
        self._correlation = 0

    def string(self, value: str) -> int:
        if value not in self._strings:
            self._strings[value] = len(self._strings) + 1
            self.db.execute("INSERT INTO StringIds VALUES (?, ?)", (self._strings[value], value))
        return self._strings[value]

    def insert(self, table: str, *values: object) -> None:
        marks = ", ".join("?" * len(values))
        self.db.execute(f"INSERT INTO {table} VALUES ({marks})", values)  # noqa: S608

    def kernel(
        self,
        name: str,
        start: int,
        end: int,
        *,
        pid: int = 7,
        device: int = 0,
        launch: int | None = None,
        node: int | None = None,
    ) -> None:
        """Add a kernel, launched at `launch` by the thread that bears the process's number."""
        self._correlation += 1
        if launch is not None:
            self.call("cudaLaunchKernel_v7000", launch, launch + 5, pid, self._correlation)
        self.insert(
            "CUPTI_ACTIVITY_KIND_KERNEL",
            *(start, end, device, 3, self._correlation, global_id(pid)),
            *(self.string(name), self.string(name.split("(", maxsplit=1)[0]), node),
        )

    def call(self, name: str, start: int, end: int, pid: int = 7, correlation: int = 0) -> None:
        table = "CUPTI_ACTIVITY_KIND_RUNTIME"
        self.insert(table, start, end, global_id(pid, pid), correlation, self.string(name))

    def nvtx(self, name: str, start: int, end: int | None, **how: Any) -> None:
        """Add a range; `by_id`: its text among the strings."""
        by_id, pid = how.get("by_id", False), how.get("pid", 7)
        text, identity = (None, self.string(name)) if by_id else (name, None)
        row = (start, end, how.get("kind", 59), text, global_id(pid, pid), identity, 0)
        self.insert("NVTX_EVENTS", *row)

    def group(self, start: int, *calls: str) -> None:
        """Add a NCCL group whose end lasts from `start + 50` to `start + 90`, with its kernel."""
        self.nvtx("ncclGroupStart", start, start + 1, by_id=True)
        for place, call in enumerate(calls):
            self.nvtx(call, start + 2 + 2 * place, start + 3 + 2 * place, by_id=True)
        self.nvtx("ncclGroupEnd", start + 50, start + 90, by_id=True)
        self.kernel(SEND_RECV, start + 100, start + 200, launch=start + 60)
