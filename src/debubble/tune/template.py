"""A command with placeholders in → the command for one setting out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from debubble.errors import UsageError
from debubble.plan.emit.layer_layout import write_layout
from debubble.plan.emit.module_names import Names, modules_of_stages
from debubble.plan.emit.torch_rules import TORCH_SCHEDULES
from debubble.tune.setting import KNOBS, Setting

# `{split}`, or `{split:megatron}` as that framework writes it; braces around anything else, as in
# JSON, are left alone, and `{{split}}` is `{split}`.
_PLACEHOLDER = re.compile(r"\{\{(\w+(?::\w+)?)\}\}|\{([A-Za-z_]\w*)(?::(\w+))?\}")
PREFIX = "DEBUBBLE_"
_TITAN = Names(before=("tok_embeddings",), layer="layers.", after=("norm", "output"))


def _torch_name(setting: Setting) -> str:
    """Return torch's name of a schedule, else ours: an order file of that name may be there."""
    known = TORCH_SCHEDULES.get(setting.schedule or "")
    return known.name if known else str(setting.schedule)


def _titan_modules(setting: Setting) -> str:
    stages = modules_of_stages(setting.split or (), _TITAN)
    return " ".join(",".join(stage) for stage in stages)


WRITERS: dict[tuple[str, str], Callable[[Setting], str]] = {
    ("split", "megatron"): lambda setting: write_layout(setting.split or ()),
    ("split", "torchtitan"): _titan_modules,
    ("schedule", "torch"): _torch_name,
    ("schedule", "torchtitan"): _torch_name,
}
"""How frameworks write a knob, where they do not write it as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """The user's command, and what it is told as things are now."""

    words: tuple[str, ...]
    now: Setting

    def fill(self, setting: Setting) -> tuple[str, ...]:
        """Return the command for a setting."""

        def value(found: re.Match[str]) -> str:
            if found[1]:
                return f"{{{found[1]}}}"
            if found[3]:
                return WRITERS[found[2], found[3]](setting)
            return setting.written(found[2])

        filled: list[str] = []
        for word in self.words:
            alone = _PLACEHOLDER.fullmatch(word)
            text = _PLACEHOLDER.sub(value, word)
            # What a framework takes as several words is several, where it stands by itself.
            filled += text.split(" ") if alone is not None and alone[3] else [text]
        return tuple(filled)

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
    matches = [match for word in words for match in _PLACEHOLDER.finditer(word) if match[2]]
    for name, framework in ((match[2], match[3]) for match in matches):
        if name not in KNOBS:
            known = ", ".join(f"{{{knob}}}" for knob in KNOBS)
            raise UsageError(
                f"no placeholder is called {{{name}}}",
                hint=f"one of {known}; write {{{{{name}}}}} where the command itself has braces",
            )
        if framework and (name, framework) not in WRITERS:
            known = ", ".join(f"{{{knob}:{whose}}}" for knob, whose in WRITERS)
            raise UsageError(
                f"{{{name}:{framework}}} is nothing that a framework writes in its own way",
                hint=f"one of {known}; or {{{name}}} as it is",
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
