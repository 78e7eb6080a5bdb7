"""Recognised files in → captures out: the files that were recorded together, newest last.

A folder may hold many captures: torchtitan's `iteration_N/`, TensorBoard's stamps, a serving engine
started again. Files belong together when their paths differ in rank and stamp only; a rank that
comes a second time begins the next capture.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from debubble.errors import Code, Gap, RunNotFound
from debubble.trace.formats import Format, Recognised
from debubble.trace.source import strip_extensions

# Seconds, milliseconds or nanoseconds since 1970, as TensorBoard, vLLM and SGLang write them.
_STAMP = re.compile(r"\d{10,19}(?:\.\d+)?")
# `host_1234.1700000000000.pt.trace.json`: TensorBoard's default names, one host and process a rank.
_TENSORBOARD = re.compile(r"^[^/]*?\.\d{10,19}\.pt\.trace\.json(?:\.gz)?$")
_RANK_TOKENS = re.compile(
    r"(?<![a-z])(?:rank|dp|tp|pp|ep|cp|dcp|pcp)[-_.]?\d+(?!\d)", re.IGNORECASE
)
_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """Files that were recorded together, at most one a rank."""

    name: str
    files: tuple[Recognised, ...]
    duplicates: tuple[tuple[int, tuple[str, ...]], ...] = ()
    """Ranks that have several files: none of them is read, because nothing tells which is meant."""
    stamp: float = 0.0

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks as far as they are known before the files are read."""
        return frozenset(file.rank for file in self.files if file.rank is not None)

    @property
    def world_size(self) -> int | None:
        """The largest world that any file names."""
        sizes = [file.world_size for file in self.files if file.world_size is not None]
        return max(sizes, default=None)


@dataclass(slots=True)
class _Gathering:
    """A capture in the making, named by its family."""

    name: str
    files: list[Recognised] = field(default_factory=list)
    stamp: float = 0.0


def group_captures(files: Sequence[Recognised], *, named: bool = False) -> tuple[Capture, ...]:
    """Sort files into captures, oldest first. Files named one by one belong together."""
    ranks = [file.rank for file in files if file.rank is not None]
    if named and len(set(ranks)) == len(ranks):
        return (_finish(_Gathering(name=_family(files[0].named), files=list(files))),)
    families: defaultdict[str, list[Recognised]] = defaultdict(list)
    for file in files:
        families[_family(file.named)].append(file)
    gatherings = [part for name, family in families.items() for part in _split(name, family)]
    merged = _merge_nodes(gatherings)
    shared = _shared_parts([gathering.name for gathering in merged])
    return tuple(sorted((_finish(gathering, shared) for gathering in merged), key=_age))


def choose_capture(captures: Sequence[Capture], wanted: str | None) -> tuple[Capture, list[Gap]]:
    """Return the capture asked for, else the newest that has as many ranks as the fullest one."""
    if wanted is not None:
        matching = [capture for capture in captures if capture.name == wanted] or [
            capture for capture in captures if wanted in capture.name
        ]
        if len(matching) == 1:
            return matching[0], []
        names = ", ".join(capture.name for capture in matching or captures)
        raise RunNotFound(
            f"{'several captures match' if matching else 'no capture matches'} {wanted!r}",
            hint=f"--capture takes one of: {names}",
        )
    fullest = max(len(capture.files) for capture in captures)
    chosen = [capture for capture in captures if len(capture.files) == fullest][-1]
    gaps = []
    if chosen is not captures[-1]:
        gaps.append(
            Gap(
                code=Code.NEWER_INCOMPLETE,
                message=f"capture {captures[-1].name} comes later but has fewer ranks "
                f"({len(captures[-1].files)} of {fullest}); {chosen.name} is used",
                hint=f"--capture {captures[-1].name} reads the later one",
            )
        )
    return chosen, gaps


def _family(file: str) -> str:
    """Return the path without rank, stamp and extension: the same for all files of a capture."""
    folder, _, name = file.replace("\\", "/").rpartition("/")
    stem = "" if _TENSORBOARD.match(name) else strip_extensions(name)
    kept = [_RANK_TOKENS.sub("", _STAMP.sub("", part)) for part in (folder, stem)]
    tidy = (re.sub(r"[-_.]{2,}", "-", part).strip("-_.") for part in "/".join(kept).split("/"))
    return "/".join(tidy)


def _split(name: str, family: list[Recognised]) -> Iterable[_Gathering]:
    """Cut a family where a rank comes again, in the order of the stamps."""
    stamped = sorted(((_stamp(file.named), file) for file in family), key=lambda one: one[0])
    current, ranks = _Gathering(name=name), set[int | None]()
    for stamp, file in stamped:
        again = file.rank is not None and file.rank in ranks
        if again and stamp > current.stamp:
            yield current
            current, ranks = _Gathering(name=name), set()
        current.files.append(file)
        ranks.add(file.rank)
        current.stamp = max(current.stamp, stamp)
    yield current


