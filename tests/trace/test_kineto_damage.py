"""Damaged and odd files: whatever is whole is kept, and what is not is said."""

from __future__ import annotations

import gzip
import json
import math
import time

import pytest
from support.traces.kineto_events import document, kernel, launch, memory, operator, write

from debubble.errors import NotATrace, TraceError, TraceTooLarge
from debubble.trace.columns import summarise
from debubble.trace.kineto import read_kineto
from debubble.trace.source import Limits

MANY = [kernel(f"k{i % 7}", ts=10.0 * i, dur=5.0, correlation=i) for i in range(3000)]


def codes(trace):
    return [gap.code for gap in trace.gaps]


def test_truncated_gzip_keeps_the_events_before_the_cut(tmp_path):
    packed = gzip.compress(json.dumps(document(MANY)).encode())
    path = write(tmp_path / "rank0.json.gz", packed[: len(packed) // 2], packed=False)
    trace = read_kineto(path)
    assert 0 < len(trace.kernels) < 3000
    assert codes(trace) == ["truncated"]
    assert trace.gaps[0].file == path
    assert trace.gaps[0].rank == 0
    assert f"{trace.events:,} events" in trace.gaps[0].message
    assert trace.gaps[0].hint


def test_truncated_json_keeps_every_complete_event(tmp_path):
    data = json.dumps(document(MANY)).encode()
    cut = data.index(b'"correlation": 2000}') - 5
    trace = read_kineto(write(tmp_path / "a.json", data[:cut]))
    assert len(trace.kernels) == 2000
    assert codes(trace) == ["truncated"]


def test_damaged_gzip_keeps_the_events_before_the_damage(tmp_path):
    packed = bytearray(gzip.compress(json.dumps(document(MANY)).encode()))
    packed[-2000:-1900] = bytes(100)
    trace = read_kineto(write(tmp_path / "a.json.gz", bytes(packed), packed=False))
    assert len(trace.kernels) > 1000
    assert codes(trace)[0] == "truncated"
    assert "damaged gzip" in trace.gaps[0].message


def test_a_gzip_file_cut_before_its_first_event_is_an_error(tmp_path):
    packed = gzip.compress(json.dumps(document(MANY)).encode())
    path = write(tmp_path / "a.json.gz", packed[:15], packed=False)
    with pytest.raises(TraceError, match="truncated") as caught:
        read_kineto(path)
    assert caught.value.file == path
    assert caught.value.hint


def test_no_events_is_an_error_with_a_cure(tmp_path):
    with pytest.raises(NotATrace, match="no events") as caught:
        read_kineto(write(tmp_path / "a.json", document([])))
    assert "prof.step()" in caught.value.hint


def test_bad_utf8_costs_a_name_and_nothing_else(tmp_path):
    data = json.dumps(document([kernel("bad-name"), kernel("good", ts=30.0)])).encode()
    trace = read_kineto(write(tmp_path / "a.json", data.replace(b"bad-name", b"bad\xff\xfename")))
    assert len(trace.kernels) == 2
    assert codes(trace) == ["bad_text"]
    assert any("\ufffd" in name for name in trace.names)


@pytest.mark.parametrize(
    ("duration", "problem"),
    [
        (math.nan, "no usable duration"),
        (math.inf, "no usable duration"),
        (None, "no usable duration"),
        ("soon", "no usable duration"),
        (-1.0, "a negative duration"),
        (1e300, "no usable duration"),
    ],
)
def test_events_with_impossible_durations_are_left_out_and_counted(tmp_path, duration, problem):
    trace = read_kineto(
        write(tmp_path / "a.json", document([kernel(dur=duration), kernel("good")]))
    )
    assert [trace.names[n] for n in trace.kernels.name] == ["good"]
    assert [(gap.code, gap.message) for gap in trace.gaps] == [
        ("bad_times", f"1 event with {problem} left out")
    ]


def test_times_written_as_text_are_read(tmp_path):
    trace = read_kineto(
        write(tmp_path / "a.json", document([kernel(ts="12.5", dur="3.25")], baseTimeNanoseconds=0))
    )
    assert trace.kernels.start_ns.tolist() == [12_500]
    assert trace.kernels.duration_ns.tolist() == [3_250]
    assert not trace.gaps


def test_arguments_of_the_wrong_type_cost_only_themselves(tmp_path):
    odd = kernel("odd", device="0x0", stream=None, correlation=5, bytes=1e400)
    trace = read_kineto(
        write(tmp_path / "a.json", document([odd, launch(correlation=5), kernel("even")]))
    )
    row = trace.names.index("odd")
    assert trace.kernels.correlation[trace.kernels.name == row].tolist() == [5]
    assert trace.kernels.device[trace.kernels.name == row].tolist() == [-1]
    assert len(trace.kernels) == 2


@pytest.mark.parametrize("stream", [10**12, -(2**63)])
def test_numbers_beyond_64_bits_are_unknown_not_fatal(tmp_path, stream):
    huge = kernel("huge", correlation=10**30, stream=stream)
    trace = read_kineto(write(tmp_path / "a.json", document([huge])))
    assert trace.kernels.correlation.tolist() == [-1]
    assert trace.kernels.stream.tolist() == [-1]


def test_a_malformed_event_in_the_middle_costs_only_itself(tmp_path):
    data = json.dumps(document(MANY)).encode()
    broken = data.replace(b'"ts": 500.0', b'"ts" 500.0', 1)
    trace = read_kineto(write(tmp_path / "a.json", broken))
    assert len(trace.kernels) == 2999
    assert codes(trace) == ["malformed"]


def test_events_that_are_no_objects_are_counted(tmp_path):
    trace = read_kineto(
        write(tmp_path / "a.json", document([kernel(), 7, None, [kernel()], kernel()]))
    )
    assert len(trace.kernels) == 2
    assert "3 malformed events" in trace.gaps[0].message


def test_deep_nesting_does_not_overflow_the_stack(tmp_path):
    data = json.dumps(document([kernel(), kernel(ts=20.0)])).encode()
    deep = b"[" * 200_000 + b"]" * 200_000
    trace = read_kineto(
        write(tmp_path / "a.json", data.replace(b'"stream": 7', b'"x": ' + deep, 1))
    )
    assert len(trace.kernels) >= 1


def test_a_gzip_bomb_is_refused_by_ratio(tmp_path):
    bomb = b'{"traceEvents": [' + b" " * 80_000_000
    with pytest.raises(TraceTooLarge, match="250 times") as caught:
        read_kineto(write(tmp_path / "a.json.gz", bomb))
    assert "--max-inflated" in caught.value.hint


def test_a_file_that_inflates_beyond_the_limit_is_refused(tmp_path):
    path = write(tmp_path / "a.json.gz", document(MANY))
    with pytest.raises(TraceTooLarge, match=r"97\.7 KiB") as caught:
        read_kineto(path, Limits(inflated_bytes=100_000))
    assert "--max-inflated" in caught.value.hint
    assert len(read_kineto(path, Limits(inflated_bytes=10_000_000)).kernels) == 3000


def test_a_cpu_trace_of_a_gpu_job_says_so(tmp_path):
    trace = read_kineto(write(tmp_path / "a.json", document([operator("aten::mm")])))
    assert codes(trace) == ["no_kernels"]
    assert "ProfilerActivity.CUDA" in trace.gaps[0].hint
    assert summarise(trace).busy_fraction is None
    assert len(trace.cpu_operators) == 1


def test_a_cpu_trace_of_a_cpu_job_has_nothing_to_complain_about(tmp_path):
    content = document([operator("aten::mm"), memory(device_type=0)], deviceProperties=[])
    assert not read_kineto(write(tmp_path / "a.json", content)).gaps


def test_what_follows_the_events_is_not_lost_without_a_word(tmp_path):
    data = json.dumps(document([kernel()])).encode()
    for number, tail in enumerate((data, b"rubbish", b'"')):
        trace = read_kineto(write(tmp_path / f"{number}.json", data + tail))
        assert codes(trace) == ["truncated"]
    whole = read_kineto(write(tmp_path / "whole.json", data + b"\n"))
    assert not whole.gaps


def test_a_second_list_of_events_is_said_to_be_left_out(tmp_path):
    events = json.dumps([kernel()])
    text = f'{{"traceEvents": {events}, "traceEvents": {events}}}'
    assert codes(read_kineto(write(tmp_path / "a.json", text.encode()))) == ["truncated"]


def test_text_that_cannot_be_printed_is_mended(tmp_path):
    odd = kernel("half \ud800 of a pair \U0001f600", ts="10")
    named = {"ph": "M", "name": "thread_name", "tid": 100, "args": {"name": "\udfff", "x": 1e999}}
    content = document([odd, launch(), named], host_name="\ud800")
    trace = read_kineto(write(tmp_path / "a.json", content))
    assert trace.names[trace.kernels.name[0]] == "half \ufffd of a pair \U0001f600"
    assert (trace.threads[0].name, trace.header.host) == ("\ufffd", "\ufffd")
    assert "bad_text" in codes(trace)


def test_names_beside_odd_values_keep_their_letters(tmp_path):
    content = json.dumps(document([kernel("café", ts="10")]), ensure_ascii=False).encode()
    trace = read_kineto(write(tmp_path / "a.json", content))
    assert trace.names[trace.kernels.name[0]] == "café"
    assert not trace.gaps


@pytest.mark.parametrize("depth", [*range(900, 1000, 7), 100_000])
@pytest.mark.parametrize("key", ["name", "tid", "ts", "args", "Process Group Ranks"])
def test_nesting_as_deep_as_python_goes_costs_at_most_its_event(tmp_path, depth, key):
    event = operator("c10d::send", **{"Process Group Name": "9"})
    (event["args"] if key[0] == "P" else event)[key] = "<deep>"
    data = json.dumps(document([event, kernel()])).encode()
    deep = b"[" * depth + b"]" * depth
    quoted = b'"' + deep + b'"' if key[0] == "P" else deep
    trace = read_kineto(write(tmp_path / "a.json", data.replace(b'"<deep>"', quoted)))
    assert len(trace.kernels) == 1


def test_numbers_of_any_length_cost_only_themselves(tmp_path):
    data = json.dumps(document([kernel("long", ts=1), kernel()], notes=2)).encode()
    data = data.replace(b'"ts": 1,', b'"ts": ' + b"7" * 5000 + b",", 1)
    data = data.replace(b'"notes": 2', b'"notes": ' + b"7" * 5000)
    trace = read_kineto(write(tmp_path / "a.json", data))
    assert len(trace.kernels) == 1
    assert trace.rank == 0


def test_an_end_beyond_64_bits_is_no_time(tmp_path):
    late = kernel("late", ts=3.9e15, dur=3.9e15)
    content = document([late, kernel()], baseTimeNanoseconds=3_900_000_000_000_000_000)
    trace = read_kineto(write(tmp_path / "a.json", content))
    assert len(trace.kernels) == 1
    assert codes(trace) == ["bad_times"]


def test_infinite_times_of_cpu_operators_are_counted(tmp_path):
    events = [operator("a", ts=math.inf), operator("b", ts=math.inf), operator("c")]
    trace = read_kineto(write(tmp_path / "a.json", document(events, deviceProperties=[])))
    assert len(trace.cpu_operators) == 1
    assert trace.gaps[0].message == "2 events with no usable start left out"


def test_a_world_that_cannot_be_is_not_counted(tmp_path):
    trace = read_kineto(write(tmp_path / "a.json", document([kernel()], rank=2, world=2**60)))
    assert (trace.rank, trace.header.world_size) == (2, None)


HOSTILE = {
    "no events at all": b"0," * 1_000_000,
    "one malformed event after the other": b'{"ts" 1},' * 150_000,
    "lists in lists with borders": b'{"a":[{},' * 100_000,
    "the same, and bad at the end": (b'{"a":[{},' * 400 + b"?},") * 400,
    "names that never end": b'{"a":"},{"a":"' * 100_000,
    "spaces": b" " * 30_000_000,
    "brackets": b"[" * 30_000_000,
}


@pytest.mark.slow
@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_takes_no_longer_than_other_text(tmp_path, body):
    began = time.monotonic()
    with pytest.raises(TraceError):
        read_kineto(write(tmp_path / "a.json", b'{"traceEvents":[' + body))
    assert time.monotonic() - began < 60  # it was minutes


def test_shapes_without_end_are_unknown_and_quickly_so(tmp_path):
    endless = operator("c10d::send", **{"Input Dims": [[2**62] * 200_000]})
    infinite = operator("c10d::send", ts=9.0, **{"Concrete Inputs": ["", "", math.inf, "0"]})
    began = time.monotonic()
    trace = read_kineto(write(tmp_path / "a.json", document([endless, infinite, kernel()])))
    assert trace.operators.elements.tolist() == [-1, -1]
    assert trace.operators.local_peer.tolist() == [-1, -1]
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("sizes", [[True, 4, 8], [4, False], [4.0, 8], ["4", 8]])
def test_a_size_that_is_no_number_makes_a_shape_unknown(tmp_path, sizes):
    odd = operator("c10d::send", **{"Input Dims": [sizes]})
    sound = operator("c10d::send", ts=9.0, **{"Input Dims": [[4, 8]]})
    trace = read_kineto(write(tmp_path / "a.json", document([odd, sound, kernel()])))
    assert trace.operators.shape[0] == -1
    assert trace.names[trace.operators.shape[1]] == "4x8"
