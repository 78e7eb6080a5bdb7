"""One fact, one answer: `find`, `links` and `plan` say the same of every hop of every recording."""

from __future__ import annotations

import json

import pytest
from support.services.console import type_command
from support.traces.recordings import DATA, SHARED

SAME = ("times_expected", "verdict", "times", "cost_per_batch_s")
FOLDERS = [
    *sorted((DATA / "h200").glob("*/")),
    *sorted((DATA / "paced").glob("*/")),
    *sorted((DATA / "frameworks").glob("*/")),
    *(sorted((SHARED / "h200").glob("*/")) if SHARED.is_dir() else ()),
    *(sorted((SHARED / "h200_free").glob("*/")) if SHARED.is_dir() else ()),
    *(sorted((SHARED / "frameworks").glob("*/")) if SHARED.is_dir() else ()),
]


def told(verb, folder, tmp_path):
    answer = type_command(f"debubble {verb} {folder} --json", tmp_path)
    return json.loads(answer.text) if answer.code == 0 else None


@pytest.mark.slow
@pytest.mark.parametrize(
    "folder",
    [pytest.param(one, id=one.name) for one in FOLDERS if any(one.glob("rank*"))],
)
def test_what_is_said_of_a_hop_is_the_same_in_find_links_and_plan(folder, tmp_path):
    answers = {verb: told(verb, folder, tmp_path) for verb in ("find", "links", "plan")}
    assert answers["find"] is not None
    assert answers["links"] is not None
    streams = answers["find"]["run"]["kind"] == "stream"
    assert (answers["plan"] is None) is streams
    for answer in answers.values():
        assert streams or answer["warnings"] == answers["find"]["warnings"]
    rows = {
        verb: {
            (hop["from_rank"], hop["to_rank"]): {name: hop[name] for name in SAME}
            for hop in answer["hops"]
        }
        for verb, answer in answers.items()
        if answer is not None
    }
    for found in rows.values():
        assert found == rows["links"]
    named = [one for one in answers["find"]["named"] if one["cause"] == "slow_link"]
    slow = [hop for hop, row in rows["links"].items() if row["verdict"] == "slow"]
    for one in named:
        if " times as long as " in one["sentence"]:
            assert tuple(one["hop"]) in slow
            assert all(f"{here} → {there}" in one["sentence"] for here, there in slow)
            assert one["culprit_saved_s"] == answers["links"]["slow_cost_per_batch_s"]
