"""A configuration in → a service that runs, or what it would do: the door of this package."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from debubble.annexes.watch.config import Config, read_config
from debubble.annexes.watch.files import FILES, read_file
from debubble.annexes.watch.supervise import PATIENCE, Patience
from debubble.annexes.watch.views import (
    SCHEMA,
    describe_config,
    learning_of,
    missing_folders,
    say_config,
)
from debubble.errors import MissingExtra, StoreError
from debubble.measure.store import Store, default_url, store_url

if TYPE_CHECKING:
    from debubble.annexes.watch.journal import Journal

__all__ = ["FILES", "SCHEMA", "Checked", "check", "read_file", "retry", "serve"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What a configuration means."""

    words: str
    data: dict[str, Any]
    warnings: tuple[str, ...]


def serve(path: Path, store: str | None, patience: Patience = PATIENCE) -> None:
    """Run the service until it is stopped."""
    config = read_config(path, store=store)
    with _opened(config) as journal:
        from debubble.annexes.watch.service import Service, only_service  # noqa: PLC0415 (needs the extra)

        async def run() -> None:
            await Service(config, journal, patience).run()

        with only_service(config.lock):
            asyncio.run(run())


def check(path: Path, store: str | None) -> Checked:
    """Say what would be watched, and how far references have come; this makes no store."""
    config = read_config(path, store=store)
    url = config.store or default_url(os.environ, Path.home())
    missing = missing_folders(config)
    learning: dict[str, str] = {}
    if url.startswith("sqlite:///") and not Path(url.removeprefix("sqlite:///")).exists():
        learning = learning_of(config, None)
    else:
        try:
            with _opened(config) as journal:
                learning = learning_of(config, journal)
        except (MissingExtra, StoreError) as error:
            missing.insert(0, str(error))
    return Checked(
        words=say_config(config, learning),
        data=describe_config(config, learning),
        warnings=tuple(missing),
    )


def retry(path: Path, store: str | None) -> dict[str, Any]:
    """Have captures that were given up analysed once more, and list them."""
    config = read_config(path, store=store)
    names = [known.name for known in config.sources]
    with _opened(config) as journal:
        rows = journal.given_up(names)
        count = journal.retry(names)
    given_up = [
        {"capture": row.number, "source": row.source, "key": row.key, "problem": row.problem}
        for row in rows
    ]
    return {"schema": SCHEMA, "given_up": given_up, "retried": count}


@contextmanager
def _opened(config: Config) -> Iterator[Journal]:
    """Lend the journal of a configuration's store."""
    try:
        from debubble.annexes.watch.journal import Journal  # noqa: PLC0415 (SQLAlchemy is an extra)
    except ImportError as error:
        raise MissingExtra(
            "the service needs SQLAlchemy", hint="pip install 'debubble[watch]'"
        ) from error
    history = Store(store_url(config.store))
    try:
        yield Journal(history)
    finally:
        history.close()
