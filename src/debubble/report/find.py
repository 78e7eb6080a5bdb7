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
    NamedCause,
    WaitedFor,
    say_rates,
    say_remedy,
    worth_cells,
    worth_columns,
)
from debubble.report.answers.links import HopPart
from debubble.report.answers.microbatches import say_microbatches
from debubble.report.answers.replicas import ReplicasPart
from debubble.report.text import (
    FEW,
    MOST_FINDINGS,
    NOTHING,
    STANDING_OUT,
    Page,
    Table,
    fold,
    show_sizes,
)
from debubble.serving.hosts import HostTime
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
_SLOWER = 0.02
# A cause that takes less of every rank shares a row with others.
_SMALL = 0.02
# More than half of the waiting time in waits unlike the others of their rank.
_JAGGED = 0.5
# As many ranks as fit beside each other on a terminal.
_RANK_COLUMNS = 8
# Of more ranks, so many: then nothing wraps.
_FOLDED_COLUMNS = 5
# Beyond so many replicas only those that come last are listed.
_MOST_REPLICAS = 8


def find_page(answer: FindAnswer, next_command: str = "", *, details: bool = True) -> Page:
    """Lay out the answer: the bubble against theory, why and whose it is.

    Stages, memory, hops, hosts and facts of the job are its details; so is all from the sixth
    cause on.
    """
    page = Page(answer=answer.verdict, gaps=list(answer.warnings), next_command=next_command)
    page.findings = _findings(answer, answer.named)
    causes = [_cause_table(answer.ledger, answer, small=details)] if answer.ledger else []
    if not details:
        # What two causes cost together says what each of them does.
        joint = {part for named in answer.named if "+" in named.cause for part in _parts(named)}
        named = [named for named in answer.named if named.cause not in joint]
        page.findings = _findings(answer, named)[:MOST_FINDINGS]
        page.tables = causes or [_stage_table(answer.stages)]
        ran, times = _say_run(answer), _say_job(answer)
        page.notes = [ran, times] if ";" in times else [f"{ran}; {times}"]
        page.notes[-1] += "; more: --details" if next_command else ""
        return page
    notes = [
        say_framework(answer),
        _say_run(answer),
        _say_peaks(answer),
        _say_slowest(answer.pipelines, streams=answer.stream is not None),
        _say_job(answer),
        _say_profiler(answer),
        _say_late(answer),
        *(answer.stream.scheduler.notes if answer.stream and answer.stream.scheduler else ()),
        _say_shape(answer),
        _say_outside(answer),
        *_say_no_more_microbatches(answer),
        _say_side_work(answer),
        *(say_rates(answer.rates) if saving_tables(answer) else ()),
    ]
    page.notes = [note for note in notes if note]
    page.tables = [
        *causes,
        *saving_tables(answer),
        *([_phase_table(answer)] if answer.stream and answer.stream.phases else []),
        *([_host_table(answer.stream.hosts)] if answer.stream and answer.stream.hosts else []),
        *([_replica_table(answer.replicas)] if answer.replicas else []),
        *([_pipeline_table(answer)] if len(answer.pipelines) > 1 else []),
        _stage_table(answer.stages),
        *memory_tables(answer),
        *([_hop_table(answer.hops)] if answer.hops else []),
    ]
    return page


def _parts(named: NamedCause) -> list[str]:
    return named.cause.split("+")


def _findings(answer: FindAnswer, causes: Sequence[NamedCause]) -> list[str]:
    """Return the causes in sentences: what is larger than the bubble first, then by saving."""
    sentences = [f"{named.sentence}." for named in causes]
    if answer.bottleneck is not None:
        sentences.insert(0, f"{answer.bottleneck.sentence}.")
    if answer.ledger is not None and answer.shown.missing_ranks:
        sentences.append(f"{WITHOUT_TRACE}.")
    findings = [f"{sentence[:1].upper()}{sentence[1:]}" for sentence in sentences]
    if answer.replicas is not None:
        first = 0 if answer.replicas.verdict == DRAGS else len(findings)
        if answer.named and answer.named[0].cause == Cause.WORKER and answer.bottleneck is None:
            first = max(first, 1)  # the device comes before the replica that it drags
        findings.insert(first, answer.replicas.sentence)
    return findings


