"""A digest gives back the trace it was made of, and nothing else gives anything."""

from __future__ import annotations

import io
import json
import random
import zipfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from support.traces.rank_traces import assert_same, sidecars, small_trace, traces

from debubble.errors import TraceError, TraceTooLarge
from debubble.trace.columns import Header, Kernels, Operators, RankTrace, build
from debubble.trace.digest import (
    Head,
    Stamp,
    archive,
    pack_digest,
    peek_head,
    read_digest,
    unpack_digest,
)
from debubble.trace.format import Sidecar, StepTimes
from debubble.trace.source import Limits


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(traces(), sidecars)
def test_a_trace_and_its_sidecar_come_back_as_they_were(
    trace: RankTrace, sidecar: Sidecar | None
) -> None:
    back, said = unpack_digest(pack_digest(trace, sidecar))
    assert_same(trace, back)
    assert said == sidecar


def test_the_same_trace_gives_the_same_bytes() -> None:
    assert pack_digest(small_trace(), None) == pack_digest(small_trace(), None)


def test_a_digest_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rank3.debubble.npz"
    path.write_bytes(pack_digest(small_trace(), None))
    trace, sidecar = read_digest(str(path))
    assert trace.file == "run/rank3.json.gz"
    assert sidecar is None


def test_numpy_opens_a_digest_without_pickle() -> None:
    with np.load(io.BytesIO(pack_digest(small_trace(), None)), allow_pickle=False) as opened:
        assert set(opened) == {"debubble_digest", "description", "columns"}
        assert all(opened[name].dtype == np.uint8 for name in opened)


def test_the_first_bytes_tell_whose_it_is() -> None:
    stamp = Stamp(bytes=77, tail=5)
    data = pack_digest(small_trace(), None, stamp=stamp, part=1, parts=2)
    assert peek_head(data[:1024], "d") == Head(
        file="run/rank3.json.gz", rank=3, world_size=4, stamp=stamp, part=1, parts=2
    )


def test_a_digest_cut_off_anywhere_is_refused() -> None:
    data = pack_digest(small_trace(), None)
    for length in range(len(data)):
        with pytest.raises(TraceError):
            unpack_digest(data[:length], "cut.npz")


def test_a_changed_byte_gives_the_same_trace_or_an_error() -> None:
    trace, chance = small_trace(), random.Random(7)  # noqa: S311 (the same damage every time)
    data = pack_digest(trace, Sidecar(file="x", tags={"a": "b"}))
    refused = 0
    for _ in range(500):
        changed = bytearray(data)
        changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        try:
            back, said = unpack_digest(bytes(changed), "flipped.npz")
        except TraceError:
            refused += 1
            continue
        assert_same(trace, back)
        assert said == Sidecar(file="x", tags={"a": "b"})
    assert refused > 300


def test_a_version_of_the_future_is_named() -> None:
    with pytest.raises(TraceError, match="version 2; this debubble reads version 1") as raised:
        unpack_digest(_rewritten(schema="debubble.digest/2"), "new.npz")
    assert "newer" in raised.value.hint


def test_another_schema_is_refused() -> None:
    with pytest.raises(TraceError, match="schema"):
        unpack_digest(_rewritten(schema="cake/1"), "cake.npz")


def test_what_is_no_digest_is_said_so() -> None:
    with pytest.raises(TraceError, match="is no digest"):
        unpack_digest(b"hello", "hello.npz")


@pytest.mark.parametrize(
    ("changes", "column"),
    [
        ({"kernels": build(Kernels, 1, start_ns=[1], name=[2])}, "kernels.name"),
        ({"kernels": build(Kernels, 1, start_ns=[1], name=[-2])}, "kernels.name"),
        ({"kernels": build(Kernels, 1, start_ns=[1], launch=[2])}, "kernels.launch"),
        ({"kernels": build(Kernels, 1, start_ns=[1], kind=[6])}, "kernels.kind"),
        ({"operators": build(Operators, 1, start_ns=[1], group=[0])}, "operators.group"),
        ({"operators": build(Operators, 1, start_ns=[1], kernel=[2])}, "operators.kernel"),
        ({"operators": build(Operators, 1, start_ns=[1], dtype=[9])}, "operators.dtype"),
        ({"operators": build(Operators, 1, start_ns=[1], shape=[9])}, "operators.shape"),
        ({"operators": build(Operators, 1, start_ns=[1], operation=[6])}, "operators.operation"),
    ],
)
def test_a_row_that_points_outside_is_refused(changes: dict[str, object], column: str) -> None:
    with pytest.raises(TraceError, match=f"{column} is out of range"):
        unpack_digest(pack_digest(small_trace(**changes), None), "astray.npz")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kernels": build(Kernels, 2, start_ns=[5, 4], duration_ns=[1, 1])}, "contradict"),
        ({"kernels": build(Kernels, 1, start_ns=[5], duration_ns=[-1])}, "contradict"),
        ({"kernels": build(Kernels, 1, start_ns=[2**63 - 1], duration_ns=[1])}, "contradict"),
        ({"rank": 2**20}, "absurd number of ranks"),
        ({"rank": -1}, "absurd number of ranks"),
        ({"header": Header(world_size=10**15)}, "absurd number of ranks"),
        ({"events": -1}, "negative size"),
        ({"names": ("\ud800", "b")}, "is no text"),
        ({"operators": build(Operators, 1, start_ns=[1], duration_ns=[1], shape=[0])}, "no shape"),
    ],
)
def test_what_no_reader_returns_is_refused(changes: dict[str, object], why: str) -> None:
    with pytest.raises(TraceError, match=why):
        unpack_digest(pack_digest(small_trace(**changes), None), "astray.npz")


