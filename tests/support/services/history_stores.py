"""Stores for tests: SQLite, and a real PostgreSQL of our own where the machine has one."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from itertools import count
from pathlib import Path

import pytest
from support.processes import wait_until
from support.requirements import lack_program, need_package

NUMBERS = count()


def programs():
    """Return the folder of PostgreSQL's programs; Debian keeps them off the path."""
    found = shutil.which("postgres")
    if found:
        return Path(found).resolve().parent
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda one: float(one.parts[4]))
    return folders[-1] if folders else None


def demoted():
    """Return how to start it: it refuses to run as root, and Debian has a user for it."""
    if os.geteuid() != 0:
        return {}
    return {"user": "postgres", "group": "postgres", "extra_groups": []}


@pytest.fixture(scope="session")
def postgres():
    """Start a server on a socket in a folder of its own; stop it in the end."""
    psycopg = need_package("psycopg")
    folder = programs()
    if folder is None:
        lack_program("postgresql")
    if os.geteuid() == 0 and "postgres" not in {one.pw_name for one in pwd.getpwall()}:
        pytest.skip("PostgreSQL refuses to run as root, and there is no user postgres")
    place = Path(tempfile.mkdtemp(prefix="debubble-postgres-"))
    if os.geteuid() == 0:
        shutil.chown(place, "postgres", "postgres")
    data = place / "data"
    subprocess.run(
        [folder / "initdb", "-D", data, "-U", "debubble", "-A", "trust", "--no-sync"],
        check=True,
        cwd=place,
        stdout=subprocess.DEVNULL,
        **demoted(),
    )
    server = subprocess.Popen(
        [folder / "postgres", "-D", data, "-k", place, "-F", "-c", "listen_addresses="],
        cwd=place,
        stderr=subprocess.DEVNULL,
        **demoted(),
    )
    try:
        where = {"host": str(place), "user": "debubble", "dbname": "postgres"}
        wait_until(lambda: answers(psycopg, where, server))
        yield where
    finally:
        server.send_signal(signal.SIGQUIT)  # at once: nothing of it is needed again
        server.wait()
        shutil.rmtree(place)


def answers(psycopg, where, server):
    assert server.poll() is None, "the server died"
    try:
        psycopg.connect(**where).close()
    except psycopg.OperationalError:
        return False
    return True


@pytest.fixture
def postgres_url(postgres):
    """A database of its own."""
    import psycopg  # noqa: PLC0415

    name = f"history{next(NUMBERS)}"
    with psycopg.connect(**postgres, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return f"postgresql://debubble@/{name}?host={postgres['host']}"


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.service)])
def url(request, tmp_path):
    """An empty store of either kind."""
    if request.param == "postgresql":
        return request.getfixturevalue("postgres_url")
    return f"sqlite:///{tmp_path / 'history.db'}"
