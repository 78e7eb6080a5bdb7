"""A command and its setting in → what it can be told, and how it is told."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from debubble.errors import UsageError
from debubble.plan.baseline import even_split
from debubble.plan.change import Change
from debubble.plan.emit.megatron import write_layout
from debubble.plan.emit.torch import TORCH_SCHEDULES
from debubble.plan.emit.torchtitan import Names, modules_of_stages
from debubble.plan.serving import ServingSetting
from debubble.timeline.schedules import SCHEDULES
from debubble.units import counted

_TRUE, _FALSE = frozenset({"1", "on", "true", "yes"}), frozenset({"0", "off", "false", "no"})
_EXAMPLES = {
    "microbatches": "4",
    "split": "4,4,4,4",
    "schedule": "1f1b",
    "overlap": "0",
    "layers": "4,4,4,4",
    "in_flight": "4",
    "chunk": "512",
    "tokens_a_batch": "2048",
    "requests_a_batch": "64",
}
# `{split}`, or `{split:megatron}` as that framework writes it; braces around anything else, as in
# JSON, are left alone, and `{{split}}` is `{split}`.
_PLACEHOLDER = re.compile(r"\{\{(\w+(?::\w+)?)\}\}|\{([A-Za-z_]\w*)(?::(\w+))?\}")
PREFIX = "DEBUBBLE_"
_TITAN = Names(before=("tok_embeddings",), layer="layers.", after=("norm", "output"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value for each thing that the command can be told; None where it cannot be told."""

    microbatches: int | None = None
    split: tuple[int, ...] | None = None
    """Layers of each stage, in the order of stages."""
    schedule: str | None = None
    overlap: bool | None = None
    layers: tuple[int, ...] | None = None
    """Of each stage of a server; this and what follows as `ServingSetting` has it."""
    in_flight: int | None = None
    chunk: int | None = None
    tokens_a_batch: int | None = None
    requests_a_batch: int | None = None

    def __str__(self) -> str:
        parts = []
        if self.schedule is not None:
            parts.append(self.schedule)
        if self.split is not None:
            parts.append(f"split {_write(self.split)}")
        if self.microbatches is not None:
            parts.append(counted(self.microbatches, "microbatch", "microbatches"))
        if self.overlap is not None:
            parts.append("overlap" if self.overlap else "no overlap")
        serving = {knob: getattr(self, knob) for knob in SERVING_KNOBS}
        if any(value is not None for value in serving.values()):
            stages = len(self.layers) if self.layers else 1
            parts.append(str(ServingSetting(stages=stages, **serving)))
        return ", ".join(parts)

    def written(self, knob: str) -> str:
        """Return the value of a knob as the command gets it."""
        return _write(getattr(self, knob))

    def knobs(self) -> tuple[str, ...]:
        """Return what the command can be told."""
        return tuple(knob for knob in KNOBS if getattr(self, knob) is not None)

    def differing(self, other: Setting) -> dict[str, Any]:
        """Return the knobs whose values are not those of another setting."""
        return {
            knob: getattr(self, knob)
            for knob in KNOBS
            if getattr(self, knob) != getattr(other, knob)
        }

    def after(self, change: Change, stages: int) -> Setting | None:
        """Return the setting that makes a change; None where the command cannot be told it.

        A schedule with other stages a rank needs another split: an even one, unless it is said.
        """
        if any(
            value is not None
            for value in (
                change.recompute,
                change.recompute_stages,
                change.by_hand,
            )
        ):
            return None
        wanted: dict[str, object] = {}
        if change.microbatches is not None:
            wanted["microbatches"] = change.microbatches
        if change.split is not None:
            wanted["split"] = change.split
        elif self.split is not None and len(self.split) != stages:
            wanted["split"] = even_split(sum(self.split), stages)
        if change.schedule is not None:
            wanted["schedule"] = change.schedule
        if change.overlap is not None:
            wanted["overlap"] = change.overlap
        if any(getattr(self, knob) is None for knob in wanted):
            return None
        return replace(self, **wanted)  # type: ignore[arg-type]


