"""Ray Train: a pipeline of workers whose steps are captured, on a file system that all of them see.

    python deploy/ray/captured_training.py /shared/traces
    debubble find /shared/traces

Each worker opens the capture itself, around its own loop: nothing has to be passed on to it.
`setup` is yours: it builds this worker's stage and returns the schedule and its batches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

WORKERS = 4


def setup() -> tuple[Any, Iterable[Any]]:
    """Return the pipeline schedule of this worker, and its batches."""
    raise NotImplementedError("build your stage and its schedule here")


def train(settings: dict[str, Any]) -> None:
    """Train, and capture six steps after the first twenty, then again every thousand."""
    import debubble  # noqa: PLC0415 (on the worker)

    schedule, batches = setup()
    with debubble.capture(schedule, wait=20, steps=6, every=1000, keep=5, out=settings["traces"]):
        for batch in batches:
            schedule.step(batch)
            debubble.step()


def main() -> None:
    """Start the workers."""
    from ray.train import ScalingConfig  # noqa: PLC0415 (only where there is a cluster)
    from ray.train.torch import TorchTrainer  # noqa: PLC0415

    trainer = TorchTrainer(
        train,
        train_loop_config={"traces": sys.argv[1]},
        scaling_config=ScalingConfig(num_workers=WORKERS, use_gpu=True),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
