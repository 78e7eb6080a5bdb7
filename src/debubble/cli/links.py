"""`debubble links`: is it the wire? From traces, logs or a live test."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

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
from debubble.errors import DebubbleError, UsageError
from debubble.trace.source import Source, expand

if TYPE_CHECKING:
    from debubble.analysis import Wires
    from debubble.links.hop_times import Hop, LinkClass
    from debubble.report.answers.link_tests import LiveAnswer, LogsAnswer
    from debubble.report.answers.links import LinksAnswer
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
    from debubble.links.logs.hops import hops_in
    from debubble.links.logs.read import read_log, read_text
    from debubble.links.wiring import read_history
    from debubble.report.answers.link_tests import answer_logs
    from debubble.report.answers.links import answer_links
    from debubble.report.links import links_page, logs_page
    from debubble.timeline.fleet.survey import Question

    known = Wires(classes=classes, topologies=topology_files, history=read_history(history_files))
    kind, files = sort_places(places)
    if kind == "traces":
        analysis = reader.analyse(places, Question(pipeline=pipeline), manners, known)
        answer = answer_links(analysis)
        words = " ".join(shlex.quote(word) for word in places)
        page = links_page(answer, f"debubble plan {words}")
        if len(analysis.pipelines) > 1:
            page.notes.insert(0, "the hops of another pipeline: --pipeline N")
        _finish(page, answer, fail_on, manners, analysis.pipeline.absent)
        return
    flags = ("--pipeline", "--capture")
    refuse_typed(flags, "is about traces, and these are logs", "leave it out")
    if kind == "measured":
        page, measured = _of_measured(files, known)
        _finish(page, measured, fail_on, manners)
    else:
        logs = [read_log(read_text(file), file) for file in (*files, *topology_files)]
        stated = _classes_of(known, {rank for log in logs for rank in log.ranks})
        hops = hops_in(logs, classes=stated, history=known.history)
        logged = answer_logs(logs, hops, [gap for log in logs for gap in log.doubts])
        _finish(logs_page(logged, "torchrun … -m debubble.links"), logged, fail_on, manners)


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
    from debubble.analysis import Wires
    from debubble.links.live import run_here

    file = place_for(out, force=force)
    words = ["--size", size] if size else []
    words += ["--backend", backend] if backend else []
    words += ["--force"] if force else []
    with progress("measuring", manners) as show:
        run_here(ranks, words, Path(out), on_progress=show)
    page, answer = _of_measured([str(file)], Wires())
    page.next_command = f"debubble links {shlex.quote(out)}"
    _finish(page, answer, fail_on, manners)


def _of_measured(files: Sequence[str], known: Wires) -> tuple[Page, LiveAnswer]:
    from debubble.links.live import judge_measured, read_measured
    from debubble.links.logs.read import read_text
    from debubble.links.wiring import read_topologies
    from debubble.report.answers.link_tests import answer_live
    from debubble.report.links import live_page

    if len(files) > 1:
        raise UsageError("one hop test at a time", hint="hold it against others with --history")
    measured = read_measured(json.loads(read_text(files[0])), files[0])
    classes = _classes_of(known, {place.rank for place in measured.places})
    hops = judge_measured(measured, classes=classes, history=known.history)
    answer = answer_live(measured, hops, read_topologies(known.topologies)[1])
    return live_page(answer), answer


def _classes_of(known: Wires, ranks: Collection[int]) -> dict[Hop, LinkClass]:
    from debubble.links.wiring import parse_classes

    every = [(here, there) for here in ranks for there in ranks if here != there]
    return parse_classes(known.classes, every)


def _finish(
    page: Page,
    answer: LinksAnswer | LogsAnswer | LiveAnswer,
    fail_on: str | None,
    manners: Manners,
    absent: Sequence[int] = (),
) -> None:
    """Print; exit as the user asked. Of the hops of ranks that are `absent` nothing is told."""
    from debubble.report.answers.links import verdicts_of

    page.next_command = manners.hint(page.next_command)
    finish(page, answer, manners)
    if fail_on:
        judge_slow(verdicts_of(answer.hops), answer.warnings, absent)
