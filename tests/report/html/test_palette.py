"""Colours are read by everyone: contrast, colour vision, and never colour alone."""

from __future__ import annotations

import re
from importlib.resources import files
from itertools import combinations

import numpy as np
import pytest

from debubble.ledger.causes import CAUSES, Cause
from debubble.report.html.palette import (
    CAUSE_LOOKS,
    DARK,
    KINDS,
    LIGHT,
    TEXT_ON,
    colours_of,
    palette_json,
)
from debubble.timeline.model import PassKind

# Machado, Oliveira and Fernandes 2009, severity 1: what people without one kind of cone see.
VISION = {
    "all cones": np.eye(3),
    "no red": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
         [-0.003882, -0.048116, 1.051998]]
    ),
    "no green": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
         [-0.011820, 0.042940, 0.968881]]
    ),
    "no blue": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
         [0.004733, 0.691367, 0.303900]]
    ),
}  # fmt: skip


def linear(colour):
    """The light of a colour: red, green and blue, 0 to 1."""
    parts = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    """As the Web Content Accessibility Guidelines define it."""
    light, dark = sorted(
        (float(linear(colour) @ (0.2126, 0.7152, 0.0722)) for colour in (one, other)), reverse=True
    )
    return (light + 0.05) / (dark + 0.05)


def lab(light):
    """Where a colour stands in CIELAB, in which distances are what people see."""
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    parts = (xyz @ np.clip(light, 0, 1)) / (0.9505, 1.0, 1.089)
    x, y, z = np.where(parts > 0.008856, np.cbrt(parts), 7.787 * parts + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_contrast_is_what_the_guidelines_say():
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("mode", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize(("ink", "ground"), TEXT_ON)
def test_text_can_be_read(mode, ink, ground):
    assert contrast(mode[ink], mode[ground]) >= 4.5


@pytest.mark.parametrize("kind", list(PassKind))
def test_names_can_be_read_on_passes_and_on_their_darker_shade(kind):
    look = KINDS[kind]
    darker = "#" + "".join(
        f"{round(int(look.fill[at : at + 2], 16) * 0.86):02x}" for at in (1, 3, 5)
    )
    assert contrast(look.ink, look.fill) >= 4.5
    assert contrast(look.ink, darker) >= 4.5


@pytest.mark.parametrize("vision", VISION)
def test_kinds_of_passes_differ_for_every_eye(vision):
    seen = {kind: lab(VISION[vision] @ linear(look.fill)) for kind, look in KINDS.items()}
    for one, other in combinations(seen, 2):
        assert np.linalg.norm(seen[one] - seen[other]) >= 15, (one, other)


def test_without_colour_kinds_have_stripes_and_causes_have_hatches():
    assert len({look.stripe for look in KINDS.values()}) == len(KINDS)
    hatches = [CAUSE_LOOKS[cause].hatch for cause in CAUSES]
    assert len(set(hatches)) == len(CAUSES)
    assert [cause for cause in CAUSES if not CAUSE_LOOKS[cause].hatch] == [Cause.COMPUTE]


@pytest.mark.parametrize("in_dark", [False, True])
def test_hatches_stand_out_from_their_ground(in_dark):
    for cause in CAUSES[1:]:
        fill, ink = colours_of(CAUSE_LOOKS[cause], in_dark=in_dark)
        assert contrast(fill, ink) >= 2.2, cause


def test_the_style_has_no_colour_of_its_own():
    assets = files("debubble.report.html") / "assets"
    assert not re.findall(r"#[0-9a-fA-F]{3,8}\b(?!\s*[{,])", (assets / "report.css").read_text())


def test_the_script_gets_causes_by_their_numbers():
    assert [one["key"] for one in palette_json()["causes"]] == list(CAUSES)
    assert [one["letter"] for one in palette_json()["kinds"]] == [kind.name for kind in PassKind]
