"""A digest gives back the trace it was made of, and nothing else gives anything."""

from __future__ import annotations

import io
import json
import random
import zipfile
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from support.traces.rank_traces import assert_same, small_trace, traces

from debubble.errors import TraceError, TraceTooLarge
from debubble.trace.columns import Header, Kernels, Operators, RankTrace, build
from debubble.trace.digest import (
    Head,
    Stamp,
    archive,
    pack_digest,
    peek_head,
    unpack_digest,
)
from debubble.trace.sidecar import Sidecar, StepTimes
from debubble.trace.source import Limits


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(traces())
def test_a_trace_and_its_sidecar_come_back_as_they_were(trace: RankTrace) -> None:
    assert_same(trace, unpack_digest(pack_digest(trace)))


def test_numpy_opens_a_digest_without_pickle() -> None:
    with np.load(io.BytesIO(pack_digest(small_trace())), allow_pickle=False) as opened:
        assert list(opened)[:2] == ["debubble_digest", "description"]
        assert all(opened[name].dtype == np.uint8 for name in opened)


def test_the_first_bytes_tell_whose_it_is() -> None:
    stamp = Stamp(bytes=77, tail=5)
    data = pack_digest(small_trace(), stamp=stamp, part=1, parts=2)
    assert peek_head(data[:1024], "d") == Head(
        file="run/rank3.json.gz", rank=3, world_size=4, stamp=stamp, part=1, parts=2
    )


def test_a_digest_cut_off_anywhere_is_refused() -> None:
    data = pack_digest(small_trace())
    for length in range(len(data)):
        with pytest.raises(TraceError):
            unpack_digest(data[:length], "cut.npz")


def test_a_changed_byte_gives_the_same_trace_or_an_error() -> None:
    sidecar = Sidecar(file="x", tags={"a": "b"})
    trace, chance = small_trace(sidecar=sidecar), random.Random(7)  # noqa: S311 (the same damage every time)
    data = pack_digest(trace)
    refused = 0
    for _ in range(500):
        changed = bytearray(data)
        changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        try:
            back = unpack_digest(bytes(changed), "flipped.npz")
        except TraceError:
            refused += 1
            continue
        assert_same(trace, back)
    assert refused > 300


def test_a_version_of_the_future_is_named() -> None:
    with pytest.raises(TraceError, match="version 3; this debubble reads version 2") as raised:
        unpack_digest(_rewritten(schema="debubble.digest/3"), "new.npz")
    assert "make it again" in raised.value.hint


def kernel(**columns: object) -> dict[str, object]:
    return {"kernels": build(Kernels, 1, **{"start_ns": [1], "duration_ns": [1], **columns})}


def operator(**columns: object) -> dict[str, object]:
    return {"operators": build(Operators, 1, **{"start_ns": [1], "duration_ns": [1], **columns})}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (kernel(name=[2]), "kernels.name is out of range"),
        (kernel(name=[-2]), "kernels.name is out of range"),
        (kernel(launch=[2]), "kernels.launch is out of range"),
        (kernel(kind=[6]), "kernels.kind is out of range"),
        (operator(group=[0]), "operators.group is out of range"),
        (operator(kernel=[2]), "operators.kernel is out of range"),
        (operator(dtype=[9]), "operators.dtype is out of range"),
        (operator(shape=[9]), "operators.shape is out of range"),
        (operator(operation=[6]), "operators.operation is out of range"),
        (operator(shape=[0]), "no shape"),
        ({"kernels": build(Kernels, 2, start_ns=[5, 4], duration_ns=[1, 1])}, "contradict"),
        (kernel(duration_ns=[-1]), "contradict"),
        (kernel(start_ns=[2**63 - 1]), "contradict"),
        ({"rank": 2**20}, "absurd number of ranks"),
        ({"rank": -1}, "absurd number of ranks"),
        ({"header": Header(world_size=10**15)}, "absurd number of ranks"),
        ({"events": -1}, "negative size"),
        ({"names": ("\ud800", "b")}, "is no text"),
    ],
)
def test_what_no_reader_returns_is_refused(changes: dict[str, object], why: str) -> None:
    with pytest.raises(TraceError, match=why):
        unpack_digest(pack_digest(small_trace(**changes)), "astray.npz")


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": -1},
        {"split": (4, -4)},
        {"steps": StepTimes(before_s=(0.0,))},
        {"steps": StepTimes(profiled_median_s=float("nan"))},
        {"steps": StepTimes(overhead_fraction=float("inf"))},
    ],
)
def test_a_sidecar_that_no_reader_returns_is_refused(wrong: dict[str, Any]) -> None:
    data = pack_digest(small_trace(sidecar=Sidecar(file="s", **wrong)))
    with pytest.raises(TraceError, match="damaged digest: Expected"):
        unpack_digest(data, "astray.npz")


