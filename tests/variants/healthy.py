"""A recording in → the same run as other machines, jobs and profilers would have recorded it.

None may be refused, none may close a gate; where an edit does not touch passes, figures stay.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from random import Random

from support.traces.documents import (
    CALLS,
    ON_DEVICE,
    Documents,
    Event,
    drop,
    drop_these,
    is_compute,
    launches_of,
    on_device,
)
from variants.resimulate import Replay, Speeds

Variant = Callable[[Replay], Documents]
Edit = Callable[[Event, Random], None]

_LONG_US, _SHORT_US = 300.0, 60.0
_LOADER, _SIDE_STREAM = 777_001, 99


def faster(**speeds: object) -> Variant:
    """Run again at other speeds."""
    return lambda replay: replay.run(Speeds(**speeds))


def edited(
    edit: Edit, ranks: Callable[[list[int]], Iterable[int]] = list, **speeds: object
) -> Variant:
    """Run again, maybe at other speeds, and write the traces of some ranks otherwise."""

    def make(replay: Replay) -> Documents:
        documents = replay.run(Speeds(**speeds))
        for rank in ranks(sorted(documents)):
            edit(documents[rank], Random(rank))  # noqa: S311 (no secret)
        return documents

    return make


def marks_of(document: Event) -> list[Event]:
    marks = [e for e in document["traceEvents"] if e["name"].startswith("ProfilerStep#")]
    marks = [e for e in marks if e.get("cat") == "user_annotation"]
    return sorted(marks, key=lambda e: e["ts"])


# Devices, hosts and links of other speeds.


def share_of(replay: Replay) -> Callable[[float], float]:
    """Return which share of the run is over at a moment."""
    kernels = replay.kernels[min(replay.kernels)]
    begin, end = kernels[0]["ts"], kernels[-1]["ts"]
    return lambda at: (at - begin) / (end - begin)


def throttled(replay: Replay, factor: Callable[[float], float], rank: int) -> Documents:
    """One device is slower by a factor, given the share of the run that is over."""
    share, chosen = share_of(replay), sorted(replay.kernels)[rank]
    return replay.run(Speeds(device=lambda r, at, _: factor(share(at)) if r == chosen else 1.0))


def from_the_middle(share: float) -> float:
    return 1.4 if share > 0.5 else 1.0


def slower_links(
    replay: Replay, more_us: float, ways: tuple[tuple[int, int], ...] = ()
) -> Documents:
    """From the middle on messages take longer: all of them, or those between two places."""
    share, ranks = share_of(replay), sorted(replay.kernels)
    slow = [(ranks[source], ranks[destination]) for source, destination in ways]
    return replay.run(
        Speeds(
            wire=lambda source, destination, at: (
                more_us if share(at) > 0.5 and (not slow or (source, destination) in slow) else 0.0
            )
        )
    )


def jitter(replay: Replay) -> Documents:
    random = Random(1)  # noqa: S311 (no secret)
    return replay.run(
        Speeds(
            device=lambda *_: random.uniform(0.8, 1.3),
            wire=lambda *_: random.expovariate(1 / 800.0),
        )
    )


def uneven_microbatches(replay: Replay) -> Documents:
    """Sequences of other lengths: each microbatch takes as much more or less on all ranks."""
    passes = replay.timeline.passes
    spans: dict[int, list[tuple[int, int, float]]] = {}
    for rank, start, end, number, step in zip(
        passes.rank.tolist(),
        passes.start_ns.tolist(),
        passes.end_ns.tolist(),
        passes.microbatch.tolist(),
        passes.step.tolist(),
        strict=True,
    ):
        factor = Random(f"{step} {number}").uniform(0.4, 1.7)  # noqa: S311 (no secret)
        spans.setdefault(rank, []).append((start, end, factor))
    for known in spans.values():
        known.sort()

    def device(rank: int, at: float, _: Event) -> float:
        moment = replay.base_ns[rank] + round(at * 1000)
        known = spans.get(rank, [])
        row = bisect_right(known, (moment + 1,)) - 1
        return known[row][2] if row >= 0 and moment <= known[row][1] else 1.0

    return replay.run(Speeds(device=device))


def pauses(replay: Replay, length_us: float, times: int) -> Documents:
    """A garbage collector, or a neighbour, stops hosts now and then."""
    kernels, ranks = replay.kernels[min(replay.kernels)], sorted(replay.kernels)
    begin, span = kernels[0]["ts"], kernels[-1]["ts"] - kernels[0]["ts"]
    stops = tuple(
        (ranks[n % len(ranks)], begin + span * (n + 1) / (times + 1), length_us)
        for n in range(times)
    )
    return replay.run(Speeds(pauses=stops))


# How devices overlap and launch work.


def tiny(document: Event, random: Random) -> None:
    """The shortest kernels last less than any that we recorded."""
    for event in document["traceEvents"]:
        if is_compute(event) and event["dur"] < 4:
            event["dur"] = round(random.uniform(0.3, 0.59), 3)


def overlap(
    document: Event, random: Random, *, us: tuple[float, float], chain: bool = False
) -> None:
    """Programmatic dependent launch: a kernel begins before the one ahead has ended."""
    launches = launches_of(document)
    work = [e for e in on_device(document) if "nccl" not in e["name"].lower()]
    work.sort(key=lambda e: (e["args"]["stream"], e["ts"]))
    for first, second, third in zip(work, work[1:], work[2:], strict=False):
        launch = launches.get(second["args"].get("correlation"))
        ended = first["ts"] + first["dur"]
        near = first["dur"] >= _LONG_US and 0 <= second["ts"] - ended < 10
        streams = {e["args"]["stream"] for e in (first, second, third)}
        if len(streams) > 1 or not near or not is_compute(second) or launch is None:
            continue
        end = second["ts"] + second["dur"]
        begin = max(ended - random.uniform(*us), launch["ts"] + launch["dur"], first["ts"] + 1.5)
        if begin < second["ts"]:
            second["ts"], second["dur"] = round(begin, 3), round(end - begin, 3)
            called = launches.get(third["args"].get("correlation"))
            begin += 2.5
            late = called is None or called["ts"] + called["dur"] > begin
            late |= not 0 <= third["ts"] - end < 10
            if chain and is_compute(third) and not late and third["dur"] < _SHORT_US:
                end = third["ts"] + third["dur"]
                third["ts"], third["dur"] = round(begin, 3), round(end - begin, 3)


def graphs(document: Event, _: Random, *, nodes: bool = True) -> None:
    """Kernels between messages are launched by one call; no graph goes into an optimizer's range,
    or over a step's end.
    """
    launches, marks = launches_of(document), [e["ts"] for e in marks_of(document)]
    ranges = [e for e in document["traceEvents"] if e["name"].startswith("Optimizer.step#")]
    marks = sorted([*marks, *(e["ts"] for e in ranges if e.get("cat") == "user_annotation")])
    joined = [
        (launches[event["args"]["correlation"]], event)
        for event in on_device(document)
        if event["args"].get("correlation") in launches
    ]
    joined.sort(key=lambda pair: pair[0]["ts"])
    runs: list[list[tuple[Event, Event]]] = [[]]
    for launch, event in joined:
        first = runs[-1][0][0] if runs[-1] else launch
        apart = launch["tid"] != first["tid"] or launch["ts"] - first["ts"] > 3e4
        apart |= bisect_right(marks, launch["ts"]) != bisect_right(marks, first["ts"])
        if "nccl" in event["name"].lower():
            runs.append([])
        elif apart:
            runs.append([(launch, event)])
        else:
            runs[-1].append((launch, event))
    gone = []
    for number, run in enumerate(run for run in runs if len(run) >= 4):
        graph, first = 1_000_000 + number, run[0][0]
        first |= {"name": "cudaGraphLaunch", "dur": round(8 + 0.3 * len(run), 3)}
        first["args"]["correlation"] = graph
        for node, (launch, event) in enumerate(run, start=1):
            event["args"]["correlation"] = graph
            if nodes:
                event["args"] |= {"graph node id": node, "graph id": 17}
            gone += [launch] if launch is not first else []
    drop_these(document, gone)


def streams(document: Event, _: Random, *, many: int) -> None:
    """Passes run on many streams, a few kernels on each in turn."""
    work = [e for e in on_device(document) if "nccl" not in e["name"].lower()]
    for row, event in enumerate(work):
        event["args"]["stream"] = 1000 * event["args"]["stream"] + (row // 6) % many
        event["tid"] = event["args"]["stream"]


def renumber_streams(document: Event, _: Random) -> None:
    for event in on_device(document):
        event["args"]["stream"] = 3 * event["args"]["stream"] + 1


def calls_of_another_thread(document: Event, _: Random) -> None:
    """A helper thread sets memory and copies on the stream of the passes."""
    launches = launches_of(document)
    for event in [e for e in on_device(document) if e["cat"] != "kernel"][::3]:
        if event["args"].get("correlation") in launches:
            launches[event["args"]["correlation"]]["tid"] = 424_242


def waits_for_a_flag(replay: Replay) -> Documents:
    """Streams wait for a flag that a peer writes: nothing runs though kernels are queued."""
    documents = replay.run()
    rank, random = sorted(documents)[1], Random(3)  # noqa: S311 (no secret)
    work, gaps, end = on_device(documents[rank]), list[float](), 0.0
    for before, after in pairwise(work):
        end = max(end, before["ts"] + before["dur"])
        if 0 < after["ts"] - end < 4:
            gaps.append((end + after["ts"]) / 2)
    stops = sorted(random.sample(gaps, min(60, len(gaps))))
    for document in documents.values():
        for event in document["traceEvents"]:
            if "ts" in event and event["ph"] != "M":
                end = event["ts"] + event.get("dur", 0.0)
                event["ts"] = round(event["ts"] + 300.0 * bisect_right(stops, event["ts"]), 3)
                if "dur" in event:
                    moved = end + 300.0 * bisect_right(stops, end)
                    event["dur"] = round(moved - event["ts"], 3)
    return documents


# What runs beside passes.


def beside(
    document: Event,
    at: float,
    *,
    name: str,
    lasts: float,
    number: int,
    stream: int = _SIDE_STREAM,
    thread: int = _LOADER,
) -> None:
    """Add a copy or a kernel that no pass waits for, and the call that launches it."""
    process = next(e["pid"] for e in document["traceEvents"] if e.get("cat") == "cuda_runtime")
    copies = name.startswith("Memcpy")
    called = {"cbid": 41, "correlation": number}
    ran = {"device": 0, "context": 1, "stream": stream, "correlation": number}
    call = {"ph": "X", "cat": "cuda_runtime", "pid": process, "tid": thread, "args": called,
            "name": "cudaMemcpyAsync" if copies else "cudaLaunchKernel"}  # fmt: skip
    work = {"ph": "X", "cat": "gpu_memcpy" if copies else "kernel", "pid": 0, "tid": stream,
            "name": name, "args": ran}  # fmt: skip
    call |= {"ts": round(at, 3), "dur": 6.1}
    work |= {"ts": round(at + 9, 3), "dur": round(lasts, 3)}
    document["traceEvents"] += [call, work]


def spread(document: Event, times: int) -> list[float]:
    work = on_device(document)
    begin, span = work[0]["ts"], work[-1]["ts"] - work[0]["ts"]
    return [begin + span * (number + 0.5) / (times + 1) for number in range(times)]


_TO_DEVICE, _TO_HOST = "Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pinned)"


def prefetch(document: Event, random: Random, *, times: int = 40, cast: bool = False) -> None:
    """A thread of a data loader copies batches ahead, and may cast them there."""
    for row, at in enumerate(spread(document, times)):
        number = 5_000_000 + 2 * row
        beside(document, at, name=_TO_DEVICE, lasts=random.uniform(2, 3), number=number)
        if cast:
            beside(document, at + 12, name="cast_batch", lasts=3.0, number=number + 1)


def prefetch_by_main(document: Event, random: Random, *, lasts: float = 2.5) -> None:
    """The schedule's own thread copies ahead, on a stream of its own."""
    launches = [e for e in document["traceEvents"] if e["name"] == "cudaLaunchKernel"]
    threads = [e["tid"] for e in launches]
    main = max(set(threads), key=threads.count)
    calls = sorted(
        e["ts"] + e["dur"]
        for e in document["traceEvents"]
        if e.get("cat") in CALLS and e.get("tid") == main
    )
    for row in range(40):
        at, number = calls[int((row + 0.5) / 41 * len(calls))] + 0.3, 5_000_000 + row
        took = lasts * random.uniform(0.8, 1.2)
        beside(document, at, name=_TO_DEVICE, lasts=took, number=number, thread=main)


