"""What `simulate` and `plan` share: the runs that were named in → what every change starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from debubble.analysis import Analysis
from debubble.cli.reading import Reader
from debubble.cli.tokens import Tokens
from debubble.errors import Code, Gap, UsageError
from debubble.fleet.question import Question
from debubble.plan.baseline import AlsoRun, Baseline
from debubble.schedules import SCHEDULES, Statement, state_schedule
from debubble.timeline.figures import PipelineFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """Which files to read."""

    words: tuple[str, ...]
    also: str | None
    pipeline: int | None
    reader: Reader


def analyse_both(
    files: Traces, schedule: str | None, *, quiet: bool
) -> tuple[Analysis, Analysis | None]:
    """Read the run, whose schedule may be stated, and the other one of its model, if any."""
    question = Question(pipeline=files.pipeline, statement=state_by_name(schedule))
    run = files.reader.analyse(files.words, question, quiet=quiet)
    if files.also is None:
        return run, None
    question = Question(pipeline=files.pipeline)
    return run, files.reader.analyse((files.also,), question, quiet=quiet)


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
    run: Analysis,
    also: Analysis | None,
    *,
    tokens: Tokens,
    layers: str | None,
    limit_bytes: float | None,
    schedule: str | None,
    latency_ns: float | None = None,
) -> Baseline:
    """Fit the run, with another of its model where one was given."""
    stated = None if layers is None else parse_layers(layers)
    if also is not None and also.pipeline.kind != run.pipeline.kind:
        raise UsageError(
            "one of the runs trains, and the other has forward passes alone",
            hint="--also takes another run of the same kind",
        )
    return run.baseline(
        layers=stated,
        limit_bytes=limit_bytes,
        schedule=schedule,
        latency_ns=latency_ns,
        also=None if also is None else _also(also, tokens, stated),
    )


def _also(also: Analysis, tokens: Tokens, layers: tuple[int, ...] | None) -> AlsoRun:
    ratio = tokens.also / tokens.measured if tokens.also and tokens.measured else None
    told = any(rank.layers for rank in also.pipeline.ranks)
    return AlsoRun(
        timeline=also.timeline,
        figures=also.pipeline,
        layers=None if told else layers or also.job.split_for(also.pipeline),
        token_ratio=ratio,
    )


def warnings_of(run: Analysis, also: Analysis | None, baseline: Baseline) -> tuple[Gap, ...]:
    """Return all warnings, each once: of the run, then those of what it is changed by."""
    others = (*(also.warnings if also else ()), *(baseline.pooled.gaps if baseline.pooled else ()))
    differ = _layers_differ(run.pipeline, baseline)
    return tuple(dict.fromkeys((*run.warnings, *others, *differ)))


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
