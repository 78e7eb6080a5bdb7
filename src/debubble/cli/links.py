"""`debubble links`: is it the wire? From traces, logs or a live test."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from debubble.cli.gates import judge_slow
from debubble.cli.options import (
    Manners,
    Reader,
    VerbGroup,
    finish,
    force_option,
    input_option,
    limit_option,
    output_option,
    output_options,
    pipeline_option,
    place_for,
    plain_output_options,
    progress,
    question_option,
    refuse_typed,
    trace_options,
)
from debubble.errors import DebubbleError, Gap, UsageError
from debubble.trace.source import DEFAULT_LIMITS, Source, expand

if TYPE_CHECKING:
    from debubble.analysis import Analysis
    from debubble.links.hop_times import Hop, LinkClass, Past, Verdict
    from debubble.report.answers.base import Answer, AnswerWarning
    from debubble.report.text import Page


_PREFIX_BYTES = 64 * 1024


def sort_places(places: Sequence[str]) -> tuple[str, list[str]]:
    """Return `traces`, `log` or `measured`, and the files of the latter two."""
    sorted_out = [_sort(place) for place in places]
    if len({kind for kind, _ in sorted_out}) > 1:
        raise UsageError("traces and logs are read apart", hint="give one kind in a command")
    return sorted_out[0][0], [file for _, files in sorted_out for file in files]


def _sort(place: str) -> tuple[str, list[str]]:
    """Tell what one word means. A folder with a trace in it is of traces, whatever is beside it."""
    files, named = expand([place])
    if named:
        return _kind_of(files[0]) or "traces", list(files)
    kinds: dict[str, list[str]] = {}
    for file in files:
        if _is_trace(file):
            return "traces", []
        if kind := _kind_of(file):
            kinds.setdefault(kind, []).append(file)
    if len(kinds) > 1:
        raise UsageError(
            f"{place}: logs of others and hop tests are read apart", hint="name the files"
        )
    return next(iter(kinds.items()), ("traces", []))


def _is_trace(file: str) -> bool:
    """Tell traces; what cannot be opened may be one, and reading it says why it cannot."""
    from debubble.trace.captures import recognise

    try:
        return recognise(file).is_trace
    except DebubbleError:
        return False


def _kind_of(file: str) -> str | None:
    """Tell a log of a link test, and what a hop test wrote, from all else."""
    from debubble.links.live import is_measured
    from debubble.links.logs.read import load_json, looks_like_log
    from debubble.links.logs.recorders import is_of_recorder

    try:
        start = Source(file).prefix(_PREFIX_BYTES).decode("utf-8", errors="replace")
    except DebubbleError:
        return None
    if not start.lstrip().startswith("{"):
        return "log" if looks_like_log(start) else None
    if '"traceEvents"' in start:
        return None
    if len(start) >= _PREFIX_BYTES:  # JSON of others is short, but for what recorders write
        return "log" if is_of_recorder(start) else None
    data = load_json(start)
    if is_measured(data):
        return "measured"
    return "log" if looks_like_log(start) else None


class WithDefault(VerbGroup):
    """`links TRACES` is `links read TRACES`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the default verb where none was typed."""
        if args and args[0] not in {*self.commands, *ctx.help_option_names}:
            args = ["read", *args]
        return super().parse_args(ctx, args)


fail_on_option = limit_option(
    "--fail-on", type=click.Choice(["slow"]), help="Verdict with which the exit code is 1: slow."
)


@click.group(
    "links",
    cls=WithDefault,
    examples=("debubble links traces/", "debubble links run --ranks 2 --size 8MiB"),
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
def command() -> None:
    """Judge each hop: its time and bandwidth, whether it is slow, and what it costs the batch."""


@command.command("read")
@click.argument("places", nargs=-1, required=True, metavar="TRACES|LOGS...")
@input_option(
    "--history",
    "history_files",
    multiple=True,
    metavar="FILE",
    help="Earlier answer (--json) to compare hops with.",
)
@input_option(
    "--class",
    "classes",
    multiple=True,
    metavar="[A:B=]NAME",
    help="Link type, of all hops or of one pair.",
)
@input_option(
    "--topology",
    "topology_files",
    multiple=True,
    metavar="FILE",
    help="Output of `nvidia-smi topo -m` or `nvlink -s`.",
)
@pipeline_option
@fail_on_option
@trace_options
@output_options
def read(  # noqa: PLR0913 (one argument a flag)
    *,
    places: tuple[str, ...],
    history_files: tuple[str, ...],
    classes: tuple[str, ...],
    topology_files: tuple[str, ...],
    pipeline: int | None,
    fail_on: str | None,
    reader: Reader,
    manners: Manners,
) -> None:
    """Judge the hops of a run from its TRACES, or from LOGS of link tests."""
    from debubble.analysis import Wires
    from debubble.links.wiring import read_history
    from debubble.timeline.fleet.survey import Question

    words = " ".join(shlex.quote(word) for word in places)
    known = _Known(classes=classes, history=read_history(history_files), topologies=topology_files)
    kind, files = sort_places(places)
    if kind != "traces":
        flags = ("--pipeline", "--capture")
        refuse_typed(flags, "is about traces, and these are logs", "leave it out")
    if kind == "log":
        answer = _of_logs(files, known)
    elif kind == "measured":
        answer = _of_measured(files, known)
    else:
        question = Question(pipeline=pipeline)
        wires = Wires(classes=classes, topologies=topology_files, history=known.history)
        analysis = reader.analyse(places, question, manners, wires)
        answer = _of_traces(analysis, words)
    _finish(answer, fail_on, manners)


@command.command("run")
@question_option(
    "--ranks",
    type=click.IntRange(min=2),
    default=2,
    show_default=True,
    help="Ranks to start on this machine.",
)
@question_option("--size", metavar="SIZE", help="Size of the job's own messages, such as 8MiB.")
@question_option(
    "--backend", type=click.Choice(["nccl", "gloo"]), help="Backend.  [default: torch's own]"
)
@output_option(
    "--out", metavar="FILE", default="links.json", show_default=True, help="File to write."
)
@force_option
@fail_on_option
@plain_output_options
def run(  # noqa: PLR0913 (one argument a flag)
    *,
    ranks: int,
    size: str | None,
    backend: str | None,
    out: str,
    force: bool,
    fail_on: str | None,
    manners: Manners,
) -> None:
    """Measure the hops between ranks on this machine. Elsewhere: torchrun … -m debubble.links."""
    from debubble.links.live import run_here

    file = place_for(out, force=force)
    words = ["--size", size] if size else []
    words += ["--backend", backend] if backend else []
    words += ["--force"] if force else []
    with progress("measuring", manners) as show:
        run_here(ranks, words, Path(out), on_progress=show)
    answer = _of_measured([str(file)], _Known())
    answer.page.next_command = f"debubble links {shlex.quote(out)}"
    _finish(answer, fail_on, manners)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What the user says of the wires."""

    classes: Sequence[str] = ()
    history: Mapping[Hop, Past] = field(default_factory=dict)
    topologies: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What is printed, and judged."""

    page: Page
    data: Answer | dict[str, Any]
    gaps: Sequence[Gap | AnswerWarning]
    verdicts: list[Verdict]
    absent: Sequence[int] = ()
    """Ranks of the pipeline that no trace is of: nothing is told of their hops."""


def _of_traces(analysis: Analysis, words: str) -> _Answer:
    from debubble.report.answers.links import answer_links, verdicts_of
    from debubble.report.links import links_page

    answer = answer_links(analysis)
    page = links_page(answer, f"debubble plan {words}")
    if len(analysis.pipelines) > 1:
        page.notes.insert(0, "the hops of another pipeline: --pipeline N")
    return _Answer(
        page=page,
        data=answer,
        gaps=answer.warnings,
        verdicts=verdicts_of(answer.hops),
        absent=analysis.pipeline.absent,
    )


def _of_logs(files: Sequence[str], known: _Known) -> _Answer:
    from debubble.links.logs.hops import hops_in
    from debubble.links.logs.read import read_log, read_text
    from debubble.report.answers.link_tests import answer_logs
    from debubble.report.links import logs_page

    logs = [read_log(read_text(file, DEFAULT_LIMITS), file) for file in (*files, *known.topologies)]
    ranks = sorted({rank for log in logs for rank in log.ranks})
    hops = hops_in(logs, classes=_classes_of(known, ranks), history=known.history)
    gaps = [gap for log in logs for gap in log.doubts]
    answer = answer_logs(logs, hops, gaps)
    return _Answer(
        page=logs_page(answer, "torchrun … -m debubble.links"),
        data=answer,
        gaps=gaps,
        verdicts=[hop.judgement.verdict for hop in hops],
    )


def _of_measured(files: Sequence[str], known: _Known) -> _Answer:
    from debubble.links.live import judge_measured, read_measured
    from debubble.links.logs.read import read_text
    from debubble.links.wiring import read_topologies
    from debubble.report.answers.link_tests import answer_live
    from debubble.report.links import live_page

    if len(files) > 1:
        raise UsageError("one hop test at a time", hint="hold it against others with --history")
    measured = read_measured(json.loads(read_text(files[0], DEFAULT_LIMITS)), files[0])
    classes = _classes_of(known, [place.rank for place in measured.places])
    hops = judge_measured(measured, classes=classes, history=known.history)
    _, gaps = read_topologies(known.topologies)
    answer = answer_live(measured, hops, gaps)
    return _Answer(
        page=live_page(answer),
        data=answer,
        gaps=tuple(gaps),
        verdicts=[hop.judgement.verdict for hop in hops],
    )


def _classes_of(known: _Known, ranks: Sequence[int]) -> dict[Hop, LinkClass]:
    from debubble.links.wiring import parse_classes

    every = [(here, there) for here in ranks for there in ranks if here != there]
    return parse_classes(known.classes, every)


def _finish(answer: _Answer, fail_on: str | None, manners: Manners) -> None:
    """Print; exit as the user asked."""
    page = answer.page
    page.next_command = manners.hint(page.next_command)
    finish(page, answer.data, manners)
    if fail_on:
        judge_slow(answer.verdicts, answer.gaps, answer.absent)
