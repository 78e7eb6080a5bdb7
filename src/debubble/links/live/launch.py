"""Words of `debubble links run` in → ranks on this machine, and the file that they write."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from debubble.errors import LinkTestError, MissingExtra

_POLL_S = 0.1
_LOG_TAIL_LINES = 8


def run_here(
    ranks: int, words: Sequence[str], out: Path, *, on_progress: Callable[[int, int], None]
) -> None:
    """Start a hop test on this machine and wait for its file."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("measuring hops needs torch", hint="pip install 'debubble[torch]'")
    with tempfile.TemporaryDirectory() as folder:
        progress, log = Path(folder) / "progress", Path(folder) / "log"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks), "-m", "debubble.links"),
            *("--out", str(out), "--progress", str(progress), *words),
        ]
        with log.open("wb") as sink:
            job = subprocess.Popen(  # noqa: S603 (our own module, no shell)
                command,
                # What lies in the folder of the call is no module of ours.
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
            try:
                while job.poll() is None:
                    _show(progress, on_progress)
                    time.sleep(_POLL_S)
            finally:
                if job.poll() is None:
                    job.terminate()
                    job.wait()
        if job.returncode != 0:
            tail = log.read_text("utf-8", errors="replace").splitlines()[-_LOG_TAIL_LINES:]
            raise LinkTestError(
                "the hop test failed:\n" + "\n".join(tail),
                hint="see the lines above; --backend gloo needs no GPU",
            )


def _show(progress: Path, on_progress: Callable[[int, int], None]) -> None:
    try:
        done, total = progress.read_text("utf-8").split()
    except (OSError, ValueError):
        return
    on_progress(int(done), int(total))
