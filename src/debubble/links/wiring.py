"""What the user knows of the wires in → the kind of each hop's, and what it took before."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from debubble.errors import Gap, LogError, Touch, UsageError, place
from debubble.links.hop_times import Fit, Hop, LinkClass, Past, find_class, guess_class
from debubble.links.logs.log import Log
from debubble.links.logs.nvidia_smi import class_of_join
from debubble.links.logs.read import load_json, read_log, read_text
from debubble.timeline.model import RankTimeline
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
    warnings = data.get("warnings")
    for warning in warnings if isinstance(warnings, list) else ():
        if isinstance(warning, dict) and Touch.MESSAGES in (warning.get("touches") or ()):
            said = f"{place('', warning.get('rank'))}{warning.get('message')}"
            why = f"an answer with doubtful messages: {said}"
            raise LogError(why, hint="give one of sound traces", file=file)
    hops = data.get("hops")
    if not isinstance(hops, list) or not all(isinstance(row, dict) for row in hops):
        raise LogError("an answer without hops", hint=_HINT, file=file)
    return hops


def _whole(row: dict[str, Any], name: str, file: str) -> int:
    value = row.get(name)
    if not isinstance(value, int):
        raise LogError(f"a hop without {name!r}", hint=_HINT, file=file)
    return value


def _times_of(row: dict[str, Any]) -> Iterable[tuple[int, float]]:
    """Return the time of one message by size: of the largest in traces, of all of a ladder."""
    rows = [(rung.get("bytes"), rung.get("one_way_s")) for rung in row.get("ladder") or ()]
    rows = rows or [(row.get("bytes"), row.get("one_message_s"))]
    return [
        (size, float(seconds))
        for size, seconds in rows
        if isinstance(size, int) and isinstance(seconds, int | float) and seconds > 0
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """Kinds of wire by hop, and who told."""

    stated: dict[Hop, LinkClass]
    """By the user or a topology: these are held against a hop."""
    guessed: dict[Hop, LinkClass]
    """By the devices: only named."""

    def of(self, hop: Hop) -> LinkClass | None:
        """Return the kind of wire of a hop, as far as known."""
        return self.stated.get(hop) or self.guessed.get(hop)


def read_wiring(
    ranks: Sequence[RankTimeline], words: Iterable[str], topologies: Sequence[Log]
) -> Wiring:
    """Put together what is known of the wires between some ranks."""
    hops = [(here, there) for here in ranks for there in ranks if here is not there]
    stated: dict[Hop, LinkClass] = {}
    guessed: dict[Hop, LinkClass] = {}
    for here, there in hops:
        for topology in topologies:
            join = topology.joins.get((here.device[1], there.device[1]))
            if here.device[0] == there.device[0] and join is not None:
                wire = class_of_join(join, here.device_name)
                if wire is not None:
                    stated[here.rank, there.rank] = wire
        guess = guess_class(here, there)
        if guess is not None:
            guessed[here.rank, there.rank] = guess
    stated |= parse_classes(words, [(here.rank, there.rank) for here, there in hops])
    return Wiring(stated=stated, guessed=guessed)


def parse_classes(words: Iterable[str], hops: Sequence[Hop]) -> dict[Hop, LinkClass]:
    """Read `nvlink4` for all hops, `2:3=ib-ndr` for one pair and both its directions."""
    of_all: dict[Hop, LinkClass] = {}
    of_pairs: dict[Hop, LinkClass] = {}
    for word in words:
        pair, equals, name = word.rpartition("=")
        if not equals:
            _state(of_all, hops, name, "all hops")
            continue
        here, colon, there = pair.partition(":")
        if not (colon and here.isdigit() and there.isdigit()):
            raise UsageError(f"{word!r} names no hop", hint="write it as 2:3=ib-ndr, or ib-ndr")
        hop = int(here), int(there)
        if hop not in hops:
            raise UsageError(
                f"no hop joins rank {here} and rank {there}", hint="give two ranks of the pipeline"
            )
        _state(of_pairs, [hop, hop[::-1]], name, f"ranks {here} and {there}")
    return of_all | of_pairs


def _state(stated: dict[Hop, LinkClass], hops: Sequence[Hop], name: str, which: str) -> None:
    """Note the kind of wire of some hops; refuse another than was stated before."""
    wire = find_class(name)
    for hop in hops:
        if stated.setdefault(hop, wire) != wire:
            raise UsageError(
                f"--class says {stated[hop].name} and {wire.name} of {which}", hint="leave one"
            )


def read_topologies(files: Iterable[str]) -> tuple[list[Log], list[Gap]]:
    """Read what tells of wires: how devices are joined; links that are down or had errors."""
    logs = [read_log(read_text(file), file) for file in files]
    for log in logs:
        if not log.of_wires:
            raise UsageError(
                f"{log.file} is no topology",
                hint="give what `nvidia-smi topo -m` printed, or `nvidia-smi nvlink -s` or `-e`, "
                "or a range export of Prometheus",
            )
    return logs, [gap for log in logs for gap in log.doubts]
