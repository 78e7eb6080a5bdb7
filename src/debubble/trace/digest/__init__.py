"""`RankTrace` or `OpTable` in → a digest of a few kilobytes → the same out."""

from debubble.trace.digest.archive import NAME, peek_head, recognise
from debubble.trace.digest.content import SUFFIX, pack_digest, read_known, unpack_digest
from debubble.trace.format import Format, Head, Stamp

__all__ = ["FORMAT", "Head", "Stamp", "pack_digest", "peek_head", "unpack_digest"]

FORMAT = Format(
    name=NAME,
    a_file="a digest",
    position=40,
    in_names=(SUFFIX,),
    recognise=recognise,
    read=read_known,
)
