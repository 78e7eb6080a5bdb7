"""Errors say where, what and what to do, also after a trip through a worker process."""

from __future__ import annotations

import inspect
import pickle

from debubble import errors
from debubble.errors import Code, DebubbleError, Gap, TraceError, as_gap


def test_an_error_names_rank_and_file():
    error = TraceError("is empty", file="a/rank3.json", rank=3, hint="record it again")
    assert str(error) == "rank 3, a/rank3.json: is empty"
    assert str(TraceError("is empty")) == "is empty"


def test_every_error_survives_pickling():
    kinds = [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, DebubbleError)
    ]
    assert len(kinds) >= 8
    for kind in kinds:
        again = pickle.loads(pickle.dumps(kind("m", hint="h", file="f", rank=1)))  # noqa: S301
        assert type(again) is kind
        assert (again.message, again.hint, again.file, again.rank) == ("m", "h", "f", 1)


def test_the_error_of_one_file_becomes_a_gap_of_the_answer():
    gap = as_gap(TraceError("is empty", file="a", rank=3, hint="h"), code=Code.UNREADABLE)
    assert gap == Gap(code=Code.UNREADABLE, message="is empty", hint="h", file="a", rank=3)
    assert str(gap) == "rank 3, a: is empty"
