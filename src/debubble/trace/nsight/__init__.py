"""Nsight Systems SQLite exports in → `RankTrace`s out."""

from debubble.trace.nsight.read import read_nsight

__all__ = ["read_nsight"]
