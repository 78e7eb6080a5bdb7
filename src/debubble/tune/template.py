"""A command with placeholders in → the command for one setting out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from debubble.errors import UsageError
from debubble.tune.setting import KNOBS, Setting

# `{split}`; braces around anything else, as in JSON, are left alone, and `{{split}}` is `{split}`.
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}|\{([A-Za-z_]\w*)\}")
PREFIX = "DEBUBBLE_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """The user's command, and what it is told as things are now."""

    words: tuple[str, ...]
    now: Setting

    def fill(self, setting: Setting) -> tuple[str, ...]:
        """Return the command for a setting."""

        def value(found: re.Match[str]) -> str:
            return f"{{{found[1]}}}" if found[1] else setting.written(found[2])

        return tuple(_PLACEHOLDER.sub(value, word) for word in self.words)

    def environment(self, setting: Setting, given: Mapping[str, str]) -> dict[str, str]:
        """Return the environment for a setting: every knob is there too, as DEBUBBLE_SPLIT."""
        told = {f"{PREFIX}{knob.upper()}": setting.written(knob) for knob in setting.knobs()}
        return {**given, **told}


def read_template(words: Sequence[str], now: Setting) -> Template:
    """Check that every placeholder is known and has a value."""
    if not words:
        raise UsageError(
            "no command to tune",
            hint="debubble tune --now microbatches=4 -- COMMAND {microbatches}",
        )
    found = [match[2] for word in words for match in _PLACEHOLDER.finditer(word) if match[2]]
    for name in found:
        if name not in KNOBS:
            known = ", ".join(f"{{{knob}}}" for knob in KNOBS)
            raise UsageError(
                f"no placeholder is called {{{name}}}",
                hint=f"one of {known}; write {{{{{name}}}}} where the command itself has braces",
            )
        if getattr(now, name) is None:
            raise UsageError(
                f"what {{{name}}} is now was not said", hint=f"add --now {name}={_EXAMPLES[name]}"
            )
    if not now.knobs():
        raise UsageError(
            "the command has no placeholders, so nothing can be tried",
            hint="write {microbatches} where its number stands, and say --now microbatches=4; "
            "a command that reads DEBUBBLE_MICROBATCHES needs --now alone",
        )
    return Template(words=tuple(words), now=now)


_EXAMPLES = {"microbatches": "4", "split": "4,4,4,4", "schedule": "1f1b", "overlap": "0"}
