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
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
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
_PROGRESS_EVERY_S = 60.0


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


def work(orders: Connection, seed: int, room: Path) -> None:
    """Judge batches of cases until there are no more; say which before each, and what after."""
    (room / "tmp").mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(room / "tmp")
    with (room / "log").open("w") as log, (room / "output").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout = sys.stderr = output
        faulthandler.enable(log)
        warnings.simplefilter("error")
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + _ADDRESS_BYTES,) * 2)
        while batch := orders.recv():
            for number in batch:
                orders.send(number)
                faulthandler.dump_traceback_later(HANG_S, exit=True, file=log)
                finding = judge(seed, number, room)
                faulthandler.cancel_dump_traceback_later()
                orders.send(finding)
            orders.send("done")


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


@dataclass(slots=True)
class Worker:
    """A worker process as its parent sees it."""

    process: BaseProcess
    pipe: Connection
    room: Path
    batch: list[int]
    current: int = -1
    gone: bool = False


def start_worker(seed: int, room: Path) -> Worker:
    """Fork a worker of its own room."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, seed, room))
    process.start()
    theirs.close()
    return Worker(process=process, pipe=ours, room=room, batch=[])


# ---- all cases


def fuzz(numbers: range, seed: int, workers: int, rooms: Path) -> Iterator[Finding | int]:
    """Judge all cases; yield findings, and how many were done after each batch."""
    batches = deque(list(numbers[i : i + _BATCH]) for i in range(0, len(numbers), _BATCH))
    places = count()
    busy: list[Worker] = []
    try:
        while batches or busy:
            while batches and len(busy) < workers:
                busy.append(start_worker(seed, rooms / str(next(places))))
                _order(busy[-1], batches.popleft())
            for pipe in wait([worker.pipe for worker in busy]):
                worker = next(one for one in busy if one.pipe is pipe)
                yield from _hear(worker, batches)
                if worker.gone:
                    busy.remove(worker)
    finally:
        for worker in busy:
            worker.process.terminate()


def _hear(worker: Worker, batches: deque[list[int]]) -> Iterator[Finding | int]:
    """Take what a worker says; one that died is blamed, and the rest of its batch given back."""
    try:
        said = worker.pipe.recv()
    except EOFError:
        worker.process.join()
        worker.gone = True
        if worker.batch:
            batches.appendleft(worker.batch)
        yield _blame(worker)
        return
    if isinstance(said, int):
        worker.current = said
        worker.batch.remove(said)
    elif isinstance(said, Finding):
        yield said
    elif said == "done":
        yield _BATCH
        _order(worker, batches.popleft() if batches else [])


def _order(worker: Worker, batch: list[int]) -> None:
    worker.batch = batch
    worker.pipe.send(list(batch))
    if not batch:
        worker.process.join()
        worker.gone = True


def _blame(worker: Worker) -> Finding:
    log = (worker.room / "log").read_text(errors="replace")
    what = f"hung for {HANG_S} s" if "Timeout" in log else f"died ({worker.process.exitcode})"
    return Finding(number=worker.current, what=what, details=log)


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
    numbers = range(options.first, options.first + options.cases)
    rooms = Path(tempfile.mkdtemp(prefix="debubble-fuzz-"))
    began = shown = time.monotonic()
    done = findings = 0
    try:
        for said in fuzz(numbers, options.seed, options.workers, rooms):
            if isinstance(said, Finding):
                findings += 1
                report(said, options.seed, options.keep)
            else:
                done += said
            if time.monotonic() - shown > _PROGRESS_EVERY_S:
                shown = time.monotonic()
                _say(f"{min(done, len(numbers)):,} of {len(numbers):,} cases")
    finally:
        shutil.rmtree(rooms, ignore_errors=True)
    took = time.monotonic() - began
    _say(f"{len(numbers):,} cases, seed {options.seed}: {findings} findings in {took:.0f} s")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
