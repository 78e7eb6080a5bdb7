"""Fixtures for all tests."""

from __future__ import annotations

import pytest
from hypothesis import settings
from support.services.history_stores import postgres, postgres_url, url  # noqa: F401 (fixtures)
from support.traces.recordings import PUBLIC, SHARED

# The same examples every time, however slow the machine is: what fails, fails for everyone.
settings.register_profile("alike", deadline=None, derandomize=True)
settings.load_profile("alike")


@pytest.fixture(scope="session")
def public_data():
    """Other people's recordings, which lie beside a checkout and are never copied into it."""
    if not PUBLIC.is_dir():
        pytest.skip(f"{PUBLIC} is not there: these recordings belong to others and are not shipped")
    return PUBLIC


@pytest.fixture(scope="session")
def recorded_data():
    """All of our own H200 recordings; the repository itself holds two of them."""
    if not (SHARED / "h200").is_dir():
        pytest.skip(f"{SHARED / 'h200'} is not there: only a part of our recordings is shipped")
    return SHARED / "h200"


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="write what the command line prints now"
    )
