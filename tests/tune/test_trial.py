"""How a command failed, by its exit code, its output and what the kernel counted."""

from __future__ import annotations

import pytest
from support.tuning import bench_of

from debubble.annexes.tune import trial
from debubble.annexes.tune.setting import Template
from debubble.annexes.tune.trial import Kind, run_trial

NOBODY = "nobody"


def fail_with(tmp_path, script):
    bench = bench_of(tmp_path)
    template = Template(words=("sh", "-c", script), now=bench.template.now)
    outcome, _ = run_trial(
        bench.__class__(template=template, steps=2, wait=0, folder=tmp_path),
        bench.template.now,
        out=tmp_path / "run",
        token=NOBODY,
        timeout_s=30.0,
        cut_s=None,
    )
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "kind", "said"),
    [
        ("kill -9 $$", Kind.CRASHED, "killed (signal 9); out of memory is one cause"),
        ("kill -11 $$", Kind.CRASHED, "signal 11"),
        ("echo no such split; exit 3", Kind.CRASHED, "exit code 3: no such split"),
        ("echo CUDA out of memory.; exit 1", Kind.OUT_OF_MEMORY, "CUDA out of memory."),
    ],
)
def test_a_failure_is_called_what_it_is_known_to_be(tmp_path, script, kind, said):
    outcome = fail_with(tmp_path, script)
    assert (outcome.kind, outcome.message) == (kind, said)


@pytest.mark.slow
def test_a_kill_that_the_kernel_counted_as_one_for_memory_is_out_of_memory(tmp_path, monkeypatch):
    counts = iter((4, 5))
    monkeypatch.setattr(trial, "_killed_for_memory", lambda: next(counts))
    outcome = fail_with(tmp_path, "kill -9 $$")
    assert outcome.kind is Kind.OUT_OF_MEMORY
    assert outcome.message.startswith("the kernel ended a process for memory; killed (signal 9)")
