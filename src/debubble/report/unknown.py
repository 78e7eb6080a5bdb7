"""A measured pipeline in → why each field of `find`'s JSON that is null is null."""

from __future__ import annotations

from debubble.report.ledger import WITHOUT_TRACE
from debubble.report.theory import theory_of, theory_of_schedule
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.job import JobFacts


def reasons_for_null(one: PipelineFigures, job: JobFacts) -> dict[str, str]:
    """Return a sentence for each figure that the traces do not give."""
    streams = one.kind == "stream"
    no_steps = "batches overlap: a stream has no steps" if streams else "no step is whole"
    reasons = {
        "hops[].expected_bytes_per_s": "what these links should carry is not known from traces",
    }
    missing = {
        "numbers.tokens_per_s": job.tokens is None or job.unprofiled_step_s is None or streams,
        "numbers.unprofiled_batch_latency_s": job.overhead_fraction is None,
        "run.microbatches": one.microbatches is None,
        "run.schedule": one.schedule is None,
        "numbers.bubble_fraction": one.bubble_fraction is None,
        "numbers.step_time_s": one.step_time_ns is None,
        "theory.bubble_fraction": theory_of(one) is None,
        "theory.schedule_bubble_fraction": theory_of_schedule(one) is None,
        "numbers.peak_memory_bytes[]": any(rank.memory is None for rank in one.ranks),
        "hops[].wire_s": any(hop.wire_ns is None for hop in one.hops),
        "hops[].bytes": any(hop.message_bytes < 0 for hop in one.hops),
        "bottleneck": bool(one.absent),
        "hops[].from_stage": any(len(hop.stages) > 1 for hop in one.hops),
    }
    why = {
        "numbers.tokens_per_s": no_steps
        if streams
        else "traces do not tell how many tokens a step has: give tokens= to debubble.capture",
        "numbers.unprofiled_batch_latency_s": "no sidecar beside the traces says what steps take "
        "without the profiler",
        "run.microbatches": no_steps if streams else "steps or stages differ in their number",
        "run.schedule": no_steps if streams else "no known schedule orders passes like that",
        "numbers.bubble_fraction": "no span that all ranks share" if streams else no_steps,
        "numbers.step_time_s": no_steps if streams else "it takes two steps to tell",
        "theory.bubble_fraction": no_steps
        if streams
        else "the formula holds for one stage a rank, all ranks known",
        "theory.schedule_bubble_fraction": no_steps
        if streams
        else "it takes a schedule and all its ranks and kinds of passes",
        "numbers.peak_memory_bytes[]": "record with profile_memory=True, on a device",
        "hops[].wire_s": "every message had left before its receive began",
        "hops[].bytes": "record with record_shapes=True",
        "bottleneck": WITHOUT_TRACE,
        "hops[].from_stage": "these ranks hold several neighbouring stages: see `stages`",
    }
    return reasons | {field: why[field] for field, is_missing in missing.items() if is_missing}
