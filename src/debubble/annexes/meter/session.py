"""`debubble.meter`: what a job calls, or what `debubble meter -- COMMAND` has called in it.

torch is imported with the first step of a pipeline, and not before: a job that is metered from
outside loads it itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from debubble.annexes.meter.settings import USUAL, Settings
from debubble.capture.hooks import Beat
from debubble.capture.session import describe, say
from debubble.capture.settings import read_order
from debubble.errors import MissingExtra

if TYPE_CHECKING:
    from debubble.annexes.meter.running import Meter

Logger = Callable[[Mapping[str, float], int], object]


def meter(  # noqa: PLR0913 (one argument a setting)
    *,
    out: str | os.PathLike[str] = USUAL.out,
    segment: int = USUAL.segment,
    keep: int = USUAL.keep,
    on_drift: bool = True,
    logger: Logger | None = None,
    tokens: int | None = None,
    split: Sequence[int] | None = None,
) -> Meter:
    """Meter this job from here on; returns a `Meter`, which need not be kept.

    Steps of torch.distributed.pipelining's schedules and of optimizers are found by themselves; a
    loop of your own says its passes and steps: `with meter.forward(0): …`, `meter.step()`. `logger`
    is called with scalars by name and a step. Nothing that goes wrong in it reaches the job.
    """
    settings = Settings(
        out=Path(out),
        segment=segment,
        keep=keep,
        on_drift=on_drift,
        tokens=tokens,
        split=None if split is None else tuple(split),
    )
    beat = MeterBeat(settings, logger)
    running = beat.start()
    try:
        beat.listen()
    except Exception as error:  # noqa: BLE001 (the job must run)
        beat.give_up(error)
    return running


def install() -> None:
    """Meter this process once it runs a pipeline, where that was ordered."""
    settings = read_order(Settings, os.environ)
    if settings is not None:
        MeterBeat(settings, None).listen()


class MeterBeat(Beat):
    """The beat of a job that is metered."""

    def __init__(self, settings: Settings, logger: Logger | None) -> None:
        super().__init__()
        self.settings = settings
        self.logger = logger
        self.meter: Meter | None = None

    def start(self) -> Meter:
        """Make the meter; here torch is needed for the first time."""
        try:
            from debubble.annexes.meter.running import Meter  # noqa: PLC0415 (imports torch)
        except ImportError as error:
            raise MissingExtra(
                f"a meter needs torch: {error}", hint="pip install 'debubble[torch]'"
            ) from error
        self.meter = Meter(self.settings, logger=self.logger, undo=self.undo)
        self.meter.start()
        return self.meter

    def begin(self, pipeline: Any) -> None:
        """Begin with the first step."""
        running = self.start() if self.meter is None else self.meter
        running.look_at(pipeline)
        running.step()

    def step(self) -> None:
        """Pass the step on."""
        if self.meter is not None:
            self.meter.step()

    def end(self) -> None:
        """Do nothing: whoever gives the beat, the meter goes on."""

    def give_up(self, error: Exception) -> None:
        """Say it once, and leave the job alone."""
        if self.meter is not None:
            self.meter.fail(error)
        else:
            say(f"this process is not metered: {describe(error)}")
            self.undo.close()
