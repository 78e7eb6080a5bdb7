"""What profilers, copies and people really do to the trace of a rank; each changes its document."""

from __future__ import annotations

from collections.abc import Callable

from support.traces.documents import Document, drop, drop_these, is_compute, on_device


def _kernels_of(document: Document) -> list[Document]:
    return [event for event in on_device(document) if is_compute(event)]


def _middle(document: Document) -> Document:
    """Return the longest kernel of the middle of a capture."""
    kernels = _kernels_of(document)
    third = len(kernels) // 3
    return max(kernels[third : 2 * third], key=lambda e: e["dur"])


def a_kernel_at_time_0(document: Document) -> None:
    _middle(document)["ts"] = 0


def a_kernel_a_second_late(document: Document) -> None:
    _middle(document)["ts"] += 1e6


def the_last_kernel_a_second_late(document: Document) -> None:
    _kernels_of(document)[-1]["ts"] += 1e6


def a_kernel_half_a_second_long(document: Document) -> None:
    _middle(document)["dur"] = 5e5


def every_ninth_kernel_dropped(document: Document) -> None:
    drop_these(document, _kernels_of(document)[::9])


def every_seventh_kernel_doubled(document: Document) -> None:
    document["traceEvents"] += [dict(event) for event in _kernels_of(document)[::7]]


def a_lost_buffer_of_kernels(document: Document) -> None:
    kernels = on_device(document)
    drop_these(document, kernels[len(kernels) // 2 : len(kernels) // 2 + len(kernels) // 20])


def a_lost_buffer_of_launches(document: Document) -> None:
    calls = [e for e in document["traceEvents"] if e.get("cat") == "cuda_runtime"]
    calls.sort(key=lambda e: e["ts"])
    drop_these(document, calls[len(calls) // 2 : len(calls) // 2 + len(calls) // 20])


def half_the_device_40_ms_late(document: Document) -> None:
    _shift_half(document, 4e4)


def half_the_device_40_ms_early(document: Document) -> None:
    _shift_half(document, -4e4)


def _shift_half(document: Document, by_us: float) -> None:
    kernels = on_device(document)
    for event in kernels[len(kernels) // 2 :]:
        event["ts"] += by_us


def no_base_time(document: Document) -> None:
    document.pop("baseTimeNanoseconds")


def no_c10d_operators(document: Document) -> None:
    drop(document, lambda e: e["name"].startswith(("c10d::", "record_param_comms")))


def keys_in_another_order(document: Document) -> None:
    document["traceEvents"] = [
        {key: event[key] for key in sorted(event, reverse=True)}
        for event in document["traceEvents"]
    ]


def a_total_of_memory_times_1000(document: Document) -> None:
    totals = [e for e in document["traceEvents"] if e["name"] == "[memory]"]
    for event in totals[len(totals) // 2 :][:1]:
        event["args"]["Total Allocated"] *= 1000


def steps_of_one_number(document: Document) -> None:
    marks = [e for e in document["traceEvents"] if e["name"].startswith("ProfilerStep#")]
    for event in marks:
        event["name"] = marks[0]["name"]


DAMAGES: tuple[Callable[[Document], None], ...] = (
    a_kernel_at_time_0, a_kernel_a_second_late, the_last_kernel_a_second_late,
    a_kernel_half_a_second_long, every_ninth_kernel_dropped, every_seventh_kernel_doubled,
    a_lost_buffer_of_kernels, a_lost_buffer_of_launches, half_the_device_40_ms_late,
    half_the_device_40_ms_early, no_base_time, no_c10d_operators, keys_in_another_order,
    a_total_of_memory_times_1000, steps_of_one_number,
)  # fmt: skip
