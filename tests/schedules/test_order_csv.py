"""Orders in torch's CSV notation: read, written, and refused with the place of the fault."""

from __future__ import annotations

import csv
import gzip
import io

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from debubble.errors import UsageError
from debubble.timeline.schedules import (
    SCHEDULES,
    Action,
    format_order,
    order_of,
    parse_order,
    read_order,
    stated,
)

sizes = (
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 6),
    st.integers(1, 16),
    st.integers(1, 3),
)


def order_or_nothing(name, ranks, microbatches, chunks):
    try:
        return order_of(name, ranks, microbatches, chunks)
    except UsageError:
        assume(False)


@given(*sizes)
def test_every_schedule_comes_back_as_it_was_written(name, ranks, microbatches, chunks):
    order = order_or_nothing(name, ranks, microbatches, chunks)
    assert parse_order(format_order(order)) == order


@pytest.mark.slow
@given(*sizes, st.randoms(use_true_random=False))
def test_idle_slots_and_communication_change_no_order(name, ranks, microbatches, chunks, random):
    order = order_or_nothing(name, ranks, microbatches, chunks)
    noise = ["", " ", "0SEND_F0", "8RECV_F0", "1SEND_B2", "1RECV_B3", "0UNSHARD", "0RESHARD"]
    noise.append("0REDUCE_GRAD")
    rows = list(csv.reader(io.StringIO(format_order(order))))
    for row in rows:
        for _ in range(random.randrange(6)):
            row.insert(random.randrange(len(row) + 1), random.choice(noise))
    text = "\r\n".join(",".join(row) for row in rows)
    assert parse_order(text) == order


def test_cells_are_written_as_torch_writes_them():
    order = [[Action(0, "F", 7, overlap=True), Action(7, "B", 3), Action(0, "W", 12)]]
    assert format_order(order) == "(0F7;7B3)OVERLAP_F_B,0W12\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1G0\n", "line 2, cell 2: '1G0' is no action"),
        ("0F0,0B0x\n", "line 1, cell 2: '0B0x' is no action"),
        ("0F0,-1B0\n", "line 1, cell 2: '-1B0' is no action"),
        ("0F0,0F99999999\n", "line 1, cell 2: '0F99999999' is no action"),
        ("(0F0;0F1)OVERLAP_F_B\n", "line 1, cell 1: '(0F0;0F1)OVERLAP_F_B' is no action"),
        ("0F0;0B0\n", "line 1, cell 1: '0F0;0B0' is no action"),
        ("0F0\n\n1F0\n", "line 2: a rank without a pass"),
        ("0F0\n0SEND_F0,,\n", "line 2: a rank without a pass"),
        ('0F0,"0B0\n1F0', "line 2: "),
        ("0F٣\n", "line 1, cell 1: '0F٣' is no action"),
        ("", "this order cannot finish: it is empty"),
        ("0F0,0B0\n1B0,1F0\n", "this order cannot finish: rank 1 waits at 1B0 for 1F0"),
    ],
)
def test_a_bad_file_is_refused_with_line_and_cell(text, message):
    with pytest.raises(UsageError) as caught:
        parse_order(text, file="order.csv")
    assert str(caught.value).startswith(f"order.csv: {message}")
    assert caught.value.hint


@given(st.text(alphabet='0123456789FBIW,;()\n\r"OVERLAP_ SEND', max_size=60))
def test_any_text_is_read_or_refused_in_words(text):
    try:
        order = parse_order(text)
    except UsageError:
        return
    assert parse_order(format_order(order)) == order


def test_a_long_cell_is_shown_in_part():
    with pytest.raises(UsageError) as caught:
        parse_order("9" * 10_000)
    assert len(str(caught.value)) < 200


def test_a_file_is_read_packed_or_not_and_with_a_byte_order_mark(tmp_path):
    order = order_of("zbv", 4, 8)
    plain, packed = tmp_path / "order.csv", tmp_path / "order.csv.gz"
    plain.write_bytes(b"\xef\xbb\xbf" + format_order(order).encode())
    packed.write_bytes(gzip.compress(format_order(order).encode()))
    assert read_order(str(plain)) == read_order(str(packed)) == order


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"0F0,\xff\xfe\n", "is no text"),
        (b"0F0,0B0\n" * 10, "is larger than 64 B"),
        (gzip.compress(b"0F0,0B0\n", mtime=0)[:-9], "is damaged"),
    ],
)
def test_a_file_that_cannot_be_an_order_is_refused(content, message, tmp_path, monkeypatch):
    monkeypatch.setattr(stated, "MOST_BYTES", 64)
    path = tmp_path / "order.csv"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        read_order(str(path))
    assert caught.value.file == str(path)
    assert caught.value.hint
