"""`debubble history`: the record of measurements, by name."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import click

from debubble.cli.options import (
    Manners,
    Reader,
    VerbGroup,
    finish,
    input_option,
    limit_option,
    output_options,
    pipeline_option,
    plain_output_options,
    store_option,
    trace_options,
)
from debubble.errors import Gap, MissingExtra, RunNotFound, StoreError, UsageError
from debubble.units import printable

if TYPE_CHECKING:
    from debubble.measure.measurement import Measurement, Record
    from debubble.measure.prediction import Prediction
    from debubble.measure.store import Store


@click.group(
    "history",
    cls=VerbGroup,
    examples=("debubble history add traces/ --name main", "debubble history show main"),
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
)
@store_option
@plain_output_options
@click.pass_context
def command(context: click.Context, *, store: str | None, manners: Manners) -> None:
    """Keep measurements by name, to compare later runs with; alone, list them."""
    if context.invoked_subcommand is None:
        with opened(store, read_only=True) as history:
            records, damaged = history.readable_records()
        _print_records(records, damaged, manners)
    elif store is not None:  # what is given before the subcommand holds for it
        context.default_map = {name: {"store": store} for name in command.commands}


@command.command("add")
@click.argument("traces", nargs=-1, required=True)
@input_option(
    "--name", required=True, help="Name of the measurement; it may hold several captures."
)
@input_option("--tag", "tags", multiple=True, metavar="KEY=VALUE", help="Tag of the measurement.")
@pipeline_option
@store_option
@trace_options
@output_options
def add(  # noqa: PLR0913 (one argument a flag)
    *,
    traces: tuple[str, ...],
    name: str,
    tags: tuple[str, ...],
    pipeline: int | None,
    store: str | None,
    reader: Reader,
    manners: Manners,
) -> None:
    """Measure the run of TRACES and keep it."""
    from debubble.measure.measurement import Record
    from debubble.report.answers.compare import answer_history
    from debubble.report.compare import history_page
    from debubble.timeline.fleet.survey import Question

    check_name(name)
    pairs = parse_tags(tags)
    measured = reader.analyse(traces, Question(pipeline=pipeline), manners)
    gaps = measured.measured_warnings
    kept, now_s = measured.measurement, time.time()
    with opened(store) as history:
        number = history.add(name, kept, now_s=now_s, tags=pairs)
    record = Record(number=number, name=name, created_s=now_s, measurement=kept, tags=pairs)
    answer = answer_history([record], gaps)
    # A URL with a user may hold a password.
    place = "" if store is None else f" --store {'URL' if '@' in store else shlex.quote(store)}"
    page = history_page(answer, manners.hint(f"debubble history{place}"))
    page.answer = f"Kept as {name}."
    finish(page, answer, manners)


@command.command("show")
@click.argument("name")
@store_option
@plain_output_options
def show(*, name: str, store: str | None, manners: Manners) -> None:
    """Show the measurements of one NAME; with --json every sample."""
    with opened(store, read_only=True) as history:
        records, damaged = history.readable_records(name)
        if not damaged:
            records = history.named(name)
    _print_records(records, damaged, manners, whole=True)


def _print_records(
    records: Sequence[Record], damaged: Sequence[Gap], manners: Manners, *, whole: bool = False
) -> None:
    from debubble.report.answers.compare import answer_history
    from debubble.report.compare import history_page

    answer = answer_history(records, damaged, whole=whole)
    finish(history_page(answer), answer, manners)


@command.command("prune")
@limit_option(
    "--keep",
    type=click.IntRange(min=0),
    required=True,
    metavar="N",
    help="Measurements of each name to keep: the newest.",
)
@input_option("--name", help="Name to prune; all without.")
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


def parse_tags(words: tuple[str, ...], written: str = "commit=abc") -> dict[str, str]:
    """Read `commit=abc`."""
    pairs = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not (key and sign):
            raise UsageError(f"{word!r} is no tag", hint=f"write it as {written}")
        pairs[key] = value
    return pairs


@contextmanager
def opened(url: str | None, *, read_only: bool = False) -> Iterator[Store]:
    """Lend the store at a URL, or the user's own."""
    from debubble.measure.store import Store, store_url

    with closing(Store(store_url(url), read_only=read_only)) as store:
        yield store


@contextmanager
def opened_if_any(url: str | None) -> Iterator[Store | None]:
    """Lend the store to read; None where nobody named one and none was kept, nor could be."""
    try:
        from debubble.measure.store import user_file
    except MissingExtra:
        if url is not None:
            raise
        yield None
        return
    if url is None and not user_file().exists():
        yield None
        return
    with opened(url, read_only=True) as store:
        yield store


def recall(name: str, stated: str | None) -> list[Measurement]:
    """Return what the history holds under a name; nothing where there is no history at all."""
    if os.path.lexists(name) or "://" in name:
        return []
    with opened_if_any(stated) as store:
        try:
            return [] if store is None else [record.measurement for record in store.named(name)]
        except RunNotFound:
            return []


def recall_predictions(runs: Sequence[Measurement], stated: str | None) -> tuple[Prediction, ...]:
    """Return what the history holds of changes to runs; nothing where there is no history."""
    try:
        with opened_if_any(stated) as store:
            if store is None:
                return ()
            return tuple(kept for run in runs for kept in store.predicted_of(run))
    except StoreError as error:
        if stated is not None:
            raise
        # Nobody asked for it: runs can be compared without.
        click.echo(f"warning: no predictions: {printable(str(error))}", err=True)
        return ()
