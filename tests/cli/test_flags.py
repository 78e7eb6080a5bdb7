"""Flags that belong together reach a verb as one argument."""

from __future__ import annotations

import importlib

import click
import pytest
from click.testing import CliRunner

from debubble.cli import VERBS, plan, simulate
from debubble.cli.options import (
    Verb,
    gathered,
    output_option,
    question_option,
    refuse_typed,
    typed_flags,
)
from debubble.cli.planning import OF_SERVERS


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


# A protocol has one form, and a service answers on its page.
@pytest.mark.parametrize("verb", sorted(VERBS.keys() - {"mcp", "watch"}))
def test_every_verb_can_be_pasted_and_read_by_a_program(verb):
    command = importlib.import_module(f"debubble.cli.{verb}").command
    inner = getattr(command, "commands", {}).values()
    flags = {flag for one in (command, *inner) for option in one.params for flag in option.opts}
    assert {"--markdown", "--json"} <= flags


@click.command(cls=Verb)
@question_option("--quick", is_flag=True)
@question_option("--level", type=int)
def chooser(*, quick, level):  # noqa: ARG001 (click hands them over)
    if quick:
        refuse_typed(("--level",), "is not for quick ones", "leave it out")
    click.echo(f"{typed_flags(('--quick', '--level', '-o'))}")


def test_what_was_typed_is_told_from_what_was_not():
    assert CliRunner().invoke(chooser, []).output == "{}\n"
    assert CliRunner().invoke(chooser, ["--level", "0"]).output == "{'--level': '0'}\n"
    both = ["--quick", "--level", "3"]
    assert "--level is not for quick ones" in str(CliRunner().invoke(chooser, both).exception)


@pytest.mark.parametrize(
    ("verb", "flags"),
    [
        (plan.command, {*plan._DECIDING, *plan._OF_STEPS}),
        (simulate.command, {*simulate._OF_BOTH, *simulate._OF_RUNS, *simulate._BY_HAND}),
        (simulate.command, set(OF_SERVERS)),
    ],
    ids=["plan", "simulate", "servers"],
)
def test_flags_that_are_refused_or_repeated_are_flags_of_their_verb(verb, flags):
    assert flags <= {option.opts[0] for option in verb.params}