def checkpoint(document: Event, _: Random, *, each: float = 800.0) -> None:
    """A thread copies the state to the host while the job goes on."""
    at = on_device(document)[0]["ts"] + 3e4
    for row in range(30):
        beside(document, at, name=_TO_HOST, lasts=each, number=6_000_000 + row, stream=98)
        at += each + 50


def offload(document: Event, random: Random) -> None:
    """Optimizer states go to the host and come back, each on a stream of its own."""
    for row, at in enumerate(spread(document, 24)):
        name, stream = ((_TO_HOST, 97), (_TO_DEVICE, 96))[row % 2]
        took = random.uniform(200, 900)
        beside(document, at, name=name, lasts=took, number=7_000_000 + row, stream=stream)


# What jobs run, and what profilers write.


def other_shapes(document: Event, random: Random, *, share: float) -> None:
    """Of the last step, some short kernels did not run, nor were they launched."""
    launches, marks = launches_of(document), marks_of(document)
    since = marks[-1]["ts"] if marks else 0.0
    gone = []
    for event in document["traceEvents"]:
        launch = launches.get(event.get("args", {}).get("correlation"))
        short = is_compute(event) and event["dur"] < _SHORT_US
        if short and launch and launch["ts"] >= since and random.random() < share:
            gone += [event, launch]
    drop_these(document, gone)


