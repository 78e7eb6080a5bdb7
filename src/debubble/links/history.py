"""Earlier answers of `debubble links --json` in → what each hop took before."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import median
from typing import Any

from debubble.errors import LogError
from debubble.links.hop_times import Fit, Hop
from debubble.links.judge import Past
from debubble.links.logs.read import load_json, read_text
from debubble.units import NS_PER_S

SCHEMA = "debubble.links/1"
_HINT = "give what `debubble links … --json` printed"


def read_history(files: Iterable[str]) -> dict[Hop, Past]:
    """Gather what earlier answers tell of each hop; of several answers, the middle counts."""
    times: defaultdict[Hop, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    fits: dict[Hop, Fit] = {}
    for file in files:
        for row in _hops_of(file):
            hop = _whole(row, "from_rank", file), _whole(row, "to_rank", file)
            for size, seconds in _times_of(row):
                times[hop][size].append(seconds * NS_PER_S)
            latency, rate = row.get("alpha_s"), row.get("beta_bytes_per_s")
            if isinstance(latency, float | int) and isinstance(rate, float | int) and rate > 0:
                fits[hop] = Fit(
                    latency_ns=latency * NS_PER_S, bytes_per_s=float(rate), worst_error=0.0
                )
    return {
        hop: Past(
            times_ns={size: median(found) for size, found in times[hop].items()}, fit=fits.get(hop)
        )
        for hop in {*times, *fits}
    }


def _hops_of(file: str) -> list[dict[str, Any]]:
    data = load_json(read_text(file))
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise LogError("no earlier answer", hint=_HINT, file=file)
    hops = data.get("hops")
    if not isinstance(hops, list) or not all(isinstance(row, dict) for row in hops):
        raise LogError("an answer without hops", hint=_HINT, file=file)
    return hops


def _whole(row: dict[str, Any], name: str, file: str) -> int:
    found = row.get(name)
    if not isinstance(found, int):
        raise LogError(f"a hop without {name!r}", hint=_HINT, file=file)
    return found


def _times_of(row: dict[str, Any]) -> Iterable[tuple[int, float]]:
    """Return the time of one message by size: of the largest in traces, of all of a ladder."""
    rows = [(rung.get("bytes"), rung.get("one_way_s")) for rung in row.get("ladder") or ()]
    rows = rows or [(row.get("bytes"), row.get("one_message_s"))]
    return [
        (size, float(seconds))
        for size, seconds in rows
        if isinstance(size, int) and isinstance(seconds, int | float) and seconds > 0
    ]
