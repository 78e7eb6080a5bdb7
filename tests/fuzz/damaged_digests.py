"""Digests made to mislead: whole by their checksum, and wrong in what they say."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random

import numpy as np
from fuzz import mutate
from support.traces.recordings import H200

from debubble.trace.digest import archive, pack_digest
from debubble.trace.kineto import read_kineto
from debubble.trace.optable import read_op_table
from debubble.trace.sidecar import Sidecar, StepTimes
from debubble.trace.source import DEFAULT_LIMITS

_ODD_COUNTS = (0, -1, 1, 7, 2**20, 2**31, 2**63, 10**30)
_ODD_FILES = ("", "/", "a/rank3.json", "rank0.json", "\ud800", "../../etc", "x" * 5000, "a\nb")
_TABLE = b"step,stage,microbatch,op,start_us,duration_us\n0,0,0,F,0,10\n0,1,0,F,10,10\n"


@cache
def _sound() -> tuple[archive.Content, ...]:
    trace = read_kineto(str(H200 / "fwd_closed_m4" / "rank0.json.gz"))
    said = Sidecar(file="s", rank=0, tokens=512, steps=StepTimes(before_s=(0.5, 0.25)))
    table = read_op_table("ops.csv", data=_TABLE)
    packed = (pack_digest(replace(trace, sidecar=said)), pack_digest(trace), pack_digest(table))
    return tuple(archive.unpack(one, "seed", DEFAULT_LIMITS) for one in packed)


def damaged_digest(random: Random) -> bytes:
    """Return a digest that is wrong in one of its parts, or damaged as a file."""
    content = random.choice(_sound())
    head, description, tables = content.head, content.description, dict(content.tables)
    what = random.random()
    if what < 0.5:
        description = random.choice(mutate.BYTE_MUTATORS)(random, description)
    elif what < 0.7:
        name = random.choice(sorted(tables))
        shape = tables[name].shape
        changed = random.choice(mutate.BYTE_MUTATORS)(random, tables[name].tobytes())
        values = np.frombuffer(changed, np.uint8)
        tables[name] = np.resize(values, shape) if random.random() < 0.8 else values
    elif what < 0.85:
        field = random.choice(("rank", "world_size", "part", "parts"))
        head = replace(head, file=random.choice(_ODD_FILES), **{field: random.choice(_ODD_COUNTS)})
    data = archive.pack(head, description, tables)
    return random.choice(mutate.BYTE_MUTATORS)(random, data) if what > 0.85 else data
