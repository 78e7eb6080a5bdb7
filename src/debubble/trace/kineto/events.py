"""Bytes of events in → typed events, with what strange writers do forgiven.

msgspec decodes what Kineto writes, into just the fields that are used. Python's own decoder is
slower and forgives more; it is used for headers, and where the typed one says no.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

NO_ARGS = Raw(b"{}")

# Columns are 64-bit; a larger number is a damaged event, not a reason to fail.
Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

# A pair of surrogates is one character; one alone is none, and cannot be printed.
_ESCAPE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)


class Event(Struct, gc=False):
    """One trace event. Arguments stay raw: three quarters of them are never looked at."""

    cat: str = ""
    name: str = ""
    tid: int | str = 0
    ts: float = math.nan
    dur: float = math.nan
    args: Raw = NO_ARGS


class DeviceArgs(Struct, gc=False, frozen=True):
    """Arguments of kernels, copies and memsets."""

    device: Int = -1
    stream: Int = -1
    correlation: Int = -1
    graph: Int = msgspec.field(name="graph id", default=-1)
    queue: Int = msgspec.field(name="sycl queue", default=-1)
    """What Intel's devices have in place of a stream."""


class LaunchArgs(Struct, gc=False, frozen=True):
    """Arguments of runtime and driver calls."""

    correlation: Int = -1


class MemoryArgs(Struct, gc=False, frozen=True):
    """Arguments of `[memory]` events."""

    bytes: Int = msgspec.field(name="Bytes", default=0)
    allocated: Int = msgspec.field(name="Total Allocated", default=-1)
    reserved: Int = msgspec.field(name="Total Reserved", default=-1)
    device_type: Int = msgspec.field(name="Device Type", default=0)
    device: Int = msgspec.field(name="Device Id", default=-1)


class DeviceEvent(Struct, gc=False):
    """A kernel, with its arguments."""

    name: str = ""
    ts: float = math.nan
    dur: float = math.nan
    args: DeviceArgs = DeviceArgs()


class LaunchEvent(Struct, gc=False):
    """A runtime or driver call, with its arguments."""

    name: str = ""
    tid: int | str = 0
    ts: float = math.nan
    dur: float = math.nan
    args: LaunchArgs = LaunchArgs()


class MemoryEvent(Struct, gc=False):
    """A `[memory]` event, with its arguments."""

    ts: float = math.nan
    args: MemoryArgs = MemoryArgs()


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Events that were decoded together: sorted by kind where that was possible."""

    others: Sequence[Event] = ()
    device: Sequence[DeviceEvent] = ()
    launches: Sequence[LaunchEvent] = ()
    memory: Sequence[MemoryEvent] = ()


class OperatorArgs(Struct, gc=False):
    """Arguments of communication operators, and of kernels that carry them themselves."""

    collective: str = msgspec.field(name="Collective name", default="")
    in_elements: Int = msgspec.field(name="In msg nelems", default=-1)
    out_elements: Int = msgspec.field(name="Out msg nelems", default=-1)
    dtype: str = ""
    group: str = msgspec.field(name="Process Group Name", default="")
    description: str = msgspec.field(name="Process Group Description", default="")
    group_ranks: str | list[Int] = msgspec.field(name="Process Group Ranks", default="")
    source: Int = msgspec.field(name="Src Rank", default=-1)
    destination: Int = msgspec.field(name="Dst Rank", default=-1)
    concrete_inputs: list[Any] = msgspec.field(name="Concrete Inputs", default_factory=list)
    shapes: list[Any] = msgspec.field(name="Input Dims", default_factory=list)
    types: list[Any] = msgspec.field(name="Input type", default_factory=list)


class MetadataArgs(Struct, gc=False):
    """Arguments of `ph: M` events: names of processes and threads."""

    name: str = ""


decode_events = msgspec.json.Decoder(list[Event]).decode
decode_event = msgspec.json.Decoder(Event).decode
decode_device_events = msgspec.json.Decoder(list[DeviceEvent]).decode
decode_launch_events = msgspec.json.Decoder(list[LaunchEvent]).decode
decode_memory_events = msgspec.json.Decoder(list[MemoryEvent]).decode

_ArgsType = TypeVar("_ArgsType", bound=Struct)


class ArgsDecoder:
    """Decodes the arguments of many events in one go; one by one only where that fails."""

    def __init__(self, kind: type[_ArgsType]) -> None:
        self._kind = kind
        self._decode = msgspec.json.Decoder(list[kind]).decode  # type: ignore[valid-type]
        self.wrong = 0
        """Events whose arguments are none, or of which one is of another type than it has."""

    def __call__(self, events: Sequence[Event]) -> list[Any]:
        """Return one struct an event, in order; what cannot be understood keeps its default."""
        raws = [event.args for event in events]
        try:
            return self._decode(b"[%b]" % b",".join(raws))
        except (msgspec.MsgspecError, RecursionError, ValueError):
            return [self._salvage(raw) for raw in raws]

    def _salvage(self, raw: Raw) -> Any:
        try:
            value = load_json(mend_text(bytes(raw)))
        except (ValueError, RecursionError):
            value = None
        args, wrong = salvage(self._kind, value)
        self.wrong += bool(wrong)
        return args


def salvage(kind: type[_ArgsType], value: object) -> tuple[_ArgsType, list[str]]:
    """Make of an object what can be understood of it, and name the fields that cannot.

    A field that is not what it should be keeps its default. What is no object has none.
    """
    if not isinstance(value, dict):
        return kind(), [""]
    known, wrong = {}, []
    for field in msgspec.structs.fields(kind):
        if field.encode_name in value:
            try:
                known[field.name] = msgspec.convert(
                    value[field.encode_name], field.type, strict=False
                )
            except (msgspec.ValidationError, OverflowError, RecursionError):
                wrong.append(field.encode_name)
    return kind(**known), wrong


scan_json = json.JSONDecoder().raw_decode


def mend_text(data: bytes) -> str:
    """Decode JSON text; bad UTF-8 and halves of surrogate pairs become U+FFFD."""
    text = data.decode("utf-8", "replace")
    if "\\u" not in text:
        return text
    return _ESCAPE.sub(lambda escape: r"\ufffd" if escape[1] else escape[0], text)


def load_json(text: str) -> Any:
    """Parse one JSON value that `mend_text` has gone over."""
    value, _ = scan_json(text.lstrip(" \t\r\n"))
    return value
