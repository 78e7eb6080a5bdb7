"""Kineto documents event by event, written the way a stranger's profiler might write them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]

BASE_NS = 1_790_857_026_000_000_000


def _span(cat: str, name: str, ts: Any, dur: Any, *, pid: int, tid: int, args: Event) -> Event:
    return {
        "ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur,
        "args": args,
    }  # fmt: skip


def kernel(name: str = "gemm", ts: Any = 10.0, dur: Any = 5.0, **args: Any) -> Event:
    args = {"device": 0, "stream": 7, "correlation": 1, **args}
    return _span("kernel", name, ts, dur, pid=0, tid=7, args=args)


def launch(ts: float = 1.0, dur: float = 1.0, tid: int = 100, **args: Any) -> Event:
    args = {"correlation": 1, **args}
    return _span("cuda_runtime", "cudaLaunchKernel", ts, dur, pid=1, tid=tid, args=args)


def operator(name: str, ts: float = 1.0, dur: float = 2.0, tid: int = 100, **args: Any) -> Event:
    return _span("cpu_op", name, ts, dur, pid=1, tid=tid, args=args)


def annotation(
    name: str, ts: float = 0.0, dur: float = 100.0, tid: int = 100, **args: Any
) -> Event:
    return _span("user_annotation", name, ts, dur, pid=1, tid=tid, args=args)


def send(to: int = 1, ts: float = 1.0, dur: float = 2.0, kind: str = "send", **args: Any) -> Event:
    """A `c10d::send` (or `recv_`) as torch writes it with record_shapes."""
    known = {
        "Concrete Inputs": ["", "", str(to), "0"],
        "Input type": ["TensorList", "", "Scalar", "Scalar"],
        "Input Dims": [[[4, 8]], [], [], []],
        **args,
    }
    return operator(f"c10d::{kind}", ts=ts, dur=dur, **known)


def details(what: str, ts: float, dur: float = 0.5, **args: Any) -> Event:
    """The `record_param_comms` inside a communication operator."""
    known = {"Collective name": what, "dtype": "BFloat16", "In msg nelems": 32, **args}
    return operator("record_param_comms", ts=ts, dur=dur, **known)


def memory(
    ts: float = 1.0, allocated: int = 1000, change: int = 100, device_type: int = 1
) -> Event:
    return {
        "ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]",
        "pid": 1, "tid": 100, "ts": ts,
        "args": {
            "Bytes": change, "Total Allocated": allocated, "Total Reserved": 2 * allocated,
            "Device Type": device_type, "Device Id": 0 if device_type else -1, "Addr": 1,
        },
    }  # fmt: skip


def document(
    events: list[Event], rank: int | None = 0, world: int = 1, **fields: Any
) -> dict[str, Any]:
    """A Kineto document, header first, events last."""
    info = {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world}}
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150_000_000_000}],
        **({} if rank is None else info),
        "baseTimeNanoseconds": BASE_NS,
        **fields,
        "traceEvents": events,
    }


def write(
    path: Path, content: Any, *, packed: bool | None = None, indent: int | None = None
) -> str:
    """Write JSON (or bytes as they are), gzipped if the name says so or if asked."""
    data = content if isinstance(content, bytes) else json.dumps(content, indent=indent).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    packed = path.suffix == ".gz" if packed is None else packed
    path.write_bytes(gzip.compress(data) if packed else data)
    return str(path)


def kineto_layout(content: dict[str, Any]) -> bytes:
    """Write a document with Kineto's own line breaks and indents."""
    fields = dict(content)
    events = fields.pop("traceEvents")
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items()]
    listed = ",".join(map(_event_layout, events))
    lines += [f'  "traceEvents": [{listed}\n  ]', '  "traceName": "x"']
    return f"  {{\n{f',{chr(10)}'.join(lines)}\n}}".encode()


def _event_layout(event: Event) -> str:
    body = json.dumps({key: value for key, value in event.items() if key != "args"})[1:-1]
    args = event.get("args")
    tail = "" if args is None else f',\n    "args": {{\n      {json.dumps(args)[1:-1]}\n    }}'
    return f"\n  {{\n    {body}{tail}\n  }}"
