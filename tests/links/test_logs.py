"""Logs of link tests: every figure as it is printed; altered copies are refused, and say why."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from debubble.errors import Code, DebubbleError, LogError
from debubble.links.hop_times import GB, Past, find_class
from debubble.links.logs.hops import hops_in
from debubble.links.logs.log import Log
from debubble.links.logs.nvidia_smi import class_of_join
from debubble.links.logs.read import looks_like_log, read_log

OWN = Path(__file__).parents[1] / "data" / "links"
TEXT = (OWN / "sendrecv_2ranks.txt").read_text("utf-8")
RING = (OWN / "sendrecv_4ranks.txt").read_text("utf-8")
MATRIX = """nvbandwidth Version: v0.6

Running device_to_device_memcpy_read_ce.
memcpy CE GPU(row) -> GPU(column) bandwidth (GB/s)
           0         1
 0       N/A    395.10
 1    396.40       N/A

SUM device_to_device_memcpy_read_ce 791.50

NOTE: The reported results may not reflect the full capabilities of the platform.
"""
TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47
GPU1\tNV18\t X \tSYS\tPXB\t0-47
GPU2\tSYS\tSYS\t X \tSYS\t48-95
NIC0\tPIX\tPXB\tSYS\t X

Legend:
  X    = Self
"""
NVLINK = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2)
\t Link 0: 26.562 GB/s
\t Link 1: <inactive>
"""


def own(text):
    return read_log(text, "a.log")


def codes(log):
    return [gap.code for gap in log.doubts]


def figures_of(log):
    """Return all figures of the rows, by row: times in microseconds, rates in GB/s."""
    units = [1, *[1e6, 1 / GB, 1 / GB] * 2]
    return [
        [round(figure * unit, 3) for figure, unit in zip(row, units, strict=True)]
        for row in log.rows
    ]


def printed(text):
    """Return the numbers of each row, read another way: size, and two times three."""
    rows = []
    for line in text.splitlines():
        words = line.split()
        if re.fullmatch(r"\d+", words[0] if words else "") and len(words) >= 10:
            numbers = [float(word) for word in words if re.fullmatch(r"[\d.e+]+", word)]
            out, into = words[-8:-5], words[-4:-1]
            rows.append([numbers[0], *map(float, out), *map(float, into)])
    return rows


def test_every_log_of_others_parses_to_the_figures_it_prints(public_data):
    programs = set()
    for path in sorted((public_data / "nccl-logs").glob("*_n*.log")):
        text = path.read_text("utf-8")
        log = own(text)
        programs.add(log.program)
        if log.program == "nccl-tests":
            assert figures_of(log) == printed(text)
            assert len(log.ranks) == 8
        else:
            cells = [figure for _, _, figures, *_ in log.rows for figure in figures]
            tables = re.findall(r"^ \d+ +([\d. ]+)$", text, re.MULTILINE)
            assert cells == [float(word) for row in tables for word in row.split()]
            assert [total for *_, total, _ in log.rows] == [
                float(word) for word in re.findall(r"^SUM \S+ (\S+)", text, re.MULTILINE)
            ]
    assert programs == {"nccl-tests", "nvbandwidth"}


def test_every_log_of_our_own_parses_to_the_figures_it_prints(recorded_data):
    for path in sorted((recorded_data / "nccl-tests").glob("*.txt")):
        text = path.read_text("utf-8")
        assert figures_of(own(text)) == printed(text)


def with_iterations(text):
    """Add the four columns of `-I 1` after each half."""
    names = "i_min i_max i_p99 i_cv%"
    lines = []
    for line in text.splitlines():
        words = line.split()
        if words and words[0].isdigit():
            lines.append(" ".join([*words[:9], "1 2 3 4", *words[9:], "5 6 7 8"]))
        else:
            lines.append(line.replace("#wrong", f"#wrong {names}"))
    return "\n".join(lines)


def test_columns_of_single_iterations_are_read():
    log = own(with_iterations(TEXT))
    assert figures_of(log) == figures_of(own(TEXT))


def test_stamps_of_rows_are_passed_over():
    lines = [f"{line} timestamp" if "algbw" in line else line for line in TEXT.splitlines()]
    lines = [f"{row} 2026-11-15 07:34:32" if row.strip()[:1].isdigit() else row for row in lines]
    assert figures_of(own("\n".join(lines))) == figures_of(own(TEXT))


def test_host_times_tell_no_bandwidth():
    log = own(TEXT.replace(" time ", " cputime "))
    assert codes(log) == [Code.HOST_TIMES]
    assert hops_in([log], classes={}, history={}) == ()


def test_a_ring_of_more_than_two_names_no_hop():
    log = own(RING)
    assert codes(log) == [Code.RING_NAMES_NO_HOP]
    assert hops_in([log], classes={}, history={}) == ()


def test_two_ranks_are_a_hop_and_judged_by_a_stated_class():
    log = own(TEXT)
    alone = hops_in([log], classes={}, history={})[0]
    assert (alone.hop, alone.judgement.verdict) == ((0, 1), "unknown")
    assert alone.bytes_per_s == pytest.approx(33554432 / 14485.3e-6)
    judged = hops_in([log], classes={(0, 1): find_class("nvlink4")}, history={})[0]
    assert judged.judgement.slow


def test_a_history_of_other_hops_or_sizes_is_not_called_none():
    other_hop = {(2, 3): Past(times_ns={33554432: 1e6}, fit=None)}
    other_size = {(0, 1): Past(times_ns={1024: 1e6}, fit=None)}
    for history in (other_hop, other_size):
        (found,) = hops_in([own(TEXT)], classes={}, history=history)
        assert found.judgement.why == (
            "the history has nothing of hop 0 → 1 with messages of 32.0 MiB, "
            "and there is no --class"
        )


def test_figures_of_copy_engines_are_not_held_against_nccl():
    assert codes(own(MATRIX)) == [Code.COPY_ENGINE]
    of_kernels = own(MATRIX.replace("read_ce", "read_sm"))
    assert of_kernels.doubts == ()
    assert own(MATRIX).rows[0][2] == (None, 395.1, 396.4, None)


def test_matrices_that_end_without_the_closing_note_may_lack_tests():
    cut = own(MATRIX.partition("NOTE")[0])
    assert cut.rows == own(MATRIX).rows
    assert codes(cut) == [Code.COPY_ENGINE, Code.LOG_CUT]


def test_matrices_that_begin_without_the_version_may_lack_tests():
    cut = own(MATRIX[MATRIX.index("Running") :])
    assert cut.rows == own(MATRIX).rows
    assert codes(cut) == [Code.COPY_ENGINE, Code.LOG_CUT]


def test_no_cut_of_a_matrix_log_goes_unnoticed():
    whole = own(MATRIX).rows
    for cut in [text for place in range(len(MATRIX)) for text in (MATRIX[:place], MATRIX[place:])]:
        try:
            log = own(cut)
        except LogError:
            continue
        told = Code.LOG_CUT in codes(log)
        assert told or log.rows == whole


def test_a_sum_whose_test_is_missing_is_refused():
    second = MATRIX[MATRIX.index("Running") : MATRIX.index("NOTE")].replace("read_ce", "write_ce")
    headless = second.partition("\n")[2]
    with pytest.raises(LogError, match="read_ce has no sum of its own"):
        own(MATRIX.replace("NOTE", f"{headless}\nNOTE"))


def test_wrong_data_is_told():
    log = own(TEXT.replace("Out of bounds values : 0 OK", "Out of bounds values : 3 FAILED"))
    assert codes(log) == [Code.WRONG_VALUES]


def test_a_topology_tells_classes():
    joins = own(TOPOLOGY).joins
    assert joins[0, 1] == "NV18"
    assert len(joins) == 6
    assert class_of_join("NV18", "NVIDIA H100 80GB HBM3").name == "nvlink4"
    assert class_of_join("SYS", "NVIDIA H100 80GB HBM3").name == "pcie5"
    assert class_of_join("NV12", "").name == "nvlink3"
    assert class_of_join("SYS", "") is None


def test_links_that_are_down_are_told():
    assert codes(own(NVLINK)) == [Code.LINKS_INACTIVE]


SAMPLES = {
    "text": TEXT,
    "ring": RING,
    "iterations": with_iterations(TEXT),
    "matrix": MATRIX,
    "topology": TOPOLOGY,
    "nvlink": NVLINK,
}


def mutated(text, random):
    """Cut a text off, or drop, swap or damage words of its rows."""
    lines = text.splitlines(keepends=True)
    how = random.integers(5)
    if how == 0:
        return text[: random.integers(len(text))]
    row = int(random.integers(len(lines)))
    words = lines[row].split(" ")
    place = int(random.integers(len(words)))
    if how == 1:
        del lines[row]
    elif how == 2:
        words[place] = "x" + words[place]
        lines[row] = " ".join(words)
    elif how == 3:
        other = int(random.integers(len(words)))
        words[place], words[other] = words[other], words[place]
        lines[row] = " ".join(words)
    else:
        del words[place]
        lines[row] = " ".join(words)
    return "".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_altered_copies_give_the_figures_or_a_clear_error(name):
    """Never a traceback, and never a figure that the log did not have."""
    random = np.random.default_rng(0)
    true = own(SAMPLES[name])
    refused = []
    for _ in range(400):
        text = mutated(SAMPLES[name], random)
        try:
            found = own(text)
        except LogError as error:
            refused.append(error)
            continue
        if true.program == "nccl-tests":
            assert all(row in figures_of(true) for row in figures_of(found)), text
    assert len(refused) > 100
    assert all(error.message and error.hint and error.file == "a.log" for error in refused)


def dropped(text, column):
    """Drop a column from the rows, but not from their header."""
    lines = []
    for line in text.splitlines():
        words = line.split()
        if words and words[0].isdigit():
            del words[column]
            lines.append(" ".join(words))
        else:
            lines.append(line)
    return "\n".join(lines)


@pytest.mark.parametrize("column", [0, 1, 2, 5, 6, 7, 8, 9, 10, 11, 12])
def test_a_column_that_is_missing_is_refused(column):
    with pytest.raises(LogError, match=r"line \d+: "):
        own(dropped(TEXT, column))


@pytest.mark.parametrize("names", [("time", "algbw"), ("size", "count"), ("type", "count")])
def test_columns_that_changed_places_in_the_header_are_refused(names):
    one, other = names
    header = next(line for line in TEXT.splitlines() if "algbw" in line)
    swapped = header.replace(one, "\0", 1).replace(other, one, 1).replace("\0", other, 1)
    with pytest.raises(LogError):
        own(TEXT.replace(header, swapped))


def test_a_log_that_is_cut_off_is_refused():
    for end in range(200, len(TEXT) - 120, 97):
        with pytest.raises(LogError):
            own(TEXT[:end])


def test_what_is_no_log_is_not_taken_for_one():
    assert not looks_like_log('{"traceEvents": []}')
    assert not looks_like_log('{"version": 3, "config": {}, "results": []}')  # nccl-tests' -J
    assert not looks_like_log("hello")
    with pytest.raises(DebubbleError):
        own("hello")


NVLINK_ERRORS = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)
\t Link 0: Replay Errors: 0
\t Link 0: Recovery Errors: 0
\t Link 0: CRC Errors: 0
GPU 3: NVIDIA H100 80GB HBM3 (UUID: GPU-3)
\t Link 0: Replay Errors: 0
\t Link 7: Replay Errors: 1204
\t Link 7: Recovery Errors: 2
\t Link 8: CRC Errors: N/A
"""


