"""The load generator of the example server, as a module: it belongs to no package."""

from __future__ import annotations

import importlib.util
import sys

from support.services.console import REPOSITORY

FILE = REPOSITORY / "examples" / "serve_pipeline" / "load.py"


def import_load():
    """Return the module; its dataclasses look it up by its name."""
    if "example_load" not in sys.modules:
        spec = importlib.util.spec_from_file_location("example_load", FILE)
        module = sys.modules["example_load"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["example_load"]
