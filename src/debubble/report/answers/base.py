"""What every verb's answer has: JSON as its encoding, tables, and reasons for what is unknown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

import msgspec

from debubble.errors import (
    Code,
    DebubbleError,
    Gap,
    Touch,
    mask_secrets,
    place,
)
from debubble.units import NS_PER_S

# Half of a character, as `json.dumps` writes it, or a whole one beyond U+FFFF.
_HALF = re.compile(r"\\ud[89a-f]", re.IGNORECASE)


def json_text(data: Any, *, compact: bool = False) -> str:
    r"""Write plain objects as `--json` prints them; halves of characters become `\ufffd`.

    Names of files may hold bytes that are no UTF-8, and no strict reader takes their halves. URLs
    are written without their secrets.
    `compact` is one line.
    """
    write = partial(json.dumps, indent=None if compact else 2, allow_nan=False)
    text = write(data)
    return mask_secrets(write(_plain(data)) if _HALF.search(text) else text)


def _plain(data: Any) -> Any:
    """Return plain objects as JSON has them: lists for tuples, no halves of characters."""
    if isinstance(data, str):
        return data.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(data, Mapping):
        return {_plain(name): _plain(value) for name, value in data.items()}
    return [_plain(value) for value in data] if isinstance(data, list | tuple) else data


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of an answer. Units stand in the names; what cannot be said is null.

    A field that its source has under another name is annotated with where it is read, such as
    `Annotated[float, "fit.latency_ns"]`.
    """

    @classmethod
    def of(cls, source: object, **given: Any) -> Self:
        """Read all fields that are not given from what was computed.

        The one place where nanoseconds become seconds, and objects become parts of an answer.
        """
        for name, kind, path, required in _fields_of(cls):
            if name not in given:
                try:
                    value = _read(source, path, name)
                except AttributeError:
                    if required:
                        raise
                else:
                    given[name] = _fit(value, kind)
        return cls(**given)


@cache
def _fields_of(part: type[Part]) -> tuple[tuple[str, Any, str | tuple[str, ...], bool], ...]:
    """Return name, type and path of each field, and whether it must be there."""
    kinds, hints = get_type_hints(part), get_type_hints(part, include_extras=True)
    return tuple(
        (
            field.name,
            kinds[field.name],
            getattr(hints[field.name], "__metadata__", (field.name,))[0],
            field.required,
        )
        for field in msgspec.structs.fields(part)
    )


def _read(source: Any, path: str | tuple[str, ...], field: str) -> Any:
    """Follow a path: `.` is the source itself, several make a list. Beyond a null all is null."""
    if isinstance(path, tuple):
        values = [_read(source, part, field) for part in path]
        return None if None in values else values
    for name in filter(None, path.split(".")):
        if source is None:
            return None
        if isinstance(source, list | tuple):
            source = [item and _attribute(item, name, field) for item in source]
        else:
            source = _attribute(source, name, field)
    return source


def _attribute(source: Any, name: str, field: str) -> Any:
    """Return an attribute, in seconds where a field asks for those of nanoseconds."""
    if name.endswith("_s") and not hasattr(source, name):
        name = f"{name[:-2]}_ns"
    value = getattr(source, name)
    return _in_seconds(value) if name.endswith("_ns") and not field.endswith("_ns") else value


def _in_seconds(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _in_seconds(length) for name, length in value.items()}
    if isinstance(value, list | tuple):
        return [_in_seconds(length) for length in value]
    return None if value is None else value / NS_PER_S


def _fit(value: Any, kind: Any) -> Any:  # noqa: PLR0911 (one a kind of value)
    """Make what was computed into what JSON has; empty texts and lists are null where they may."""
    if isinstance(kind, UnionType):
        kind, *others = (member for member in get_args(kind) if member is not NoneType)
        if value is None or value in ("", ()):
            return None
        if others:
            return value
    inner = get_args(kind)
    if get_origin(kind) is list:
        return [_fit(item, inner[0]) for item in value]
    if get_origin(kind) is dict:
        return {str(name): _fit(item, inner[1]) for name, item in dict(value).items()}
    if isinstance(kind, type) and issubclass(kind, Part) and not isinstance(value, Part):
        return kind.of(value)
    if kind is int and isinstance(value, float):
        return round(value)
    return str(value) if kind is str else value


class AnswerWarning(Part, frozen=True, kw_only=True, omit_defaults=True):
    """Something missing or broken that the answer had to do without."""

    code: Code
    message: str
    hint: str = ""
    rank: int | None = None
    file: str = ""
    touches: list[Touch] = []
    """What it may have made wrong; nothing where it only says what is missing."""
    moves_s: float | None = None
    """The most that a window, or what a rank is busy of it, could be off by; unknown without."""

    def __str__(self) -> str:
        return f"{place(self.file, self.rank)}{self.message}"

    @property
    def moves_ns(self) -> float | None:
        """The same, in the unit of gaps."""
        return None if self.moves_s is None else self.moves_s * NS_PER_S


class Answer(Part, frozen=True, kw_only=True):
    """One verb's answer."""

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as `--json` has it, as plain objects."""
        plain: dict[str, Any] = _plain(msgspec.to_builtins(self))
        return plain

    def to_json(self) -> str:
        """Return what `--json` prints."""
        return json_text(self.to_dict())

    def __repr__(self) -> str:
        """Show the first line of the answer; `to_json` has the rest."""
        headline = getattr(self, "verdict", None) or getattr(self, "sentence", None)
        return headline if isinstance(headline, str) else super().__repr__()


class ErrorPart(Part, frozen=True, kw_only=True):
    """What is wrong, where, and what to do about it."""

    code: str
    """The kind of error, such as `run_not_found`."""
    message: str
    hint: str | None
    file: str | None
    rank: int | None


class ErrorAnswer(Answer, frozen=True, kw_only=True):
    """What a program is told where there is no answer."""

    schema: str = "debubble.error/1"
    error: ErrorPart


def answer_error(error: DebubbleError) -> ErrorAnswer:
    """Say why there is no answer; the code is the name of the error's class."""
    code = re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).lower()
    return ErrorAnswer(error=ErrorPart.of(error, code=code.removesuffix("_in")))


def seconds(nanoseconds: float | None) -> float | None:
    """Return a duration as answers have it."""
    return None if nanoseconds is None else nanoseconds / NS_PER_S


def list_warnings(gaps: Sequence[Gap]) -> list[AnswerWarning]:
    """Return gaps as every answer lists them."""
    return [AnswerWarning.of(gap, touches=sorted(gap.touches)) for gap in gaps]


def nulls_of(answer: Any, above: str = "") -> Iterator[str]:
    """Yield the path of everything in an answer that is null, such as `hops[].bytes`."""
    if answer is None:
        yield above
    elif isinstance(answer, Mapping):
        for name, value in answer.items():
            yield from nulls_of(value, f"{above}.{name}" if above else name)
    elif isinstance(answer, list):
        for value in answer:
            yield from nulls_of(value, f"{above}[]")


def explain_nulls(answer: Answer, reasons: Mapping[str, str]) -> dict[str, str]:
    """Return why each thing that is null is: of those that have a reason to be told."""
    nulls = set(nulls_of(answer.to_dict()))
    return {path: reason for path, reason in reasons.items() if path in nulls}
