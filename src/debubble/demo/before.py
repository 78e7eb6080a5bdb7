"""The pipeline that the demo sets out from: its last stage is slow, its microbatches are few."""

from __future__ import annotations

from debubble.demo.workload import Workload

# Its last stage has more than twice the layers of the others. Layers are long against what a busy
# machine adds to a sleep, and short enough for a minute in all.
BEFORE = Workload(layers=(3, 3, 3, 7), microbatches=4, forward_ms=6.0, backward_ms=12.0)
# Beyond this the batch takes longer than anyone looks on.
MOST_MICROBATCHES = 8
# The first steps connect the ranks and infer shapes; five to profile have four step times, the
# fewest that a verdict can be tested with.
WAIT, STEPS = 2, 5
# Those that are timed before the profiler starts, its own first one, and one to end the last.
ALL_STEPS = WAIT + 2 * STEPS + 2


def job_words(workload: Workload) -> tuple[str, ...]:
    """Return what `python -m debubble.demo.job` is told, with placeholders for what changes."""
    return (
        *("-m", "debubble.demo.job", "--split", "{split}", "--microbatches", "{microbatches}"),
        *("--schedule", workload.schedule, "--steps", str(ALL_STEPS)),
        *("--forward-ms", f"{workload.forward_ms:g}"),
        *("--backward-ms", f"{workload.backward_ms:g}"),
    )
