"""What the user says of wires, and topology files, in → the kind of wire of each hop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from debubble.errors import Code, Gap, UsageError
from debubble.links.classes import LinkClass, find_class, guess_class
from debubble.links.hop_times import Hop
from debubble.links.logs.model import NvlinkStatus, Topology
from debubble.links.logs.read import read_log, read_text
from debubble.links.logs.topology import class_of_join
from debubble.timeline.model import RankTimeline
from debubble.units import counted


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
    ranks: Sequence[RankTimeline], words: Iterable[str], topologies: Sequence[Topology]
) -> Wiring:
    """Put together what is known of the wires between some ranks."""
    hops = [(here, there) for here in ranks for there in ranks if here is not there]
    stated: dict[Hop, LinkClass] = {}
    guessed: dict[Hop, LinkClass] = {}
    for here, there in hops:
        for topology in topologies:
            join = topology.joins.get((here.device[1], there.device[1]))
            if here.device[0] == there.device[0] and join is not None:
                found = class_of_join(join, here.device_name)
                if found is not None:
                    stated[here.rank, there.rank] = found
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


def _state(found: dict[Hop, LinkClass], hops: Sequence[Hop], name: str, which: str) -> None:
    """Note the kind of wire of some hops; refuse another than was stated before."""
    wire = find_class(name)
    for hop in hops:
        if found.setdefault(hop, wire) != wire:
            raise UsageError(
                f"--class says {found[hop].name} and {wire.name} of {which}", hint="leave one"
            )


def read_topologies(files: Iterable[str]) -> tuple[list[Topology], list[Gap]]:
    """Read topology files; links that are down are told as gaps."""
    topologies, gaps = [], []
    for file in files:
        log = read_log(read_text(file), file)
        if isinstance(log, Topology):
            topologies.append(log)
        elif isinstance(log, NvlinkStatus):
            gaps += inactive_links(log)
        else:
            raise UsageError(
                f"{file} is no topology",
                hint="--topology takes `nvidia-smi topo -m` or `nvidia-smi nvlink -s`",
            )
    return topologies, gaps


def inactive_links(status: NvlinkStatus) -> list[Gap]:
    """Say which devices have links that are down."""
    return [
        Gap(
            code=Code.LINKS_INACTIVE,
            message=f"GPU {index} ({name}): {counted(down, 'link')} of {len(links)} inactive",
            hint="see `nvidia-smi nvlink -e`; its hops cannot reach their rate",
            file=status.file,
        )
        for index, name, links in status.devices
        if 0 < (down := sum(rate is None for rate in links)) < len(links)
    ]
