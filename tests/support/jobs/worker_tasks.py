"""Tasks for workers of every kind: well-behaved, deadly, and such as wait for a sign."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from debubble.errors import TraceError
from debubble.trace.format import TraceFile


def orders(folder, names):
    """Files as tasks are handed them; a name is a rank where it is a number."""
    return [
        TraceFile(
            file=str(folder / name),
            format="kineto",
            rank=int(name) if name.isdigit() else None,
        )
        for name in names
    ]


def write_orders(folder, names):
    for name in names:
        (folder / name).touch()
    return orders(folder, names)


def name_of(known, _limits):
    return Path(known.file).name


def refuse_bad(known, _limits):
    if "bad" in known.file:
        raise TraceError("is no good", file=known.file)
    return Path(known.file).name


def run_out_of_memory(_known, _limits):
    raise MemoryError


def be_wrong(_known, _limits):
    return {}["a bug"]


def die_of_bad(known, _limits):
    note(known.file, "tried")
    if "bad" in known.file:
        die()
    return Path(known.file).name


def die_once(known, _limits):
    if not note(known.file, "tried"):
        die()
    return Path(known.file).name


def hold_the_first_time(known, _limits):
    """Begin, and with a name that says so go on only when killed or told."""
    before = note(known.file, f"began {os.getpid()}")
    if "held" in known.file and not before:
        wait_for_sign(known.file)
    return Path(known.file).name


def hold(known, _limits):
    """Begin, and with a name that says so go on only when told."""
    note(known.file, f"began {os.getpid()}")
    if "held" in known.file:
        wait_for_sign(known.file)
    return Path(known.file).name


def note(file, what):
    """Write a line beside the file; return how many there were."""
    notes = Path(file + ".notes")
    with notes.open("a") as stream:
        before = len(notes.read_text().splitlines())
        stream.write(what + "\n")
    return before


def notes_of(known):
    notes = Path(known.file + ".notes")
    return notes.read_text().splitlines() if notes.exists() else []


def wait_for_sign(file):
    sign = Path(file).parent / "go"
    while not sign.exists() and Path(file).exists():
        time.sleep(0.02)


def die():
    os.kill(os.getpid(), signal.SIGKILL)
