"""A model in → what its layers, embedding and head take on one device, at several sizes.

It needs torch and the standard library alone:
`python -m debubble.annexes.probe.device MODEL --out FILE`.

Modules that are alike, of one class with weights of the same shapes, are one kind; one of them is
timed. The kind that is there most often is the layer. What comes before its first is the embedding,
what comes after its last the head:

    Embedding  Block Block Block … Block  Norm Linear
    embedding  layer                      head

A pass of n layers takes a start and n times a layer: stacks of one and of several tell them apart.

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

SCHEMA = "debubble.probe.measured/1"
PASSES = ("forward", "backward", "input_grad")
# A model that needs no file: `transformer:layers,width,heads,vocabulary`.
TRANSFORMER = "transformer"
# The first runs build kernels, fill caches and wake clocks.
_WARM_UP = 3
_DEEP = 4
_POLL_S = 0.02
_PATIENCE_S = 120.0
# A device lowers its clock when all of it is at work, and takes a while to.
_SETTLE_S = 1.5
# A few bytes tell what a message takes however short it is.
_SHORT_BYTES = 4096
# Written once messages are wanted, with their sizes: copy 1 leaves its work and takes them.
_WANTED = "messages.json"


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


@dataclass(frozen=True, kw_only=True)
class KindTimes:
    """What one kind takes with so many tokens, in seconds: the median, and that of each pass."""

    kind: str
    part: str
    count: int
    tokens: int
    forward_s: float
    backward_s: float
    input_grad_s: float
    """Of the backward pass: what the stage before waits for. The rest is the weight gradient."""
    start_s: dict[str, float]
    """Of each pass: what it takes however few its layers are."""
    saved_bytes: int
    """Kept from forward to backward, without weights."""
    output_bytes: int
    """What goes to the next stage."""
    weight_bytes: int
    spread: float
    """Between the quarters of forward passes, over their median."""


def main(words: Sequence[str] | None = None) -> int:
    """Time a model and write what was found."""
    told = _read(words)
    if told.threads:
        torch.set_num_threads(told.threads)
    try:
        if told.beside:
            work_beside(told)
        else:
            found = probe(told)
            Path(told.out).write_text(json.dumps(found, indent=1) + "\n", "utf-8")
            print(f"{told.out} written")  # noqa: T201 (no click on a bare machine)
    except ProbeError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _read(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m debubble.annexes.probe.device")
    parser.add_argument("model", help="file.py:function or module:function")
    parser.add_argument("--tokens", default="512,1024", help="of a microbatch: two sizes or more")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--copies", type=int, default=1, help="ranks that share the device")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--forward-only", action="store_true")
    parser.add_argument("--out", default="probe.debubble.json")
    parser.add_argument("--beside", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def probe(told: argparse.Namespace) -> dict[str, Any]:
    """Time all kinds at all sizes: alone and, where there are copies, beside them."""
    sizes = parse_tokens(told.tokens)
    layers, make_batch = load_model(told.model, told.device)
    kinds = tell_kinds(layers)
    bench = Bench(told.device, trains=not told.forward_only, samples=told.samples)
    alone = [asdict(one) for one in bench.time_all(kinds, layers, make_batch, sizes)]
    found: dict[str, Any] = {"alone": alone}
    if told.copies > 1:
        with _copies(told) as folder:
            timed = bench.time_all(kinds, layers, make_batch, sizes)
            found["beside"] = [asdict(one) for one in timed]
            handed_on = {int(row["output_bytes"]) for row in alone if row["part"] == "layer"}
            (folder / _WANTED).write_text(json.dumps(sorted({_SHORT_BYTES, *handed_on})))
            found["messages"] = bench.time_messages(0, folder)
    return {
        "schema": SCHEMA,
        "model": told.model,
        "torch": torch.__version__,
        "device": device_name(told.device),
        "device_bytes": device_bytes(told.device),
        "multiprocessors": multiprocessors(told.device),
        "threads": torch.get_num_threads(),
        "copies": told.copies,
        "trains": not told.forward_only,
        "layers": sum(kind.count for kind in kinds if kind.part == "layer"),
        **found,
    }


def parse_tokens(text: str) -> tuple[int, ...]:
    """Read `512,1024`."""
    try:
        sizes = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        sizes = ()
    if len(sizes) < 2 or min(sizes) < 1:
        raise ProbeError(f"{text!r} are no sizes: give two or more, such as 512,1024")
    return sizes


def load_model(words: str, device: str) -> tuple[list[nn.Module], Callable[[int], Any]]:
    """Call the function that is named; it returns modules in their order, and a batch maker."""
    place, _, name = words.rpartition(":")
    if place == TRANSFORMER:
        made = transformer(*map(int, name.split(",")))
        return [one.to(device) for one in made[0]], made[1]
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
    modules = [one.to(device) for one in made[0]]
    if not modules or not all(isinstance(one, nn.Module) for one in modules):
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
    layers: int, width: int, heads: int, vocabulary: int
) -> tuple[list[nn.Module], Callable[[int], Tensor]]:
    """Build a decoder of these dimensions: an embedding, blocks, a head."""
    blocks = [_Block(width, heads) for _ in range(layers)]
    ends = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
    return [ends[0], *blocks, ends[1]], lambda tokens: torch.randint(vocabulary, (1, tokens))


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
    """Times passes of stacks of modules on one device."""

    def __init__(self, device: str, *, trains: bool, samples: int) -> None:
        self._device, self._trains, self._samples = device, trains, samples

    def time_all(
        self,
        kinds: Sequence[Kind],
        layers: Sequence[nn.Module],
        make_batch: Callable[[int], Any],
        sizes: Sequence[int],
    ) -> Iterator[KindTimes]:
        """Yield what each kind takes at each size, once the device is at its usual clock."""
        if self._device.startswith("cuda"):
            self.work(kinds, layers, make_batch(max(sizes)), until=_after(_SETTLE_S))
        for tokens in sizes:
            x = self._on_device(make_batch(tokens))
            inputs: dict[int, Any] = {}
            with torch.no_grad():
                for module in layers:
                    inputs[id(module)] = x
                    x = module(x)
            for kind in kinds:
                yield self._time(kind, inputs[id(kind.module)], tokens)

    def work(
        self,
        kinds: Sequence[Kind],
        layers: Sequence[nn.Module],
        batch: Any,
        until: Callable[[], bool],
    ) -> None:
        """Run layers, forward and backward, as a rank that never waits."""
        layer = next(kind.module for kind in kinds if kind.part == "layer")
        x = self._on_device(batch)
        with torch.no_grad():
            for module in layers:
                if module is layer:
                    break
                x = module(x)
        # Asked after a round, not before: the first one builds kernels for seconds.
        done = False
        while not done:
            for _ in range(_DEEP):  # the device has the next pass at hand
                y = layer(x.detach().requires_grad_(self._trains))
                if self._trains:
                    torch.autograd.backward(y, torch.randn_like(y))
            self._settle()
            done = until()

    def time_messages(self, number: int, folder: Path) -> list[dict[str, Any]]:
        """Time messages between the first two copies, one way and both ways at once.

        One way is half of a way there and back: both are of the same size.
        """
        sizes = json.loads((folder / _WANTED).read_text("utf-8"))
        on_gpu = self._device.startswith("cuda")
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"file://{folder}/met",
            rank=number,
            world_size=2,
        )
        found = []
        try:
            for size in sizes:
                buffers = [
                    torch.zeros(size, dtype=torch.uint8, device=self._device) for _ in range(2)
                ]
                took: dict[str, list[float]] = {"one_way_s": [], "both_ways_s": []}
                for _ in range(_WARM_UP + self._samples):
                    with self._clock() as there_and_back:
                        for is_send in (number == 0, number != 0):
                            self._pass_on(1 - number, buffers[:1], [is_send])
                    with self._clock() as exchange:
                        self._pass_on(1 - number, buffers, [True, False])
                    took["one_way_s"].append(there_and_back() / 2)
                    took["both_ways_s"].append(exchange())
                kept = {name: seconds[_WARM_UP:] for name, seconds in took.items()}
                found.append({"bytes": size, **kept})
        finally:
            dist.destroy_process_group()
        return found

    def _pass_on(self, peer: int, buffers: Sequence[Tensor], sends: Sequence[bool]) -> None:
        """Send or receive, all at once, as schedules do."""
        ways = [
            dist.P2POp(dist.isend if is_send else dist.irecv, buffer, peer)
            for buffer, is_send in zip(buffers, sends, strict=True)
        ]
        for work in dist.batch_isend_irecv(ways):
            work.wait()

    def _on_device(self, batch: Any) -> Any:
        return batch.to(self._device) if isinstance(batch, Tensor) else batch

    def _time(self, kind: Kind, x: Tensor, tokens: int) -> KindTimes:
        """Time a stack of one and, of a layer, of several: their difference is what layers take."""
        saved, output = self._count_bytes(kind.module, x)
        one, spread = self._time_stack([kind.module], x)
        start, each = dict.fromkeys(PASSES, 0.0), one
        if kind.part == "layer" and _can_be_stacked(kind.module, x):
            several, spread = self._time_stack([kind.module] * _DEEP, x)
            each = {name: (several[name] - one[name]) / (_DEEP - 1) for name in PASSES}
            each = {
                name: took if took > 0 else several[name] / _DEEP for name, took in each.items()
            }
            start = {name: max(one[name] - each[name], 0.0) for name in PASSES}
        return KindTimes(
            kind=kind.name,
            part=kind.part,
            count=kind.count,
            tokens=tokens,
            **{f"{name}_s": each[name] for name in PASSES},
            start_s=start,
            saved_bytes=saved,
            output_bytes=output,
            weight_bytes=sum(w.numel() * w.element_size() for w in kind.module.parameters()),
            spread=spread,
        )

    def _time_stack(self, stack: Sequence[nn.Module], x: Tensor) -> tuple[dict[str, float], float]:
        """Return the median of each pass of a stack, and how far forward passes are apart."""
        took: dict[str, list[float]] = {name: [] for name in PASSES}
        for _ in range(_WARM_UP + self._samples):
            for name, seconds in self._run_once(stack, x).items():
                took[name].append(seconds)
        kept = {name: sorted(found[_WARM_UP:]) for name, found in took.items()}
        forward = kept["forward"]
        quarter = len(forward) // 4
        spread = (forward[-1 - quarter] - forward[quarter]) / median(forward)
        return {name: median(found) if found else 0.0 for name, found in kept.items()}, spread

    def _run_once(self, stack: Sequence[nn.Module], x: Tensor) -> dict[str, float]:
        """Run a stack forward, backward as a whole, and backward for the input gradient alone."""
        if not self._trains:
            with torch.no_grad(), self._clock() as forward:
                _through(stack, x)
            return {"forward": forward()}
        needs = x.is_floating_point()
        x = x.detach().requires_grad_(needs)
        with self._clock() as forward:
            y = _through(stack, x)
        # Ones would be multiplied with less power than a job's gradients, at a higher clock.
        gradient = torch.randn_like(y)
        with self._clock() as backward:
            torch.autograd.backward(y, gradient)
        took = {"forward": forward(), "backward": backward()}
        if needs:
            y = _through(stack, x)
            with self._clock() as inputs:
                torch.autograd.grad(y, x, gradient)
            took["input_grad"] = inputs()
        return took

    @contextmanager
    def _clock(self) -> Iterator[Callable[[], float]]:
        """Time a block; ask afterwards."""
        self._settle()
        began = time.perf_counter()
        ended = began
        yield lambda: ended - began
        self._settle()
        ended = time.perf_counter()

    def _settle(self) -> None:
        if self._device.startswith("cuda"):
            torch.cuda.synchronize()

    def _count_bytes(self, module: nn.Module, x: Tensor) -> tuple[int, int]:
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


def _after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


@contextmanager
def _copies(told: argparse.Namespace) -> Iterator[Path]:
    """Let copies of the model work beside this one; yield the folder in which they are told."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # -P: what lies in the folder of the call is no module of ours.
        command = [sys.executable, "-P", "-m", "debubble.annexes.probe.device", told.model]
        command += ["--tokens", told.tokens, "--device", told.device, "--folder", name]
        command += ["--threads", str(told.threads), "--samples", str(told.samples)]
        command += ["--forward-only"] * told.forward_only
        # NCCL lets ranks share a device if they seem to be on hosts of their own.
        os.environ.setdefault("NCCL_HOSTID", "copy0")
        others = [
            subprocess.Popen(  # noqa: S603 (ourselves)
                [*command, "--beside", str(number)],
                env=os.environ | {"NCCL_HOSTID": f"copy{number}"},
            )
            for number in range(1, told.copies)
        ]
        try:
            deadline = time.monotonic() + _PATIENCE_S
            while not all((folder / str(number)).exists() for number in range(1, told.copies)):
                if time.monotonic() > deadline or any(other.poll() for other in others):
                    raise ProbeError("a copy of the model did not start beside the first")
                time.sleep(_POLL_S)
            yield folder
        finally:
            for other in others:
                other.terminate()
            for other in others:
                other.wait()


def work_beside(told: argparse.Namespace) -> None:
    """Work until somebody ends it; the first beside takes messages in between, once wanted."""
    layers, make_batch = load_model(told.model, told.device)
    bench = Bench(told.device, trains=not told.forward_only, samples=told.samples)
    batch = make_batch(max(parse_tokens(told.tokens)))
    wanted = told.folder / _WANTED

    def is_wanted() -> bool:
        (told.folder / str(told.beside)).touch()
        return bool(told.beside == 1 and wanted.exists())

    bench.work(tell_kinds(layers), layers, batch, until=is_wanted)
    bench.time_messages(told.beside, told.folder)


def device_name(device: str) -> str:
    """Return what the device is called."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else device


def device_bytes(device: str) -> int | None:
    """Return the memory of the device, where it has its own."""
    return torch.cuda.get_device_properties(0).total_memory if device.startswith("cuda") else None


def multiprocessors(device: str) -> int | None:
    """Return how many the device has, or the part of it that this process was given."""
    if not device.startswith("cuda"):
        return None
    return torch.cuda.get_device_properties(0).multi_processor_count


if __name__ == "__main__":
    sys.exit(main())
