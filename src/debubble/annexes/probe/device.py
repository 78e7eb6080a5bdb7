"""A model in → what its layers, embedding and head take on one device, at several sizes.

It needs torch and the standard library alone:
`python -m debubble.annexes.probe.device MODEL --out FILE`.

Modules that are alike, of one class with weights of the same shapes, are one kind; one of them is
timed. The kind that is there most often is the layer. What comes before its first is the embedding,
what comes after its last the head:

    Embedding  Block Block Block … Block  Norm Linear
    embedding  layer                      head

A pass takes something however few its layers are: stacks of one and of several tell what a layer
adds.

Ranks that are to share the device slow each other, their passes and their messages. With copies all
of that is timed as it will be met, each figure while the other copies work without a pause:

    copy 0    alone ····  layers, beside    messages ◄┐      what is written
    copy 1                work ···········  messages ◄┘
    copy 2                work ····························
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from debubble.annexes.probe.measured import KindTimes, MessageTimes, Probe

PASSES = ("forward", "backward", "input_grad")
# The first runs build kernels, fill caches and wake clocks.
_WARM_UP = 3
_SAMPLES = 20
_DEEP = 4
_POLL_S = 0.02
_PATIENCE_S = 120.0
# A device lowers its clock when all of it is at work, and takes a while to.
_SETTLE_S = 1.5
# A few bytes tell what a message takes however short it is.
_SHORT_BYTES = 4096
# Written once messages are wanted, with their sizes: copy 1 leaves its work and takes them.
_WANTED = "messages.json"
_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class ProbeError(Exception):
    """What keeps a model from being timed."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Modules that are alike."""

    name: str
    count: int
    module: nn.Module
    part: str
    """embedding, layer or head."""


def main(words: Sequence[str] | None = None) -> int:
    """Time a model and write what was measured."""
    asked = _read(words)
    try:
        if asked.beside:
            work_beside(asked)
        else:
            text = json.dumps(asdict(probe(asked)), indent=1) + "\n"
            Path(asked.out).write_text(text, "utf-8")
    except ProbeError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _read(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m debubble.annexes.probe.device")
    parser.add_argument("model", help="file.py:function or module:function")
    parser.add_argument("--tokens", default="512,1024", help="of a microbatch: two sizes or more")
    parser.add_argument("--copies", type=int, default=1, help="ranks that share the device")
    parser.add_argument("--forward-only", action="store_true")
    parser.add_argument("--out", default="probe.debubble.json")
    parser.add_argument("--beside", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def probe(asked: argparse.Namespace) -> Probe:
    """Time all kinds at all sizes: alone and, where there are copies, beside them."""
    sizes = parse_tokens(asked.tokens)
    bench = Bench(*load_model(asked.model), trains=not asked.forward_only)
    alone = tuple(bench.time_all(sizes))
    beside: tuple[KindTimes, ...] = ()
    messages: tuple[MessageTimes, ...] = ()
    if asked.copies > 1:
        with _copies(asked) as folder:
            beside = tuple(bench.time_all(sizes))
            outputs = {row.output_bytes for row in alone if row.part == "layer"}
            (folder / _WANTED).write_text(json.dumps(sorted({_SHORT_BYTES, *outputs})))
            messages = tuple(time_messages(0, folder))
    on_gpu = _DEVICE == "cuda"
    return Probe(
        model=asked.model,
        torch=torch.__version__,
        device=torch.cuda.get_device_name() if on_gpu else _DEVICE,
        device_bytes=torch.cuda.get_device_properties(0).total_memory if on_gpu else None,
        copies=asked.copies,
        trains=not asked.forward_only,
        layers=sum(kind.count for kind in bench.kinds if kind.part == "layer"),
        alone=alone,
        beside=beside,
        messages=messages,
    )


def parse_tokens(text: str) -> tuple[int, ...]:
    """Read `512,1024`."""
    try:
        sizes = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        sizes = ()
    if len(sizes) < 2 or min(sizes) < 1:
        raise ProbeError(f"{text!r} are no sizes: give two or more, such as 512,1024")
    return sizes


def load_model(words: str) -> tuple[list[nn.Module], Callable[[int], Any]]:
    """Call the function that is named; it returns modules in their order, and a batch maker."""
    place, _, name = words.rpartition(":")
    if place == "transformer":
        try:
            sizes = dict(part.split("=") for part in name.split(","))
            made = transformer(**{dimension: int(size) for dimension, size in sizes.items()})
        except (TypeError, ValueError) as error:
            raise ProbeError(f"{words!r} is no transformer: {error}") from error
        return [module.to(_DEVICE) for module in made[0]], made[1]
    if not place:
        raise ProbeError(f"{words!r} names no function: write file.py:build or module:build")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(f"probed_{Path(place).stem}", place)
        if spec is None or spec.loader is None or not Path(place).is_file():
            raise ProbeError(f"{place} is not there")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        sys.path.insert(0, str(Path(place).resolve().parent))
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())  # noqa: PTH109 (as python -m does)
        try:
            module = importlib.import_module(place)
        except ImportError as error:
            raise ProbeError(f"{place} cannot be imported: {error}") from error
    build = getattr(module, name, None)
    if not callable(build):
        raise ProbeError(f"{place} has no function {name}")
    made = build()
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[1])):
        raise ProbeError(f"{words} is to return its modules and a function from tokens to a batch")
    modules = [module.to(_DEVICE) for module in made[0]]
    if not modules or not all(isinstance(module, nn.Module) for module in modules):
        raise ProbeError(f"{words} returned no modules")
    return modules, made[1]