@pytest.mark.parametrize(
    ("name", "part", "why"),
    [
        ("kernels", np.zeros((3, 8, 2), np.uint8), "kernels are not what it says"),
        ("kernels", np.zeros(7, np.uint8), "kernels are not what it says"),
        ("kernels", np.zeros((11, 8, 2), np.int64), "does not hold bytes"),
    ],
)
def test_a_table_of_another_shape_is_refused(name: str, part: object, why: str) -> None:
    with pytest.raises(TraceError, match=why):
        unpack_digest(_repacked(tables={name: part}), "astray.npz")


def test_a_header_that_claims_more_than_there_is_takes_no_memory() -> None:
    out = io.BytesIO()
    data = pack_digest(small_trace())
    with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(out, "w", 8) as after:
        for name in before.namelist():
            after.writestr(name, before.read(name).replace(b", 8, 2), }   ", b", 8, 2**40), }"))
    with pytest.raises(TraceError, match="damaged digest"):
        unpack_digest(out.getvalue(), "huge.npz")


def test_what_a_later_version_adds_is_passed_over() -> None:
    content = _content()
    columns = json.loads(content.description)["columns"]
    columns["kernels"] += ["mood"]
    wider = np.concatenate((content.tables["kernels"], content.tables["kernels"][:1]))
    back = unpack_digest(_repacked({"columns": columns, "fun": 1}, tables={"kernels": wider}))
    assert_same(small_trace(), back)
    later = {**msgspec.to_builtins(content.head), "mood": "good"}
    parts = {"description": np.frombuffer(content.description, np.uint8), **content.tables}
    back = unpack_digest(_rewritten(head=later, checksum=archive.checksum(later, parts)))
    assert_same(small_trace(), back)


def test_a_column_of_no_rows_that_is_missing_is_not_known() -> None:
    content = _content()
    columns = json.loads(content.description)["columns"]
    columns["cpu_operators"].remove("thread")
    fewer = content.tables["cpu_operators"][1:]
    back = unpack_digest(_repacked({"columns": columns}, tables={"cpu_operators": fewer}))
    assert_same(small_trace(), back)


def test_a_bomb_is_refused_before_it_inflates() -> None:
    data = archive.pack(Head(file="x"), b"{}", {"kernels": np.zeros(70 * 1024**2, np.uint8)})
    with pytest.raises(TraceTooLarge, match="bomb"):
        unpack_digest(data, "bomb.npz")


def test_the_limits_hold_for_digests() -> None:
    with pytest.raises(TraceTooLarge, match="inflates to more"):
        unpack_digest(pack_digest(small_trace()), "d.npz", Limits(inflated_bytes=100))


def _content() -> archive.Content:
    return archive.unpack(pack_digest(small_trace()), "x", Limits())


def _repacked(description: object = None, tables: object = None) -> bytes:
    """Return a digest with other parts, whole by its checksum."""
    content = _content()
    described = {**json.loads(content.description), **(description or {})}
    parts = {**content.tables, **(tables or {})}
    return archive.pack(content.head, json.dumps(described).encode(), parts)


def _rewritten(**changes: object) -> bytes:
    """Return a digest whose head says something else, whole in every other way."""
    with np.load(io.BytesIO(pack_digest(small_trace()))) as before:
        parts = dict(before)
    head = {**json.loads(parts["debubble_digest"].tobytes()), **changes}
    parts["debubble_digest"] = np.frombuffer(json.dumps(head).encode(), np.uint8)
    out = io.BytesIO()
    np.savez_compressed(out, **parts)
    return out.getvalue()
