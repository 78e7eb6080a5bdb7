"""Logs of link tests, or a live test, in → what `debubble links` says and draws of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import msgspec

from debubble.answers.base import list_warnings
from debubble.errors import Gap
from debubble.links.hop_times import Hop
from debubble.links.judge import Judgement, Verdict
from debubble.links.live.measured import HopTestResult, LiveHop, Rung
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
from debubble.links.wiring import SCHEMA
from debubble.report.text import Page, Table
from debubble.units import NS_PER_S, counted, show_bytes, show_duration, show_rate

_CELL, _MARGIN = 84, 72
_FAST, _SLOW = (222, 235, 247), (33, 113, 181)
_WARNING = "#c0392b"


def draw_matrix(ranks: Sequence[int], rates: Mapping[Hop, float], slow: Sequence[Hop]) -> str:
    """Draw a row for each rank that sends, a column for each that receives; slow hops framed.

    The darker a cell, the slower. Every cell has its figure, so that colour is not needed.
    """
    side = _MARGIN + _CELL * len(ranks) + 12
    most = max(rates.values(), default=1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{side}" height="{side + 24}">',
        '<g font-family="sans-serif" font-size="13" text-anchor="middle">',
        f"<title>{escape('Bytes per second from rank (row) to rank (column)')}</title>",
        f'<text x="{side / 2:.0f}" y="20">to rank</text>',
        f'<text x="24" y="{_MARGIN - 32}">from</text>',
    ]
    for place, rank in enumerate(ranks):
        middle = _MARGIN + _CELL * place + _CELL / 2
        parts.append(f'<text x="{middle:.0f}" y="{_MARGIN - 12}">{rank}</text>')
        parts.append(f'<text x="{_MARGIN - 20}" y="{middle + 5:.0f}">{rank}</text>')
    # One rectangle for all pairs that have no rate: of hundreds of ranks they are nearly all.
    inside = f'width="{_CELL}" height="{_CELL}" fill="#f7f7f7" stroke="#dddddd"'
    across = _CELL * len(ranks)
    parts.append(
        f'<defs><pattern id="none" x="{_MARGIN}" y="{_MARGIN}" width="{_CELL}" height="{_CELL}"'
        f' patternUnits="userSpaceOnUse"><rect {inside}/></pattern></defs>'
        f'<rect x="{_MARGIN}" y="{_MARGIN}" width="{across}" height="{across}" fill="url(#none)"/>'
    )
    position = {rank: number for number, rank in enumerate(ranks)}
    for (here, there), rate in sorted(rates.items()):
        x, y = _MARGIN + _CELL * position[there], _MARGIN + _CELL * position[here]
        parts.append(_cell(x, y, rate, most, is_slow=(here, there) in slow))
    legend = f"darker is slower; framed: slow; fastest {show_rate(most)}" if rates else "no rates"
    parts.append(f'<text x="{side / 2:.0f}" y="{side + 12}">{escape(legend)}</text>')
    return "\n".join([*parts, "</g></svg>", ""])


def _cell(x: int, y: int, rate: float, most: float, *, is_slow: bool) -> str:
    way = 1 - rate / most
    colour = [round(light + way * (dark - light)) for light, dark in zip(_FAST, _SLOW, strict=True)]
    ink = "white" if way > 0.5 else "black"
    frame = f'stroke="{_WARNING}" stroke-width="4"' if is_slow else 'stroke="#dddddd"'
    inset = 2 if is_slow else 0
    return (
        f'<rect x="{x + inset}" y="{y + inset}" width="{_CELL - 2 * inset}"'
        f' height="{_CELL - 2 * inset}" fill="rgb({colour[0]},{colour[1]},{colour[2]})" {frame}/>'
        f'<text x="{x + _CELL // 2}" y="{y + _CELL // 2 + 5}" fill="{ink}">'
        f"{escape(show_rate(rate))}</text>"
    )


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
    slow = [result for result in pairs if result.judgement.slow]
    if slow:
        return f"{_named(slow[0])} {slow[0].judgement.why}, {show_rate(slow[0].bytes_per_s)}."
    if pairs:
        first = pairs[0]
        return (
            f"{_named(first)}: {show_rate(first.bytes_per_s)} a direction with messages both ways,"
            f" {first.judgement.verdict}: {first.judgement.why}."
        )
    return f"{counted(len(logs), 'log')} read; none of them measures one hop by itself."


def _named(result: PairResult) -> str:
    return f"Hop {result.pair[0]} ↔ {result.pair[1]}"


def _pair_table(pairs: Sequence[PairResult]) -> Table:
    table = Table(columns=("hop", "largest", "rate", "latency", "bandwidth", "verdict", "file"))
    for result in pairs:
        table.rows.append(
            (
                f"{result.pair[0]} ↔ {result.pair[1]}",
                show_bytes(result.size_bytes),
                show_rate(result.bytes_per_s),
                "–" if result.fit is None else show_duration(result.fit.latency_ns),
                "–" if result.fit is None else show_rate(result.fit.bytes_per_s),
                str(result.judgement.verdict),
                result.file,
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
    test = log.test or "nccl-tests"
    table = Table(
        title=f"{log.file}: {test}, {counted(len(log.ranks), 'rank')}",
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
        "hops": [hop for result in pairs for hop in _hops_json(result)],
        "logs": [_log_json(log) for log in logs],
        "commands": [],
        "verdict": logs_answer(logs, pairs),
        "warnings": msgspec.to_builtins(list_warnings(gaps)),
    }


def _hops_json(result: PairResult) -> list[dict[str, Any]]:
    """Return both directions: the test sends both ways at once, and tells them not apart."""
    judgement: Judgement = result.judgement
    return [
        {
            "from_rank": here,
            "to_rank": there,
            "bytes": result.size_bytes,
            "one_message_s": result.time_s,
            "one_message_bytes_per_s": result.bytes_per_s,
            "bytes_per_s": result.bytes_per_s,
            "alpha_s": result.fit.latency_ns / NS_PER_S if result.fit else None,
            "beta_bytes_per_s": result.fit.bytes_per_s if result.fit else None,
            "fit_error_fraction": result.fit.worst_error if result.fit else None,
            "verdict": str(judgement.verdict),
            "against": judgement.against,
            "times": judgement.times,
            "why": judgement.why,
            "cost_per_batch_s": None,
            "file": result.file,
        }
        for here, there in (result.pair, result.pair[::-1])
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


def live_page(
    measured: HopTestResult, hops: Sequence[LiveHop], gaps: Sequence[Gap], next_command: str
) -> Page:
    """Lay out the answer: which hop is slow and who is ill, then every hop."""
    page = Page(answer=live_answer(hops))
    slow = [hop for hop in hops if hop.judgement.slow]
    page.findings = [f"{_sentence(hop)}." for hop in slow[1:]]
    table = Table(
        columns=(
            "hop",
            "largest",
            "one way",
            "rate",
            "both ways",
            "latency",
            "bandwidth",
            "verdict",
        )
    )
    for hop in hops:
        last = hop.rungs[-1]
        both = hop.both_ways_bytes_per_s
        table.rows.append(
            (
                f"{hop.hop[0]} → {hop.hop[1]}",
                show_bytes(last.size_bytes),
                show_duration(last.one_way.alone_s * NS_PER_S),
                show_rate(hop.bytes_per_s),
                "–" if both is None else show_rate(both),
                "–" if hop.fit is None else show_duration(hop.fit.latency_ns),
                "–" if hop.fit is None else show_rate(hop.fit.bytes_per_s),
                str(hop.judgement.verdict),
            )
        )
    page.tables = [table]
    page.notes = [_about(measured)]
    page.gaps = list(gaps)
    page.next_command = next_command
    return page


def live_answer(hops: Sequence[LiveHop]) -> str:
    """Say it in a sentence."""
    slow = [hop for hop in hops if hop.judgement.slow]
    if slow:
        more = f", and {counted(len(slow) - 1, 'more hop')}" if len(slow) > 1 else ""
        return f"{_sentence(slow[0])[0].upper()}{_sentence(slow[0])[1:]}{more}."
    healthy = sum(hop.judgement.verdict == Verdict.HEALTHY for hop in hops)
    if not healthy:
        return f"Unknown: {hops[0].judgement.why}." if hops else "No hop was measured."
    rest = len(hops) - healthy
    return f"{counted(healthy, 'hop')} healthy{f'; {rest} unknown' if rest else ''}."


def _sentence(hop: LiveHop) -> str:
    ill = {None: "", "link": "; with others both ranks are well: it is the link between them"}
    more = ill.get(hop.ill, f"; {hop.ill} is slow with others, too")
    rate = show_rate(hop.bytes_per_s)
    return f"hop {hop.hop[0]} → {hop.hop[1]} {hop.judgement.why}, {rate}{more}"


def _about(measured: HopTestResult) -> str:
    samples = min((rung.one_way.n for rung in measured.rungs), default=0)
    hosts = len({place.host for place in measured.places})
    return (
        f"{counted(len(measured.places), 'rank')} on {counted(hosts, 'host')}, {measured.backend};"
        f" {samples} messages of each size, of which a tenth was quicker than told;"
        " one hop at a time"
    )


def live_json(
    measured: HopTestResult, hops: Sequence[LiveHop], gaps: Sequence[Gap]
) -> dict[str, Any]:
    """Return the answer as data."""
    return {
        "schema": SCHEMA,
        "source": "measured",
        "backend": measured.backend,
        "batch_latency_s": None,
        "hops": [_hop_json(hop, measured.job_bytes) for hop in hops],
        "second_pass": [_rung_json(rung) for rung in measured.second],
        "logs": [],
        "commands": [],
        "verdict": live_answer(hops),
        "warnings": msgspec.to_builtins(list_warnings(gaps)),
    }


def _hop_json(hop: LiveHop, job_bytes: int | None) -> dict[str, Any]:
    last = hop.rungs[-1]
    job = next((rung for rung in hop.rungs if rung.size_bytes == job_bytes), last)
    return {
        "from_rank": hop.hop[0],
        "to_rank": hop.hop[1],
        "bytes": job.size_bytes,
        "one_message_s": job.one_way.alone_s,
        "one_message_bytes_per_s": job.size_bytes / job.one_way.alone_s,
        "bytes_per_s": hop.bytes_per_s,
        "both_ways_bytes_per_s": hop.both_ways_bytes_per_s,
        "alpha_s": hop.fit.latency_ns / NS_PER_S if hop.fit else None,
        "beta_bytes_per_s": hop.fit.bytes_per_s if hop.fit else None,
        "fit_error_fraction": hop.fit.worst_error if hop.fit else None,
        "ladder": [_rung_json(rung) for rung in hop.rungs],
        "verdict": str(hop.judgement.verdict),
        "against": hop.judgement.against,
        "times": hop.judgement.times,
        "why": hop.judgement.why,
        "ill": hop.ill,
        "cost_per_batch_s": None,
    }


def _rung_json(rung: Rung) -> dict[str, Any]:
    return {
        "from_rank": rung.source,
        "to_rank": rung.destination,
        "bytes": rung.size_bytes,
        "one_way_s": rung.one_way.median_s,
        "one_way_p95_s": rung.one_way.p95_s,
        "both_ways_s": rung.both_ways.median_s if rung.both_ways else None,
        "n": rung.one_way.n,
    }