def _cause_table(account: AccountPart, answer: FindAnswer, *, small: bool) -> Table:
    """Lay out causes by rank: their shares of the batch, what fixing them saves, and whose.

    Small ones share a row unless they are asked for, or named above; what is unexplained has its
    own.
    """
    of, whole_s = "the batch", answer.numbers.batch_latency_s
    if answer.stream is not None:
        of, whole_s = "the time", answer.stream.turn_s
    by_wait = sorted(
        range(len(account.ranks)), key=lambda index: account.ranks[index].shares[Cause.COMPUTE]
    )
    few = len(account.ranks) <= _RANK_COLUMNS
    shown = [
        account.ranks[index]
        for index in sorted(by_wait[: _RANK_COLUMNS if few else _FOLDED_COLUMNS])
    ]
    title = f"where the time goes, share of {of}"
    if len(shown) < len(account.ranks):
        title += f" ({len(shown)} of {len(account.ranks)} ranks: those that wait most)"
    saved = {saving.cause: saving.saved_s for saving in answer.savings or ()}
    spare = "per step" if account.steps else "per batch"
    table = Table(
        columns=(
            "cause",
            *(f"rank {rank.rank}" for rank in shown),
            "all",
            spare,
            "fixing saves",
            "waited for most",
        ),
        title=title,
        spare=(spare,),
    )
    named = {cause for matter in answer.named for cause in _parts(matter)}
    folded = []
    for cause, share in account.shares.items():
        most = max(rank.shares[cause] for rank in account.ranks)
        if most < NOTHING:
            continue
        if most < _SMALL and not small and cause not in {Cause.UNEXPLAINED, *named}:
            folded.append(cause)
            continue
        culprit = next((c for c in account.culprits if c.cause == cause), None)
        fixed = saved.get(cause, 0.0)
        table.add(
            cause.replace("_", " "),
            *(show_share(rank.shares[cause]) for rank in shown),
            show_share(share),
            show_seconds(share * (whole_s or 0.0)),
            show_seconds(fixed) if fixed >= MATTERS / 2 * (whole_s or 0.0) else "",
            _say_waited_for(culprit) if culprit else "",
        )
    if folded:
        whole = sum(account.shares[cause] for cause in folded)
        table.add(
            "smaller causes",
            *(show_share(sum(rank.shares[cause] for cause in folded)) for rank in shown),
            show_share(whole),
            show_seconds(whole * (whole_s or 0.0)),
            "",
            "",
        )
    return table.without_unknown()


def _say_waited_for(culprit: WaitedFor) -> str:
    if culprit.hop is not None:
        return f"{culprit.hop[0]} → {culprit.hop[1]}"
    if culprit.stage is not None:
        return f"{culprit.pass_} of stage {culprit.stage}"
    return f"host of rank {culprit.rank}"


def saving_tables(answer: FindAnswer) -> list[Table]:
    """Lay out what removing each cause would buy; nothing where nothing would."""
    worth = [
        saving
        for saving in answer.savings or ()
        if saving.saved_fraction >= MATTERS / 2 and saving.cause != ALL
    ]
    if not worth or answer.replay is None:
        return []
    error = show_share(abs(answer.replay.error_fraction or 0.0))
    what, takes = ("batches", "a batch takes") if answer.stream else ("steps", "batch latency")
    table = Table(
        columns=("what if", takes, "saved", "share", *worth_columns(answer.rates)),
        title=f"what fixing it would save (replay of the measured {what}, error {error})",
    )
    table.rows = [
        (
            say_remedy(saving.cause),
            show_seconds(saving.batch_latency_s),
            show_seconds(saving.saved_s),
            show_share(saving.saved_fraction),
            *worth_cells(answer.rates, saving.worth),
        )
        for saving in worth
    ]
    return [table, *_microbatch_table(answer)]


