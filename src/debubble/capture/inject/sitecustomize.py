"""Python runs this at its start where `debubble capture -- COMMAND` or `meter` put it on the path.

It makes the job capture or meter itself, and gets out of the way: the environment's own
sitecustomize is run as ever, and a job that cannot be hooked runs as if nothing had been asked.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from contextlib import suppress
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_PACKAGE = _HERE.parents[1]


def _load_debubble() -> None:
    """Load the debubble that started the job, and nothing else that is installed beside it."""
    if "debubble" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        "debubble", _PACKAGE / "__init__.py", submodule_search_locations=[str(_PACKAGE)]
    )
    if spec is None or spec.loader is None:
        return
    package = importlib.util.module_from_spec(spec)
    sys.modules["debubble"] = package
    spec.loader.exec_module(package)


def _run_the_one_that_was_here() -> None:
    sys.path[:] = [entry for entry in sys.path if not _is_here(entry)]
    mine = sys.modules.pop("sitecustomize", None)
    with suppress(ImportError):
        importlib.import_module("sitecustomize")
    if mine is not None:
        sys.modules.setdefault("sitecustomize", mine)


def _is_here(entry: str) -> bool:
    try:
        return bool(entry) and Path(entry).resolve() == _HERE
    except OSError:
        return False


_run_the_one_that_was_here()
for _variable, _room, _done in (
    ("DEBUBBLE_CAPTURE", "debubble.capture.hooks", "captured"),
    ("DEBUBBLE_METER", "debubble.annexes.meter.session", "metered"),
):
    try:
        if _variable in os.environ:
            _load_debubble()
            importlib.import_module(_room).install()
    except Exception as _error:  # noqa: BLE001 (whatever it is, the job must run)
        with suppress(Exception):  # a job may have no stderr
            sys.stderr.write(f"debubble: this process is not {_done}: {_error}\n")
