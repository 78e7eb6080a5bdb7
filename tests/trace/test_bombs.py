"""Files that are small and claim to be large: refused, in little memory."""

from __future__ import annotations

import gzip
import sqlite3
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from debubble.errors import TraceTooLarge
from debubble.trace.captures import recognise
from debubble.trace.run import read_file
from debubble.trace.source import Limits

MOST_BYTES = 300_000_000
_READ = """
import sys
from pathlib import Path
from debubble.errors import DebubbleError
from debubble.trace.run import find_run, read_run
try:
    read_run(find_run([sys.argv[1]]))
except DebubbleError as error:
    print(error)
else:
    print("was read")
# Of this process alone: the most that getrusage tells is that of whoever started it, too.
status = Path("/proc/self/status").read_text()
print(int(status.split("VmHWM:")[1].split()[0]) * 1024)
"""


def packed(path: Path, first: bytes, unit: bytes, size: int) -> None:
    """Write a gzip file that inflates to so many bytes of the same."""
    packer = zlib.compressobj(9, wbits=31)
    block = unit * (1_000_000 // len(unit))
    with path.open("wb") as file:
        file.write(packer.compress(first))
        for _ in range(size // len(block)):
            file.write(packer.compress(block))
        file.write(packer.flush())


def parquet(path: Path) -> None:
    rows = 5_000_000
    zeros = pa.array(np.zeros(rows, dtype=np.int64))
    names = ("step", "stage", "microbatch", "start_us", "duration_us")
    pq.write_table(pa.table(dict.fromkeys(names, zeros)), path)


def export(path: Path) -> None:
    plain = path.with_suffix("")
    with sqlite3.connect(plain) as database:
        database.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value BLOB)")
        database.execute("INSERT INTO StringIds VALUES (1, zeroblob(100000000))")
    path.write_bytes(gzip.compress(plain.read_bytes(), 1))
    plain.unlink()


def header(path: Path) -> None:
    nothing = b"[]," * 5_000_000
    path.write_bytes(b'{"schemaVersion":1,"a":[' + nothing + b'[]],"traceEvents":[{}]}')


EVENTS = b'{"traceEvents":['
BOMBS = {
    "spaces.json.gz": lambda path: packed(path, EVENTS, b" ", 100_000_000),
    "kernels.json.gz": lambda path: packed(
        path, EVENTS, b'{"cat":"kernel","ts":1,"dur":1},', 60_000_000
    ),
    "calls.json.gz": lambda path: packed(
        path, EVENTS, b'{"cat":"cpu_op","name":"c10d::send","ts":1,"dur":1},', 60_000_000
    ),
    "one_event.json.gz": lambda path: packed(
        path, EVENTS + b'{"cat":"kernel","args":{"a":[', b"[],", 60_000_000
    ),
    "brackets.json.gz": lambda path: packed(path, b'{"traceEvents":', b"[", 60_000_000),
    "table.csv.gz": lambda path: packed(
        path, b"step,stage,microbatch,op,start_us,duration_us\n", b"0,0,0,F,0,1\n", 60_000_000
    ),
    "ascend.json.gz": lambda path: packed(
        path,
        b'[{"ph":"M","name":"process_name","pid":1,"args":{"name":"Ascend Hardware"}},',
        b'{"ph":"X"},',
        60_000_000,
    ),
    "header.json": header,
    "table.parquet": parquet,
    "export.sqlite.gz": export,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_in_little_memory(tmp_path, name):
    BOMBS[name](tmp_path / name)
    said = subprocess.run(
        [sys.executable, "-c", _READ, str(tmp_path / name)],
        capture_output=True,
        text=True,
        check=True,
    )
    refusal, taken = said.stdout.strip().rsplit("\n", maxsplit=1)
    assert "was read" not in refusal
    assert int(taken) < MOST_BYTES


def test_a_packed_export_keeps_to_the_limits(tmp_path):
    export(tmp_path / "small.sqlite.gz")
    known = recognise(str(tmp_path / "small.sqlite.gz"))
    refused = read_file(known, Limits(inflated_bytes=1_000_000, ratio=1e9)).error
    assert isinstance(refused, TraceTooLarge)
    assert "unpack it" in refused.hint
