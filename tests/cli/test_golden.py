"""The command line, word for word. `pytest --update-golden` writes what is printed now."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.services.console import Answer, matches, type_command

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.txt"))


# Of JSON the figures are kept, rounded: its fields are held by the schemas that are shipped.
DIGITS = 4
# Where to look in a trace: many, and all of one kind.
LEFT_OUT = {"examples", "culprits"}


def figures(data: object, path: str = "") -> Iterator[str]:
    """Write each value of an answer in a line of its own, floats rounded."""
    if isinstance(data, dict):
        for name, value in data.items():
            if name not in LEFT_OUT:
                yield from figures(value, f"{path}.{name}" if path else name)
    elif isinstance(data, list) and any(isinstance(value, dict | list) for value in data):
        for number, value in enumerate(data):
            yield from figures(value, f"{path}[{number}]")
    else:
        values = data if isinstance(data, list) else [data]
        short = [float(f"{one:.{DIGITS}g}") if isinstance(one, float) else one for one in values]
        yield f"{path} = {json.dumps(short if isinstance(data, list) else short[0])}"


def render(command: str, answer: Answer) -> str:
    text = answer.text.rstrip()
    if " --json" in command and text.startswith("{"):
        data, end = json.JSONDecoder().raw_decode(text)
        text = "\n".join(figures(data)) + text[end:]
    return f"$ {command}\n{text}\n[exit {answer.code}]\n"


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