def test_errors_of_links_are_told_by_device_and_link():
    log = own(NVLINK_ERRORS)
    assert log.rows == (
        (3, "NVIDIA H100 80GB HBM3", 7, 1204, "replay errors"),
        (3, "NVIDIA H100 80GB HBM3", 7, 2, "recovery errors"),
    )
    [gap] = log.doubts
    assert gap.code == "link_errors"
    assert "GPU 3" in gap.message
    assert "1 link with errors" in gap.message
    assert "link 7: 1,204 replay errors" in gap.message


def test_counters_of_no_device_are_a_damaged_log():
    lines = NVLINK_ERRORS.splitlines()
    with pytest.raises(LogError, match="of no device"):
        own("\n".join([lines[1], *lines]))


def export(name, values, **labels):
    """Make the answer of a range query."""
    stamped = [[1_700_000_000 + 15 * at, str(value)] for at, value in enumerate(values)]
    series = {"metric": {"__name__": name, **labels}, "values": stamped}
    return {"status": "success", "data": {"resultType": "matrix", "result": [series]}}


REPLAYS = "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL"


def test_counters_over_time_tell_what_comes_and_goes():
    log = own(json.dumps(export(REPLAYS, [5, 5, 9, 9, 2, 2], gpu="3", Hostname="node7")))
    assert log.rows == (("3", "node7", REPLAYS, 6, 2, 5),)  # it was reset once
    [gap] = log.doubts
    assert gap.code == "link_errors"
    assert gap.message == f"node7 device 3: {REPLAYS} rose by 6, in 2 of 5 intervals"


