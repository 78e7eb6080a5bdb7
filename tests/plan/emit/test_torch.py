"""torch's snippet against torch's own classes, as far as one process goes, and its rules."""

from __future__ import annotations

import ast
import importlib
import inspect
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.emitted_text import comments_of, setting_for, splits
from support.requirements import need_package

from debubble.errors import UsageError
from debubble.plan.change import Change, Setting
from debubble.plan.emit import emit
from debubble.timeline.schedules import format_order, order_of

RUN = Setting(ranks=4, layers=32, microbatches=8, schedule="1f1b")
NAMED = ["gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zb", "zbv", "dualpipe-v"]


def assigned(text, name):
    """What the snippet assigns to a name, as text."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return node.value
    return None


def cuts_of(text):
    keys = [ast.literal_eval(key) for key in assigned(text, "split_spec").keys]
    return [int(key.removeprefix("layers.")) for key in keys]


def allowed(name, ranks, stages, microbatches):
    """torch's own rules, from its sources."""
    if name in {"1f1b", "dualpipe-v"} and microbatches < stages:
        return False
    whole = name not in {"interleaved-1f1b", "interleaved-zb"}
    return whole or microbatches % max(1, microbatches // ranks) == 0


@pytest.mark.slow
@given(splits(), st.sampled_from(["loop", "v"]))
def test_cuts_add_up_to_the_split_and_each_stage_has_one_rank(sizes, shape):
    ranks, chunks, split = sizes
    assume(shape == "loop" or chunks == 2)
    name = "zbv" if shape == "v" else "1f1b" if chunks == 1 else "looped-bfs"
    run = setting_for(ranks, split, microbatches=ranks)
    text = emit("torch", Change(split=split, schedule=name, chunks=chunks), run)
    bounds = [0, *cuts_of(text), sum(split)]
    assert [end - first for first, end in pairwise(bounds)] == list(split)
    placed = ast.literal_eval(assigned(text, "stages_of_rank"))
    assert sorted(sum(placed.values(), [])) == list(range(ranks * chunks))  # noqa: RUF017
    for rank, stages in placed.items():
        if shape == "v":
            assert stages == [rank, 2 * ranks - 1 - rank]
        else:
            assert stages == [rank + chunk * ranks for chunk in range(chunks)]


@given(st.sampled_from(NAMED), st.integers(1, 6), st.integers(1, 30), st.integers(1, 3))
def test_sizes_are_refused_exactly_where_torch_refuses_them(name, ranks, microbatches, chunks):
    one = name in {"gpipe", "1f1b"}
    assume((chunks == 1) == one and (chunks == 2 or name not in {"zbv", "dualpipe-v"}))
    run = Setting(ranks=ranks, layers=ranks * chunks, microbatches=microbatches)
    change = Change(schedule=name, chunks=chunks)
    if allowed(name, ranks, ranks * chunks, microbatches):
        assert f"n_microbatches={microbatches}," in emit("torch", change, run)
    else:
        with pytest.raises(UsageError, match="microbatch"):
            emit("torch", change, run)


@pytest.mark.parametrize("name", [*NAMED, "zb-h1", "zb-h2"])
def test_names_and_arguments_are_torchs_own(name):
    need_package("torch")
    text = emit("torch", Change(schedule=name), RUN)
    names = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            names |= {alias.name: getattr(module, alias.name) for alias in node.names}
    call = assigned(text, "schedule")
    made = names[call.func.id]
    keywords = {keyword.arg: None for keyword in call.keywords}
    if call.func.id == "_PipelineScheduleRuntime":
        made = importlib.import_module(made.__module__).PipelineScheduleMulti
    inspect.signature(made).bind(None, **keywords)
    single = "stage" in inspect.signature(made).parameters
    assert ast.unparse(call.args[0]) == ("stages[0]" if single else "stages")


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch warns of itself
@pytest.mark.parametrize("split", [(1, 3, 2, 1), (0, 3, 3, 1), (2, 4, 1, 0)])
def test_a_real_model_is_cut_as_the_split_says(split):
    torch = need_package("torch")
    pipelining = importlib.import_module("torch.distributed.pipelining")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Linear(2, 2, bias=False)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(7))
            self.norm = torch.nn.LayerNorm(2, bias=False)

        def forward(self, x):
            x = self.embedding(x)
            for layer in self.layers:
                x = layer(x)
            return self.norm(x)

    text = emit("torch", Change(split=split), Setting(ranks=4, layers=7))
    spec = eval(  # noqa: S307
        ast.unparse(assigned(text, "split_spec")), {"SplitPoint": pipelining.SplitPoint}
    )
    pipe = pipelining.pipeline(Model(), mb_args=(torch.ones(1, 2),), split_spec=spec)
    held = [len(list(pipe.get_stage_module(stage).parameters())) for stage in range(4)]
    ends = (1, 0, 0, 1)
    assert held == [2 * layers + more for layers, more in zip(split, ends, strict=True)]


def test_overlap_takes_the_runtime_which_is_what_schedules_of_several_stages_have():
    with pytest.raises(UsageError, match="to overlap more than ZBVZeroBubble does already"):
        emit("torch", Change(schedule="zbv", overlap=True), RUN)
    single = emit("torch", Change(overlap=True), RUN)
    assert "_PipelineScheduleRuntime" in single
    assert 'schedule._load_csv("order.csv")' in single


def test_an_order_of_your_own_is_loaded_from_where_it_is(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text(format_order(order_of("zb-h2", 4, 8)), "utf-8")
    text = emit("torch", Change(schedule=str(file)), RUN)
    [load] = [node for node in ast.parse(text).body if isinstance(node, ast.Expr)]
    assert ast.literal_eval(load.value.args[0]) == str(file)


@pytest.mark.parametrize(
    ("change", "run", "message"),
    [
        (Change(schedule="forward-only"), RUN, "forward-only by name"),
        (Change(overlap=False), RUN, "to wait for transfers"),
        (Change(microbatches=8), Setting(ranks=4), "the schedule of the run is unknown"),
        (
            Change(split=(1, 1, 1, 1)),
            Setting(ranks=2, layers=4, chunks=2),
            "the schedule of the run is unknown",
        ),
        (Change(schedule="gpipe"), Setting(ranks=4), "how many microbatches the run has"),
        (Change(microbatches=3), RUN, "1F1B needs a microbatch for each of 4 stages, not 3"),
    ],
)
def test_what_torch_cannot_do_or_nobody_knows_is_refused(change, run, message):
    with pytest.raises(UsageError, match=message) as caught:
        emit("torch", change, run)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("zbv", ("pytorch#161904", "BlockMask", "view")),
        ("interleaved-zb", ("pytorch#161904", "BlockMask")),
        ("interleaved-1f1b", ()),
    ],
)
def test_what_breaks_split_backwards_is_said_of_them_alone(schedule, said):
    for framework in ("torch", "torchtitan"):
        text = " ".join(comments_of(emit(framework, Change(schedule=schedule, chunks=2), RUN)))
        for word in ("pytorch#161904", "BlockMask", "view"):
            assert (word in text) == (word in said), word
