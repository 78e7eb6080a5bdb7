"""What `find` answers in → named numbers for whatever tracks experiments; and TensorBoard's file.

    wandb.log(debubble.scalars(found))                      # Weights & Biases
    mlflow.log_metrics(debubble.scalars(found), step=1000)  # MLflow

A name is stable, a unit is in it, and every value is a float: a run that is captured again and
again draws a line. TensorBoard reads files, and those are written here: its format is five fields.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from debubble.answers.find import FindAnswer
from debubble.whole_file import write_file

_REFLECTED = 0x82F63B78
_MASK = 0xA282EAD8
_WORD = 0xFFFFFFFF


def scalars(found: FindAnswer, prefix: str = "debubble") -> dict[str, float]:
    """Return the figures of a run by name, such as `debubble/cause/imbalance_fraction`.

    What is not known is left out: a gap in a line says so, a zero would not.
    """
    numbers = found.numbers
    named: dict[str, float | None] = {
        "bubble_fraction": numbers.bubble_fraction,
        "theory_bubble_fraction": found.theory.bubble_fraction,
        "batch_latency_s": numbers.batch_latency_s,
        "step_time_s": numbers.step_time_s,
        "microbatches_per_s": numbers.microbatches_per_s,
        "tokens_per_s": numbers.tokens_per_s,
        "useful_fraction": found.utilisation.useful_fraction,
        "apparent_fraction": found.utilisation.apparent_fraction,
    }
    for held, peak in zip(found.memory, numbers.peak_memory_bytes, strict=True):
        named[f"peak_memory_bytes/rank{held.rank}"] = peak
    for cause, share in (found.ledger.shares if found.ledger else {}).items():
        named[f"cause/{cause}_fraction"] = share
    for saving in found.savings or ():
        named[f"saving/{saving.cause}_s"] = saving.saved_s
    for hop in found.hops:
        name = f"hop/{hop.from_rank}to{hop.to_rank}"
        named[f"{name}_wire_s"] = hop.wire_s.median
        named[f"{name}_cost_s"] = hop.cost_per_batch_s
    return {f"{prefix}/{name}": float(value) for name, value in named.items() if value is not None}


def write_events(folder: Path, values: Mapping[str, float], *, step: int, now_s: float) -> Path:
    """Write numbers of one step into a folder as TensorBoard reads them; return the new file."""
    folder.mkdir(parents=True, exist_ok=True)
    summary = b"".join(
        _field(1, _field(1, tag.encode()) + _float(2, v)) for tag, v in values.items()
    )
    events = [
        _double(1, now_s) + _field(3, b"brain.Event:2"),
        _double(1, now_s) + _varint(2 << 3) + _varint(step) + _field(5, summary),
    ]
    # Beside what the job itself writes there, under a name of its own.
    file = folder / f"events.out.tfevents.{now_s:.6f}.debubble"
    write_file(file, b"".join(map(_record, events)), force=False)
    return file


def _record(data: bytes) -> bytes:
    """Frame a record: its length and itself, each with its checksum."""
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _double(number: int, value: float) -> bytes:
    return _varint(number << 3 | 1) + struct.pack("<d", value)


def _float(number: int, value: float) -> bytes:
    return _varint(number << 3 | 5) + struct.pack("<f", value)


def _varint(value: int) -> bytes:
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*written, value])


@cache
def _table() -> tuple[int, ...]:
    """Return the table of CRC-32C, Castagnoli's polynomial."""
    rows = []
    for row in range(256):
        value = row
        for _ in range(8):
            value = value >> 1 ^ (_REFLECTED if value & 1 else 0)
        rows.append(value)
    return tuple(rows)


def _masked(data: bytes) -> bytes:
    table, crc = _table(), _WORD
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    crc ^= _WORD
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & _WORD)