class _Block(nn.Module):
    """Attention and a perceptron of four times its width, each beside its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Take a sequence of tokens, one microbatch."""
        parts = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for part in parts)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(-3, -2).flatten(-2))
        found: Tensor = x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        return found


def transformer(
    *, layers: int, width: int, heads: int, vocab: int
) -> tuple[list[nn.Module], Callable[[int], Tensor]]:
    """Build a decoder of these dimensions: an embedding, blocks, a head."""
    blocks = [_Block(width, heads) for _ in range(layers)]
    ends = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
    return [ends[0], *blocks, ends[1]], lambda tokens: torch.randint(vocab, (1, tokens))


def tell_kinds(layers: Sequence[nn.Module]) -> list[Kind]:
    """Group modules that are alike, in the order of their first; tell layers from both ends."""
    signs = [_sign(module) for module in layers]
    usual = max(dict.fromkeys(signs), key=signs.count)
    first = signs.index(usual)
    last = len(signs) - 1 - signs[::-1].index(usual)
    kinds: dict[tuple[str, object], Kind] = {}
    for number, (sign, module) in enumerate(zip(signs, layers, strict=True)):
        part = "embedding" if number < first else "head" if number > last else "layer"
        known = kinds.get((part, sign))
        kinds[part, sign] = Kind(
            name=type(module).__name__,
            count=1 if known is None else known.count + 1,
            module=module if known is None else known.module,
            part=part,
        )
    return list(kinds.values())


def _sign(module: nn.Module) -> object:
    shapes = tuple((name, tuple(weight.shape)) for name, weight in module.named_parameters())
    return type(module).__qualname__, shapes


