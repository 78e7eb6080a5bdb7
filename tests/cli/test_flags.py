"""Flags that belong together reach a verb as one argument."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import click
import pytest
from click.testing import CliRunner

from debubble.cli import VERBS
from debubble.cli.options import gathered


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
