"""What cannot be is left out, as few events as can be; healthy traces come back as they were."""

from __future__ import annotations

import gzip
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from support.traces.recordings import H200

from debubble.errors import Code, Touch
from debubble.trace.columns import KernelKind, Operation, RankTrace, peak_memory
from debubble.trace.engine import GivenEngine
from debubble.trace.kineto import read_kineto
from debubble.trace.laws import hold_to_laws
from debubble.trace.run import find_run, read_run

MS = 1_000_000
US = 1_000


@cache
def recorded(rank: int = 0) -> RankTrace:
    return read_kineto(str(H200 / "1f1b_p2_m4" / f"rank{rank}.json.gz"))


def with_kernels(trace: RankTrace, **columns: np.ndarray) -> RankTrace:
    """Return the trace with other columns of its kernels, sorted by start as tables are."""
    kernels = replace(trace.kernels, **columns)
    order = np.argsort(kernels.start_ns, kind="stable")
    number = np.append(np.argsort(order), -1).astype(np.int32)
    names = kernels.__dataclass_fields__
    return replace(
        trace,
        kernels=replace(kernels, **{name: getattr(kernels, name)[order] for name in names}),
        operators=replace(trace.operators, kernel=number[trace.operators.kernel]),
    )


def computes(trace: RankTrace) -> np.ndarray:
    return np.flatnonzero(trace.kernels.kind == KernelKind.COMPUTE)


def moved(row: int, by_ns: int = 0, longer_ns: int = 0) -> RankTrace:
    trace = recorded()
    start, lasts = trace.kernels.start_ns.copy(), trace.kernels.duration_ns.copy()
    start[row] += by_ns
    lasts[row] += longer_ns
    return with_kernels(trace, start_ns=start, duration_ns=lasts)


def left_out(damaged: RankTrace) -> int:
    return len(damaged.kernels) - len(hold_to_laws(damaged).kernels)


def gap_of(damaged: RankTrace):
    [gap] = hold_to_laws(damaged).gaps
    assert (gap.rank, gap.file) == (damaged.rank, damaged.file)
    return gap


def test_a_sound_rank_is_returned_as_it_is():
    assert hold_to_laws(recorded()) == recorded()


@pytest.mark.parametrize("by_ns", [-(10**15), -1_000 * MS, 5 * MS, 1_000 * MS])
def test_one_kernel_at_a_wrong_time_is_left_out_alone(by_ns):
    damaged = moved(computes(recorded())[500], by_ns)
    gap = gap_of(damaged)
    assert left_out(damaged) == 1
    assert gap.code is Code.IMPOSSIBLE
    assert Touch.TIMES in gap.touches


@pytest.mark.parametrize("by_us", [6, 200])
def test_kernels_that_begin_before_the_one_ahead_has_ended_are_sound(by_us):
    """Programmatic dependent launches; also three in a row, each triggered early."""
    trace = recorded()
    start, lasts = trace.kernels.start_ns.copy(), trace.kernels.duration_ns.copy()
    rows = computes(trace)
    for row in rows[1:][lasts[rows[:-1]] > 300 * US]:
        early = min(by_us * US, int(lasts[row - 1]) - US)
        start[row : row + 2] -= early
        lasts[row : row + 2] += early
    order = np.argsort(start, kind="stable")
    assert (order == np.arange(len(order))).all()
    overlapping = with_kernels(trace, start_ns=start, duration_ns=lasts)
    assert hold_to_laws(overlapping).gaps == ()


@pytest.mark.parametrize("by_ms", [-30, 30])
def test_a_device_whose_clock_is_off_all_along_breaks_no_law(by_ms):
    trace = recorded()
    late = with_kernels(trace, start_ns=trace.kernels.start_ns + by_ms * MS)
    assert hold_to_laws(late).gaps == ()


def test_a_last_kernel_that_the_host_had_waited_for_is_left_out():
    trace = recorded()
    damaged = moved(int(trace.kernels.start_ns.argmax()), 1_000 * MS)
    assert "after the host had waited" in gap_of(damaged).message
    assert left_out(damaged) == 1


def test_a_synchronisation_of_another_device_tells_nothing():
    """It returns at once, whatever runs on the device of the others."""
    trace = recorded()
    waits = [row for row, name in enumerate(trace.names) if name == "cudaDeviceSynchronize"]
    rows = np.isin(trace.launches.name, waits)
    assert rows.any()
    lasts = np.where(rows, US, trace.launches.duration_ns)
    start = np.where(rows, trace.launches.start_ns - 2 * MS, trace.launches.start_ns)
    launches = replace(trace.launches, start_ns=start, duration_ns=lasts)
    assert hold_to_laws(replace(trace, launches=launches)).gaps == ()


def test_times_in_whole_microseconds_break_no_law():
    trace = recorded()
    tables = {}
    for name in ("kernels", "launches"):
        table = getattr(trace, name)
        start = table.start_ns // US * US
        end = (table.start_ns + table.duration_ns) // US * US
        tables[name] = replace(table, start_ns=start, duration_ns=end - start)
    assert hold_to_laws(replace(trace, **tables)).gaps == ()


def test_captures_that_begin_late_or_end_early_lost_nothing():
    late = read_kineto(str(H200 / "1f1b_p3_m7" / "rank0.json.gz"))
    assert (late.kernels.launch < 0).sum() > 100
    assert hold_to_laws(late).gaps == ()
    trace = recorded()
    names = trace.kernels.__dataclass_fields__
    fewer = replace(trace.kernels, **{name: getattr(trace.kernels, name)[:-40] for name in names})
    kernel = np.where(trace.operators.kernel < len(fewer), trace.operators.kernel, -1)
    operators = replace(trace.operators, kernel=kernel.astype(np.int32))
    assert hold_to_laws(replace(trace, kernels=fewer, operators=operators)).gaps == ()


@pytest.mark.parametrize("factor", [1000, 3])
def test_a_total_of_memory_that_nothing_came_to_is_left_out(factor):
    trace = recorded()
    allocated = trace.memory.allocated_bytes.copy()
    allocated[700] *= factor
    damaged = replace(trace, memory=replace(trace.memory, allocated_bytes=allocated))
    gap = gap_of(damaged)
    assert gap.touches == {Touch.MEMORY}
    assert peak_memory(hold_to_laws(damaged)) == peak_memory(trace)


@pytest.mark.parametrize(("share", "missing"), [(0.6, (1,)), (0.8, (1,)), (0.95, ())])
def test_a_rank_whose_file_ends_before_its_messages_is_missing(tmp_path, share, missing):
    for rank in range(3):
        text = gzip.decompress((H200 / "1f1b_p3_m7" / f"rank{rank}.json.gz").read_bytes())
        torn = text[: int(share * len(text))] if rank == 1 else text
        (tmp_path / f"rank{rank}.json").write_bytes(torn)
    run = read_run(find_run([str(tmp_path)]), engine=GivenEngine(executor=None))
    assert run.missing_ranks == missing
    assert Code.TRUNCATED in {gap.code for gap in run.gaps}
    for trace in run.ranks:
        sent = np.isin(trace.operators.operation, (Operation.SEND, Operation.RECEIVE))
        assert (trace.operators.kernel[sent] >= 0).all()
