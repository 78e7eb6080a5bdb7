"""The JSON Schemas that are shipped are those of the answers."""

from __future__ import annotations

import pytest

from debubble.report.answers.schema import ANSWERS, FOLDER, schema_of


@pytest.mark.parametrize("verb", ANSWERS)
def test_the_schema_that_is_shipped_is_that_of_the_answer(verb):
    shipped = (FOLDER / f"{verb}.json").read_text("utf-8")
    assert shipped == schema_of(verb), "run python -m debubble.report.answers.schema"


def test_no_schema_is_left_over():
    assert {file.stem for file in FOLDER.iterdir()} == set(ANSWERS)
