"""What `simulate` and `plan` share: the runs that were named in → what every change starts from."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from debubble.cli.reading import Reader
from debubble.errors import Gap, UsageError
from debubble.fleet.question import Question
from debubble.plan.baseline import AlsoRun, Baseline, measure_baseline
from debubble.schedules import SCHEDULES, Statement, state_schedule
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.job import JobFacts, ask_job
from debubble.timeline.model import Timeline

_NUMBER = re.compile(r"([0-9]*\.?[0-9]+)(x?)")
# Beyond this nobody would believe a line through what was measured.
_MOST_TOKENS = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """Which files to read."""

    words: tuple[str, ...]
    also: str | None
    pipeline: int | None
    reader: Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run that was read."""

    timeline: Timeline
    figures: PipelineFigures
    job: JobFacts
    gaps: tuple[Gap, ...]

    @property
    def tokens(self) -> int | None:
        """Of a microbatch, where the job said so."""
        return self.job.tokens_of_microbatch(self.figures.microbatches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What was said of tokens a microbatch; None where nothing was."""

    asked: str | None = None
    """So many, or so many times as many: `2048`, `2x`."""
    measured: int | None = None
    also: int | None = None
    """In the other run."""

    def told_by(self, run: Measured, also: Measured | None) -> Tokens:
        """Return the same with what the jobs say where nothing was said."""
        return replace(
            self,
            measured=self.measured or run.tokens,
            also=self.also or (also.tokens if also else None),
        )

    def of_run(self, baseline: Baseline) -> float | None:
        """Return the tokens of a microbatch as it is, where that was said of either run."""
        if self.measured is not None:
            return float(self.measured)
        if self.also is not None and baseline.pooled is not None:
            return self.also / baseline.pooled.token_ratio
        return None

    def scale(self, baseline: Baseline) -> float | None:
        """Return how many times as many tokens are asked for; None for as many as there are."""
        if self.asked is None:
            return None
        scale, is_count = self._read()
        if is_count:
            measured = self.of_run(baseline)
            if measured is None and self.also is not None:
                raise UsageError("--also-tokens is about --also", hint="add --tokens-measured N")
            if measured is None:
                raise UsageError(
                    "how many tokens a microbatch has as it is cannot be told",
                    hint="add --tokens-measured N, or ask for times as many: --tokens 2x",
                )
            scale /= measured
        _refuse_too_far(scale)
        return None if scale == 1.0 else scale

    def check(self) -> None:
        """Refuse what is no number, or too far away, before anything long."""
        if self.asked is None:
            return
        scale, is_count = self._read()
        if not is_count or self.measured is not None:
            _refuse_too_far(scale / (self.measured or 1) if is_count else scale)

    def _read(self) -> tuple[float, bool]:
        read = _NUMBER.fullmatch((self.asked or "").strip())
        if read is None or float(read[1]) <= 0:
            raise UsageError(
                f"{self.asked!r} is no number of tokens", hint="write it as 2048, or 2x"
            )
        return float(read[1]), not read[2]


def _refuse_too_far(scale: float) -> None:
    if not 1 / _MOST_TOKENS <= scale <= _MOST_TOKENS:
        raise UsageError(
            f"{scale:.3g} times as many tokens cannot be foretold from this run",
            hint="a run of about that length can tell",
        )


def read_traces(
    files: Traces, words: tuple[str, ...], *, quiet: bool, statement: Statement | None = None
) -> Measured:
    """Read a run and measure the pipeline that was asked for."""
    question = Question(pipeline=files.pipeline, statement=statement)
    found = files.reader.survey(words, question, quiet=quiet)
    job = ask_job(found.run.sidecars, found.shown)
    return Measured(
        timeline=found.timeline,
        figures=found.shown,
        job=job,
        gaps=(*found.run.gaps, *found.timeline.gaps, *found.shown.gaps, *job.gaps),
    )


def state_by_name(schedule: str | None) -> Statement | None:
    """Read the schedule that ran, as the user states it."""
    if schedule is None:
        return None
    statement = state_schedule(schedule)
    if statement.order is not None:
        raise UsageError(
            f"what ran must have a name to be changed, and {schedule} is an order",
            hint=f"one of {', '.join(SCHEDULES)}; `find` takes orders",
        )
    return statement


def start_from(  # noqa: PLR0913 (what the traces may not tell, one argument each)
    run: Measured,
    also: Measured | None,
    *,
    tokens: Tokens,
    layers: str | None,
    limit_bytes: float | None,
    schedule: str | None,
    latency_ns: float | None = None,
) -> Baseline:
    """Fit the run, with another of its model where one was given; what is not said, jobs say."""
    stated = None if layers is None else parse_layers(layers)
    if also is not None and also.figures.kind != run.figures.kind:
        raise UsageError(
            "one of the runs trains, and the other has forward passes alone",
            hint="--also takes another run of the same kind",
        )
    return measure_baseline(
        run.timeline,
        run.figures,
        layers=stated or run.job.split_for(run.figures),
        limit_bytes=limit_bytes,
        schedule=schedule or run.job.schedule_for(run.figures),
        latency_ns=latency_ns or run.job.without_profiler_ns(run.figures.batch_latency_ns),
        also=None if also is None else _also(also, tokens, stated),
    )


def _also(also: Measured, tokens: Tokens, layers: tuple[int, ...] | None) -> AlsoRun:
    ratio = tokens.also / tokens.measured if tokens.also and tokens.measured else None
    told = any(rank.layers for rank in also.figures.ranks)
    return AlsoRun(
        timeline=also.timeline,
        figures=also.figures,
        layers=None if told else layers or also.job.split_for(also.figures),
        token_ratio=ratio,
    )


def gaps_of(run: Measured, also: Measured | None, baseline: Baseline) -> tuple[Gap, ...]:
    """Return all warnings, each once."""
    others = (*(also.gaps if also else ()), *(baseline.pooled.gaps if baseline.pooled else ()))
    return tuple(dict.fromkeys((*run.gaps, *others)))


def parse_layers(text: str) -> tuple[int, ...]:
    """Read `4,4,4,4`."""
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        layers = ()
    if not layers or min(layers) < 1:
        raise UsageError(f"{text!r} is no split", hint="write it as 4,4,4,4: layers of each stage")
    return layers
