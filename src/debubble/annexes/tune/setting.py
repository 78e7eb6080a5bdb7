"""A command and its setting in → what it can be told, and how it is told."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from debubble.errors import UsageError
from debubble.plan.baseline import even_split
from debubble.plan.change import Change
from debubble.plan.emit.megatron import write_layout
from debubble.plan.emit.torch import TORCH_SCHEDULES
from debubble.plan.emit.torchtitan import Names, modules_of_stages
from debubble.plan.levers import LEVERS
from debubble.timeline.schedules import SCHEDULES
from debubble.units import counted

# `{split}`, or `{split:megatron}` as that framework writes it; braces around anything else, as in
# JSON, are left alone, and `{{split}}` is `{split}`.
_PLACEHOLDER = re.compile(r"\{\{(\w+(?::\w+)?)\}\}|\{([A-Za-z_]\w*(?::\w+)?)\}")
_TITAN = Names(before=("tok_embeddings",), layer="layers.", after=("norm", "output"))


class Setting(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One value for each thing that is known of the command; None where it is not known."""

    microbatches: int | None = None
    split: tuple[int, ...] | None = None
    """Layers of each stage, in the order of stages."""
    schedule: str | None = None
    overlap: bool | None = None
    layers: tuple[int, ...] | None = None
    """Of each stage of a server."""
    in_flight: int | None = None
    """Batches that are under way at once."""
    chunk: int | None = None
    """Most tokens of prompts in a batch."""
    tokens_a_batch: int | None = None
    """Most tokens in a batch, of prompts and of answers."""
    requests_a_batch: int | None = None

    def __str__(self) -> str:
        parts = []
        if self.schedule is not None:
            parts.append(self.schedule)
        if self.split is not None:
            parts.append(f"split {self.written('split')}")
        if self.microbatches is not None:
            parts.append(counted(self.microbatches, "microbatch", "microbatches"))
        if self.overlap is not None:
            parts.append("overlap" if self.overlap else "no overlap")
        if self.layers is not None:
            parts.append(f"layers {self.written('layers')}")
        if self.in_flight is not None:
            parts.append(f"{self.in_flight} in flight")
        if self.chunk is not None:
            parts.append(f"chunks of {self.chunk}")
        if self.tokens_a_batch is not None:
            parts.append(f"{counted(self.tokens_a_batch, 'token')} a batch")
        if self.requests_a_batch is not None:
            parts.append(f"{counted(self.requests_a_batch, 'request')} a batch")
        return ", ".join(parts)

    def written(self, knob: str) -> str:
        """Return the value of a knob as the command gets it."""
        value = getattr(self, knob)
        if isinstance(value, tuple):
            return ",".join(map(str, value))
        return str(int(value)) if isinstance(value, bool) else str(value)

    def differing(self, other: Setting) -> dict[str, object]:
        """Return the knobs whose values are not those of another setting."""
        return {
            knob: getattr(self, knob)
            for knob in EXAMPLES
            if getattr(self, knob) != getattr(other, knob)
        }


