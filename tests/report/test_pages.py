"""Sentences that only some runs have: what is said, and that nothing is where nothing is known."""

from __future__ import annotations

import msgspec
import pytest
from support.traces.read_once import analyse_recording
from support.traces.recordings import DATA, H200

import debubble
from debubble.annexes.probe.answers import PipelinePart as Simulated
from debubble.annexes.probe.answers import ProbeAnswer, TimedPart
from debubble.annexes.probe.report import probe_page
from debubble.plan.emitted import Emitted
from debubble.report.answers.find import JobPart, PipelinePart, answer_find
from debubble.report.answers.plan import SplitPart
from debubble.report.answers.serving import ProfilerPart
from debubble.report.find import find_page, say_framework
from debubble.report.plan import plan_page

replace = msgspec.structs.replace


@pytest.fixture(scope="module")
def trained():
    return answer_find(analyse_recording(H200 / "1f1b_p3_m7"))


@pytest.fixture(scope="module")
def served():
    return answer_find(analyse_recording(DATA / "serving" / "k4"))


@pytest.fixture(scope="module")
def planned():
    return debubble.plan(analyse_recording(H200 / "1f1b_p2_m4"), frameworks=())


def note(page, begins):
    """Return the one note that begins so."""
    [found] = [line for line in page.notes if line.startswith(begins)]
    return found


def test_a_framework_is_named_with_how_it_divides_the_job(trained):
    known = replace(
        trained.run.framework,
        name="megatron",
        tensor=2,
        data=4,
        microbatch_size=2,
        sequence=4096,
        recomputes=True,
    )
    told = replace(trained, run=replace(trained.run, framework=known, microbatches=7))
    assert say_framework(told) == (
        "Megatron: pipeline 3, tensor 2, data 4, microbatches of 2 samples x 4,096 tokens,"
        " batch of 56 samples, activations recomputed"
    )
    assert say_framework(replace(trained, run=replace(trained.run, framework=unnamed(known)))) == ""


def unnamed(framework):
    return replace(framework, name=None)


JOB = JobPart(
    schedule=None,
    microbatches=None,
    split=None,
    tokens=None,
    context_lengths=None,
    unprofiled_step_time_s=0.15,
    profiled_step_time_s=0.18,
    steps_timed=6,
    overhead_fraction=0.2,
)


def test_steps_without_the_profiler_tell_what_the_capture_costs(trained):
    timed = replace(trained.numbers, unprofiled_batch_latency_s=0.14)
    page = find_page(replace(trained, job=JOB, numbers=timed))
    assert note(page, "times: ") == (
        "times: profiled; unprofiled: 150 ms a step (median of 6 steps), about 140 ms a batch"
        "; profiling overhead +20 %"
    )


@pytest.mark.parametrize(("others", "named"), [(0.10, True), (0.149, False)])
def test_the_slowest_pipeline_is_named_where_the_others_are_quicker(others, named, trained):
    def pipeline(number, latency):
        return PipelinePart(
            pipeline=number,
            ranks=[number],
            missing_ranks=[],
            bubble_fraction=0.2,
            batch_latency_s=latency,
            peak_memory_bytes=None,
        )

    every = [pipeline(0, others), pipeline(1, 0.15), pipeline(2, others)]
    notes = find_page(replace(trained, pipelines=every, shown_pipeline=1)).notes
    said = [line for line in notes if line.startswith("slowest: ")]
    takes = "slowest: pipeline 1, 150 ms a batch (median of the others: 100 ms)"
    assert said == ([takes] if named else [])


def test_a_server_has_its_phases_and_says_whether_the_profilers_cost_is_known(served):
    page = find_page(served)
    [phases] = [table.rows for table in page.tables if table.columns[0] == "phase"]
    assert [row[0] for row in phases] == [part.phase for part in served.stream.phases]
    assert note(page, "profiling overhead unknown")
    noted = ProfilerPart(
        slowdown=2.5,
        captured_tokens_out_per_s=None,
        tokens_out_per_s=1000.0,
        tokens_in_per_s=None,
        tpot_s=0.02,
        ttft_s=None,
        requests_running=None,
    )
    known = replace(served, stream=replace(served.stream, profiler=noted))
    assert note(find_page(known), "unprofiled, a token") == (
        "unprofiled, a token took 0.40 of its profiled time; 1,000 tokens/s out unprofiled, "
        "20.0 ms a token"
    )


def test_a_plan_says_what_its_bound_proves_and_which_limit_is_unknown(planned):
    unproven = replace(
        planned,
        lower_bound_s=0.1,
        quickest_split=SplitPart(split=[9, 7], exact=False),
        baseline=replace(planned.baseline, limit_bytes=[None, None], split=[8, 8], head_layers=1.5),
    )
    page = plan_page(unproven)
    assert note(page, "best split") == ("best split found: 9,7; no split takes less than 100 ms")
    assert note(page, "memory: limit") == ("memory: limit unknown; give it with --memory-limit")
    assert note(page, "stage 1: ") == (
        "stage 1: 8 layers + head (worth 1.5 layers); with split 9,7 it has 7 layers"
    )


@pytest.mark.parametrize(
    ("high", "says"), [(-0.02, "fits, but is slower"), (0.05, "may be within the noise")]
)
def test_what_is_written_though_it_is_not_advised_says_what_it_is(high, says, planned):
    first = planned.options[0]
    interval = replace(first.interval, throughput_gain_fraction=[-0.1, high])
    option = replace(first, recommended=False, throughput_gain_fraction=-0.04, interval=interval)
    emitted = Emitted(
        framework="torch", option=0, text="x", order=None, order_file=None, reason="no such knob"
    )
    page = plan_page(replace(planned, options=[option], emitted=emitted))
    assert page.notes[-3:] == [
        "better options cannot be written: no such knob",
        f"this option {says}: -4 % (-10 to {100 * high:+.0f} %)",
        f"for torch, {option.words}:",
    ]


def probed(*pipelines, trains=True):
    part = TimedPart(
        part="layer",
        tokens=1024,
        forward_s=0.001,
        backward_s=0.002,
        input_grad_s=0.001,
        saved_bytes=2.0**20,
        output_bytes=2.0**20,
        weight_bytes=2.0**21,
    )
    return ProbeAnswer(
        model="m",
        device="H200",
        layers=16,
        trains=trains,
        parts=[part],
        memory_limit_bytes=None,
        pipelines=list(pipelines),
        assumptions=["that all is quiet"],
        written=["steps/tokens_1024.csv"],
        warnings=[],
    )


def simulated(stages, tokens_per_s, *, fits=None, split=(8, 8)):
    return Simulated(
        stages=stages,
        schedule="1f1b",
        microbatches=8,
        tokens=1024,
        split=list(split),
        batch_latency_s=0.1,
        bubble_fraction=0.25,
        tokens_per_s=tokens_per_s,
        peak_memory_bytes=[2.0**30],
        fits_memory=fits,
    )


def test_a_probe_names_the_best_pipeline_and_the_best_for_each_rank():
    page = probe_page(probed(simulated(4, 900.0), simulated(2, 800.0, split=(9, 7))))
    assert page.answer == (
        "16 layers timed on H200: best pipeline: 1f1b on 4 ranks with 8 microbatches:"
        " 100 ms a batch, 900 tokens/s, bubble 25 %."
    )
    assert page.findings == [
        "Per rank, 1f1b on 2 ranks with 8 microbatches is best: 400 tokens/s a rank."
    ]
    assert [row[4] for row in page.tables[1].rows] == ["8 each", "9,7"]
    assert page.notes == ["assumed: that all is quiet", "steps/tokens_1024.csv written"]
