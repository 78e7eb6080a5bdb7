"""What `simulate` and `plan` share: the runs that were named in → what every change starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from debubble.cli.reading import Reader
from debubble.cli.tokens import Tokens
from debubble.errors import Code, Gap, UsageError
from debubble.fleet.question import Question
from debubble.plan.baseline import AlsoRun, Baseline, measure_baseline
from debubble.schedules import SCHEDULES, Statement, state_schedule
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.job import JobFacts, ask_job
from debubble.timeline.model import Timeline


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
        said = self.job.tokens_of_microbatch(self.figures.microbatches)
        return said or self.figures.ranks[0].parallelism.microbatch_tokens


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


def read_both(
    files: Traces, schedule: str | None, *, quiet: bool
) -> tuple[Measured, Measured | None]:
    """Read the run, whose schedule may be stated, and the other one of its model, if any."""
    run = read_traces(files, files.words, quiet=quiet, statement=state_by_name(schedule))
    return run, None if files.also is None else read_traces(files, (files.also,), quiet=quiet)


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
    return tuple(dict.fromkeys((*run.gaps, *others, *_layers_differ(run.figures, baseline))))


def _layers_differ(figures: PipelineFigures, baseline: Baseline) -> tuple[Gap, ...]:
    """Name layers that were stated and are not those that kernels show."""
    layers = {one.stage: one.layers for rank in figures.ranks for one in rank.layers}
    shown, stated = tuple(layers[stage] for stage in sorted(layers)), baseline.source.split
    if stated is None or len(shown) != len(stated) or shown == tuple(stated):
        return ()
    return (
        Gap(
            code=Code.LAYERS_DIFFER,
            message=f"--layers says {_commas(stated)}, and the traces show {_commas(shown)}",
            hint="leave --layers out, unless its layers are not alike",
        ),
    )


def _commas(layers: Sequence[int]) -> str:
    return ",".join(map(str, layers))


def parse_layers(text: str) -> tuple[int, ...]:
    """Read `4,4,4,4`."""
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        layers = ()
    if not sum(layers) or min(layers) < 0:
        raise UsageError(f"{text!r} is no split", hint="write it as 4,4,4,4: layers of each stage")
    return layers