def _microbatch_table(answer: FindAnswer) -> list[Table]:
    """Lay out what twice the microbatches would do, as `plan` has it."""
    more = answer.more_microbatches
    if more is None or not more.options:
        return []
    table = Table(
        columns=("what if", "batch latency", "throughput", "80 % interval"),
        title="more microbatches (simulated)",
    )
    table.add("unchanged", show_seconds(answer.numbers.batch_latency_s or 0.0), "", "")
    for option in more.options:
        low, high = option.interval.throughput_gain_fraction or (0.0, 0.0)
        table.add(
            say_microbatches(option),
            show_seconds(option.batch_latency_s),
            show_change(option.throughput_gain_fraction),
            show_gains(low, high),
        )
    return [table]


def _say_no_more_microbatches(answer: FindAnswer) -> list[str]:
    """Say why more microbatches are not priced."""
    more = answer.more_microbatches
    if more is None:
        return []
    unpriced = [more.unpriced] if more.unpriced else []
    return [f"more microbatches, not predicted: {why}" for why in (*unpriced, *more.refused)]


def _phase_table(answer: FindAnswer) -> Table:
    """Lay out what batches of each phase take on the stage where they take longest."""
    table = Table(columns=("phase", "batches", "tokens", "longest pass", "on stage", "device"))
    for part in answer.stream.phases if answer.stream else ():
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


def _replica_table(answer: ReplicasPart) -> Table:
    """List the replicas, or those that come last of many."""
    table = Table(columns=("replica", "ranks", "late by", "last in", "waits a step"))
    rows = sorted(answer.replicas, key=lambda row: (-(row.late_s or 0), row.replica))
    for row in sorted(rows[:_MOST_REPLICAS], key=lambda row: row.replica):
        sign = "-" if (row.late_s or 0) < 0 else ""
        table.add(
            str(row.replica),
            show_members(row.ranks),
            UNKNOWN if row.late_s is None else f"{sign}{show_seconds(abs(row.late_s))}",
            f"{row.last_steps} of {len(answer.steps)}",
            show_seconds(row.waited_s / max(1, len(row.ranks))),
        )
    return table


def _pipeline_table(answer: FindAnswer) -> Table:
    """Lay out pipelines: the one shown in full, those that stand out, the others as one."""
    table = Table(columns=("pipeline", "ranks", "bubble", "batch latency", "peak memory"))
    for name, lines in fold(
        answer.pipelines,
        FEW // 2,
        lambda line: line.bubble_fraction,
        lambda line: line.batch_latency_s,
        keep=lambda line: line.pipeline == answer.shown_pipeline,
    ):
        table.add(
            name or str(lines[0].pipeline),
            f"{sum(len(line.ranks) for line in lines)} ranks" if name else _show_ranks(lines[0]),
            show_range([line.bubble_fraction for line in lines], show_share),
            show_range([line.batch_latency_s for line in lines], show_seconds),
            show_largest([line.peak_memory_bytes for line in lines], show_bytes),
        )
    return table.without_unknown()


def _show_ranks(line: PipelinePart) -> str:
    missing = len(line.missing_ranks)
    part = f" ({len(line.ranks)} of {len(line.ranks) + missing})" if missing else ""
    return show_members(line.ranks) + part


def _stage_table(stages: Sequence[StagePart]) -> Table:
    """Lay out what each kind of pass takes on each stage."""
    table = Table(columns=("stage", "rank", "layers", "pass", "median", "spread", "count"))
    for kind in sorted({kind for stage in stages for kind in stage.passes}, key="FBIW".find):
        held = [(stage, stage.passes[kind]) for stage in stages if kind in stage.passes]
        most = STANDING_OUT // 2
        for name, alike in fold(held, FEW, lambda row: row[1].median_s, count=most):
            table.add(
                name or str(alike[0][0].stage),
                "" if name else str(alike[0][0].rank),
                _layers_shown([stage for stage, _ in alike]),
                kind,
                show_range([took.median_s for _, took in alike], show_seconds),
                f"± {show_seconds(max(took.mad_s for _, took in alike))}",
                show_range([took.n for _, took in alike], show_count),
            )
    return table.without_unknown()


