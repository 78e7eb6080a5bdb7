"""What no device can do is not measured: each rule on a recorded rank, damaged in memory."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from support.traces.kineto_events import annotation, document, operator, write
from support.traces.recordings import DATA, H200, SHARED

from debubble.errors import Code, RunNotFound, TraceError
from debubble.fleet.survey import NoPipelineIn, Question, measure_run
from debubble.trace.columns import (
    KernelKind,
    Launches,
    Memory,
    RankTrace,
    doubt_memory,
    peak_memory,
)
from debubble.trace.guard import _of_one_length, guard
from debubble.trace.kineto import read_kineto
from debubble.trace.run import find_run, read_run
from debubble.trace.source import expand

MS = 1_000_000
LAUNCH_COLUMNS = tuple(Launches.__dataclass_fields__)
MEMORY_COLUMNS = tuple(Memory.__dataclass_fields__)
BYTES = ("change", "allocated", "reserved")
# What sound recordings are warned of, and rightly: their folder, and why.
SAID = {
    "zero_bubble.json": {Code.B_IS_INPUT_GRADIENT},
    "primus": {Code.COLD_STEPS},
    "primus-pp_vis": {Code.COLD_STEPS},
    "fwd_m8": {Code.NO_COMMON_SPAN},
    "bytedance-straggler-AR": {Code.UNIT_ASSUMED},
    "bytedance-straggler-ST": {Code.UNIT_ASSUMED},
}


@cache
def recorded(rank: int = 0) -> RankTrace:
    return read_kineto(str(H200 / "1f1b_p2_m4" / f"rank{rank}.json.gz"))


def with_kernels(trace: RankTrace, **columns: np.ndarray) -> RankTrace:
    """Return the trace with other columns of its kernels, sorted by start as tables are."""
    kernels = replace(trace.kernels, **columns)
    return pick(replace(trace, kernels=kernels), np.argsort(kernels.start_ns, kind="stable"))


def pick(trace: RankTrace, rows: np.ndarray) -> RankTrace:
    """Return the trace with these kernels alone; operators keep pointing at theirs."""
    kernels = trace.kernels
    moved = np.full(len(kernels) + 1, -1)
    moved[rows] = np.arange(len(rows))
    columns = {name: getattr(kernels, name)[rows] for name in kernels.__dataclass_fields__}
    operators = replace(trace.operators, kernel=moved[trace.operators.kernel].astype(np.int32))
    return replace(trace, kernels=replace(kernels, **columns), operators=operators)


def refusal(trace: RankTrace) -> str:
    kept, gaps = guard(trace)
    assert kept is None
    assert [gap.code for gap in gaps] == [Code.IMPOSSIBLE]
    assert (gaps[0].rank, gaps[0].file) == (trace.rank, trace.file)
    return gaps[0].message


def moved_by(trace: RankTrace, row: int, by_ns: int) -> RankTrace:
    start = trace.kernels.start_ns.copy()
    start[row] += by_ns
    return with_kernels(trace, start_ns=start)


def compute(trace: RankTrace) -> np.ndarray:
    return np.flatnonzero(trace.kernels.kind == 0)


def every_recording() -> list[str]:
    places = [str(DATA), *([str(SHARED)] if SHARED.exists() else [])]
    return [file for file in expand(places)[0] if not file.endswith((".md", ".toml", ".txt"))]


@pytest.mark.slow
def test_no_rule_is_broken_by_anything_that_was_recorded():
    ranks = 0
    for file in every_recording():
        try:
            run = read_run(find_run([file]))
        except (RunNotFound, TraceError):
            continue  # no trace: a log, a table of figures
        ranks += len(run.ranks)
        wrong = {Code.IMPOSSIBLE, Code.WRONG_MEMORY, Code.WRONG_FIELDS, Code.CLOCK_OFF}
        assert not [str(gap) for gap in run.gaps if gap.code in wrong]
    assert ranks >= 30


@pytest.mark.slow
def test_no_run_that_was_recorded_is_warned_of_anything_but_what_it_has():
    runs = 0
    folders = [*DATA.glob("*/*"), *(SHARED.glob("*/*") if SHARED.exists() else ())]
    for folder in sorted(folders):
        try:
            survey = measure_run(read_run(find_run([str(folder)])), Question())
        except (RunNotFound, TraceError, NoPipelineIn):
            continue  # no traces, or of one device
        runs += 1
        assert {gap.code for gap in survey.gaps} <= SAID.get(folder.name, set()), folder
    assert runs >= 15


def test_a_sound_rank_is_returned_as_it_is():
    assert guard(recorded()) == (recorded(), ())


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_kernels_that_were_launched_and_not_recorded(share):
    trace = recorded()
    rows = np.arange(len(trace.kernels))
    lost = np.random.default_rng(0).choice(rows[:-50], size=int(share * len(rows)), replace=False)
    assert "launched and not recorded" in refusal(pick(trace, np.setdiff1d(rows, lost)))


def test_a_capture_that_ends_early_lacks_its_last_kernels():
    trace = recorded()
    kept, _ = guard(pick(trace, np.arange(len(trace.kernels) - 40)))
    assert kept is not None


def test_a_capture_that_begins_late_lacks_its_first_launches():
    trace = read_kineto(str(H200 / "1f1b_p3_m7" / "rank0.json.gz"))
    assert (trace.kernels.launch < 0).sum() > 100
    assert guard(trace) == (trace, ())


def test_kernels_without_a_launch_among_others():
    trace = recorded()
    launch = trace.kernels.launch.copy()
    launch[compute(trace)[200:210]] = -1
    assert "without a launch" in refusal(with_kernels(trace, launch=launch))


def test_calls_that_capture_a_graph_launch_nothing():
    trace = recorded()
    rows = np.arange(len(trace.kernels))
    names = (*trace.names, "cudaGraphInstantiate")
    name = trace.launches.name.copy()
    called = trace.kernels.launch[100]
    name[called] = len(names) - 1
    without = pick(replace(trace, names=names), np.setdiff1d(rows, [90, 95, 100]))
    kept, _ = guard(replace(without, launches=replace(trace.launches, name=name)))
    assert kept is not None


@pytest.mark.parametrize("by_ns", [-(10**15), -1_000 * MS])
def test_a_kernel_before_its_launch(by_ns):
    trace = recorded()
    assert "before their launch" in refusal(moved_by(trace, compute(trace)[500], by_ns))


@pytest.mark.parametrize("by_ns", [5 * MS, 1_000 * MS])
def test_a_kernel_later_than_those_launched_after_it(by_ns):
    trace = recorded()
    assert "another order" in refusal(moved_by(trace, compute(trace)[500], by_ns))


def test_a_last_kernel_that_the_host_had_waited_for():
    trace = recorded()
    last = int(trace.kernels.start_ns.argmax())
    assert "the host waited" in refusal(moved_by(trace, last, 1_000 * MS))


def test_a_kernel_beside_others_of_its_stream():
    trace = recorded()
    duration = trace.kernels.duration_ns.copy()
    duration[compute(trace)[300]] += 20 * MS
    assert "beside others" in refusal(with_kernels(trace, duration_ns=duration))


def test_neighbours_may_overlap_a_little_and_kernels_of_a_graph_at_will():
    trace = recorded()
    row = int(compute(trace)[300])
    duration = trace.kernels.duration_ns.copy()
    duration[row] += 10_000
    assert guard(with_kernels(trace, duration_ns=duration))[0] is not None
    duration[row : row + 30] += 3 * MS
    graph, launch = np.full(len(trace.kernels), 7), trace.kernels.launch.copy()
    launch[row : row + 40] = -1
    graphed = with_kernels(trace, duration_ns=duration, graph=graph, launch=launch)
    assert "beside others" not in str(guard(graphed)[1])


def scaled(trace: RankTrace, factor: float) -> RankTrace:
    """Return the trace as if its clock ran at another speed, on the host and on the device."""
    begin = trace.kernels.start_ns[0]
    tables = {}
    for name in ("kernels", "launches", "operators", "annotations"):
        table = getattr(trace, name)
        start = ((table.start_ns - begin) * factor).astype(np.int64)
        duration = (table.duration_ns * factor).astype(np.int64)
        tables[name] = replace(table, start_ns=start, duration_ns=duration)
    return replace(trace, **tables)


@pytest.mark.parametrize("factor", [0.5, 1.005, 2])
def test_copies_tell_by_their_bandwidth_how_long_they_took(factor):
    assert "than their bandwidth" in refusal(scaled(recorded(), factor))


def test_one_copy_with_a_damaged_bandwidth_damages_nothing_else():
    trace = recorded()
    stated = trace.kernels.stated_ns.copy()
    stated[np.flatnonzero(stated > 0)[0]] *= 3
    kept, gaps = guard(with_kernels(trace, stated_ns=stated))
    assert kept is not None
    assert not gaps


def test_copies_that_all_take_the_same():
    trace = recorded()
    copies = np.isin(trace.kernels.kind, (KernelKind.COPY, KernelKind.MEMSET))
    duration = np.where(copies, 1000, trace.kernels.duration_ns)
    unstated = np.full(len(copies), -1)
    damaged = with_kernels(trace, duration_ns=duration, stated_ns=unstated)
    assert "all its copies take 1 us" in refusal(damaged)


@pytest.mark.parametrize(
    ("count", "lasts_ns", "told"), [(16, 20_000, True), (15, 20_000, False), (16, 9_999, False)]
)
def test_kernels_of_a_name_that_all_take_the_same_are_doubted(count, lasts_ns, told):
    trace = recorded()
    lasts = np.where(np.arange(len(trace.kernels)) % 2, 12_345, 23_456)
    name = np.full(len(lasts), trace.kernels.name[0])
    name[:count], lasts[:count] = trace.kernels.name[-1], lasts_ns
    assert trace.kernels.name[0] != trace.kernels.name[-1]
    said = _of_one_length(with_kernels(trace, duration_ns=lasts, name=name))
    assert bool(said) is told
    whole = np.where(lasts == lasts_ns, lasts_ns // 1000 * 1000, 17_000)
    assert not _of_one_length(with_kernels(trace, duration_ns=whole, name=name))


def test_a_kernel_shorter_than_any_seen_and_than_its_like():
    trace = recorded()
    duration = trace.kernels.duration_ns.copy()
    longest = compute(trace)[np.argmax(duration[compute(trace)])]
    duration[longest] = 500
    assert "1 kernel shorter than any can be" in refusal(with_kernels(trace, duration_ns=duration))


@pytest.mark.parametrize("factor", [1e-3, 0.5, 0.7])
def test_durations_that_end_before_what_is_queued_behind_them(factor):
    trace = recorded()
    duration = (trace.kernels.duration_ns * factor).astype(np.int64)
    assert guard(with_kernels(trace, duration_ns=duration))[0] is None


@pytest.mark.parametrize(
    ("factor", "says"), [(0.97, "end before the device goes on"), (1.03, "last into those")]
)
def test_durations_that_are_a_little_off_show_after_long_kernels(factor, says):
    trace = recorded()
    duration = trace.kernels.duration_ns.copy()
    duration[compute(trace)] = (duration[compute(trace)] * factor).astype(np.int64)
    assert says in refusal(with_kernels(trace, duration_ns=duration))


def without_launches(trace: RankTrace, lost: np.ndarray) -> RankTrace:
    """Return the trace without some kernels, and without the calls that launched them."""
    gone = trace.kernels.launch[lost]
    kept = np.setdiff1d(np.arange(len(trace.launches)), gone)
    number = np.full(len(trace.launches) + 1, -1)
    number[kept] = np.arange(len(kept))
    fewer = pick(trace, np.setdiff1d(np.arange(len(trace.kernels)), lost))
    columns = {name: getattr(trace.launches, name)[kept] for name in LAUNCH_COLUMNS}
    launch = number[fewer.kernels.launch].astype(np.int32)
    return replace(
        fewer,
        kernels=replace(fewer.kernels, launch=launch),
        launches=replace(trace.launches, **columns),
    )


def test_kernels_lost_with_their_launches_leave_uneven_steps():
    trace = recorded()
    lost = np.random.default_rng(0).choice(compute(trace), size=100, replace=False)
    kept, gaps = guard(without_launches(trace, lost))
    assert kept is not None
    codes = (Code.LOST_OPERATORS, Code.IMPOSSIBLE)
    assert tuple((gap.code, gap.rank) for gap in gaps) == tuple((code, 0) for code in codes)
    assert "its steps run other numbers of the same kernels" in gaps[0].message
    assert "its device runs nothing" in gaps[1].message


@pytest.mark.parametrize(("share", "factor"), [(0.01, 0.5), (0.05, 0.8), (0.2, 0.8)])
def test_the_longest_kernels_alone_end_too_early(share, factor):
    trace = recorded()
    duration = trace.kernels.duration_ns.copy()
    rows = compute(trace)[np.argsort(-duration[compute(trace)])]
    longest = rows[: round(share * len(rows))]
    duration[longest] = (duration[longest] * factor).astype(np.int64)
    _, gaps = guard(with_kernels(trace, duration_ns=duration))
    assert {gap.rank for gap in gaps} == {0}
    assert any(word in gap.message for gap in gaps for word in ("are queued", "cannot be so"))


def messages(trace: RankTrace) -> np.ndarray:
    return np.flatnonzero(trace.kernels.kind == KernelKind.PEER)


@pytest.mark.parametrize(
    ("late", "lasts"), [(MS, 1.0), (0, 0.5), (0, 0.1)], ids=["late", "half as long", "shorter"]
)
def test_messages_that_begin_late_or_end_early_leave_the_device_idle(late, lasts):
    trace = read_kineto(str(DATA / "serving" / "k4" / "rank1.json.gz"))
    start, duration = trace.kernels.start_ns.copy(), trace.kernels.duration_ns.copy()
    start[messages(trace)] += late
    duration[messages(trace)] = (duration[messages(trace)] * lasts).astype(np.int64)
    _, gaps = guard(with_kernels(trace, start_ns=start, duration_ns=duration))
    assert [(gap.code, gap.rank) for gap in gaps] == [(Code.IMPOSSIBLE, 1)]


def on_crowded_device(trace: RankTrace) -> RankTrace:
    """Let the device go on some microseconds later to each kernel, as where eight ranks share it.

    All that happens after such a moment happens later.
    """
    kernels = trace.kernels
    ended = np.maximum.accumulate(kernels.start_ns + kernels.duration_ns)[:-1]
    idle = np.flatnonzero(
        (kernels.start_ns[1:] > ended) & (kernels.start_ns[1:] < ended + MS // 50)
    )
    more = np.random.default_rng(0).exponential(7_000, len(idle)).astype(np.int64)
    late = np.concatenate(([0], np.cumsum(more)))

    def warped(table):
        start, end = (
            at + late[np.searchsorted(ended[idle], at, side="right")]
            for at in (table.start_ns, table.start_ns + getattr(table, "duration_ns", 0))
        )
        length = {"duration_ns": end - start} if hasattr(table, "duration_ns") else {}
        return replace(table, start_ns=start, **length)

    names = ("kernels", "launches", "operators", "annotations", "memory")
    # A kernel that ends where the device falls idle is none the longer for it.
    tables = {name: warped(getattr(trace, name)) for name in names}
    tables["kernels"] = replace(tables["kernels"], duration_ns=kernels.duration_ns)
    return replace(trace, **tables)


def test_a_device_that_goes_on_a_little_later_to_every_kernel_is_shared_and_lost_nothing():
    """Eight recorded ranks on one device: 12 us later for a quarter, over 20 us for 4 %."""
    trace = on_crowded_device(recorded())
    assert guard(trace) == (trace, ())
    lost = np.random.default_rng(0).choice(compute(trace), size=100, replace=False)
    _, gaps = guard(without_launches(trace, lost))
    assert Code.IMPOSSIBLE in {gap.code for gap in gaps}


def test_what_follows_kernels_launched_before_the_capture_tells_nothing():
    """Of those that were launched before, the last ones may not be recorded."""
    trace = recorded()
    first = int(trace.kernels.launch[200])
    columns = {name: getattr(trace.launches, name)[first:] for name in LAUNCH_COLUMNS}
    launch = np.maximum(trace.kernels.launch - first, -1)
    late = replace(trace, launches=replace(trace.launches, **columns))
    begun = with_kernels(late, launch=launch)
    lost = [row for row in compute(begun).tolist() if 100 < row < 200 and launch[row] < 0]
    fewer = pick(begun, np.setdiff1d(np.arange(len(launch)), lost))
    assert sum(trace.kernels.duration_ns[lost]) > 5 * MS
    assert Code.IMPOSSIBLE not in {gap.code for gap in guard(fewer)[1]}


def test_two_kernels_of_one_launch():
    trace = recorded()
    launch = trace.kernels.launch.copy()
    launch[compute(trace)[300]] = launch[compute(trace)[299]]
    assert "2 kernels that share the launch of one" in refusal(with_kernels(trace, launch=launch))


def test_kernels_of_one_graph_and_launches_of_their_own_do_not_overlap():
    trace = recorded()
    duration = trace.kernels.duration_ns.copy()
    duration[compute(trace)[::7]] += 5 * MS
    graph = np.full(len(duration), 3)
    assert "beside others" in refusal(with_kernels(trace, duration_ns=duration, graph=graph))


def test_a_rank_with_launches_and_no_kernels_is_none_of_a_device():
    trace = pick(recorded(), np.arange(0))
    kept, _ = guard(trace)
    assert len(trace.launches)
    assert kept is None or not len(kept.kernels)


def test_a_kernel_that_is_called_like_those_of_messages_and_is_none():
    trace = recorded()
    kind, name = trace.kernels.kind.copy(), trace.kernels.name.copy()
    message = np.flatnonzero(trace.kernels.kind == KernelKind.PEER)[0]
    kind[compute(trace)[::5]], name[compute(trace)[::5]] = KernelKind.PEER, name[message]
    wrong = with_kernels(trace, kind=kind, name=name)
    assert "without the operator of the others" in refusal(wrong)


def test_a_file_in_another_unit_is_left_out():
    assert "a launch takes" in refusal(scaled(recorded(), 1000))


def test_a_message_without_its_kernel():
    trace = recorded()
    kernel = trace.operators.kernel.copy()
    kernel[3] = -1
    assert guard(replace(trace, operators=replace(trace.operators, kernel=kernel)))[0] is None


@pytest.mark.parametrize("by_ns", [5 * MS, -100 * MS])
def test_steps_that_do_not_follow_each_other(by_ns):
    trace = recorded()
    marks = [row for row, name in enumerate(trace.names) if name.startswith("ProfilerStep#")]
    mine = np.isin(trace.annotations.name, marks) & (trace.annotations.stream < 0)
    start = trace.annotations.start_ns.copy()
    start[np.flatnonzero(mine)[0]] += by_ns
    order = np.argsort(start, kind="stable")
    columns = {
        name: getattr(trace.annotations, name)[order]
        for name in trace.annotations.__dataclass_fields__
    }
    columns["start_ns"] = start[order]
    marked = replace(trace, annotations=replace(trace.annotations, **columns))
    assert "steps do not follow" in refusal(marked)


def marks_of(trace: RankTrace) -> np.ndarray:
    steps = [row for row, name in enumerate(trace.names) if name.startswith("ProfilerStep#")]
    return np.flatnonzero(np.isin(trace.annotations.name, steps) & (trace.annotations.stream < 0))


def test_steps_of_one_number_do_not_follow_each_other():
    trace = recorded()
    name = trace.annotations.name.copy()
    name[marks_of(trace)] = name[marks_of(trace)[0]]
    assert "steps do not follow" in refusal(
        replace(trace, annotations=replace(trace.annotations, name=name))
    )


def test_a_step_between_others_that_lost_its_mark():
    """Where the profiler leaves steps out, it records no launches."""
    trace = read_kineto(str(H200 / "1f1b_p3_m7" / "rank0.json.gz"))
    assert len(marks_of(trace)) == 4
    rows = np.delete(np.arange(len(trace.annotations)), marks_of(trace)[2])
    columns = {
        name: getattr(trace.annotations, name)[rows]
        for name in trace.annotations.__dataclass_fields__
    }
    assert "steps do not follow" in refusal(
        replace(trace, annotations=replace(trace.annotations, **columns))
    )


def test_a_step_that_ends_in_the_midst_of_a_call():
    trace = recorded()
    marks = [row for row, name in enumerate(trace.names) if name.startswith("ProfilerStep#")]
    mine = np.flatnonzero(np.isin(trace.annotations.name, marks) & (trace.annotations.stream < 0))
    last = mine[-1]
    end = trace.annotations.start_ns[last] + trace.annotations.duration_ns[last]
    own = np.flatnonzero(trace.launches.thread == trace.annotations.thread[last])
    call = own[np.searchsorted(trace.launches.start_ns[own], end) - 1]
    duration = trace.launches.duration_ns.copy()
    assert guard(trace)[0] is trace
    duration[call] = end - trace.launches.start_ns[call] + 5 * MS
    torn = replace(trace, launches=replace(trace.launches, duration_ns=duration))
    assert "in the midst of a call" in refusal(torn)


def test_a_range_that_ends_in_the_midst_of_a_call():
    trace = read_kineto(str(H200 / "fwd_closed_m4" / "rank3.json.gz"))
    ranges, calls = trace.annotations, trace.launches
    marked = ranges.name == trace.names.index("Forward 1")
    row = np.flatnonzero(marked & (ranges.stream < 0))[0]
    inside = (calls.start_ns > ranges.start_ns[row]) & (calls.thread == ranges.thread[row])
    call = np.flatnonzero(inside & (calls.duration_ns > 8_000))[0]
    duration = ranges.duration_ns.copy()
    duration[row] = calls.start_ns[call] + calls.duration_ns[call] // 2 - ranges.start_ns[row]
    torn = replace(trace, annotations=replace(ranges, duration_ns=duration))
    assert "in the midst of a call" in refusal(torn)


def test_a_release_that_the_profiler_lost_hides_no_peak():
    trace = recorded()
    release = int(np.flatnonzero(trace.memory.change_bytes < 0)[100])
    assert trace.memory.change_bytes[release] < 0
    rows = np.delete(np.arange(len(trace.memory)), release)
    columns = {name: getattr(trace.memory, name)[rows] for name in MEMORY_COLUMNS}
    kept, gaps = guard(replace(trace, memory=replace(trace.memory, **columns)))
    assert kept is not None
    assert not gaps
    assert peak_memory(kept) == peak_memory(trace)


@pytest.mark.parametrize("lost", [slice(0, None, 2), slice(700, 702)])
def test_allocations_that_were_lost_are_told_by_what_follows(lost):
    trace = recorded()
    rows = np.delete(np.arange(len(trace.memory)), lost)
    columns = {name: getattr(trace.memory, name)[rows] for name in MEMORY_COLUMNS}
    kept, [gap] = guard(replace(trace, memory=replace(trace.memory, **columns)))
    assert kept is not None
    assert (gap.code, gap.rank) == (Code.WRONG_MEMORY, 0)


def test_memory_of_another_process_changes_in_the_midst_of_launches():
    kept, [gap] = guard(replace(recorded(0), memory=recorded(1).memory))
    assert kept is not None
    assert len(kept.memory) == 0
    assert (gap.code, gap.rank) == (Code.WRONG_MEMORY, 0)
    assert "in the midst of" in gap.message


def test_threads_that_launch_at_once_allocate_beside_each_others_launches():
    trace = replace(recorded(0), memory=recorded(1).memory)
    assert "in the midst of" in doubt_memory(trace)
    calls = trace.launches
    until_next = np.diff(calls.start_ns, append=calls.start_ns[-1] + MS)
    beside = replace(calls, duration_ns=np.maximum(calls.duration_ns, until_next + 5_000))
    assert "in the midst of" not in doubt_memory(replace(trace, launches=beside))


def test_memory_that_ends_long_before_the_launches_do():
    trace = recorded()
    rows = np.arange(round(0.6 * len(trace.memory)))
    columns = {name: getattr(trace.memory, name)[rows] for name in MEMORY_COLUMNS}
    kept, [gap] = guard(replace(trace, memory=replace(trace.memory, **columns)))
    assert kept is not None
    assert "launches in a row" in gap.message


def test_memory_in_another_unit_is_not_in_whole_pages():
    trace = recorded()
    columns = {f"{n}_bytes": getattr(trace.memory, f"{n}_bytes") // 1024 for n in BYTES}
    _, [gap] = guard(replace(trace, memory=replace(trace.memory, **columns)))
    assert "not in whole pages" in gap.message


def test_totals_of_memory_that_do_not_add_up_are_not_told():
    trace = recorded()
    for rows in (slice(None), 700):
        allocated = trace.memory.allocated_bytes.copy()
        allocated[rows] *= 1000
        doubtful = replace(trace, memory=replace(trace.memory, allocated_bytes=allocated))
        kept, gaps = guard(doubtful)
        assert kept is not None
        assert len(kept.memory) == 0
        assert len(kept.kernels) == len(trace.kernels)
        assert [(gap.code, gap.rank) for gap in gaps] == [(Code.WRONG_MEMORY, 0)]


def test_a_rank_that_cannot_be_is_named_and_the_others_answer(tmp_path):
    for source in (H200 / "fwd_closed_m4").glob("rank*.json.gz"):
        content = json.loads(gzip.decompress(source.read_bytes()))
        if source.name == "rank2.json.gz":
            kernels = [e for e in content["traceEvents"] if e.get("cat") == "kernel"]
            kernels[20]["ts"] = 0
        (tmp_path / source.name.removesuffix(".gz")).write_text(json.dumps(content))
    run = read_run(find_run([str(tmp_path)]))
    assert [trace.rank for trace in run.ranks] == [0, 1, 3]
    assert [(gap.code, gap.rank) for gap in run.gaps] == [
        (Code.IMPOSSIBLE, 2),
        (Code.MISSING_RANKS, None),
    ]


def on_host(change=lambda events: events):
    """Five steps of a rank without a device: a range of a pass with two operators, then a send."""
    events = []
    for step in range(5):
        at = 1000.0 * step
        events += [
            annotation(f"ProfilerStep#{step}", ts=at, dur=1000.0),
            annotation("forward", ts=at + 100, dur=500.0),
            operator("aten::linear", ts=at + 100, dur=200.0),
            operator("aten::addmm", ts=at + 110, dur=100.0),
            operator("aten::relu", ts=at + 300, dur=300.0),
            operator("c10d::send", ts=at + 700, dur=20.0),
            annotation("gloo:send 0->1", ts=at + 710, dur=90.0),
        ]
    return document(change(events), deviceProperties=[])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda e: e[9].update(dur=350.0), "1 operator beside others on the same thread"),
        (lambda e: e[9].update(ts=e[9]["ts"] + 4e9), "1 operator minutes away from all others"),
        (lambda e: e[8].update(dur=350.0), "begin inside a range of their thread and end outside"),
        (lambda e: e[14].update(ts=e[14]["ts"] + 850), "its steps do not follow each other"),
    ],
)
def test_what_no_thread_can_do_is_not_measured(tmp_path, change, says):
    def changed(events):
        change(events)
        return events

    trace = read_kineto(write(tmp_path / "rank0.json", on_host(changed)))
    assert says in refusal(trace)
    sound = read_kineto(write(tmp_path / "rank0.json", on_host()))
    assert guard(sound) == (sound, ())


def test_operators_that_a_cpu_trace_lost_are_noticed(tmp_path):
    def lose(events):
        return [event for row, event in enumerate(events) if row != 18]

    trace = read_kineto(write(tmp_path / "rank0.json", on_host(lose)))
    kept, [gap] = guard(trace)
    assert kept is not None
    assert (gap.code, gap.rank) == (Code.LOST_OPERATORS, 0)
    assert "aten::relu: 0 to 1" in gap.message


@pytest.mark.parametrize(("losing", "named"), [({0}, [0]), ({0, 1}, []), ({0, 1, 2}, [])])
def test_steps_that_differ_on_most_ranks_are_the_jobs(tmp_path, losing, named):
    def lose(events):
        return [event for row, event in enumerate(events) if row != 18]

    for rank in range(3):
        text = on_host(lose) if rank in losing else on_host()
        text["distributedInfo"] = {"rank": rank, "world_size": 3}
        write(tmp_path / f"rank{rank}.json", text)
    run = read_run(find_run([str(tmp_path)]))
    assert [gap.rank for gap in run.gaps if gap.code is Code.LOST_OPERATORS] == named
