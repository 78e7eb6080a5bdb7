"""torch.profiler Chrome traces in → `RankTrace` out."""

from debubble.trace.format import Format
from debubble.trace.kineto.document import NAME, recognise
from debubble.trace.kineto.read import read_kineto, read_known

__all__ = ["FORMAT", "read_kineto"]

FORMAT = Format(
    name=NAME,
    position=10,
    in_names=(".json", ".gz", "trace"),
    recognise=recognise,
    read=read_known,
)
