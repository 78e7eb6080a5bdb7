"""Dumps of torch's flight recorder, or lines of NCCL Inspector, in → what messages took, by hop.

Both run beside a job for days and tell of every message what its kernel took, on one rank:

    rank 1   nccl:recv 1<-0 ├───────────── 2.1 ms ────────────┤      asked before it was there
    rank 0   nccl:send 0->1                     ├── 0.9 ms ───┤      begins last: this is the wire

A kernel that begins first waits for the other. Where both sides are given, the shorter of the two
is the wire; one side alone is an upper bound. The recorder times calls that were made together as
one, `nccl:coalesced`, after the calls themselves: one call in it has that time for its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from math import prod
from statistics import median
from typing import Any

import msgspec

from debubble.links.logs.log import Log, LogReader, Message, damaged
from debubble.trace.communication import element_bytes
from debubble.units import NS_PER_S, NS_PER_US

_CALL = re.compile(r"^\w+:(?:(send) (\d+)->(\d+)|(recv) (\d+)<-(\d+))(?: |$)")
_TIMED = "set TORCH_NCCL_ENABLE_TIMING=1 and TORCH_FR_BUFFER_SIZE before the job starts"
_LINES = "give the .log or .jsonl that NCCL_INSPECTOR_DUMP_DIR holds, as it is"


class _Entry(msgspec.Struct):
    """One call, as the flight recorder writes it."""

    profiling_name: str
    duration_ms: float | None = None
    input_sizes: list[list[int]] = []
    input_dtypes: list[str] = []
    process_group: list[str] = []


class _Group(msgspec.Struct):
    """A process group; its ranks are written as text."""

    ranks: str = ""


class _Dump(msgspec.Struct):
    """A dump of the flight recorder."""

    entries: list[_Entry]
    pg_config: dict[str, _Group] = {}


class _Peer(msgspec.Struct):
    """One message, as NCCL Inspector writes it."""

    p2p: str
    p2p_msg_size_bytes: int
    p2p_exec_time_us: float
    p2p_peer: int = -1


class _Header(msgspec.Struct):
    """Whose line it is."""

    rank: int = -1


class _Line(msgspec.Struct):
    """A line of NCCL Inspector; one of a collective has no `p2p_perf`."""

    header: _Header
    p2p_perf: _Peer | None = None


def is_of_recorder(start: str) -> bool:
    """Tell by its start whether a file that is too long to be looked at whole is of either."""
    return _is_inspector(start, None) or ('"entries"' in start and '"profiling_name"' in start)


def _is_inspector(text: str, _data: Any) -> bool:
    first = text.lstrip()[:4096].partition("\n")[0]
    return first.startswith("{") and '"header"' in first and '_perf"' in first


def _is_flight_recorder(_text: str, data: Any) -> bool:
    return data is not None and {"entries", "pg_config", "version"} <= data.keys()


def _is_pickle(text: str, _data: Any) -> bool:
    return text[1:2] in {"\x02", "\x03", "\x04", "\x05"} and "pg_config" in text


def _refuse_pickle(_text: str, _data: Any, file: str) -> Log:
    raise damaged(
        "a dump of torch's flight recorder as a pickle, which could run anything",
        file,
        "have it written as JSON: torch._C._distributed_c10d._dump_nccl_trace_json()",
    )


def _log_of(file: str, program: str, messages: tuple[Message, ...]) -> Log:
    """List what is told of each hop, by the side that saw it: the largest messages."""
    rows = []
    for hop, sent in sorted({(message.hop, message.sent) for message in messages}):
        mine = [m for m in messages if (m.hop, m.sent) == (hop, sent)]
        size = max(message.size_bytes for message in mine)
        took = median(message.time_ns for message in mine if message.size_bytes == size)
        rows.append((*hop, "sender" if sent else "receiver", len(mine), size, took / NS_PER_S))
    return Log(
        file=file,
        program=program,
        about=program,
        columns=("from_rank", "to_rank", "seen_by", "messages", "largest_bytes", "median_s"),
        rows=tuple(rows),
        messages=messages,
    )


def _read_flight_recorder(_text: str, data: Any, file: str) -> Log:
    """Read the messages of one rank, and what their kernels took."""
    try:
        dump = msgspec.convert(data, _Dump, strict=False)
    except (msgspec.ValidationError, OverflowError) as error:
        raise damaged(f"no dump of torch's flight recorder: {error}", file) from error
    ranks = {
        name: [int(word) for word in re.findall(r"\d{1,9}", group.ranks)]
        for name, group in dump.pg_config.items()
    }
    messages = tuple(_timed(dump, ranks))
    if not messages:
        raise damaged("no message in it was timed", file, _TIMED)
    return _log_of(file, "flight recorder", messages)


def _timed(dump: _Dump, ranks: dict[str, list[int]]) -> Iterator[Message]:
    """Yield messages that have a time of their own, or share one with others of a group."""
    waiting: dict[str, list[tuple[bool, int, int, int]]] = {}
    for entry in dump.entries:
        group = entry.process_group[0] if entry.process_group else ""
        told = _CALL.match(entry.profiling_name)
        if told:
            sent = told[1] is not None
            here, there = int(told[2] or told[5]), int(told[3] or told[6])
            members = ranks.get(group, [])
            if max(here, there) < len(members):  # counted inside the group
                here, there = members[here], members[there]
            source, destination = (here, there) if sent else (there, here)
            call = sent, source, destination, _bytes_of(entry)
            if entry.duration_ms is None:
                waiting.setdefault(group, []).append(call)
                continue
            calls = [call]
        elif entry.profiling_name.endswith(":coalesced"):
            calls = waiting.pop(group, [])
            if entry.duration_ms is None:
                continue
        else:
            continue
        for sent, source, destination, size in calls:
            yield Message(
                hop=(source, destination),
                sent=sent,
                size_bytes=size,
                time_ns=(entry.duration_ms or 0.0) * 1000 * NS_PER_US,
                alone=len(calls) == 1,
            )


def _bytes_of(entry: _Entry) -> int:
    shapes = zip(entry.input_sizes, entry.input_dtypes, strict=False)
    return sum((element_bytes(dtype) or 0) * prod(shape) for shape, dtype in shapes)


def _read_inspector(text: str, _data: Any, file: str) -> Log:
    """Read the messages of whatever ranks have written lines; those of collectives are counted."""
    messages = []
    collectives = 0
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            said = msgspec.convert(json.loads(line), _Line, strict=False)
        except (ValueError, RecursionError, OverflowError) as error:
            if number == len(lines):  # cut off where it was being written
                break
            raise damaged(f"line {number}: {error}", file, _LINES) from error
        perf, rank = said.p2p_perf, said.header.rank
        if perf is None:
            collectives += 1
        elif perf.p2p_peer >= 0 and rank >= 0 and perf.p2p_exec_time_us > 0:
            sent = perf.p2p.lower() == "send"
            hop = (rank, perf.p2p_peer) if sent else (perf.p2p_peer, rank)
            messages.append(
                Message(
                    hop=hop,
                    sent=sent,
                    size_bytes=perf.p2p_msg_size_bytes,
                    time_ns=perf.p2p_exec_time_us * NS_PER_US,
                )
            )
    if not messages:
        what = f"{collectives} collectives" if collectives else "nothing"
        raise damaged(
            f"{what} and no message between two ranks that names its peer",
            file,
            "record a job with a pipeline, by NCCL 2.30 or newer",
        )
    return _log_of(file, "NCCL Inspector", tuple(messages))


READERS = (
    LogReader(_is_inspector, _read_inspector),
    LogReader(_is_flight_recorder, _read_flight_recorder),
    LogReader(_is_pickle, _refuse_pickle),
)
