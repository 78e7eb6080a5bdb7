"""A run that is held in parts gives the answer of one that is held whole."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.simulator.replicas import BEHAVIOUR, IN_PARTS, write_side_by_side
from support.traces.kineto_events import document, kernel, write
from support.traces.recordings import H200

from debubble.analysis import analyse_found
from debubble.errors import Code, DebubbleError, TraceError
from debubble.report.answers.find import answer_find
from debubble.report.answers.inspect import answer_inspect
from debubble.timeline.fleet.survey import Means, NoPipelineIn, Question, inspect_run, survey_run
from debubble.trace.digest import place_digests
from debubble.trace.engine import GivenEngine
from debubble.trace.run import find_run
from debubble.trace.source import inflate


def answer(place, means=None, question=None):
    """Return everything `find` says, or why it cannot."""
    try:
        found = answer_find(analyse_found(find_run([str(place)]), question, means))
    except DebubbleError as error:
        return f"{type(error).__name__}: {error}"
    return found.to_json().splitlines()


@pytest.mark.parametrize("name", sorted(one.name for one in H200.iterdir() if one.is_dir()))
def test_recorded_runs(name):
    assert answer(H200 / name, IN_PARTS) == answer(H200 / name)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", list(BEHAVIOUR))
def test_replicas(tmp_path, schedule):
    write_side_by_side(tmp_path, schedule=schedule)
    assert answer(tmp_path, IN_PARTS) == answer(tmp_path)


@pytest.mark.slow
def test_replicas_on_wrong_clocks(tmp_path):
    write_side_by_side(tmp_path, skews=(0, 50_000_000, -7_000_000_000))
    assert answer(tmp_path, IN_PARTS) == answer(tmp_path)


@pytest.mark.slow
def test_replicas_without_marks(tmp_path):
    write_side_by_side(tmp_path, marks=False)
    assert answer(tmp_path, IN_PARTS) == answer(tmp_path)


@pytest.mark.slow
def test_one_replica_that_shows_no_rhythm_is_told_alike(tmp_path):
    write_side_by_side(tmp_path, marks=False)
    (tmp_path / "rank1.json").unlink()
    (tmp_path / "rank7.json").unlink()
    assert answer(tmp_path, IN_PARTS) == answer(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("missing", [(1,), (4, 5), (0, 9)])
def test_missing_ranks(tmp_path, missing):
    write_side_by_side(tmp_path)
    for rank in missing:
        (tmp_path / f"rank{rank}.json").unlink()
    assert answer(tmp_path, IN_PARTS) == answer(tmp_path)


@pytest.mark.slow
def test_a_rank_that_cannot_be_read(tmp_path):
    write_side_by_side(tmp_path)
    (tmp_path / "rank5.json").write_bytes(b'{"traceEvents": [}')
    assert answer(tmp_path, IN_PARTS) == answer(tmp_path)


def test_a_file_that_ends_before_its_kernels(tmp_path):
    for rank in range(4):
        data = (H200 / "fwd_closed_m4" / f"rank{rank}.json.gz").read_bytes()
        end = len(data) * 2 // 5 if rank == 2 else len(data)
        (tmp_path / f"rank{rank}.json.gz").write_bytes(data[:end])
    assert survey_run(find_run([str(tmp_path)])).shown.absent == (2,)
    assert answer(tmp_path, IN_PARTS) == answer(tmp_path)


@pytest.mark.slow
def test_one_pipeline_or_step_alone(tmp_path):
    write_side_by_side(tmp_path)
    for question in (Question(pipeline=2), Question(step=1), Question(pipeline=7)):
        assert answer(tmp_path, IN_PARTS, question) == answer(tmp_path, None, question)


@pytest.mark.slow
def test_no_pipeline_at_all(tmp_path):
    for rank in range(2):
        write(tmp_path / f"rank{rank}.json", document([kernel()], rank=rank, world=2))
    said = answer(tmp_path)
    assert said.startswith("NoPipelineIn")
    assert answer(tmp_path, IN_PARTS) == said
    with pytest.raises(NoPipelineIn) as why:
        survey_run(find_run([str(tmp_path)]), means=IN_PARTS)
    assert [rank.kernels for rank in why.value.run.summarised()] == [1, 1]


@pytest.mark.slow
def test_a_run_of_a_few_ranks_never_meets_the_code_for_many():
    program = (
        "import sys; from debubble.cli import main\n"
        "try: main(['find', sys.argv[1], '--quiet'])\n"
        "finally: print('debubble.timeline.fleet.shelf' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(H200 / "fwd_closed_m4")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.slow
def test_only_the_pipeline_that_is_shown_is_held(tmp_path):
    write_side_by_side(tmp_path)
    found = survey_run(find_run([str(tmp_path)]), means=IN_PARTS)
    assert len(found.figures) == 3
    assert found.timeline.pipelines == (found.shown.pipeline,)
    assert {trace.rank for trace in found.traces} == {rank.rank for rank in found.shown.ranks}
    assert sum(trace.kept_bytes() for trace in found.run.ranks) < 20_000


def test_what_files_hold_is_told_alike(tmp_path):
    write_side_by_side(tmp_path)
    found = find_run([str(tmp_path)])
    assert answer_inspect(inspect_run(found, IN_PARTS)) == answer_inspect(inspect_run(found))


@pytest.mark.slow
def test_a_part_that_nobody_can_build_is_named_and_the_others_go_on(tmp_path, monkeypatch):
    write_side_by_side(tmp_path / "traces")
    traces = find_run([str(tmp_path / "traces")])
    files = [one.file for one in traces.capture.files]
    place = place_digests(str(tmp_path / "digests"), [str(tmp_path / "traces")], files)
    survey_run(traces, means=Means(digests=place))

    def gone(file, limits):
        if "rank1." in file:
            raise TraceError("gone", file=file)
        return inflate(file, limits)

    monkeypatch.setattr("debubble.timeline.fleet.shelf.inflate", gone)
    with ThreadPoolExecutor(2) as threads:  # processes may be spawned, and know nothing of `gone`
        monkeypatch.setattr(
            "debubble.timeline.fleet.survey.WORKERS_HERE", GivenEngine(executor=threads)
        )
        found = survey_run(find_run([str(tmp_path / "digests")]), means=IN_PARTS)
    assert [one.pipeline for one in found.figures] == [0, 1]
    lost = [gap for gap in found.gaps if gap.code is Code.UNREADABLE]
    assert [Path(gap.file).name for gap in lost] == ["rank1.debubble.npz"]
