"""What came of a load → a measurement, as it is compared and kept."""

from __future__ import annotations

from pathlib import Path

import msgspec

from debubble.errors import UsageError
from debubble.load import SCHEMA, Load, LoadResult
from debubble.measure.measurement import Environment, Measurement, ServerSamples
from debubble.timeline.job import Basis
from debubble.units import counted

# Enough of a file to see whose it is.
_HEAD = 64


def measure_load(result: LoadResult) -> Measurement:
    """Return what came of a load, as it is compared and kept."""
    if not result.requests:
        raise UsageError(
            f"no request was answered in {result.seconds:g} s"
            + (f": {result.problem}" if result.problem else ""),
            hint="give the load more seconds, or look into the server's output",
        )
    asked = result.requests
    out_per_s = result.out_per_s
    if result.load.clients is not None:
        # Requests of a closed loop fall into step, and tokens come in waves: parts of the time tell
        # more of the waves than of the server. What a user gets, times the users, does not.
        out_per_s = tuple(
            result.load.clients * request.output / request.latency_s
            for request in asked
            if request.latency_s > 0
        )
    return Measurement(
        kind="serving",
        ranks=(),
        stages=0,
        microbatches=None,
        schedule=None,
        split=None,
        message_bytes=None,
        tokens=None,
        samples=(),
        traced=Basis.UNPROFILED,
        memory=(),
        environment=Environment(),
        served=ServerSamples(
            load=say_load(result.load),
            open_loop=result.load.rate is not None,
            out_per_s=out_per_s,
            in_per_s=(result.tokens_in_per_s,),
            ttft_s=tuple(request.ttft_s for request in asked),
            tpot_s=tuple(request.tpot_s for request in asked if request.tpot_s is not None),
            latency_s=tuple(request.latency_s for request in asked),
            failed=result.failed,
        ),
    )


def say_load(load: Load) -> str:
    """Say which load it is; how long it lasts, and which requests chance drew, is left out."""
    lengths = f"{load.prompt} tokens in, {load.output} out"
    if load.trace is not None:
        lengths = f"requests of {load.trace}"
    if load.rate is not None:
        return f"{lengths}, {load.rate:g} requests a second"
    return f"{lengths}, {counted(load.clients or 0, 'client')}"


def read_load_result(file: str) -> Measurement | None:
    """Return the measurement in a file of `debubble.load`; None where it is no such file."""
    try:
        with Path(file).open("rb") as source:
            if SCHEMA.encode() not in source.read(_HEAD):
                return None
            source.seek(0)
            text = source.read()
    except (OSError, ValueError):
        return None
    try:
        return measure_load(msgspec.json.decode(text, type=LoadResult))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UsageError(
            f"cannot be read: {error}", hint="write it again with debubble.load", file=file
        ) from error
