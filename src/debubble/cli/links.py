"""`debubble links`: is it the wire? From traces, from logs of link tests, or measured here."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from debubble.cli.find import EXIT_FAILED
from debubble.cli.options import (
    exit_strictly,
    limits_from,
    output_options,
    print_answer,
    progress,
    trace_options,
)
from debubble.cli.plan import choose_figures
from debubble.errors import Gap, UsageError
from debubble.ledger.hop_health import judge_links
from debubble.links.expectation import Hop
from debubble.links.history import read_history
from debubble.links.judge import Past
from debubble.links.live.ladder import FEWEST_SAMPLES
from debubble.links.live.launch import run_here
from debubble.links.live.measured import is_measured, read_measured
from debubble.links.live.verdicts import judge_measured
from debubble.links.logs.pairs import doubts_about, pairs_in
from debubble.links.logs.read import load_json, looks_like_log, read_log, read_text
from debubble.links.wiring import parse_classes, read_topologies, read_wiring
from debubble.report.link_logs import logs_json, logs_page
from debubble.report.link_matrix import draw_matrix
from debubble.report.links import links_json, links_page
from debubble.report.live_links import live_json, live_page
from debubble.report.text import Page
from debubble.timeline.build import build_run
from debubble.trace.files import expand
from debubble.trace.run import find_run, read_run
from debubble.trace.source import Limits, Source

_PREFIX_BYTES = 64 * 1024


class WithDefault(click.Group):
    """`links TRACES` is `links read TRACES`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the default verb where none was typed."""
        if args and args[0] not in {*self.commands, *ctx.help_option_names}:
            args = ["read", *args]
        return super().parse_args(ctx, args)


@click.group(
    "links",
    cls=WithDefault,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
def command() -> None:
    """Tell whether it is the wire: each hop's time, its health, and what it costs the batch."""


@command.command("read")
@click.argument("places", nargs=-1, required=True, metavar="TRACES|LOGS...")
@click.option(
    "--history",
    "history_files",
    multiple=True,
    metavar="FILE",
    help="An earlier answer (--json) to hold hops against.",
)
@click.option(
    "--class",
    "classes",
    multiple=True,
    metavar="[A:B=]NAME",
    help="The kind of wire, of all hops or of one pair.",
)
@click.option(
    "--topology",
    "topology_files",
    multiple=True,
    metavar="FILE",
    help="What `nvidia-smi topo -m` or `nvlink -s` printed.",
)
@click.option("--pipeline", type=int, metavar="N", help="One pipeline alone, counted from 0.")
@click.option("--matrix", metavar="OUT", help="Write a picture of the rates, as SVG.")
@click.option("--force", is_flag=True, help="Let --matrix replace a file.")
@click.option(
    "--fail-on", type=click.Choice(["slow"]), help="Exit with 1 when a hop is slow: slow."
)
@trace_options
@output_options
def read(  # noqa: PLR0913 (one argument a flag)
    *,
    places: tuple[str, ...],
    history_files: tuple[str, ...],
    classes: tuple[str, ...],
    topology_files: tuple[str, ...],
    pipeline: int | None,
    matrix: str | None,
    force: bool,
    fail_on: str | None,
    capture: str | None,
    rank: int | None,
    max_inflated: str,
    max_ratio: float,
    as_json: bool,
    strict: bool,
    color: str,
    quiet: bool,
) -> None:
    """Judge the hops of a run from its TRACES, or from LOGS of link tests."""
    limits = limits_from(max_inflated, max_ratio)
    picture = _place_for(matrix, force=force)
    history = read_history(history_files)
    topologies, gaps = read_topologies(topology_files)
    kinds = {_kind_of(place, limits) for place in places}
    if len(kinds) > 1:
        raise UsageError("traces and logs are read apart", hint="give one kind in a command")
    words = " ".join(shlex.quote(word) for word in places)
    rates: dict[Hop, float] = {}
    slow: list[Hop] = []
    if kinds == {"log"}:
        logs = [read_log(read_text(place, limits), place) for place in places]
        ranks = sorted({one.rank for log in logs for one in getattr(log, "ranks", ())})
        every = [(here, there) for here in ranks for there in ranks if here != there]
        pairs = pairs_in(logs, classes=parse_classes(classes, every), history=history)
        gaps += doubts_about(logs)
        page = logs_page(logs, pairs, gaps, "" if quiet else "torchrun … -m debubble.links")
        data = logs_json(logs, pairs, gaps)
        for one in pairs:
            rates |= dict.fromkeys((one.pair, one.pair[::-1]), one.bytes_per_s)
            slow += [one.pair] if one.judgement.slow else []
    elif kinds == {"measured"}:
        if len(places) > 1:
            raise UsageError("one hop test at a time", hint="hold them apart with --history")
        page, data, rates, slow = _of_measured(places[0], classes, history, gaps, limits)
    else:
        found = find_run(places, capture=capture, limits=limits)
        with progress("reading", quiet=quiet) as show:
            run = read_run(found, limits=limits, rank=rank, on_progress=show)
        timeline = build_run(run)
        figures = choose_figures(timeline, pipeline)
        wiring = read_wiring(figures.ranks, classes, topologies)
        health = judge_links(timeline, figures, wiring, history)
        gaps = list(dict.fromkeys((*run.gaps, *timeline.gaps, *figures.gaps, *gaps)))
        page = links_page(health, gaps, "" if quiet else f"debubble find {words}")
        data = links_json(health, gaps)
        rates = {one.hop: one.times.bytes_per_s for one in health.hops if one.times.bytes_per_s}
        slow = [one.hop for one in health.slow]
    _draw(picture, rates, slow, quiet=quiet)
    print_answer(page, data, as_json=as_json, color=color)
    exit_strictly(tuple(gaps), strict=strict)
    if fail_on and slow:
        raise click.exceptions.Exit(EXIT_FAILED)


