"""A run in → a record in the history out, once, however often the tuning is resumed."""

from __future__ import annotations

from debubble.measure.store import Store
from debubble.tune.journal import Run
from debubble.tune.setting import Setting

_TAG = "tune"


def remember(store: Store, name: str, run: Run) -> None:
    """Keep the measurement of a run under the tuning's name and its setting."""
    if run.outcome.measurement is None:
        return
    called = record_name(name, run.setting)
    if any(record.tags.get(_TAG) == run.token for record in store.records(called)):
        return
    tags = {_TAG: run.token, "outcome": run.outcome.kind.value, "run": str(run.number)}
    store.add(called, run.outcome.measurement, now_s=run.began_s, tags=tags)


def record_name(name: str, setting: Setting) -> str:
    """Name the records of a setting; commas would join names in `compare`."""
    parts = [f"{knob}={setting.written(knob).replace(',', '.')}" for knob in setting.knobs()]
    return "/".join([name, *parts])
