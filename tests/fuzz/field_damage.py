"""Ways to make a trace say something else and stay valid JSON: fields of events, and whole ranks.

A `Document` is one rank's trace, taken apart: its header, and its events as they are written. A
damage changes it in place and returns what it did, in words.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from support.traces.kineto_events import Event

_GONE = object()
BAD_VALUES: tuple[Any, ...] = (
    _GONE, None, True, False, 0, 1, -1, 0.5, -2.5, 2**31, 2**63, -(2**63), 2**64, 1e18, 1e308,
    float("nan"), float("inf"), "", "abc", "12", "1e3", [], {}, [1, 2], {"a": 1}, "x" * 300,
)  # fmt: skip

# Whatever the reader takes from an event, by the kind of event.
_EVERY = ("ph", "cat", "name", "tid", "ts", "dur", "args")
_DEVICE = ("device", "stream", "correlation", "bytes")
_OPERATOR = (
    "Collective name", "In msg nelems", "Out msg nelems", "dtype", "Process Group Name",
    "Process Group Description", "Process Group Ranks", "Src Rank", "Dst Rank", "Concrete Inputs",
    "Input Dims", "Input type",
)  # fmt: skip
_FIELDS: dict[str, tuple[str, ...]] = {
    "kernel": (*_EVERY, *_DEVICE, "graph id"),
    "nccl kernel": (*_EVERY, *_DEVICE, *_OPERATOR[:4]),
    "copy": (*_EVERY, *_DEVICE),
    "launch": (*_EVERY, "correlation"),
    "wait": (*_EVERY, "correlation"),
    "call": (*_EVERY, *_OPERATOR),
    "details": (*_EVERY, *_OPERATOR),
    "nccl range": _EVERY,
    "step": _EVERY,
    "range": _EVERY,
    "device range": _EVERY,
    "memory": (
        "ph", "cat", "name", "ts", "args", "Bytes", "Total Allocated", "Total Reserved",
        "Device Type", "Device Id",
    ),
    "metadata": ("ph", "name", "tid", "args"),
}  # fmt: skip
_HEADER: tuple[tuple[str, ...], ...] = (
    ("schemaVersion",), ("deviceProperties",), ("deviceProperties", "id"),
    ("deviceProperties", "name"), ("deviceProperties", "totalGlobalMem"),
    ("deviceProperties", "numSms"), ("distributedInfo",), ("distributedInfo", "rank"),
    ("distributedInfo", "world_size"), ("distributedInfo", "backend"),
    ("distributedInfo", "pg_config"), ("distributedInfo", "pg_config", "pg_name"),
    ("distributedInfo", "pg_config", "pg_desc"), ("distributedInfo", "pg_config", "ranks"),
    ("distributedInfo", "nccl_version"), ("baseTimeNanoseconds",), ("profile_memory",),
    ("record_shapes",), ("with_stack",), ("host_name",), ("traceName",), ("cuda_runtime_version",),
)  # fmt: skip


def kind_of(event: Event) -> str:  # noqa: PLR0911 (a table of kinds)
    """Say what the reader takes an event for; nothing for what it steps over."""
    category, name = event.get("cat", ""), event.get("name", "")
    if category == "kernel":
        return "nccl kernel" if "nccl" in name else "kernel"
    if category in {"gpu_memcpy", "gpu_memset"}:
        return "copy"
    if category in {"cuda_runtime", "cuda_driver"}:
        waits = "Synchronize" in name
        queues = any(word in name for word in ("Launch", "Memcpy", "Memset", "Graph"))
        return "wait" if waits else "launch" if queues else ""
    if category == "cpu_op":
        calls = name.startswith("c10d::")
        return "call" if calls else "details" if name == "record_param_comms" else ""
    if category == "user_annotation":
        if name.startswith("nccl:"):
            return "nccl range"
        return "step" if name.startswith("ProfilerStep#") else "range"
    if category == "gpu_user_annotation":
        return "device range"
    if category == "cpu_instant_event":
        return "memory"
    return "metadata" if event.get("ph") == "M" else ""


@dataclass(slots=True)
class Document:
    """One rank's trace, taken apart. Events are written when they are asked for as bytes."""

    header: dict[str, Any]
    events: list[Event]
    written: list[bytes]
    rows: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Document:
        """Take a recorded file apart; what the reader never looks at is left out."""
        content = json.loads(gzip.decompress(path.read_bytes()))
        events = [event for event in content.pop("traceEvents") if kind_of(event)]
        rows: defaultdict[str, list[int]] = defaultdict(list)
        for row, event in enumerate(events):
            rows[kind_of(event)].append(row)
        return cls(header=content, events=events, written=list(map(write, events)), rows=dict(rows))

    def copy(self) -> Document:
        """Return one that may be damaged."""
        return Document(
            header=deepcopy(self.header),
            events=list(self.events),
            written=list(self.written),
            rows=self.rows,
        )

    def change(self, row: int, changed: Event) -> None:
        """Put another event in the place of one."""
        self.events[row] = changed
        self.written[row] = write(changed)

    def each(self, rows: Iterable[int], change: Callable[[Event], None]) -> None:
        """Change events, each in a copy of its own."""
        for row in rows:
            changed = {**self.events[row], "args": dict(self.events[row].get("args") or {})}
            change(changed)
            self.change(row, changed)

    def drop(self, rows: Iterable[int]) -> None:
        """Leave events out."""
        for row in rows:
            self.written[row] = b""

    def bytes(self) -> bytes:
        """Return the file."""
        head = json.dumps(self.header)[1:-1].encode()
        events = b",".join(filter(None, self.written))
        return b'  {\n%b,\n  "traceEvents": [%b\n  ],\n  "traceName": "x"\n}' % (head, events)


