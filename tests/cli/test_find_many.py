"""`find` over more ranks than anyone reads one by one: one screen, with what stands out in it."""

from __future__ import annotations

import pytest
from support.services.console import type_command
from support.simulator.analysis import setup_of
from support.simulator.replicas import replicas_of, write_replicas

RANKS, REPLICAS, SLOW_STAGE = 20, 4, 13
BASE = setup_of("1f1b", RANKS, 4, fused=True, steps=4)
WEIGHTS = tuple(1.5 if stage == SLOW_STAGE else 1.0 for stage in range(RANKS))
SCREEN, DETAILS = 30, 85


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many")
    write_replicas(folder, replicas_of(BASE, REPLICAS, weights=WEIGHTS).play())
    return folder


@pytest.mark.slow
def test_the_answer_is_one_screen_and_names_what_stands_out(many):
    screen = type_command("debubble find . --quiet", many).text
    named = f"- Pipeline 3 (ranks 3-79, every 4th) slows the 3 others: its stage {SLOW_STAGE} "
    assert named in screen
    assert len(screen.splitlines()) <= SCREEN
    text = type_command("debubble find . --quiet --details", many).text
    assert named in text
    assert len(text.splitlines()) <= DETAILS
    stages = [line.split()[0] for line in text.splitlines() if " ± " in line]
    assert str(SLOW_STAGE) in stages
    assert "18 others" in text


@pytest.mark.slow
def test_pictures_hold_the_pipeline_that_is_shown(many, tmp_path):
    written = type_command(f"debubble find . --html {tmp_path}/a.html --svg {tmp_path}/a.svg", many)
    assert written.code == 0, written.text
    assert "<svg" in (tmp_path / "a.svg").read_text()
    assert (tmp_path / "a.html").stat().st_size < 6_000_000
