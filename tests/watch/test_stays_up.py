"""Whatever an engine answers, a folder holds or a row has become: others are served, once each."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.processes import wait_until
from support.services.hostile_engine import hostile_engine
from support.services.watch_service import Watching, place_capture, write_config

pytestmark = pytest.mark.slow

GOOD = 3
# What any of them does to whoever asks, tests/capture/test_fetch.py tells: here are two that answer
# nothing, and two whose figures are none.
UNANSWERED, ANSWERED = ("not HTTP", "cut in its body"), ("figures beyond all", "no UTF-8")


def folder_source(name, folder, *, more=""):
    folder.mkdir(exist_ok=True)
    place = f'[[source]]\nname = "{name}"\nfolder = "{folder}"\n'
    return f'{place}settle = "200ms"\npoll = "100ms"\n{more}'


def engine_source(number, folder, url):
    more = f'[source.server]\nurl = "{url}"\nkind = "vllm"\nevery = "500ms"\nseconds = "10ms"\n'
    return folder_source(f"engine{number}", folder / f"engine{number}", more=more)


def odd_folders(folder):
    """Fill a folder with what nobody should put there; return its sources."""
    made = {}

    def content(name):
        made[name] = folder / name
        made[name].mkdir()
        return made[name]

    odd = bytes(content("bytes")) + b"/rank\xff0.json"
    Path(os.fsdecode(odd)).write_bytes(b'{"traceEvents": []}')
    (content("folder") / os.fsdecode(b"caf\xe9")).mkdir()
    os.mkfifo(content("pipe") / "rank0.json")
    (content("device") / "rank0.json").symlink_to("/dev/zero")
    (content("lost") / "rank0.json").symlink_to(folder / "nowhere.json")
    (content("circle") / "a").symlink_to(made["circle"])
    (content("named") / "rank0.json").mkdir()
    (content("signs") / "rank0 \x1b[31m\n<b>\u202e.json").write_bytes(b"\x00\x01")
    (content("socket") / "x").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(made["socket"] / "rank0.json"))
    (content("damaged") / "rank0.json.gz").write_bytes(b"\x1f\x8b\x08\x00garbage")
    (made["damaged"] / "rank1.json").write_bytes(b'{"traceEvents": [{"ph": ')
    (made["damaged"] / "empty.json").write_bytes(b"")
    (made["damaged"] / "deep.json").write_bytes(b"[" * 100_000)
    return made


def stored(folder, source="train"):
    with contextlib.closing(sqlite3.connect(folder / "history.db", timeout=60)) as store:
        query = "SELECT key FROM watch_captures WHERE state='stored' AND pipeline=?"
        rows = [key for (key,) in store.execute(query, (source,))]
        (count,) = store.execute(
            "SELECT count(*) FROM measurements WHERE name=?", (source,)
        ).fetchone()
    assert len(set(rows)) == len(rows) == count
    return count


def test_engines_that_answer_badly_end_nobody_and_are_named(tmp_path):
    answers = (*UNANSWERED, *ANSWERED)
    with contextlib.ExitStack() as engines:
        lent = [engines.enter_context(hostile_engine(answer)) for answer in answers]
        sources = folder_source("train", tmp_path / "traces")
        for number, one in enumerate(lent):
            sources += engine_source(number, tmp_path, one.url)
        with Watching(write_config(tmp_path, sources=sources)) as watch:
            for number in range(GOOD):
                place_capture(tmp_path, f"c{number}")
            for number, answer in enumerate(answers):
                event = "capturing" if answer in ANSWERED else "not_captured"
                watch.wait_for(event, source=f"engine{number}", count=2)
            watch.wait_for("analysed", count=GOOD, source="train")
            troubles = {
                name: pipeline["health"]["troubles"] for name, pipeline in watch.pipelines().items()
            }
            assert {name for name in troubles if troubles[name]} >= {"engine0", "engine1"}
            assert not troubles["train"]
            metrics = watch.ask("/metrics")[2]
            assert 'debubble_source_up{pipeline="train"} 1.0' in metrics
            assert 'debubble_source_up{pipeline="engine0"} 0.0' in metrics
            assert "engine0" in watch.ask("/")[2]
            assert not [one for one in watch.events if one.get("event") in ("failed", "bug")]
            assert watch.stop() == 0
        assert stored(tmp_path) == GOOD


def test_folders_with_whatever_in_them_end_nobody(tmp_path):
    odd = tmp_path / "odd"
    odd.mkdir()
    made = odd_folders(odd)
    assert len(made) >= 10
    sources = folder_source("train", tmp_path / "traces")
    sources += "".join(folder_source(name, folder) for name, folder in made.items())
    sources += folder_source("all", odd)
    with Watching(write_config(tmp_path, sources=sources)) as watch:
        place_capture(tmp_path, "first")
        watch.wait_for("analysed", source="train")
        watch.wait_for("not_analysed", source="damaged")
        watch.wait_for("not_analysed", source="signs")
        place_capture(tmp_path, "second")
        watch.wait_for("analysed", count=2, source="train")
        assert not [one for one in watch.events if one.get("event") in ("failed", "bug")]
        assert watch.stop() == 0
    assert stored(tmp_path) == 2


def workers_of(pid):
    """Return the workers that a service has started, as the kernel knows them."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += [
                int(child)
                for child in (task / "children").read_text().split()
                if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
            ]
    return found


