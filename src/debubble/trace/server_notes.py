"""A serving engine's own metrics in → what it did before, under and after the profiler.

Launch-bound decode runs two to three times slower under the profiler. So `capture --server` reads
the engine's page for Prometheus meanwhile, and leaves `server.debubble.json` beside the traces.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

import msgspec

from debubble.errors import CaptureError
from debubble.units import replacing

NAME = "server.debubble.json"
"""Beside the traces of the newest capture of a server; never taken for a trace."""
SCHEMA = "debubble.server-notes/1"
# With twice as many requests a batch holds twice as many tokens: what it takes is another thing.
_AS_MUCH = 2.0

# Fewer tokens of either tell no time per token: one prompt beside them doubles it.
_FEWEST_TOKENS = 200

_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[^\n]*\})?\s+([^\s]+)", re.MULTILINE)
# Ranks of one SGLang engine each tell what they share; replicas (`dp_rank`) have theirs.
_RANK = re.compile(r'\b(?:tp|pp|moe_ep)_rank="[^"]*",?')

# What engines call what is read here; the first name that is on the page counts. SGLang counts its
# tokens when requests end, but for its `realtime` tokens.
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_TOKENS_IN = (
    "vllm:prompt_tokens_total",
    'sglang:realtime_tokens_total{mode="prefill_compute"}',
    "sglang:prompt_tokens_total",
)
_TOKENS_OUT = (
    "vllm:generation_tokens_total",
    'sglang:realtime_tokens_total{mode="decode"}',
    "sglang:generation_tokens_total",
)
_FIRST = ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds")
_LATER = (
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
    "sglang:inter_token_latency_seconds",
    "sglang:time_per_output_token_seconds",
)


class EngineReading(msgspec.Struct, frozen=True, kw_only=True):
    """One look at an engine's page; None is what it does not tell."""

    at_s: float
    running: float | None = None
    waiting: float | None = None
    tokens_in: float | None = None
    tokens_out: float | None = None
    first_s: float | None = None
    """All waits for a first token together, and below how many there were."""
    first_count: float | None = None
    later_s: float | None = None
    """Likewise from one token to the next."""
    later_count: float | None = None

    @property
    def tells_nothing(self) -> bool:
        """Whether no figure of an engine is on the page."""
        return all(getattr(self, name) is None for name in self.__struct_fields__[1:])


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine did in a stretch of time; None is what it does not tell."""

    seconds: float
    tokens_in_per_s: float | None = None
    """Of prompts; vLLM counts a prompt when it is through."""
    tokens_out_per_s: float | None = None
    requests_running: float | None = None
    """The mean of some looks; so below."""
    requests_waiting: float | None = None
    ttft_s: float | None = None
    """Mean time to the first token, of `first_tokens` that came in that time."""
    first_tokens: float | None = None
    tpot_s: float | None = None
    """Mean time from one token to the next, of `later_tokens`."""
    later_tokens: float | None = None


class ServerNotes(msgspec.Struct, frozen=True, kw_only=True):
    """What `capture --server` notes of an engine beside its traces."""

    schema: str
    kind: str
    """vllm or sglang."""
    url: str
    began_unix_s: float
    """When the profile was asked for."""
    traces: tuple[str, ...]
    """Names of the files that it left, without their folder."""
    before: Span | None
    during: Span | None
    """From the engine's word that it profiles to the order to stop, writing left out."""
    after: Span | None

    @property
    def around(self) -> Span | None:
        """The spans without the profiler as one, of those that had as much to do; None of none."""
        return _join([span for span in (self.before, self.after) if self._is_like(span)])

    def _is_like(self, span: Span | None) -> TypeGuard[Span]:
        """Tell whether about as many requests ran as under the profiler: else it is other work."""
        if span is None:
            return False
        running = None if self.during is None else self.during.requests_running
        if running is None or span.requests_running is None:
            return True
        least, most = sorted((running, span.requests_running))
        return least > 0 and most <= _AS_MUCH * least

    def ratio(self, figure: str) -> float | None:
        """Return a figure under the profiler over the same without it: tpot_s 2.5 is 2.5 times.

        None where either is not known.
        """
        under = None if self.during is None else getattr(self.during, figure)
        free = None if self.around is None else getattr(self.around, figure)
        return under / free if under is not None and free else None

    @property
    def slowdown(self) -> float | None:
        """How many times longer the profiler made a token take; None where it is not known.

        By the time per token, else by tokens a second, which fewer requests lower just as well.
        A few tokens tell nothing, nor do answers alone beside prompts and answers.
        """
        under, free = self.during, self.around
        for span in (under, free):
            tokens = None if span is None else span.later_tokens
            if tokens is not None and tokens < _FEWEST_TOKENS:
                return None
        if under is not None and free is not None and free.first_tokens and under.first_tokens == 0:
            return None
        longer, fewer = self.ratio("tpot_s"), self.ratio("tokens_out_per_s")
        return longer if longer is not None else 1 / fewer if fewer else None

    @property
    def seconds_for_both(self) -> float | None:
        """How long a capture must be to hold prompts and answers: as long as a request lives.

        Clients that began together end together: until then none of them asks again.
        """
        free = self.around
        if free is None or not free.first_tokens or free.tokens_out_per_s is None:
            return None
        answer = free.tokens_out_per_s * free.seconds / free.first_tokens
        lives = (free.ttft_s or 0.0) + answer * (free.tpot_s or 0.0)
        return float(math.ceil(lives * max(self.slowdown or 1.0, 1.0)))


