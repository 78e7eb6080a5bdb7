"""A configuration that is wrong is refused by the name of its key."""

from __future__ import annotations

import pytest

from debubble.annexes.watch.config import read_config
from debubble.errors import WatchError

SOURCE = '[[source]]\nname = "a"\nfolder = "/traces"\n'
SERVER = SOURCE + '[source.server]\nurl = "http://127.0.0.1:8000"\nkind = "vllm"\n'
LISTEN = '[listen]\naddress = "0.0.0.0:9464"\ntoken_file = "token"\n'


def read(folder, text):
    path = folder / "watch.toml"
    path.write_text(text)
    return read_config(path)


def test_what_is_left_out_has_a_default(tmp_path):
    config = read(tmp_path, SOURCE)
    (source,) = config.sources
    assert (source.settle_s, source.poll_s, source.keep, source.server) == (30, 10, None, None)
    assert (config.listen.address.host, config.listen.address.port) == ("127.0.0.1", 9464)
    assert (config.drift.reference, config.drift.min_change, config.workers) == (40, 0.03, 1)


def test_periods_and_shares_are_read(tmp_path):
    more = 'every = "2h"\nseconds = "3s"\nmost_waiting = 3\n'
    server = read(tmp_path, SERVER + more).sources[0].server
    assert (server.every_s, server.seconds, server.most_waiting) == (7200, 3, 3)
    assert read(tmp_path, '[drift]\nmin_change = "10%"\n' + SOURCE).drift.min_change == 0.1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "required field `source`"),
        ("x = [", "is no TOML"),
        ("store = 5\n" + SOURCE, "store: Expected `str"),
        (SOURCE + SOURCE, "two sources have one name"),
        ('[[source]]\nname = "a"', r"source\[0\]: .*required field `folder`"),
        ('[[source]]\nname = "a/b"\nfolder = "/t"', r"source\[0\].name"),
        ('[[source]]\nname = "a"\nfolder = "t"', "'t' is no absolute path"),
        (SOURCE + 'foldr = "x"', r"source\[0\]: .*unknown field `foldr`"),
        (SOURCE + 'settle = "soon"', r"source\[0\].settle: 'soon' is no time"),
        (SOURCE + "settle = 5", r"source\[0\].settle: must be text"),
        (SOURCE + 'digests = "kept"', r"source\[0\].digests: 'kept' is no absolute path"),
        (SOURCE + "keep = -1", r"source\[0\].keep: Expected `int` >= 0"),
        (SERVER.replace("vllm", "tgi"), "'tgi'"),
        (SERVER.replace("http:", "ftp:"), "is no address"),
        (SERVER.replace("127", "me:secret@127"), "is no address"),
        ("[drift]\nreference = 9\n" + SOURCE, "drift.reference: Expected `int` >= 10"),
        ('[listen]\naddress = "0.0.0.0:9464"\n' + SOURCE, "there is no token"),
        ('[listen]\naddress = "here"\n' + SOURCE, "is no address"),
        ('webhooks = ["file:///etc/passwd"]\n' + SOURCE, r"webhooks\[0\]: .* is no address"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, problem):
    with pytest.raises(WatchError, match=problem) as refusal:
        read(tmp_path, text)
    assert str(tmp_path) in str(refusal.value)
    assert refusal.value.hint


@pytest.mark.parametrize(
    ("content", "mode", "problem"),
    [
        ("short", 0o600, "16 plain characters"),
        ("0123456789abcdef", 0o644, "everybody on this machine"),
        ("0123456789abcdef", 0o602, "everybody on this machine"),
        ("0123456789abcdef", 0o640, ""),
    ],
)
def test_a_token_is_long_and_nobody_elses(tmp_path, content, mode, problem):
    (tmp_path / "token").write_text(f"{content}\n")
    (tmp_path / "token").chmod(mode)
    if problem:
        with pytest.raises(WatchError, match=problem):
            read(tmp_path, LISTEN + SOURCE)
    else:
        assert read(tmp_path, LISTEN + SOURCE).listen.token == content