TRAINING_KNOBS = ("microbatches", "split", "schedule", "overlap")
SERVING_KNOBS = ("layers", "in_flight", "chunk", "tokens_a_batch", "requests_a_batch")
EXAMPLES = {
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
"""What each knob's value looks like."""
TRACES = "traces"
"""In a server's command: the folder for its traces."""


def read_setting(words: Sequence[str]) -> Setting:
    """Read `microbatches=4`, `split=4,4,4,4`, `schedule=1f1b`, `overlap=0`, `in_flight=4`."""
    values: dict[str, object] = {}
    for word in words:
        knob, sign, text = word.partition("=")
        if knob not in EXAMPLES or not sign:
            raise UsageError(
                f"{word!r} says nothing that can be tuned",
                hint=f"write KNOB=VALUE, with one of {', '.join(EXAMPLES)}",
            )
        if knob in values:
            raise UsageError(f"{knob} is said twice", hint="say it once, as it is now")
        values[knob] = _read_value(knob, text)
    return Setting(**values)  # type: ignore[arg-type]


def _read_value(knob: str, text: str) -> object:
    numbers = [int(part) if part.isdigit() else 0 for part in text.split(",")]
    match knob:
        case "schedule" if text in SCHEDULES:
            return text
        case "overlap" if text in {"0", "1"}:
            return text == "1"
        case "split" | "layers" if all(numbers):
            return tuple(numbers)
        case "microbatches" | "in_flight" | "chunk" | "tokens_a_batch" | "requests_a_batch" if (
            all(numbers) and len(numbers) == 1
        ):
            return numbers[0]
    known = f"; schedules are {', '.join(SCHEDULES)}" if knob == "schedule" else ""
    raise UsageError(
        f"{text!r} is no value of {knob}", hint=f"write {knob}={EXAMPLES[knob]}{known}"
    )


def _titan_modules(setting: Setting) -> str:
    stages = modules_of_stages(setting.split or (), _TITAN)
    return " ".join(",".join(stage) for stage in stages)


def _torch_schedule(setting: Setting) -> str:
    known = TORCH_SCHEDULES.get(setting.schedule or "")
    return known.name if known else str(setting.schedule)


WRITERS: dict[str, Callable[[Setting], str]] = {
    "split:megatron": lambda setting: write_layout(setting.split or ()),
    "split:torchtitan": _titan_modules,
    "schedule:torch": _torch_schedule,
    "schedule:torchtitan": _torch_schedule,
}
"""How frameworks write a knob, where they do not write it as it is."""


def fill_words(words: Sequence[str], values: Mapping[str, str]) -> tuple[str, ...]:
    """Put values in place of {names}; other braces stay, and `{{name}}` is `{name}`."""

    def value(match: re.Match[str]) -> str:
        return f"{{{match[1]}}}" if match[1] else values.get(match[2], match[0])

    return tuple(_PLACEHOLDER.sub(value, word) for word in words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """The user's command, and its setting as it is now."""

    words: tuple[str, ...]
    now: Setting

    @property
    def placeholders(self) -> tuple[str, ...]:
        """What stands in braces in the command, in its order."""
        matches = (match for word in self.words for match in _PLACEHOLDER.finditer(word))
        return tuple(match[2] for match in matches if match[2])

    @property
    def knobs(self) -> frozenset[str]:
        """What the command can be told."""
        return frozenset(name.partition(":")[0] for name in self.placeholders) - {TRACES}

    @property
    def barred_levers(self) -> frozenset[str]:
        """Return the levers of a plan that the command cannot be told to use."""
        return frozenset(lever.key for lever in LEVERS) - self.knobs

    def fill(self, setting: Setting, traces: str = "traces") -> tuple[str, ...]:
        """Return the command for a setting; a server is told where its traces go."""
        values = {knob: setting.written(knob) for knob in self.knobs} | {TRACES: traces}
        values |= {name: WRITERS[name](setting) for name in self.placeholders if name in WRITERS}
        filled: list[str] = []
        for word in self.words:
            # What a framework takes as several words is several, where it stands by itself.
            is_list = word in {f"{{{name}}}" for name in WRITERS}
            [text] = fill_words([word], values)
            filled += text.split(" ") if is_list else [text]
        return tuple(filled)

    def after(self, setting: Setting, change: Change, stages: int) -> Setting | None:
        """Return a setting with a change; None where the command cannot be told it.

        A schedule with other stages a rank needs another split: an even one, unless it is said.
        """
        untold = (change.recompute, change.by_hand)
        if any(value is not None for value in untold):
            return None
        wanted: dict[str, object] = {
            knob: getattr(change, knob)
            for knob in TRAINING_KNOBS
            if getattr(change, knob) is not None
        }
        if change.split is None and setting.split is not None and len(setting.split) != stages:
            wanted["split"] = even_split(sum(setting.split), stages)
        if not self.knobs.issuperset(wanted):
            return None
        return replace(setting, **wanted)


def read_template(
    words: Sequence[str], now: Setting, knobs: Sequence[str] = TRAINING_KNOBS
) -> Template:
    """Check that every placeholder is known and has a value."""
    if not words:
        raise UsageError(
            "no command to tune",
            hint="debubble tune --now microbatches=4 -- COMMAND {microbatches}",
        )
    template = Template(words=tuple(words), now=now)
    for placeholder in template.placeholders:
        name, _, framework = placeholder.partition(":")
        if placeholder == TRACES and knobs == SERVING_KNOBS:
            continue
        if name not in knobs:
            known = ", ".join(f"{{{knob}}}" for knob in knobs)
            raise UsageError(
                f"no placeholder is called {{{name}}}",
                hint=f"one of {known}; write {{{{{name}}}}} where the command itself has braces",
            )
        if framework and placeholder not in WRITERS:
            known = ", ".join(f"{{{writer}}}" for writer in WRITERS)
            raise UsageError(
                f"{{{placeholder}}} is nothing that a framework writes in its own way",
                hint=f"one of {known}; or {{{name}}} as it is",
            )
        if getattr(now, name) is None:
            raise UsageError(
                f"what {{{name}}} is now was not said", hint=f"add --now {name}={EXAMPLES[name]}"
            )
    others = [knob for knob in now.differing(Setting()) if knob not in knobs]
    if others:
        raise UsageError(
            f"{others[0]} is nothing that can be tuned here", hint=f"one of {', '.join(knobs)}"
        )
    if not template.knobs:
        raise UsageError(
            "the command has no placeholders, so nothing can be tried",
            hint="write {microbatches} where its number stands, and say --now microbatches=4",
        )
    return template
