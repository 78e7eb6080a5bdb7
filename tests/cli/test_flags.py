"""Flags that belong together reach a verb as one argument."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import click
import pytest
from click.testing import CliRunner

from debubble.cli import VERBS, plan, simulate
from debubble.cli.options import gathered, refuse_typed, typed_flags
from debubble.cli.planning import OF_SERVERS


@dataclass(frozen=True, kw_only=True)
class Inner:
    depth: int


@dataclass(frozen=True, kw_only=True)
class Outer:
    width: int
    inner: Inner


inner_options = gathered(
    "inner",
    Inner,
    click.option("--depth", type=int, default=1),
    click.option("--aside", default="nothing"),
)
outer_options = gathered(
    "outer", Outer, click.option("--width", type=int, default=2), inner_options
)


@click.command()
@click.option("--before", default="-")
@outer_options
@click.option("--after", default="-")
def verb(*, before, outer, aside, after):
    click.echo(f"{before} {outer.width} {outer.inner.depth} {aside} {after}")


def test_a_group_inside_a_group_is_one_argument_and_what_neither_names_is_another():
    said = ["--depth", "5", "--width", "7", "--aside", "x", "--before", "a", "--after", "b"]
    assert CliRunner().invoke(verb, said).output == "a 7 5 x b\n"
    assert CliRunner().invoke(verb, []).output == "- 2 1 nothing -\n"


def test_help_lists_options_in_the_order_in_which_they_are_written():
    assert [option.name for option in verb.params] == ["before", "width", "depth", "aside", "after"]


@pytest.mark.parametrize("verb", sorted(VERBS.keys() - {"mcp"}))  # a protocol has one form
def test_every_verb_can_be_pasted_and_read_by_a_program(verb):
    command = importlib.import_module(f"debubble.cli.{verb}").command
    inner = getattr(command, "commands", {}).values()
    flags = {flag for one in (command, *inner) for option in one.params for flag in option.opts}
    assert {"--markdown", "--json"} <= flags


def choose(*, quick, level):  # noqa: ARG001 (click hands them over)
    if quick:
        refuse_typed(("--level",), "is not for quick ones", "leave it out")
    click.echo(f"{typed_flags(('--quick', '--level', '-o'))}")


chooser = click.Command(
    "choose",
    callback=choose,
    params=[click.Option(["--quick"], is_flag=True), click.Option(["--level"], type=int)],
)


def test_what_was_typed_is_told_from_what_was_not():
    assert CliRunner().invoke(chooser, []).output == "{}\n"
    assert CliRunner().invoke(chooser, ["--level", "0"]).output == "{'--level': 0}\n"
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
