"""A column of whole numbers in → its bytes, plane by plane, as few as its range needs → the column.

Times grow by little from row to row, so differences are often smaller than the values themselves;
bytes of one significance lie together, because they resemble each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from debubble.trace.columns import I64

_WRAP = 2**64
_WIDEST = 8
# The quickest level is enough to tell which of two codings is the smaller.
_TRIAL_LEVEL = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """How one column lies in the bytes: each value is `low` more than what is stored of it."""

    how: Literal["plain", "steps"]
    """The values themselves, or how far each is from the one before; the first counts from base."""
    width: int
    """Bytes a value, 1 to 8; never 0, so that no few bytes stand for many rows."""
    low: int = 0
    base: int = 0


def pack_column(values: NDArray[np.integer]) -> tuple[Plane, bytes]:
    """Return how a column is coded, and its bytes: whichever coding deflates better."""
    wide = values.astype(np.int64)
    if not len(wide):
        return Plane(how="plain", width=1), b""
    plain = _pack("plain", wide, 0)
    if int(wide.min()) == int(wide.max()):
        return plain
    steps = np.diff(wide, prepend=wide[:1])
    return min(plain, _pack("steps", steps, int(wide[0])), key=_deflated)


def _deflated(packed: tuple[Plane, bytes]) -> int:
    return len(isal_zlib.compress(packed[1], _TRIAL_LEVEL))


def _pack(how: Literal["plain", "steps"], wide: I64, base: int) -> tuple[Plane, bytes]:
    low = int(wide.min())
    width = max(1, ((int(wide.max()) - low).bit_length() + 7) // 8)
    above = wide.view(np.uint64) - np.uint64(low % _WRAP)
    planes = above.astype("<u8").view(np.uint8).reshape(-1, _WIDEST)[:, :width]
    return Plane(how=how, width=width, low=low, base=base), planes.T.tobytes()


def unpack_column(plane: Plane, data: memoryview, rows: int) -> I64:
    """Return the column; `data` has `width` bytes a row."""
    planes = np.frombuffer(data, np.uint8).reshape(plane.width, rows)
    whole = 1 << (plane.width - 1).bit_length()
    values = planes[0]
    if whole > 1:
        padded = np.zeros((rows, whole), np.uint8)
        padded[:, : plane.width] = planes.T
        values = padded.view(f"<u{whole}").reshape(rows)
    above = values.astype(np.uint64)
    above += np.uint64(plane.low % _WRAP)
    if plane.how == "steps":
        np.cumsum(above, out=above)
        above += np.uint64(plane.base % _WRAP)
    column: I64 = above.view(np.int64)
    return column
