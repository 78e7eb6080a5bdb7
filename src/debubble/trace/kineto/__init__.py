"""torch.profiler Chrome traces in → `RankTrace` out."""

from debubble.trace.kineto.read import read_kineto

__all__ = ["read_kineto"]
