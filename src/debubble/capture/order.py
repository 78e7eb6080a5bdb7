"""What `debubble capture -- COMMAND` asks of the processes it starts, in their environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from debubble.capture.settings import Settings
from debubble.errors import UsageError

VARIABLE = "DEBUBBLE_CAPTURE"
INJECTED = Path(__file__).resolve().parent / "inject"


def environment_for(settings: Settings, given: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which every Python process captures itself."""
    if VARIABLE in given:
        raise UsageError(
            "this job is being captured already", hint=f"unset {VARIABLE}, or leave out the outer"
        )
    order = {one.name: getattr(settings, one.name) for one in fields(settings)}
    order["out"] = str(settings.out.resolve())
    path = [str(INJECTED), *filter(None, [given.get("PYTHONPATH")])]
    return {**given, VARIABLE: json.dumps(order), "PYTHONPATH": os.pathsep.join(path)}


def read_order(environment: Mapping[str, str]) -> Settings | None:
    """Read back what `environment_for` wrote; None where nothing was asked."""
    text = environment.get(VARIABLE)
    if text is None:
        return None
    try:
        order = json.loads(text)
        order["out"] = Path(order["out"])
        for name in ("context_lengths", "split"):
            order[name] = None if order[name] is None else tuple(order[name])
        return Settings(**order)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{VARIABLE} is damaged: {error}", hint=f"unset {VARIABLE}") from error
