"""A configuration that is wrong is refused by the name of its key."""

from __future__ import annotations

import pytest

from debubble.annexes.watch.config import read_config
from debubble.errors import WatchError

SOURCE = '[[source]]\nname = "a"\nfolder = "/traces"\n'
SERVER = SOURCE + 'server = "http://127.0.0.1:8000"\nkind = "vllm"\n'


def read(folder, text):
    path = folder / "watch.toml"
    path.write_text(text)
    return read_config(path)


def test_what_is_left_out_has_a_default(tmp_path):
    config = read(tmp_path, SOURCE)
    (source,) = config.sources
    assert (source.settle_s, source.poll_s, source.keep, source.trigger) == (30, 10, None, None)
    assert (config.listen.host, config.listen.port, config.listen.token) == (
        "127.0.0.1",
        9464,
        None,
    )
    assert (config.drift.reference, config.drift.min_change, config.analysis.workers) == (
        40,
        0.03,
        1,
    )


@pytest.mark.parametrize("place", ["beside", "/kept", "s3://bucket/kept"])
def test_digests_are_kept_where_it_says(tmp_path, place):
    assert read(tmp_path, SOURCE).sources[0].digests is None
    assert read(tmp_path, f'{SOURCE}digests = "{place}"').sources[0].digests == place


def test_a_server_is_captured_as_it_says(tmp_path):
    more = 'every = "2h"\nseconds = "3s"\nmost_waiting = 3\n'
    trigger = read(tmp_path, SERVER + more).sources[0].trigger
    assert (trigger.every_s, trigger.seconds, trigger.most_waiting) == (7200, 3, 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there is nothing to watch"),
        ("x = [", "is no TOML"),
        ('[store]\nurl = "sqlite:///a"\n' + SOURCE, "store must be text"),
        (SOURCE + SOURCE, "two sources have one name"),
        ('[[source]]\nname = "a"', r"source\[0\].folder is missing"),
        ('[[source]]\nname = "a/b"\nfolder = "/t"', "'a/b' is no name"),
        ('[[source]]\nname = "a"\nfolder = "t"', "'t' is no absolute path"),
        (SOURCE + 'foldr = "x"', r"source\[0\].foldr is no key"),
        (SOURCE + 'settle = "soon"', r"source\[0\].settle: 'soon' is no time"),
        (SOURCE + "settle = 5", r"source\[0\].settle must be text"),
        (SOURCE + 'digests = "kept"', r"source\[0\].digests: 'kept' is no absolute path"),
        (SOURCE + "keep = -1", r"source\[0\].keep: Expected `int` >= 0"),
        (SERVER.replace("vllm", "tgi"), "'tgi'"),
        (SERVER.replace("http:", "ftp:"), "is no address"),
        ("[drift]\nreference = 9\n" + SOURCE, "drift.reference: Expected `int` >= 10"),
        ('[drift]\nsides = "left"\n' + SOURCE, "'left'"),
        ('[listen]\naddress = "0.0.0.0:9464"\n' + SOURCE, "there is no token"),
        ('[listen]\naddress = "here"\n' + SOURCE, "is no address"),
        ('[[webhook]]\nurl = "file:///etc/passwd"\n' + SOURCE, "is no address"),
        ("colour = 1\n" + SOURCE, "colour is no key"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, said):
    with pytest.raises(WatchError, match=said) as caught:
        read(tmp_path, text)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.hint


def test_another_address_needs_a_token_that_is_long_enough(tmp_path):
    listen = '[listen]\naddress = "0.0.0.0:9464"\ntoken_file = "token"\n'
    (tmp_path / "token").write_text("short\n")
    (tmp_path / "token").chmod(0o600)
    with pytest.raises(WatchError, match="16 plain characters"):
        read(tmp_path, listen + SOURCE)
    (tmp_path / "token").write_text("0123456789abcdef\n")
    assert read(tmp_path, listen + SOURCE).listen.token == "0123456789abcdef"  # noqa: S105 (made up)


def test_a_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(WatchError, match="cannot be read"):
        read_config(tmp_path / "none.toml")


@pytest.mark.parametrize(
    "line",
    [
        'every = "1h"',
        'kind = "vllm"',
        "most_waiting = 3",
        'seconds = "3s"',
    ],
)
def test_what_says_how_a_server_is_captured_needs_one(tmp_path, line):
    key = line.partition(" ")[0]
    with pytest.raises(WatchError, match=rf"source\[0\]\.{key} needs source\[0\]\.server"):
        read(tmp_path, SOURCE + line)


@pytest.mark.parametrize(("mode", "taken"), [(0o644, False), (0o602, False), (0o640, True)])
def test_a_token_that_everybody_may_read_is_none(tmp_path, mode, taken):
    listen = '[listen]\ntoken_file = "token"\n'
    (tmp_path / "token").write_text("0123456789abcdef\n")
    (tmp_path / "token").chmod(mode)
    if taken:
        assert read(tmp_path, listen + SOURCE).listen.token
    else:
        with pytest.raises(WatchError, match="everybody on this machine"):
            read(tmp_path, listen + SOURCE)
