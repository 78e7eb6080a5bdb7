"""A trace's own fields in → `Header` out: who recorded it, where, on what, with which settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from debubble.trace.columns import MOST_RANKS, Device, Header
from debubble.trace.kineto.operators import parse_groups

_VERSION_FIELDS = {
    "cuda_runtime_version": "cuda_runtime",
    "cuda_driver_version": "cuda_driver",
    "hip_runtime_version": "hip_runtime",
    "hip_driver_version": "hip_driver",
    "cupti_version": "cupti",
    "pytorch_version": "torch",
}
_MAX_BASE_NS = 4 * 10**18


def parse_header(fields: Mapping[str, Any]) -> Header:
    """Read what is there; anything of an unexpected type counts as absent."""
    info = _mapping(fields.get("distributedInfo"))
    base = fields.get("baseTimeNanoseconds")
    versions = {
        ours: str(fields[theirs]) for theirs, ours in _VERSION_FIELDS.items() if theirs in fields
    }
    if info.get("nccl_version"):
        versions["nccl"] = str(info["nccl_version"])
    host = fields.get("host_name")
    return Header(
        rank=_count(info.get("rank"), below=MOST_RANKS),
        world_size=_count(info.get("world_size"), below=MOST_RANKS),
        backend=str(info.get("backend", "")),
        groups=parse_groups(info),
        devices=_devices(fields.get("deviceProperties")),
        host=host if isinstance(host, str) else "",
        base_time_ns=base if isinstance(base, int) and 0 <= base < _MAX_BASE_NS else 0,
        record_shapes=_flag(fields, "record_shapes"),
        profile_memory=_flag(fields, "profile_memory"),
        with_stack=_flag(fields, "with_stack"),
        versions=tuple(sorted(versions.items())),
    )


def _devices(entries: object) -> tuple[Device, ...]:
    devices = []
    for entry in entries if isinstance(entries, list) else ():
        known = _mapping(entry)
        index = _count(known.get("id"))
        if index is not None:
            devices.append(
                Device(
                    index=index,
                    name=str(known.get("name", "")),
                    memory_bytes=_count(known.get("totalGlobalMem")),
                    multiprocessors=_count(known.get("numSms")),
                )
            )
    return tuple(devices)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: object, *, below: int = 2**63) -> int | None:
    """Return a whole number from zero up, also where it is written as text; else None."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < below:
        return None
    return value


def _flag(fields: Mapping[str, Any], name: str) -> bool | None:
    """Torch writes a setting as 1 when it was on, and leaves it out when it was off."""
    if name in fields:
        return bool(fields[name])
    return False if "schemaVersion" in fields else None
