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
    from debubble.analysis import analyse_found
    from debubble.report.answers.find import answer_find
    from debubble.report.find import find_page
    from debubble.trace.run import find_run, read_run

    found = find_run(files)
    began = time.perf_counter()
    read_run(found)
    read = time.perf_counter() - began
    began = time.perf_counter()
    find_page(answer_find(analyse_found(found)))
    print(read, time.perf_counter() - began - read)


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
