"""Ways to damage a trace, each a function of a random source and what it damages."""

from __future__ import annotations

import datetime as dt
import decimal
import gzip
import re
import sqlite3
import zlib
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

import pyarrow as pa
from fuzz.seeds import OPS_HEADER, as_parquet, op_rows

ODD_NUMBERS = (
    b"-1", b"0", b"-0.0", b"1e999", b"-1e999", b"NaN", b"Infinity", b"-Infinity", b"1e15", b"4e15",
    b"9223372036854775807", b"9223372036854775808", b"-9223372036854775808", b"1e-320", b"00",
    b"18446744073709551616", b"2147483647", b"2147483648", b"-2147483648", b"1.5", b"+1", b".5",
    b"0x10", b"1" * 30, b"7" * 5000, b'"12"', b'"soon"', b"null", b"true", b"[]", b"{}", b"1_000",
    b"", b"4611686018427387904", b"3999999999999999.9", b"1048577",
)  # fmt: skip
ODD_TEXTS = (
    "", "\ud800", "\udfff\ud800", "\x00", "\ufeff", "\x1b[31mred", "[red]", "a\nb", "x" * 5000,
    "\U0001f600", "},{", '"},{"', "\\", "nccl:", "c10d::send", "record_param_comms", "[memory]",
    "kernel", "[" * 3000, "9" * 5000, "١٢", "../../etc", "rank7", "nccl:coalesced", "gpu_memcpy",
)  # fmt: skip
ODD_VALUES = (
    None, True, False, 0, -1, 1.5, 2**31, 2**63, 2**64, -(2**63), 10**30, 1e300, float("nan"),
    float("inf"), [], {}, [None], [[]], {"a": {}}, [[2**62, 2**62]], *ODD_TEXTS,
)  # fmt: skip
ODD_BYTES = (
    b"\x00", b"\xff", b"\xef\xbb\xbf", b"\n", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":",
    b"},{", b"\xed\xa0\x80", b"\\ud800", b"PAR1", b"\x1f\x8b", b"SQLite format 3\0",
)  # fmt: skip
EVENT_KEYS = ("ph", "cat", "name", "tid", "pid", "ts", "dur", "args")

_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?")
# Recursion in Python ends at about 1,000 levels: just below, at and far beyond it.
_DEPTHS = (3, 300, 900, 940, 960, 970, 980, 990, 1000, 5000)


# ---- bytes of any format


def flip_bytes(random: Random, data: bytes) -> bytes:
    damaged = bytearray(data)
    for _ in range(random.choice((1, 1, 3, 30)) if data else 0):
        damaged[random.randrange(len(damaged))] ^= 1 << random.randrange(8)
    return bytes(damaged)


def cut_short(random: Random, data: bytes) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def remove_slice(random: Random, data: bytes) -> bytes:
    first, last = _slice(random, data)
    return data[:first] + data[last:]


def repeat_slice(random: Random, data: bytes) -> bytes:
    first, last = _slice(random, data)
    return data[:last] + data[first:last] * random.choice((1, 1, 2, 20)) + data[last:]


def swap_slices(random: Random, data: bytes) -> bytes:
    a, b, c = sorted(random.randrange(len(data) + 1) for _ in range(3))
    return data[:a] + data[b:c] + data[a:b] + data[c:]


def put_odd_bytes(random: Random, data: bytes) -> bytes:
    for _ in range(random.choice((1, 1, 4))):
        at = random.choice((0, len(data), random.randrange(len(data) + 1)))
        data = data[:at] + random.choice(ODD_BYTES) + data[at:]
    return data


def put_odd_numbers(random: Random, data: bytes) -> bytes:
    found = list(_NUMBER.finditer(data))
    chosen = random.sample(found, k=min(len(found), random.choice((1, 2, 10))))
    for match in sorted(chosen, key=re.Match.start, reverse=True):
        data = data[: match.start()] + random.choice(ODD_NUMBERS) + data[match.end() :]
    return data


def blank_out(random: Random, data: bytes) -> bytes:
    first, last = _slice(random, data)
    return (
        data[:first]
        + random.choice((b"\0", b" ", b"0,", b"{", b'"')) * (last - first)
        + data[last:]
    )


def _slice(random: Random, data: bytes) -> tuple[int, int]:
    first = random.randrange(len(data) + 1)
    longest = random.choice((1, 10, 300, 5000))
    return first, min(len(data), first + random.randrange(longest + 1))


BYTE_MUTATORS: tuple[Callable[[Random, bytes], bytes], ...] = (
    flip_bytes, cut_short, remove_slice, repeat_slice, swap_slices, put_odd_bytes, put_odd_numbers,
    put_odd_numbers, blank_out,
)  # fmt: skip


