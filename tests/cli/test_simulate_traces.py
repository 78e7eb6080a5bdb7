"""`simulate TRACES`: what-ifs against what was measured, and what is refused."""

from __future__ import annotations

import json

import pytest
from support.services.console import type_command

from debubble.timeline.schedules import format_order, order_of

pytestmark = pytest.mark.slow

TRAINING = "tests/data/h200/1f1b_p3_m7"
MEGATRON = "tests/data/frameworks/mg_int_batched"
FORWARD = "tests/data/h200/fwd_closed_m4"


def simulate(words, folder):
    return type_command(f"debubble simulate {words}", folder)


def data_of(words, folder):
    answer = simulate(f"{words} --json", folder)
    assert answer.code == 0, answer.text
    return json.loads(answer.text)


def latency(data):
    return data["numbers"]["batch_latency_s"]


def inside(seconds, data):
    low, high = data["interval"]["batch_latency_s"]
    return low < seconds < high


@pytest.mark.slow
def test_a_run_as_it_is_is_simulated_and_held_against_itself(tmp_path):
    data = data_of(TRAINING, tmp_path)
    assert data["schema"] == "debubble.simulate/1"
    assert data["given"]["change"] == {}
    assert latency(data) == pytest.approx(data["measured"]["batch_latency_s"], rel=0.02)
    assert data["numbers"]["bubble_fraction"] == pytest.approx(
        data["measured"]["bubble_fraction"], abs=0.01
    )
    assert data["longest_stage_bubble"] > data["numbers"]["bubble_fraction"]
    assert data["correction_fraction"] == 0
    assert data["verdict"].startswith("Simulated unchanged, a batch takes 18")


def test_an_order_of_ones_own_is_the_schedule_that_it_spells(tmp_path):
    (tmp_path / "mine.csv").write_text(format_order(order_of("zb-h1", 3, 7)), "utf-8")
    mine = data_of(f"{TRAINING} --schedule mine.csv", tmp_path)
    named = data_of(f"{TRAINING} --schedule zb-h1", tmp_path)
    assert mine["given"]["schedule"] == "mine.csv"
    assert mine["numbers"] == named["numbers"]
    (tmp_path / "more.csv").write_text(format_order(order_of("zb-h1", 3, 9)), "utf-8")
    more = data_of(f"{TRAINING} --schedule more.csv", tmp_path)
    assert more["given"]["change"]["microbatches"] == 9
    (tmp_path / "wide.csv").write_text(format_order(order_of("zb-h1", 4, 7)), "utf-8")
    refused = simulate(f"{TRAINING} --schedule wide.csv", tmp_path)
    assert "the order is for 4 ranks" in refused.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (f"{TRAINING} --split 5,5,5", "the split 5,5,5 has 15 layers, the model has 12"),
        (f"{TRAINING} --split 6,6", "the split is for 2 stages, the run would have 3"),
        (f"{TRAINING} --split a,b", "'a,b' is no split"),
        (f"{TRAINING} --hop 0:2=5GB/s", "no message goes from rank 0 to rank 2"),
        (f"{TRAINING} --hop 0:1=5apples", "'5apples' is no rate"),
        (f"{TRAINING} --hop 0:1=0GB/s", "'0GB/s' is no rate"),
        (f"{TRAINING} --hop 0-1", "'0-1' is no hop"),
        (f"{FORWARD} --hop 1:0=5GB/s", "no message goes from rank 1 to rank 0"),
        (f"{TRAINING} --tokens 2048", "the tokens of a microbatch are unknown"),
        (f"{TRAINING} --tokens none", "'none' is no number of tokens"),
        (f"{TRAINING} --tokens 0x", "'0x' is no number of tokens"),
        (f"{TRAINING} --tokens 5000x", "5e+03 times as many tokens cannot be predicted"),
        (f"{TRAINING} --schedule zb-h1 --overlap on", "transfers of zb-h1 run beside compute"),
        (f"{TRAINING} --schedule nothing", "no schedule is called 'nothing'"),
        (f"{TRAINING} --schedule forward-only", "the run trains, and this schedule has forward"),
        (
            f"{FORWARD} --schedule 1f1b",
            "the run has forward passes alone, and this schedule trains",
        ),
        (f"{TRAINING} --chunks 2", "1f1b needs 1 chunk a rank, not 2"),
        (f"{TRAINING} --hold batch", "--hold needs --microbatches"),
        (f"{TRAINING} --microbatches 0", "0 microbatches make no step"),
        (f"{TRAINING} --microbatches 99999999", "are more than can be simulated"),
        (f"{TRAINING} --schedule looped-bfs --chunks 1000000", "cannot fill 3000000 stages"),
        (f"{MEGATRON} --microbatches 9 --hold batch", "8 samples of a batch do not cut into 9"),
        (f"{TRAINING} --layers 4,4", "2 stages have layers, and the run has 3 stages"),
        (f"{TRAINING} --forward 5ms", "--forward is only for simulating without traces"),
        (f"{TRAINING} --stages 4", "--stages is only for simulating without traces"),
        ("--split 4,4", "--split is only for runs with steps and servers"),
        ("--hop 1:2=3GB/s --stages 4", "--hop is only for runs with steps"),
        (f"{TRAINING} --pipeline 7", "there is no pipeline 7"),
        (f"{TRAINING} --json --timeline", "--timeline and --json exclude each other"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_a_hint(words, complaint, tmp_path):
    answer = simulate(words, tmp_path)
    assert answer.code == 2
    assert complaint in answer.text
    assert "hint: " in answer.text


def window(folder, name, tmp_path):
    return data_of(folder / name, tmp_path)["measured"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "words", "after"),
    [
        ("1f1b_m8", "--split 3,3,3,7", "1f1b_m8_split3337"),
        ("1f1b_m8_split3337", "--split 4,4,4,4", "1f1b_m8"),
        ("1f1b_m8", "--schedule gpipe", "gpipe_m8"),
        ("1f1b_m8", "--schedule zbv", "zbv_m8"),
        ("fwd_closed_m4", "--microbatches 8", "fwd_closed_m8"),
        ("1f1b_m8", "--hop 2:3=1.3GB/s", "1f1b_m8_slow23"),
        ("fwd_closed_m8", "--hop 1:2=1.3GB/s", "fwd_closed_m8_slow12"),
        ("1f1b_m8_slow23", "--hop 2:3=5.5GB/s", "1f1b_m8"),
    ],
)
def test_a_change_that_was_run_lies_in_the_interval(before, words, after, recorded_data, tmp_path):
    truth = window(recorded_data, after, tmp_path)
    data = data_of(f"{recorded_data / before} {words}", tmp_path)
    assert inside(truth["batch_latency_s"], data)
    assert latency(data) == pytest.approx(truth["batch_latency_s"], rel=0.08)
    if "hop" not in words:
        assert data["numbers"]["peak_memory_bytes"] == pytest.approx(
            truth["peak_memory_bytes"], rel=0.06
        )


def test_a_slow_hop_put_right_gives_back_most_of_what_it_cost(recorded_data, tmp_path):
    slow = recorded_data / "fwd_closed_m8_slow12"
    healthy = window(recorded_data, "fwd_closed_m8", tmp_path)["batch_latency_s"]
    data = data_of(f"{slow} --hop 1:2=5.5GB/s", tmp_path)
    assert data["measured"]["batch_latency_s"] > 1.2 * healthy
    assert latency(data) == pytest.approx(healthy, rel=0.1)
    kept = data_of(f"{slow} --microbatches 4", tmp_path)
    assert any(said.startswith("hop 1:2 stays ") for said in kept["assumptions"])
