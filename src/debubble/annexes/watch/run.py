"""A configuration in → a service that runs, or what it would do: the door of this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from debubble.annexes import drift
from debubble.annexes.watch.config import Source, read_config
from debubble.errors import MissingExtra
from debubble.trace.source import is_url
from debubble.units import counted, show_period, show_share

if TYPE_CHECKING:
    from debubble.annexes.watch.journal import Journal
    from debubble.annexes.watch.service import Patience

FILES = {"rules": "alert_rules.yml", "dashboard": "dashboard.json"}
"""For other programs: alert rules for Prometheus, a dashboard for Grafana."""


def read_file(name: str) -> str:
    """Return one of them."""
    return (files(__package__) / "files" / FILES[name]).read_text("utf-8")


def serve(path: Path, store: str | None, patience: Patience | None = None) -> None:
    """Run the service until it is stopped."""
    config = read_config(path, store=store)
    with _opened(config.store) as journal:
        from debubble.annexes.watch.service import Patience, Service, only_service  # noqa: PLC0415

        with only_service(path):
            Service(config, journal, patience or Patience()).run()


def check(path: Path, store: str | None) -> tuple[str, tuple[str, ...]]:
    """Say what would be watched, and name sources whose folder is not there (yet)."""
    config = read_config(path, store=store)
    listen, least = config.listen, show_share(config.drift.min_change)
    guard = "with a token" if listen.token else "without a token: only this machine reaches it"
    first = f"Would watch {counted(len(config.sources), 'pipeline')} and answer on"
    reference = (
        f"The first {config.drift.reference} captures of a context length are the reference; "
        f"an alert comes once {drift.STAYS} or more are {least} worse than those, and beyond "
        "their noise."
    )
    lines = [f"{first} http://{listen.address}, {guard}."]
    lines += [f"- {source.name}: {_say_source(source)}" for source in config.sources]
    lines.append(reference)
    if config.webhooks:
        lines.append(f"Alerts go to {counted(len(config.webhooks), 'webhook')}.")
    missing = tuple(
        f"{source.name}: there is no folder {source.folder}"
        for source in config.sources
        if not is_url(source.folder) and not Path(source.folder).is_dir()
    )
    return "\n".join(lines), missing


def _say_source(source: Source) -> str:
    words = f"captures that appear in {source.folder}"
    if source.server is not None:
        every = show_period(source.server.every_s)
        words = f"{source.server.url} captured every {every} into {source.folder}"
    words += "" if source.keep is None else f", the raw traces of the last {source.keep} kept"
    return words if source.digests is None else f"{words}, digests of all: {source.digests}"


def retry(path: Path, store: str | None) -> tuple[str, ...]:
    """Have failed captures analysed once more; return them, in words."""
    config = read_config(path, store=store)
    with _opened(config.store) as journal:
        failed = journal.retry([source.name for source in config.sources])
    return tuple(f"{known.pipeline} {known.name}: {known.problem}" for known in failed)


@contextmanager
def _opened(store: str | None) -> Iterator[Journal]:
    """Lend the journal of a configuration's store."""
    try:
        from debubble.annexes.watch.journal import Journal  # noqa: PLC0415
        from debubble.annexes.watch.metrics import write_metrics  # noqa: F401, PLC0415
        from debubble.measure.store import Store, store_url  # noqa: PLC0415
    except (ImportError, MissingExtra) as error:
        raise MissingExtra(
            "the service needs SQLAlchemy and prometheus-client",
            hint="pip install 'debubble[watch]'",
        ) from error
    with closing(Store(store_url(store))) as history:
        yield Journal(history)
