"""Collectives of a stage: what is theirs, what is waiting in them, and for whom."""

from pathlib import Path

import pytest

import debubble
from debubble.ledger.causes import Cause

SHARED = Path(__file__).parents[3] / "shared" / "data" / "frameworks"


@pytest.fixture(scope="module")
def analysis():
    folder = SHARED / "mg_tp2_pp2_m8"
    if not folder.exists():
        pytest.skip("the recordings beside the repository are not there")
    return debubble.analyse(folder)


def test_what_members_spin_is_told_apart_and_nothing_else_moves(analysis):
    ledger, [rank, *_] = analysis.ledger, analysis.pipeline.ranks
    causes = ledger.causes()
    assert 0 < causes[Cause.COLLECTIVE_WAIT] < 0.1 * causes[Cause.COLLECTIVE]
    assert sum(causes.values()) == ledger.total_ns
    assert rank.shared.waits.start_ns.size
    # Who waits for a pass whose collective waits for its last member waits for that, too.
    assert any(one.cause is Cause.COLLECTIVE_WAIT and one.kind for one in ledger.culprits)


def test_members_of_a_pair_wait_for_each_other_alone_and_never_at_once(analysis):
    lines = {line.rank: line for line in analysis.timeline.ranks}
    for here, there in ((0, 1), (2, 3)):
        assert set(lines[here].shared.late.tolist()) == {-1, there}
        late = lines[here].shared.late == there
        assert not (late & (lines[there].shared.late == here)).any()


def test_the_rank_that_is_waited_for_is_named(analysis):
    late = debubble.find(analysis).ledger.late_in_collectives
    assert {(one.rank, one.late_rank) for one in late} == {(0, 1), (2, 3)}


def test_who_came_last_is_left_open_where_a_member_was_not_captured(analysis, tmp_path):
    for file in (SHARED / "mg_tp2_pp2_m8").glob("*.json.gz"):
        if "1" not in file.name.split(".")[0]:
            (tmp_path / file.name).symlink_to(file)
    part, useful = debubble.analyse(tmp_path), analysis.pipeline.useful_fraction
    assert part.run.missing_ranks == (1,)
    assert part.pipeline.bubble_fraction == pytest.approx(
        analysis.pipeline.bubble_fraction, abs=0.01
    )
    assert part.pipeline.useful_fraction == pytest.approx(useful, abs=0.01)
    [said] = [gap.message for gap in part.warnings if "it is unknown who came last" in gap.message]
    [own, _] = part.pipeline.shares  # rank 3 is there: what rank 2 waits in collectives is known
    most = part.pipeline.bubble_fraction + (1 - own.useful_fraction - own.bubble_fraction) / 2
    assert f"{100 * most:.0f} % if those are waiting" in said
    assert not any("nobody knows" in gap.message for gap in analysis.warnings)
