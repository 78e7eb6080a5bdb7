"""What the user typed in → files → captures: what each file is, and which are one run's.

A folder may hold many captures: torchtitan's `iteration_N/`, TensorBoard's stamps, a serving engine
started again. Files belong together when their paths differ in rank and stamp only; a rank that
comes a second time begins the next capture. Where no name says so, files do: each names its rank
and the same world inside.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import takewhile
from pkgutil import iter_modules

from debubble import trace
from debubble.errors import Code, Gap, RunNotFound, TraceError
from debubble.trace.format import OTHER, OTHER_JSON, Format, TraceFile
from debubble.trace.kineto.document import Opening, not_a_trace, scan_opening
from debubble.trace.source import DEFAULT_LIMITS, Limits, Source, file_time_s, strip_extensions

# Kineto's header is at most 40 KB in the traces we have seen; the rank is in it.
_PREFIX_BYTES = 256 * 1024

FORMATS: dict[str, Format] = {
    known.name: known
    for known in sorted(
        (
            import_module(f"debubble.trace.{module.name}").FORMAT
            for module in iter_modules(trace.__path__)
            if module.ispkg
        ),
        key=lambda known: known.position,
    )
}
GIVE_TRACES = "give torch.profiler's Chrome traces, `nsys export --type sqlite` files, or op tables"


def recognise(file: str, limits: Limits = DEFAULT_LIMITS) -> TraceFile:
    """Say what a file is. Raises `TraceError` where it cannot be opened or is empty."""
    source = Source(file, limits)
    prefix = source.prefix(_PREFIX_BYTES)
    if not prefix:
        problem = source.damage or "is empty"
        raise TraceError(problem, hint="record the trace again", file=file)
    for known in FORMATS.values():
        if found := known.recognise(file, prefix):
            return found
    opening = scan_opening(prefix)
    is_json = _is_json(prefix, opening)
    why_not = TraceError(
        f"is none of: {', '.join(FORMATS)}",
        hint=GIVE_TRACES,
        file=file,
    )
    if prefix[:1] in {b"{", b"["} or is_json:
        why_not = not_a_trace(opening.fields, file)
    return TraceFile(file=file, format=OTHER_JSON if is_json else OTHER, why_not=why_not)


def _is_json(prefix: bytes, opening: Opening) -> bool:
    """Tell JSON of another kind from garbage, also where the prefix cuts it off."""
    if opening.ended and (opening.fields or opening.bare):
        return True
    try:
        json.loads(prefix)
    except (ValueError, RecursionError):
        return bool(opening.fields)
    return True


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
    files: tuple[TraceFile, ...]
    duplicates: tuple[tuple[int, tuple[str, ...]], ...] = ()
    """Ranks that have several files: none of them is read, because nothing tells which is meant."""
    recorded_s: float = 0.0
    """When it was recorded, as its traces tell, in seconds since 1970; 0 where none does."""
    stamp: float = 0.0
    """The same, as names tell."""

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
    files: list[TraceFile] = field(default_factory=list)
    stamp: float = 0.0
    ranks: set[int] = field(default_factory=set)
    """Whose files they are, as far as that is known."""

    def join(self, part: _Gathering) -> None:
        """Take the files of another part; `run/alpha/` and `run/beta/` become `run`."""
        self.ranks |= part.ranks
        self.files += part.files
        pairs = zip(self.name.split("/"), part.name.split("/"), strict=False)
        shared = takewhile(lambda pair: pair[0] == pair[1], pairs)
        self.name = "/".join(folder for folder, _ in shared)


def group_captures(files: Sequence[TraceFile], *, named: bool = False) -> tuple[Capture, ...]:
    """Sort files into captures, oldest first. Files named one by one belong together."""
    ranks = [file.rank for file in files if file.rank is not None]
    if named and len(set(ranks)) == len(ranks):
        return (_finish(_Gathering(name=_family(files[0]), files=list(files))),)
    families: defaultdict[str, list[TraceFile]] = defaultdict(list)
    for file in files:
        families[_family(file)].append(file)
    gatherings = [part for name, family in families.items() for part in _split(name, family)]
    merged = _merge(gatherings)
    shared = _shared_parts([gathering.name for gathering in merged])
    captures = [_finish(gathering, shared) for gathering in merged]
    return tuple(sorted(captures, key=_written if _only_names_tell(captures) else _age))


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


def _family(file: TraceFile) -> str:
    """Return the path without rank, stamp and extension: the same for all files of a capture.

    A file that names its rank and world inside need not say `rank`: `gpu3.json`, `worker3/t.json`.
    """
    folder, _, name = file.named.replace("\\", "/").rpartition("/")
    stem = "" if _TENSORBOARD.match(name) else strip_extensions(name)
    path = _STAMP.sub("", f"{folder}/{stem}")
    kept = _RANK_TOKENS.sub("", path)
    if kept == path and (file.world_size or 0) > 1:
        parts = _DIGITS.split(path)
        own = [at for at, part in enumerate(parts) if part.isdigit() and int(part) == file.rank]
        kept = "".join(part for at, part in enumerate(parts) if at != max(own, default=-1))
    return "/".join(re.sub(r"[-_.]{2,}", "-", part).strip("-_.") for part in kept.split("/"))


def _split(name: str, family: list[TraceFile]) -> Iterable[_Gathering]:
    """Cut a family where a rank comes again, in the order of the stamps."""
    stamped = sorted(((_stamp(file.named), file) for file in family), key=lambda pair: pair[0])
    current = _Gathering(name=name)
    for stamp, file in stamped:
        if file.rank in current.ranks and stamp > current.stamp:
            yield current
            current = _Gathering(name=name)
        current.files.append(file)
        if file.rank is not None:
            current.ranks.add(file.rank)
        current.stamp = max(current.stamp, stamp)
    yield current


def _stamp(file: str) -> float:
    found = _STAMP.findall(re.split(r"[/\\]", file)[-1])
    if not found:
        return 0.0
    whole, _, fraction = found[-1].partition(".")
    seconds = float(f"{whole[:10]}.{whole[10:] or 0}")
    return seconds + (float(f"0.{fraction}") if fraction else 0.0)


def _merge(gatherings: list[_Gathering]) -> list[_Gathering]:
    """Join parts of one world that is in none whole: folders of nodes, names that say nothing.

    The n-th part with a rank is of the n-th capture.
    """
    merged: list[_Gathering] = []
    wholes: dict[tuple[int, int], _Gathering] = {}
    seen: dict[tuple[int, int], int] = {}
    for part in sorted(gatherings, key=lambda part: _natural(part.files[0].named)):
        sizes = {file.world_size or 0 for file in part.files}
        world = max(sizes)
        if len(sizes) > 1 or world < 2 or not len(part.files) == len(part.ranks) < world:
            merged.append(part)
            continue
        number = max(seen.get((world, rank), 0) for rank in part.ranks)
        seen |= dict.fromkeys(((world, rank) for rank in part.ranks), number + 1)
        whole = wholes.setdefault((world, number), part)
        if whole is part:
            merged.append(part)
        else:
            whole.join(part)
    return merged


def _finish(gathering: _Gathering, shared: tuple[int, int] = (0, 0)) -> Capture:
    """Set ranks with several files aside; name the capture by what sets it apart, or its folder."""
    by_rank: defaultdict[int | None, list[TraceFile]] = defaultdict(list)
    for file in gathering.files:
        one_a_rank = file.rank is not None and FORMATS[file.format].one_a_rank
        by_rank[file.rank if one_a_rank else None].append(file)
    kept = [
        file for rank, files in by_rank.items() if rank is None or len(files) == 1 for file in files
    ]
    doubled = [
        (rank, tuple(file.file for file in files))
        for rank, files in by_rank.items()
        if rank is not None and len(files) > 1
    ]
    parts = gathering.name.split("/")
    leading, trailing = shared
    telling = "/".join(parts[leading : len(parts) - trailing])
    name = telling if leading else next(filter(None, reversed(parts)), "")
    stamp = f"{gathering.stamp:.3f}".rstrip("0").rstrip(".") if gathering.stamp else ""
    return Capture(
        name="@".join(part for part in (name.strip("/"), stamp) if part) or ".",
        files=tuple(sorted(kept, key=lambda file: (file.rank is None, file.rank or 0, file.file))),
        duplicates=tuple(sorted(doubled)),
        recorded_s=min((f.recorded_s for f in gathering.files if f.recorded_s), default=0.0),
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


def _only_names_tell(captures: Sequence[Capture]) -> bool:
    """Tell whether nothing but letters of names would order captures, which is no order in time."""
    untimed = not any(capture.recorded_s or capture.stamp for capture in captures)
    return untimed and len({_DIGITS.sub("", capture.name) for capture in captures}) > 1


def _written(capture: Capture) -> tuple[float, list[tuple[bool, int, str]]]:
    """Order by when files were written, where they lie on this machine."""
    times = [file_time_s(file.file) for file in capture.files]
    return max(times, default=0.0), _natural(capture.name)


def _age(capture: Capture) -> tuple[float, float, list[tuple[bool, int, str]]]:
    """Order by time, then by the numbers in the name: `iteration_9` before `iteration_10`."""
    return capture.recorded_s, capture.stamp, _natural(capture.name)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    return [
        (part.isdigit(), int(part) if part.isdigit() else 0, part) for part in _DIGITS.split(name)
    ]
