"""Events of the service in → a line of JSON each, on stderr."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime

from debubble.errors import mask_secrets


def log(event: str, *, level: str = "info", **fields: object) -> None:
    """Write an event and what is known of it; text is escaped, so that one event is one line."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    known = {name: value for name, value in fields.items() if value is not None}
    line = {"time": now, "level": level, "event": event, **known}
    sys.stderr.write(mask_secrets(json.dumps(line, default=str)) + "\n")
    sys.stderr.flush()
