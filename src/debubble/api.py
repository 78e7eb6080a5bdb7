"""The Python API: one run in → an `Analysis`, and each verb's answer.

    import debubble

    found = debubble.find("traces")
    found.numbers.bubble_fraction
    found.to_frame("ledger")

What `debubble.__all__` lists is stable: names and arguments stay within a major version, answers
keep their fields within a schema number. Answers show themselves in a notebook.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike, fspath
from typing import Any

from debubble.analysis import Analysis, Wires, analyse_found
from debubble.answers.base import Answer
from debubble.answers.compare import CompareAnswer, answer_compare
from debubble.answers.find import FindAnswer, answer_find
from debubble.answers.links import LinksAnswer, answer_links
from debubble.fleet.question import Question
from debubble.fleet.survey import Means
from debubble.links.history import read_history
from debubble.measure.compare import DEFAULT_THRESHOLD
from debubble.measure.compare import compare as compare_runs
from debubble.report.compare import compare_page
from debubble.report.find import find_page
from debubble.report.html.page import notebook_markup
from debubble.report.links import links_page
from debubble.report.text import Page
from debubble.schedules import state_schedule
from debubble.trace.digest.place import place_digests
from debubble.trace.engine import engine_at
from debubble.trace.run import find_run

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
    chunks: int | None = None,
    classes: Sequence[str] = (),
    topologies: Sequence[str] = (),
    history: Sequence[str] = (),
    engine: str = "local",
    digest: str | None = None,
) -> Analysis:
    """Read one run; its facts are worked out when they are asked for, each once."""
    places = [paths] if isinstance(paths, str | PathLike) else list(paths)
    words = [fspath(place) for place in places]
    found = find_run(words, capture=capture)
    files = [file.file for each in found.captures for file in each.files]
    means = Means(
        engine=engine_at(engine),
        rank=rank,
        digests=None if digest is None else place_digests(digest, words, files),
    )
    question = Question(
        pipeline=pipeline,
        step=step,
        statement=None if schedule is None else state_schedule(schedule, chunks),
    )
    wires = Wires(classes=classes, topologies=topologies, history=read_history(history))
    return analyse_found(found, question, means, wires)


def find(run: Analysis | Places, **asked: Any) -> FindAnswer:
    """Say what the bubble is, why, and whose it is; takes what `analyse` takes."""
    return answer_find(_analysed(run, asked))


def links(run: Analysis | Places, **asked: Any) -> LinksAnswer:
    """Say whether it is the wire; takes what `analyse` takes."""
    return answer_links(_analysed(run, asked))


def compare(
    before: Analysis | Places,
    after: Analysis | Places,
    *,
    threshold: float = DEFAULT_THRESHOLD,
    target_batch: float | None = None,
    limit_bytes: int | None = None,
) -> CompareAnswer:
    """Hold the run after a change against the one before: three numbers, one verdict."""
    runs = [_analysed(run, {}) for run in (before, after)]
    found = compare_runs(
        *(run.measurement for run in runs),
        threshold=threshold,
        target_batch=target_batch,
        limit_bytes=limit_bytes,
    )
    gaps = dict.fromkeys(gap for run in runs for gap in run.measured_warnings)
    return answer_compare(found, tuple(gaps))


def _analysed(run: Analysis | Places, asked: dict[str, Any]) -> Analysis:
    if isinstance(run, Analysis):
        if asked:
            raise TypeError(f"an Analysis has been asked already: {', '.join(asked)}")
        return run
    return analyse(run, **asked)


def _draw_with(page: Callable[[Any], Page]) -> Callable[[Any], str]:
    return lambda answer: notebook_markup(page(answer))


Answer.drawn |= {
    FindAnswer: _draw_with(find_page),
    LinksAnswer: _draw_with(links_page),
    CompareAnswer: _draw_with(compare_page),
}
