"""What a probe found in → what `debubble probe` prints."""

from __future__ import annotations

from debubble.answers.probe import PipelinePart, ProbeAnswer
from debubble.report.text import Page, Table
from debubble.units import NS_PER_S, counted, show_bytes, show_duration, show_share

# Of all pipelines so many are listed; `--json` has the others.
_LISTED = 12


def probe_page(found: ProbeAnswer, next_command: str = "") -> Page:
    """Say which pipeline of the model would do most work a second, and what that rests on."""
    fitting = [one for one in found.pipelines if one.fits_memory is not False]
    page = Page(answer=_say_best(found, fitting), next_command=next_command)
    sizes = Table(
        columns=("part", "tokens", "forward", "backward", "input gradient", "kept", "weights"),
        title="timed on this device, one microbatch",
    )
    for part in found.parts:
        sizes.rows.append(
            (
                part.part,
                str(part.tokens),
                show_duration(part.forward_s * NS_PER_S),
                show_duration(part.backward_s * NS_PER_S) if found.trains else "–",
                show_duration(part.input_grad_s * NS_PER_S) if found.trains else "–",
                show_bytes(part.saved_bytes),
                show_bytes(part.weight_bytes),
            )
        )
    page.tables.append(sizes)
    if found.pipelines:
        page.tables.append(_list(found))
    page.notes += [f"assumed: {said}" for said in found.assumptions]
    page.notes += [f"{name} written" for name in found.written]
    return page


def _say_best(found: ProbeAnswer, fitting: list[PipelinePart]) -> str:
    layers = counted(found.layers, "layer")
    if not fitting:
        reason = "none fits memory" if found.pipelines else "none can be cut so"
        return f"{layers} timed on {found.device}; of the pipelines asked about {reason}."
    best = fitting[0]
    return (
        f"{layers} timed on {found.device}: of the pipelines asked about, {best.schedule} on"
        f" {counted(best.stages, 'rank')} with {best.microbatches} microbatches would take"
        f" {show_duration(best.batch_latency_s * NS_PER_S)} a batch,"
        f" {best.tokens_per_s:,.0f} tokens/s, bubble {show_share(best.bubble_fraction)}."
    )


def _list(found: ProbeAnswer) -> Table:
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
            "peak",
        ),
        title="pipelines, simulated, by throughput",
    )
    for one in found.pipelines[:_LISTED]:
        peak = show_bytes(max(one.peak_memory_bytes))
        table.rows.append(
            (
                str(one.stages),
                one.schedule,
                str(one.microbatches),
                str(one.tokens),
                ",".join(map(str, one.split)),
                show_duration(one.batch_latency_s * NS_PER_S),
                show_share(one.bubble_fraction),
                f"{one.tokens_per_s:,.0f}",
                f"{peak}, too large" if one.fits_memory is False else peak,
            )
        )
    return table
