"""Colours: text can be read, and people who see colours differently tell passes apart."""

from __future__ import annotations

import re
from importlib.resources import files

import numpy as np
import pytest

from debubble.ledger.causes import Cause
from debubble.report.palette import DARK, KINDS, LABEL_INK, LIGHT, colours_of, hatch_path
from debubble.timeline.model import PassKind

# WCAG 2.2: text; hatches carry no text and lie on a fill of their own.
TEXT, HATCH = 4.5, 2.2
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
GROUNDS = [pytest.param(LIGHT, id="light"), pytest.param(DARK, id="dark")]
HELD = {Cause.COMPUTE, Cause.COLLECTIVE, Cause.COLLECTIVE_WAIT}
WAITS = [cause for cause in Cause if cause not in HELD]
TEXT_ON = [
    *(("text", ground) for ground in ("ground", "panel")),
    *((ink, on) for ink in ("muted", "accent", "good", "bad") for on in ("ground", "panel")),
]


def linear(colour):
    parts = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    low, high = sorted(float(TO_XYZ[1] @ linear(colour)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.parametrize(("ink", "on"), TEXT_ON)
def test_text_can_be_read(ground, ink, on):
    assert contrast(ground[ink], ground[on]) >= TEXT


@pytest.mark.parametrize("kind", PassKind)
def test_names_can_be_read_on_passes_and_on_their_darker_shade(kind):
    fill = KINDS[kind].fill
    darker = "#" + "".join(f"{round(int(fill[at : at + 2], 16) * 0.86):02x}" for at in (1, 3, 5))
    assert contrast(LABEL_INK, fill) >= TEXT
    assert contrast(LABEL_INK, darker) >= TEXT


@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.parametrize("cause", WAITS)
def test_hatches_can_be_seen(cause, ground):
    assert contrast(*colours_of(cause, in_dark=ground is DARK)) >= HATCH


def test_passes_and_waits_differ_without_colour():
    assert len({look.stripe for look in KINDS.values()}) == len(PassKind)
    hatches = [hatch_path(cause) for cause in Cause]
    assert [cause for cause, path in zip(Cause, hatches, strict=True) if not path] == ["compute"]
    signs = [cause.about.sign for cause in WAITS]
    assert all(signs)
    for different in (hatches, signs):
        assert len(set(different)) == len(different)


def test_the_style_of_the_report_has_no_colour_of_its_own():
    style = (files("debubble.report.html") / "assets" / "report.css").read_text()
    assert not re.findall(r"#[0-9a-fA-F]{3,8}\b(?!\s*[{,])", style)
