"""Files for other programs: alert rules for Prometheus, a dashboard for Grafana."""

from __future__ import annotations

from importlib.resources import files

_NAMES = {"rules": "alert_rules.yml", "dashboard": "dashboard.json"}
FILES = tuple(_NAMES)


def read_file(name: str) -> str:
    """Return one of them."""
    return files(__package__).joinpath(_NAMES[name]).read_text("utf-8")
