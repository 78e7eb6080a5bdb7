"""Give a Grafana the dashboard that comes with debubble, and see that it keeps every panel.

    python tools/grafana_check.py http://127.0.0.1:3000

A Prometheus source is made for it; nobody needs to listen there. Grafana migrates what it is given:
a panel or a query that it does not understand comes back changed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

BOARD = Path(__file__).resolve().parents[1] / "src/debubble/annexes/watch/files/dashboard.json"
PATIENCE_S = 60


def ask(url: str, data: object = None) -> dict[str, object]:
    """Ask Grafana, and return its answer."""
    body = None if data is None else json.dumps(data).encode()
    request = Request(url, body, {"Content-Type": "application/json"})  # noqa: S310 (given to us)
    try:
        with urlopen(request, timeout=30) as answer:  # noqa: S310
            found: dict[str, object] = json.load(answer)
            return found
    except HTTPError as error:
        raise SystemExit(f"{url}: {error} {error.read().decode()}") from error


def wait_for(base: str) -> None:
    """Wait until it is up."""
    for _ in range(PATIENCE_S):
        try:
            ask(f"{base}/api/health")
        except (URLError, OSError):
            time.sleep(1)
        else:
            return
    raise SystemExit(f"nobody answers at {base}")


def asked_by(board: dict[str, object]) -> list[tuple[object, object, list[object]]]:
    """Return what panels ask for."""
    panels = board["panels"]
    assert isinstance(panels, list)  # noqa: S101
    return [
        (panel["title"], panel["type"], [target["expr"] for target in panel.get("targets", [])])
        for panel in panels
    ]


def main() -> None:
    """Import, read back, compare."""
    base = sys.argv[1].rstrip("/")
    board = json.loads(BOARD.read_text("utf-8"))
    wait_for(base)
    source = {"name": "p", "type": "prometheus", "access": "proxy", "url": "http://127.0.0.1:9090"}
    ask(f"{base}/api/datasources", source)
    ask(f"{base}/api/dashboards/db", {"dashboard": {**board, "id": None}, "overwrite": True})
    kept = ask(f"{base}/api/dashboards/uid/{board['uid']}")["dashboard"]
    assert isinstance(kept, dict)  # noqa: S101
    if asked_by(kept) != asked_by(board):
        raise SystemExit(f"changed on the way: {asked_by(kept)}")
    print(f"{len(board['panels'])} panels kept")


if __name__ == "__main__":
    main()
