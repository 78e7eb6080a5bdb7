"""The demo's pipeline as a job of its own: `python -m debubble.annexes.demo.job --split 4,4,4,4`.

It knows nothing of profilers: `debubble capture` and `debubble tune` run it as any other command.
torch is imported once and the ranks are forked, for four imports take longer than the steps.
"""

from __future__ import annotations

import argparse
import atexit
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from debubble.annexes.demo.workload import LOOPBACK, ORDER_FILE, SCHEDULES, Workload
from debubble.errors import DebubbleError

# What `debubble capture` needs with its own settings: 10 to wait, 20 for a capture, one after it.
STEPS = 31


def main(words: Sequence[str] | None = None) -> int:
    """Run all ranks to their end; return the exit code."""
    try:
        workload = _read(words)
    except DebubbleError as error:
        sys.stderr.write(f"error: {error}\nhint: {error.hint}\n")
        return 2
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    os.environ["OMP_NUM_THREADS"] = "1"
    from debubble.annexes.demo.rank import run_rank  # noqa: PLC0415 (torch, once for all ranks)

    # Not a TemporaryDirectory: the first rank to end would remove it as it leaves, and torch's
    # store waits minutes for a file that is gone.
    folder = Path(tempfile.mkdtemp())
    try:
        meet = folder / "rendezvous"
        ranks = range(workload.ranks)
        return _wait([fork(partial(run_rank, workload, rank, meet)) for rank in ranks])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _read(words: Sequence[str] | None) -> Workload:
    usual = Workload()
    parser = argparse.ArgumentParser(
        prog="python -m debubble.annexes.demo.job", description=__doc__
    )
    parser.add_argument("--split", default=",".join(map(str, usual.layers)))
    parser.add_argument("--microbatches", type=int, default=usual.microbatches)
    names = f"{', '.join(SCHEDULES)}, or the path of an order of passes ({ORDER_FILE})"
    parser.add_argument("--schedule", default=usual.schedule, help=names)
    parser.add_argument("--ranks", type=int, default=usual.ranks)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--forward-ms", type=float, default=usual.forward_ms)
    parser.add_argument("--backward-ms", type=float, default=usual.backward_ms)
    parser.add_argument("--tokens", type=int, default=usual.tokens)
    parser.add_argument("--width", type=int, default=usual.width)
    told = vars(parser.parse_args(words))
    layers = tuple(int(part) for part in told.pop("split").split(","))
    return Workload(layers=layers, **told)


def fork(run: Callable[[], None]) -> int:
    """Run something in a fork, to the end that an ordinary process has; return the fork."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        run()
        code = 0
    except BaseException:  # noqa: BLE001 (a forked process must not run on into its parent's code)
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()  # noqa: SLF001 (as an ordinary end would; a capture is closed there)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(ranks: list[int]) -> int:
    """Wait for all ranks; the first that fails ends the others."""
    running, failed = set(ranks), 0
    while running:
        ended, status = os.wait()
        running.discard(ended)
        code = os.waitstatus_to_exitcode(status)
        if code and not failed:
            failed = 1
            for rank in running:
                os.kill(rank, signal.SIGKILL)
    return failed


if __name__ == "__main__":
    sys.exit(main())
