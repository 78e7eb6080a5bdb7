"""Op tables (CSV, JSON lines, Parquet) in → `OpTable` out."""

from debubble.trace.optable.files import Op, sniff_op_table
from debubble.trace.optable.read import OpTable, read_op_table

__all__ = ["Op", "OpTable", "read_op_table", "sniff_op_table"]
