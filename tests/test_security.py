"""SECURITY.md promises what tests hold: they are there; what none can show is read off the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "src" / "debubble"
# What can reach another machine, and who may: where the user pointed, and between ranks of a job.
# watch listens where its configuration says.
# Object stores, PostgreSQL and Dask are reached by libraries of theirs, at the URLs that they get.
CONNECTING = {
    "socket",
    "http.client",
    "http.server",
    "urllib.request",
    "ftplib",
    "smtplib",
    "requests",
    "httpx",
    "aiohttp",
}
MAY_CONNECT = {
    "annexes/watch/web.py",
    "capture/fetch.py",
    "links/__main__.py",
}


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


@cache
def imports_and_calls():
    """What each file imports, and which functions it calls as they are, not as methods."""
    found = {}
    for file in sorted(SOURCES.rglob("*.py")):
        tree = ast.parse(file.read_text("utf-8"))
        calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
        named = {call.id for call in calls if isinstance(call, ast.Name)}
        found[str(file.relative_to(SOURCES))] = set(imported(tree)), named
    return found.items()


def test_every_test_that_a_promise_names_is_there():
    said = (ROOT / "SECURITY.md").read_text("utf-8")
    paths = set(re.findall(r"`(tests/[\w/.]+)`", said))
    assert len(paths) > 10
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


@pytest.mark.slow  # it reads the whole package
def test_only_these_files_can_open_a_connection():
    found = {
        file
        for file, (modules, _) in imports_and_calls()
        if any(
            f"{name}.".startswith(f"{connecting}.") for name in modules for connecting in CONNECTING
        )
    }
    assert found == MAY_CONNECT
