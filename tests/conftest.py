"""Fixtures for all tests."""

from __future__ import annotations

import os
import re
import signal
import sqlite3

import pytest
import sqlalchemy as sa
from hypothesis import settings
from support import requirements, started_processes
from support.services.history_stores import postgres, postgres_url, url  # noqa: F401 (fixtures)
from support.started_processes import MARKS
from support.traces.recordings import PUBLIC, SHARED, existing

# The same examples every time, however slow the machine is: what fails, fails for everyone.
settings.register_profile("alike", deadline=None, derandomize=True)
settings.load_profile("alike")

# Shells ignore Ctrl-C for what they start in the background, and so would all that tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def public_data():
    """Other people's recordings, which lie beside a checkout and are never copied into it."""
    return existing(PUBLIC)


@pytest.fixture(scope="session")
def recorded_data():
    """All of our own H200 recordings; the repository itself holds two of them."""
    return existing(SHARED / "h200")


@pytest.fixture(scope="session", autouse=True)
def _nobody_waits_for_the_disk():
    """Let what runs in this process not wait for the disk: tests never end with the power."""

    def write_quickly(raw, _record):
        if isinstance(raw, sqlite3.Connection):
            raw.execute("PRAGMA synchronous=OFF")

    sa.event.listen(sa.engine.Engine, "connect", write_quickly)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _descriptor: None)
        yield
    sa.event.remove(sa.engine.Engine, "connect", write_quickly)


def pytest_configure(config):
    for plugin in (requirements, started_processes):
        config.pluginmanager.register(plugin)


# A whole file that is slow, by its first mark.
SLOW_FILE = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.slow\b", re.MULTILINE)


def pytest_ignore_collect(collection_path, config):
    """Leave files unread whose tests are all left out: some import more than the rest takes."""
    if "not slow" in config.option.markexpr and collection_path.suffix == ".py":
        return bool(SLOW_FILE.search(collection_path.read_text("utf-8"))) or None
    return None


def pytest_collection_modifyitems(items):
    """Begin with files that have slow tests: a long one at the end keeps one worker alone."""
    slow = {item.path for item in items if any(map(item.get_closest_marker, MARKS))}
    items.sort(key=lambda item: item.path not in slow)


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="write what the command line prints now"
    )
