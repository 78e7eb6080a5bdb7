"""Flags that belong together reach a verb as one argument."""

from __future__ import annotations

import click
from click.testing import CliRunner

from debubble.cli.options import (
    SERVERS,
    STEPS,
    Verb,
    gathered,
    output_option,
    question_option,
    refuse_others,
    typed_questions,
)


@click.command(cls=Verb)
@output_option("--out", help="File to write.")
@gathered(
    "size",
    lambda *, width, depth: width * depth,
    question_option("--width", type=int, default=2, help="Width."),
    question_option("--depth", type=int, default=1, help="Depth."),
)
def verb(*, out, size):
    click.echo(f"{out} {size}")


def test_options_that_belong_together_are_one_argument():
    assert (
        CliRunner().invoke(verb, ["--depth", "5", "--out", "a", "--width", "7"]).output == "a 35\n"
    )
    assert CliRunner().invoke(verb, []).output == "None 2\n"


def test_help_lists_options_by_heading_in_the_order_in_which_they_are_written():
    said = CliRunner().invoke(verb, ["--help"]).output
    words = ["Question:", "--width", "--depth", "Output:", "--out", "--help"]
    assert [said.find(word) for word in words] == sorted(said.find(word) for word in words)
    assert "Limits" not in said


@click.command(cls=Verb)
@question_option("--step", of=(STEPS,), type=int)
@question_option("--load", of=(SERVERS,))
@question_option("--layers", type=int)
@output_option("--out")
def chooser(*, step, load, layers, out):  # noqa: ARG001 (click hands them over)
    refuse_others(STEPS)
    click.echo(typed_questions())


def test_what_was_asked_is_written_again_and_what_is_about_something_else_is_refused():
    assert CliRunner().invoke(chooser, []).output == "\n"
    words = ["--layers", "0", "--out", "a", "--step", "3"]
    assert CliRunner().invoke(chooser, words).output == "--layers 0 --step 3\n"
    refused = CliRunner().invoke(chooser, ["--load", "x"]).exception
    assert str(refused) == "--load is only for servers"