class Bench:
    """Times passes of a model's modules on one device."""

    def __init__(
        self, modules: Sequence[nn.Module], make_batch: Callable[[int], Any], *, trains: bool
    ) -> None:
        self.kinds = tell_kinds(modules)
        self._modules, self._make_batch, self._trains = modules, make_batch, trains

    def time_all(self, sizes: Sequence[int]) -> Iterator[KindTimes]:
        """Yield what each kind takes at each size, once the device is at its usual clock."""
        if _DEVICE == "cuda":
            end = time.monotonic() + _SETTLE_S
            self.work(max(sizes), until=lambda: time.monotonic() >= end)
        for tokens in sizes:
            inputs = self._inputs(tokens)
            for kind in self.kinds:
                yield self._time(kind, inputs[id(kind.module)], tokens)

    def _inputs(self, tokens: int) -> dict[int, Any]:
        """Return what each module is given, by its id."""
        batch = self._make_batch(tokens)
        x = batch.to(_DEVICE) if isinstance(batch, Tensor) else batch
        inputs: dict[int, Any] = {}
        with torch.no_grad():
            for module in self._modules:
                inputs[id(module)] = x
                x = module(x)
        return inputs

    def work(self, tokens: int, until: Callable[[], bool]) -> None:
        """Run layers, forward and backward, as a rank that never waits."""
        layer = next(kind.module for kind in self.kinds if kind.part == "layer")
        x = self._inputs(tokens)[id(layer)]
        # Asked after a round, not before: the first one builds kernels for seconds.
        done = False
        while not done:
            for _ in range(_DEEP):  # the device has the next pass at hand
                y = layer(x.detach().requires_grad_(self._trains))
                if self._trains:
                    torch.autograd.backward(y, torch.randn_like(y))
            _settle()
            done = until()

    def _time(self, kind: Kind, x: Tensor, tokens: int) -> KindTimes:
        """Time a stack of one and, of a layer, of several: their difference is what layers take."""
        saved, output = _count_bytes(kind.module, x)
        took = self._time_stack([kind.module], x)
        if kind.part == "layer" and _can_be_stacked(kind.module, x):
            several = self._time_stack([kind.module] * _DEEP, x)
            for name in PASSES:
                added = (several[name] - took[name]) / (_DEEP - 1)
                took[name] = added if added > 0 else several[name] / _DEEP
        return KindTimes(
            kind=kind.name,
            part=kind.part,
            count=kind.count,
            tokens=tokens,
            forward_s=took["forward"],
            backward_s=took["backward"],
            input_grad_s=took["input_grad"],
            saved_bytes=saved,
            output_bytes=output,
            weight_bytes=sum(w.numel() * w.element_size() for w in kind.module.parameters()),
        )

    def _time_stack(self, stack: Sequence[nn.Module], x: Tensor) -> dict[str, float]:
        """Return the median of each pass of a stack; 0 of one that it does not have."""
        runs = [self._run_once(stack, x) for _ in range(_WARM_UP + _SAMPLES)][_WARM_UP:]
        return {name: median(run.get(name, 0.0) for run in runs) for name in PASSES}

    def _run_once(self, stack: Sequence[nn.Module], x: Tensor) -> dict[str, float]:
        """Run a stack forward, backward as a whole, and backward for the input gradient alone."""
        if not self._trains:
            with torch.no_grad(), _clock() as forward:
                _through(stack, x)
            return {"forward": forward()}
        needs = x.is_floating_point()
        x = x.detach().requires_grad_(needs)
        with _clock() as forward:
            y = _through(stack, x)
        # Ones would be multiplied with less power than a job's gradients, at a higher clock.
        gradient = torch.randn_like(y)
        with _clock() as backward:
            torch.autograd.backward(y, gradient)
        took = {"forward": forward(), "backward": backward()}
        if needs:
            y = _through(stack, x)
            with _clock() as inputs:
                torch.autograd.grad(y, x, gradient)
            took["input_grad"] = inputs()
        return took


@contextmanager
def _clock() -> Iterator[Callable[[], float]]:
    """Time a block; ask afterwards."""
    _settle()
    began = time.perf_counter()
    ended = began
    yield lambda: ended - began
    _settle()
    ended = time.perf_counter()


def _settle() -> None:
    if _DEVICE == "cuda":
        torch.cuda.synchronize()


