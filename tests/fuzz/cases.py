"""A seed and a number in → one case out: a folder of damaged files, and how to read it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from fuzz import mutate
from fuzz.seeds import digest, lay_out, nsight_export, pick_document, pick_op_table

_SIZES = ((1_500_000, 16 * 1024**2), (50_000, 500_000), (7_000, 100_000), (900, 30_000))
_ODD_NAMES = (
    "rank0.json", "rank1.json.gz", "rank_2/trace.json", "a\nb.json", "[red]rank3.json", "ank5.csv",
    "\x1b[31mrank4.json", "n_1.1700000000000.pt.trace.json", "n_2.1700000000001.pt.trace.json",
    "iteration_1/rank0_trace.json", "iteration_2/rank0_trace.json", "1718000000.5-TP-1.json",
    "ops.csv", "ops.jsonl", "report_rank1.sqlite", "x.parquet", ".hidden.json", "rank0.json.tmp",
    "rank0.debubble.npz",
    "rank99999999999999.json", "trace.json", " .json", "r*nk0.json", "rank0(1).json", "Rank00.json",
    "e\u0301.json", "\udcff.json", "dp0_pp1_tp0_rank12.1718000000000.pt.trace.json.gz", "notes.txt",
)  # fmt: skip
_TINY = (b"", b"{}", b"[]", b"[{}]", b"0", b'{"traceEvents":[]}', b'{"traceEvents":[{}]}', b"\n",
         b"stage,microbatch,op,start,step,end\n", b'{"traceEvents":[', b'{"traceEvents":', b"PAR1",
         b"\x1f\x8b", b'[{"ph":"X","cat":"kernel","name":"k","ts":1,"dur":1}]',
         b"SQLite format 3\0")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is read, and in how small pieces: the seams between them are where readers break."""

    number: int
    places: tuple[str, ...]
    piece_bytes: int
    held_bytes: int
    rank: int | None


def make_case(seed: int, number: int, folder: Path) -> Case:
    """Write the files of a case below `folder`, which is made anew."""
    random = Random(f"{seed}:{number}")  # noqa: S311 (damage is no secret)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    files = _write_files(random, folder)
    named = random.random() < 0.3
    # Small pieces go with a small store: what is in store is gone through again with each piece.
    piece_bytes, held_bytes = random.choice(_SIZES)
    return Case(
        number=number,
        places=tuple(map(str, files)) if named else (str(folder),),
        piece_bytes=piece_bytes,
        held_bytes=held_bytes,
        rank=random.choice((None, 0)),
    )


def _write_files(random: Random, folder: Path) -> list[Path]:
    form = random.random()
    if form < 0.8:
        return [
            _write(
                folder / random.choice(("rank0.json", "trace.json.gz", "rank0.debubble.npz")),
                _damaged(random),
            )
        ]
    if form < 0.95:
        names = random.sample(_ODD_NAMES, k=random.randrange(2, 7))
        sound = [_write(folder / "rank0.json", lay_out(random, pick_document(random)))]
        return sound + [_write(folder / name, _damaged(random)) for name in names]
    names = [f"{number}/{random.choice(_ODD_NAMES)}" for number in range(random.randrange(60))]
    names += random.sample(_ODD_NAMES, k=5)
    return [_write(folder / name, random.choice(_TINY)) for name in names]


def _write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def _damaged(random: Random) -> bytes:
    kind = random.choices(tuple(_MAKERS), weights=(6, 7, 3, 2, 1, 2))[0]
    data = _MAKERS[kind](random)
    return mutate.pack(random, data) if random.random() < 0.25 else data


def _damaged_text(random: Random) -> bytes:
    data = lay_out(random, pick_document(random))
    for _ in range(random.choice((1, 1, 2))):
        data = random.choice(mutate.BYTE_MUTATORS)(random, data)
    return data


def _damaged_structure(random: Random) -> bytes:
    content = pick_document(random)
    for _ in range(random.choice((1, 2, 3))):
        random.choice(mutate.STRUCTURE_MUTATORS)(random, content)
    data = mutate.deepen(lay_out(random, content))
    if random.random() < 0.1:
        data = mutate.double_keys(random, data)
    return random.choice(mutate.BYTE_MUTATORS)(random, data) if random.random() < 0.2 else data


def _damaged_op_table(random: Random) -> bytes:
    if random.random() < 0.3:
        return mutate.odd_parquet(random)
    return random.choice(mutate.BYTE_MUTATORS)(random, pick_op_table(random))


def _damaged_export(random: Random) -> bytes:
    data = nsight_export()
    if random.random() < 0.7:
        data = mutate.damage_export(random, data)
    return random.choice(mutate.BYTE_MUTATORS)(random, data) if random.random() < 0.4 else data


def _damaged_digest(random: Random) -> bytes:
    return random.choice(mutate.BYTE_MUTATORS)(random, digest())


def _mixed(random: Random) -> bytes:
    """The beginning of one format with the end of another."""
    makers = (_damaged_text, _damaged_op_table, _damaged_export)
    first, second = (random.choice(makers)(random) for _ in range(2))
    return mutate.cut_short(random, first) + second[random.randrange(len(second) + 1) :]


_MAKERS: dict[str, Callable[[Random], bytes]] = {
    "text": _damaged_text,
    "structure": _damaged_structure,
    "op table": _damaged_op_table,
    "export": _damaged_export,
    "mixed": _mixed,
    "digest": _damaged_digest,
}