def is_alive(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_workers_end_with_the_service_however_early_it_is_killed(tmp_path):
    """A worker takes a second to start: the service may be gone before that."""
    config = write_config(tmp_path)
    place_capture(tmp_path, "first")
    with Watching(config) as watch:
        seen = wait_until(lambda: workers_of(watch.process.pid))
        time.sleep(0.05)  # a moment, in which it has read what it needs of the service
        watch.kill()
        wait_until(lambda: not any(map(is_alive, seen)), "a worker outlived its service")


def test_a_stop_ends_an_analysis_that_takes_long_and_the_next_service_begins_it_anew(tmp_path):
    """Workers are frozen: their analysis would take for ever."""
    config = write_config(tmp_path)
    place_capture(tmp_path, "first")
    with Watching(config, grace_s=0.5) as watch:
        for pid in wait_until(lambda: workers_of(watch.process.pid)):
            os.kill(pid, signal.SIGSTOP)
        assert watch.stop() == 0
        assert watch.events[-1]["event"] == "stopped"
    with Watching(config) as watch:
        watch.wait_for("analysed")
        assert watch.stop() == 0
    assert stored(tmp_path) == 1


def test_what_failed_is_listed_and_tried_again(tmp_path):
    config = write_config(tmp_path)
    place_capture(tmp_path, "first")
    with Watching(config, analysis_s=0.01) as watch:
        watch.wait_for("not_analysed")
        shown = watch.ask_until(lambda data: data["pipelines"][0]["counts"] == {"failed": 1})
        (capture,) = shown["pipelines"][0]["captures"]
        assert "took longer than" in capture["problem"]
        path = f"/captures/{capture['id']}/retry"
        assert f"action='{path}'" in watch.ask("/")[2]
        assert watch.ask(path, method="POST", headers={"Origin": "http://evil"})[0] == 403
        assert watch.ask("/captures/99/retry", method="POST")[0] == 404
        assert watch.ask(path, method="POST")[0] == 303
        watch.wait_for("not_analysed", count=2)
        assert watch.stop() == 0
    words = [sys.executable, "-m", "debubble", "watch", "retry", "--config", str(config)]
    answer = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "took longer than" in answer.stdout
    assert answer.stdout.endswith("1 taken up again.\n")
    with Watching(config) as watch:
        watch.wait_for("analysed")
        assert watch.stop() == 0
    assert stored(tmp_path) == 1


def test_a_store_that_is_away_is_waited_for_and_nothing_is_lost(tmp_path):
    """As far as the service sees: its table is not there for a while."""

    def rename(before, after):
        with contextlib.closing(sqlite3.connect(tmp_path / "history.db", timeout=60)) as store:
            store.execute(f"ALTER TABLE {before} RENAME TO {after}")

    config = write_config(tmp_path)
    with Watching(config) as watch:
        assert watch.ask("/readyz")[0] == 200
        rename("watch_captures", "away")
        place_capture(tmp_path, "first")
        watch.wait_for("store_away")
        wait_until(lambda: watch.ask("/readyz")[0] == 503)
        assert (watch.ask("/healthz")[0], watch.ask("/")[0]) == (200, 200)
        rename("away", "watch_captures")
        watch.wait_for("analysed")
        wait_until(lambda: watch.ask("/readyz")[0] == 200)
        assert watch.stop() == 0
    assert stored(tmp_path) == 1
