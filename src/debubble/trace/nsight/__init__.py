"""Nsight Systems SQLite exports in → `RankTrace`s out."""

from debubble.trace.nsight.read import is_sqlite, read_nsight

__all__ = ["is_sqlite", "read_nsight"]
