"""Small sound traces in every format and layout: what the mutators start from."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sqlite3
from collections import Counter
from functools import cache
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from support.traces.kineto_events import (
    annotation,
    details,
    document,
    kernel,
    kineto_layout,
    launch,
    memory,
    operator,
    send,
)
from support.traces.recordings import H200

from debubble.trace.digest import pack_digest
from debubble.trace.kineto import read_kineto

# So many events of each kind and name are kept of a recorded file.
_KEPT_OF_A_NAME = 3
_RECORDED = ("fwd_closed_m4/rank0", "fwd_closed_m4/rank3", "1f1b_p2_m4/rank1")

OPS_HEADER = (
    "step", "pipeline", "stage", "microbatch", "op", "start_us", "duration_us", "rank", "bytes",
)  # fmt: skip

_NSIGHT_SCHEMA = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER,
  streamId INTEGER, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER,
  graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, deviceId INTEGER,
  streamId INTEGER, correlationId INTEGER, globalPid INTEGER, bytes INTEGER, copyKind INTEGER,
  srcDeviceId INTEGER, dstDeviceId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER, end INTEGER, deviceId INTEGER,
  streamId INTEGER, correlationId INTEGER, globalPid INTEGER, bytes INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER, end INTEGER, deviceId INTEGER,
  streamId INTEGER, correlationId INTEGER, globalPid INTEGER, graphId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER,
  correlationId INTEGER, nameId INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT,
  globalTid INTEGER, textId INTEGER, domainId INTEGER);
CREATE TABLE ThreadNames (nameId INTEGER, priority INTEGER, globalTid INTEGER);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER);
CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT, totalMemory INTEGER, smCount INTEGER);
CREATE TABLE TARGET_INFO_CUDA_DEVICE (gpuId INTEGER, cudaId INTEGER, pid INTEGER);
CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT, value TEXT);
CREATE TABLE META_DATA_CAPTURE (name TEXT, value TEXT);
CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT);
CREATE TABLE ENUM_CUDA_MEMCPY_OPER (id INTEGER, label TEXT);
CREATE INDEX by_start ON CUPTI_ACTIVITY_KIND_MEMSET (start);
INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (1700000000000000000);
INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA H200', 150000000000, 132);
INSERT INTO TARGET_INFO_CUDA_DEVICE VALUES (0, 0, 7);
INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES ('Hostname', 'node1');
INSERT INTO META_DATA_CAPTURE VALUES ('PROCESS_7:ENVIRONMENT_VARIABLE', 'RANK=3');
INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_PRODUCT_VERSION', '2025.1');
INSERT INTO ENUM_CUDA_MEMCPY_OPER VALUES (1, 'Host-to-Device');
"""
_NSIGHT_NAMES = (
    "gemm(float)", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096>)", "cudaLaunchKernel",
    "ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd", "ncclAllReduce", "pt_main",
)  # fmt: skip


@cache
def gpu_documents() -> tuple[str, ...]:
    """Cuts of recorded H200 traces, a few events of each name, as JSON text."""
    made = []
    for place in _RECORDED:
        content = json.loads(gzip.decompress((H200 / f"{place}.json.gz").read_bytes()))
        seen: Counter[tuple[Any, ...]] = Counter()
        kept = []
        for event in content["traceEvents"]:
            key = (event.get("ph"), event.get("cat"), event["name"])
            seen[key] += 1
            if seen[key] <= _KEPT_OF_A_NAME:
                kept.append(event)
        made.append(json.dumps({**content, "traceEvents": kept}))
    return tuple(made)


@cache
def made_documents() -> tuple[str, ...]:
    """A gloo-like CPU trace, and a GPU trace whose kernels are joined in every known way."""
    on_cpu = [
        *(operator("aten::mm", ts=10.0 * i, dur=8.0, tid=i % 3) for i in range(30)),
        *(send(to=1, ts=400.0 + i, dur=0.5, kind="recv_") for i in range(3)),
        annotation("gloo:send", ts=5.0, dur=3.0),
        annotation("forward 0", ts=0.0, dur=90.0),
        memory(ts=3.0, device_type=0),
    ]
    coalesced = {"Process Group Name": "9", "Process Group Ranks": "[0, 1]"}
    on_gpu = [
        *(kernel(f"k{i % 4}", ts=10.0 * i, dur=5.0, correlation=i) for i in range(20)),
        *(launch(ts=10.0 * i - 1, correlation=i) for i in range(20)),
        send(to=1, ts=300.0),
        details("send", ts=300.1, **coalesced),
        annotation("nccl:coalesced", ts=303.0, dur=5.0),
        launch(ts=304.0, correlation=99),
        kernel("ncclDevKernel_SendRecv()", ts=310.0, correlation=99, **{"Collective name": "send"}),
        memory(ts=2.0),
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 100, "ts": 0, "args": {"name": "main"}},
    ]
    groups = {"pg_config": [{"pg_name": "9", "pg_desc": "pp", "ranks": [0, 1]}]}
    gpu = document(on_gpu, world=2)
    gpu["distributedInfo"] |= groups
    return json.dumps(document(on_cpu, deviceProperties=[])), json.dumps(gpu)


