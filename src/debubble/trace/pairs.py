"""Digests and the files around them in → which is read where a digest lies beside its trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from debubble.errors import Code, Gap
from debubble.trace.digest.place import stamp_of
from debubble.trace.formats import Recognised


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """The digests to read, and the traces that need not be read for them."""

    digests: tuple[Recognised, ...]
    spared: frozenset[str]
    gaps: tuple[Gap, ...]


def pair_digests(digests: Iterable[Recognised], files: Collection[str]) -> Paired:
    """Take the digest where it is of the very trace beside it, and otherwise the trace."""
    by_trace: defaultdict[str, list[Recognised]] = defaultdict(list)
    known = frozenset(files)
    read: list[Recognised] = []
    for digest in digests:
        if digest.named in known and digest.named != digest.file:
            by_trace[digest.named].append(digest)
        else:
            read.append(digest)
    spared: set[str] = set()
    gaps: list[Gap] = []
    for trace, of_it in by_trace.items():
        differs = _difference(trace, of_it)
        if differs is None:
            read += [replace(one, instead=trace) for one in of_it]
            spared.add(trace)
        else:
            gaps.append(differs)
    return Paired(digests=tuple(read), spared=frozenset(spared), gaps=tuple(gaps))


def _difference(trace: str, digests: Sequence[Recognised]) -> Gap | None:
    stamp = stamp_of(trace)
    heads = [one.head for one in digests if one.head is not None]
    if stamp is None or any(head.stamp != stamp for head in heads):
        why = "is of another recording than the trace beside it"
    elif len({head.part for head in heads}) != heads[0].parts:
        why = f"is one of {heads[0].parts}, and not all lie beside the trace"
    else:
        return None
    return Gap(
        code=Code.DIGEST_DIFFERS,
        message=f"{why}: the trace is read",
        hint="make it again with --digest beside, or remove it",
        file=digests[0].file,
        rank=digests[0].rank if len(digests) == 1 else None,
    )
