"""What was said of tokens a microbatch in → how many times as many are asked for."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import click

from debubble.cli.flags import Decorator, gathered
from debubble.errors import UsageError
from debubble.plan.baseline import Baseline
from debubble.units import PLAIN_NUMBER

_NUMBER = re.compile(rf"{PLAIN_NUMBER}(x?)")
# Beyond this nobody would believe a line through what was measured.
_MOST_TOKENS = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What was said of tokens a microbatch; None where nothing was."""

    asked: str | None = None
    """So many, or so many times as many: `2048`, `2x`."""
    measured: int | None = None
    also: int | None = None
    """In the other run."""

    def told_by(self, run: int | None, also: int | None) -> Tokens:
        """Return the same with what the jobs of both runs say where nothing was said."""
        return replace(self, measured=self.measured or run, also=self.also or also)

    def of_run(self, baseline: Baseline) -> float | None:
        """Return the tokens of a microbatch as it is, where that was said of either run."""
        if self.measured is not None:
            return float(self.measured)
        if self.also is not None and baseline.pooled is not None:
            return self.also / baseline.pooled.token_ratio
        return None

    def scale(self, baseline: Baseline) -> float | None:
        """Return how many times as many tokens are asked for; None for as many as there are."""
        if self.asked is None:
            return None
        scale, is_count = self._read()
        if is_count:
            measured = self.of_run(baseline)
            if measured is None and self.also is not None:
                raise UsageError("--also-tokens is about --also", hint="add --tokens-measured N")
            if measured is None:
                raise UsageError(
                    "how many tokens a microbatch has as it is cannot be told",
                    hint="add --tokens-measured N, or ask for times as many: --tokens 2x",
                )
            scale /= measured
        _refuse_too_far(scale)
        return None if scale == 1.0 else scale

    def check(self, other: str | None) -> None:
        """Refuse what is no number, too far away, or of no `other` run, before anything long."""
        if self.also is not None and other is None:
            raise UsageError(
                "--also-tokens is about --also, and no other run is named", hint="add --also TRACES"
            )
        if self.asked is None:
            return
        scale, is_count = self._read()
        if not is_count or self.measured is not None:
            _refuse_too_far(scale / (self.measured or 1) if is_count else scale)

    def _read(self) -> tuple[float, bool]:
        read = _NUMBER.fullmatch((self.asked or "").strip())
        if read is None or float(read[1]) <= 0:
            raise UsageError(
                f"{self.asked!r} is no number of tokens", hint="write it as 2048, or 2x"
            )
        return float(read[1]), not read[2]


def _refuse_too_far(scale: float) -> None:
    if not 1 / _MOST_TOKENS <= scale <= _MOST_TOKENS:
        raise UsageError(
            f"{scale:.3g} times as many tokens cannot be foretold from this run",
            hint="a run of about that length can tell",
        )


def token_options(asked: str) -> Decorator:
    """Add what is said of tokens and of another run; the verb is handed `tokens` and `also`.

    `asked` says what `--tokens` asks the verb for.
    """
    count = click.IntRange(min=1)
    return gathered(
        "tokens",
        _make_tokens,
        click.option("--tokens", metavar="N", help=asked),
        click.option(
            "--tokens-measured", type=count, metavar="N", help="Tokens in the run as it is."
        ),
        click.option(
            "--also", metavar="TRACES", help="Another run of the same model, to learn from."
        ),
        click.option("--also-tokens", type=count, metavar="N", help="Tokens in that other run."),
    )


def _make_tokens(
    *, tokens: str | None, tokens_measured: int | None, also_tokens: int | None
) -> Tokens:
    return Tokens(asked=tokens, measured=tokens_measured, also=also_tokens)
