"""The Python API: one run in → an `Analysis`, and each verb's answer.

    import debubble

    found = debubble.find("traces")
    found.numbers.bubble_fraction
    found.to_dict()["savings"]

What `debubble.__all__` lists is stable: names and arguments stay within a major version, answers
keep their fields within a schema number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from os import PathLike, fspath
from typing import Any

from debubble.analysis import Analysis, Wires, analyse_found
from debubble.links.wiring import read_history
from debubble.measure.compare import DEFAULT_THRESHOLD, compare_causes
from debubble.measure.compare import compare as compare_runs
from debubble.plan.change import Hold
from debubble.plan.emit import EMITTERS
from debubble.plan.request import ChangeRequest, Stated, check_frameworks
from debubble.report.answers.compare import CompareAnswer, answer_compare
from debubble.report.answers.find import FindAnswer, answer_find, say_bubble
from debubble.report.answers.links import LinksAnswer, answer_links
from debubble.report.answers.plan import PlanAnswer, answer_plan, predictions_of
from debubble.report.answers.simulate import SimulateAnswer, answer_simulate
from debubble.report.frame import frame_of
from debubble.report.svg import draw_svg
from debubble.timeline.fleet.survey import Means, Question
from debubble.timeline.schedules import state_schedule
from debubble.trace.digest import place_digests
from debubble.trace.engine import LOCAL, Engine
from debubble.trace.run import find_run

__all__ = [
    "Analysis",
    "analyse",
    "compare",
    "find",
    "links",
    "picture",
    "plan",
    "simulate",
]

Places = str | PathLike[str] | Sequence[str | PathLike[str]]
"""Files, folders, globs or URLs: as on the command line."""


def analyse(  # noqa: PLR0913 (one argument a question)
    paths: Places,
    *,
    capture: str | None = None,
    rank: int | None = None,
    pipeline: int | None = None,
    step: int | None = None,
    schedule: str | None = None,
    classes: Sequence[str] = (),
    topologies: Sequence[str] = (),
    history: Sequence[str] = (),
    engine: str = "local",
    digest: str | None = None,
) -> Analysis:
    """Read one run; its facts are worked out when they are asked for, each once.

    What traces do not tell can be said: the `schedule` that ran.
    """
    places = [paths] if isinstance(paths, str | PathLike) else list(paths)
    words = [fspath(place) for place in places]
    found = find_run(words, capture=capture)
    files = [file.file for each in found.captures for file in each.files]
    reader: Engine = LOCAL
    if engine != "local":
        from debubble.annexes.cluster import engine_at  # noqa: PLC0415 (an annex)

        reader = engine_at(engine)
    means = Means(
        engine=reader,
        rank=rank,
        digests=None if digest is None else place_digests(digest, words, files),
    )
    question = Question(
        pipeline=pipeline,
        step=step,
        statement=None if schedule is None else state_schedule(schedule),
    )
    wires = Wires(classes=classes, topologies=topologies, history=read_history(history))
    return analyse_found(found, question, means, wires)


def find(run: Analysis | Places, **asked: Any) -> FindAnswer:
    """Say what the bubble is, why, and whose it is; takes what `analyse` takes."""
    return answer_find(_analysed(run, asked))


def links(run: Analysis | Places, **asked: Any) -> LinksAnswer:
    """Say whether it is the wire; takes what `analyse` takes."""
    return answer_links(_analysed(run, asked))


def compare(  # noqa: PLR0913 (two runs, and what is known and wanted besides)
    before: Analysis | Places,
    after: Analysis | Places,
    *,
    threshold: float = DEFAULT_THRESHOLD,
    limit_bytes: int | None = None,
    predicted: PlanAnswer | None = None,
    change: str | None = None,
) -> CompareAnswer:
    """Hold the run after a change against the one before: three numbers, one verdict.

    And against what `plan` said of the change: of the option that shows, else of the one that is
    `change` in the plan's words.
    """
    runs = [_analysed(run, {}) for run in (before, after)]
    kept = () if predicted is None else predictions_of(predicted)
    found = compare_runs(
        replace(runs[0].measurement, predicted=kept),
        runs[1].measurement,
        change=change,
        threshold=threshold,
        limit_bytes=limit_bytes,
    )
    gaps = dict.fromkeys(gap for run in runs for gap in run.measured_warnings)
    return answer_compare(found, tuple(gaps), compare_causes(*([run.shares] for run in runs)))


def plan(  # noqa: PLR0913 (one argument a question)
    run: Analysis | Places,
    *,
    schedule: str | None = None,
    layers: Sequence[int] | None = None,
    memory_limit_bytes: float | None = None,
    most_microbatches: int | None = None,
    hold: Hold | None = None,
    frameworks: Sequence[str] = tuple(EMITTERS),
    planned_for: str | None = None,
    emit: str | None = None,
    **asked: Any,
) -> PlanAnswer:
    """Rank what could be changed in a run by what it would buy; takes what `analyse` takes.

    What traces do not tell can be said: the `schedule` that ran, `layers` of each stage, the memory
    of a rank. `hold` is what keeps its size where microbatches change, "batch" or "microbatch";
    without it larger batches of a run that trains stand apart. `frameworks` are those that every
    option is written for in `apply`; `emit` names one that the best option is written for in
    `emitted`. Only what `planned_for` can be told is weighed: without it that of `emit`, or the
    framework that ran it; "any" lifts that.
    """
    check_frameworks(*frameworks, planned_for, emit)
    analysis = _analysed_as(run, asked, schedule)
    planned = analysis.plan(
        _stated(schedule, layers, memory_limit_bytes),
        planned_for=planned_for or emit,
        hold=hold,
        most_microbatches=most_microbatches,
    )
    return answer_plan(analysis, planned, frameworks=frameworks, emit_for=emit)


def simulate(  # noqa: PLR0913 (one argument a question)
    run: Analysis | Places,
    *,
    microbatches: int | None = None,
    hold: Hold | None = None,
    split: Sequence[int] | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
    overlap: bool | None = None,
    recompute: bool | None = None,
    hops: Sequence[str] = (),
    tokens: str | float | None = None,
    schedule_measured: str | None = None,
    layers: Sequence[int] | None = None,
    memory_limit_bytes: float | None = None,
    **asked: Any,
) -> SimulateAnswer:
    """Change one thing in a run, or several, and say what a batch would take.

    What is left out stays as it is. `schedule` is a name or an order of your own as CSV, `hops`
    are rates such as "2:3=5GB/s", `tokens` a microbatch are 4096 or "2x" as many; `hold` says what
    keeps its size when `microbatches` change: "microbatch" or "batch". What traces do not tell
    can be said as to `plan`, the schedule that ran as `schedule_measured`; of what `analyse`
    takes, all but `schedule` goes to it.
    """
    request = ChangeRequest(
        microbatches=microbatches,
        hold=hold,
        schedule=schedule,
        chunks=chunks,
        split=None if split is None else tuple(split),
        overlap=overlap,
        recompute=recompute,
        hops=tuple(hops),
        tokens=None if tokens is None else str(tokens),
    )
    analysis = _analysed_as(run, asked, schedule_measured)
    stated = _stated(schedule_measured, layers, memory_limit_bytes)
    return answer_simulate(analysis, analysis.what_if(request, stated), request)


def _stated(
    schedule: str | None, layers: Sequence[int] | None, limit_bytes: float | None
) -> Stated:
    known = None if layers is None else tuple(layers)
    return Stated(layers=known, limit_bytes=limit_bytes, schedule=schedule)


def _analysed_as(run: Analysis | Places, asked: dict[str, Any], schedule: str | None) -> Analysis:
    """Read a run, with the schedule that is said to have run."""
    stating = schedule is not None and not isinstance(run, Analysis)
    return _analysed(run, asked | {"schedule": schedule} if stating else asked)


def _analysed(run: Analysis | Places, asked: dict[str, Any]) -> Analysis:
    if isinstance(run, Analysis):
        if asked:
            raise TypeError(f"an Analysis has been asked already: {', '.join(asked)}")
        return run
    return analyse(run, **asked)


def picture(run: Analysis | Places, step: int | None = None, **asked: Any) -> str:
    """Draw a step of a run as SVG, or the first one: a lane a rank, waits hatched by cause."""
    analysis = _analysed(run, asked)
    return draw_svg(frame_of(analysis, step), say_bubble(analysis))