def test_a_counter_that_stands_still_is_no_doubt():
    assert own(json.dumps(export(REPLAYS, [4, 4, 4]))).doubts == ()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (export("up", [1, 1]), "no counter of a link"),
        (export(REPLAYS, ["many"]), "no matrix of counters"),
        ({"data": {"resultType": "vector", "result": []}}, "a vector and no matrix"),
        ({"data": {"resultType": "matrix", "result": [{"metric": 1}]}}, "no matrix of counters"),
    ],
)
def test_another_export_says_what_is_wrong(data, says):
    with pytest.raises(LogError, match=says):
        own(json.dumps(data))


FLIGHT = sorted((OWN.parent / "flight").glob("fr_rank*.json"))
INSPECTED = {
    "header": {"id": "0x1", "rank": 0, "n_ranks": 2, "nnodes": 1},
    "metadata": {"inspector_output_format_version": "v4.0", "hostname": "a", "pid": 1},
}


def dumps(slow: tuple[int, int] | None = None, times: float = 1.0) -> list[Log]:
    """Return the recorded dumps; of one hop every message takes so many times as long."""
    logs = []
    for file in FLIGHT:
        data = json.loads(file.read_text("utf-8"))
        mine = (
            {f"nccl:send {slow[0]}->{slow[1]}", f"nccl:recv {slow[1]}<-{slow[0]}"} if slow else ()
        )
        for call, group in zip(data["entries"][::2], data["entries"][1::2], strict=True):
            if call["profiling_name"] in mine:
                group["duration_ms"] *= times
        logs.append(read_log(json.dumps(data), file.name))
    return logs


