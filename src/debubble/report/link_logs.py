"""Logs of link tests in → what `debubble links` prints of them, as text or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from debubble.errors import Gap
from debubble.links.history import SCHEMA
from debubble.links.judge import Judgement
from debubble.links.logs.model import (
    CopyLog,
    Half,
    Log,
    Matrix,
    MatrixLog,
    NcclLog,
    NvlinkStatus,
    Topology,
)
from debubble.links.logs.pairs import PairResult
from debubble.report.inspect import gap_json
from debubble.report.text import Page, Table
from debubble.units import NS_PER_S, counted, show_bytes, show_duration, show_rate

_GB = 1e9


def logs_page(
    logs: Sequence[Log], pairs: Sequence[PairResult], gaps: Sequence[Gap], next_command: str
) -> Page:
    """Lay out the answer: what the logs tell of hops, then each of them."""
    page = Page(answer=logs_answer(logs, pairs))
    if pairs:
        page.tables.append(_pair_table(pairs))
    page.tables += [_table(log) for log in logs]
    page.gaps = list(gaps)
    page.next_command = next_command
    return page


def logs_answer(logs: Sequence[Log], pairs: Sequence[PairResult]) -> str:
    """Say it in a sentence."""
    slow = [one for one in pairs if one.judgement.slow]
    if slow:
        return f"{_named(slow[0])} {slow[0].judgement.why}, {show_rate(slow[0].bytes_per_s)}."
    if pairs:
        first = pairs[0]
        return (
            f"{_named(first)}: {show_rate(first.bytes_per_s)} a direction with messages both ways,"
            f" {first.judgement.verdict}: {first.judgement.why}."
        )
    return f"{counted(len(logs), 'log')} read; none of them measures one hop by itself."


def _named(one: PairResult) -> str:
    return f"Hop {one.pair[0]} ↔ {one.pair[1]}"


def _pair_table(pairs: Sequence[PairResult]) -> Table:
    table = Table(columns=("hop", "largest", "rate", "latency", "bandwidth", "verdict", "file"))
    for one in pairs:
        table.rows.append(
            (
                f"{one.pair[0]} ↔ {one.pair[1]}",
                show_bytes(one.size_bytes),
                show_rate(one.bytes_per_s),
                "–" if one.fit is None else show_duration(one.fit.latency_ns),
                "–" if one.fit is None else show_rate(one.fit.bytes_per_s),
                str(one.judgement.verdict),
                one.file,
            )
        )
    return table


def _table(log: Log) -> Table:
    if isinstance(log, NcclLog):
        return _nccl_table(log)
    if isinstance(log, MatrixLog):
        return _matrix_table(log)
    table = Table(title=log.file, columns=("name", "rate"))
    if isinstance(log, CopyLog):
        table.rows = [(name, show_rate(rate * _GB)) for name, rate in log.rates_gb_s]
    elif isinstance(log, Topology):
        table.columns = ("hop", "name")
        table.rows = [(f"{a} → {b}", how) for (a, b), how in log.joins.items()]
    elif isinstance(log, NvlinkStatus):
        table.columns = ("device", "name", "links", "rate")
        for index, name, links in log.devices:
            active = [rate for rate in links if rate is not None]
            row = str(index), name, f"{len(active)} of {len(links)}", show_rate(sum(active) * _GB)
            table.rows.append(row)
    return table


def _nccl_table(log: NcclLog) -> Table:
    what = log.test or "nccl-tests"
    table = Table(
        title=f"{log.file}: {what}, {counted(len(log.ranks), 'rank')}",
        columns=("size", "time", "algbw", "busbw", "in place", "busbw in place"),
    )
    for row in log.rows:
        out, into = row.out_of_place, row.in_place
        table.rows.append(
            (
                show_bytes(row.size_bytes),
                "–" if out is None else show_duration(out.time_us * 1000),
                "–" if out is None else show_rate(out.algbw_gb_s * _GB),
                "–" if out is None else show_rate(out.busbw_gb_s * _GB),
                "–" if into is None else show_duration(into.time_us * 1000),
                "–" if into is None else show_rate(into.busbw_gb_s * _GB),
            )
        )
    return table


def _matrix_table(log: MatrixLog) -> Table:
    table = Table(
        title=f"{log.file}: nvbandwidth {log.version}", columns=("test", "figures", "sum")
    )
    for test in log.tests:
        shown = " ".join(
            "N/A" if cell is None else f"{cell:g}" for row in test.cells for cell in row
        )
        total = "–" if test.total is None else f"{test.total:g} {test.unit}"
        table.rows.append((test.name, shown or test.status, total))
    return table


def logs_json(
    logs: Sequence[Log], pairs: Sequence[PairResult], gaps: Sequence[Gap]
) -> dict[str, Any]:
    """Return the answer as data; what the environment held is not in it."""
    return {
        "schema": SCHEMA,
        "source": "logs",
        "batch_latency_s": None,
        "hops": [hop for one in pairs for hop in _hops_json(one)],
        "logs": [_log_json(log) for log in logs],
        "commands": [],
        "verdict": logs_answer(logs, pairs),
        "warnings": [gap_json(gap) for gap in gaps],
    }


def _hops_json(one: PairResult) -> list[dict[str, Any]]:
    """Return both directions: the test sends both ways at once, and tells them not apart."""
    judgement: Judgement = one.judgement
    return [
        {
            "from_rank": here,
            "to_rank": there,
            "bytes": one.size_bytes,
            "one_message_s": one.time_s,
            "one_message_bytes_per_s": one.bytes_per_s,
            "bytes_per_s": one.bytes_per_s,
            "alpha_s": one.fit.latency_ns / NS_PER_S if one.fit else None,
            "beta_bytes_per_s": one.fit.bytes_per_s if one.fit else None,
            "fit_error_fraction": one.fit.worst_error if one.fit else None,
            "verdict": str(judgement.verdict),
            "against": judgement.against,
            "times": judgement.times,
            "why": judgement.why,
            "cost_per_batch_s": None,
            "file": one.file,
        }
        for here, there in (one.pair, one.pair[::-1])
    ]


def _log_json(log: Log) -> dict[str, Any]:
    if isinstance(log, NcclLog):
        return {
            "file": log.file,
            "program": "nccl-tests",
            "test": log.test or None,
            "ranks": len(log.ranks),
            "average_bytes_per_s": log.average_gb_s * _GB,
            "rows": [
                {
                    "bytes": row.size_bytes,
                    "out_of_place": _half_json(row.out_of_place),
                    "in_place": _half_json(row.in_place),
                }
                for row in log.rows
            ],
        }
    if isinstance(log, MatrixLog):
        return {
            "file": log.file,
            "program": "nvbandwidth",
            "tests": [_matrix_json(test) for test in log.tests],
        }
    if isinstance(log, CopyLog):
        rates = {name: rate * _GB for name, rate in log.rates_gb_s}
        return {"file": log.file, "program": "gpu_copy", "bytes_per_s": rates}
    if isinstance(log, Topology):
        joins = [{"devices": list(pair), "join": how} for pair, how in log.joins.items()]
        return {"file": log.file, "program": "nvidia-smi topo", "joins": joins}
    return {
        "file": log.file,
        "program": "nvidia-smi nvlink",
        "devices": [
            {
                "device": index,
                "name": name,
                "links_bytes_per_s": [None if rate is None else rate * _GB for rate in links],
            }
            for index, name, links in log.devices
        ],
    }


def _half_json(half: Half | None) -> dict[str, Any] | None:
    if half is None:
        return None
    return {
        "time_s": half.time_us / 1e6,
        "algbw_bytes_per_s": half.algbw_gb_s * _GB,
        "busbw_bytes_per_s": half.busbw_gb_s * _GB,
        "wrong": half.wrong,
        "host_time": half.host_time,
        "iterations": dict(half.iterations),
    }


def _matrix_json(test: Matrix) -> dict[str, Any]:
    return {
        "name": test.name,
        "status": test.status,
        "unit": test.unit,
        "rows": list(test.rows),
        "columns": list(test.columns),
        "cells": [list(row) for row in test.cells],
        "sum": test.total,
    }
