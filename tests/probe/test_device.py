"""What is timed on the device: kinds of modules, what they keep, and a model from a file."""

from __future__ import annotations

from textwrap import dedent

import pytest
from support.requirements import need_package

need_package("torch")

import torch
from torch import nn

from debubble.annexes.probe import device
from debubble.annexes.probe.measured import PARTS
from debubble.annexes.probe.pipeline import read_probe

MODEL = """
    from dataclasses import dataclass

    import torch
    from torch import nn

    @dataclass
    class Sizes:
        width: int = 8

    def build():
        width = Sizes().width
        layers = [nn.Linear(width, width) for _ in range(3)]
        return [nn.Embedding(10, width), *layers, nn.Linear(width, 10)], lambda tokens: (
            torch.randint(10, (tokens,))
        )

    def wrong():
        return []
"""


@pytest.fixture
def model(tmp_path):
    file = tmp_path / "model.py"
    file.write_text(dedent(MODEL), "utf-8")
    return file


def test_the_kind_that_is_there_most_often_is_the_layer():
    ends = nn.Embedding(10, 8), nn.Linear(8, 10)
    kinds = device.tell_kinds([ends[0], *(nn.Linear(8, 8) for _ in range(3)), nn.ReLU(), ends[1]])
    assert [(kind.part, kind.count) for kind in kinds] == [
        ("embedding", 1),
        ("layer", 3),
        ("head", 1),
        ("head", 1),
    ]


def test_what_a_layer_keeps_is_counted_without_its_weights():
    layer = nn.Linear(8, 8, bias=False)
    bench = device.Bench([layer], lambda tokens: torch.randn(tokens, 8), trains=True)
    (timed,) = bench.time_all([16])
    assert timed.saved_bytes == timed.output_bytes == 16 * 8 * 4
    assert timed.weight_bytes == 8 * 8 * 4
    assert timed.forward_s > 0
    assert timed.backward_s > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("{model}:nothing", "has no function"),
        ("{model}:wrong", "is to return"),
        ("build", "names no function"),
        ("nowhere.py:build", "is not there"),
        ("no_such_module:build", "cannot be imported"),
        ("transformer:layers=2,width=8", "is no transformer"),
        ("transformer:2,8,1,10", "is no transformer"),
    ],
)
def test_what_is_no_model_is_refused(model, words, message, capsys):
    assert device.main([words.format(model=model), "--tokens", "4,8"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_copies_work_beside_each_other_and_their_messages_are_timed(model, tmp_path):
    out = tmp_path / "probe.json"
    words = [f"{model}:build", "--tokens", "4,8", "--copies", "3", "--out", str(out)]
    assert device.main(words) == 0
    probe = read_probe(str(out))
    assert (probe.layers, probe.copies, probe.sizes) == (3, 3, (4, 8))
    timed = {(row.part, row.tokens) for row in probe.alone}
    assert timed == {(part, tokens) for part in PARTS for tokens in (4, 8)}
    assert timed == {(row.part, row.tokens) for row in probe.beside}
    sizes = {row.output_bytes for row in probe.alone if row.part == "layer"}
    assert {row.bytes for row in probe.messages} >= sizes
    for row in probe.messages:
        assert min(*row.one_way_s, *row.both_ways_s) > 0
