"""Holds the marker `slow` to its word: an unmarked test that starts a process fails.

The console's host is let through: it is one process for all commands, which it forks by itself.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

MARKS = ("slow", "service", "accuracy")
_STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"})
_LET_THROUGH = "console_host.py"
_started: list[str] = []


def _look(event: str, arguments: tuple[Any, ...], starts: frozenset[str] = _STARTS) -> None:
    """Note what is started; called even when this module is being taken apart at the end."""
    if event in starts:
        what = " ".join(map(str, arguments[1])) if event == "subprocess.Popen" else event
        if _LET_THROUGH not in what:
            _started.append(what)


sys.addaudithook(_look)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    _started.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    if (
        report.when == "call"
        and report.passed
        and _started
        and not any(map(item.get_closest_marker, MARKS))
    ):
        report.outcome = "failed"
        report.longrepr = f"starts a process, so mark it slow or service: {_started[0][:200]}"
    return report
