"""Figures of a run as named numbers, as trackers take them, and in TensorBoard's own file."""

from __future__ import annotations

import re
import struct

import pytest
from support.services.console import type_command
from support.traces.read_once import analyse_recording
from support.traces.recordings import DATA, H200

import debubble
from debubble.report.scalars import _masked, scalars, write_events

# What MLflow allows in the name of a metric; TensorBoard and Weights & Biases allow more.
NAME = re.compile(r"[\w\-. /]{1,250}")


@pytest.fixture(scope="module")
def found():
    return debubble.find(analyse_recording(H200 / "1f1b_p3_m7"))


def test_every_figure_has_a_name_that_all_trackers_take_and_is_a_float(found):
    values = debubble.scalars(found)
    assert all(NAME.fullmatch(name) for name in values)
    assert {type(value) for value in values.values()} == {float}
    assert values["debubble/bubble_fraction"] == found.numbers.bubble_fraction
    assert values["debubble/cause/imbalance_fraction"] == found.ledger.shares["imbalance"]
    assert values["debubble/saving/imbalance_s"] == pytest.approx(0.0186, abs=1e-4)
    peaks = [values[f"debubble/peak_memory_bytes/rank{rank}"] for rank in range(3)]
    assert peaks == found.numbers.peak_memory_bytes


def test_what_is_not_known_has_no_line(found):
    assert found.numbers.tokens_per_s is None
    assert "x/tokens_per_s" not in scalars(found, prefix="x")


def test_a_stream_has_its_figures_too():
    values = debubble.scalars(debubble.find(analyse_recording(DATA / "serving" / "k4")))
    assert values["debubble/bubble_fraction"] > 0
    assert values["debubble/cause/uneven_fraction"] > 0


def records(data):
    """Take TensorBoard's frames apart, checksums and all."""
    while data:
        length, rest = data[:8], data[8:]
        size = struct.unpack("<Q", length)[0]
        assert rest[:4] == _masked(length)
        record, crc, data = rest[4 : 4 + size], rest[4 + size : 8 + size], rest[8 + size :]
        assert crc == _masked(record)
        yield record


def test_the_checksum_is_that_of_castagnoli():
    # RFC 3720, B.4: the CRC of 32 zeros. TFRecord rotates it and adds a constant.
    crc = 0x8A9136AA
    masked = ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF
    assert _masked(bytes(32)) == struct.pack("<I", masked)


def test_the_file_begins_as_tensorboard_wants_it_and_holds_name_step_and_value(tmp_path):
    file = write_events(tmp_path / "new", {"a/b": 0.25}, step=300, now_s=1.5)
    first, second = records(file.read_bytes())
    assert first == b"\x09" + struct.pack("<d", 1.5) + b"\x1a\x0dbrain.Event:2"
    value = b"\x0a\x03a/b" + b"\x15" + struct.pack("<f", 0.25)
    summary = b"\x0a" + bytes([len(value)]) + value
    assert second == (
        b"\x09"
        + struct.pack("<d", 1.5)
        + b"\x10\xac\x02"
        + b"\x2a"
        + bytes([len(summary)])
        + summary
    )
    assert "tfevents" in file.name


def test_find_writes_beside_what_a_job_has_written(tmp_path):
    (tmp_path / "board").mkdir()
    (tmp_path / "board" / "events.out.tfevents.1.job").write_bytes(b"theirs")
    answer = type_command(
        "debubble find tests/data/h200/1f1b_p2_m4 --tensorboard board --json=brief", tmp_path
    )
    assert answer.code == 0
    assert re.search(
        r"board/events\.out\.tfevents\.\S+\.debubble written: \d\d scalars", answer.err
    )
    [made] = (tmp_path / "board").glob("*.debubble")
    assert len(list(records(made.read_bytes()))) == 2
    assert (tmp_path / "board" / "events.out.tfevents.1.job").read_bytes() == b"theirs"
