"""Bytes come out of files whole, or it is said why not."""

from __future__ import annotations

import gzip
import random

from debubble.trace import source
from debubble.trace.source import Source


def inflate(path):
    opened = Source(str(path))
    return b"".join(opened.pieces()), opened.damage


def test_gzip_members_are_joined_wherever_their_borders_fall(tmp_path, monkeypatch):
    path = tmp_path / "a.gz"
    data = random.Random(1).randbytes(3_000)  # noqa: S311
    path.write_bytes(b"".join(gzip.compress(data[i : i + 600]) for i in range(0, 3_000, 600)))
    for size in range(2, 200):
        monkeypatch.setattr(source, "_READ_BYTES", size)
        assert inflate(path) == (data, "")


def test_a_million_tiny_members_are_refused_not_waited_for(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b" ") * 20_000)
    assert inflate(path)[1] == "gzip data in too many too small members"
    path.write_bytes(gzip.compress(b" ") * 5_000)
    assert inflate(path) == (b" " * 5_000, "")
