"""Colours: text can be read, and people who see colours differently tell passes apart."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from debubble.ledger.causes import Cause
from debubble.report.palette import CAUSES, DARK, KINDS, LABEL_INK, LIGHT
from debubble.timeline.model import PassKind

# WCAG 2.2: text, and parts of a picture.
TEXT, PARTS = 4.5, 3.0
# Machado, Oliveira and Fernandes (2009), full deficiency, in linear RGB.
SEEN_AS = {
    "normal": np.eye(3),
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritan": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
GROUNDS = [pytest.param(LIGHT, id="light"), pytest.param(DARK, id="dark")]
HELD = {Cause.COMPUTE, Cause.COLLECTIVE, Cause.COLLECTIVE_WAIT}
WAITS = [cause for cause in Cause if cause not in HELD]


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
def test_words_can_be_read_on_the_page(ground):
    assert contrast(ground.ink, ground.page) >= TEXT
    assert contrast(ground.muted, ground.page) >= TEXT


@pytest.mark.parametrize("kind", PassKind)
def test_numbers_can_be_read_on_passes(kind):
    assert contrast(LABEL_INK, KINDS[kind].colour) >= TEXT


@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.parametrize("cause", WAITS)
def test_hatches_can_be_seen_on_the_page(cause, ground):
    assert contrast(CAUSES[cause].colour, ground.page) >= PARTS


@pytest.mark.parametrize("eyes", SEEN_AS)
def test_kinds_of_passes_differ_for_all_eyes(eyes):
    seen = {kind: lab(np.array(SEEN_AS[eyes]) @ linear(KINDS[kind].colour)) for kind in PassKind}
    for one, other in combinations(PassKind, 2):
        assert np.linalg.norm(seen[one] - seen[other]) >= 15, (one, other)


def test_every_cause_has_a_look_and_waits_differ_without_colour():
    assert set(CAUSES) == set(Cause)
    hatches = [CAUSES[cause].hatch for cause in WAITS]
    assert all(hatches)
    assert len(set(hatches)) == len(hatches)


def test_no_two_causes_have_one_letter():
    signs = [cause.about.sign for cause in WAITS]
    assert all(signs)
    assert len(set(signs)) == len(signs)
