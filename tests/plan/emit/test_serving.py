"""vLLM, SGLang, TensorRT-LLM: layers by rank, read back as each of them reads them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from support.emitted_text import (
    code_of,
    flags_of,
    paste_exports,
    setting_for,
    splits,
)

from debubble.errors import UsageError
from debubble.plan.change import Change, ServingSetting, Setting
from debubble.plan.emit import emit, emit_serving

RUN = Setting(ranks=4, layers=61, microbatches=4)
ENGINES = ["vllm", "sglang", "tensorrt-llm"]


def partition_of(framework, text):
    """The layers of each rank and the ranks, out of the text."""
    if framework == "tensorrt-llm":
        options = yaml.safe_load(text)
        return options["pp_partition"], options["pipeline_parallel_size"]
    variable, _ = code_of(text).splitlines()
    name, _, value = variable.removeprefix("export ").partition("=")
    assert name == f"{framework.upper()}_PP_LAYER_PARTITION"
    flag = {"vllm": "--pipeline-parallel-size", "sglang": "--pp-size"}[framework]
    [ranks] = flags_alone(text)[flag]
    return [int(part) for part in value.strip('"').split(",")], int(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ENGINES)
@given(splits(most_chunks=1))
def test_each_rank_gets_its_layers(framework, sizes):
    ranks, _, split = sizes
    text = emit(framework, Change(split=split), setting_for(ranks, split))
    assert partition_of(framework, text) == (list(split), ranks)


@pytest.mark.parametrize("framework", ENGINES)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_run_that_trains_is_nothing_for_an_engine_that_serves(framework, schedule):
    trains = replace(RUN, schedule=schedule)
    with pytest.raises(UsageError, match=f"has no setting to train.*{schedule}"):
        emit(framework, Change(split=(15, 15, 15, 16)), trains)
    emit(framework, Change(split=(15, 15, 15, 16)), replace(RUN, schedule="forward-only"))


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["vllm", "sglang"])
def test_a_shell_hands_the_split_to_the_server(framework):
    text = emit(framework, Change(split=(15, 15, 15, 16)), RUN)
    environment = paste_exports(text)
    assert environment[f"{framework.upper()}_PP_LAYER_PARTITION"] == "15,15,15,16"


def test_sglang_keeps_one_microbatch_a_rank_in_flight_and_the_depth_more():
    flags = flags_of(emit("sglang", Change(microbatches=6), RUN))
    assert flags == {"--pp-size": ["4"], "--pp-async-batch-depth": ["2"]}


def test_an_engine_with_the_batch_held_gets_smaller_microbatches():
    held = Change(microbatches=8, hold="batch")
    known = Setting(ranks=4, microbatches=4, microbatch_size=6)
    flags = flags_of(emit("sglang", held, known))
    assert flags["--pp-max-micro-batch-size"] == ["3"]
    with pytest.raises(UsageError, match="how many requests a microbatch has is not known"):
        emit("sglang", held, RUN)


def test_sglang_ignores_a_split_on_one_rank_so_it_is_refused():
    with pytest.raises(UsageError, match="a split of one stage"):
        emit("sglang", Change(split=(8,)), Setting(ranks=1, layers=8))


WHOLE = ServingSetting(
    stages=4, layers=(15, 15, 15, 16), in_flight=5, requests_a_batch=16, chunk=512
)


def flags_alone(text):
    return flags_of("".join(re.findall(r"^(?!export ).*\n", text, re.MULTILINE)))


def test_vllm_counts_requests_over_all_batches_and_tokens_of_prompts_and_answers_together():
    assert flags_alone(emit_serving("vllm", WHOLE)) == {
        "--pipeline-parallel-size": ["4"],
        "--max-num-batched-tokens": [str(512 + 16)],
        "--max-num-seqs": [str(16 * 5)],
        "--async-scheduling": [],
    }
    fewer = flags_alone(emit_serving("vllm", replace(WHOLE, in_flight=4)))
    assert fewer["--max-num-seqs"] == [str(16 * 4)]
    assert "--no-async-scheduling" in fewer


def test_a_chunk_has_room_beside_the_answers_that_share_its_batch():
    """Else vLLM and TensorRT-LLM, which count both, would cut prompts shorter than was planned."""
    smaller = ServingSetting(stages=4, chunk=256, answers_a_batch=8)
    written = flags_alone(emit_serving("vllm", smaller))
    assert written == {
        "--pipeline-parallel-size": ["4"],
        "--max-num-batched-tokens": [str(256 + 8)],
    }
    assert yaml.safe_load(emit_serving("tensorrt-llm", smaller))["max_num_tokens"] == 256 + 8
    assert flags_alone(emit_serving("sglang", smaller))["--chunked-prefill-size"] == ["256"]


def test_sglang_counts_requests_by_batch_and_keeps_more_in_flight_than_ranks():
    assert flags_alone(emit_serving("sglang", WHOLE)) == {
        "--pp-size": ["4"],
        "--pp-async-batch-depth": ["1"],
        "--pp-max-micro-batch-size": ["16"],
        "--chunked-prefill-size": ["512"],
    }


def test_tensorrt_llm_takes_a_whole_setting_as_yaml():
    options = yaml.safe_load(emit_serving("tensorrt-llm", replace(WHOLE, in_flight=4)))
    assert options == {
        "pipeline_parallel_size": 4,
        "pp_partition": [15, 15, 15, 16],
        "max_batch_size": 16,
        "max_num_tokens": 512 + 16,
        "enable_chunked_prefill": True,
    }


@pytest.mark.parametrize(
    ("framework", "setting", "problem"),
    [
        ("vllm", replace(WHOLE, in_flight=3), "3 batches in flight on 4 ranks"),
        ("vllm", replace(WHOLE, in_flight=6), "6 batches in flight on 4 ranks"),
        ("sglang", replace(WHOLE, in_flight=3), "3 batches in flight on 4 ranks"),
        ("tensorrt-llm", WHOLE, "5 batches in flight on 4 ranks"),
    ],
)
def test_what_an_engine_cannot_be_told_of_a_setting_is_refused(framework, setting, problem):
    with pytest.raises(UsageError, match=f"has no setting.*{problem}") as refusal:
        emit_serving(framework, setting)
    assert refusal.value.hint