def _count_bytes(module: nn.Module, x: Tensor) -> tuple[int, int]:
    """Return what is saved for the backward pass, weights left out, and the output's bytes."""
    weights = {weight.untyped_storage().data_ptr() for weight in module.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = x.detach().requires_grad_(x.is_floating_point())
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = module(x)
    return sum(kept.values()), y.numel() * y.element_size()


def _through(stack: Sequence[nn.Module], x: Tensor) -> Tensor:
    for module in stack:
        x = module(x)
    return x


def _can_be_stacked(module: nn.Module, x: Tensor) -> bool:
    with torch.no_grad():
        y = module(x)
    return bool(y.shape == x.shape and y.dtype == x.dtype)


def time_messages(number: int, folder: Path) -> Iterator[MessageTimes]:
    """Time messages between the first two copies, one way and both ways at once.

    One way is half of a way there and back: both are of the same size.
    """
    sizes = json.loads((folder / _WANTED).read_text("utf-8"))
    dist.init_process_group(
        "nccl" if _DEVICE == "cuda" else "gloo",
        init_method=f"file://{folder}/met",
        rank=number,
        world_size=2,
    )

    def exchange(buffers: Sequence[Tensor], sends: Sequence[bool]) -> None:
        """Send or receive, all at once, as schedules do."""
        ways = [
            dist.P2POp(dist.isend if is_send else dist.irecv, buffer, 1 - number)
            for buffer, is_send in zip(buffers, sends, strict=True)
        ]
        for work in dist.batch_isend_irecv(ways):
            work.wait()

    try:
        for size in sizes:
            buffers = [torch.zeros(size, dtype=torch.uint8, device=_DEVICE) for _ in range(2)]
            one_way, both_ways = [], []
            for _ in range(_WARM_UP + _SAMPLES):
                with _clock() as there_and_back:
                    for is_send in (number == 0, number != 0):
                        exchange(buffers[:1], [is_send])
                with _clock() as crossing:
                    exchange(buffers, [True, False])
                one_way.append(there_and_back() / 2)
                both_ways.append(crossing())
            yield MessageTimes(
                bytes=size,
                one_way_s=tuple(one_way[_WARM_UP:]),
                both_ways_s=tuple(both_ways[_WARM_UP:]),
            )
    finally:
        dist.destroy_process_group()


@contextmanager
def _copies(asked: argparse.Namespace) -> Iterator[Path]:
    """Let copies of the model work beside this one; yield the folder through which they talk."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # -P: what lies in the folder of the call is no module of ours.
        command = [sys.executable, "-P", "-m", "debubble.annexes.probe.device", asked.model]
        command += ["--tokens", asked.tokens, "--folder", name]
        command += ["--forward-only"] * asked.forward_only
        # NCCL lets ranks share a device if they seem to be on hosts of their own.
        os.environ.setdefault("NCCL_HOSTID", "copy0")
        others = [
            subprocess.Popen(  # noqa: S603 (ourselves)
                [*command, "--beside", str(number)],
                env=os.environ | {"NCCL_HOSTID": f"copy{number}"},
            )
            for number in range(1, asked.copies)
        ]
        try:
            deadline = time.monotonic() + _PATIENCE_S
            while not all((folder / str(number)).exists() for number in range(1, asked.copies)):
                if time.monotonic() > deadline or any(other.poll() for other in others):
                    raise ProbeError("a copy of the model did not start beside the first")
                time.sleep(_POLL_S)
            yield folder
        finally:
            for other in others:
                other.terminate()
            for other in others:
                other.wait()


def work_beside(asked: argparse.Namespace) -> None:
    """Work until somebody ends it; the first beside takes messages in between, once wanted."""
    bench = Bench(*load_model(asked.model), trains=not asked.forward_only)
    wanted = asked.folder / _WANTED

    def is_wanted() -> bool:
        (asked.folder / str(asked.beside)).touch()
        return bool(asked.beside == 1 and wanted.exists())

    bench.work(max(parse_tokens(asked.tokens)), until=is_wanted)
    list(time_messages(asked.beside, asked.folder))


if __name__ == "__main__":
    sys.exit(main())
