"""Captures of the lab's engine: where their time went, and what another setting would do."""

import gzip
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import debubble
from debubble.errors import NoFit
from debubble.ledger.causes import Cause
from debubble.plan.server import plan_server, predict, read_traffic
from debubble.serving.costs import pass_ns
from debubble.serving.model import model_server
from debubble.serving.traffic import Setting, Traffic, send_out
from debubble.timeline.turns import Phase
from debubble.trace.server_notes import Span

pytestmark = pytest.mark.slow

DATA = Path(__file__).parents[1] / "data" / "serving"
_spec = importlib.util.spec_from_file_location(
    "bench_serving", Path(__file__).parents[2] / "benchmarks" / "serving.py"
)
bench = importlib.util.module_from_spec(_spec)
sys.modules["bench_serving"] = bench  # its dataclasses look themselves up
_spec.loader.exec_module(bench)
WITHIN = 0.08


def truth_of(name):
    return json.loads((DATA / name / "truth0.json").read_text("utf-8"))


def rate_of(name):
    """Tokens a second without the profiler, with those that prompts end in."""
    truth = truth_of(name)
    return (truth["tokens_out"] + truth["tokens_in"] / int(truth["prompt"])) / truth["wall_s"]


@pytest.fixture(scope="module")
def streams():
    return {name: debubble.analyse(DATA / name) for name in ("k4", "u3337")}


def model_of(analysis, name):
    truth = truth_of(name)
    return model_server(
        analysis.stream,
        analysis.traces,
        layers=tuple(map(int, truth["layers"].split(","))),
        traffic=read_traffic(truth["clients"], truth["prompt"], truth["output"]),
        around=Span(seconds=1.0, tokens_out_per_s=rate_of(name)),
    )


@pytest.mark.parametrize("name", ["k4", "u3337"])
def test_every_nanosecond_of_every_rank_stands_under_one_cause(streams, name):
    stream = streams[name].stream
    for place in range(4):
        assert sum(stream.causes(place).values()) == np.diff(stream.batches.span)
    useful = 1 - streams[name].pipeline.bubble_fraction
    assert stream.shares()[Cause.COMPUTE] == pytest.approx(useful, abs=1e-9)
    assert stream.shares()[Cause.UNEXPLAINED] <= 0.05
    assert abs(stream.replay_error) <= 0.03


@pytest.mark.parametrize("name", ["k4", "u3337"])
def test_how_many_batches_leave_in_a_second_is_one_number(streams, name):
    found = debubble.find(streams[name])
    assert found.numbers.microbatches_per_s == pytest.approx(1 / found.stream.turn_s, rel=1e-9)
    [sample] = streams[name].measurement.samples
    assert sample.stream_per_s == pytest.approx(1 / found.stream.turn_s, rel=1e-9)


@pytest.mark.parametrize("name", ["k4", "u3337"])
def test_phases_are_told_without_labels(streams, name):
    batches = streams[name].stream.batches
    wanted = [
        Phase.DECODE if not prompts else Phase.MIXED if rows else Phase.PREFILL
        for *_, prompts, rows in truth_of(name)["profiled_batches"]
    ]
    assert batches.phase.tolist() == wanted
    assert not batches.labelled
    assert batches.in_flight == truth_of(name)["slots"]
    sizes = [prompts + rows for *_, prompts, rows in truth_of(name)["profiled_batches"]]
    assert batches.tokens.tolist() == sizes


def test_the_long_stage_is_named_first_and_hosts_with_what_they_cost():
    named = debubble.find(DATA / "u3337").named
    assert (named[0].cause, named[0].stage) == ("imbalance", 3)
    assert "7 layers" in named[0].sentence
    host = next(one for one in named if one.cause == "host")
    assert "decode computes" in host.sentence
    assert "saves at most" in host.sentence
    # The profiler makes launches slow: what they may save counts a third.
    counted = [one.saved_s / (3 if one is host else 1) for one in named]
    assert counted == sorted(counted, reverse=True)
    even = debubble.find(DATA / "k4").named
    assert all(one.cause != "imbalance" or one.saved_s < 0.0004 for one in even)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("u3337", "first 40 %"),
        ("u3337", "first 60 %"),
        ("k4", "first 60 %"),
        ("u3337", "last 40 %"),
        ("u3337", "each elsewhere"),
        ("k4", "last 40 %"),
        ("k4", "each elsewhere"),
    ],
)
def test_a_capture_that_is_cut_tells_the_same(streams, tmp_path, name, part):
    bench.cut(DATA / name, bench.CUTS[part], tmp_path)
    part, whole = debubble.analyse(tmp_path), streams[name]
    assert part.pipeline.stream.in_flight == whole.pipeline.stream.in_flight
    assert part.stream.batches.in_flight == whole.stream.batches.in_flight
    for place in range(4):
        assert sum(part.stream.causes(place).values()) == np.diff(part.stream.batches.span)
    assert abs(part.stream.replay_error) <= 0.03
    known = bench.shares_within(whole, part.stream.batches.span)
    assert part.stream.shares()[Cause.COMPUTE] == pytest.approx(known[Cause.COMPUTE], abs=0.01)
    assert part.stream.shares()[Cause.UNEXPLAINED] <= 0.05
    # Each batch is the same one on every stage as in the whole capture.
    kept = np.flatnonzero(part.stream.batches.inside)
    assert len(kept) > 1
    for batch in kept.tolist():
        moments = part.stream.batches.start[batch]
        off = np.abs(whole.stream.batches.start - moments)
        assert len(set(off.argmin(axis=0).tolist())) == 1
        assert off.min(axis=0).max() < 1_000_000  # clocks are fitted to each
    if name == "u3337":
        first = debubble.find(tmp_path).named[0]
        assert (first.cause, first.stage) == ("imbalance", 3)


