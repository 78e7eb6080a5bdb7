"""One run, every fact about it once: what theory says, and how often things are worked out."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from functools import wraps

import pytest
from support.traces.read_once import analyse_recording, read_recording
from support.traces.recordings import H200

import debubble
from debubble.analysis import Analysis
from debubble.cli import cli
from debubble.simulate.theory import ideal_bubble
from debubble.timeline.fleet.survey import Question, measure_run
from debubble.timeline.schedules import order_of, state_schedule


def analysis(name, statement=None):
    return Analysis(measure_run(read_recording(H200 / name), Question(statement=statement)))


@pytest.mark.parametrize("name", ["zb-h1", "zbv", "looped-bfs"])
def test_the_theory_is_that_of_what_was_stated_with_backward_passes_cut_in_half(name):
    run = analysis("1f1b_p3_m7", state_schedule(name))
    one = run.pipeline
    kinds = {kind.name: 0.0 for kind in {row.kind for row in one.stages}}
    for row in one.stages:
        kinds[row.kind.name] += row.median_ns
    halves = {"F": kinds["F"], "B": kinds["B"], "I": kinds["B"] / 2, "W": kinds["B"] / 2}
    expected = ideal_bubble(order_of(name, 3, 7), halves)
    assert run.theory.schedule_bubble_fraction == pytest.approx(expected, abs=1e-9)
    assert run.theory.schedule_bubble_fraction < 0.22
    assert run.theory.bubble_fraction == (pytest.approx(2 / 9) if name == "zb-h1" else None)


def test_a_schedule_that_cannot_be_has_no_theory():
    run = analysis("1f1b_p3_m7", state_schedule("interleaved-1f1b", 3))
    assert run.theory.bubble_fraction is None
    assert run.theory.schedule_bubble_fraction is None


# What takes time, or could be answered differently if it were worked out in two rooms.
ONCE = {
    "debubble.timeline.build": ("build_part",),
    "debubble.timeline.figures": ("measure_pipeline",),
    "debubble.timeline.job": ("ask_job",),
    "debubble.ledger.ledger": ("build_ledger",),
    "debubble.ledger.hop_health": ("account_for",),
    "debubble.links.hop_times": ("expect_wire", "judge_hops", "time_hops"),
    "debubble.ledger.verdict": ("name_causes", "find_bottleneck"),
    "debubble.measure.measurement": ("measure_run",),
    "debubble.plan.baseline": ("measure_baseline",),
    "debubble.plan.plan": ("make_plan",),
}


@pytest.mark.parametrize("verb", ["find", "find --html out.html", "links", "plan", "compare"])
@pytest.mark.parametrize("form", ["", "--json"])
def test_each_expensive_fact_is_worked_out_once_a_command(verb, form, monkeypatch, tmp_path):
    counts = Counter()
    # Import all that the verbs ask for, so that every name a function is known by is counted.
    for module in ("find", "links", "plan", "compare"):
        importlib.import_module(f"debubble.cli.{module}")

    def counted(function):
        @wraps(function)
        def count(*words, **settings):
            counts[function.__name__] += 1
            return function(*words, **settings)

        return count

    for home, names in ONCE.items():
        for name in names:
            function = getattr(importlib.import_module(home), name)
            wrapped = counted(function)
            for module in [each for key, each in sys.modules.items() if key[:8] == "debubble"]:
                if vars(module).get(name) is function:
                    monkeypatch.setattr(module, name, wrapped)
    monkeypatch.chdir(tmp_path)
    run = str(H200 / "1f1b_p2_m4")
    runs = [run, str(H200 / "1f1b_p3_m7")] if verb == "compare" else [run]
    words, *flags = verb.split()
    cli.main([words, *runs, *flags, *form.split(), "-q"], standalone_mode=False)
    asked = {name for name, count in counts.items() if count}
    assert {"build_part", "measure_pipeline", "ask_job"} <= asked
    assert {name: count for name, count in counts.items() if count > len(runs)} == {}


def test_what_the_api_lists_is_there_and_nothing_else():
    assert debubble.__all__ == [
        "Analysis",
        "analyse",
        "capture",
        "compare",
        "find",
        "links",
        "meter",
        "picture",
        "plan",
        "simulate",
        "step",
    ]
    assert all(callable(getattr(debubble, name)) for name in debubble.__all__)


def test_an_analysis_is_asked_once_and_answers_every_verb():
    run = analyse_recording(H200 / "1f1b_p2_m4")
    found, links = debubble.find(run), debubble.links(run)
    assert [hop.cost_per_batch_s for hop in found.hops] == [
        hop.cost_per_batch_s for hop in links.hops
    ]
    assert found.warnings == links.warnings
    with pytest.raises(TypeError, match="step"):
        debubble.find(run, step=2)
