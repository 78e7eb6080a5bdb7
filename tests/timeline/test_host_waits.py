"""What hosts wait for: messages, by the waits that torch writes; devices, by their calls."""

from __future__ import annotations

from support.traces.kineto_events import document, kernel, launch, write

from debubble.timeline.work import (
    find_synchronisations,
    find_work,
    held_up_of,
    synchronised_of,
)
from debubble.trace.kineto import read_kineto

US = 1_000


def call(name, ts, dur):
    return launch(ts=ts, dur=dur, correlation=999) | {"name": name}


def test_calls_that_keep_a_host_are_listed_and_last_until_it_issues_again(tmp_path):
    trace = read_kineto(
        write(
            tmp_path / "a.json",
            document(
                [
                    launch(ts=10.0, dur=5.0, correlation=1),
                    kernel(ts=20.0, dur=50.0, correlation=1),
                    call("cudaDeviceSynchronize", 16.0, 55.0),
                    launch(ts=80.0, dur=5.0, correlation=2),
                    kernel(ts=90.0, dur=5.0, correlation=2),
                    call("cudaStreamSynchronize", 100.0, 1.0),
                ]
            ),
        )
    )
    found = find_synchronisations(trace)
    assert found.whole.tolist() == [True, False]
    assert (found.end_ns - found.start_ns).tolist() == [55 * US, 1 * US]
    kept = synchronised_of(find_work(trace), found)
    assert (kept.end_ns - kept.start_ns).tolist() == [64 * US, 1 * US]


def test_a_copy_that_returns_when_it_has_ended_keeps_its_host(tmp_path):
    name = "Memcpy DtoH (Device -> Pageable)"
    copies = [
        kernel(ts=20.0, dur=500.0, correlation=1),
        kernel(name, ts=530.0, dur=2.0, correlation=2, stream=7) | {"cat": "gpu_memcpy"},
        kernel(name, ts=620.0, dur=9.0, correlation=3, stream=7) | {"cat": "gpu_memcpy"},
    ]
    calls = [
        launch(ts=10.0, dur=5.0, correlation=1),
        launch(ts=16.0, dur=520.0, correlation=2) | {"name": "cudaMemcpyAsync"},
        launch(ts=600.0, dur=5.0, correlation=3) | {"name": "cudaMemcpyAsync"},
    ]
    trace = read_kineto(write(tmp_path / "a.json", document([*calls, *copies])))
    found = find_synchronisations(trace)
    assert (found.end_ns - found.start_ns).tolist() == [520 * US]
    assert not len(held_up_of(trace).start_ns)


def test_a_launch_that_takes_long_waits_for_room_in_the_devices_queue(tmp_path):
    trace = read_kineto(
        write(
            tmp_path / "a.json",
            document(
                [
                    launch(ts=10.0, dur=5.0, correlation=1),
                    kernel(ts=20.0, dur=500.0, correlation=1),
                    launch(ts=30.0, dur=450.0, correlation=2),
                    kernel(ts=600.0, dur=5.0, correlation=2),
                    call("cudaDeviceSynchronize", 490.0, 900.0),
                ]
            ),
        )
    )
    held = held_up_of(trace)
    assert (held.end_ns - held.start_ns).tolist() == [450 * US]
