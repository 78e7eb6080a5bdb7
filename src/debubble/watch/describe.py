"""A configuration in → what it means, for `watch --check`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from debubble.trace.digest.place import BESIDE
from debubble.trace.source import is_url
from debubble.units import counted, show_period, show_share
from debubble.watch.config import Config, Source
from debubble.watch.drift import QUIET_CAPTURES

SCHEMA = "debubble.watch/1"


def say_config(config: Config) -> str:
    """Say in sentences what would be done."""
    listen = config.listen
    guard = "with a token" if listen.token else "without a token: only this machine reaches it"
    lines = [
        (
            f"Would watch {counted(len(config.sources), 'pipeline')} and answer on "
            f"http://{listen.host}:{listen.port}, {guard}."
        ),
        *(f"- {one.name}: {_say_source(one)}" for one in config.sources),
        (
            f"An alert comes after {config.drift.reference} captures of a context length at the "
            f"earliest; of quiet figures, at most {show_share(config.drift.rate)} raise one in "
            f"{QUIET_CAPTURES} captures."
        ),
    ]
    if config.webhooks:
        lines.append(f"Alerts go to {counted(len(config.webhooks), 'webhook')}.")
    return "\n".join(lines)


def missing_folders(config: Config) -> list[str]:
    """Name sources whose folder is not there (yet): a service waits for it without a word."""
    return [
        f"{one.name}: there is no folder {one.folder}"
        for one in config.sources
        if not is_url(one.folder) and not Path(one.folder).is_dir()
    ]


def _say_source(one: Source) -> str:
    kept = "" if one.keep is None else f", the raw traces of the last {one.keep} kept"
    if one.digests is not None:
        place = "beside them" if one.digests == BESIDE else f"in {one.digests}"
        kept += f", digests of all {place}"
    if one.trigger is None:
        return f"captures that appear in {one.folder}{kept}"
    every = show_period(one.trigger.every_s)
    return f"{one.trigger.url} captured every {every} into {one.folder}{kept}"


def describe_config(config: Config) -> dict[str, Any]:
    """Return the same for programs."""
    return {
        "schema": SCHEMA,
        "listen": {
            "host": config.listen.host,
            "port": config.listen.port,
            "token": config.listen.token is not None,
        },
        "sources": [
            {
                "name": one.name,
                "folder": one.folder,
                "settle_s": one.settle_s,
                "keep": one.keep,
                "digests": one.digests,
                "server": None if one.trigger is None else one.trigger.url,
                "every_s": None if one.trigger is None else one.trigger.every_s,
            }
            for one in config.sources
        ],
        "drift": {
            "reference": config.drift.reference,
            "false_alarms_fraction": config.drift.rate,
            "sides": config.drift.sides,
        },
        "webhooks": len(config.webhooks),
    }