@command.command("run")
@click.option("--ranks", type=click.IntRange(min=2), default=2, show_default=True)
@click.option("--size", metavar="SIZE", help="What the job itself sends, such as 8MiB.")
@click.option("--largest", metavar="SIZE", default="64MiB", show_default=True)
@click.option(
    "--samples",
    type=click.IntRange(min=FEWEST_SAMPLES),
    default=FEWEST_SAMPLES,
    show_default=True,
    help="Messages of each size.",
)
@click.option("--all-pairs", is_flag=True, help="Every pair of ranks, not only neighbours.")
@click.option("--backend", type=click.Choice(["nccl", "gloo"]), help="By default as torch would.")
@click.option("--out", metavar="FILE", default="links.json", show_default=True)
@click.option("--matrix", metavar="OUT", help="Write a picture of the rates, as SVG.")
@click.option("--force", is_flag=True, help="Replace files.")
@click.option(
    "--fail-on", type=click.Choice(["slow"]), help="Exit with 1 when a hop is slow: slow."
)
@output_options
def run(  # noqa: PLR0913 (one argument a flag)
    *,
    ranks: int,
    size: str | None,
    largest: str,
    samples: int,
    all_pairs: bool,
    backend: str | None,
    out: str,
    matrix: str | None,
    force: bool,
    fail_on: str | None,
    as_json: bool,
    strict: bool,
    color: str,
    quiet: bool,
) -> None:
    """Measure the hops between ranks on this machine. On a cluster: torchrun … -m debubble.links."""
    picture, file = _place_for(matrix, force=force), _place_for(out, force=force)
    words = ["--largest", largest, "--samples", str(samples)]
    words += ["--size", size] if size else []
    words += ["--backend", backend] if backend else []
    words += ["--all-pairs"] if all_pairs else []
    words += ["--force"] if force else []
    with progress("measuring", quiet=quiet) as show:
        run_here(ranks, words, Path(out), on_progress=show)
    page, data, rates, slow = _of_measured(str(file), (), {}, [], limits_from("1GiB", 1000.0))
    page.next_command = "" if quiet else f"debubble links {shlex.quote(out)}"
    _draw(picture, rates, slow, quiet=quiet)
    print_answer(page, data, as_json=as_json, color=color)
    exit_strictly((), strict=strict)
    if fail_on and slow:
        raise click.exceptions.Exit(EXIT_FAILED)


def _of_measured(
    file: str,
    classes: Sequence[str],
    history: Mapping[Hop, Past],
    gaps: Sequence[Gap],
    limits: Limits,
) -> tuple[Page, dict[str, Any], dict[Hop, float], list[Hop]]:
    """Judge what a hop test wrote."""
    measured = read_measured(json.loads(read_text(file, limits)), file)
    ranks = [place.rank for place in measured.places]
    every = [(here, there) for here in ranks for there in ranks if here != there]
    stated = parse_classes(classes, every)
    hops = judge_measured(measured, classes=stated, history=history)
    return (
        live_page(measured, hops, gaps, ""),
        live_json(measured, hops, gaps),
        {one.hop: one.bytes_per_s for one in hops},
        [one.hop for one in hops if one.judgement.slow],
    )


def _kind_of(place: str, limits: Limits) -> str:
    """Tell what a word means: traces, a log of a link test, or what a hop test wrote."""
    files, named = expand([place])
    if not named or len(files) != 1:
        return "traces"
    start = Source(place, limits).prefix(_PREFIX_BYTES).decode("utf-8", errors="replace")
    if not start.lstrip().startswith("{"):
        return "log" if looks_like_log(start) else "traces"
    if '"traceEvents"' in start or len(start) >= _PREFIX_BYTES:
        return "traces"
    data = load_json(start)
    if is_measured(data):
        return "measured"
    return "log" if looks_like_log(start) else "traces"


def _place_for(out: str | None, *, force: bool) -> Path | None:
    if out is None:
        return None
    path = Path(out)
    if path.exists() and not force:
        raise UsageError(f"{out} is there already", hint="give another name, or --force")
    return path


def _draw(
    path: Path | None, rates: Mapping[Hop, float], slow: Sequence[Hop], *, quiet: bool
) -> None:
    if path is None:
        return
    ranks = sorted({rank for hop in rates for rank in hop})
    path.write_text(draw_matrix(ranks, rates, slow), "utf-8")
    if not quiet:
        click.echo(f"{path} written", err=True)
