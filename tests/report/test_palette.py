"""Colours: text can be read, and people who see colours differently tell passes apart."""

from __future__ import annotations

import re
from importlib.resources import files
from itertools import combinations

import numpy as np
import pytest

from debubble.ledger.causes import Cause
from debubble.report.palette import DARK, KINDS, LABEL_INK, LIGHT, colours_of, hatch_path
from debubble.timeline.model import PassKind

# WCAG 2.2: text; hatches carry no text and lie on a fill of their own.
TEXT, HATCH = 4.5, 2.2
# Machado, Oliveira and Fernandes (2009), full deficiency, in linear RGB.
SEEN_AS = {
    "normal": np.eye(3),
    "protan": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
         [-0.003882, -0.048116, 1.051998]]
    ),
    "deutan": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
         [-0.011820, 0.042940, 0.968881]]
    ),
    "tritan": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
         [0.004733, 0.691367, 0.303900]]
    ),
}  # fmt: skip
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


def lab(rgb):
    xyz = TO_XYZ @ np.clip(rgb, 0, 1) / TO_XYZ.sum(axis=1)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_the_measure_of_contrast_is_the_known_one():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


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


@pytest.mark.parametrize("eyes", SEEN_AS)
def test_kinds_of_passes_differ_for_all_eyes(eyes):
    seen = {kind: lab(SEEN_AS[eyes] @ linear(KINDS[kind].fill)) for kind in PassKind}
    for one, other in combinations(PassKind, 2):
        assert np.linalg.norm(seen[one] - seen[other]) >= 15, (one, other)


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