def pick_document(random: Random) -> dict[str, Any]:
    """Return a fresh trace, cut or made."""
    content: dict[str, Any] = json.loads(random.choice(gpu_documents() + made_documents()))
    rank = random.randrange(4)
    content.setdefault("distributedInfo", {}).update(rank=rank, world_size=random.choice((2, 4)))
    if random.random() < 0.3:
        content["traceEvents"] = random.sample(content["traceEvents"], k=20)
    return content


def lay_out(random: Random, content: Any) -> bytes:
    """Write a document in one of the layouts that are found in the wild."""
    layout = random.choice(("kineto", "compact", "spaced", "indented", "bare", "events first"))
    whole = isinstance(content, dict) and isinstance(content.get("traceEvents"), list)
    if layout == "kineto" and whole and all(isinstance(e, dict) for e in content["traceEvents"]):
        return kineto_layout(content)
    if layout == "bare" and whole:
        return json.dumps(content["traceEvents"]).encode()
    if layout == "events first" and whole:
        content = {"traceEvents": content["traceEvents"], **content}
    separators = (",", ":") if layout == "compact" else None
    return json.dumps(content, separators=separators, indent=layout == "indented" or None).encode()


@cache
def nsight_export() -> bytes:
    """A small Nsight Systems export with every table that is read."""
    with sqlite3.connect(":memory:") as db:
        db.executescript(_NSIGHT_SCHEMA)
        name = {text: number for number, text in enumerate(_NSIGHT_NAMES, start=1)}
        db.executemany("INSERT INTO StringIds VALUES (?, ?)", [(n, t) for t, n in name.items()])
        for row in range(12):
            pid, at = 7 + row % 2, 1000 * row
            process = (1 << 48) | (pid << 24)
            called = _NSIGHT_NAMES[row % 2]
            work = (at + 100, at + 200, row % 2, 3, row + 1, process)
            _insert(db, "CUPTI_ACTIVITY_KIND_KERNEL", *work, name[called], None)
            call = (at + 60, at + 70, process | pid, row + 1, name["cudaLaunchKernel"])
            _insert(db, "CUPTI_ACTIVITY_KIND_RUNTIME", *call)
            _insert(db, "CUPTI_ACTIVITY_KIND_MEMCPY", *work, 1024, 1 + row, 0, row % 2)
            _insert(db, "CUPTI_ACTIVITY_KIND_MEMSET", *work, 64)
            _insert(db, "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", *work, 5)
            for place, marked in enumerate(_NSIGHT_NAMES[3:8]):
                span = (at + 10 * place, at + 10 * place + 40)
                _insert(db, "NVTX_EVENTS", *span, 59, None, process | pid, name[marked], 0)
            _insert(db, "NVTX_EVENTS", at, at + 900, 60, f"step {row}", process | pid, None, 0)
            _insert(db, "ThreadNames", name["pt_main"], row, process | pid)
        db.commit()
        return db.serialize()


def _insert(db: sqlite3.Connection, table: str, *values: object) -> None:
    marks = ", ".join("?" * len(values))
    db.execute(f"INSERT INTO {table} VALUES ({marks})", values)  # noqa: S608 (our own names)


@cache
def digest() -> bytes:
    """The digest of a recorded rank."""
    return pack_digest(read_kineto(str(H200 / "fwd_closed_m4" / "rank0.json.gz")))


@cache
def op_rows() -> tuple[tuple[Any, ...], ...]:
    """The rows of a small op table."""
    return tuple(
        (step, 0, stage, batch, op, 1000.5 * batch + 100 * stage, 90.25, stage, 4096)
        for step in range(2)
        for stage in range(3)
        for batch in range(4)
        for op in ("F", "B", "forward-send")
    )


def pick_op_table(random: Random) -> bytes:
    """Return an op table in one of its three forms."""
    form = random.choice(("csv", "jsonl", "parquet"))
    if form == "parquet":
        return as_parquet(
            {n: list(c) for n, c in zip(OPS_HEADER, zip(*op_rows(), strict=True), strict=True)}
        )
    if form == "jsonl":
        rows = (dict(zip(OPS_HEADER, row, strict=True)) for row in op_rows())
        return "\n".join(map(json.dumps, rows)).encode()
    sink = io.StringIO()
    writer = csv.writer(sink, delimiter=random.choice(",;\t"))
    writer.writerows([OPS_HEADER, *op_rows()])
    return sink.getvalue().encode()


def as_parquet(columns: dict[str, Any]) -> bytes:
    """Write columns as a Parquet file."""
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()
