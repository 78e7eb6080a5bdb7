"""Primus's dumps of passes: a file a rank, how many ranks and chunks in `config.json`."""

from __future__ import annotations

import csv
import json
from collections import defaultdict

import pytest
from support.services.console import type_command

import debubble
from debubble.errors import RunNotFound, TraceError
from debubble.trace.captures import recognise
from debubble.trace.run import find_run, read_run
from debubble.trace.source import DEFAULT_LIMITS

FORWARD, BACKWARD = 10.0, 20.0


def dump(rank, ranks, microbatches, *, iterations=4):
    """Write GPipe over equal stages, in milliseconds; the first iteration is slow."""
    said = {}
    for number in range(1, iterations + 1):
        slow = 4 if number == 1 else 1
        forward = [slow * FORWARD * (rank + m) for m in range(microbatches)]
        turn = slow * FORWARD * (ranks + microbatches - 1)
        backward = [turn + slow * BACKWARD * (ranks - 1 - rank + m) for m in range(microbatches)]
        said[str(number)] = {
            "total": turn + slow * BACKWARD * (ranks + microbatches - 1),
            "memory": 10.5 + rank,
            "fwd_start": forward,
            "fwd_end": [start + slow * FORWARD for start in forward],
            "bwd_start": backward,
            "bwd_end": [start + slow * BACKWARD for start in backward],
        }
    return said


@pytest.fixture
def folder(tmp_path):
    for rank in range(4):
        (tmp_path / f"pp_rank_{rank}.json").write_text(json.dumps(dump(rank, 4, 8)))
    (tmp_path / "config.json").write_text(json.dumps({"pp_size": 4, "vp_size": 1}))
    return tmp_path


def test_the_files_of_all_ranks_are_one_run(folder):
    analysis = debubble.analyse(str(folder))
    figures = analysis.pipeline
    assert [rank.rank for rank in figures.ranks] == [0, 1, 2, 3]
    assert (figures.microbatches, figures.schedule) == (8, "gpipe")
    assert figures.bubble_fraction == pytest.approx(3 / 11, abs=1e-6)
    assert figures.batch_latency_ns == 11 * 30_000_000
    assert [rank.peak_memory_bytes for rank in figures.ranks] == [
        round((10.5 + rank) * 2**30) for rank in range(4)
    ]


def test_without_the_config_a_rank_is_taken_to_hold_one_stage(folder):
    (folder / "config.json").unlink()
    run = read_run(find_run([str(folder)]))
    assert "stages_assumed" in [gap.code for gap in run.gaps]
    assert debubble.analyse(str(folder)).pipeline.schedule == "gpipe"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda said: said["2"]["fwd_end"].pop(), "begins 8 forward passes and ends 7"),
        (lambda said: said["2"].__setitem__("fwd_end", ["x"]), "cannot be read"),
        (lambda said: said["2"]["fwd_end"].__setitem__(0, -5.0), "is negative"),
        (lambda said: said.__setitem__("last", said["2"]), "is no number"),
    ],
)
def test_a_broken_dump_says_what_is_wrong(damage, says, tmp_path):
    said = dump(0, 2, 8)
    damage(said)
    path = tmp_path / "pp_rank_0.json"
    path.write_text(json.dumps(said))
    with pytest.raises((TraceError, RunNotFound), match=says):
        read_run(find_run([str(path)]))


def test_other_json_with_numbers_for_keys_is_no_dump(tmp_path):
    path = tmp_path / "pp_rank_0.json"
    path.write_text(json.dumps({"1": {"loss": 2.0}}))
    assert not recognise(str(path), DEFAULT_LIMITS).is_trace


@pytest.mark.parametrize(
    ("name", "window_ms", "bubble", "gib"),
    [("pp8", 3238, 0.354, 104.3), ("pp8_vpp2", 2881, 0.276, 130.6)],
)
def test_the_recorded_jobs_read_as_they_are(public_data, name, window_ms, bubble, gib):
    figures = debubble.analyse(str(public_data / "primus-pp_vis" / name)).pipeline
    assert figures.batch_latency_ns / 1e6 == pytest.approx(window_ms, rel=0.01)
    # The published figures are those of the seventh iteration, whose time ends with the last
    # rank's `total`. Ours is the median of all steps but the first, over the batch alone.
    seventh = next(window for window in figures.windows if window.step == 7)
    assert seventh.bubble_fraction == pytest.approx(bubble, abs=0.003)
    assert figures.bubble_fraction == pytest.approx(bubble, abs=0.004)
    assert figures.step_time_ns / 1e6 == pytest.approx(window_ms, rel=0.003)
    total_ns = max(_totals_ms(public_data / "primus-pp_vis" / name)) * 1e6
    busy = (1 - seventh.bubble_fraction) * seventh.length_ns
    assert total_ns / 1e6 == pytest.approx(window_ms, abs=0.5)
    assert 1 - busy / total_ns == pytest.approx(bubble, abs=0.0005)
    assert figures.ranks[0].peak_memory_bytes / 2**30 == pytest.approx(gib, abs=0.1)


def _totals_ms(folder):
    dumps = [json.loads((folder / f"pp_rank_{rank}.json").read_text()) for rank in range(8)]
    return [dump["7"]["total"] for dump in dumps]


def as_dumps(folder, table, ranks, sizes):
    """Write a table of passes as Primus's own schedules dump them."""
    folder.mkdir()
    kinds = {"forward": "fwd", "input-grad": "bwd", "wgrad": "wgrad"}
    dumps = [defaultdict(list) for _ in range(ranks)]
    for row in csv.DictReader(table.read_text().splitlines()):
        if row["op"] in kinds:
            key, said = kinds[row["op"]], dumps[int(row["rank"])]
            start = float(row["start_us"]) / 1000
            said[f"{key}_start"].append(start)
            said[f"{key}_end"].append(start + float(row["duration_us"]) / 1000)
            said[f"{key}_minibatch"].append(int(row["microbatch"]))
            said[f"{key}_chunk"].append(int(int(row["stage"]) >= ranks))
    for rank, said in enumerate(dumps):
        whole = {"total": None, "memory": 50.0, **said}
        (folder / f"pp_rank_{rank}.json").write_text(json.dumps({"5": whole}, indent=2))
    (folder / "config.json").write_text(json.dumps(sizes))
    return folder


@pytest.mark.parametrize(
    ("schedule", "sizes"),
    [("zb-h1", {"pp_size": 4, "vp_size": 1}), ("zbv", {"pp_size": 4, "vpp_size": 2})],
)
def test_weight_gradients_and_chunks_are_read_where_primus_names_them(schedule, sizes, tmp_path):
    costs = "--stages 4 --microbatches 8 --forward 10ms --backward 20ms"
    type_command(f"debubble simulate --schedule {schedule} {costs} --table step.csv", tmp_path)
    table = tmp_path / "step.csv"
    found = debubble.analyse(str(as_dumps(tmp_path / "dumps", table, 4, sizes))).pipeline
    told = debubble.analyse(str(table)).pipeline
    assert found.schedule == told.schedule == schedule
    assert found.bubble_fraction == pytest.approx(told.bubble_fraction, abs=1e-9)
    assert [rank.stages for rank in found.ranks] == [rank.stages for rank in told.ranks]
