"""All recordings: what is said of each is what was said, and no two verbs contradict each other.

`pytest tests/recordings --update-golden` writes the snapshots anew; read the diff. The rules of
agreement are in docs/development/agreement.md.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from support.screen import lines_of
from support.traces.all_recordings import Answers, every_recording
from support.traces.snapshot import differences, snapshot_of, write

from debubble.ledger.ledger import MATTERS
from debubble.report.answers.plan import PlanAnswer
from debubble.report.answers.server_plan import ServerPlanAnswer
from debubble.report.find import find_page
from debubble.report.plan import plan_page, server_plan_page

pytestmark = pytest.mark.slow
SNAPSHOTS = Path(__file__).parent / "snapshots"
RECORDINGS = every_recording()


@pytest.fixture(scope="module", params=RECORDINGS)
def answers(request):
    return Answers(request.param, RECORDINGS[request.param])


@pytest.fixture
def plan(answers):
    if not isinstance(answers.plan, PlanAnswer):
        pytest.skip("nothing is planned for steps of this run")
    return answers.plan


def test_what_is_said_of_a_recording_is_what_was_said(answers, request):
    file = SNAPSHOTS / f"{answers.name}.json"
    shot = snapshot_of(answers)
    if request.config.getoption("--update-golden"):
        file.write_text(write(shot), "utf-8")
        return
    assert file.exists(), f"no snapshot of {answers.name}: pytest {__file__} --update-golden"
    assert not [*differences(json.loads(file.read_text("utf-8")), shot)]


def test_find_links_and_plan_say_the_same_of_every_hop(answers):
    rows = [
        {
            (hop.from_rank, hop.to_rank): (
                hop.verdict,
                hop.times_expected,
                hop.times,
                hop.cost_per_batch_s,
            )
            for hop in answer.hops
        }
        for answer in (answers.find, answers.links, answers.plan)
        if hasattr(answer, "hops")
    ]
    assert all(row == rows[0] for row in rows)
    slow = [hop for hop, row in rows[0].items() if row[0] == "slow"]
    for named in answers.find.named:
        if named.cause == "slow_link" and named.hop and named.culprit_saved_s is not None:
            assert tuple(named.hop) in slow
            assert all(f"{here} → {there}" in named.sentence for here, there in slow)
            assert named.culprit_saved_s == answers.links.slow_cost_per_batch_s


def test_verbs_share_their_warnings(answers):
    if hasattr(answers.plan, "warnings") and answers.analysis.pipeline.kind != "stream":
        assert answers.plan.warnings == answers.find.warnings


def test_twice_the_microbatches_are_one_row_in_find_and_plan(answers, plan):
    more = answers.find.more_microbatches
    rows = {
        (option.change.microbatches, option.change.hold): option
        for option in plan.options
        if option.lever == "microbatches"
    }
    for part in more.options:
        row = rows[part.microbatches, part.hold]
        assert part.throughput_gain_fraction == row.throughput_gain_fraction
        assert part.interval == row.interval
        assert part.batch_latency_s == row.numbers.batch_latency_s
        assert part.changes_training == row.changes_training
    doubled = 2 * answers.find.run.microbatches
    assert {hold for count, hold in rows if count == doubled} == {
        part.hold for part in more.options
    }


def test_a_saving_and_the_lever_that_brings_it_about_have_one_sign(answers, plan):
    saved = {saving.cause: saving.saved_fraction for saving in answers.find.savings or ()}
    splits = [option for option in plan.options if option.lever == "split"]
    slow_device = any(cause.slower_layers for cause in answers.analysis.causes)
    if saved.get("imbalance", 0.0) >= MATTERS and not slow_device:
        # Equal stages are the most that a split of whole layers can come to, but off a slow device
        # there is less to do in all.
        most = 1 / (1 - saved["imbalance"]) - 1
        for option in splits:
            low, high = option.interval.throughput_gain_fraction
            assert high > 0
            assert low <= most
    for option in plan.options:
        if option.lever == "link":
            low, high = option.interval.throughput_gain_fraction
            replayed = option.link.replay_saved_s
            if replayed is not None:
                took = answers.find.numbers.batch_latency_s
                assert low <= 1 / (1 - replayed / took) - 1 <= high


def test_the_first_line_of_a_plan_is_its_best_row(plan):
    same = [option for option in plan.options if not option.changes_training]
    sure = [option for option in same if option.advice == "yes"]
    maybe = [option for option in same if option.advice in {"try", "maybe"}]
    if plan.bottleneck:
        assert plan.verdict.lower().startswith(plan.bottleneck.lower())
    elif sure:
        assert plan.verdict.lower().startswith(f"{sure[0].words.lower()}: +")
    elif maybe and "exceeds its memory limit" not in plan.verdict:
        assert plan.verdict.startswith(f"Try {maybe[0].words}: +")
        assert "; not sure: " in plan.verdict
    elif plan.verdict.startswith("No option gains more than the noise"):
        assert not [option for option in same if option.advice not in {"no", "noise"}]
    gains = [option.throughput_gain_fraction for option in same]
    assert gains == sorted(gains, reverse=True)


def test_bullets_come_in_the_order_of_what_they_save(answers):
    saved = [named.saved_s for named in answers.find.named]
    assert answers.find.stream or saved == sorted(saved, reverse=True)
    rows = {saving.cause: saving.saved_s for saving in answers.find.savings or ()}
    for named in answers.find.named:
        if named.cause in rows and named.cause != "slow_link":
            assert named.saved_s == rows[named.cause]
    # Of a stream the most that quick launches may save counts a third: the profiler slows hosts.
    for first, second in pairwise(saved):
        assert second <= 3 * first


def test_a_cause_that_a_bullet_names_has_a_row(answers):
    rows = "\n".join(lines_of(find_page(answers.find, details=False), 120))
    shares = answers.find.ledger.shares if answers.find.ledger else {}
    for named in answers.find.named:
        for cause in named.cause.split("+"):
            if f"{shares.get(cause, 0.0):.3f}" != "0.000":
                assert f"\n{cause.replace('_', ' ')} " in rows


def test_few_requests_are_not_said_to_be_more_batches(answers):
    if any("cannot fill" in named.sentence for named in answers.find.named):
        assert "in flight" not in answers.find.verdict


def test_a_gain_that_batches_do_not_show_is_explained(plan):
    batch = plan.baseline.numbers.batch_latency_s
    notes = plan_page(plan, "", details=False).notes
    for option in plan.options:
        same_batch = option.change.microbatches in {None, plan.baseline.microbatches}
        shown = batch / option.numbers.batch_latency_s - 1
        if same_batch and abs(shown - option.throughput_gain_fraction) > 0.01:
            assert any(note.startswith("gain: of whole steps") for note in notes), option.words


def test_find_and_plan_of_four_ranks_fit_a_screen(answers):
    if len(answers.analysis.pipeline.ranks) > 4:
        pytest.skip("a table of more ranks is larger")
    following = "debubble plan traces/"
    pages = [find_page(answers.find, following, details=False)]
    if isinstance(answers.plan, PlanAnswer):
        pages.append(plan_page(answers.plan, following, details=False))
    elif isinstance(answers.plan, ServerPlanAnswer):
        pages.append(server_plan_page(answers.plan, following, details=False))
    for page in pages:
        assert len(lines_of(page, 100)) <= 30, "\n".join(lines_of(page, 100))


def test_shares_are_a_whole_and_agree_with_the_bubble(answers):
    if answers.find.ledger is None:
        return
    shares = answers.find.ledger.shares
    assert sum(shares.values()) == pytest.approx(1.0, abs=0.001)
    for rank in answers.find.ledger.ranks:
        assert sum(rank.shares.values()) == pytest.approx(1.0, abs=0.001)
