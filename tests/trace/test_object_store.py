"""Traces in object storage: listed, recognised by their first bytes, read through broken wires."""

from __future__ import annotations

import gzip
import json
import random
import sys

import pytest
from support.requirements import need_package
from support.traces.kineto_events import document, kernel
from support.traces.recordings import H200

from debubble.errors import RunNotFound
from debubble.trace.captures import recognise
from debubble.trace.run import find_run, read_run
from debubble.trace.source import Source

s3fs = need_package("s3fs")
need_package("moto")
from support.services.object_store import started_store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.service,
    # aiobotocore's own: sessions are left to the collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
MEBIBYTE = 1024 * 1024


@pytest.fixture(scope="module")
def server():
    with started_store() as started:
        yield started


@pytest.fixture
def store(server, monkeypatch):
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    server.proxy.forget()
    yield server
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(scope="module")
def long_trace():
    """A trace of some mebibytes that do not pack well."""
    noise = random.Random(1)  # noqa: S311
    events = [kernel(name=f"k{noise.getrandbits(64):x}", ts=float(n)) for n in range(40_000)]
    return gzip.compress(json.dumps(document(events, rank=0)).encode(), 1)


def figures(run):
    return [
        (trace.rank, len(trace.kernels), int(trace.kernels.start_ns.sum())) for trace in run.ranks
    ]


def test_prefixes_globs_and_names_find_what_lies_there(store):
    url = store.put_folder(H200 / "fwd_closed_m4", "listed/run")
    store.put("listed/run/.hidden.json", b"{}")
    here = figures(read_run(find_run([str(H200 / "fwd_closed_m4")])))
    assert figures(read_run(find_run([url]))) == here
    assert figures(read_run(find_run([f"{url}/"]))) == here
    assert figures(read_run(find_run([f"{url}/rank*.json.gz"]))) == here
    assert figures(read_run(find_run(["s3://bucket/listed/r*"]))) == here
    assert figures(read_run(find_run([f"{url}/rank2.json.gz"]))) == here[2:3]


def test_the_first_bytes_are_enough_to_tell_what_an_object_is(store, long_trace):
    packed = store.put("first/rank0.json.gz", long_trace)
    plain = store.put("first/rank1.json", gzip.decompress(long_trace))
    assert recognise(packed).rank == recognise(plain).rank == 0
    assert store.proxy.bytes_out["first/rank0.json.gz"] <= MEBIBYTE / 8
    assert store.proxy.bytes_out["first/rank1.json"] <= MEBIBYTE / 2


def test_an_object_is_handed_out_once_and_in_ranges(store, long_trace):
    url = store.put("once/rank0.json.gz", long_trace)
    assert b"".join(Source(url).pieces()) == gzip.decompress(long_trace)
    assert store.proxy.bytes_out["once/rank0.json.gz"] == len(long_trace)
    assert store.proxy.requests["once/rank0.json.gz"] > 2


def test_an_answer_that_is_cut_is_asked_for_again(store, long_trace):
    url = store.put("cut/rank0.json.gz", long_trace)
    store.proxy.cut("cut/rank0.json.gz", times=2, spare=1)
    assert b"".join(Source(url).pieces()) == gzip.decompress(long_trace)


def test_an_object_whose_answers_are_always_cut_is_named_and_the_others_go_on(
    store, long_trace, monkeypatch
):
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    url = store.put("always/rank0.json.gz", long_trace)
    store.put("always/rank1.json", document([kernel()], rank=1, world=2))
    store.proxy.cut("always/rank0.json.gz", times=10**6, spare=2)
    run = read_run(find_run(["s3://bucket/always"]))
    assert [trace.rank for trace in run.ranks] == [1]
    assert (run.gaps[0].code, run.gaps[0].file, run.gaps[0].rank) == ("unreadable", url, 0)
    assert "the network" in run.gaps[0].hint


def test_an_object_that_was_replaced_since_it_was_listed_is_read_as_it_is_now(store):
    url = store.put("fresh/rank0.json", document([kernel()], rank=0, world=1))
    found = find_run(["s3://bucket/fresh"])
    store.put("fresh/rank0.json", document([kernel(), kernel(ts=20.0)], rank=0, world=1))
    assert figures(read_run(found))[0][1] == 2
    assert found.capture.files[0].file == url


def test_what_is_not_there_or_closed_is_said(store, monkeypatch):
    with pytest.raises(RunNotFound, match="nowhere"):
        find_run(["s3://bucket/nowhere/rank0.json"])
    with pytest.raises(RunNotFound, match="no files there"):
        find_run(["s3://bucket/nowhere/rank*.json"])
    store.put("closed/rank0.json", document([kernel()], rank=0))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(RunNotFound, match="redentials") as caught:
        find_run(["s3://bucket/closed"])
    assert "credentials of your environment" in caught.value.hint


def test_a_scheme_that_nothing_opens_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(RunNotFound, match="gcsfs") as caught:
        find_run(["gs://bucket/run"])
    assert "pip install" in caught.value.hint
