"""Everything the verbs say of a recording in → one readable text, and how two of them differ."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from support.traces.all_recordings import Answers

from debubble.report.answers.plan import PlanAnswer
from debubble.report.answers.server_plan import ServerPlanAnswer

# Figures are exact on one machine; another one's arithmetic may differ in the last digits, and
# what is counted from medians of draws by a draw.
RELATIVE, ABSOLUTE = 0.01, 0.002
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


def snapshot_of(answers: Answers) -> dict[str, Any]:
    """Return what is said of a recording: figures, causes, hops, options, warnings, sentences."""
    found, links, plan = answers.find, answers.links, answers.plan
    numbers, run = found.numbers, found.run
    shot: dict[str, Any] = {
        "find": found.verdict,
        "bullets": [named.sentence for named in found.named],
        "run": {
            "kind": run.kind,
            "ranks": run.ranks,
            "stages": run.stages,
            "microbatches": run.microbatches,
            "schedule": run.schedule,
            "framework": run.framework.name,
            "steps": len(run.steps),
            "layers": [stage.layers for stage in found.stages],
        },
        "bubble": numbers.bubble_fraction,
        "batch latency, s": numbers.batch_latency_s,
        "step time, s": numbers.step_time_s,
        "in flight": found.stream.batches_in_flight if found.stream else None,
        "theory": [found.theory.bubble_fraction, found.theory.schedule_bubble_fraction],
        "peak, GiB": [peak and peak / 2**30 for peak in numbers.peak_memory_bytes],
        "replay error": found.replay.error_fraction if found.replay else None,
        "causes": {
            cause: share
            for cause, share in (found.ledger.shares if found.ledger else {}).items()
            if share
        },
        "savings": {saving.cause: saving.saved_fraction for saving in found.savings or ()},
        "links": links.verdict,
        "hops": [
            {
                "hop": f"{hop.from_rank}->{hop.to_rank}",
                "verdict": hop.verdict,
                "times": hop.times_expected,
                "cost, s": hop.cost_per_batch_s,
            }
            for hop in found.hops
        ],
        "plan": plan.verdict if hasattr(plan, "verdict") else str(plan),
    }
    if isinstance(plan, PlanAnswer):
        shot["findings"] = plan.findings
        shot["options"] = [
            {
                "do": option.advice,
                "gain": option.throughput_gain_fraction,
                "interval": option.interval.throughput_gain_fraction,
                "words": option.words + (" (changes training)" if option.changes_training else ""),
            }
            for option in plan.options
        ]
        shot["refused"] = [f"{refused.words}: {refused.reason}" for refused in plan.refused]
    if isinstance(plan, ServerPlanAnswer):
        shot["options"] = [
            {
                "do": option.verdict,
                "gain": option.gain_fraction,
                "interval": [option.low_fraction, option.high_fraction],
                "words": option.what,
            }
            for option in plan.options
        ]
    shot["warnings"] = sorted(warning.code for warning in found.warnings)
    return shorten(shot)


def shorten(value: Any) -> Any:
    """Round floats to what a reader wants to see."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {name: shorten(each) for name, each in value.items()}
    return [shorten(each) for each in value] if isinstance(value, list) else value


def write(shot: dict[str, Any]) -> str:
    """Write a snapshot: a line a fact, and a line a row of each list."""
    lines = []
    for name, value in shot.items():
        if isinstance(value, list) and value and isinstance(value[0], dict | str):
            rows = ",\n    ".join(json.dumps(row, ensure_ascii=False) for row in value)
            lines.append(f"  {json.dumps(name)}: [\n    {rows}\n  ]")
        else:
            lines.append(f"  {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """Yield what differs by more than the tolerances, each with its place."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in [*before, *(name for name in after if name not in before)]:
            yield from differences(before.get(name), after.get(name), f"{where}.{name}".strip("."))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for row, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{where}[{row}]")
    elif not alike(before, after):
        yield f"{where}: {before!r} -> {after!r}"


def alike(before: Any, after: Any) -> bool:
    """Tell whether two values are the same; of sentences, words are and figures nearly are."""
    if isinstance(before, str) and isinstance(after, str):
        figures = [[float(text) for text in NUMBER.findall(said)] for said in (before, after)]
        return NUMBER.sub("#", before) == NUMBER.sub("#", after) and all(
            # Shown figures are rounded: one may fall on the other side.
            abs(one - other) <= max(RELATIVE * abs(one), 1.0 if abs(one) >= 10 else 0.1)
            for one, other in zip(*figures, strict=True)
        )
    if isinstance(before, float | int) and isinstance(after, float | int):
        return abs(before - after) <= max(RELATIVE * abs(before), ABSOLUTE)
    return bool(before == after)