def _stamp(file: str) -> float:
    found = _STAMP.findall(re.split(r"[/\\]", file)[-1])
    if not found:
        return 0.0
    whole, _, fraction = found[-1].partition(".")
    seconds = float(f"{whole[:10]}.{whole[10:] or 0}")
    return seconds + (float(f"0.{fraction}") if fraction else 0.0)


def _merge_nodes(gatherings: list[_Gathering]) -> list[_Gathering]:
    """Join folders of different nodes: parts of one world, none whole, no rank in both."""
    merged: list[_Gathering] = []
    worlds: defaultdict[int, list[_Node]] = defaultdict(list)
    # Who did not take these ranks once never will: so many folders take no longer than they must.
    tried: defaultdict[tuple[int, frozenset[int]], int] = defaultdict(int)
    for part in gatherings:
        node = _as_node(part)
        if node is None:
            merged.append(part)
            continue
        key = node.world, frozenset(node.ranks)
        wholes = worlds[node.world]
        while tried[key] < len(wholes) and not wholes[tried[key]].takes(node):
            tried[key] += 1
        if tried[key] < len(wholes):
            wholes[tried[key]].join(node)
        else:
            wholes.append(node)
            merged.append(part)
    return merged


@dataclass(slots=True)
class _Node:
    """Files of some ranks of a known world."""

    gathering: _Gathering
    world: int
    ranks: set[int]

    def takes(self, other: _Node) -> bool:
        """Tell whether two parts can be of one capture."""
        fits = len(self.ranks) + len(other.ranks) <= self.world
        return fits and self.ranks.isdisjoint(other.ranks)

    def join(self, other: _Node) -> None:
        """Take the files of another part."""
        self.ranks |= other.ranks
        self.gathering.files += other.gathering.files
        self.gathering.name = _shared_name(self.gathering.name, other.gathering.name)


def _as_node(part: _Gathering) -> _Node | None:
    """Return several files with a rank each and one world; None for anything else."""
    worlds = {file.world_size for file in part.files}
    ranks = {file.rank for file in part.files if file.rank is not None}
    world = worlds.pop() if len(worlds) == 1 else None
    if world is None or len(part.files) < 2 or len(ranks) < len(part.files):
        return None
    return _Node(gathering=part, world=world, ranks=ranks)


def _shared_name(left: str, right: str) -> str:
    """Return the folders that two families share: `run` of `run/alpha/` and `run/beta/`."""
    pairs = zip(left.split("/"), right.split("/"), strict=False)
    return "/".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _finish(gathering: _Gathering, shared: tuple[int, int] = (0, 0)) -> Capture:
    by_rank: defaultdict[int | None, list[Recognised]] = defaultdict(list)
    for file in gathering.files:
        one_a_rank = file.rank is not None and file.format in {Format.KINETO, Format.DIGEST}
        by_rank[file.rank if one_a_rank else None].append(file)
    kept = [
        file for rank, files in by_rank.items() if rank is None or len(files) == 1 for file in files
    ]
    doubled = [
        (rank, tuple(file.file for file in files))
        for rank, files in by_rank.items()
        if rank is not None and len(files) > 1
    ]
    return Capture(
        name=_readable(gathering, shared),
        files=tuple(sorted(kept, key=lambda file: (file.rank is None, file.rank or 0, file.file))),
        duplicates=tuple(sorted(doubled)),
        stamp=gathering.stamp,
    )


def _shared_parts(names: Sequence[str]) -> tuple[int, int]:
    """Count leading and trailing parts that all captures share: they tell none apart."""
    split = [name.split("/") for name in names]
    if len(split) == 1:
        return 0, 0
    leading = _shared_start(split)
    return leading, _shared_start([parts[:leading:-1] for parts in split])


def _shared_start(split: Sequence[Sequence[str]]) -> int:
    levels = zip(*split, strict=False)
    return sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, levels))


def _readable(gathering: _Gathering, shared: tuple[int, int]) -> str:
    """Name a capture by what sets it apart; a lone one by its folder."""
    parts = gathering.name.split("/")
    leading, trailing = shared
    telling = parts[leading : len(parts) - trailing]
    name = "/".join(telling) if leading else next(filter(None, reversed(parts)), "")
    stamp = f"{gathering.stamp:.3f}".rstrip("0").rstrip(".") if gathering.stamp else ""
    return "@".join(part for part in (name.strip("/"), stamp) if part) or "."


def _age(capture: Capture) -> tuple[float, list[tuple[bool, int, str]]]:
    """Order by stamp, then by the numbers in the name: `iteration_9` before `iteration_10`."""
    natural = [
        (part.isdigit(), int(part) if part.isdigit() else 0, part)
        for part in _DIGITS.split(capture.name)
    ]
    return capture.stamp, natural
