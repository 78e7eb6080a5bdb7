"""Events in → one JSON object a line on stderr: for journald, and for whoever greps."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime


def log(event: str, *, level: str = "info", **fields: object) -> None:
    """Write an event; strangers' text is escaped, so that one event is one line."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    more = {
        name: value if isinstance(value, int | float | str | list | dict | None) else str(value)
        for name, value in fields.items()
    }
    line = {"time": now, "level": level, "event": event, **more}
    sys.stderr.write(json.dumps(line) + "\n")
    sys.stderr.flush()