KNOBS = tuple(field.name for field in fields(Setting))
TRAINING_KNOBS = ("microbatches", "split", "schedule", "overlap")
SERVING_KNOBS = ("layers", "in_flight", "chunk", "tokens_a_batch", "requests_a_batch")
"""What a server can be told; the others are for a command that trains, or runs forward passes."""
TRACES = "traces"
"""In a server's command: the folder for its traces."""


def read_setting(words: Sequence[str]) -> Setting:
    """Read `microbatches=4`, `split=4,4,4,4`, `schedule=1f1b`, `overlap=0`, `in_flight=4`."""
    values: dict[str, object] = {}
    for word in words:
        knob, sign, text = word.partition("=")
        if knob not in KNOBS or not sign:
            raise UsageError(
                f"{word!r} says nothing that can be tuned",
                hint=f"write KNOB=VALUE, with one of {', '.join(KNOBS)}",
            )
        if knob in values:
            raise UsageError(f"{knob} is said twice", hint="say it once, as it is now")
        values[knob] = _read_value(knob, text)
    return Setting(**values)  # type: ignore[arg-type]


def _read_value(knob: str, text: str) -> object:
    if knob == "microbatches" or knob in SERVING_KNOBS[1:]:
        if not text.isdigit() or not int(text):
            hint = f"write {knob}={_EXAMPLES[knob]}"
            raise UsageError(f"{text!r} is no number for {knob}", hint=hint)
        return int(text)
    if knob in ("split", "layers"):
        parts = text.split(",")
        if not all(part.strip().isdigit() and int(part) for part in parts):
            hint = f"write {knob}=4,4,4,4: layers of each stage"
            raise UsageError(f"{text!r} is no split", hint=hint)
        return tuple(int(part) for part in parts)
    if knob == "schedule":
        if text not in SCHEDULES:
            hint = f"one of {', '.join(SCHEDULES)}"
            raise UsageError(f"no schedule is called {text!r}", hint=hint)
        return text
    if text.lower() not in _TRUE | _FALSE:
        raise UsageError(f"{text!r} is neither on nor off", hint="write overlap=0 or overlap=1")
    return text.lower() in _TRUE


def _write(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(int(value)) if isinstance(value, bool) else str(value)


def fill_words(words: Sequence[str], values: Mapping[str, str]) -> tuple[str, ...]:
    """Put values in place of {names}; other braces stay, and `{{name}}` is `{name}`."""

    def value(match: re.Match[str]) -> str:
        return f"{{{match[1]}}}" if match[1] else values.get(match[2], match[0])

    return tuple(_PLACEHOLDER.sub(value, word) for word in words)


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

    def fill(self, setting: Setting, traces: str = "traces") -> tuple[str, ...]:
        """Return the command for a setting; a server is told where its traces go."""

        def value(found: re.Match[str]) -> str:
            if found[1]:
                return f"{{{found[1]}}}"
            if found[2] == TRACES:
                return traces
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

    def environment(self, setting: Setting, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the environment for a setting: every knob is there too, as DEBUBBLE_SPLIT."""
        told = {f"{PREFIX}{knob.upper()}": setting.written(knob) for knob in setting.knobs()}
        return {**inherited, **told}


def read_template(
    words: Sequence[str], now: Setting, knobs: Sequence[str] = TRAINING_KNOBS
) -> Template:
    """Check that every placeholder is known and has a value."""
    if not words:
        raise UsageError(
            "no command to tune",
            hint="debubble tune --now microbatches=4 -- COMMAND {microbatches}",
        )
    matches = [match for word in words for match in _PLACEHOLDER.finditer(word) if match[2]]
    for name, framework in ((match[2], match[3]) for match in matches):
        if name == TRACES and knobs == SERVING_KNOBS:
            continue
        if name not in knobs:
            known = ", ".join(f"{{{knob}}}" for knob in knobs)
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
    others = [knob for knob in now.knobs() if knob not in knobs]
    if others:
        raise UsageError(
            f"{others[0]} is nothing that can be tuned here", hint=f"one of {', '.join(knobs)}"
        )
    if not now.knobs():
        raise UsageError(
            "the command has no placeholders, so nothing can be tried",
            hint="write {microbatches} where its number stands, and say --now microbatches=4; "
            "a command that reads DEBUBBLE_MICROBATCHES needs --now alone",
        )
    return Template(words=tuple(words), now=now)