# ---- the structure of a Kineto document


def drop_keys(random: Random, content: dict[str, Any]) -> None:
    for _ in range(random.choice((1, 5))):
        holder = random.choice(_holders(random, content))
        if holder:
            del holder[random.choice(list(holder))]


def put_odd_values(random: Random, content: dict[str, Any]) -> None:
    for _ in range(random.choice((1, 5, 30))):
        _put(random, content, lambda: deepcopy(random.choice(ODD_VALUES)))


def put_odd_events(random: Random, content: dict[str, Any]) -> None:
    events = _events(content)
    for _ in range(random.choice((1, 5))):
        events.insert(random.randrange(len(events) + 1), deepcopy(random.choice(ODD_VALUES)))


def nest_deeply(random: Random, content: dict[str, Any]) -> None:
    """Mark a place; `deepen` puts the nesting into the text, where json.dumps could not."""
    _put(random, content, lambda: f"<deep {random.choice(_DEPTHS)}>")


def swap_arguments(random: Random, content: dict[str, Any]) -> None:
    events = [event for event in _events(content) if isinstance(event, dict)]
    for _ in range(5 if events else 0):
        left, right = random.choice(events), random.choice(events)
        key = random.choice(EVENT_KEYS)
        left[key], right[key] = right.get(key), left.get(key)


def put_a_long_text(random: Random, content: dict[str, Any]) -> None:
    def long() -> str:
        size = random.choices((10_000, 300_000, 2_000_000), weights=(90, 9, 1))[0]
        return random.choice(("x", "é", '"', "},{")) * size

    _put(random, content, long)


def shuffle_events(random: Random, content: dict[str, Any]) -> None:
    random.shuffle(_events(content))


def forget_events(random: Random, content: dict[str, Any]) -> None:
    content["traceEvents"] = random.choice(([], [{}], {}, None, 3, "text", [[]]))


def _put(random: Random, content: dict[str, Any], make: Callable[[], Any]) -> None:
    """Put a value in the place of one that is there."""
    holder = random.choice(_holders(random, content))
    if holder:
        value = make()
        holder[random.choice(list(holder))] = value