def inspected(*messages: tuple[int, str, int, int, float]) -> str:
    lines = []
    for rank, what, peer, size, time_us in messages:
        perf = {"p2p": what, "p2p_sn": 1, "p2p_peer": peer, "p2p_msg_size_bytes": size}
        perf |= {"p2p_exec_time_us": time_us, "p2p_timing_source": "kernel_gpu"}
        lines.append(
            json.dumps(
                INSPECTED | {"header": INSPECTED["header"] | {"rank": rank}, "p2p_perf": perf}
            )
        )
    return "\n".join(lines) + "\n"


def test_a_flight_recorder_tells_every_hop_by_the_side_that_waited_less():
    results = {hop.hop: hop for hop in hops_in(dumps(), classes={}, history={})}
    assert sorted(results) == [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)]
    assert {result.size_bytes for result in results.values()} == {32 * 1024**2}
    # The links of that lab carry 3 to 5.5 GB/s; what a waiting side saw would be below.
    assert all(3e9 < result.bytes_per_s < 5.5e9 for result in results.values())
    assert not any(result.judgement.slow or result.both_ways for result in results.values())


@pytest.mark.parametrize("hop", [(2, 3), (1, 0)])
def test_a_hop_that_takes_three_times_as_long_is_slow_and_no_other_is(hop):
    results = hops_in(dumps(slow=hop, times=3.0), classes={}, history={})
    assert [result.hop for result in results if result.judgement.slow] == [hop]


def test_one_side_alone_is_read_and_its_past_is_held_against_it():
    (own, *_) = dumps()
    past = {(0, 1): Past(times_ns={32 * 1024**2: 2e6}, fit=None)}
    results = hops_in([own], classes={}, history=past)
    judged = {result.hop: result.judgement for result in results}
    assert judged[0, 1].slow
    assert judged[0, 1].against == "history"


def test_calls_of_a_group_are_numbered_by_it_and_share_their_time():
    entry = {"input_sizes": [[1024]], "input_dtypes": ["Float"], "process_group": ["7", "pp"]}
    calls = [{"profiling_name": "nccl:send 0->1"}, {"profiling_name": "nccl:recv 0<-1"}]
    together = {"profiling_name": "nccl:coalesced", "duration_ms": 2.0}
    data = {
        "version": "2.10",
        "pg_config": {"7": {"name": "7", "ranks": "[4, 12]"}},
        "entries": [entry | call for call in (*calls, together)],
    }
    log = read_log(json.dumps(data), "fr.json")
    assert [(message.hop, message.sent) for message in log.messages] == [
        ((4, 12), True),
        ((12, 4), False),
    ]
    assert all(not message.alone and message.size_bytes == 4096 for message in log.messages)


def test_lines_of_nccl_inspector_and_one_that_is_cut():
    size = 1024**2
    text = inspected(*[(0, "Send", 1, size, 900.0)] * 5, *[(1, "Recv", 0, size, 300.0)] * 5)
    collective = json.dumps(INSPECTED | {"coll_perf": {"coll": "AllReduce"}}) + "\n"
    log = read_log(collective + text + text[:40], "inspector.log")
    (result,) = hops_in([log], classes={}, history={})
    assert (result.hop, result.size_bytes, result.time_s) == ((0, 1), size, 300e-6)
    assert looks_like_log(text)
    with pytest.raises(LogError, match="line 2"):
        read_log(text[:300] + "\n" + text, "inspector.log")
    with pytest.raises(LogError, match="1 collectives and no message"):
        read_log(collective, "inspector.log")


def test_dumps_that_say_nothing_of_time_or_are_pickles_are_refused():
    untimed = json.loads(FLIGHT[0].read_text("utf-8"))
    for entry in untimed["entries"]:
        entry.pop("duration_ms", None)
    with pytest.raises(LogError, match="no message in it was timed"):
        read_log(json.dumps(untimed), "fr.json")
    pickled = b"\x80\x02}q\x00(X\x09\x00\x00\x00pg_configq\x01".decode("utf-8", "replace")
    assert looks_like_log(pickled)
    with pytest.raises(LogError, match="as a pickle"):
        read_log(pickled, "nccl_trace_rank_0")
    with pytest.raises(LogError, match="no dump of torch's flight recorder"):
        read_log(json.dumps(untimed | {"entries": 3}), "fr.json")