def _layers_shown(alike: Sequence[StagePart]) -> str:
    kinds = alike[0].layer_kinds
    if len(alike) > 1 or not kinds:
        return show_range([stage.layers for stage in alike], str)
    return " + ".join(f"{kind.layers} {kind.name}" for kind in kinds)


def memory_tables(answer: FindAnswer) -> list[Table]:
    """Lay out what ranks hold: what a microbatch in flight takes decides what fits."""
    known = [
        rank
        for rank in answer.memory
        if rank.per_microbatch_bytes is not None or rank.static_bytes is not None
    ]
    if not known:
        return []
    in_flight = () if answer.stream else ("a microbatch in flight", "in flight")
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
    return table.without_unknown()


def say_framework(answer: FindAnswer) -> str:
    """Say whose framework ran it and how it divides the job; empty where nothing tells."""
    known: FrameworkPart = answer.run.framework
    if known.name is None:
        return ""
    name = {"megatron": "Megatron", "deepspeed": "DeepSpeed"}.get(known.name, known.name)
    sizes = {
        "pipeline": len(answer.shown.ranks) + len(answer.shown.missing_ranks),
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
        if answer.run.microbatches:
            batch = known.microbatch_size * answer.run.microbatches * (known.data or 1)
            parts.append(f"batch of {counted(batch, 'sample')}")
    if known.recomputes:
        parts.append("activations recomputed")
    return f"{name}: {', '.join(parts)}"


def _say_run(answer: FindAnswer) -> str:
    """Say which ranks, under which schedule, and how long a batch takes."""
    run, numbers, stream = answer.run, answer.numbers, answer.stream
    schedule = run.schedule or "schedule unknown"
    if run.stated is not None:
        stated = run.stated
        schedule = (
            f"{stated.schedule}, as stated"
            if stated.agrees
            else f"{schedule} ({stated.schedule} was stated)"
        )
    parts = [f"ranks {show_members(answer.shown.ranks)}", schedule]
    if stream is not None:
        parts[1] = "no batch was captured from first to last stage"
        if numbers.batch_latency_s is not None and stream.batch_latency_p95_s is not None:
            parts[1] = (
                f"batch latency median {show_seconds(numbers.batch_latency_s)}, p95 "
                f"{show_seconds(stream.batch_latency_p95_s)} "
                f"({counted(stream.batches, 'batch', 'batches')})"
            )
            if numbers.microbatches_per_s:
                parts[1] += f"; {show_number(numbers.microbatches_per_s)} batches/s"
    elif numbers.batch_latency_s is not None:
        steps = counted(len(run.steps), "step")
        parts.append(f"batch latency {show_seconds(numbers.batch_latency_s)} (median of {steps})")
    if run.framework.recomputes and run.framework.name is None:
        parts.append("activations recomputed")
    return "; ".join(parts)


def _say_peaks(answer: FindAnswer) -> str:
    peaks = [peak for peak in answer.numbers.peak_memory_bytes if peak is not None]
    few = " ".join(map(show_bytes, peaks))
    shown = few if len(peaks) <= FEW else show_range(peaks, show_bytes)
    return f"peak memory by rank: {shown}" if peaks else ""


def _say_slowest(pipelines: Sequence[PipelinePart], *, streams: bool) -> str:
    """Name the pipeline of a job that takes longest, where the others do not take as long."""
    known = {
        line.pipeline: line.batch_latency_s
        for line in pipelines
        if line.batch_latency_s is not None
    }
    if streams or len(known) < 2:
        return ""
    slowest = max(known, key=lambda pipeline: known[pipeline])
    others = median(length for pipeline, length in known.items() if pipeline != slowest)
    if known[slowest] < (1 + _SLOWER) * others:
        return ""
    takes, elsewhere = show_seconds(known[slowest]), show_seconds(others)
    return f"slowest: pipeline {slowest}, {takes} a batch (median of the others: {elsewhere})"


def _say_job(answer: FindAnswer) -> str:
    """Say on which basis times are, and what a step takes unprofiled, where the job timed it."""
    job, batch, sentence = (
        answer.job,
        answer.numbers.unprofiled_batch_latency_s,
        say_basis(answer.basis),
    )
    if job is None or job.unprofiled_step_time_s is None or job.overhead_fraction is None:
        return sentence
    timed = f"median of {counted(job.steps_timed, 'step')}"
    sentence += f"; unprofiled: {show_seconds(job.unprofiled_step_time_s)} a step ({timed})"
    if batch is not None:
        return (
            f"{sentence}, about {show_seconds(batch)} a batch; profiling overhead "
            f"{show_gain(job.overhead_fraction)}"
        )
    if job.overhead_fraction > 0:
        return sentence
    by = show_percent(-job.overhead_fraction)
    return f"{sentence}; profiled steps were {by} faster: the unprofiled ones were disturbed"


def _say_late(answer: FindAnswer) -> str:
    """Say whom ranks wait for in collectives of their stage, where that takes some time."""
    account = answer.ledger
    if account is None or account.shares[Cause.COLLECTIVE_WAIT] < MATTERS:
        return ""
    pairs = ", ".join(
        f"rank {late.rank} for rank {late.late_rank}" for late in account.late_in_collectives
    )
    return f"waits in collectives of a stage: {pairs}"


def _host_table(hosts: Sequence[HostTime]) -> Table:
    """Lay out what each host does with the time of a batch."""
    columns = ("host of rank", "launch", "send", "receive", "synchronise", "other")
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


def _say_profiler(answer: FindAnswer) -> str:
    """Say what the server did without the profiler; empty where it is no stream."""
    if answer.stream is None or not answer.stream.phases:
        return ""
    noted = answer.stream.profiler
    if noted is None:
        return "profiling overhead unknown: capture with --server to measure it"
    if noted.slowdown is None:
        sentence = "profiling overhead unknown: too little comparable load around the capture"
    else:
        sentence = f"unprofiled, a token took {1 / noted.slowdown:.2f} of its profiled time"
    captured = noted.captured_tokens_out_per_s
    if captured is not None:
        sentence += f"; {show_number(captured)} tokens/s out profiled, decode only"
    if noted.tokens_out_per_s is not None:
        sentence += f"; {show_number(noted.tokens_out_per_s)} tokens/s out unprofiled"
    if noted.tpot_s is not None:
        sentence += f", {show_seconds(noted.tpot_s)} a token"
    return sentence


def _say_shape(answer: FindAnswer) -> str:
    shape = answer.shape
    if shape is None:
        return "no waits between passes" if answer.run.steps else ""
    places = {"everywhere": "on all ranks", "middle": "mostly on the middle ranks"}
    where = places.get(shape.where, f"mostly on the {shape.where} rank")
    evenness = "vary" if shape.jagged_fraction > _JAGGED else "are even"
    length = show_seconds(shape.median_wait_s)
    return f"waits between passes {evenness}, median {length}, {where}"


def _say_outside(answer: FindAnswer) -> str:
    parts = [
        f"{part.replace('_', ' ')} {show_seconds(length)}"
        for part, length in answer.outside.items()
    ]
    return f"between steps: {', '.join(parts)}" if parts else ""


def _say_side_work(answer: FindAnswer) -> str:
    parts = [
        f"{part.replace('_', ' ')} {show_percent(share) if share >= 0.01 else 'below 1 %'}"
        for part, share in answer.side_work.items()
    ]
    whole = "the time" if answer.stream else "the batch"
    return f"side work (no pass waits for it): {', '.join(parts)} of {whole}" if parts else ""