@pytest.mark.parametrize(
    "sidecar",
    [
        Sidecar(file="s", tokens=-1),
        Sidecar(file="s", split=(4, -4)),
        Sidecar(file="s", steps=StepTimes(before_s=(0.0,))),
        Sidecar(file="s", steps=StepTimes(profiled_median_s=float("nan"))),
        Sidecar(file="s", steps=StepTimes(overhead_fraction=float("inf"))),
    ],
)
def test_a_sidecar_that_no_reader_returns_is_refused(sidecar: Sidecar) -> None:
    with pytest.raises(TraceError, match="absurd numbers"):
        unpack_digest(pack_digest(small_trace(), sidecar), "astray.npz")


def test_more_rows_than_bytes_are_refused() -> None:
    description = _description()
    description["tables"]["kernels"]["rows"] = 10**15
    with pytest.raises(TraceError, match="no room for"):
        unpack_digest(_repacked(description), "huge.npz")


@pytest.mark.parametrize("width", [0, -1, 9])
def test_a_width_that_none_has_is_refused(width: int) -> None:
    description = _description()
    description["tables"]["kernels"]["columns"]["start_ns"]["width"] = width
    with pytest.raises(TraceError, match="no room for"):
        unpack_digest(_repacked(description), "wide.npz")


def test_a_field_of_another_type_is_refused() -> None:
    description = _description()
    description["names"] = 7
    with pytest.raises(TraceError, match="damaged digest"):
        unpack_digest(_repacked(description), "typed.npz")


def test_a_field_of_a_later_version_is_passed_over_in_the_head_too() -> None:
    content = archive.unpack(pack_digest(small_trace(), None), "x", Limits())
    later = {**msgspec.to_builtins(content.head), "mood": "good"}
    columns = bytes(content.columns)
    checksum = archive._checksum(later, content.description, columns)
    back, _ = unpack_digest(_rewritten(head=later, checksum=checksum))
    assert_same(small_trace(), back)


def test_a_column_of_a_later_version_is_passed_over() -> None:
    description = _description()
    columns = description["tables"]["cpu_operators"]["columns"]
    columns["mood"] = columns["name"]
    back, _ = unpack_digest(_repacked(description))
    assert_same(small_trace(), back)


def test_a_column_of_no_rows_that_is_missing_is_not_known() -> None:
    description = _description()
    del description["tables"]["cpu_operators"]["columns"]["thread"]
    back, _ = unpack_digest(_repacked(description))
    assert_same(small_trace(), back)


def test_a_bomb_is_refused_before_it_inflates() -> None:
    data = archive.pack(Head(file="x"), b"{}", bytes(70 * 1024**2))
    with pytest.raises(TraceTooLarge, match="bomb"):
        unpack_digest(data, "bomb.npz")


def test_the_limits_hold_for_digests() -> None:
    with pytest.raises(TraceTooLarge, match="inflates to more"):
        unpack_digest(pack_digest(small_trace(), None), "d.npz", Limits(inflated_bytes=100))


def _description() -> dict[str, dict[str, dict[str, dict[str, dict[str, int]]]]]:
    content = archive.unpack(pack_digest(small_trace(), None), "x", Limits())
    described: dict[str, dict[str, dict[str, dict[str, dict[str, int]]]]] = json.loads(
        content.description
    )
    return described


def _repacked(description: object) -> bytes:
    content = archive.unpack(pack_digest(small_trace(), None), "x", Limits())
    return archive.pack(content.head, json.dumps(description).encode(), bytes(content.columns))


def _rewritten(**changes: object) -> bytes:
    """Return a digest whose head says something else, whole in every other way."""
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(pack_digest(small_trace(), None))) as before,
        zipfile.ZipFile(out, "w") as after,
    ):
        for name in before.namelist():
            data = before.read(name)
            if name.startswith("debubble_digest"):
                head = {**json.loads(data[128:]), **changes}
                text = json.dumps(head).encode()
                data = archive._npy_header(len(text)) + text
            after.writestr(name, data)
    return out.getvalue()