@pytest.mark.parametrize("part", ["middle 40 %", "each from its start"])
def test_a_stage_that_never_waits_leaves_open_how_many_are_in_flight(streams, tmp_path, part):
    """All batches have one size and wait before the last stage: a batch on, all looks the same."""
    bench.cut(DATA / "u3337", bench.CUTS[part], tmp_path)
    part, whole = debubble.analyse(tmp_path), streams["u3337"]
    least, most = part.pipeline.stream.may_be
    assert least <= truth_of("u3337")["slots"]
    assert most is None  # nothing says how many wait there
    assert f"with {least} or more batches in flight" in debubble.find(tmp_path).verdict
    assert not debubble.find(tmp_path).stream.batches_in_flight_sure
    with pytest.raises(NoFit, match="number of batches in flight is unknown"):
        part.server_model()
    # What waits for what is the same, one batch on or not; and the clock is left alone.
    known = bench.shares_within(whole, part.stream.batches.span)
    assert part.stream.shares() == pytest.approx(known, abs=0.05)
    assert max(abs(rank.clock_offset_ns) for rank in part.timeline.ranks) < 1_000_000


def test_a_first_stage_that_sets_the_pace_hides_how_many_may_be_in_flight(tmp_path):
    """The first stage sets the pace of this part: four are in flight, and more may be allowed."""
    bench.cut(DATA / "k4", bench.CUTS["first 60 %"], tmp_path)
    assert debubble.analyse(tmp_path).pipeline.stream.first_sets_pace


def test_captures_with_no_batch_in_common_are_not_paired_by_chance(tmp_path):
    """One rank's capture ends before the next one's begins: no offset of clocks may join them."""
    bench.cut(DATA / "k4", [(0.6, 1.0), (0.6, 1.0), (0.0, 0.3), (0.0, 0.3)], tmp_path)
    part = debubble.analyse(tmp_path)
    assert part.pipeline.stream is None
    assert [gap.code for gap in part.pipeline.gaps] == ["no_common_span"]
    assert all(rank.clock_offset_ns < 1_000_000 for rank in part.timeline.ranks)


def test_a_rank_that_did_nothing_while_it_was_captured_asks_for_a_longer_capture(tmp_path):
    bench.cut(DATA / "k4", [(0.0, 1.0), (0.0, 1.0), (0.0, 0.0), (0.0, 1.0)], tmp_path)
    asks = {"ph": "X", "cat": "cuda_runtime", "name": "cudaEventQuery", "pid": 1, "tid": 1}
    idle = json.loads((tmp_path / "rank2.json").read_text("utf-8"))
    idle["traceEvents"].append({**asks, "ts": 1.0, "dur": 1.0, "args": {"correlation": 1}})
    (tmp_path / "rank2.json").write_text(json.dumps(idle), "utf-8")
    part = debubble.analyse(tmp_path)
    assert part.pipeline.bubble_fraction is None
    said = {gap.code: gap.hint for gap in debubble.find(part).warnings}
    assert "longer" in said["no_common_span"]
    assert "longer" in said["no_kernels"]


@pytest.mark.parametrize(("in_flight", "measured"), [(1, "k1"), (2, "k2"), (8, "k8")])
def test_other_numbers_in_flight_give_what_was_measured(streams, in_flight, measured):
    model = model_of(streams["k4"], "k4")
    assert abs(model.off) < 0.02
    option = predict(model, Setting(in_flight=in_flight, chunk=model.setting.chunk))
    assert option.served.tokens_out_per_s == pytest.approx(rate_of(measured), rel=WITHIN)
    assert option.low <= rate_of(measured) / rate_of("k4") <= option.high
    assert option.gain < 0  # four in flight are best on that machine, and it says so
    assert option.verdict == "no"


@pytest.mark.parametrize(("source", "other"), [("u3337", "k4"), ("k4", "u3337")])
def test_another_split_gives_what_was_measured(streams, source, other):
    model = model_of(streams[source], source)
    layers = tuple(map(int, truth_of(other)["layers"].split(",")))
    option = predict(model, Setting(in_flight=4, chunk=model.setting.chunk, layers=layers))
    assert option.low <= rate_of(other) / rate_of(source) <= option.high
    if source == "k4":  # the other way it is 13 % off
        assert option.served.tokens_out_per_s == pytest.approx(rate_of(other), rel=WITHIN)


