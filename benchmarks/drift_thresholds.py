"""Prints the thresholds of drift.py and watch/mix.py: quiet series, simulated.

python benchmarks/drift_thresholds.py [--series 4000]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np

from debubble import drift
from debubble.watch import mix

Values = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
REFERENCES = (10, 20, 40, 80)
RATES = (0.01, 0.05, 0.1)


def noise(kind: str, rng: np.random.Generator, size: tuple[int, int]) -> Values:
    if kind == "normal":
        return rng.standard_normal(size)
    return rng.standard_t(5, size) / np.sqrt(5 / 3)


def highest_sums(
    kind: str, reference: int, series: int, rng: np.random.Generator
) -> tuple[list[float], list[float]]:
    """Return the highest sum of each quiet series: upwards alone, and of both sides."""
    drift.THRESHOLDS.setdefault((reference, drift.RATE, False), np.inf)
    chart = drift.Chart(sides="both", reference=reference)
    one, both = [], []
    for values in 100 + noise(kind, rng, (series, reference + drift.QUIET_CAPTURES)):
        track, up, down = drift.Track(), 0.0, 0.0
        for value in values.tolist():
            track = drift.advance(track, value, chart)
            up, down = max(up, track.above), max(down, track.below)
        one.append(up)
        both.append(max(up, down))
    return one, both


def print_drift(series: int, rng: np.random.Generator) -> None:
    print("drift.THRESHOLDS")
    for reference in REFERENCES:
        kinds = [highest_sums(kind, reference, series, rng) for kind in ("normal", "t")]
        for sides, is_both in ((0, False), (1, True)):
            for rate in RATES:
                sums = max(np.quantile(kind[sides], 1 - rate) for kind in kinds)
                print(f"    ({reference}, {rate}, {is_both}): {sums:.1f},")


def traffic(
    rng: np.random.Generator,
    buckets: int,
    requests: int,
    concentration: float | None,
    captures: int,
) -> Iterator[dict[int, int]]:
    level = rng.dirichlet(np.full(buckets, 2.0))
    for _ in range(captures):
        share = level if concentration is None else rng.dirichlet(level * concentration)
        drawn = rng.multinomial(requests, share / share.sum())
        yield {128 << place: int(count) for place, count in enumerate(drawn)}


def print_mix(series: int, rng: np.random.Generator) -> None:
    print("mix.THRESHOLDS")
    cases = [(b, n, c) for b in (2, 3, 6) for n in (1, 30, 1000) for c in (None, 50.0)]
    for reference in REFERENCES:
        highest = dict.fromkeys(RATES, 0.0)
        for buckets, requests, concentration in cases:
            tops = []
            for _ in range(series):
                state, top = mix.Mix(), 0.0
                captures = reference + drift.QUIET_CAPTURES
                for counts in traffic(rng, buckets, requests, concentration, captures):
                    state = mix.advance(state, counts, reference)
                    if state.recent:
                        apart = mix.distance(mix.shares(state.reference), mix.shares(state.recent))
                        if apart >= mix.LEAST_MOVED:
                            top = max(top, mix.score(state))
                tops.append(top)
            for rate in RATES:
                highest[rate] = max(highest[rate], float(np.quantile(tops, 1 - rate)))
        for rate, top in highest.items():
            print(f"    ({reference}, {rate}): {top:.1f},", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--series", type=int, default=4000)
    parser.add_argument("--traffic-series", type=int, default=300)
    parser.add_argument("--tiny", action="store_true", help="a moment's work: does it still run?")
    given = parser.parse_args()
    rng = np.random.default_rng(10)
    print_drift(2 if given.tiny else given.series, rng)
    print_mix(1 if given.tiny else given.traffic_series, rng)


if __name__ == "__main__":
    main()
