"""Captures of vLLM, unmodified, against counts of their events that share no code with debubble."""

import json
from pathlib import Path

import pytest
from support.vllm_count import Count

import debubble

SHIPPED = Path(__file__).parents[1] / "data" / "vllm"
SHARED = Path(__file__).parents[3] / "shared" / "recordings" / "vllm"
RUNS = [SHIPPED / name for name in ("pp4_eager", "pp4_graph", "pp4_split")]
RUNS += [SHARED / f"v_{name}" for name in ("pp4_eager", "pp4_graph", "pp4_split")]
RUNS += [SHARED / f"v_{name}" for name in ("pp4_few", "pp2_graph")]

LAYERS = {"pp4_split": [6, 6, 6, 14], "pp2_graph": [16, 16]}


@pytest.fixture(scope="module", params=RUNS, ids=lambda run: f"{run.parent.name}-{run.name}")
def run(request):
    if not request.param.exists():
        pytest.skip("the recordings beside the repository are not there")
    return request.param.name.removeprefix("v_"), debubble.analyse(request.param), request.param


@pytest.fixture(scope="module")
def answer(run):
    return debubble.find(run[1])


@pytest.fixture(scope="module")
def count(run):
    return Count(run[2])


def test_kernels_that_spin_in_a_broadcast_of_tokens_are_no_work(answer, count):
    assert answer.numbers.bubble_fraction == pytest.approx(count.bubble(), abs=0.01)
    shares = answer.ledger.shares
    assert 1 - shares["compute"] == pytest.approx(answer.numbers.bubble_fraction, abs=1e-6)


def test_what_nobody_knows_is_little_and_the_replay_lands(answer):
    assert answer.ledger.shares["unexplained"] <= 0.05
    assert abs(answer.replay.error_fraction) <= 0.03


def test_labels_tell_phases_and_tokens(run, answer, count):
    assert answer.stream.phases_labelled
    batches = run[1].stream.batches
    shown = [size for size in count.tokens() if size]
    assert batches.tokens[: len(shown)].tolist() == shown[: len(batches)]
    seen = {part.phase: part.batches for part in answer.stream.phases}
    assert seen.keys() == count.phases().keys()
    assert all(count.phases()[phase] - seen[phase] <= 4 for phase in seen)


def test_in_flight_is_what_the_scheduler_has_out(answer, count):
    assert answer.stream.batches_in_flight == pytest.approx(count.in_flight(), abs=0.5)


def test_a_pass_is_what_its_stage_computes(answer, count):
    decode = next(part for part in answer.stream.phases if part.phase == "decode")
    for told, counted in zip(decode.device_s, count.compute_ms(), strict=True):
        assert told * 1000 == pytest.approx(counted, rel=0.05)


def test_layers_and_framework_are_told(run, answer):
    assert [stage.layers for stage in answer.stages] == LAYERS.get(run[0], [8, 8, 8, 8])
    assert answer.run.framework.name == "vllm"


def test_messages_are_padded_to_the_sizes_of_graphs(run):
    batches = run[1].stream.batches
    known = (batches.padded > 0) & (batches.tokens > 0)
    assert (batches.padded[known] >= batches.tokens[known]).all()
    if run[0] == "pp4_graph":
        sizes = set(zip(batches.tokens.tolist(), batches.padded.tolist(), strict=True))
        assert {(26, 32), (4, 4), (2, 2)} <= sizes


def test_the_long_stage_is_named(run, answer):
    if run[0] != "pp4_split":
        pytest.skip("its stages are even")
    decode = next(part for part in answer.stream.phases if part.phase == "decode")
    assert max(range(4), key=decode.device_s.__getitem__) == 3
    worst = next(one for one in answer.ledger.culprits if one.cause == "imbalance")
    assert worst.stage == 3
    assert json.loads((run[2] / "truth.json").read_text())["env"]["VLLM_PP_LAYER_PARTITION"]
