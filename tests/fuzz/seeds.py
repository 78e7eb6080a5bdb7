"""Small sound traces in every format and layout: what the mutators start from."""

from __future__ import annotations

import csv
import gzip
import io
import json
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
from support.traces.nsight_export import NsightExport, global_id
from support.traces.recordings import H200

from debubble.trace.digest import pack_digest
from debubble.trace.kineto import read_kineto

# So many events of each kind and name are kept of a recorded file.
_KEPT_OF_A_NAME = 3
_RECORDED = ("fwd_closed_m4/rank0", "fwd_closed_m4/rank3", "1f1b_p2_m4/rank1")

OPS_HEADER = (
    "step", "pipeline", "stage", "microbatch", "op", "start_us", "duration_us", "rank", "bytes",
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
    export = NsightExport()
    export.insert("TARGET_INFO_GPU", 0, "NVIDIA H200", 150_000_000_000, 132)
    export.insert("TARGET_INFO_CUDA_DEVICE", 0, 0, 7)
    export.insert("META_DATA_CAPTURE", "PROCESS_7:ENVIRONMENT_VARIABLE", "RANK=3")
    for row in range(12):
        pid, at = 7 + row % 2, 1000 * row
        export.kernel("gemm(float)", at, at + 50, pid=pid, device=row % 2, launch=at - 20)
        export.group(at + 100, "ncclSend", "ncclRecv")
        work = (at + 300, at + 400, row % 2, 3, row + 1, global_id(pid))
        export.insert("CUPTI_ACTIVITY_KIND_MEMCPY", *work, 1024, 1 + row, 0, row % 2)
        export.insert("CUPTI_ACTIVITY_KIND_MEMSET", *work, 64)
        export.insert("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", *work, 5)
        export.nvtx(f"step {row}", at, at + 900, pid=pid, kind=60)
        export.insert("ThreadNames", export.string("pt_main"), row, global_id(pid, pid))
    export.db.commit()
    return export.db.serialize()


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
