"""`RankTrace` and its sidecar in → a digest of a few kilobytes → the same `RankTrace` out."""

from debubble.trace.digest.archive import Head, Stamp, peek_head
from debubble.trace.digest.content import pack_digest, read_digest, unpack_digest

__all__ = ["Head", "Stamp", "pack_digest", "peek_head", "read_digest", "unpack_digest"]
