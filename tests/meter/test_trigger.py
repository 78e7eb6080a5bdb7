"""A few steps captured when it matters: by all ranks the same, once, and not too often."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest
from support.requirements import need_package

need_package("torch")

import torch.distributed as dist

from debubble.annexes.meter import trigger
from debubble.annexes.meter.trigger import Agreement, LocalServer, asked_by_file

STEP_S = 0.3
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def agreements(count, every_s=600.0):
    store = dist.HashStore()
    return [Agreement(store, count, every_s) for _ in range(count)]


def test_all_ranks_take_the_step_that_one_of_them_named():
    ranks = agreements(4)
    assert ranks[2].ask(100, STEP_S)
    for rank in ranks:
        rank.listen()
    assert {rank.step for rank in ranks} == {ranks[2].step}
    assert ranks[0].step > 100 + trigger.POLL_S / STEP_S


def test_another_capture_is_not_asked_for_before_its_time():
    clock = Clock()
    first, second = agreements(2)
    assert first.ask(100, STEP_S, clock=clock)
    second.listen(clock=clock)
    for rank in (first, second):
        rank.take()
    clock.now = 599.0
    assert not first.ask(200, STEP_S, clock=clock)
    assert not second.ask(200, STEP_S, clock=clock), "it heard of the first"
    clock.now = 601.0
    assert second.ask(300, STEP_S, clock=clock)
    first.listen(clock=clock)
    assert first.step == second.step > 300


def test_a_file_asks_once(tmp_path):
    assert not asked_by_file(tmp_path)
    (tmp_path / trigger.REQUEST_FILE).touch()
    assert asked_by_file(tmp_path)
    assert not asked_by_file(tmp_path)


@pytest.fixture
def server():
    asked = []
    server = LocalServer(
        0,
        lambda: "debubble_meter_steps_total 3\n",
        lambda: {"rank": 2},
        lambda: asked.append(1),
    )
    server.asked = asked
    yield server
    server.close()


def ask(server, path, **headers):
    url = f"http://127.0.0.1:{server.port}{path}"
    data = b"" if headers or path == "/capture" else None
    request = urllib.request.Request(url, data=data, headers=headers)
    with DIRECT.open(request, timeout=10) as answer:
        return answer.read().decode()


def test_metrics_and_the_straggler_are_answered_on_this_machine_alone(server):
    assert server._server.server_address[0] == "127.0.0.1"
    assert ask(server, "/metrics") == "debubble_meter_steps_total 3\n"
    assert json.loads(ask(server, "/straggler")) == {"rank": 2}
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(server, "/other")
    assert refused.value.code == 404
    refused.value.close()


def test_a_capture_is_asked_for_by_a_request_that_no_web_page_can_send(server):
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(server, "/capture")
    assert refused.value.code == 403
    refused.value.close()
    assert server.asked == []
    assert ask(server, "/capture", **{"X-Debubble": "capture"}) == "asked\n"
    assert server.asked == [1]
