"""Traces that hold a bit of everything, for digests to keep."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from debubble.errors import Code, Gap
from debubble.trace.columns import (
    TABLES,
    Device,
    Group,
    Header,
    Kernels,
    Launches,
    RankTrace,
    Table,
    Thread,
    build,
    column_types,
)
from debubble.trace.sidecar import Sidecar, StepTimes

_TEXT = st.text(max_size=12)
_RANK = st.none() | st.integers(0, 2**20 - 1)
_WORDS = st.dictionaries(_TEXT, _TEXT, max_size=3)
_COUNT = st.integers(0, 2**70)
_TIMES = st.lists(st.floats(1e-9, 1e9), max_size=3).map(tuple)

_GROUPS = st.lists(
    st.builds(
        Group,
        name=_TEXT,
        description=_TEXT,
        ranks=st.lists(st.integers(0, 9999), max_size=4).map(tuple),
    ),
    max_size=3,
).map(tuple)

_HEADERS = st.builds(
    Header,
    rank=_RANK,
    world_size=_RANK,
    backend=_TEXT,
    groups=_GROUPS,
    devices=st.lists(
        st.builds(Device, index=st.integers(-1, 99), name=_TEXT, memory_bytes=st.none() | _COUNT),
        max_size=2,
    ).map(tuple),
    host=_TEXT,
    base_time_ns=st.integers(-(2**66), 2**66),
    record_shapes=st.none() | st.booleans(),
    versions=st.lists(st.tuples(_TEXT, _TEXT), max_size=2).map(tuple),
)

_GAPS = st.lists(
    st.builds(
        Gap,
        code=st.sampled_from(Code),
        message=_TEXT,
        hint=_TEXT,
        file=_TEXT,
        rank=st.none() | st.integers(0, 99),
    ),
    max_size=3,
).map(tuple)

_SIDECARS = st.none() | st.builds(
    Sidecar,
    file=_TEXT,
    rank=st.none() | _COUNT,
    schedule=st.none() | _TEXT,
    split=st.lists(_COUNT, max_size=3).map(tuple),
    steps=st.builds(StepTimes, before_s=_TIMES, profiled_s=_TIMES),
    environment=_WORDS,
)


@st.composite
def traces(draw: st.DrawFn) -> RankTrace:
    """Draw a trace whose indices all lead somewhere, and whose numbers are any."""
    shapes = draw(st.lists(st.from_regex(r"\A[0-9]{1,5}(x[0-9]{1,5}){0,2}\Z"), max_size=2))
    names = (*shapes, *draw(st.lists(_TEXT, max_size=4)))
    threads = draw(st.lists(st.builds(Thread, identity=_TEXT, name=_TEXT), max_size=3).map(tuple))
    groups = draw(_GROUPS)
    rows = {name: draw(st.integers(0, 6)) for name in TABLES}
    highest = {
        "name": len(names),
        "dtype": len(names),
        "shape": len(shapes),
        "thread": len(threads),
        "group": len(groups),
        "launch": rows["launches"],
        "kernel": rows["kernels"],
    }
    kinds = {"kind": 5, "operation": 5, "device_type": 1}
    tables = {}
    for table, kind in TABLES.items():
        columns = {}
        for column, dtype in column_types(kind).items():
            elements = None
            if column in highest:
                elements = st.integers(-1, highest[column] - 1)
            elif column in kinds:
                elements = st.integers(0, kinds[column])
            elif column == "duration_ns":
                elements = st.integers(0, 4 * 10**18)
            elif column == "start_ns":
                elements = st.integers(-(10**18), 4 * 10**18)
            drawn = draw(arrays(dtype, rows[table], elements=elements))
            columns[column] = np.sort(drawn) if column == "start_ns" else drawn
        tables[table] = build(kind, rows[table], **columns)
    return RankTrace(
        file=draw(st.text(st.characters(exclude_categories=()), max_size=12)),
        format="kineto",
        header=draw(_HEADERS),
        names=names,
        threads=threads,
        groups=groups,
        events=draw(_COUNT),
        inflated_bytes=draw(_COUNT),
        rank=draw(_RANK),
        gaps=draw(_GAPS),
        sidecar=draw(_SIDECARS),
        **tables,  # type: ignore[arg-type]
    )


def assert_same(left: object, right: object, but: str = "") -> None:
    """Compare two traces or tables field by field, columns with their types."""
    assert type(left) is type(right)
    for one in (f for f in fields(left) if f.name != but):  # type: ignore[arg-type]
        a, b = getattr(left, one.name), getattr(right, one.name)
        if isinstance(a, Table):
            assert_same(a, b)
        elif isinstance(a, np.ndarray):
            assert a.dtype == b.dtype, one.name
            assert np.array_equal(a, b), one.name
        else:
            assert a == b, one.name


def small_trace(**changes: object) -> RankTrace:
    """Make a trace of two kernels and two launches, of rank 3."""
    fixed: dict[str, object] = {
        "file": "run/rank3.json.gz",
        "format": "kineto",
        "header": Header(rank=3, world_size=4, host="node"),
        "names": ("gemm", "cudaLaunchKernel"),
        "threads": (Thread(identity="7", name="main"),),
        "events": 9,
        "inflated_bytes": 1000,
        "rank": 3,
        "kernels": build(
            Kernels,
            2,
            start_ns=[10**18, 10**18 + 5],
            duration_ns=[3, 4],
            name=[0, 0],
            launch=[0, 1],
        ),
        "launches": build(
            Launches, 2, start_ns=[1, 2], duration_ns=[1, 1], name=[1, 1], thread=[0, 0]
        ),
    }
    for name, kind in TABLES.items():
        fixed.setdefault(name, build(kind, 0))
    return RankTrace(**{**fixed, **changes})  # type: ignore[arg-type]
