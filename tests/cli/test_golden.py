"""The command line, word for word. `pytest --update-golden` writes what is printed now."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.services.console import Answer, matches, type_command

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.txt"))


def render(command: str, answer: Answer) -> str:
    return f"$ {command}\n{answer.text.rstrip()}\n[exit {answer.code}]\n"


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_the_command_line_answers_as_it_did(path, tmp_path, request):
    expected = path.read_text("utf-8")
    command = expected.splitlines()[0].removeprefix("$ ")
    printed = render(command, type_command(command, tmp_path))
    if request.config.getoption("--update-golden"):
        path.write_text(printed, "utf-8")
        return
    assert matches(expected, printed), printed


def test_there_are_golden_files():
    assert len(GOLDEN) >= 8
