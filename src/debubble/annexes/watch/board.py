"""The journal and what each source does now in → all that is shown: page, metrics and JSON."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from debubble.annexes.watch.config import Config
from debubble.annexes.watch.journal import Journal
from debubble.annexes.watch.judge import Alert, Capture, Standing, State, standings

SCHEMA = "debubble.watch/1"


@dataclass(slots=True, kw_only=True)
class Health:
    """How one source is doing, since the service started."""

    scanned_s: float | None = None
    refused: int = 0
    """Captures that its server did not let us take."""
    failures: int = 0
    troubles: dict[str, str] = field(default_factory=dict)
    """What is the matter with its folder, its server, now."""

    def trouble(self, part: str, problem: str) -> None:
        """Note what is the matter with a part; nothing where it is well."""
        if problem:
            self.failures += 1
            self.troubles = self.troubles | {part: problem}
        elif part in self.troubles:
            self.troubles = {name: said for name, said in self.troubles.items() if name != part}


class Pipeline(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline, as it is shown."""

    name: str
    counts: dict[str, int]
    """Captures by state: claimed, stored, failed."""
    captures: tuple[Capture, ...]
    """The last ones, the newest first."""
    standings: tuple[Standing, ...]
    health: Health
    reference: int
    """How many captures a reference takes."""

    @property
    def latest(self) -> Capture | None:
        """The newest capture that was understood."""
        return next((capture for capture in self.captures if capture.finding is not None), None)


class Board(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is shown."""

    schema: str = SCHEMA
    pipelines: tuple[Pipeline, ...]
    alerts: tuple[Alert, ...]
    """The open ones first, then the newest first."""

    @property
    def open_alerts(self) -> tuple[Alert, ...]:
        """Those that wait to be acknowledged."""
        return tuple(alert for alert in self.alerts if alert.acknowledged_s is None)


def read_board(config: Config, journal: Journal, health: dict[str, Health]) -> Board:
    """Look everything up."""
    pipelines = []
    for source in config.sources:
        counts = journal.counts(source.name)
        captures = journal.captures(source.name)  # after them: what is counted is there
        tracks = journal.state(source.name, State).tracks
        pipelines.append(
            Pipeline(
                name=source.name,
                counts=counts,
                captures=captures,
                standings=standings(tracks, captures, config.drift),
                health=health[source.name],
                reference=config.drift.reference,
            )
        )
    return Board(pipelines=tuple(pipelines), alerts=journal.alerts())