def write(event: Event) -> bytes:
    """Write an event in Kineto's own layout, its keys as they come."""
    body = json.dumps({key: value for key, value in event.items() if key != "args"})[1:-1]
    tail = ""
    if isinstance(event.get("args"), dict):
        tail = f',\n    "args": {{\n      {json.dumps(event["args"])[1:-1]}\n    }}'
    elif "args" in event:
        tail = f',\n    "args": {json.dumps(event["args"])}'
    return f"\n  {{\n    {body}{tail}\n  }}".encode()


# ---- fields


def damage_field(random: Random, document: Document) -> str:
    """Give one field a bad value: in one event, in some, or in all of their kind."""
    kind = random.choice(sorted(document.rows))
    name = random.choice(_FIELDS[kind])
    value = random.choice(BAD_VALUES)
    rows = document.rows[kind]
    scope = random.choice(("one", "one", "three", "tenth", "all"))
    if scope != "all":
        most = {"one": 1, "three": 3, "tenth": max(1, len(rows) // 10)}[scope]
        rows = random.sample(rows, k=min(most, len(rows)))
    inside = "args" if name not in _EVERY else ""

    def change(event: Event) -> None:
        _set(event["args"] if inside else event, name, value)

    document.each(rows, change)
    return f"{scope} {kind}: {name} = {_shown(value)}"


def damage_header(random: Random, document: Document) -> str:
    """Give one field of the header a bad value."""
    path = random.choice(_HEADER)
    value = random.choice(BAD_VALUES)
    inside: Any = document.header
    for step in path[:-1]:
        inside = inside.get(step) if isinstance(inside, dict) else None
        if isinstance(inside, list):
            inside = random.choice(inside) if inside else None
    if isinstance(inside, dict):
        _set(inside, path[-1], value)
    return f"header: {'.'.join(path)} = {_shown(value)}"


def _set(inside: dict[str, Any], name: str, value: Any) -> None:
    if value is _GONE:
        inside.pop(name, None)
    else:
        inside[name] = value


def _shown(value: object) -> str:
    return "nothing" if value is _GONE else repr(value)[:40]


# ---- whole ranks: what profilers, copies and people do to them


def _timed(document: Document, *kinds: str) -> list[int]:
    return [row for kind in kinds or document.rows for row in document.rows.get(kind, ())]


_ON_DEVICE = ("kernel", "nccl kernel", "copy")


def lose_some(random: Random, document: Document) -> str:
    """Lose events here and there, as full buffers do."""
    kinds = random.choice((("kernel",), _ON_DEVICE, ("nccl kernel",), ("launch",), ("call",),
                           ("details",), ("memory",), ("step",), ("range",)))  # fmt: skip
    share = random.choice((0.01, 0.1, 0.5, 1.0))
    rows = _timed(document, *kinds)
    document.drop(random.sample(rows, k=min(len(rows), max(1, round(share * len(rows))))))
    return f"{share:.0%} of {'/'.join(kinds)} lost"


def lose_a_stretch(random: Random, document: Document) -> str:
    """Lose all device work of a while, as a lost buffer does."""
    rows = _timed(document, *random.choice((_ON_DEVICE, ("kernel",), ("launch",))))
    rows.sort(key=lambda row: document.events[row]["ts"])
    share = random.choice((0.02, 0.1, 0.3))
    first = random.randrange(max(1, round(len(rows) * (1 - share))))
    lost = rows[first : first + max(1, round(share * len(rows)))]
    document.drop(lost)
    return f"a stretch of {share:.0%} lost"


def move_one(random: Random, document: Document) -> str:
    """Give one event a time of its own."""
    kind = random.choice(
        [k for k in (*_ON_DEVICE, "launch", "step", "call") if document.rows.get(k)]
    )
    row = random.choice(document.rows[kind])
    what, change = random.choice(
        (
            ("ts 0", lambda e: e.update(ts=0)),
            ("a second late", lambda e: e.update(ts=e["ts"] + 1e6)),
            ("a second early", lambda e: e.update(ts=e["ts"] - 1e6)),
            ("20 ms late", lambda e: e.update(ts=e["ts"] + 2e4)),
            ("20 ms early", lambda e: e.update(ts=e["ts"] - 2e4)),
            ("a second long", lambda e: e.update(dur=1e6)),
            ("50 ms long", lambda e: e.update(dur=5e4)),
            ("no time long", lambda e: e.update(dur=0)),
        )
    )
    document.each([row], change)
    return f"one {kind} {what}"


def scale_times(random: Random, document: Document) -> str:
    """Write times in another unit: all, those of the device, or durations alone."""
    factor = random.choice((1e3, 1e-3, 1e6, 1e-6, 2.0, 0.5, 1.005))
    kinds = random.choice(((), _ON_DEVICE, ("kernel",)))
    fields = random.choice((("ts", "dur"), ("dur",), ("ts",)))

    def change(event: Event) -> None:
        for name in fields:
            if isinstance(event.get(name), int | float):
                event[name] *= factor

    document.each(_timed(document, *kinds), change)
    return f"{'/'.join(fields)} of {'/'.join(kinds) or 'all'} × {factor:g}"


def shift_times(random: Random, document: Document) -> str:
    """Shift the times of the device, or of the host, against the other."""
    shift_us = random.choice((-1e6, -5e4, 5e4, 1e6))
    device = random.random() < 0.5
    kinds = [kind for kind in document.rows if (kind in _ON_DEVICE) == device]

    def change(event: Event) -> None:
        event["ts"] += shift_us

    document.each(_timed(document, *kinds), change)
    return f"{'device' if device else 'host'} shifted by {shift_us / 1e3:g} ms"


def swap_times(random: Random, document: Document) -> str:
    """Swap the times of some kernels among each other."""
    rows = random.sample(document.rows["kernel"], k=random.choice((2, 10, 100)))
    others = rows[1:] + rows[:1]
    spans = [(document.events[row]["ts"], document.events[row]["dur"]) for row in others]
    for row, (ts, dur) in zip(rows, spans, strict=True):
        document.each([row], lambda event, ts=ts, dur=dur: event.update(ts=ts, dur=dur))
    return f"times of {len(rows)} kernels swapped"


def repeat_events(random: Random, document: Document) -> str:
    """Write events twice."""
    kinds = random.choice((_ON_DEVICE, ("kernel",), ("launch",), ("call",), ()))
    rows = _timed(document, *kinds)
    kept = random.sample(rows, k=max(1, round(len(rows) * random.choice((0.1, 1.0)))))
    document.written += [document.written[row] for row in kept]
    return f"{len(kept)} of {'/'.join(kinds) or 'all'} twice"


def renumber(random: Random, document: Document) -> str:
    """Give kernels the numbers of others: correlations, streams, devices."""
    name, change = random.choice(
        (
            (
                "correlation + 1",
                lambda e: e["args"].update(correlation=e["args"]["correlation"] + 1),
            ),
            ("correlation of all the same", lambda e: e["args"].update(correlation=77)),
            ("all on one stream", lambda e: e["args"].update(stream=7)),
            ("each on a stream of its own", lambda e: e["args"].update(stream=int(e["ts"]) % 9999)),
            ("device 10^9", lambda e: e["args"].update(device=10**9)),
        )
    )
    document.each(_timed(document, *_ON_DEVICE), change)
    return name


def another_clock(random: Random, document: Document) -> str:
    """Give the rank another base: years off, none, text."""
    base = document.header["baseTimeNanoseconds"]
    wrong = random.choice(
        (0, str(base), "soon", base - 10**18, base + 10**18, base + 3_600 * 10**9, -base,
         base * 2.0, base / 1e9, base // 1000)
    )  # fmt: skip
    document.header["baseTimeNanoseconds"] = wrong
    return f"base {wrong!r}"


def scale_memory(random: Random, document: Document) -> str:
    """Make memory another: totals, changes, of one event or of all."""
    rows = document.rows.get("memory", [])
    if not rows:
        return "no memory"
    rows = random.choice((rows, random.sample(rows, k=1)))
    factor = random.choice((1000, 2, 1024, 0))
    name = random.choice(("Total Allocated", "Bytes", "Total Reserved"))

    def change(event: Event) -> None:
        event["args"][name] *= factor

    document.each(rows, change)
    return f"{name} of {len(rows)} × {factor}"


def cut_away(random: Random, document: Document) -> str:
    """Lose all that comes before or after a moment, as if the file were of a shorter capture."""
    rows = sorted(_timed(document), key=lambda row: document.events[row].get("ts", 0))
    share = random.choice((0.02, 0.2, 0.6))
    at = round(share * len(rows))
    lost = rows[:at] if random.random() < 0.5 else rows[-at:]
    document.drop(row for row in lost if kind_of(document.events[row]) != "metadata")
    return f"{'first' if lost[0] == rows[0] else 'last'} {share:.0%} cut away"


def order_keys(random: Random, document: Document) -> str:
    """Write the keys of events in another order: the same trace, and it must be read the same."""
    first = random.choice(("ts", "args", "dur", "pid", "cat", "name"))
    some = random.random() < 0.5
    rows = [row for row in range(len(document.events)) if not some or random.random() < 0.5]

    def moved(event: Event) -> Event:
        return {key: event[key] for key in sorted(event, key=lambda key: key != first)}

    for row in rows:
        event = document.events[row]
        body = json.dumps(moved(event), indent=2).replace("\n", "\n  ")
        document.written[row] = f"\n  {body}".encode()
    return f"keys begin with {first} in {len(rows)} events"


def lose_with_launches(random: Random, document: Document) -> str:
    """Lose kernels and the calls that launched them: here and there, or all of a while."""
    kinds = random.choice((("kernel",), ("nccl kernel",)))
    rows = _timed(document, *kinds)
    if kinds == ("kernel",):
        rows.sort(key=lambda row: document.events[row]["ts"])
        share = random.choice((0.1, 0.2))
        many = round(share * len(rows))
        first = random.randrange(len(rows) - many)
        together = random.random() < 0.5
        rows = rows[first : first + many] if together else random.sample(rows, k=many)
    gone = {document.events[row].get("args", {}).get("correlation") for row in rows}
    document.drop(
        row
        for row in _timed(document, *_ON_DEVICE, "launch")
        if document.events[row].get("args", {}).get("correlation") in gone
    )
    return f"{len(rows)} of {'/'.join(kinds)} lost with their launches"


def stretch_kernels(random: Random, document: Document) -> str:
    """Make all compute a little shorter or longer, and leave its starts."""
    factor = random.choice((0.8, 0.9, 0.95, 1.05, 1.1))
    document.each(_timed(document, "kernel"), lambda event: event.update(dur=event["dur"] * factor))
    return f"kernels last {factor:g} times as long"


def merge_threads(_: Random, document: Document) -> str:
    """Write all threads of the host as one."""
    kinds = [kind for kind in document.rows if kind not in {*_ON_DEVICE, "device range"}]
    rows = [row for row in _timed(document, *kinds) if "tid" in document.events[row]]
    document.each(rows, lambda event: event.update(tid=1))
    return "one thread"


def rename_kernels(random: Random, document: Document) -> str:
    """Call kernels of messages something else, or every tenth other as they are called."""
    messages = document.rows.get("nccl kernel", [])
    if random.random() < 0.5 or not messages:
        document.each(messages, lambda event: event.update(name="copy_kernel"))
        return "messages' kernels called something else"
    name = document.events[messages[0]]["name"]
    document.each(_timed(document, "kernel")[::10], lambda event: event.update(name=name))
    return "kernels called as those of messages"


def rename_steps(random: Random, document: Document) -> str:
    """Count steps from another number."""
    more = random.choice((1, 100))

    def change(event: Event) -> None:
        event["name"] = f"ProfilerStep#{int(event['name'][13:]) + more}"

    document.each(_timed(document, "step"), change)
    return f"steps + {more}"


def round_times(random: Random, document: Document) -> str:
    """Write times in whole parts of a millisecond."""
    unit_us = random.choice((1000, 100))
    fields = random.choice((("ts", "dur"), ("dur",)))

    def change(event: Event) -> None:
        for name in fields:
            if isinstance(event.get(name), int | float):
                event[name] = round(event[name] / unit_us) * unit_us

    document.each(_timed(document), change)
    return f"{'/'.join(fields)} in whole {unit_us} us"


def memory_elsewhere(random: Random, document: Document) -> str:
    """Lose every second allocation, or write all in KiB."""
    rows = document.rows.get("memory", [])
    if random.random() < 0.5:
        document.drop(rows[::2])
        return "every second allocation lost"

    def change(event: Event) -> None:
        for name in ("Bytes", "Total Allocated", "Total Reserved"):
            event["args"][name] = event["args"].get(name, 0) // 1024

    document.each(rows, change)
    return "memory in KiB"


def jump_clock(random: Random, document: Document) -> str:
    """Set the clock of a rank forward in the midst of the capture, on host and device alike.

    By less than messages of a few steps wait in queues, they do not tell it.
    """
    share, by_us = random.uniform(0.25, 0.75), random.choice((2e4, 5e4, 2e5))
    moment = _moment(document, share)

    def change(event: Event) -> None:
        if event["ts"] >= moment:
            event["ts"] += by_us
        elif event["ts"] + event.get("dur", 0) >= moment:
            event["dur"] += by_us

    document.each(_with_times(document), change)
    return f"clock jumps by {by_us / 1e3:g} ms at {share:.0%}"


def lose_a_part(random: Random, document: Document) -> str:
    """Lose all of a rank between two moments, host and device alike."""
    lost, first = random.choice((0.05, 0.1, 0.3)), random.uniform(0.2, 0.5)
    begin, end = _moment(document, first), _moment(document, first + lost)
    document.drop(row for row in _with_times(document) if begin <= document.events[row]["ts"] < end)
    return f"{lost:.0%} of its time lost from {first:.0%} on"


def lose_a_name(random: Random, document: Document) -> str:
    """Lose all compute kernels of one name with their launches; one of those that take most."""
    taken: defaultdict[str, float] = defaultdict(float)
    for row in _timed(document, "kernel"):
        taken[document.events[row]["name"]] += document.events[row]["dur"]
    name = random.choice(sorted(taken, key=lambda one: -taken[one])[:5])
    rows = [row for row in _timed(document, "kernel") if document.events[row]["name"] == name]
    gone = {document.events[row]["args"].get("correlation") for row in rows}
    document.drop(
        row
        for row in _timed(document, "kernel", "launch")
        if document.events[row].get("args", {}).get("correlation") in gone
    )
    return f"all {len(rows)} of {name[:30]} lost with their launches"


def shorten_longest(random: Random, document: Document) -> str:
    """Make the longest kernels alone end sooner."""
    share, factor = random.choice((0.01, 0.05, 0.2)), random.choice((0.5, 0.8))
    rows = sorted(_timed(document, "kernel"), key=lambda row: -document.events[row]["dur"])
    longest = rows[: max(1, round(share * len(rows)))]
    document.each(longest, lambda event: event.update(dur=event["dur"] * factor))
    return f"the longest {share:.0%} of kernels last {factor:g} times as long"


def move_messages(random: Random, document: Document) -> str:
    """Let kernels of messages begin late, end early, or last as long as a buffer tells."""
    rows = _timed(document, "nccl kernel")
    what, change = random.choice(
        (
            ("1 ms late", lambda e: e.update(ts=e["ts"] + 1e3)),
            ("10 ms late", lambda e: e.update(ts=e["ts"] + 1e4)),
            ("half as long", lambda e: e.update(dur=e["dur"] / 2)),
            ("20 us long", lambda e: e.update(dur=20.0)),
            ("at their ends", lambda e: e.update(ts=e["ts"] + e["dur"])),
            ("of a clock that wraps", lambda e: e.update(dur=e["dur"] % 1048.576)),
        )
    )
    document.each(rows, change)
    return f"messages {what}"


def share_launches(_: Random, document: Document) -> str:
    """Write every seventh kernel again, later and on another stream."""
    for row in _timed(document, "kernel")[::7]:
        event = document.events[row]
        again = {**event, "ts": event["ts"] + 3e3, "args": {**event["args"], "stream": 999}}
        document.written.append(write(again))
    return "every seventh kernel again, on another stream"


def one_graph(_: Random, document: Document) -> str:
    """Say that all kernels are of one graph, and let them last longer."""
    rows = _timed(document, "kernel")
    document.each(rows, lambda e: e.update(dur=e["dur"] * 1.3, args={**e["args"], "graph id": 1}))
    return "all of one graph, and longer"


def switch_unit(random: Random, document: Document) -> str:
    """Write times in another unit from the midst of the file on."""
    factor, moment = random.choice((1e3, 1e-3)), _moment(document, 0.5)

    def change(event: Event) -> None:
        event["ts"] = moment + (event["ts"] - moment) * factor
        event["dur"] = event.get("dur", 0) * factor

    rows = [row for row in _with_times(document) if document.events[row]["ts"] > moment]
    document.each(rows, change)
    return f"times × {factor:g} from the midst on"


def damage_marks(random: Random, document: Document) -> str:
    """Give marks one number, swap two, lose one between others, or shift all."""
    rows = sorted(_timed(document, "step"), key=lambda row: document.events[row]["ts"])
    if len(rows) < 2:
        return "too few marks"
    names = [document.events[row]["name"] for row in rows]
    what = random.choice(("of one number", "swapped", "without a middle one", "late"))
    if what == "of one number":
        document.each(rows, lambda event: event.update(name=names[0]))
    elif what == "swapped":
        document.each(rows[:1], lambda event: event.update(name=names[1]))
        document.each(rows[1:2], lambda event: event.update(name=names[0]))
    elif what == "without a middle one":
        document.drop(rows[1:2] if len(rows) > 2 else ())
    else:
        late_us = random.choice((0.1, 0.5, 1.0)) * document.events[rows[0]]["dur"]
        document.each(rows, lambda event: event.update(ts=event["ts"] + late_us))
    return f"marks {what}"


def end_memory(random: Random, document: Document) -> str:
    """Lose every other change of memory, or let all come later than they did."""
    rows = document.rows.get("memory", [])
    if random.random() < 0.5:
        document.drop(row for row in rows if random.random() < 0.5)
        return "half of memory's changes lost"
    document.each(rows, lambda event: event.update(ts=event["ts"] + 5e4))
    return "memory 50 ms late"


def _with_times(document: Document) -> list[int]:
    return [row for row in _timed(document) if kind_of(document.events[row]) != "metadata"]


def _moment(document: Document, share: float) -> float:
    """Return when so much of a rank's device time has passed."""
    times = [document.events[row]["ts"] for row in _timed(document, *_ON_DEVICE)]
    return min(times) + share * (max(times) - min(times))


RANK_DAMAGES: tuple[Callable[[Random, Document], str], ...] = (
    lose_some, lose_a_stretch, move_one, scale_times, shift_times, swap_times, repeat_events,
    renumber, another_clock, scale_memory, cut_away, order_keys, lose_with_launches,
    stretch_kernels, merge_threads, rename_kernels, rename_steps, round_times, memory_elsewhere,
    jump_clock, lose_a_part, lose_a_name, shorten_longest, move_messages, share_launches, one_graph,
    switch_unit, damage_marks, end_memory,
)  # fmt: skip
