"""A share of a run's time in → what it is worth a day: GPU-hours, money, energy.

A job that runs all day does the work of a day in less time: what that frees is counted on all
devices of the job. Ranks that share a device count once; ranks on a CPU count for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean

from debubble.analysis import Analysis
from debubble.answers.base import Part
from debubble.costs.passes import ranks_a_device
from debubble.units import counted, show_number, show_price

_HOURS_A_DAY = 24.0
_W_PER_KW = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tariff:
    """What a device costs; None where nobody said it."""

    price: float | None = None
    """Of a device for an hour."""
    currency: str = ""
    watts: float | None = None
    """That a device draws while the job runs."""


class WorthPart(Part, frozen=True, kw_only=True):
    """What a saving is worth a day; less than nothing where a change loses."""

    gpu_hours_per_day: float
    money_per_day: float | None
    kwh_per_day: float | None


class RatesPart(Part, frozen=True, kw_only=True):
    """What worth is counted by."""

    gpus: int
    price_per_gpu_hour: float | None
    currency: str
    watts_per_gpu: float | None
    watts_measured: bool
    """By the job itself, beside its traces; else as stated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The devices of a job, and what an hour of one takes."""

    gpus: int
    tariff: Tariff = field(default_factory=Tariff)
    measured_watts: float | None = None

    @property
    def watts(self) -> float | None:
        """What a device draws: as stated, else as the job saw it."""
        return self.measured_watts if self.tariff.watts is None else self.tariff.watts

    def worth_of(self, share: float) -> WorthPart | None:
        """Return what a share of all time is worth; None where no device is known."""
        if not self.gpus:
            return None
        hours = _HOURS_A_DAY * self.gpus * share
        price, watts = self.tariff.price, self.watts
        return WorthPart(
            gpu_hours_per_day=hours,
            money_per_day=None if price is None else hours * price,
            kwh_per_day=None if watts is None else hours * watts / _W_PER_KW,
        )

    def worth_of_gain(self, gain: float) -> WorthPart | None:
        """Return what it is worth to do so much more a second."""
        return self.worth_of(1 - 1 / (1 + gain)) if gain > -1 else None

    def as_part(self) -> RatesPart | None:
        """Return what is counted by, as data."""
        if not self.gpus:
            return None
        return RatesPart(
            gpus=self.gpus,
            price_per_gpu_hour=self.tariff.price,
            currency=self.tariff.currency,
            watts_per_gpu=self.watts,
            watts_measured=self.tariff.watts is None and self.watts is not None,
        )


def rates_of(analysis: Analysis, tariff: Tariff) -> Rates:
    """Count the devices of all pipelines that were seen, and those of ranks without a trace."""
    ranks = [rank for pipeline in analysis.pipelines for rank in pipeline.ranks]
    # A table of timers names ranks, no devices: each is taken to have one.
    on_gpu = [rank for rank in ranks if rank.device[1] >= 0 or rank.timers]
    absent = sum(len(pipeline.absent) for pipeline in analysis.pipelines) if on_gpu else 0
    drawn = [side.power_w for side in analysis.run.sidecars if side.power_w is not None]
    return Rates(
        gpus=-(-(len(on_gpu) + absent) // (ranks_a_device(on_gpu) if on_gpu else 1)),
        tariff=tariff,
        measured_watts=fmean(drawn) if drawn else None,
    )


def worth_columns(rates: RatesPart | None) -> tuple[str, ...]:
    """Name the columns of a table that has savings."""
    if rates is None:
        return ()
    money = () if rates.price_per_gpu_hour is None else ("money a day",)
    energy = () if rates.watts_per_gpu is None else ("kWh a day",)
    return ("GPU-h a day", *money, *energy)


def worth_cells(rates: RatesPart | None, worth: WorthPart | None) -> tuple[str, ...]:
    """Write what a saving is worth, a cell a column; empty where there is no saving."""
    columns = worth_columns(rates)
    if rates is None or worth is None:
        return ("",) * len(columns)
    cells = [show_number(worth.gpu_hours_per_day)]
    if worth.money_per_day is not None:
        cells.append(show_price(worth.money_per_day, rates.currency))
    if worth.kwh_per_day is not None:
        cells.append(show_number(worth.kwh_per_day))
    return tuple(cells[: len(columns)])


def say_rates(rates: RatesPart | None) -> Iterable[str]:
    """Say what a day is counted by."""
    if rates is None:
        return
    job = f"of a job that runs all day on {counted(rates.gpus, 'GPU')}"
    said = f"GPU-h a day: what the same work needs less, {job}"
    if rates.price_per_gpu_hour is not None:
        said += f", at {show_price(rates.price_per_gpu_hour, rates.currency)} a GPU-hour"
    if rates.watts_per_gpu is not None:
        how = "as the job measured" if rates.watts_measured else "as stated"
        said += f", {show_number(rates.watts_per_gpu)} W a GPU ({how})"
    yield said
