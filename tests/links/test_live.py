"""Hop tests: what their figures mean, who is ill, and the measuring itself."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from support.processes import PATIENCE_S

from debubble.errors import LogError, UsageError
from debubble.links.__main__ import Round, as_rungs
from debubble.links.live import (
    HopTestResult,
    RankSite,
    Rung,
    judge_measured,
    pairs_of,
    read_measured,
    second_pass,
    sizes_of,
    times_of,
    write_measured,
)

SIZES = sizes_of(4 * 1024**2)


def rungs_of(hops, slow=(), times=4.0):
    """Hops at 2 GB/s and 40 us; some so many times slower."""
    rungs = []
    for hop in hops:
        for size in SIZES:
            seconds = (40e-6 + size / 2e9) * (times if hop in slow else 1.0)
            taken = times_of([seconds] * 20)
            rungs.append(
                Rung(
                    source=hop[0],
                    destination=hop[1],
                    size_bytes=size,
                    one_way=taken,
                    both_ways=taken,
                )
            )
    return tuple(rungs)


def chain(ranks, slow=(), hosts=None):
    hops = [hop for pair in pairs_of(ranks) for hop in (pair, pair[::-1])]
    names = hosts or ["a"] * ranks
    places = tuple(RankSite(rank=rank, host=names[rank], device="cpu") for rank in range(ranks))
    return HopTestResult(
        backend="gloo", job_bytes=None, places=places, rungs=rungs_of(hops, slow), second=()
    )


def slow_in(measured):
    return [one.hop for one in judge_measured(measured) if one.judgement.slow]


def test_a_slow_direction_is_named_and_its_other_way_is_not():
    assert slow_in(chain(4, [(2, 1)])) == [(2, 1)]
    assert slow_in(chain(4)) == []


def test_latency_and_bandwidth_are_fitted():
    for one in judge_measured(chain(4)):
        assert one.fit.latency_ns == pytest.approx(40_000, rel=0.01)
        assert one.fit.bytes_per_s == pytest.approx(2e9, rel=0.01)


def test_what_a_machine_does_beside_does_not_change_the_rate():
    """Two of three messages wait for a busy machine; the second pass is undisturbed."""
    quiet, busy = chain(4, slow=[(1, 2)]), times_of([0.0095] * 7 + [0.03] * 13)
    loud = replace(
        quiet,
        rungs=tuple(
            replace(rung, one_way=busy if rung.size_bytes == SIZES[-1] else rung.one_way)
            for rung in quiet.rungs
        ),
    )
    again = replace(loud, second=rungs_of([(1, 2)], slow=[(1, 2)]))
    for measured, seconds in ((loud, 0.0095), (again, 4 * (40e-6 + SIZES[-1] / 2e9))):
        hop = next(one for one in judge_measured(measured) if one.hop == (1, 2))
        assert hop.bytes_per_s == pytest.approx(SIZES[-1] / seconds)


def test_a_way_back_that_woke_up_late_takes_nothing_from_the_wire():
    quiet = Round(
        hop=(0, 1), size_bytes=2**20, there_and_back=[0.022] * 5, back_s=1e-4, both_ways=[]
    )
    rung = as_rungs([replace(quiet, back_s=2e-3), quiet, replace(quiet, back_s=1e-3)])[0]
    assert rung.one_way.alone_s == pytest.approx(0.0219)
    assert rung.one_way.n == 15


def test_hops_between_hosts_are_no_peers_of_hops_inside():
    measured = chain(4, [(1, 2), (2, 1)], hosts=["a", "a", "b", "b"])
    assert slow_in(measured) == []


def test_the_ends_of_a_slow_hop_are_paired_with_ranks_that_are_well():
    assert second_pass(chain(4, [(2, 3)])) == ((2, 3), (2, 1), (1, 3))
    assert second_pass(chain(4)) == ()


@pytest.mark.parametrize(
    ("again", "ill"),
    [
        ([(2, 3)], "link"),
        ([(2, 3), (1, 3)], "rank 3"),
    ],
)
def test_a_second_pass_tells_the_rank_from_the_link(again, ill):
    first = chain(4, [(2, 3)])
    second = rungs_of(second_pass(first), slow=again)
    found = {one.hop: one for one in judge_measured(replace(first, second=second))}
    assert found[2, 3].ill == ill


def test_a_partner_that_most_messages_found_busy_is_not_ill():
    measured = chain(4, slow=[(1, 2)])
    busy = tuple(
        replace(
            rung, one_way=times_of([rung.one_way.alone_s] * 3 + [rung.one_way.alone_s * 9] * 17)
        )
        for rung in rungs_of([(3, 2)])
    )
    measured = replace(measured, second=rungs_of([(1, 2), (1, 0)], slow=[(1, 2)]) + busy)
    hop = next(one for one in judge_measured(measured) if one.hop == (1, 2))
    assert hop.ill == "link"


def test_slow_once_and_not_again_is_healthy():
    first = chain(4, [(2, 3)])
    assert slow_in(replace(first, second=rungs_of(second_pass(first)))) == []


def test_two_ranks_have_each_other_as_peers():
    assert slow_in(chain(2, [(0, 1)])) == [(0, 1)]


def test_a_test_survives_its_file():
    measured = chain(3, [(0, 1)])
    assert read_measured(json.loads(write_measured(measured)), "x") == measured


def test_a_damaged_test_is_refused():
    data = json.loads(write_measured(chain(2)))
    del data["rungs"][0]["one_way"]
    with pytest.raises(LogError, match="damaged"):
        read_measured(data, "x")


def test_ladders_hold_the_job_s_own_size():
    assert sizes_of(4096, 3000) == (1024, 3000, 4096)
    with pytest.raises(UsageError):
        sizes_of(100)


@pytest.mark.slow
def test_two_real_ranks_are_measured_on_this_machine(tmp_path):
    out = tmp_path / "links.json"
    command = [sys.executable, "-m", "debubble", "links", "run", "--backend", "gloo"]
    command += ["--size", "20KiB", "--out", str(out)]
    command += ["--json"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=PATIENCE_S)
    answer = json.loads(done.stdout)
    assert [(hop["from_rank"], hop["to_rank"]) for hop in answer["hops"]] == [(0, 1), (1, 0)]
    for hop in answer["hops"]:
        sizes = [rung["bytes"] for rung in hop["ladder"]]
        assert sizes[:5] == [1024, 4096, 16384, 20480, 65536]
        assert all(rung["n"] >= 20 for rung in hop["ladder"])
        assert hop["bytes"] == 20480
    again = subprocess.run(command, capture_output=True, check=False, timeout=PATIENCE_S)
    assert again.returncode == 2
