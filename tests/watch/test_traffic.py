"""What engines say of themselves, read as vLLM and SGLang write it."""

from __future__ import annotations

import pytest

from debubble.annexes.watch.mix import parse_metrics, requests_between

# SGLang's own bounds, the first of them.
BOUNDS = (100, 300, 500, 700, 1000, 1500, 2000, 3000)
MODEL = 'model_name="meta/Llama-3, \\"8B\\"",engine_type="unified"'


def sglang(lengths, queues):
    """Write a page: prompts of some lengths, and the queue by pipeline rank of each replica."""
    name = "sglang:prompt_tokens_histogram"
    lines = [f"# HELP {name} Histogram of prompt token length.", f"# TYPE {name} histogram"]
    for bound in (*map(float, BOUNDS), float("inf")):
        shown = "+Inf" if bound == float("inf") else bound
        below = sum(length <= bound for length in lengths)
        lines.append(f'{name}_bucket{{le="{shown}",{MODEL}}} {float(below)}')
        # What was computed of each prompt has a histogram of its own, which is another thing.
        lines.append(f'sglang:uncached_prompt_tokens_histogram_bucket{{le="{shown}"}} 999.0')
    lines += [f"{name}_sum{{{MODEL}}} {sum(lengths)}", f"{name}_count{{{MODEL}}} {len(lengths)}"]
    lines += [
        f'sglang:num_queue_reqs{{dp_rank="{replica}",{MODEL},pp_rank="{rank}",tp_rank="0"}} {long}'
        for (replica, rank), long in queues.items()
    ]
    lines.append(f"sglang:num_running_reqs{{{MODEL}}} 77.0")
    return "\n".join(lines) + "\n"


def test_prompts_of_sglang_are_counted_by_context_length():
    before = parse_metrics(sglang([50, 400], {}))
    after = parse_metrics(sglang([50, 400, 450, 480, 1400, 5000], {}))
    assert requests_between(before, after) == {512: 2.0, 2048: 1.0, 8192: 1.0}


def test_a_server_that_was_started_again_counts_from_its_start():
    before = parse_metrics(sglang([400] * 9, {}))
    assert requests_between(before, parse_metrics(sglang([400, 450], {}))) == {512: 2.0}


def test_ranks_of_a_pipeline_tell_one_queue_and_replicas_have_their_own():
    one = parse_metrics(sglang([], {(0, 0): 3.0, (0, 1): 3.0, (0, 2): 2.0, (0, 3): 3.0}))
    assert one.waiting == 3.0
    two = parse_metrics(sglang([], {(0, 0): 3.0, (0, 1): 3.0, (1, 0): 4.0, (1, 1): 4.0}))
    assert two.waiting == 7.0


@pytest.mark.parametrize("page", ["", "nonsense", "sglang:num_queue_reqs NaN\n"])
def test_a_page_without_figures_tells_nothing(page):
    told = parse_metrics(page)
    assert (told.waiting, dict(told.lengths)) == (0.0, {})
