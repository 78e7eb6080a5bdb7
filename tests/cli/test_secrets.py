"""Traces behind URLs with secrets in them: no output and no file that is written shows any."""

from __future__ import annotations

import functools
import gzip
import shutil
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support.requirements import need_package
from support.services.console import type_command
from support.traces.recordings import H200

from debubble.errors import DebubbleError, Gap, mask_secrets
from debubble.units import printable

SECRET = "xyzzy"  # noqa: S105 (what must not be seen)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_words):
        pass


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A web server with one trace that is whole, one that is cut, and one that is none."""
    need_package("aiohttp")
    folder = tmp_path_factory.mktemp("served")
    [whole, *_] = sorted((H200 / "1f1b_p2_m4").glob("*.json.gz"))
    shutil.copy(whole, folder / "rank0.json.gz")
    (folder / "rank1.json.gz").write_bytes(whole.read_bytes()[:20_000])
    (folder / "rank2.json.gz").write_bytes(gzip.compress(b'{"traceEvents": 5}'))
    handler = functools.partial(_Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://me:{SECRET}@127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "inspect",
        "inspect --json",
        "inspect --json=brief",
        "inspect --markdown",
        "find --timeline",
        "find --json",
        "find --html page.html --svg step.svg --perfetto trace.json --digest digests",
        "links",
        "compare {urls} -- ",
    ],
)
def test_no_verb_shows_what_a_url_hides(words, address, tmp_path):
    names = ("rank0.json.gz", "rank1.json.gz", "rank2.json.gz", "rank9.json.gz")
    urls = " ".join(f"'{address}/{name}?X-Amz-Signature={SECRET}&a=1'" for name in names)
    verb, _, more = words.format(urls=urls).partition(" ")
    answer = type_command(f"debubble {verb} {urls} {more}", tmp_path)
    assert "127.0.0.1" in answer.text or answer.code == 0
    assert SECRET not in answer.text
    for file in tmp_path.rglob("*"):
        if file.is_file() and "tests" not in file.relative_to(tmp_path).parts:
            assert SECRET.encode() not in file.read_bytes(), file


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://me:xyzzy@h/a.json", "https://me:***@h/a.json"),
        ("https://xyzzy@h/a.json", "https://***@h/a.json"),
        ("s3://KEY:xy/z@zy@bucket/a.json", "s3://KEY:***@bucket/a.json"),
        ("https://h/a?token=xyzzy&step=1", "https://h/a?token=***&step=1"),
        (
            "https://b/a?X-Amz-Expires=9&X-Amz-Credential=xyzzy%2F&X-Amz-Signature=xyzzy",
            "https://b/a?X-Amz-Expires=9&X-Amz-Credential=***&X-Amz-Signature=***",
        ),
        ("https://c/a?sv=2&sig=xyzzy%3D", "https://c/a?sv=2&sig=***"),
        ("https://h:9000/rank@0.json", "https://h:9000/rank@0.json"),
        ("postgresql://me@host/name", "postgresql://me@host/name"),
        ("a/b@c:d.json", "a/b@c:d.json"),
    ],
)
def test_urls_are_shown_without_their_secrets_wherever_they_stand(url, shown):
    assert mask_secrets(url) == shown
    assert mask_secrets(f"['{url}', 5]: cannot be read") == f"['{shown}', 5]: cannot be read"
    assert printable(f"{url}: cannot be read") == f"{shown}: cannot be read"
    for problem in (
        DebubbleError("no", file=url, rank=1),
        Gap(code="x", message="no", file=url, rank=1),
    ):
        assert str(problem) == f"rank 1, {shown}: no"
