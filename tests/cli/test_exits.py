"""How commands end: 1 is kept for gates, whatever goes wrong; never with a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.services.console import type_command
from support.traces.recordings import H200

import debubble.cli
from debubble.errors import UsageError

RUN = str(H200 / "1f1b_p2_m4")


def shell(line, **environment):
    """Run a line of a shell, in which $debubble is the command."""
    command = f"{sys.executable} -m debubble"
    return subprocess.run(
        ["/bin/bash", "-c", line],
        env=os.environ | {"debubble": command, "RUN": RUN} | environment,
        capture_output=True,
        check=False,
        timeout=170,
    )


@pytest.mark.slow
def test_a_reader_who_has_gone_is_no_closed_gate():
    for words in ("find $RUN", "find $RUN --json", "--help"):
        # The far end is closed before anything is written.
        line = f"{{ $debubble {words}; echo $? >&2; }} | exec 0<&-"
        ended = shell(line)
        assert ended.stderr.decode().split() == ["141"], words


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this kernel has no /dev/full")
def test_a_full_disk_is_said_in_a_line():
    for words in ("find $RUN", "find $RUN --json"):
        ended = shell(f"$debubble {words} > /dev/full")
        assert ended.stderr.decode() == "error: No space left on device\n"
        assert ended.returncode == 2


@pytest.mark.slow
def test_a_closed_stdout_leaves_the_exit_code():
    ended = shell("$debubble find $RUN --fail-over 1% >&-")
    assert (ended.returncode, ended.stderr) == (1, b"")
    ended = shell("$debubble find $RUN >&- 2>&-")
    assert ended.returncode == 0


@pytest.mark.slow
def test_a_terminal_without_the_letters_gets_others():
    ended = shell("$debubble find $RUN --details", PYTHONIOENCODING="ascii")
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert b"0 ? 1" in ended.stdout


def fail(error, monkeypatch):
    def main(**_settings):
        raise error

    monkeypatch.setattr(debubble.cli.cli, "main", main)
    with pytest.raises(SystemExit) as end:
        debubble.cli.main([])
    return end.value.code


def test_what_nobody_foresaw_is_said_in_a_line(monkeypatch, capsys):
    assert fail(ZeroDivisionError("by\nnought"), monkeypatch) == 2
    assert capsys.readouterr().err == (
        "error: unforeseen: ZeroDivisionError: by nought\n\n"
        "hint: DEBUBBLE_TRACEBACK=1 shows where; please report it with that\n"
    )


def test_the_traceback_is_there_for_whoever_asks(monkeypatch, capsys):
    monkeypatch.setenv("DEBUBBLE_TRACEBACK", "1")
    assert fail(ZeroDivisionError(), monkeypatch) == 2
    said = capsys.readouterr().err
    assert said.startswith("Traceback (most recent call last)")
    assert "error: unforeseen: ZeroDivisionError\n" in said


def test_what_cannot_be_written_is_named_with_its_file(monkeypatch, capsys):
    assert fail(PermissionError(13, "Permission denied", "a.html"), monkeypatch) == 2
    assert capsys.readouterr().err == "error: a.html: Permission denied\n"
    assert fail(UsageError("no"), monkeypatch) == 2


@pytest.mark.parametrize("words", [["--json", RUN], [RUN, "--json"], ["--json=full", RUN]])
def test_json_takes_no_word_that_follows_it(words, tmp_path):
    answer = type_command(f"debubble inspect {' '.join(words)}", tmp_path)
    assert json.loads(answer.out)["schema"] == "debubble.inspect/1"


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (PermissionError(13, "Permission denied", "a/b"), "machine_error"),
        (ZeroDivisionError("by zero"), "unforeseen"),
    ],
    ids=lambda value: getattr(type(value), "__name__", ""),
)
def test_whatever_goes_wrong_a_program_is_told_in_json(raised, code, monkeypatch, capsys):
    def fail(*_, **__):
        raise raised

    monkeypatch.setattr(debubble.cli.cli, "main", fail)
    with pytest.raises(SystemExit):
        debubble.cli.main(["find", "x", "--json=brief"])
    told = json.loads(capsys.readouterr().out)
    assert (told["schema"], told["error"]["code"]) == ("debubble.error/1", code)
