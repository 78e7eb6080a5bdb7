"""What `find` answers in → named numbers for whatever tracks experiments.

    wandb.log(debubble.scalars(found))                      # Weights & Biases
    mlflow.log_metrics(debubble.scalars(found), step=1000)  # MLflow

A name is stable, a unit is in it, and every value is a float: a run that is captured again and
again draws a line.
"""

from __future__ import annotations

from debubble.report.answers.find import FindAnswer


def scalars(answer: FindAnswer, prefix: str = "debubble") -> dict[str, float]:
    """Return the figures of a run by name, such as `debubble/cause/imbalance_fraction`.

    What is not known is left out: a gap in a line says so, a zero would not.
    """
    numbers = answer.numbers
    named: dict[str, float | None] = {
        "bubble_fraction": numbers.bubble_fraction,
        "theory_bubble_fraction": answer.theory.bubble_fraction,
        "batch_latency_s": numbers.batch_latency_s,
        "step_time_s": numbers.step_time_s,
        "microbatches_per_s": numbers.microbatches_per_s,
        "tokens_per_s": numbers.tokens_per_s,
        "useful_fraction": answer.utilisation.useful_fraction,
        "apparent_fraction": answer.utilisation.apparent_fraction,
    }
    for held, peak in zip(answer.memory, numbers.peak_memory_bytes, strict=True):
        named[f"peak_memory_bytes/rank{held.rank}"] = peak
    for cause, share in (answer.ledger.shares if answer.ledger else {}).items():
        named[f"cause/{cause}_fraction"] = share
    for saving in answer.savings or ():
        named[f"saving/{saving.cause}_s"] = saving.saved_s
    for hop in answer.hops:
        name = f"hop/{hop.from_rank}to{hop.to_rank}"
        named[f"{name}_wire_s"] = hop.wire_s.median
        named[f"{name}_cost_s"] = hop.cost_per_batch_s
    return {f"{prefix}/{name}": float(value) for name, value in named.items() if value is not None}
