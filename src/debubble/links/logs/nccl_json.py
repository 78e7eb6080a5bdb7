"""JSON of nccl-tests (`-J`) in, of any file version → its rows. Its environment is never kept."""

from __future__ import annotations

import math
from typing import Any

from debubble.errors import LogError
from debubble.links.logs.model import Half, LogRank, NcclLog, NcclRow
from debubble.links.logs.numbers import RERUN, check_average, check_half

_NOT_A_NUMBER = frozenset({"nan", "-nan", "N/A"})


def is_nccl_json(data: Any) -> bool:
    """Tell whether nccl-tests wrote this."""
    return isinstance(data, dict) and "config" in data and ("results" in data or "args" in data)


def read_nccl_json(data: dict[str, Any], file: str) -> NcclLog:
    """Read what one program of nccl-tests wrote.

    `env` holds the whole environment of whoever ran it, secrets too: it goes first of all.
    """
    data.pop("env", None)
    config = _part(data, "config", dict, file)
    devices = config.get("devices", [])
    rows = [
        _row(one, file, f"result {place}")
        for place, one in enumerate(_part(data, "results", list, file))
    ]
    ending = data.get("average_bus_bandwidth")
    if not isinstance(ending, dict) or "end_time" not in data:
        raise LogError("cut off: the test did not write its end", hint=RERUN, file=file)
    average = _number(ending, "bandwidth", file, "average_bus_bandwidth")
    check_average(rows, average, file)
    bounds = data.get("out_of_bounds")
    arguments = [word for word in data.get("args", []) if isinstance(word, str)]
    return NcclLog(
        file=file,
        test=arguments[0].rpartition("/")[2] if arguments else "",
        version=f"file version {data.get('version', 1)}",
        ranks=tuple(_rank(one, file) for one in devices),
        rows=tuple(rows),
        average_gb_s=average,
        out_of_bounds=int(_number(bounds, "count", file, "out_of_bounds"))
        if isinstance(bounds, dict)
        else None,
    )


def _part(data: Any, name: str, kind: type, file: str) -> Any:
    found = data.get(name) if isinstance(data, dict) else None
    if not isinstance(found, kind):
        raise LogError(f"{name!r} is missing", hint=RERUN, file=file)
    return found


def _number(data: Any, name: str, file: str, where: str) -> float:
    found = data.get(name) if isinstance(data, dict) else None
    value = _finite(found)
    if value is None:
        raise LogError(f"{where}: {name!r} is no number", hint=RERUN, file=file)
    return value


def _finite(found: Any) -> float | None:
    """Return a number; None for anything else, and for what no computer counts to."""
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    try:
        return float(found) if math.isfinite(found) else None
    except OverflowError:
        return None


def _rank(one: Any, file: str) -> LogRank:
    return LogRank(
        rank=int(_number(one, "rank", file, "devices")),
        group=int(_number(one, "group", file, "devices")) if "group" in one else 0,
        host=str(one.get("hostname", "")),
        device=int(_number(one, "device", file, "devices")),
        device_name=str(one.get("device_info", "")),
    )


def _row(one: Any, file: str, where: str) -> NcclRow:
    size = int(_number(one, "size", file, where))
    halves = [
        _half(one, name, size, file, f"{where}, {name}") for name in ("out_of_place", "in_place")
    ]
    if "out_of_place" not in one:
        raise LogError(f"{where}: 'out_of_place' is missing", hint=RERUN, file=file)
    return NcclRow(
        size_bytes=size,
        count=int(_number(one, "count", file, where)),
        kind=str(one.get("type", "")),
        out_of_place=halves[0],
        in_place=halves[1],
    )


def _half(one: dict[str, Any], name: str, size: int, file: str, where: str) -> Half | None:
    data = one.get(name)
    if data is None or (isinstance(data, dict) and data.get("alg_bw") in _NOT_A_NUMBER):
        return None
    on_host = isinstance(data, dict) and "cpu_time" in data
    wrong = data.get("nwrong") if isinstance(data, dict) else None
    spread = one.get(f"{name}_per_iter")
    half = Half(
        time_us=_number(data, "cpu_time" if on_host else "time", file, where),
        algbw_gb_s=_number(data, "alg_bw", file, where),
        busbw_gb_s=_number(data, "bus_bw", file, where),
        wrong=_finite(wrong),
        host_time=on_host,
        iterations=tuple(
            (word, value) for word in spread if (value := _finite(spread[word])) is not None
        )
        if isinstance(spread, dict)
        else (),
    )
    check_half(size, half, file, where)
    return half
