"""Captures of a server, cut and changed: what is said of them may be less, not wrong."""

from support.traces.documents import drop, load_all, save
from support.vllm_count import LABEL, labels_of

HOST = {"cuda_runtime", "cuda_driver", "cpu_op", "user_annotation", "cpu_instant_event"}


def alter(recording, change, folder):
    """Write a changed copy of a capture."""
    save(change(load_all(recording)), folder)


def keep(trace, wanted):
    """Keep what the host did at wanted moments, and what it launched then."""
    host = [e for e in trace["traceEvents"] if e.get("cat") in HOST]
    launched = {e.get("args", {}).get("correlation") for e in host if wanted(e["ts"])} - {None}
    drop(
        trace,
        lambda e: (
            not wanted(e["ts"])
            if e.get("cat") in HOST
            else "ts" in e and e.get("args", {}).get("correlation") not in launched
        ),
    )


def cut(first, last, *, keeps=True):
    """Keep a part of a host's time, from one share of it to another, or leave it out."""

    def change(trace):
        stamps = [event["ts"] for event in trace["traceEvents"] if event.get("cat") in HOST]
        low, length = min(stamps), max(stamps) - min(stamps)
        keep(trace, lambda at: (first <= (at - low) / length < last) == keeps)

    return change


def without_batches(first, count):
    """Leave out some batches, from label to label."""

    def change(trace):
        begins = [begin for begin, _, _ in labels_of(trace)]
        keep(trace, lambda at: not begins[first] <= at < begins[first + count])

    return change


def shifted(by_us):
    """Set a clock off."""

    def change(trace):
        for event in trace["traceEvents"]:
            if "ts" in event:
                event["ts"] += by_us

    return change


def relabelled(word):
    """Write other labels."""

    def change(trace):
        for event in trace["traceEvents"]:
            event["name"] = LABEL.sub(word, event.get("name", ""))

    return change


def of_older_version(label):
    return f"execute_new_{label[1]}_cached_{label[3]}"


def from_a_prompt(trace):
    """Begin in the middle of the label of a batch with a prompt; of none, of any batch."""
    labels = labels_of(trace)
    begin, end, _ = next((one for one in labels[2:] if one[2][1] != "0"), labels[2])
    keep(trace, lambda at: at >= (begin + end) / 2)


def each(change, *ranks):
    def apply(traces):
        for rank, trace in traces.items():
            if not ranks or rank in ranks:
                change(trace)
        return traces

    return apply


def missing(rank):
    return lambda traces: {name: trace for name, trace in traces.items() if name != rank}


def renamed(traces):
    names = sorted(traces)
    return {name: traces[other] for name, other in zip(names, names[::-1], strict=True)}


ALTERATIONS = {
    "without the first fifth": each(cut(0.2, 1.0)),
    "without the last fifth": each(cut(0.0, 0.8)),
    "the first quarter alone": each(cut(0.0, 0.25)),
    "rank 0 ends early": each(cut(0.0, 0.6), 0),
    "the last ends early": each(cut(0.0, 0.6), 3),
    "rank 1 begins late": each(cut(0.3, 1.0), 1),
    "a hole in all": each(cut(0.45, 0.55, keeps=False)),
    "a hole in rank 2": each(cut(0.45, 0.55, keeps=False), 2),
    "five batches removed": each(without_batches(8, 5)),
    "two batches of rank 1 removed": each(without_batches(8, 2), 1),
    "begins in a prompt": each(from_a_prompt),
    "rank 2 clock 3 ms late": each(shifted(3_000.0), 2),
    "rank 0 clock 40 s early": each(shifted(-40e6), 0),
    "labels of an older version": each(relabelled(of_older_version)),
    "no labels": each(relabelled(lambda _: "step")),
    "rank 0 missing": missing(0),
    "rank 1 missing": missing(1),
    "rank 3 missing": missing(3),
    "ranks renamed": renamed,
}