def test_a_slow_hop_is_repaired_for_what_it_costs(streams):
    model = model_of(streams["k4"], "k4")
    least, a_token = model.costs.wire_ns[2]
    wires = (*model.costs.wire_ns[:2], (least, 12 * a_token), model.costs.wire_ns[3])
    slow = replace(model, slow=(2,), costs=replace(model.costs, wire_ns=wires))
    slow = replace(slow, as_is=predict(slow, slow.setting).served)
    assert slow.as_is.tokens_out_per_s < 0.95 * model.as_is.tokens_out_per_s
    options = [one for one in plan_server(slow) if one.kinds == ("hop",)]
    assert options[0].served.tokens_out_per_s == pytest.approx(
        model.as_is.tokens_out_per_s, rel=0.02
    )
    assert all("hop" not in one.kinds for one in plan_server(model))


def test_what_goes_together_is_better_than_each_alone(streams):
    model = model_of(streams["u3337"], "u3337")
    options = plan_server(model)
    alone = {one.kinds[0]: one.gain for one in options[::-1] if len(one.kinds) == 1}
    assert min(alone["split"], alone["in_flight"]) > 0.1  # each helps, by what both would
    for one in options:
        assert len(one.kinds) == 1 or one.gain > max(alone[kind] for kind in one.kinds)


def test_a_batch_that_takes_more_requests_serves_more_where_some_wait(streams):
    model = model_of(streams["k4"], "k4")
    capped = replace(model.setting, requests_a_batch=4)
    waiting = replace(model, setting=capped, as_is=predict(model, capped).served)
    tried = {one.setting.requests_a_batch: one for one in plan_server(waiting)}
    assert tried[8].gain > 0.3
    assert tried[2].gain < -0.3
    assert tried[2].served.tpot_s < waiting.as_is.tpot_s
    assert {one.setting.requests_a_batch for one in plan_server(model)} == {None, 4}


def test_a_smaller_chunk_attends_to_no_more_than_is_there(streams):
    """Attention grows with tokens times context: a quarter of the chunk is a sixteenth of it."""
    model = model_of(streams["k4"], "k4")
    costs = model.costs
    setting = Setting(in_flight=1, chunk=128)
    alone = Traffic(clients=1, prompts=((512, 1.0),), output=8)
    sent = send_out(alone, setting, recorded_prompt=512.0, recorded_chunk=costs.chunk)
    assert sent.tokens[:5] == [128, 128, 128, 128, 0]
    assert [grown[0] for grown in sent.grown[:5]] == [0.25, 0.5, 0.75, 1.0, 1.0]
    short, _ = pass_ns(costs, model.hosts, 1, prompt_tokens=512, rows=7, grown=(1.0, 1.0))
    long, _ = pass_ns(costs, model.hosts, 1, prompt_tokens=512, rows=7, grown=(4.0, 1.0))
    # Recorded without the profiler: 12.2 ms at the start of a prompt, 24.3 ms at its fourth chunk.
    assert long / short == pytest.approx(24.3 / 12.2, rel=WITHIN)


def test_requests_that_need_more_cache_than_there_is_are_refused(streams):
    model = model_of(streams["k4"], "k4")
    now = model.setting
    longer = read_traffic(32, "4096", 48)
    option = predict(model, now, longer, limit=20_000)
    assert option.verdict == "refused"
    assert option.served.kv_tokens > 20_000
    assert np.isclose(predict(model, now, limit=20_000).gain, 0.0)


def pause(whole, out, pause_us):
    """Write a capture whose machine stood still once, while no rank was in a pass."""
    batches = whole.stream.batches
    ends = np.sort(batches.end[12:-8].ravel())
    idle = [end for end in ends if not ((batches.start <= end) & (batches.end > end)).any()]
    for rank in batches.ranks:
        moment = rank.stamp_us(int(idle[len(idle) // 2]))
        trace = json.loads(gzip.decompress(Path(rank.file).read_bytes()))
        for event in trace["traceEvents"]:
            if "ts" in event and event.get("ph") != "M":
                end = event["ts"] + event.get("dur", 0)
                if "dur" in event:
                    event["dur"] += pause_us * (event["ts"] <= moment < end)
                event["ts"] += pause_us * (event["ts"] > moment)
        (out / f"rank{rank.rank}.json").write_text(json.dumps(trace), "utf-8")


def test_a_pace_that_no_costs_come_to_prices_nothing(streams, tmp_path):
    """In the replay of measured parts a pause is a part like others: it misses nothing."""
    pause(streams["u3337"], tmp_path, pause_us=150_000)
    part = debubble.analyse(tmp_path)
    assert part.pipeline.stream.in_flight == 4
    assert abs(part.stream.replay_error) < 0.001
    with pytest.raises(NoFit, match=r"model error 2\d % on the captured batches"):
        part.server_model()
    for name in ("k4", "u3337"):
        assert 0.001 < abs(streams[name].server_model().off) < 0.03
