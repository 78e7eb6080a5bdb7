"""Pages of link tests: every log and every hop is in them, with its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from debubble.links.hop_times import Judgement, Verdict
from debubble.links.live import HopTestResult, LiveHop, RankSite, Rung, times_of
from debubble.links.logs.hops import hops_in
from debubble.links.logs.read import read_log
from debubble.report.answers.link_tests import answer_live, answer_logs
from debubble.report.links import live_page, logs_page

OWN = Path(__file__).parents[1] / "data" / "links"
LOGS = {
    "nvbandwidth": """nvbandwidth Version: v0.6

Running device_to_device_memcpy_read_ce.
memcpy CE GPU(row) -> GPU(column) bandwidth (GB/s)
           0         1
 0       N/A    395.10
 1    396.40       N/A

SUM device_to_device_memcpy_read_ce 791.50
""",
    "topology": """\tGPU0\tGPU1\tCPU Affinity
GPU0\t X \tNV18\t0-31
GPU1\tNV18\t X \t0-31
""",
    "status": """GPU 0: NVIDIA H200 (UUID: GPU-1)
\t Link 0: 26.562 GB/s
\t Link 1: <inactive>
""",
}
CELLS = {
    "nvbandwidth": (
        "device_to_device_memcpy_read_ce",
        "Passed",
        "N/A 395.1 396.4 N/A",
        "791.5",
        "GB/s",
    ),
    "topology": ("0", "1", "NV18"),
    "status": ("0", "NVIDIA H200", "1", "2", "26.6 GB/s"),
}


def hop(source, destination, verdict=Verdict.HEALTHY, *, ill=None, both=True):
    taken = times_of([0.001] * 20)
    rung = Rung(
        source=source,
        destination=destination,
        size_bytes=1_000_000,
        one_way=taken,
        both_ways=taken if both else None,
    )
    judgement = Judgement(
        verdict=verdict, against=None, times=None, why="takes 4.0 times as long as its peers"
    )
    return LiveHop(
        hop=(source, destination),
        size_bytes=rung.size_bytes,
        time_s=taken.alone_s,
        rungs=(rung,),
        fit=None,
        judgement=judgement,
        ill=ill,
    )


def measured(*hops):
    ranks = sorted({rank for each in hops for rank in each.hop})
    places = tuple(RankSite(rank=rank, host="a", device="cpu") for rank in ranks)
    rungs = tuple(rung for each in hops for rung in each.rungs)
    return HopTestResult(backend="gloo", job_bytes=None, places=places, rungs=rungs, second=())


@pytest.mark.parametrize("kind", LOGS)
def test_each_kind_of_log_is_listed_under_its_file(kind):
    log = read_log(LOGS[kind], f"{kind}.txt")
    page = logs_page(answer_logs([log], (), ()))
    [table] = page.tables
    assert f"{kind}.txt" in table.title
    assert CELLS[kind] in table.rows
    assert page.answer == "1 log read; none measures a single hop."
    assert json.loads(answer_logs([log], (), ()).to_json())["logs"][0]["file"] == f"{kind}.txt"


def test_a_test_of_two_ranks_is_told_of_both_directions():
    log = read_log((OWN / "sendrecv_2ranks.txt").read_text("utf-8"), "log")
    pairs = hops_in([log], classes={}, history={})
    answer = answer_logs([log], pairs, ())
    page, data = logs_page(answer), answer.to_dict()
    assert page.answer.startswith("Hop 0 ↔ 1: ")
    assert [(each["from_rank"], each["to_rank"]) for each in data["hops"]] == [(0, 1), (1, 0)]
    assert data["verdict"] == page.answer
    assert [row[0] for row in page.tables[0].rows] == ["0 → 1", "1 → 0"]


def test_slow_hops_are_said_the_first_as_the_answer_and_who_is_ill():
    hops = [
        hop(0, 1, Verdict.SLOW, ill="link"),
        hop(1, 0, Verdict.SLOW, ill="rank 1"),
        hop(1, 2),
    ]
    page = live_page(answer_live(measured(*hops), hops, ()))
    assert page.answer.startswith("Hop 0 → 1 takes 4.0 times")
    assert page.answer.endswith("the link between them is slow, and 1 more hop.")
    [second] = page.findings
    assert second.startswith("hop 1 → 0 ")
    assert "rank 1 is slow with others, too" in second
    assert len(page.tables[0].rows) == 3
