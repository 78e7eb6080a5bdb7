"""Op tables: three formats, many spellings, and errors that name the row."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.traces.recordings import PUBLIC, existing

import debubble
from debubble.errors import TraceError
from debubble.trace.optable import Op, read_op_table, sniff_op_table
from debubble.trace.optable.files import ops_of

STRAGGLER = PUBLIC / "bytedance-straggler-ST" / "trace-ST.parquet"

HEADER = "step,pipeline,stage,microbatch,op,start_us,duration_us"
NS_PER = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}


def read_csv(*lines):
    return read_op_table("ops.csv", data="\n".join(lines).encode())


def refuse(*lines):
    with pytest.raises(TraceError) as caught:
        read_csv(*lines)
    assert caught.value.file == "ops.csv"
    return caught.value


def as_parquet(columns):
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def write(form, columns):
    """Write equally long columns in one of the three formats."""
    names, rows = list(columns), list(zip(*columns.values(), strict=True))
    if form == "parquet":
        return as_parquet(columns)
    if form == "jsonl":
        return "\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows).encode()
    sink = io.StringIO()
    csv.writer(sink).writerows([names, *rows])
    return sink.getvalue().encode()


def test_optional_columns_are_read_and_holes_in_them_are_unknown():
    table = read_csv(
        HEADER + ",rank,bytes,peer,layer",
        "0,0,0,0,F,0,1,4,,,7",
        "0,0,0,,forward-send,1,1,4,8388608,5,",
    )
    assert table.rank.tolist() == [4, 4]
    assert table.message_bytes.tolist() == [-1, 8_388_608]
    assert table.peer.tolist() == [-1, 5]
    assert table.layer.tolist() == [7, -1]
    assert table.microbatch.tolist() == [0, -1]


def test_times_without_a_unit_are_seconds_and_that_is_said():
    table = read_csv("step,stage,mb_id,op,start_ts,duration", "0,0,0,F,0.5,0.25")
    assert table.start_ns.tolist() == [500_000_000]
    assert [gap.code for gap in table.gaps] == ["unit_assumed"]
    assert "start_ts and duration" in table.gaps[0].message


def test_a_time_without_a_unit_takes_that_of_its_neighbour():
    table = read_csv("step,stage,mb_id,op,start_us,duration", "0,0,0,F,5,2")
    assert table.duration_ns.tolist() == [2_000]
    assert table.gaps == ()


def test_an_end_stands_in_for_a_duration():
    table = read_csv("step,stage,mb_id,op,start_us,end_us", "0,0,0,F,5,7.5")
    assert table.duration_ns.tolist() == [2_500]
    error = refuse("step,stage,mb_id,op,start_us,end_us", "0,0,0,F,5,4")
    assert "line 2, column end_us" in error.message


def test_epoch_times_in_text_keep_their_nanoseconds():
    columns = "step,stage,mb_id,op,start_s,end_s"
    table = read_csv(columns, "0,0,0,F,1700000000.123456789,1700000000.123457000")
    assert table.start_ns.tolist() == [1_700_000_000_123_456_789]
    assert table.duration_ns.tolist() == [211]


@pytest.mark.parametrize(
    ("ops", "names"),
    [
        ((Op.FORWARD,), "F fwd forward forward-compute FORWARD_COMPUTE"),
        ((Op.BACKWARD,), "B bwd backward backward-compute"),
        ((Op.INPUT_GRAD,), "I input-grad dgrad backward_input"),
        ((Op.WEIGHT_GRAD,), "W weight-grad wgrad backward_weight"),
        ((Op.FORWARD_SEND,), "forward-send send_forward SEND_F fwd_isend"),
        ((Op.FORWARD_RECEIVE,), "forward-recv recv_forward forward-receive"),
        ((Op.BACKWARD_SEND,), "backward-send send_backward"),
        ((Op.BACKWARD_RECEIVE,), "backward-recv RECV_B"),
        ((Op.FORWARD_SEND, Op.BACKWARD_RECEIVE), "exchange-next send_forward_recv_backward"),
        ((Op.COLLECTIVE,), "grads-reduce-scatter params-all-gather allreduce layernorm_all_reduce"),
        ((Op.OPTIMIZER,), "optimizer optimizer-clip-main-grad optimizer-all-gather"),
        ((Op.OTHER,), "gc backforward foo optimistic"),
    ],
)
def test_operations_are_known_by_their_usual_names(ops, names):
    assert {name: ops_of(name) for name in names.split()} == dict.fromkeys(names.split(), ops)


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_delimiters_quotes_and_a_byte_order_mark_are_understood(delimiter):
    header = HEADER.replace(",", delimiter)
    row = delimiter.join(["0", "0", "0", "0", f'"all{delimiter}reduce"', "1", "1"])
    data = f"\ufeff{header}\r\n{row}\r\n\r\n".encode()
    table = read_op_table("ops", data=data)
    assert sniff_op_table(data) == "csv"
    assert table.names == (f"all{delimiter}reduce",)


def test_a_missing_column_is_named_with_what_was_looked_for_and_found():
    error = refuse("step,stage,op,start_us,duration_us", "0,0,F,1,1")
    assert "no column for microbatch" in error.message
    assert "it has step, stage, op, start_us, duration_us" in error.message
    assert "mb_id" in error.hint


def test_a_column_that_is_there_twice_is_refused():
    error = refuse(HEADER + ",Stage", "0,0,0,0,F,1,1,0")
    assert "two columns called stage" in error.message


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("0,0,0,0,F,soon,1", "line 3, column start_us: 'soon' is no number"),
        ("0,0,0,0,F,1,-1", "line 3, column duration_us: a duration of -1.00 us is negative"),
        ("0,0,0,0,F,1,nan", "line 3, column duration_us"),
        ("0,0,0,0,F,inf,1", "line 3, column start_us"),
        ("0,0,0,0,F,1,", "line 3, column duration_us: is empty"),
        ("0,0,,0,F,1,1", "line 3, column stage: is empty"),
        ("0,0,1.5,0,F,1,1", "line 3, column stage: 1.5 is not a whole number"),
        ("0,0,3000000000,0,F,1,1", "line 3, column stage: 3000000000 is out of range"),
        ("0,0,0,-2,F,1,1", "line 3, column microbatch: -2 is out of range"),
        ("99999999999999999999,0,0,0,F,1,1", "line 3, column step"),
        ("0,0,0,0,F,1e300,1", "line 3, column start_us: 1e+300 is a time beyond"),
        ("0,0,0,0,,1,1", "line 3, column op: is no name"),
        ("0,0,0,0,F,1", "line 3 has 6 fields"),
        ("0,0,0,0,F,1,1,1", "line 3 has 8 fields"),
        ("0,0,0,9,F,5,1", "first on line 2"),
    ],
)
def test_a_bad_row_is_named_as_an_editor_counts_it(row, said):
    assert said in refuse(HEADER, "0,0,0,9,F,1,1", row).message


def test_lines_are_counted_past_blank_and_broken_ones():
    error = refuse(HEADER, "", '0,0,0,-1,"two', 'lines",1,1', "0,0,x,0,F,1,1")
    assert "line 5, column stage" in error.message


def test_the_same_pass_twice_names_both_rows_and_a_layer_tells_them_apart():
    rows = ("0,0,0,1,F,1,1,0", "0,0,0,1,B,2,1,0", "0,0,0,1,forward,9,1,0")
    error = refuse(HEADER + ",layer", *rows)
    assert "line 4: the forward pass" in error.message
    assert "first on line 2" in error.message
    table = read_csv(HEADER + ",layer", *rows[:2], "0,0,0,1,forward,9,1,1")
    assert len(table) == 3


def test_what_is_no_pass_or_has_no_microbatch_may_come_twice():
    rows = ("0,0,0,1,forward-send,1,1", "0,0,0,-1,F,1,1", "0,0,0,1,optimizer,1,1")
    assert len(read_csv(HEADER, *rows, *rows)) == 6


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\xef\xbb\xbf", HEADER.encode()])
def test_an_empty_table_is_refused(data):
    with pytest.raises(TraceError, match="no rows"):
        read_op_table("ops.csv", data=data)


def test_text_that_is_not_utf_8_is_refused_with_its_line():
    data = f"{HEADER}\n0,0,0,0,F,1,1\n0,0,0,1,".encode() + b"\xff,1,1"
    with pytest.raises(TraceError, match="line 3 is not UTF-8"):
        read_op_table("ops.csv", data=data)


def test_json_lines_say_which_row_is_broken():
    good = '{"step":0,"stage":0,"mb":0,"op":"F","start_us":1,"duration_us":1}'
    for bad, said in (
        ('{"step":', "is not a JSON object"),
        ("[1]", "is not a JSON object"),
        ('{"a":' * 5_000, "is not a JSON object"),
        (good.replace('"stage":0,', ""), "row 2, column stage: is empty"),
        (good.replace('"stage":0', '"stage":true'), "row 2, column stage: 'True' is no number"),
        (good.replace('"op":"F"', '"op":5'), "row 2, column op: is no name"),
        (good.replace('"step":0', '"step":1e40'), "row 2, column step: 1e+40 is out of range"),
    ):
        with pytest.raises(TraceError) as caught:
            read_op_table("ops.jsonl", data=f"{good}\n\n{bad}\n".encode())
        assert said in caught.value.message


def test_json_numbers_may_be_written_as_text():
    line = '{"step":"0","stage":1,"mb":null,"op":"gc","start_us":"1.5","duration_us":1}'
    table = read_op_table("ops.jsonl", data=line.encode())
    assert table.start_ns.tolist() == [1_500]
    assert table.microbatch.tolist() == [-1]


def test_formats_are_told_by_content_and_other_files_are_none():
    line = b'{"step":0,"stage":0,"mb":0,"op":"F","start_us":1,"duration_us":1}\n'
    assert sniff_op_table(line) == "jsonl"
    assert sniff_op_table(HEADER.encode()) == "csv"
    assert sniff_op_table(b"PAR1\x15\x04") == "parquet"
    for other in (
        b"",
        b'{"schemaVersion": 1, "traceEvents": [',
        b'{"name":"a","ts":1,"dur":2,"ph":"X"}\n',
        b'{"step":1,"type":"loss","timestamp":2}\n',
        b"name,size,color\n1,2,3\n",
        b"SQLite format 3\0",
        b"\x1f\x8b\x08\x00",
        b'{"a":' * 20_000,
    ):
        assert sniff_op_table(other) == ""


OPS = {"forward": Op.FORWARD, "W": Op.WEIGHT_GRAD, "forward-send": Op.FORWARD_SEND, "gc": Op.OTHER}
ROWS = st.lists(
    st.tuples(
        st.integers(0, 10**12),
        st.integers(0, 3),
        st.integers(0, 200),
        st.integers(-1, 50),
        st.sampled_from(sorted(OPS)),
        st.integers(-(10**9), 1_800_000_000 * 10**6),
        st.integers(0, 10**9),
        st.integers(-1, 5000),
        st.integers(-1, 2**50),
    ),
    min_size=1,
    max_size=20,
    unique_by=lambda row: row[:4],
)


@settings(deadline=None)
@given(
    rows=ROWS, form=st.sampled_from(["csv", "jsonl", "parquet"]), unit=st.sampled_from(["us", "ns"])
)
def test_what_is_written_in_any_format_and_unit_is_read_back(rows, form, unit):
    times = (f"start_{unit}", f"duration_{unit}")
    names = ("step", "dp_rank", "stage", "mb_id", "optype", *times, "rank", "bytes")
    data = write(form, dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))
    assert sniff_op_table(data) == form
    table = read_op_table("ops", data=data)
    assert table.format == form
    got = zip(
        table.step.tolist(),
        table.pipeline.tolist(),
        table.stage.tolist(),
        table.microbatch.tolist(),
        [table.names[index] for index in table.name],
        (table.start_ns // NS_PER[unit]).tolist(),
        (table.duration_ns // NS_PER[unit]).tolist(),
        table.rank.tolist(),
        table.message_bytes.tolist(),
        strict=True,
    )
    assert sorted(got) == sorted(rows)
    assert [OPS[table.names[index]] for index in table.name] == table.op.tolist()
    assert np.all(table.start_ns % NS_PER[unit] == 0)
    order = list(zip(table.step.tolist(), table.start_ns.tolist(), strict=True))
    assert order == sorted(order)


@settings(deadline=None)
@given(
    start_ns=st.integers(0, 10**13),
    duration_ns=st.integers(0, 10**12),
    form=st.sampled_from(["csv", "jsonl", "parquet"]),
    unit=st.sampled_from(sorted(NS_PER)),
)
def test_fractions_of_any_unit_are_right_to_the_nanosecond(start_ns, duration_ns, form, unit):
    columns = {"step": [0], "stage": [0], "mb": [0], "op": ["F"]}
    columns |= {f"start_{unit}": [start_ns / NS_PER[unit]]}
    columns |= {f"duration_{unit}": [duration_ns / NS_PER[unit]]}
    table = read_op_table("ops", data=write(form, columns))
    assert table.start_ns.tolist() == [start_ns]
    assert table.duration_ns.tolist() == [duration_ns]


def test_bytedances_table_reads_as_it_is():
    existing(STRAGGLER)
    table = read_op_table(str(STRAGGLER))
    assert (len(table), table.format) == (6784, "parquet")
    assert len(set(table.step.tolist())) == 32
    assert set(table.stage.tolist()) == {0, 1, 2, 3}
    assert set(table.pipeline.tolist()) == {0, 1}
    assert set(table.rank.tolist()) == set(range(8))
    assert np.sum(table.op == Op.FORWARD) == np.sum(table.op == Op.BACKWARD) == 1024
    transfers = (table.op >= Op.FORWARD_SEND) & (table.op <= Op.BACKWARD_RECEIVE)
    assert transfers.sum() == 4 * 768
    assert set(table.microbatch[transfers].tolist()) == {-1}
    assert set(table.microbatch[table.op == Op.FORWARD].tolist()) == {0, 1, 2, 3}
    assert {table.names[i] for i in table.name[table.op == Op.OTHER]} == {"gc"}
    first = (table.step == 23) & (table.rank == 0) & (table.op == Op.BACKWARD)
    # float32 seconds: 0.848672 and 0.138680, good to 60 ns and 15 ns
    assert table.start_ns[first][0] == pytest.approx(848_672_000, abs=1_000)
    assert table.duration_ns[first][0] == pytest.approx(138_680_000, abs=1_000)
    assert [gap.code for gap in table.gaps] == ["unit_assumed"]


def test_b_beside_w_is_the_input_gradient_as_in_the_papers(tmp_path):
    lines = ["step,stage,microbatch,op,start_us,duration_us"]
    lines += ["0,1,0,F,0,5", "0,1,0,B,5,5", "0,1,0,W,10,5", "0,2,0,B,0,9"]
    path = tmp_path / "ops.csv"
    path.write_text("\n".join(lines))
    table = read_op_table(str(path))
    assert [Op(op) for op in table.op[table.stage == 1]] == [
        Op.FORWARD,
        Op.INPUT_GRAD,
        Op.WEIGHT_GRAD,
    ]
    assert [Op(op) for op in table.op[table.stage == 2]] == [Op.BACKWARD]
    assert [gap.code for gap in table.gaps] == ["b_is_input_gradient"]


@pytest.mark.parametrize(
    ("columns", "row", "said"),
    [
        ("peer", "0,0,1,0,F,1,1,2147483646", "line 3, column peer: 2147483646 is out of range"),
        ("bytes", "0,1000000,10000,0,F,1,1,1", "rank 10,001,010,000 is out of range"),
        ("chunk", "0,0,0,0,F,1,1,2147483646", "line 3, column chunk: 2147483646 is out of range"),
    ],
)
def test_numbers_beyond_all_clusters_are_refused_before_anything_is_made_of_them(
    columns, row, said
):
    assert said in refuse(f"{HEADER},{columns}", "0,0,0,9,F,1,1,0", row).message


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_of_rows_is_read_as_lines_of_them_are(indent, tmp_path):
    table = Path(__file__).parents[1] / "data" / "formats" / "slow_device.csv"
    with table.open(newline="") as file:
        rows = [{name: text for name, text in row.items() if text} for row in csv.DictReader(file)]
    rows = [
        {name: text if name == "op" else float(text) for name, text in row.items()} for row in rows
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=indent))
    lines, array = (
        debubble.find(str(tmp_path / name)).to_dict() for name in ("rows.jsonl", "rows.json")
    )
    assert array["numbers"] == lines["numbers"]
    assert array["verdict"] == lines["verdict"]
