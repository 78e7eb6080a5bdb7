"""A hop in → the command of nccl-tests that measures it, for whoever doubts the verdict."""

from __future__ import annotations

import shlex

from debubble.costs.passes import may_share
from debubble.timeline.model import RankTimeline

_PROGRAM = "./build/sendrecv_perf"
# Enough iterations for a steady mean, after enough to set everything up.
_ITERATIONS = "-n 50 -w 10"
_UNKNOWN_SIZE = "-b 8 -e 64M -f 2"


def nccl_command(here: RankTimeline, there: RankTimeline, message_bytes: int) -> str:
    """Write the command for two ranks: messages both ways at once, at the job's own size."""
    size = f"-b {message_bytes} -e {message_bytes}" if message_bytes > 0 else _UNKNOWN_SIZE
    out = f"-J hop_{here.rank}_{there.rank}.json"
    words = f"{size} {_ITERATIONS} {out}"
    (host, device), (other_host, other_device) = here.device, there.device
    if host != other_host:
        hosts = shlex.quote(f"{host},{other_host}")
        devices = (
            f"-x NCCL_TESTS_DEVICE={device} " if device == other_device and device >= 0 else ""
        )
        return f"mpirun -np 2 -H {hosts} {devices}{_PROGRAM} -g 1 {words}"
    if may_share((here, there)) or min(device, other_device) < 0:
        # Traces of ranks that each see one device do not tell which of the host's it is.
        return f"CUDA_VISIBLE_DEVICES={here.rank},{there.rank} {_PROGRAM} -g 2 {words}"
    return f"CUDA_VISIBLE_DEVICES={device},{other_device} {_PROGRAM} -g 2 {words}"
