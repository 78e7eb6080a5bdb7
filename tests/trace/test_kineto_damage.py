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


def text(*events, **fields):
    return json.dumps(document(list(events), **fields)).encode()


def impossible(duration, problem):
    return text(kernel("bad", dur=duration), kernel("good")), 1, f"1 event with {problem} left out"


DEEP = b"[" * 200_000 + b"]" * 200_000
WHOLE = text(kernel())
ALL = text(*MANY)
# What is in the file, how many of its kernels are kept, and what is said of the others.
DAMAGES = {
    "cut in an event": (ALL[: ALL.index(b'"correlation": 2000}') - 5], 2000, "inside its list"),
    "a malformed event": (ALL.replace(b'"ts": 500.0', b'"ts" 500.0', 1), 2999, "1 malformed event"),
    "no objects": (text(kernel(), 7, None, [kernel()], kernel()), 2, "1 malformed event"),
    "bad UTF-8": (text(kernel("bad-name")).replace(b"bad-", b"bad\xff\xfe"), 1, "bad UTF-8"),
    "a list too deep": (
        text(kernel("odd"), kernel()).replace(b'"stream": 7', b'"x": ' + DEEP, 1), 1, "1 malformed",
    ),
    "an end beyond 64 bits": (
        text(kernel(ts=3.9e15, dur=3.9e15), kernel(), baseTimeNanoseconds=39 * 10**17),
        1, "1 event with no usable duration left out",
    ),
    "a second document": (WHOLE + WHOLE, 1, "what follows the list of events"),
    "rubbish behind": (WHOLE + b"rubbish", 1, "what follows the list of events"),
    "half a string behind": (WHOLE + b'"', 1, "what follows the list of events"),
    "a second list": (
        b'{"traceEvents": [%b], "traceEvents": []}' % json.dumps(kernel()).encode(),
        1, "what follows the list of events",
    ),
    "a duration of NaN": impossible(math.nan, "no usable duration"),
    "an endless duration": impossible(math.inf, "no usable duration"),
    "no duration": impossible(None, "no usable duration"),
    "a word for a duration": impossible("soon", "no usable duration"),
    "a negative duration": impossible(-1.0, "a negative duration"),
    "a duration beyond all": impossible(1e300, "no usable duration"),
    "nothing, and a line break": (WHOLE + b"\n", 1, None),
}  # fmt: skip


@pytest.mark.parametrize(("content", "kept", "said"), DAMAGES.values(), ids=DAMAGES)
def test_damage_costs_what_it_hits_and_is_said(tmp_path, content, kept, said):
    trace = read_kineto(write(tmp_path / "a.json", content))
    assert len(trace.kernels) == kept
    assert [said in gap.message for gap in trace.gaps] == [True] * (said is not None)
    assert "bad" not in [trace.names[name] for name in trace.kernels.name]


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


def test_a_file_that_inflates_beyond_the_limit_is_refused(tmp_path):
    path = write(tmp_path / "a.json.gz", document(MANY))
    with pytest.raises(TraceTooLarge, match=r"97\.7 KiB") as caught:
        read_kineto(path, Limits(inflated_bytes=100_000))
    assert "unpack it" in caught.value.hint
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
    began = time.process_time()
    with pytest.raises(TraceError):
        read_kineto(write(tmp_path / "a.json", b'{"traceEvents":[' + body))
    assert time.process_time() - began < 60  # it was minutes


def test_shapes_without_end_are_unknown_and_quickly_so(tmp_path):
    endless = operator("c10d::send", **{"Input Dims": [[2**62] * 200_000]})
    infinite = operator("c10d::send", ts=9.0, **{"Concrete Inputs": ["", "", math.inf, "0"]})
    began = time.process_time()
    trace = read_kineto(write(tmp_path / "a.json", document([endless, infinite, kernel()])))
    assert trace.operators.elements.tolist() == [-1, -1]
    assert trace.operators.local_peer.tolist() == [-1, -1]
    assert time.process_time() - began < 60
