"""Numbers of op tables: raw columns in, checked int64 columns out, errors with row and column."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from debubble.trace.columns import I64
    from debubble.trace.optable.files import RawTable

# Half of int64, 146 years in ns: a start and a duration added stay inside.
LAST_NS: Final = 2**62
_INT64: Final = np.iinfo(np.int64)
# Whole numbers up to here are exact in float64.
_EXACT_FLOAT: Final = 2**53
# No number is longer; a longer cell is cut in messages.
_LONGEST_NUMBER: Final = 40
_EMPTY_WORDS: Final = frozenset({"", "nan", "null", "none", "na", "n/a"})


def read_integers(
    table: RawTable, column: str, *, lowest: int, highest: int, missing: int | None
) -> I64:
    """Read whole numbers; empty cells become `missing`, or are an error where that is None."""
    numbers = _numbers(table, column, missing)
    if numbers.dtype.kind == "f":
        holes = np.isnan(numbers)
        if missing is not None:
            numbers = np.where(holes, missing, numbers)
        elif holes.any():
            raise table.error("is empty", row=_first(holes), column=column)
        broken = numbers != np.rint(numbers)
        if broken.any():
            row = _first(broken)
            message = f"{numbers[row]} is not a whole number"
            raise table.error(message, row=row, column=column)
    outside = (numbers < lowest) | (numbers > highest)
    if numbers.dtype.kind == "f":
        outside |= np.abs(numbers) > _EXACT_FLOAT
    if outside.any():
        row = _first(outside)
        message = f"{numbers[row]} is out of range, {lowest} to {highest}"
        raise table.error(message, row=row, column=column)
    return numbers.astype(np.int64)


def read_times(table: RawTable, column: str, ns_per_unit: int) -> I64:
    """Read times in any unit as nanoseconds, exact where the table is."""
    numbers = _numbers(table, column, None)
    if numbers.dtype.kind == "f":
        numbers = numbers.astype(np.float64)
        wrong = ~np.isfinite(numbers)
        if wrong.any():
            row = _first(wrong)
            raise table.error(f"{numbers[row]} is no time", row=row, column=column)
    absurd = np.abs(numbers.astype(np.float64)) * ns_per_unit >= LAST_NS
    if absurd.any():
        row = _first(absurd)
        hint = "is the unit right? A column's name may end in _s, _ms, _us or _ns"
        message = f"{numbers[row]} is a time beyond 146 years"
        raise table.error(message, row=row, column=column, hint=hint)
    if numbers.dtype.kind != "f":
        return numbers.astype(np.int64) * ns_per_unit
    nanoseconds = numbers * ns_per_unit
    if table.lines is not None and np.any(np.abs(nanoseconds) >= _EXACT_FLOAT):
        cells = table.column(column)
        exact = [int((Decimal(str(cell)) * ns_per_unit).to_integral_value()) for cell in cells]
        return np.array(exact, dtype=np.int64)
    rounded: I64 = np.rint(nanoseconds).astype(np.int64)
    return rounded


def _numbers(table: RawTable, column: str, missing: int | None) -> NDArray[Any]:
    """Return an integer or float64 array of a column's cells; holes as `missing`."""
    cells = table.column(column)
    if isinstance(cells, np.ndarray):
        return cells if cells.dtype.kind in "iu" else cells.astype(np.float64)
    quick = _all_at_once(cells)
    if quick is not None:
        return quick
    parsed = [_one(table, column, row, cell, missing) for row, cell in enumerate(cells)]
    whole = all(isinstance(number, int) for number in parsed)
    return np.array(parsed, dtype=np.int64 if whole else np.float64)


def _all_at_once(cells: Sequence[object]) -> NDArray[Any] | None:
    """Convert a clean column fast; None where it has to be looked at cell by cell."""
    kinds = set(map(type, cells))
    if kinds == {str}:
        choices: tuple[type[int | float], ...] = (int, float)
    elif kinds <= {int, float}:
        choices = (float,) if float in kinds else (int,)
    else:
        return None
    for kind in choices:
        try:
            return np.fromiter(map(kind, cells), dtype=kind, count=len(cells))
        except (ValueError, OverflowError):
            continue
    return None


def _one(table: RawTable, column: str, row: int, cell: object, missing: int | None) -> int | float:
    if cell is None or (isinstance(cell, str) and cell.strip().lower() in _EMPTY_WORDS):
        if missing is None:
            raise table.error("is empty", row=row, column=column)
        return missing
    number = _parse(cell)
    if number is None:
        raise table.error(f"{str(cell)[:_LONGEST_NUMBER]!r} is no number", row=row, column=column)
    if isinstance(number, int) and not _INT64.min <= number <= _INT64.max:
        raise table.error(f"{str(cell)[:_LONGEST_NUMBER]} is out of range", row=row, column=column)
    return number


def _parse(cell: object) -> int | float | None:
    if isinstance(cell, int | float) and not isinstance(cell, bool):
        return cell
    if not isinstance(cell, str | Decimal) or len(str(cell)) > _LONGEST_NUMBER:
        return None
    for kind in (int, float):
        try:
            return kind(str(cell))
        except (ValueError, OverflowError):
            continue
    return None


def _first(wrong: NDArray[np.bool_]) -> int:
    return int(np.argmax(wrong))
