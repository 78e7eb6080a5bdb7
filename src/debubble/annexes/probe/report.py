"""Pipelines of a probed model in → what `debubble probe` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from debubble.annexes.probe.answers import PipelinePart, ProbeAnswer
from debubble.report.text import Page, Table
from debubble.units import (
    UNKNOWN,
    counted,
    show_bytes,
    show_count,
    show_number,
    show_percent,
    show_seconds,
    show_share,
)

# Of all pipelines so many are listed, as many of each number of ranks; `--json` has the others.
_LISTED = 12


def probe_page(answer: ProbeAnswer, next_command: str = "") -> Page:
    """Say which pipeline of the model would do most work a second, and what that rests on."""
    fitting = [pipeline for pipeline in answer.pipelines if pipeline.fits_memory is not False]
    page = Page(answer=_say_best(answer, fitting), next_command=next_command)
    if len({pipeline.stages for pipeline in fitting}) > 1:
        best = max(fitting, key=_tokens_a_rank)
        page.findings.append(
            f"Per rank, {best.schedule} on {counted(best.stages, 'rank')} with"
            f" {best.microbatches} microbatches is best: {show_number(_tokens_a_rank(best))}"
            f" tokens/s a rank."
        )
    sizes = Table(
        columns=("part", "tokens", "forward", "backward", "input gradient", "kept", "weights"),
        title="timed on this device, one microbatch",
    )
    for part in answer.parts:
        sizes.add(
            part.part,
            show_count(part.tokens),
            show_seconds(part.forward_s),
            show_seconds(part.backward_s) if answer.trains else UNKNOWN,
            show_seconds(part.input_grad_s) if answer.trains else UNKNOWN,
            show_bytes(part.saved_bytes),
            show_bytes(part.weight_bytes),
        )
    page.tables.append(sizes)
    if answer.pipelines:
        page.tables.append(_list(answer))
    page.notes += [f"assumed: {words}" for words in answer.assumptions]
    page.notes += [f"{name} written" for name in answer.written]
    return page


def _say_best(answer: ProbeAnswer, fitting: list[PipelinePart]) -> str:
    layers = counted(answer.layers, "layer")
    if not fitting:
        reason = "fits memory" if answer.pipelines else "can be cut so"
        return f"{layers} timed on {answer.device}; none of the pipelines asked for {reason}."
    best = fitting[0]
    return (
        f"{layers} timed on {answer.device}: best pipeline: {best.schedule} on"
        f" {counted(best.stages, 'rank')} with {best.microbatches} microbatches:"
        f" {show_seconds(best.batch_latency_s)} a batch,"
        f" {show_number(best.tokens_per_s)} tokens/s, bubble {show_percent(best.bubble_fraction)}."
    )


def _tokens_a_rank(pipeline: PipelinePart) -> float:
    return pipeline.tokens_per_s / pipeline.stages


def _show_split(split: Sequence[int]) -> str:
    return f"{split[0]} each" if len(set(split)) == 1 else ",".join(map(str, split))


def _list(answer: ProbeAnswer) -> Table:
    numbers = {pipeline.stages for pipeline in answer.pipelines}
    table = Table(
        columns=(
            "ranks",
            "schedule",
            "m",
            "tokens",
            "split",
            "batch",
            "bubble",
            "tokens/s",
            "a rank",
            "peak",
        ),
        title="pipelines, simulated, by throughput",
    )
    seen = Counter[int]()
    for pipeline in answer.pipelines:
        seen[pipeline.stages] += 1
        if seen[pipeline.stages] > max(_LISTED // len(numbers), 1):
            continue
        peak = show_bytes(max(pipeline.peak_memory_bytes))
        table.add(
            str(pipeline.stages),
            pipeline.schedule,
            str(pipeline.microbatches),
            show_count(pipeline.tokens),
            _show_split(pipeline.split),
            show_seconds(pipeline.batch_latency_s),
            show_share(pipeline.bubble_fraction),
            show_number(pipeline.tokens_per_s),
            show_number(_tokens_a_rank(pipeline)),
            f"{peak}, too large" if pipeline.fits_memory is False else peak,
        )
    return table
