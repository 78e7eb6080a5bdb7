"""What a test needs that a machine may lack: asked for here, and skipped with what to install.

`DEBUBBLE_TESTS_MUST_RUN` names what is installed, by the names that a package manager knows:
`pip` stands for all Python packages of `debubble[dev]`, others are Debian's, such as `chromium`.
A test that is skipped for want of one of them fails. What no package brings, such as a recording or
a right of root, is never asked for here and may always be skipped.
"""

from __future__ import annotations

import os
import re
import shutil
from types import ModuleType

import pytest

VARIABLE = "DEBUBBLE_TESTS_MUST_RUN"
_REASON = re.compile(r"is not installed: (?:(pip) install |apt-get install (\S+))")
# Programs by the package of Debian that holds them, where that has another name.
_PACKAGES = {"promtool": "prometheus", "cc": "gcc"}


def need_package(name: str) -> ModuleType:
    """Return a Python module that comes with `debubble[dev]`."""
    distribution = name.partition(".")[0]
    reason = f"{distribution} is not installed: pip install 'debubble[dev]'"
    module: ModuleType = pytest.importorskip(name, reason=reason)
    return module


def need_program(*names: str) -> str:
    """Return where a program is, under the first of its names that is known."""
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        lack_program(names[0])
    return found


def lack_program(name: str) -> None:
    """Skip for want of a program."""
    package = _PACKAGES.get(name, name)
    pytest.skip(f"{name} is not installed: apt-get install {package}")


def must_run(reason: str, installed: list[str]) -> bool:
    """Tell whether a test was skipped for want of something that is said to be installed."""
    found = _REASON.search(reason)
    return found is not None and (found[1] or found[2]) in installed


def _insist(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Make a failure of a skip that should not be."""
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        if must_run(reason, os.environ.get(VARIABLE, "").split()):
            report.outcome = "failed"
            report.longrepr = f"{reason}\n{VARIABLE} says that it is installed"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    report = yield
    _insist(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    report = yield
    _insist(report)
    return report
