"""What is timed of the reader, each in a process of its own: `read_parts.py PART FILE...`.

A part imports what it needs and nothing else, for some are timed from start to end.
"""

# ruff: noqa: PLC0415 (see above)

from __future__ import annotations

import resource
import sys
import time


def read_one(file: str) -> None:
    """Print the seconds, the events, the inflated bytes, the peak memory and what is kept."""
    from debubble.trace.kineto import read_kineto

    began = time.perf_counter()
    trace = read_kineto(file)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(seconds, trace.events, trace.inflated_bytes, peak, trace.kept_bytes())


def read_all(*files: str) -> None:
    """Read ranks as one run; its process is timed from start to end."""
    from debubble.trace.run import find_run, read_run

    read_run(find_run(files))


def find(*files: str) -> None:
    """Print the seconds of reading ranks, and those of all that `find` does beyond it."""
    from debubble.report.find_json import find_json

    from debubble.ledger.hop_health import account_for
    from debubble.report.find import find_page
    from debubble.timeline.build import build_run
    from debubble.timeline.figures import measure_pipeline, worst_of
    from debubble.timeline.job import ask_job
    from debubble.trace.run import find_run, read_run

    began = time.perf_counter()
    run = read_run(find_run(files))
    read = time.perf_counter() - began
    began = time.perf_counter()
    timeline = build_run(run)
    figures = [measure_pipeline(timeline, pipeline) for pipeline in timeline.pipelines]
    worst = worst_of(figures)
    job = ask_job(run.sidecars, worst)
    ledger = account_for(timeline, worst)
    find_page(figures, ledger, job, (), "")
    find_json(run, timeline, figures, ledger, (), job=job, links=ledger.links if ledger else None)
    print(read, time.perf_counter() - began)


def read_as_peer(file: str) -> None:
    """Print what HolisticTraceAnalysis takes, its parser alone, and the peak memory.

    The first is what its users call before they can ask anything.
    """
    from hta.common.trace_parser import parse_trace_dataframe
    from hta.configs.parser_config import ParserConfig
    from hta.trace_analysis import TraceAnalysis

    began = time.perf_counter()
    parse_trace_dataframe(file, ParserConfig.get_default_cfg())
    parsed = time.perf_counter() - began
    began = time.perf_counter()
    TraceAnalysis(trace_files={0: file}, trace_dir="/")
    seconds = time.perf_counter() - began
    print(seconds, parsed, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


PARTS = {part.__name__: part for part in (read_one, read_all, find, read_as_peer)}


if __name__ == "__main__":
    PARTS[sys.argv[1]](*sys.argv[2:])
