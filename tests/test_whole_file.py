"""A file is there whole, or as it was before."""

from __future__ import annotations

import os
import resource
import signal
from contextlib import contextmanager

import pytest

from debubble.errors import UsageError
from debubble.whole_file import write_file


@contextmanager
def full_disk():
    """Let no file grow beyond a few bytes: not even what pytest writes its dots to."""
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.parametrize("earlier", [None, "an earlier report"])
def test_a_full_disk_leaves_what_was_there(tmp_path, earlier):
    report = tmp_path / "report.html"
    if earlier:
        report.write_text(earlier)
    with full_disk(), pytest.raises(UsageError, match="cannot be written: File too large"):
        write_file(report, b"x" * 10_000)
    assert [file.read_text() for file in tmp_path.iterdir()] == ([earlier] if earlier else [])


def test_a_link_stays_a_link_and_a_mode_a_mode(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    write_file(link, b"new")
    assert (link.is_symlink(), real.read_text(), real.stat().st_mode & 0o777) == (
        True, "new", 0o640
    )  # fmt: skip


def test_what_is_no_plain_file_is_written_to(tmp_path):
    reading, writing = os.pipe()
    write_file(tmp_path / f"../../../../../proc/self/fd/{writing}", b"report")
    os.close(writing)
    assert os.read(reading, 100) == b"report"
    os.close(reading)


def test_without_force_nothing_is_replaced(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(UsageError, match="there already"):
        write_file(tmp_path / "a", b"new", force=False)
    assert (tmp_path / "a").read_text() == "old"
