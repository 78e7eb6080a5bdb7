"""`simulate` without traces: what it takes and refuses, and that its figures are the papers'."""

from __future__ import annotations

import json

import pytest
from support.services.console import type_command

from debubble.timeline.schedules import format_order, order_of


def simulate(words, folder):
    return type_command(f"debubble simulate {words}", folder)


def data_of(words, folder):
    return json.loads(simulate(f"{words} --json", folder).text)


ZERO_BUBBLE = (
    "--stages 8 --microbatches 24 --forward 18.522ms --input-grad 18.086ms --weight-grad 9.337ms"
    " --transfer 0.601ms"
)


@pytest.mark.parametrize(
    ("name", "bubble"), [("1f1b", 0.2431), ("zb-h1", 0.1585), ("zb-h2", 0.1083)]
)
def test_the_zero_bubble_papers_own_figures_can_be_typed(name, bubble, tmp_path):
    data = data_of(f"{ZERO_BUBBLE} --schedule {name}", tmp_path)
    assert data["schema"] == "debubble.simulate/1"
    assert data["longest_stage_bubble"] == pytest.approx(bubble, abs=0.5e-4)
    assert data["interval"] is None


def test_times_give_seconds_and_plain_numbers_give_units(tmp_path):
    timed = data_of("--stages 4 --microbatches 8 --forward 10ms", tmp_path)
    assert timed["numbers"]["batch_latency_s"] == pytest.approx(0.33)
    assert timed["numbers"]["microbatches_per_s"] == pytest.approx(8 / 0.33)
    assert timed["numbers"]["batch_latency_units"] is None
    plain = data_of("--stages 4 --microbatches 8 --forward 10", tmp_path)
    assert plain["numbers"]["batch_latency_s"] is None
    assert plain["numbers"]["microbatches_per_s"] is None
    assert plain["numbers"]["batch_latency_units"] == pytest.approx(330)
    assert plain["theory"]["bubble_fraction"] == pytest.approx(3 / 11)


def test_stages_and_hops_may_each_have_their_own_cost(tmp_path):
    words = "--stages 3 --microbatches 2 --schedule forward-only --forward 1,2,3 --transfer 4,0"
    data = data_of(words, tmp_path)
    assert data["given"]["passes"] == {"F": [1, 2, 3]}
    assert data["given"]["transfer"] == [4, 0]
    assert data["numbers"]["batch_latency_units"] == 1 + 4 + 2 + 3 + 3


def test_an_order_of_ones_own_needs_no_sizes(tmp_path):
    (tmp_path / "mine.csv").write_text(format_order(order_of("zbv", 4, 8)), "utf-8")
    data = data_of("--schedule mine.csv", tmp_path)
    assert (data["given"]["ranks"], data["given"]["microbatches"]) == (4, 8)
    assert data["numbers"]["bubble_fraction"] == pytest.approx(1 / 17)
    refused = simulate("--schedule mine.csv --stages 2", tmp_path)
    assert (refused.code, "the order is for 4 ranks" in refused.text) == (2, True)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--stages 4", "how large is the pipeline?"),
        ("--stages 0 --microbatches 4", "4 microbatches on 0 ranks make no step"),
        ("--stages 4 --microbatches -1", "-1 microbatches on 4 ranks make no step"),
        ("--stages 4 --microbatches 4 --schedule zero", "no schedule is called 'zero'"),
        ("--stages 4 --microbatches 4 --chunks 2", "1f1b needs 1 chunk a rank, not 2"),
        ("--stages 9999 --microbatches 9999", "are more than can be simulated"),
        ("--stages 4 --microbatches 4 --forward 1,2,3", "--forward has 3 values for 4 stages"),
        ("--stages 4 --microbatches 4 --transfer 1,2", "--transfer has 2 values for 3 hops"),
        ("--stages 4 --microbatches 4 --forward 5apples", "'5apples' is no time"),
        ("--stages 4 --microbatches 4 --forward 0", "a forward pass takes no time"),
        ("--stages 4 --microbatches 4 --forward=-1", "'-1' is no time"),
        ("--stages 4 --microbatches 4 --forward 5ms --backward 9", "some plain numbers"),
        ("--stages 4 --microbatches 4 --backward 9ms", "what does a forward pass take?"),
        ("--stages 4 --microbatches 4 --input-grad 9", "half of the backward pass is missing"),
        (
            "--stages 4 --microbatches 4 --backward 9 --input-grad 4 --weight-grad 5",
            "a backward pass is its input gradient and its weight gradient",
        ),
        (
            "--stages 4 --microbatches 4 --json --timeline",
            "--timeline and --json exclude each other",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_with_a_hint(words, complaint, tmp_path):
    answer = simulate(words, tmp_path)
    assert answer.code == 2
    assert complaint in answer.text
    assert "hint: " in answer.text