def read_server_notes(folder: Path | str) -> ServerNotes | None:
    """Return what was noted of the server whose traces lie in a folder; None where nothing was.

    They are of the newest capture in that folder: `traces` says of which files. A file that is
    there and is none of ours is an error, with its name.
    """
    file = Path(folder) / NAME
    try:
        notes = msgspec.json.decode(file.read_bytes(), type=ServerNotes)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise CaptureError(
            f"cannot be read: {error}", file=str(file), hint="remove it, or capture again"
        ) from error
    if notes.schema != SCHEMA:
        raise CaptureError(
            f"is of another version ({notes.schema})", file=str(file), hint="capture again"
        )
    return notes


def notes_beside(files: Sequence[str]) -> ServerNotes | None:
    """Return what a server noted of itself around a capture, beside any of its traces.

    Notes are of the newest capture in a folder: others may lie beside it.
    """
    names = {Path(file).name for file in files}
    for folder in sorted({str(Path(file).parent) for file in files}):
        notes = read_server_notes(folder)
        if notes is not None and names & {*notes.traces}:
            return notes
    return None


def write_server_notes(folder: Path, notes: ServerNotes) -> Path:
    """Leave the notes beside the traces; nobody ever sees half of them."""
    file = folder / NAME
    with replacing(file) as partial:
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(notes), indent=2) + b"\n")
    return file


def samples_of(text: str) -> dict[str, dict[str, float]]:
    """Read Prometheus' text format: by name, the value of each set of labels.

    Labels of ranks are left out, and the largest of their values stands for all.
    """
    found: dict[str, dict[str, float]] = {}
    for name, labels, shown in _SAMPLE.findall(text):
        try:
            value = float(shown)
        except ValueError:
            continue
        if math.isnan(value):
            continue
        whose = _RANK.sub("", labels).replace(",}", "}")
        mine = found.setdefault(name, {})
        mine[whose] = max(value, mine.get(whose, -math.inf))
    return found


def total_of(samples: dict[str, dict[str, float]], names: Sequence[str]) -> float | None:
    """Return the sum over all replicas of the first name that is there; None of none.

    A name may have a label that must be: `name{mode="decode"}`.
    """
    for name in names:
        bare, brace, label = name.partition("{")
        wanted = label.rstrip("}")
        values = [
            value
            for labels, value in samples.get(bare, {}).items()
            if not brace or wanted in labels
        ]
        if values:
            return sum(values)
    return None


def read_page(text: str, at_s: float) -> EngineReading:
    """Read the few figures that are needed of an engine's page."""
    samples = samples_of(text)

    def both(names: Sequence[str]) -> tuple[float | None, float | None]:
        sums, counts = ([f"{name}{end}" for name in names] for end in ("_sum", "_count"))
        return total_of(samples, sums), total_of(samples, counts)

    first_s, first_count = both(_FIRST)
    later_s, later_count = both(_LATER)
    return EngineReading(
        at_s=at_s,
        running=total_of(samples, _RUNNING),
        waiting=total_of(samples, WAITING),
        tokens_in=total_of(samples, _TOKENS_IN),
        tokens_out=total_of(samples, _TOKENS_OUT),
        first_s=first_s,
        first_count=first_count,
        later_s=later_s,
        later_count=later_count,
    )


def span_of(readings: Sequence[EngineReading]) -> Span | None:
    """Return what happened between the first and the last look; None of fewer than two."""
    if len(readings) < 2 or readings[-1].at_s <= readings[0].at_s:
        return None
    seconds = readings[-1].at_s - readings[0].at_s

    def grown(name: str) -> float | None:
        before, after = getattr(readings[0], name), getattr(readings[-1], name)
        # What fell was started again meanwhile.
        return None if before is None or after is None or after < before else after - before

    def a_second(name: str) -> float | None:
        count = grown(name)
        return None if count is None else count / seconds

    def mean(name: str) -> float | None:
        known = [value for one in readings if (value := getattr(one, name)) is not None]
        return sum(known) / len(known) if known else None

    def each(total: str, count: str) -> float | None:
        took, times = grown(total), grown(count)
        return took / times if took is not None and times else None

    return Span(
        seconds=seconds,
        tokens_in_per_s=a_second("tokens_in"),
        tokens_out_per_s=a_second("tokens_out"),
        requests_running=mean("running"),
        requests_waiting=mean("waiting"),
        ttft_s=each("first_s", "first_count"),
        first_tokens=grown("first_count"),
        tpot_s=each("later_s", "later_count"),
        later_tokens=grown("later_count"),
    )


# What each figure of a span is the mean over.
_WEIGHTS = {
    "tokens_in_per_s": "seconds",
    "tokens_out_per_s": "seconds",
    "requests_running": "seconds",
    "requests_waiting": "seconds",
    "ttft_s": "first_tokens",
    "tpot_s": "later_tokens",
}


def _join(spans: Sequence[Span]) -> Span | None:
    if not spans:
        return None
    joined: dict[str, float | None] = {}
    for name in Span.__struct_fields__:
        weight = _WEIGHTS.get(name)
        known = [span for span in spans if getattr(span, name) is not None]
        if weight is None:
            joined[name] = sum(getattr(span, name) for span in known) if known else None
            continue
        weights = [getattr(span, weight) or 0.0 for span in known]
        total = sum(getattr(span, name) * w for span, w in zip(known, weights, strict=True))
        joined[name] = total / sum(weights) if sum(weights) else None
    return Span(**joined)  # type: ignore[arg-type]
