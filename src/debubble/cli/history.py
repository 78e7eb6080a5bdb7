"""`debubble history`: the record of measurements, by name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from debubble.cli.gates import with_tokens
from debubble.cli.options import (
    Manners,
    Reader,
    exit_strictly,
    output_options,
    print_answer,
    trace_options,
)
from debubble.errors import UsageError
from debubble.units import printable

if TYPE_CHECKING:
    from debubble.measure.store import Store


store_option = click.option("--store", metavar="URL", help="sqlite:///… or postgresql://…")


@click.group(
    "history",
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
)
@store_option
@output_options
@click.pass_context
def command(context: click.Context, *, store: str | None, manners: Manners) -> None:
    """Keep measurements by name, and hold later runs against them; alone, show the record."""
    if context.invoked_subcommand is None:
        _show_all(store, manners)


@command.command("add")
@click.argument("traces", nargs=-1, required=True)
@click.option("--name", required=True, help="What to call it; a name may hold several captures.")
@click.option("--tag", "tags", multiple=True, metavar="KEY=VALUE", help="More to remember.")
@click.option("--tokens", type=click.IntRange(min=1), metavar="N", help="Of a microbatch.")
@click.option("--pipeline", type=int, metavar="N", help="One pipeline alone, counted from 0.")
@store_option
@trace_options
@output_options
def add(  # noqa: PLR0913 (one argument a flag)
    *,
    traces: tuple[str, ...],
    name: str,
    tags: tuple[str, ...],
    tokens: int | None,
    pipeline: int | None,
    store: str | None,
    reader: Reader,
    manners: Manners,
) -> None:
    """Measure the run of TRACES and keep it."""
    from debubble.measure.store import Record
    from debubble.report.answers.compare import answer_history
    from debubble.report.compare import history_page
    from debubble.timeline.fleet.survey import Question

    check_name(name)
    pairs = parse_tags(tags)
    question = Question(pipeline=pipeline)
    measured = reader.analyse(traces, question, quiet=manners.quiet)
    gaps = measured.measured_warnings
    kept = with_tokens(measured.measurement, tokens)
    with opened(store) as history:
        now_s = time.time()
        number = history.add(name, kept, now_s=now_s, tags=pairs)
    record = Record(number=number, name=name, created_s=now_s, measurement=kept, tags=pairs)
    page = history_page([record])
    page.answer = f"Kept as {name}."
    page.next_command = "" if manners.quiet else "debubble history"
    page.gaps = list(gaps)
    print_answer(page, answer_history([record], gaps), manners)
    exit_strictly(gaps, manners)


@command.command("list")
@store_option
@output_options
def list_all(*, store: str | None, manners: Manners) -> None:
    """List all measurements, oldest first."""
    _show_all(store, manners)


def _show_all(store: str | None, manners: Manners) -> None:
    from debubble.report.answers.compare import answer_history
    from debubble.report.compare import history_page

    with opened(store, read_only=True) as history:
        records, damaged = history.readable_records()
    page = history_page(records)
    page.gaps = list(damaged)
    print_answer(page, answer_history(records, damaged), manners)
    exit_strictly(damaged, manners)


@command.command("show")
@click.argument("name")
@store_option
@output_options
def show(*, name: str, store: str | None, manners: Manners) -> None:
    """Show the measurements of one NAME; with --json every sample."""
    from debubble.report.answers.compare import answer_history
    from debubble.report.compare import history_page

    with opened(store, read_only=True) as history:
        records, damaged = history.readable_records(name)
        if not damaged:
            records = history.named(name)
    page = history_page(records)
    page.gaps = list(damaged)
    print_answer(page, answer_history(records, damaged, whole=True), manners)
    exit_strictly(damaged, manners)


@command.command("tag")
@click.argument("name")
@click.argument("tags", nargs=-1, required=True)
@store_option
def tag(*, name: str, tags: tuple[str, ...], store: str | None) -> None:
    """Tag the measurements of NAME: TAGS are KEY=VALUE."""
    pairs = parse_tags(tags)
    with opened(store) as history:
        count = history.tag(name, pairs)
    click.echo(f"{count} tagged.")


@command.command("export")
@click.option("--csv", "as_csv", is_flag=True, help="A row a step, instead of JSON.")
@store_option
def export(*, as_csv: bool, store: str | None) -> None:
    """Write every sample of every measurement to stdout."""
    from debubble.report.answers.compare import answer_history
    from debubble.report.compare import history_csv

    with opened(store, read_only=True) as history:
        records, damaged = history.readable_records()
    for gap in damaged:
        click.echo(f"warning: {printable(str(gap))}", err=True)
    if as_csv:
        click.echo(history_csv(records), nl=False)
        return
    click.echo(answer_history(records, damaged, whole=True).to_json())


@command.command("prune")
@click.option(
    "--keep", type=click.IntRange(min=0), required=True, metavar="N", help="Newest of each name."
)
@click.option("--name", help="Of this name alone.")
@store_option
def prune(*, keep: int, name: str | None, store: str | None) -> None:
    """Drop all but the newest measurements of each name."""
    with opened(store) as history:
        count = history.prune(keep=keep, name=name)
    click.echo(f"{count} dropped.")


def check_name(name: str) -> None:
    """Refuse what cannot be asked for as a name."""
    if not name.strip() or "," in name:
        raise UsageError("a name is a word without commas", hint="commas join names in compare")


def parse_tags(words: tuple[str, ...]) -> dict[str, str]:
    """Read `commit=abc`."""
    wrong = [word for word in words if not word.partition("=")[0] or "=" not in word]
    if wrong:
        raise UsageError(f"{wrong[0]!r} is no tag", hint="write it as commit=abc")
    return {word.partition("=")[0]: word.partition("=")[2] for word in words}


@contextmanager
def opened(url: str | None, *, read_only: bool = False) -> Iterator[Store]:
    """Lend the store at a URL, or the user's own."""
    from debubble.measure.store import Store, store_url

    store = Store(store_url(url), read_only=read_only)
    try:
        yield store
    finally:
        store.close()
