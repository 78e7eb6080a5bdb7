"""JSON of strangers: text that cannot stand is mended, numbers that cannot be held become infinite.

Used only where the fast, typed decoder says no, and for headers.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

# Python refuses to convert more than 4,300 digits; no number of a trace has more than 20.
_LONGEST_NUMBER = 400

# A pair of surrogates is one character; one alone is none, and cannot be printed.
_ESCAPE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)


def _whole(digits: str) -> int | float:
    if len(digits) <= _LONGEST_NUMBER:
        return int(digits)
    return -math.inf if digits.startswith("-") else math.inf


scan_json = json.JSONDecoder(parse_int=_whole).raw_decode


def mend_text(data: bytes) -> str:
    """Decode JSON text; bad UTF-8 and halves of surrogate pairs become U+FFFD."""
    text = data.decode("utf-8", "replace")
    if "\\u" not in text:
        return text
    return _ESCAPE.sub(lambda escape: r"\ufffd" if escape[1] else escape[0], text)


def load_json(text: str) -> Any:
    """Parse one JSON value that `mend_text` has gone over."""
    value, _ = scan_json(text.lstrip(" \t\r\n"))
    return value
