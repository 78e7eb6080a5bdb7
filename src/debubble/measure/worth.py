"""The devices of a job and what they cost in → what a saving is worth a day.

A job that runs all day does the work of a day in less time: what that frees is counted on all
devices of the job. Ranks that share a device count once; ranks on a CPU count for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import msgspec

from debubble.timeline.figures import PipelineFigures
from debubble.timeline.model import ranks_a_device
from debubble.trace.sidecar import Sidecar


@dataclass(frozen=True, slots=True, kw_only=True)
class Tariff:
    """What a device costs; None where nobody said it."""

    price: float | None = None
    """Of a device for an hour."""
    currency: str = ""


class Worth(msgspec.Struct, frozen=True, kw_only=True):
    """What a saving is worth a day; less than nothing where a change loses."""

    gpu_hours_per_day: float
    money_per_day: float | None
    kwh_per_day: float | None


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What worth is counted by."""

    gpus: int
    price_per_gpu_hour: float | None
    currency: str
    watts_per_gpu: float | None
    watts_measured: bool
    """By the job itself, beside its traces."""

    def worth_of(self, share: float) -> Worth:
        """Return what a share of all time is worth."""
        hours = 24 * self.gpus * share
        price, watts = self.price_per_gpu_hour, self.watts_per_gpu
        return Worth(
            gpu_hours_per_day=hours,
            money_per_day=None if price is None else hours * price,
            kwh_per_day=None if watts is None else hours * watts / 1000,
        )

    def worth_of_gain(self, gain: float) -> Worth | None:
        """Return what it is worth to do so much more a second."""
        return self.worth_of(1 - 1 / (1 + gain)) if gain > -1 else None


def count_rates(
    pipelines: Sequence[PipelineFigures], sidecars: Sequence[Sidecar], tariff: Tariff
) -> Rates | None:
    """Count the devices of all pipelines, those of ranks without a trace too; None without any."""
    ranks = [rank for pipeline in pipelines for rank in pipeline.ranks]
    # A table of timers names ranks, no devices: each is taken to have one.
    on_gpu = [rank for rank in ranks if rank.device[1] >= 0 or rank.timers]
    if not on_gpu:
        return None
    absent = sum(len(pipeline.absent) for pipeline in pipelines)
    drawn = [side.draw_w for side in sidecars if side.draw_w]
    return Rates(
        gpus=-(-(len(on_gpu) + absent) // ranks_a_device(on_gpu)),
        price_per_gpu_hour=tariff.price,
        currency=tariff.currency,
        watts_per_gpu=fmean(drawn) if drawn else None,
        watts_measured=bool(drawn),
    )
