"""What was said of a KV cache in → the cache that `plan` splits layers around."""

from __future__ import annotations

from dataclasses import dataclass, replace

import click

from debubble.cli.flags import gathered
from debubble.errors import UsageError
from debubble.plan.kv_cache import Cache
from debubble.units import parse_bytes, parse_share


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSaid:
    """What was typed; None where nothing was."""

    kv_bytes_per_token_layer: str | None
    kv_utilisation: str | None
    kv_tokens_measured: int | None

    def read(self) -> Cache | None:
        """Return the cache; None where none was spoken of."""
        if self.kv_bytes_per_token_layer is None:
            self._refuse_details()
            return None
        cache = Cache(token_layer_bytes=float(parse_bytes(self.kv_bytes_per_token_layer)))
        if cache.token_layer_bytes <= 0:
            raise UsageError(
                "a token takes some bytes in each layer",
                hint="KV heads x (head size + value size) x bytes of a number",
            )
        share = self.kv_utilisation
        return replace(
            cache,
            utilisation=cache.utilisation if share is None else parse_share(share),
            measured_tokens=self.kv_tokens_measured or 0,
        )

    def _refuse_details(self) -> None:
        details = {
            "--kv-utilisation": self.kv_utilisation,
            "--kv-tokens-measured": self.kv_tokens_measured,
        }
        for flag, value in details.items():
            if value is not None:
                raise UsageError(
                    f"{flag} says something of a KV cache, and its size is not known",
                    hint="add --kv-bytes-per-token-layer, such as 4KiB",
                )


cache_options = gathered(
    "cache_said",
    CacheSaid,
    click.option(
        "--kv-bytes-per-token-layer", metavar="SIZE", help="Of a KV cache, such as 4KiB: inference."
    ),
    click.option(
        "--kv-utilisation", metavar="SHARE", help="Of a device, for the engine.  [default: 90%]"
    ),
    click.option(
        "--kv-tokens-measured",
        type=click.IntRange(min=0),
        metavar="N",
        help="Tokens whose cache the run held.  [default: 0]",
    ),
)