def other_experts(document: Event, random: Random) -> None:
    """A rank with other experts: an eighth of its kernels is of other names and lengths."""
    for event in document["traceEvents"]:
        if is_compute(event) and event["dur"] < _SHORT_US and random.random() < 0.12:
            event["name"] = f"grouped_gemm_{random.randrange(9)}"
            event["dur"] = round(event["dur"] * random.uniform(0.5, 1.0), 3)


def rounded(document: Event, _: Random, *, us: float = 1.0) -> None:
    """Times in whole microseconds, as older profilers write them, or tens of them."""
    for event in document["traceEvents"]:
        if "ts" in event and event.get("ph") != "M":
            end = event["ts"] + event.get("dur", 0.0)
            event["ts"] = event["ts"] // us * us
            if "dur" in event:
                event["dur"] = max(end // us * us - event["ts"], 0.0)


def ticks(document: Event, _: Random, *, us: float) -> None:
    """The device counts in ticks; a kernel takes one at the least."""
    for event in on_device(document):
        begin, end = (edge // us * us for edge in (event["ts"], event["ts"] + event["dur"]))
        event["ts"], event["dur"] = round(begin, 3), round(max(end - begin, us), 3)


def renamed(document: Event, _: Random, *, names: tuple[tuple[str, str], ...]) -> None:
    for event in document["traceEvents"]:
        if event.get("cat") in (*ON_DEVICE, *CALLS):
            for pattern, to in names:
                if re.search(pattern, event["name"]):
                    event["name"] = re.sub(pattern, to, event["name"], count=1)
                    break


TRITON = ((r".*vectorized_elementwise.*", "triton_poi_fused_gelu_add"),
          (r".*reduce_kernel.*", "triton_red_fused_native_layer_norm"),
          (r".*elementwise_kernel.*", "triton_poi_fused_copy"))  # fmt: skip
ROCM = ((r"^nccl.*", "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)"),
        (r".*nvjet.*", "Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64"),
        (r"^cudaLaunchKernelExC.*", "hipExtLaunchKernel"),
        (r"^cuLaunchKernel.*", "hipModuleLaunchKernel"), (r"^cuda(.*)", r"hip\1"))  # fmt: skip


def without_memory(document: Event, _: Random) -> None:
    drop(document, lambda event: event["name"] == "[memory]")


def small_pages(document: Event, _: Random) -> None:
    for event in document["traceEvents"]:
        if event["name"] == "[memory]" and event["args"].get("Total Reserved", 0) > 0:
            event["args"]["Total Reserved"] += 1536


def cut_end(document: Event, _: Random) -> None:
    """The capture ended before the device had done all that was launched."""
    work = on_device(document)
    begin, end = work[0]["ts"], work[-1]["ts"]
    cut = end - 0.05 * (end - begin)
    drop(document, lambda event: event.get("cat") in ON_DEVICE and event["ts"] > cut)


def without_header(document: Event, _: Random, *, names: tuple[str, ...]) -> None:
    for name in names:
        document.pop(name, None)
        document["distributedInfo"].pop(name, None)


def old_stamps(document: Event, random: Random) -> None:
    """As before torch 2.2: whole microseconds since 1970, and no base time."""
    base = document.pop("baseTimeNanoseconds", 0) / 1000
    for event in document["traceEvents"]:
        if "ts" in event and event.get("ph") != "M":
            event["ts"] += base
    rounded(document, random)


def without_marks(document: Event, _: Random) -> None:
    drop(document, lambda event: event["name"].startswith("ProfilerStep#"))


def other_clock(document: Event, random: Random, *, most_ns: float) -> None:
    """The clock of the host is off."""
    document["baseTimeNanoseconds"] += round(random.uniform(-most_ns, most_ns))


def ends(ranks: list[int]) -> list[int]:
    return [ranks[0], ranks[-1]]


def second(ranks: list[int]) -> list[int]:
    return ranks[1:2]


def last(ranks: list[int]) -> list[int]:
    return ranks[-1:]


HEALTHY: dict[str, Variant] = {
    "rerun": faster(),
    "device_3x": faster(device=lambda *_: 1 / 3),
    "device_8x": faster(device=lambda *_: 1 / 8),
    "device_third": faster(device=lambda *_: 3.0),
    "host_slow": faster(host=3.0),
    "host_fast": faster(host=1 / 3),
    "pause_300ms": partial(pauses, length_us=3e5, times=1),
    "throttled": partial(throttled, factor=from_the_middle, rank=1),
    "throttled_last": partial(throttled, factor=from_the_middle, rank=-1),
    "uneven_microbatches": uneven_microbatches,
    "link_3ms": partial(slower_links, more_us=3000.0, ways=((0, 1),)),
    "link_3ms_both_ways": partial(slower_links, more_us=3000.0, ways=((0, 1), (1, 0))),
    "links_10ms": partial(slower_links, more_us=10_000.0),
    "jitter": jitter,
    "tiny": edited(tiny),
    "tiny_3x": edited(tiny, device=lambda *_: 1 / 3),
    "graphs": edited(graphs),
    "graphs_without_nodes": edited(partial(graphs, nodes=False)),
    "graphs_3x": edited(graphs, device=lambda *_: 1 / 3),
    "graphs_of_one_rank": edited(graphs, second),
    "overlap_200us": edited(partial(overlap, us=(60, 200))),
    "overlap_6us": edited(partial(overlap, us=(2, 6))),
    "chained_triggers": edited(partial(overlap, us=(60, 200), chain=True)),
    "flags": waits_for_a_flag,
    "streams_12": edited(partial(streams, many=12)),
    "streams_40": edited(partial(streams, many=40)),
    "threads": edited(calls_of_another_thread),
    "threads_but_last": edited(calls_of_another_thread, lambda ranks: ranks[:-1]),
    "prefetch": edited(prefetch),
    "prefetch_of_one_rank": edited(prefetch, second),
    "prefetch_16_at_ends": edited(partial(prefetch, times=16), ends),
    "prefetch_4": edited(partial(prefetch, times=4)),
    "prefetch_by_main": edited(prefetch_by_main),
    "checkpoint": edited(checkpoint),
    "checkpoint_of_one_rank": edited(checkpoint, second),
    "other_shapes": edited(partial(other_shapes, share=0.09)),
    "other_shapes_last": edited(partial(other_shapes, share=0.09), last),
    "other_shapes_of_two": edited(partial(other_shapes, share=0.04), ends),
    "whole_us": edited(rounded),
    "whole_us_of_one_rank": edited(rounded, second),
    "ticks_1024ns": edited(partial(ticks, us=1.024)),
    "ticks_32ns": edited(partial(ticks, us=0.032)),
    "no_memory": edited(without_memory),
    "memory_of_rank_0": edited(without_memory, lambda ranks: ranks[1:]),
    "small_pages": edited(small_pages),
    "triton": edited(partial(renamed, names=TRITON)),
    "rocm": edited(partial(renamed, names=ROCM)),
    "cut_end": edited(cut_end),
    "cut_end_of_one_rank": edited(cut_end, second),
    "no_unit": edited(partial(without_header, names=("displayTimeUnit",))),
    "no_base": edited(partial(without_header, names=("baseTimeNanoseconds",))),
    "no_groups": edited(partial(without_header, names=("pg_config",))),
    "old_stamps": edited(old_stamps),
    "no_marks": edited(without_marks),
}
"""Those that the rules were made by."""

KEPT_BACK: dict[str, Variant] = {
    "back_device_uneven": faster(device=lambda rank, *_: (0.35, 2.6, 1.0, 0.6)[rank % 4]),
    "back_host_and_device": faster(device=lambda *_: 0.3, host=0.6),
    "back_overlap_9us": edited(partial(overlap, us=(3, 9), chain=True)),
    "back_overlap_at_ends": edited(partial(overlap, us=(300, 900)), ends),
    "back_graphs_at_ends": edited(graphs, ends),
    "back_prefetch_cast": edited(partial(prefetch, times=25, cast=True)),
    "back_prefetch_long": edited(partial(prefetch_by_main, lasts=400.0)),
    "back_checkpoint_long": edited(partial(checkpoint, each=4000.0), last),
    "back_offload": edited(offload),
    "back_experts": edited(other_experts, second),
    "back_shapes_first": edited(partial(other_shapes, share=0.2), lambda ranks: ranks[:1]),
    "back_pauses": partial(pauses, length_us=5e4, times=6),
    "back_drift": partial(throttled, factor=lambda share: 1 + 0.5 * share, rank=-1),
    "back_clocks_1ms": edited(partial(other_clock, most_ns=1.5e6)),
    "back_clocks_8s": edited(partial(other_clock, most_ns=8e9), second),
    "back_whole_10us": edited(partial(rounded, us=10.0)),
    "back_streams": edited(renumber_streams),
    "back_streams_5": edited(partial(streams, many=5), second),
    "back_threads": edited(calls_of_another_thread, last),
    "back_triton_one": edited(partial(renamed, names=TRITON), second),
    "back_tiny_slow": edited(tiny, host=1.7),
}
"""Those that were looked at once the rules were done."""
