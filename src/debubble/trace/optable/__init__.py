"""Op tables (CSV, JSON lines, Parquet) in → `OpTable` out."""

from debubble.trace.columns import OpTable
from debubble.trace.format import Format
from debubble.trace.optable.files import NAME, Op, recognise, sniff_op_table
from debubble.trace.optable.read import read_known, read_op_table, table_of_passes

__all__ = ["FORMAT", "Op", "OpTable", "read_op_table", "sniff_op_table", "table_of_passes"]

FORMAT = Format(
    name=NAME,
    a_file="an op table",
    ask_for="op tables",
    position=30,
    in_names=(".parquet", ".csv"),
    recognise=recognise,
    read=read_known,
    one_a_rank=False,
)
