"""Records in → what `debubble history` answers: each measurement under its name."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from debubble.answers.base import Answer, AnswerWarning, list_warnings
from debubble.answers.compare import SidePart, answer_side
from debubble.errors import Gap
from debubble.measure.measurement import Measurement
from debubble.measure.store import Record, created_at


class RecordPart(SidePart, frozen=True, kw_only=True):
    """One measurement, and what it is kept as."""

    number: int
    name: str
    created: str
    tags: dict[str, str]
    measurement: Measurement | msgspec.UnsetType = msgspec.UNSET
    """Every sample; left out of a list."""


class HistoryAnswer(Answer, frozen=True, kw_only=True):
    """What `debubble history` says."""

    schema: str = "debubble.history/1"
    records: list[RecordPart]
    warnings: list[AnswerWarning]


def answer_history(
    records: Sequence[Record], gaps: Sequence[Gap] = (), *, whole: bool = False
) -> HistoryAnswer:
    """List records, the oldest first; whole: with every sample."""
    parts = []
    for record in records:
        side = answer_side(record.measurement)
        parts.append(
            RecordPart(
                **msgspec.structs.asdict(side),
                number=record.number,
                name=record.name,
                created=created_at(record.created_s),
                tags=dict(record.tags),
                measurement=record.measurement if whole else msgspec.UNSET,
            )
        )
    return HistoryAnswer(records=parts, warnings=list_warnings(gaps))
