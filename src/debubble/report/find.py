"""An answer of `debubble find` in → its page for people, folded where it would fill a screen."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from debubble.ledger.causes import Cause
from debubble.ledger.ledger import MATTERS
from debubble.ledger.savings import ALL
from debubble.report.answers.change import say_basis
from debubble.report.answers.find import (
    FindAnswer,
    FrameworkPart,
    PipelinePart,
    StagePart,
)
from debubble.report.answers.ledger import (
    WITHOUT_TRACE,
    AccountPart,
    WaitedFor,
    say_rates,
    say_remedy,
    worth_cells,
    worth_columns,
)
from debubble.report.answers.links import HopPart
from debubble.report.answers.microbatches import say_microbatches
from debubble.report.answers.replicas import ReplicasPart
from debubble.report.answers.serving import HostPart
from debubble.report.text import FEW, STANDING_OUT, Page, Table, farthest, fold, show_sizes
from debubble.timeline.replicas import DRAGS
from debubble.units import (
    UNKNOWN,
    counted,
    show_bytes,
    show_change,
    show_count,
    show_gain,
    show_gains,
    show_known,
    show_largest,
    show_members,
    show_number,
    show_percent,
    show_range,
    show_seconds,
    show_share,
)

# Pipelines of one job that differ by less take as long: steps vary by as much.
_SEVERAL, _SLOWER = 2, 0.02
# More than half of the waiting time in waits unlike the others of their rank.
_JAGGED = 0.5
# As many ranks as fit beside each other on a terminal.
_RANK_COLUMNS = 8
# Of more ranks, so many: then nothing wraps.
_FOLDED_COLUMNS = 5
# Beyond so many replicas only those that come last are listed.
_MOST_REPLICAS = 8


def find_page(found: FindAnswer, next_command: str = "") -> Page:
    """Lay out the answer: the bubble against theory, why and whose it is, then stages and hops."""
    page = Page(answer=found.verdict)
    sentences = [f"{named.sentence}." for named in found.named]
    if found.bottleneck is not None:
        sentences.insert(0, f"{found.bottleneck.sentence}.")
    if found.ledger is not None and any(
        pipeline.missing_ranks
        for pipeline in found.pipelines
        if pipeline.pipeline == found.shown_pipeline
    ):
        sentences.append(f"{WITHOUT_TRACE}.")
    page.findings = [f"{sentence[:1].upper()}{sentence[1:]}" for sentence in sentences]
    if found.replicas is not None:
        first = 0 if found.replicas.verdict == DRAGS else len(page.findings)
        if found.named and found.named[0].cause == Cause.WORKER and found.bottleneck is None:
            first = max(first, 1)  # the device comes before the replica that it drags
        page.findings.insert(first, found.replicas.sentence)
    notes = [
        say_framework(found),
        _say_run(found),
        _say_slowest(found.pipelines, streams=found.stream is not None),
        _say_job(found),
        _say_profiler(found),
        _say_late(found),
        *(found.stream.scheduler.notes if found.stream and found.stream.scheduler else ()),
        _say_shape(found),
        _say_outside(found),
        *_say_no_more_microbatches(found),
        _say_side_work(found),
        *(say_rates(found.rates) if saving_tables(found) else ()),
    ]
    page.notes = [note for note in notes if note]
    page.tables = [
        *([cause_table(found.ledger, *_of_what(found))] if found.ledger else []),
        *saving_tables(found),
        *([_phase_table(found)] if found.stream and found.stream.phases else []),
        *([_host_table(found.stream.hosts)] if found.stream and found.stream.hosts else []),
        *([_replica_table(found.replicas)] if found.replicas else []),
        *([_pipeline_table(found)] if len(found.pipelines) > 1 else []),
        _stage_table(found.stages),
        *memory_tables(found),
        *([_hop_table(found.hops)] if found.hops else []),
    ]
    page.gaps = list(found.warnings)
    page.next_command = next_command
    return page


def _of_what(found: FindAnswer) -> tuple[float | None, str]:
    """Return what shares are of, and its name: a step's batch, or a batch's turn in a stream."""
    if found.stream is not None:
        return found.stream.turn_s, "the time"
    return found.numbers.batch_latency_s, "the batch"


def cause_table(account: AccountPart, whole_s: float | None, of: str = "the batch") -> Table:
    """Lay out causes by rank, as shares of the batch, with whom was waited for most."""
    by_wait = sorted(
        range(len(account.ranks)), key=lambda place: account.ranks[place].shares[Cause.COMPUTE]
    )
    few = len(account.ranks) <= _RANK_COLUMNS
    shown = [
        account.ranks[place]
        for place in sorted(by_wait[: _RANK_COLUMNS if few else _FOLDED_COLUMNS])
    ]
    title = f"where the time goes, share of {of}"
    if len(shown) < len(account.ranks):
        title += f" ({len(shown)} of {len(account.ranks)} ranks: those that wait most)"
    table = Table(
        columns=(
            "cause",
            *(f"rank {rank.rank}" for rank in shown),
            "all",
            "a step" if account.steps else "a batch",
            "waited for most",
        ),
        title=title,
    )
    for cause, share in account.shares.items():
        if account.causes[cause]:
            most = next((culprit for culprit in account.culprits if culprit.cause == cause), None)
            table.add(
                cause.replace("_", " "),
                *(show_share(rank.shares[cause]) for rank in shown),
                show_share(share),
                show_seconds(share * (whole_s or 0.0)),
                _say_waited_for(most) if most else "",
            )
    return table


def _say_waited_for(culprit: WaitedFor) -> str:
    if culprit.hop is not None:
        return f"{culprit.hop[0]} → {culprit.hop[1]}"
    if culprit.stage is not None:
        return f"{culprit.pass_} of stage {culprit.stage}"
    return f"host of rank {culprit.rank}"


def saving_tables(found: FindAnswer) -> list[Table]:
    """Lay out what removing each cause would buy; nothing where nothing would."""
    worth = [
        saving
        for saving in found.savings or ()
        if saving.saved_fraction >= MATTERS / 2 and saving.cause != ALL
    ]
    if not worth or found.replay is None:
        return []
    error = show_share(abs(found.replay.error_fraction or 0.0))
    what, takes = ("batches", "a batch takes") if found.stream else ("steps", "batch latency")
    table = Table(
        columns=("with", takes, "saved", "share", *worth_columns(found.rates)),
        title=f"what it would buy, by replaying the measured {what} (error of the replay: {error})",
    )
    table.rows = [
        (
            say_remedy(saving.cause),
            show_seconds(saving.batch_latency_s),
            show_seconds(saving.saved_s),
            show_share(saving.saved_fraction),
            *worth_cells(found.rates, saving.worth),
        )
        for saving in worth
    ]
    return [table, *_microbatch_table(found)]


def _microbatch_table(found: FindAnswer) -> list[Table]:
    """Lay out what twice the microbatches would do, as `plan` has it."""
    more = found.more_microbatches
    if more is None or not more.options:
        return []
    table = Table(
        columns=("with", "batch latency", "throughput", "80 % interval"),
        title="what more microbatches would do, by simulating them as plan does",
    )
    table.add("as it is", show_seconds(found.numbers.batch_latency_s or 0.0), "", "")
    for option in more.options:
        low, high = option.interval.throughput_gain_fraction or (0.0, 0.0)
        table.add(
            say_microbatches(option),
            show_seconds(option.batch_latency_s),
            show_change(option.throughput_gain_fraction),
            show_gains(low, high),
        )
    return [table]


def _say_no_more_microbatches(found: FindAnswer) -> list[str]:
    """Say why more microbatches are not priced."""
    more = found.more_microbatches
    if more is None:
        return []
    unpriced = [more.unpriced] if more.unpriced else []
    return [f"more microbatches, not predicted: {why}" for why in (*unpriced, *more.refused)]


def _phase_table(found: FindAnswer) -> Table:
    """Lay out what batches of each phase take on the stage where they take longest."""
    table = Table(columns=("phase", "batches", "tokens", "longest pass", "on stage", "device"))
    for part in found.stream.phases if found.stream else ():
        longest = max(range(len(part.pass_s)), key=lambda stage: part.pass_s[stage])
        table.add(
            part.phase,
            str(part.batches),
            show_known(part.tokens, show_count),
            show_seconds(part.pass_s[longest]),
            str(longest),
            show_seconds(part.device_s[longest]),
        )
    return table


def _replica_table(found: ReplicasPart) -> Table:
    """List the replicas, or those that come last of many."""
    table = Table(columns=("replica", "ranks", "late by", "last in", "waits a step"))
    rows = sorted(found.replicas, key=lambda row: (-(row.late_s or 0), row.replica))
    for row in sorted(rows[:_MOST_REPLICAS], key=lambda row: row.replica):
        sign = "-" if (row.late_s or 0) < 0 else ""
        table.add(
            str(row.replica),
            show_members(row.ranks),
            UNKNOWN if row.late_s is None else f"{sign}{show_seconds(abs(row.late_s))}",
            f"{row.last_steps} of {len(found.steps)}",
            show_seconds(row.waited_s / max(1, len(row.ranks))),
        )
    return table


def _pipeline_table(found: FindAnswer) -> Table:
    """Lay out pipelines: the one shown in full, those that stand out, the others as one."""
    table = Table(columns=("pipeline", "ranks", "bubble", "batch latency", "peak memory"))
    for name, lines in fold(
        found.pipelines,
        FEW // 2,
        lambda line: line.bubble_fraction,
        lambda line: line.batch_latency_s,
        keep=lambda line: line.pipeline == found.shown_pipeline,
    ):
        table.add(
            name or str(lines[0].pipeline),
            f"{sum(len(line.ranks) for line in lines)} ranks" if name else _show_ranks(lines[0]),
            show_range([line.bubble_fraction for line in lines], show_share),
            show_range([line.batch_latency_s for line in lines], show_seconds),
            show_largest([line.peak_memory_bytes for line in lines], show_bytes),
        )
    return table


def _show_ranks(line: PipelinePart) -> str:
    missing = len(line.missing_ranks)
    part = f" ({len(line.ranks)} of {len(line.ranks) + missing})" if missing else ""
    return show_members(line.ranks) + part


def _stage_table(stages: Sequence[StagePart]) -> Table:
    """Lay out what each kind of pass takes on each stage."""
    table = Table(columns=("stage", "rank", "layers", "pass", "median", "spread", "count"))
    rows = [(stage, kind) for stage in stages for kind in stage.passes]
    kept = {stage.stage for stage in stages}
    if len(rows) > 2 * FEW:
        kept = set()
        for kind in {kind for _, kind in rows}:
            held = [stage for stage in stages if kind in stage.passes]
            places = farthest([stage.passes[kind].median_s for stage in held], STANDING_OUT // 2)
            kept |= {held[place].stage for place in places}
    lines = [("", kind, [stage]) for stage, kind in rows if stage.stage in kept]
    for kind in sorted({kind for _, kind in rows}, key="FBIW".find):
        others = [stage for stage, held in rows if held == kind and stage.stage not in kept]
        lines += [(f"{len(others)} others", kind, others)] if others else []
    for name, kind, alike in lines:
        passes = [stage.passes[kind] for stage in alike]
        table.add(
            name or str(alike[0].stage),
            "" if name else str(alike[0].rank),
            _layers_shown(alike),
            kind,
            show_range([took.median_s for took in passes], show_seconds),
            f"± {show_seconds(max(took.mad_s for took in passes))}",
            show_range([took.n for took in passes], show_count),
        )
    return table


def _layers_shown(alike: Sequence[StagePart]) -> str:
    kinds = alike[0].layer_kinds
    if len(alike) > 1 or not kinds:
        return show_range([stage.layers for stage in alike], str)
    return " + ".join(f"{kind.layers} {kind.name}" for kind in kinds)


def memory_tables(found: FindAnswer) -> list[Table]:
    """Lay out what ranks hold: what a microbatch in flight takes decides what fits."""
    known = [
        rank
        for rank in found.memory
        if rank.per_microbatch_bytes is not None or rank.static_bytes is not None
    ]
    if not known:
        return []
    in_flight = () if found.stream else ("a microbatch in flight", "in flight")
    table = Table(columns=("rank", "static", *in_flight, "peak"), title="memory, by rank")
    for name, ranks in fold(known, FEW // 2, lambda rank: rank.peak_bytes, count=STANDING_OUT // 2):
        of_microbatches = (
            show_range([rank.per_microbatch_bytes for rank in ranks], show_bytes),
            show_range([rank.most_in_flight for rank in ranks], str),
        )
        table.add(
            name or str(ranks[0].rank),
            show_range([rank.static_bytes for rank in ranks], show_bytes),
            *(of_microbatches if in_flight else ()),
            show_range([rank.peak_bytes for rank in ranks], show_bytes),
        )
    return [table]


def _hop_table(hops: Sequence[HopPart]) -> Table:
    """Lay out what each hop takes, and who waits for it."""
    table = Table(columns=("hop", "size", "wire", "wait", "buffered", "count"))
    for name, alike in fold(
        hops, 2 * FEW, lambda hop: hop.wire_s.median, lambda hop: hop.wait_s.median
    ):
        table.add(
            name or f"{alike[0].from_rank} → {alike[0].to_rank}",
            show_sizes([hop.bytes for hop in alike]),
            show_range([hop.wire_s.median for hop in alike], show_seconds, "hidden"),
            show_range([hop.wait_s.median for hop in alike], show_seconds),
            show_range([hop.buffered_fraction for hop in alike], show_share),
            show_range([hop.n for hop in alike], show_count),
        )
    return table


def say_framework(found: FindAnswer) -> str:
    """Say whose framework ran it and how it divides the job; empty where nothing tells."""
    known: FrameworkPart = found.run.framework
    if known.name is None:
        return ""
    name = {"megatron": "Megatron", "deepspeed": "DeepSpeed"}.get(known.name, known.name)
    shown = next(line for line in found.pipelines if line.pipeline == found.shown_pipeline)
    sizes = {
        "pipeline": len(shown.ranks) + len(shown.missing_ranks),
        "tensor": known.tensor,
        "context": known.context,
        "expert": known.expert,
        "data": known.data,
        "sharded": known.sharded,
    }
    parts = [f"{kind} {size}" for kind, size in sizes.items() if size and size > 1]
    if known.microbatch_size is not None:
        samples = counted(known.microbatch_size, "sample")
        parts.append(f"microbatches of {samples} x {show_count(known.sequence or 0)} tokens")
        if found.run.microbatches:
            batch = known.microbatch_size * found.run.microbatches * (known.data or 1)
            parts.append(f"batch of {counted(batch, 'sample')}")
    if known.recomputes:
        parts.append("activations recomputed")
    return f"{name}: {', '.join(parts)}"


def _say_run(found: FindAnswer) -> str:
    """Say which ranks, under which schedule, how long a batch takes, and what it holds."""
    run, numbers, stream = found.run, found.numbers, found.stream
    shown = next(line for line in found.pipelines if line.pipeline == found.shown_pipeline)
    schedule = run.schedule or "schedule unknown"
    if run.stated is not None:
        stated = run.stated
        schedule = (
            f"{stated.schedule}, as stated"
            if stated.agrees
            else f"{schedule} ({stated.schedule} was stated)"
        )
    parts = [f"ranks {show_members(shown.ranks)}", schedule]
    if stream is not None:
        parts[1] = "no batch was captured from the first stage to the last"
        if numbers.batch_latency_s is not None and stream.batch_latency_p95_s is not None:
            parts[1] = (
                f"batch latency {show_seconds(numbers.batch_latency_s)} in the middle of "
                f"{counted(stream.batches, 'batch', 'batches')}, p95 "
                f"{show_seconds(stream.batch_latency_p95_s)}"
            )
            if numbers.microbatches_per_s:
                parts[1] += f"; {show_number(numbers.microbatches_per_s)} batches/s"
    elif numbers.batch_latency_s is not None:
        steps = counted(len(run.steps), "step")
        parts.append(f"batch latency {show_seconds(numbers.batch_latency_s)} (median of {steps})")
    if run.framework.recomputes and run.framework.name is None:
        parts.append("activations recomputed")
    peaks = [peak for peak in numbers.peak_memory_bytes if peak is not None]
    if peaks:
        few = " ".join(show_bytes(peak) for peak in peaks)
        parts.append(f"peak memory {few if len(peaks) <= FEW else show_range(peaks, show_bytes)}")
    return "; ".join(parts)


def _say_slowest(pipelines: Sequence[PipelinePart], *, streams: bool) -> str:
    """Name the pipeline of a job that takes longest, where the others do not take as long."""
    known = {
        line.pipeline: line.batch_latency_s
        for line in pipelines
        if line.batch_latency_s is not None
    }
    if streams or len(known) < _SEVERAL:
        return ""
    slowest = max(known, key=lambda pipeline: known[pipeline])
    others = median(length for pipeline, length in known.items() if pipeline != slowest)
    if known[slowest] < (1 + _SLOWER) * others:
        return ""
    takes, elsewhere = show_seconds(known[slowest]), show_seconds(others)
    return f"slowest: pipeline {slowest}, a batch takes {takes}, {elsewhere} in the others"


def _say_job(found: FindAnswer) -> str:
    """Say on which basis times are, and what a step takes unprofiled, where the job timed it."""
    job, batch, said = found.job, found.numbers.unprofiled_batch_latency_s, say_basis(found.basis)
    if job is None or job.unprofiled_step_time_s is None or job.overhead_fraction is None:
        return said
    timed = f"median of {counted(job.steps_timed, 'step')}"
    said += f"; unprofiled: a step takes {show_seconds(job.unprofiled_step_time_s)} ({timed})"
    if batch is not None:
        return (
            f"{said}, a batch about {show_seconds(batch)}; the capture itself costs "
            f"{show_gain(job.overhead_fraction)}"
        )
    if job.overhead_fraction > 0:
        return said
    by = show_percent(-job.overhead_fraction)
    return f"{said}, {by} less when profiled: something else slowed unprofiled steps"


def _say_late(found: FindAnswer) -> str:
    """Say whom ranks wait for in collectives of their stage, where that takes some time."""
    account = found.ledger
    if account is None or account.shares[Cause.COLLECTIVE_WAIT] < MATTERS:
        return ""
    pairs = ", ".join(f"{one.rank} for {one.late_rank}" for one in account.late_in_collectives)
    return f"in collectives of a stage ranks wait most: {pairs}"


def _host_table(hosts: Sequence[HostPart]) -> Table:
    """Lay out what each host does with the time of a batch."""
    columns = ("host of rank", "launches", "hands over", "receives", "kept by device", "the rest")
    table = Table(columns=columns)
    for host in hosts:
        table.add(
            str(host.rank),
            show_seconds(host.launching_s),
            show_seconds(host.handing_over_s),
            show_seconds(host.receiving_s),
            show_seconds(host.kept_s),
            show_seconds(host.rest_s),
        )
    return table


def _say_profiler(found: FindAnswer) -> str:
    """Say what the server did without the profiler; empty where it is no stream."""
    if found.stream is None or not found.stream.phases:
        return ""
    noted = found.stream.profiler
    if noted is None:
        return "what the profiler itself costs is not known: capture with --server to have it noted"
    if noted.slowdown is None:
        said = "what the profiler costs is not known: too little of the same was served around it"
    else:
        said = (
            f"without the profiler a token took {1 / noted.slowdown:.2f} of what it took under it"
        )
    captured = noted.captured_tokens_out_per_s
    if captured is not None:
        said += f"; {show_number(captured)} tokens/s out profiled, decode alone"
    if noted.tokens_out_per_s is not None:
        said += f"; {show_number(noted.tokens_out_per_s)} tokens/s out unprofiled"
    if noted.tpot_s is not None:
        said += f", {show_seconds(noted.tpot_s)} a token"
    return said


def _say_shape(found: FindAnswer) -> str:
    shape = found.shape
    if shape is None:
        return "no waits between passes" if found.run.steps else ""
    places = {"everywhere": "on all ranks alike", "middle": "mostly in the middle of the pipeline"}
    where = places.get(shape.where, f"mostly on the {shape.where} rank")
    evenness = "jagged" if shape.jagged_fraction > _JAGGED else "even"
    middle = show_seconds(shape.median_wait_s)
    return f"waits between passes: {evenness}, {middle} in the middle, {where}"


def _say_outside(found: FindAnswer) -> str:
    parts = [
        f"{part.replace('_', ' ')} {show_seconds(length)}" for part, length in found.outside.items()
    ]
    return f"between two steps: {', '.join(parts)}" if parts else ""


def _say_side_work(found: FindAnswer) -> str:
    parts = [
        f"{part.replace('_', ' ')} {show_percent(share) if share >= 0.01 else 'below 1 %'}"
        for part, share in found.side_work.items()
    ]
    whole = "the time" if found.stream else "the batch"
    return f"side work, which no pass waits for: {', '.join(parts)} of {whole}" if parts else ""
