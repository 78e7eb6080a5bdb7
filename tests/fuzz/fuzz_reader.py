"""Throws damaged traces at the reader and sees that it answers or says no, and nothing else.

    python tests/fuzz/fuzz_reader.py --cases 20000 [--seed S] [--first K] [--keep FOLDER]

Cases are read in worker processes, so that a crash or a hang is found too, and blamed on its case.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import repeat
from multiprocessing.connection import Connection
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

from fuzz.cases import Case, make_case
from fuzz.check import check_message, check_run

from debubble.errors import DebubbleError
from debubble.trace import source
from debubble.trace.kineto import document, reduce
from debubble.trace.run import find_run, read_run

DEFAULT_SEED = 20260101
HANG_S = 20
# Beyond what the worker itself takes. A case of the fuzzer is at most 70 MB, and streamed.
MEMORY_BYTES = 1024**3
_ADDRESS_BYTES = 3 * 1024**3
_BATCH = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A case that the reader did not survive in good manners."""

    number: int
    what: str
    details: str = ""


# ---- one case


def run_case(case: Case) -> str:
    """Read a case as the command line does; return what is wrong with that, or nothing."""
    try:
        with _small_pieces(case):
            found = find_run(case.places)
            check_run(read_run(found, rank=case.rank))
    except DebubbleError as error:
        check_message(error.message)
        check_message(error.hint)
    return ""


@contextmanager
def _small_pieces(case: Case) -> Iterator[None]:
    """Make the reader's pieces small, so that small files have seams as large ones do."""
    whole = (
        case.piece_bytes,
        case.piece_bytes // 10,
        case.held_bytes,
        min(case.piece_bytes, 250_000),
    )
    kept = source.PIECE_BYTES, source._READ_BYTES, document.MAX_HELD_BYTES, reduce._CONDENSE_ROWS
    try:
        _set_sizes(*whole)
        yield
    finally:
        _set_sizes(*kept)


def _set_sizes(piece: int, read: int, held: int, condense: int) -> None:
    source.PIECE_BYTES, source._READ_BYTES = piece, read
    document.MAX_HELD_BYTES, reduce._CONDENSE_ROWS = held, condense


def judge(seed: int, number: int, room: Path) -> Finding | None:
    """Make and read one case; look at what it left behind."""
    folder = room / "case"
    case = make_case(seed, number, folder)
    before = _traces_left(room)
    try:
        run_case(case)
    except BaseException as error:  # noqa: BLE001 (whatever comes is a finding)
        what = f"{type(error).__name__}: {str(error)[:200]}"
        return Finding(number=number, what=what, details=traceback.format_exc())
    gc.collect(0)
    after = _traces_left(room)
    if before != after:
        return Finding(number=number, what=f"left something behind: {before} became {after}")
    return None


def _traces_left(room: Path) -> dict[str, object]:
    """Count what a reading must not change: files, open files, output; memory within limits."""
    sys.stdout.flush()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "files": sum(len(files) + len(folders) for _, folders, files in os.walk(room)),
        "open": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        "printed": os.fstat(1).st_size + os.fstat(2).st_size,
        "too much memory": peak > MEMORY_BYTES,
    }


# ---- a worker


def work(said: Connection, numbers: list[int], seed: int, room: Path) -> None:
    """Judge cases one by one; say which before each, and what was found after."""
    (room / "tmp").mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(room / "tmp")
    with (room / "log").open("w") as log, (room / "output").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout = sys.stderr = output
        faulthandler.enable(log)
        warnings.simplefilter("error")
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + _ADDRESS_BYTES,) * 2)
        for number in numbers:
            said.send(number)
            faulthandler.dump_traceback_later(HANG_S, exit=True, file=log)
            finding = judge(seed, number, room)
            faulthandler.cancel_dump_traceback_later()
            if finding is not None:
                said.send(finding)
    os._exit(0)  # what writes to the output at exit finds it closed


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


# ---- all cases


def fuzz(numbers: list[int], seed: int, room: Path) -> list[Finding]:
    """Judge some cases in a process of their own; one that dies is blamed on its case."""
    context = multiprocessing.get_context("fork")
    findings, left = [], deque(numbers)
    while left:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(theirs, list(left), seed, room))
        process.start()
        theirs.close()
        current = left[0]
        with ours, suppress(EOFError):
            while True:
                said = ours.recv()
                if isinstance(said, Finding):
                    findings.append(said)
                else:
                    current = left.popleft()
        process.join()
        if process.exitcode:
            log = (room / "log").read_text(errors="replace")
            what = f"hung for {HANG_S} s" if "Timeout" in log else f"died ({process.exitcode})"
            findings.append(Finding(number=current, what=what, details=log))
    return findings


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 (a program of its own)


def report(finding: Finding, seed: int, keep: Path) -> None:
    """Print a finding and keep its files."""
    place = keep / f"{seed}-{finding.number}"
    make_case(seed, finding.number, place)
    (keep / f"{seed}-{finding.number}.txt").write_text(f"{finding.what}\n{finding.details}\n")
    _say(f"case {finding.number}: {finding.what}")
    _say(f"  files: {place}")
    _say(f"  again: python {__file__} --seed {seed} --first {finding.number} --cases 1")


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; 1 if there was any finding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    parser.add_argument("--first", type=int, default=0, metavar="K", help="begin at this case")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"), metavar="FOLDER")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    numbers = list(range(options.first, options.first + options.cases))
    batches = [numbers[at : at + _BATCH] for at in range(0, len(numbers), _BATCH)]
    rooms = Path(tempfile.mkdtemp(prefix="debubble-fuzz-"))
    began = time.monotonic()
    findings = 0
    try:
        with ThreadPoolExecutor(options.workers) as threads:
            places = (rooms / str(at) for at in range(len(batches)))
            for found in threads.map(fuzz, batches, repeat(options.seed), places):
                findings += len(found)
                for finding in found:
                    report(finding, options.seed, options.keep)
    finally:
        shutil.rmtree(rooms, ignore_errors=True)
    took = time.monotonic() - began
    _say(f"{len(numbers):,} cases, seed {options.seed}: {findings} findings in {took:.0f} s")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