def _holders(random: Random, content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return objects whose members may be changed: of the header or of one event."""
    info = content.get("distributedInfo")
    holders = [content, info]
    if isinstance(info, dict) and isinstance(info.get("pg_config"), list):
        holders += info["pg_config"]
    for _ in range(6):
        event = random.choice(_events(content) or [{}])
        holders += [event, event.get("args")] if isinstance(event, dict) else []
    return [holder for holder in holders if isinstance(holder, dict)]


def _events(content: dict[str, Any]) -> list[Any]:
    events = content.get("traceEvents")
    return events if isinstance(events, list) else []


def deepen(data: bytes) -> bytes:
    """Replace the marks of `nest_deeply` by lists or objects in each other."""

    def nest(match: re.Match[bytes]) -> bytes:
        depth = int(match[1])
        if depth % 20:
            return b'{"a":' * depth + b"1" + b"}" * depth
        return b"[" * depth + b"]" * depth

    return re.sub(rb'"<deep (\d+)>"', nest, data)


def double_keys(random: Random, data: bytes) -> bytes:
    key = random.choice((b'"ts":', b'"traceEvents":', b'"args":', b'"rank":', b'"tid":'))
    value = random.choice((b"1", b"null", b"[]", b"{}", b'"x"', b'[{"ph":"X"}]'))
    return data.replace(key, key + value + b"," + key, random.choice((1, 50)))


STRUCTURE_MUTATORS: tuple[Callable[[Random, dict[str, Any]], None], ...] = (
    drop_keys, put_odd_values, put_odd_values, put_odd_events, nest_deeply, swap_arguments,
    put_a_long_text, shuffle_events, forget_events,
)  # fmt: skip


# ---- gzip


def pack(random: Random, data: bytes) -> bytes:
    """Compress, mostly soundly."""
    packed = zlib.compressobj(wbits=31, level=random.choice((0, 1, 6)))
    whole = packed.compress(data) + packed.flush()
    if random.random() < 0.5:
        return whole
    return random.choice(GZIP_MUTATORS)(random, data, whole)


def _wrong_checksum(_: Random, __: bytes, whole: bytes) -> bytes:
    return whole[:-8] + b"\1\2\3\4" + whole[-4:]


def _wrong_length(_: Random, __: bytes, whole: bytes) -> bytes:
    return whole[:-4] + b"\xff\xff\xff\xff"


def _several_members(random: Random, data: bytes, _: bytes) -> bytes:
    at = random.randrange(len(data) + 1)
    empty = gzip.compress(b"", mtime=0)
    middle = random.choice((b"", empty, empty * 300, b"\0" * 9, b"\x1f"))
    return gzip.compress(data[:at], 1, mtime=0) + middle + gzip.compress(data[at:], 1, mtime=0)


def _trailing(random: Random, _: bytes, whole: bytes) -> bytes:
    return whole + random.choice((b"\0" * 600, b"rubbish", whole, GZIP_HEAD, b"\x1f"))


def _damaged(random: Random, _: bytes, whole: bytes) -> bytes:
    return random.choice(BYTE_MUTATORS)(random, whole)


def _bomb(random: Random, data: bytes, _: bytes) -> bytes:
    size = 70_000_000 if random.random() < 0.02 else 1_000_000
    return gzip.compress(data[:2000] + random.choice((b" ", b"0", b"\0", b"[")) * size, 1, mtime=0)


def _packed_twice(_: Random, __: bytes, whole: bytes) -> bytes:
    return gzip.compress(whole, 1, mtime=0)


GZIP_HEAD = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03"
GZIP_MUTATORS: tuple[Callable[[Random, bytes, bytes], bytes], ...] = (
    _wrong_checksum, _wrong_length, _several_members, _trailing, _damaged, _damaged, _damaged,
    _bomb, _packed_twice,
)  # fmt: skip


# ---- SQLite


def damage_export(random: Random, data: bytes) -> bytes:
    """Change an Nsight export by SQL: odd values, lost columns and tables, views for tables."""
    with sqlite3.connect(":memory:") as db:
        db.deserialize(data)
        tables = [
            name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type='table'")
        ]
        for _ in range(random.choice((1, 2, 6))):
            try:
                db.execute(*_odd_statement(random, db, random.choice(tables)))
            except (sqlite3.Error, UnicodeEncodeError):
                continue
        db.commit()
        return db.serialize()


def _odd_statement(
    random: Random, db: sqlite3.Connection, table: str
) -> tuple[str, tuple[Any, ...]]:
    columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")] or ["x"]
    column = random.choice(columns)
    value = random.choice(
        (None, -1, 0, 2**31, 2**63 - 1, -(2**63), 1.5, 1e300, b"\xff", *ODD_TEXTS)
    )
    share = random.choice((1, 2, 10))
    update = f"UPDATE {table} SET {column} = ? WHERE rowid % {share} = 0"  # noqa: S608
    return random.choice(
        (
            (update, (value,)),
            (update, (value,)),
            (update, (value,)),
            (f"DELETE FROM {table} WHERE rowid % {share} = 0", ()),  # noqa: S608
            (f"ALTER TABLE {table} DROP COLUMN {column}", ()),
            (f"ALTER TABLE {table} ADD COLUMN odd AS ({column} || 'x')", ()),
            (f"DROP TABLE {table}", ()),
            (f"ALTER TABLE {table} RENAME TO odd", ()),
            (f"UPDATE {table} SET {column} = CAST(x'fffe41' AS TEXT)", ()),  # noqa: S608
        )
    )


# ---- op tables


def odd_parquet(random: Random) -> bytes:
    """Write an op table with columns of types that nobody expects."""
    columns = {n: list(c) for n, c in zip(OPS_HEADER, zip(*op_rows(), strict=True), strict=True)}
    for _ in range(random.choice((1, 2))):
        name = random.choice(OPS_HEADER)
        columns[name] = random.choice(_ODD_COLUMNS)(len(op_rows()))
    return as_parquet(columns)


_ODD_COLUMNS: tuple[Callable[[int], Any], ...] = (
    pa.nulls,
    lambda n: [None] + [1] * (n - 1),
    lambda n: [True] * n,
    lambda n: [float("nan")] * n,
    lambda n: [float("inf")] * n,
    lambda n: pa.array([2**63] * n, type=pa.uint64()),
    lambda n: pa.array([2**62] * n, type=pa.timestamp("ns")),
    lambda n: pa.array([2**50] * n, type=pa.timestamp("s")),
    lambda n: pa.array([2**30] * n, type=pa.date32()),
    lambda n: pa.array([2**62] * n, type=pa.duration("us")),
    lambda n: pa.array([1] * n, type=pa.float16()),
    lambda n: [decimal.Decimal("1e20")] * n,
    lambda n: [decimal.Decimal(7)] * n,
    lambda n: [dt.datetime(2024, 1, 1, tzinfo=dt.UTC)] * n,
    lambda n: [b"\xff"] * n,
    lambda n: [""] * n,
    lambda n: [[1, 2]] * n,
    lambda n: [{"a": 1}] * n,
    lambda n: ["F"] * n,
    lambda n: ["1" * 50] * n,
    lambda n: pa.array(["F"] * n).dictionary_encode(),
)
