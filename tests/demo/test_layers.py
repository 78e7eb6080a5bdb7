from __future__ import annotations

import time

import pytest
from support.requirements import need_package

torch = need_package("torch")

from debubble.annexes.demo.layers import TimedLayer, listening
from debubble.annexes.demo.workload import Workload

MS = 1_000_000
# A busy machine wakes a sleeper late, most of the time: so often it may.
MOST_TRIES = 100


@pytest.fixture
def calls():
    heard = []
    with listening(lambda part, layer, start, end: heard.append((part, layer, end - start))):
        yield heard


def durations(calls, part):
    return [duration for heard, _, duration in calls if heard == part]


def quickest(play, calls, part):
    """Play until the machine left one call of a part alone, and return what that took."""
    for _ in range(MOST_TRIES):
        play()
        if min(durations(calls, part)) < 1.3 * 3 * MS:
            break
    return min(durations(calls, part))


def test_the_forward_pass_lasts_as_long_as_it_was_told(calls):
    layer = TimedLayer(Workload(forward_ms=3), 0)
    x = torch.randn(1, 64, 32)
    begin = time.perf_counter_ns()
    assert quickest(lambda: layer(x), calls, "forward") == pytest.approx(3 * MS, rel=0.3)
    assert time.perf_counter_ns() - begin >= len(calls) * 3 * MS


def test_a_full_backward_is_half_input_gradient_and_half_weight_gradient(calls):
    layer = TimedLayer(Workload(forward_ms=0, backward_ms=6), 5)
    x = torch.randn(1, 64, 32, requires_grad=True)
    halves = [
        quickest(lambda: layer(x).sum().backward(), calls, part) for part in ("input", "weight")
    ]
    assert halves == pytest.approx([3 * MS, 3 * MS], rel=0.3)
    assert [(part, index) for part, index, _ in calls][:3] == [
        ("forward", 5),
        ("input", 5),
        ("weight", 5),
    ]


def test_a_split_backward_pays_for_each_half_once(calls):
    layer = TimedLayer(Workload(forward_ms=0, backward_ms=0), 0)
    x = torch.randn(1, 64, 32, requires_grad=True)
    loss = layer(x).sum()
    calls.clear()
    torch.autograd.grad(loss, [x], retain_graph=True)
    assert [part for part, _, _ in calls] == ["input"]
    calls.clear()
    torch.autograd.grad(loss, [layer.weight])
    assert [part for part, _, _ in calls] == ["weight"]


def test_the_gradients_are_those_of_the_formula():
    workload = Workload(forward_ms=0, backward_ms=0)
    layer = TimedLayer(workload, 3)
    x = torch.randn(1, 64, 32, requires_grad=True)
    upstream = torch.randn(1, 64, 32)
    gradients = torch.autograd.grad(layer(x), [x, layer.weight], upstream)
    plain = torch.autograd.grad(torch.tanh(x) * layer.weight, [x, layer.weight], upstream)
    for gradient, expected in zip(gradients, plain, strict=True):
        torch.testing.assert_close(gradient, expected)
