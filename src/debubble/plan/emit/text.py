"""How pasted text is laid out: comments above, then one flag a line, or Python."""

from __future__ import annotations

from collections.abc import Sequence


def comment(*lines: str) -> str:
    """Write each line as a comment, for shell, YAML and Python alike."""
    return "".join(f"# {line}\n" for line in lines)


def flags(words: Sequence[str]) -> str:
    """Write the flags of a launch line, one a line, to stand at its end."""
    return " \\\n".join(words) + "\n"
