"""The reader of sidecars: what it gets out of a good one, and out of a damaged one."""

from __future__ import annotations

import json

import pytest
from support.traces.recordings import H200

from debubble.errors import Code, DebubbleError
from debubble.trace.run import find_run
from debubble.trace.sidecar import SCHEMA, read_sidecar

WHOLE = {
    "schema": SCHEMA,
    "rank": 3,
    "pipeline": {"schedule": "1f1b", "microbatches": 8, "held_stages": [3], "split": [4, 4]},
    "workload": {"tokens": 4096, "context_lengths": [512]},
    "steps": {"before_s": [0.5, 0.25], "profiled_s": [0.75]},
    "memory": {"max_allocated_bytes": 10},
    "power": {"draw_w": 412.5},
    "environment": {"torch": "2.13.0", "nccl": None},
}


def written(folder, content):
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / "rank3.debubble.json").write_bytes(text)
    return str(folder / "rank3.json.gz")


def test_a_whole_sidecar_is_read_whole(tmp_path):
    said, gap = read_sidecar(written(tmp_path, WHOLE))
    assert gap is None
    assert (said.rank, said.schedule, said.microbatches) == (3, "1f1b", 8)
    assert (said.split, said.tokens, said.draw_w) == ((4, 4), 4096, 412.5)
    assert said.steps.before_s == (0.5, 0.25)
    assert (said.max_allocated_bytes, said.free_bytes) == (10, None)
    assert said.environment == {"torch": "2.13.0"}


def test_a_sidecar_is_read_from_object_storage_too():
    import fsspec  # noqa: PLC0415

    with fsspec.open("memory://run/rank3.debubble.json", "wb") as file:
        file.write(json.dumps(WHOLE).encode())
    said, gap = read_sidecar("memory://run/rank3.json.gz")
    assert gap is None
    assert said.tokens == 4096
    assert read_sidecar("memory://run/rank4.json.gz") == (None, None)


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"schema": "debubble.sidecar/2"}', b"[" * 100_000],
)
def test_a_broken_sidecar_is_a_gap_with_its_name(tmp_path, damage):
    said, gap = read_sidecar(written(tmp_path, damage))
    assert said is None
    assert gap.code is Code.UNREADABLE
    assert gap.file.endswith("rank3.debubble.json")


def test_fields_of_the_wrong_kind_are_missing_and_the_others_stay(tmp_path):
    bad = WHOLE | {
        "rank": "3",
        "pipeline": [],
        "workload": {"tokens": True, "context_lengths": [1, "x"]},
        "steps": {"before_s": [0.5, None, -1, "x"], "after_s": [float("nan")]},
        "memory": {"max_allocated_bytes": -1, "free_bytes": 5},
    }
    said, gap = read_sidecar(written(tmp_path, bad))
    assert gap.code is Code.SIDECAR_DIFFERS
    assert gap.file.endswith("rank3.debubble.json")
    assert gap.message.startswith(
        "rank: Expected `int | null`, got `str`; pipeline: Expected `object`; workload.tokens: "
    )
    assert (said.rank, said.schedule, said.tokens, said.context_lengths) == (None, None, None, ())
    assert said.steps.before_s == ()
    assert said.steps.after_s == ()
    assert (said.max_allocated_bytes, said.free_bytes) == (None, 5)
    assert said.environment == {"torch": "2.13.0"}


@pytest.mark.parametrize("content", [WHOLE, b"", WHOLE | {"traceEvents": []}])
def test_a_sidecar_is_never_taken_for_a_trace(tmp_path, content):
    source = next(iter(sorted(H200.rglob("*.json.gz"))))
    (tmp_path / "rank3.json.gz").write_bytes(source.read_bytes())
    written(tmp_path, content)
    for places in ([str(tmp_path)], [str(one) for one in sorted(tmp_path.iterdir())]):
        found = find_run(places)
        assert [file.file for file in found.capture.files] == [str(tmp_path / "rank3.json.gz")]
        assert (found.left_alone, found.gaps) == ((), ())


def test_a_sidecar_named_alone_is_refused(tmp_path):
    written(tmp_path, WHOLE)
    with pytest.raises(DebubbleError):
        find_run([str(tmp_path / "rank3.debubble.json")])
