"""Throws damaged traces at the reader and sees that it answers or says no, and nothing else.

    python tests/fuzz/fuzz_reader.py --cases 20000 [--seed S] [--first K] [--keep FOLDER]

What crashes or hangs ends the program: its last line names the case.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import resource
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
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
# A case of the fuzzer is at most 70 MB, and streamed.
_ADDRESS_BYTES = 8 * 1024**3


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


def judge(seed: int, number: int, folder: Path) -> str:
    """Make and read one case; return what is wrong with how that went."""
    case = make_case(seed, number, folder / "case")
    before = len(list(folder.rglob("*"))), len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    try:
        wrong = run_case(case)
    except BaseException:  # noqa: BLE001 (whatever comes is a finding)
        return traceback.format_exc()
    finally:
        faulthandler.cancel_dump_traceback_later()
    after = len(list(folder.rglob("*"))), len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    return wrong or ("" if before == after else f"left behind: {before} became {after}")


def main(arguments: list[str] | None = None) -> int:
    """Judge cases; return 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    parser.add_argument("--first", type=int, default=0, metavar="K", help="begin at this case")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"), metavar="FOLDER")
    options = parser.parse_args(arguments)
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_BYTES,) * 2)
    warnings.simplefilter("error")
    findings = 0
    with tempfile.TemporaryDirectory(prefix="debubble-fuzz-") as folder:
        for number in range(options.first, options.first + options.cases):
            print(f"\rcase {number}", end="", flush=True)  # noqa: T201
            wrong = judge(options.seed, number, Path(folder))
            if wrong:
                findings += 1
                print(f": {wrong}")  # noqa: T201
                kept = options.keep / f"{options.seed}-{number}"
                shutil.copytree(Path(folder) / "case", kept, dirs_exist_ok=True)
    print(f"\n{options.cases:,} cases, seed {options.seed}: {findings} findings")  # noqa: T201
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
