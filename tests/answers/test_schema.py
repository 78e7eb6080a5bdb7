"""The JSON Schemas that are shipped are those of the answers."""

from __future__ import annotations

import json
import re

import pytest
from support.services.console import REPOSITORY

from debubble.report.answers.schema import ANSWERS, FOLDER, schema_of


@pytest.mark.parametrize("verb", ANSWERS)
def test_the_schema_that_is_shipped_is_that_of_the_answer(verb):
    shipped = (FOLDER / f"{verb}.json").read_text("utf-8")
    assert shipped == schema_of(verb), "run python -m debubble.report.answers.schema"


# Of logs and of records some fields are the tools' own, and the store's.
@pytest.mark.parametrize("verb", sorted({*ANSWERS} - {"links-logs", "links-measured", "history"}))
def test_every_field_is_documented(verb):
    page = (REPOSITORY / "docs" / "reference" / "json.md").read_text("utf-8")
    parts = json.loads(schema_of(verb))["$defs"].values()
    fields = {field for part in parts for field in part.get("properties", {})}
    assert fields <= set(re.findall(r"\w+", page))


def test_no_schema_is_left_over():
    assert {file.stem for file in FOLDER.iterdir()} == set(ANSWERS)
