"""A digest gives back the trace it was made of, and nothing else gives anything."""

from __future__ import annotations

import io
import random
import zipfile
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from support.traces.rank_traces import assert_same, small_trace, traces

from debubble.errors import TraceError, TraceTooLarge
from debubble.trace.columns import Header, Kernels, Operators, RankTrace, build
from debubble.trace.digest import SCHEMA, pack_digest, unpack_digest
from debubble.trace.sidecar import Sidecar
from debubble.trace.source import Limits


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(traces(), traces())
def test_traces_and_their_sidecars_come_back_as_they_were(
    first: RankTrace, second: RankTrace
) -> None:
    back = unpack_digest(pack_digest(first, second))
    for left, right in zip((first, second), back, strict=True):
        assert_same(left, right, but="file")


def test_a_digest_cut_off_anywhere_is_refused() -> None:
    data = pack_digest(small_trace())
    for length in range(len(data)):
        with pytest.raises(TraceError):
            unpack_digest(data[:length], "cut.npz")


def test_a_changed_byte_gives_the_same_trace_or_an_error() -> None:
    sidecar = Sidecar(file="x", environment={"a": "b"})
    trace, chance = small_trace(sidecar=sidecar), random.Random(7)  # noqa: S311 (the same damage every time)
    data = pack_digest(trace)
    refused = 0
    for _ in range(500):
        changed = bytearray(data)
        changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        try:
            (back,) = unpack_digest(bytes(changed), "flipped.npz")
        except TraceError:
            refused += 1
            continue
        assert_same(trace, back)
    assert refused > 250


def kernel(**columns: object) -> dict[str, object]:
    return {"kernels": build(Kernels, 1, **{"start_ns": [1], "duration_ns": [1], **columns})}


def operator(**columns: object) -> dict[str, object]:
    return {"operators": build(Operators, 1, **{"start_ns": [1], "duration_ns": [1], **columns})}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (kernel(name=[2]), "kernels.name is out of range"),
        (kernel(kind=[6]), "kernels.kind is out of range"),
        (operator(kernel=[2]), "operators.kernel is out of range"),
        ({"kernels": build(Kernels, 2, start_ns=[5, 4], duration_ns=[1, 1])}, "out of order"),
        (kernel(duration_ns=[-1]), "out of range"),
        ({"rank": 2**20}, "Expected `int`"),
        ({"header": Header(world_size=-1), "events": -1}, "Expected `int`"),
        ({"sidecar": Sidecar(file="s", tokens=-1)}, "Expected `int`"),
    ],
)
def test_what_no_reader_returns_is_refused(changes: dict[str, object], why: str) -> None:
    with pytest.raises(TraceError, match=why):
        unpack_digest(pack_digest(small_trace(**changes)), "astray.npz")


def changed(data: bytes, member: str, change: Any) -> bytes:
    """Return a digest with another member, whole in every other way."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(out, "w", 8) as after:
        for name in before.namelist():
            content = before.read(name)
            after.writestr(name, change(content) if name == f"{member}.npy" else content)
    return out.getvalue()


@pytest.mark.parametrize(
    ("member", "change", "why"),
    [
        ("debubble_digest", lambda b: b.replace(b"digest/3", b"digest/4"), "another version"),
        ("0.kernels", lambda b: b.replace(b", 2), }   ", b", 2**40), }"), "damaged digest"),
        ("0.kernels", lambda _: b"no array", "damaged digest"),
        ("0.kernels", lambda b: b.replace(b"<i8", b"|O8"), "damaged digest"),
    ],
)
def test_a_member_that_is_not_as_it_was_written_is_refused(
    member: str, change: Any, why: str
) -> None:
    with pytest.raises(TraceError, match=why):
        unpack_digest(changed(pack_digest(small_trace()), member, change), "astray.npz")


def test_a_bomb_is_refused_before_it_inflates() -> None:
    out = io.BytesIO()
    about = np.frombuffer(b'{"schema": "%b"}' % SCHEMA.encode(), np.uint8)
    np.savez_compressed(out, debubble_digest=about, bomb=np.zeros(70 * 1024**2, np.uint8))
    with pytest.raises(TraceTooLarge, match="bomb"):
        unpack_digest(out.getvalue(), "bomb.npz")
    with pytest.raises(TraceTooLarge, match="inflates to more"):
        unpack_digest(pack_digest(small_trace()), "d.npz", Limits(inflated_bytes=100))
