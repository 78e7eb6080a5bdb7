"""A timeline of forward passes in → the batches of a stream: each one's way through the stages.

What a pass is to a step, a batch is to a stream. With two batches in flight over three stages,
`a` the way of an activation and `t` that of a sampled token:

    stage 0   0000 1111          2222 3333
    stage 1       a0000 1111          a2222 3333
    stage 2            a0000 1111          a2222
    host                    t    t
                            └ batch 2 may enter: it takes the slot of batch 0

The way back is mostly the host's and no message shows it: a batch enters after the one that held
its slot has left. docs/explanation/how-streams-are-accounted.md tells why each is read as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from debubble.timeline.figures import PipelineFigures, StreamFigures
from debubble.timeline.model import (
    F64,
    I64,
    Columns,
    Flags,
    PassKind,
    RankTimeline,
    Timeline,
    rows_by_hop,
)
from debubble.timeline.turns import Phase
from debubble.trace.columns import Operation, RankTrace

UNSEEN = -1
"""A moment that was not captured."""

# Prompts are cut in chunks of hundreds of tokens, an answer goes on by one a request.
_APART = 2.5
# Without a second size to tell from: no server decodes so many requests in one small batch.
_MOST_DECODED = 256
# No server puts so many tokens in one batch.
_MOST_TOKENS = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches(Columns):
    """The batches of one pipeline, in the order they entered: a row each, a column a stage.

    Moments are on the pipeline's clock; `UNSEEN` where the capture does not show them.
    """

    ranks: tuple[RankTimeline, ...]
    stream: StreamFigures
    turn: I64
    """When the scheduler's turn reached the first host, where labels tell it; of each batch."""
    issued: I64
    """When the host of the stage launched the first of it."""
    start: I64
    end: I64
    busy: I64
    """Device time inside the pass."""
    send_issued: I64
    """When the host issued its message to the next stage."""
    sent: I64
    """When it began to be sent."""
    posted: I64
    """When the stage's host asked for its message."""
    received: I64
    """When the device began to receive it."""
    arrived: I64
    tokens: I64
    """Of each batch; -1 where neither a label nor a shape tells."""
    padded: I64
    """The tokens that it was computed with: CUDA graphs have few sizes. -1 where nothing tells."""
    prompts: I64
    """Requests of whose prompts it holds a chunk; -1 where no label tells."""
    rows: I64
    """Requests that it decodes for, where labels say so or all its tokens are such; else -1."""
    phase: I64
    labelled: bool
    """Names in the traces told the phases, not sizes."""

    @property
    def span(self) -> tuple[int, int]:
        """In which every rank was captured."""
        return self.stream.start_ns, self.stream.end_ns

    @property
    def in_flight(self) -> int | None:
        """How many the driver keeps in flight; None where it keeps to no number."""
        return self.stream.kept

    @property
    def at_entry(self) -> int:
        """How many are on the devices when one enters: fewer than it may where the first stage sets
        the pace, or where others wait in the host of the first stage.
        """  # noqa: D205 (one sentence)
        labelled = self.stream.turns_out is not None
        return self.stream.on_device if labelled else self.stream.usual_in_flight

    @property
    def stages(self) -> int:
        """How many there are."""
        return int(self.start.shape[1])

    @property
    def entered(self) -> I64:
        """When each batch entered: when the scheduler sent it out, or the first stage began it."""
        return np.where(self.turn != UNSEEN, self.turn, self.start[:, 0])

    @property
    def with_prompts(self) -> Flags:
        """Batches that hold chunks of prompts."""
        return np.isin(self.phase, (Phase.MIXED, Phase.PREFILL))

    @property
    def requests(self) -> int:
        """How many requests decode at once: those of as many batches as take turns."""
        rows = self.rows[self.rows > 0]
        each = float(rows.mean()) if len(rows) else 1.0
        return sum(self.round) or max(1, round(each * (self.groups or 1)))

    @property
    def drafted(self) -> bool:
        """Whether requests have several tokens in a batch: a draft that it checks."""
        decodes = (self.phase == Phase.DECODE) & (self.rows > 0)
        return bool((self.tokens[decodes] > self.rows[decodes]).any())

    @property
    def starved(self) -> bool:
        """Whether turns have no request because there are fewer of them than stages."""
        return self.stream.empty_turns > 0 and self.turn_known and self.requests < self.stages

    @property
    def groups(self) -> int | None:
        """How many batches take turns, each with its own requests: of the scheduler's turns, those
        that have any. A scheduler that runs ahead has the next turn of a group out with it.
        """  # noqa: D205 (one sentence)
        if not self.turn_known or self.in_flight is None:
            return self.in_flight
        most = min(self.in_flight, len(self) // 2)
        periods = {self.stages, self.stages + 1, self.in_flight} - {0}
        rounds = {max(1, round(turns * (1 - self.stream.empty_turns))) for turns in periods}
        apart = {
            count: float(np.abs(self.tokens[count:] - self.tokens[:-count]).mean())
            for count in sorted(rounds)
            if count <= max(most, 1) and len(self) > count
        }
        return min(apart, key=lambda count: apart[count], default=self.in_flight)

    @property
    def round(self) -> tuple[int, ...]:
        """Requests of the batches that take turns, where each round is as the one before it: no
        request began or ended. Nothing where rounds differ.
        """  # noqa: D205 (one sentence)
        count, rows = self.groups, self.rows
        if not self.turn_known or not count or len(rows) < 2 * count:
            return ()
        if (rows <= 0).any() or (rows[count:] != rows[:-count]).any():
            return ()
        return tuple(rows[:count].tolist())

    @property
    def in_step(self) -> bool:
        """Whether requests come and end together: prompts lie in one batch after the other, and
        rounds without any are all the same.
        """  # noqa: D205 (one sentence)
        prompts = self.with_prompts
        if not prompts.any():
            return bool(self.round)
        return 2 * int((prompts[1:] & prompts[:-1]).sum()) >= int(prompts.sum())

    @property
    def held_back(self) -> bool:
        """Whether the scheduler keeps more under way than the devices: the rest waits in hosts."""
        return self.turn_known and self.at_entry < (self.in_flight or 0)

    @property
    def turn_known(self) -> bool:
        """Whether labels tell when the scheduler sent batches out."""
        return bool((self.turn != UNSEEN).any())

    @property
    def seen(self) -> Flags:
        """Batches that every stage shows."""
        seen: Flags = (self.start != UNSEEN).all(axis=1)
        return seen

    @property
    def inside(self) -> Flags:
        """Batches seen whole, from their entry on, in the span."""
        within: Flags = self.seen & (self.start[:, 0] >= self.span[0])
        return within & (self.end[:, -1] <= self.span[1])

    def length(self) -> I64:
        """Return how long each pass took; -1 where it is not seen."""
        return np.where(self.start != UNSEEN, self.end - self.start, UNSEEN)

    def usual_ns(self) -> F64:
        """Return what each pass mostly takes: by its stage and phase, and by the batch's tokens."""
        length, usual = self.length(), np.zeros(self.start.shape)
        for phase in np.unique(self.phase).tolist():
            mine = self.phase == phase
            for stage in range(self.stages):
                seen = length[:, stage] >= 0
                known = (seen & mine & self.inside, seen & mine, seen)
                rows = next((rows for rows in known if rows.any()), seen)
                sized = bool((self.tokens[mine | rows] > 0).all())
                a_token = slope_of(self.tokens[rows], length[rows, stage]) if sized else 0.0
                at_none = float(np.median(length[rows, stage] - a_token * self.tokens[rows]))
                usual[mine, stage] = at_none + a_token * self.tokens[mine]
        return usual


def slope_of(tokens: I64, device_ns: I64) -> float:
    """Return what a token more takes, by least squares; nothing where no batch is twice another.

    Batches of one size differ by a few tokens, which tell nothing.
    """
    if not len(tokens) or tokens.max() < 2 * max(int(tokens.min()), 1):
        return 0.0
    apart = tokens - tokens.mean()
    square = float((apart * apart).sum())
    return max(float((apart * device_ns).sum()) / square, 0.0) if square else 0.0


def find_batches(
    timeline: Timeline, pipeline: PipelineFigures, traces: Sequence[RankTrace]
) -> Batches | None:
    """Follow each batch of a stream; None where passes are not forward ones, one stage a rank."""
    ranks, stream = timeline.ranks_of(pipeline.pipeline), pipeline.stream
    names = [rank.rank for rank in ranks]
    passes = timeline.passes.where(np.isin(timeline.passes.rank, names))
    alone = all(len(rank.stages) == 1 for rank in ranks)
    if stream is None or not alone or (passes.kind != PassKind.F).any() or pipeline.absent:
        return None
    keys, rows = np.unique(np.stack((passes.step, passes.microbatch)), axis=1, return_inverse=True)
    places = np.array([names.index(rank) for rank in passes.rank.tolist()])

    def table(column: I64) -> I64:
        filled = np.full((keys.shape[1], len(ranks)), UNSEEN, dtype=np.int64)
        filled[rows.reshape(-1), places] = column
        return filled

    start, end, issued = (table(c) for c in (passes.start_ns, passes.end_ns, passes.issued_ns))
    busy = table(passes.busy_ns)
    messages, size = _ways(timeline, names, start)
    by_rank = {trace.rank: trace for trace in traces}
    mine = [by_rank[name] for name in names] if all(name in by_rank for name in names) else []
    told, shaped = _read_labels(ranks, keys[1]), _tokens(mine, size)
    labelled = bool((told["phase"] != Phase.UNKNOWN).any())
    if not labelled:
        phase = _phases(size if shaped is None else shaped)
        told["phase"] = _as_their_like(phase, busy)
    decodes = told["phase"] == Phase.DECODE
    if not (told["tokens"] > 0).any():  # labels without tokens, or none: what decodes has one each
        told["tokens"] = np.where(decodes, told["rows"], UNSEEN) if shaped is None else shaped
    if not labelled:
        rows_known = (told["rows"] >= 0).any()
        told["rows"] = np.where(decodes, told["rows" if rows_known else "tokens"], UNSEEN)
    padded = _padded(told["tokens"], size) if shaped is None else shaped
    told["tokens"] = np.where(told["tokens"] > 0, told["tokens"], padded)
    return Batches(
        ranks=ranks,
        stream=stream,
        issued=issued,
        start=start,
        end=end,
        busy=busy,
        **messages,
        **told,
        padded=padded,
        labelled=labelled,
    )


def _ways(timeline: Timeline, names: list[int], start: I64) -> tuple[dict[str, I64], I64]:
    """Return the moments of each batch's message into and out of a stage; and its bytes.

    A message belongs to the first pass that begins once it is there; of several the last counts.
    """
    moments = ("send_issued", "sent", "posted", "received", "arrived")
    found = {name: np.full(start.shape, UNSEEN, dtype=np.int64) for name in moments}
    size = np.full(len(start), UNSEEN, dtype=np.int64)
    hops = rows_by_hop(timeline.transfers)
    for place in range(1, len(names)):
        rows = hops.get((names[place - 1], names[place]))
        known = np.flatnonzero(start[:, place] != UNSEEN)
        if rows is None or not len(known):
            continue
        messages = timeline.transfers.where(rows)
        row = np.searchsorted(start[known, place], messages.receive_end_ns)
        kept = row < len(known)
        batch = known[row[kept]]
        for name, at, column in (
            ("arrived", place, messages.receive_end_ns),
            ("received", place, messages.receive_start_ns),
            ("posted", place, messages.receive_issued_ns),
            ("sent", place - 1, messages.send_start_ns),
            ("send_issued", place - 1, messages.send_issued_ns),
        ):
            np.maximum.at(found[name][:, at], batch, column[kept])
        np.maximum.at(size, batch, messages.message_bytes[kept])
    return found, size


_TOLD = ("phase", "tokens", "prompts", "rows", "turn")


def _read_labels(ranks: Sequence[RankTimeline], numbers: I64) -> dict[str, I64]:
    """Return what labels tell of each batch, and when its turn came; of the first stage first."""
    told = {name: np.full(len(numbers), UNSEEN, dtype=np.int64) for name in _TOLD}
    told["phase"][:] = Phase.UNKNOWN
    for rank in reversed(ranks):
        if rank.turns is not None:
            _, row, turn = np.intersect1d(numbers, rank.turns.number, return_indices=True)
            for name in _TOLD[:-1]:
                told[name][row] = getattr(rank.turns, name)[turn]
            told["turn"][row] = rank.turns.begin_ns[turn] if rank is ranks[0] else UNSEEN
    return told


def _padded(tokens: I64, size: I64) -> I64:
    """Return the tokens that batches were computed with, by their messages.

    A token takes the same bytes in every message: the most that divide all sizes and leave none
    with fewer tokens than its label tells.
    """
    known = (size > 0) & (tokens > 0)
    if not known.any():
        return np.full(len(size), UNSEEN, dtype=np.int64)
    common = int(np.gcd.reduce(size[known]))
    most = int((size[known] // tokens[known]).min())
    share = next((n for n in range(1, _MOST_TOKENS) if not common % n and common // n <= most), 0)
    return np.where(size > 0, size * share // common, UNSEEN) if share else tokens


def _tokens(traces: Sequence[RankTrace], size: I64) -> I64 | None:
    """Return the tokens of each batch, by the shape of its activations: the last is their width.

    None where shapes do not tell.
    """
    for trace in traces:
        operators = trace.operators
        sends = (operators.operation == Operation.SEND) & (operators.shape >= 0)
        sends &= (operators.message_bytes > 0) & ((operators.peer >= 0) | (operators.kernel >= 0))
        for row in np.flatnonzero(sends).tolist():
            dimensions = trace.names[operators.shape[row]].split("x")
            if len(dimensions) > 1 and dimensions[-1].isdigit():
                width = operators.message_bytes[row] // max(operators.elements[row], 1)
                unit = int(dimensions[-1]) * int(width)
                if unit > 0:
                    return np.where(size > 0, size // unit, UNSEEN)
    return None


def _phases(size: I64) -> I64:
    """Tell decode from batches with prompts by size.

    Sizes fall apart where chunks of prompts run beside answers that go on by a token:

        8 8 8 8        519 519        a factor of 65 between them
    """
    known = size > 0
    phase = np.full(len(size), Phase.UNKNOWN, dtype=np.int64)
    if not known.any():
        return phase
    sizes = np.unique(size[known])
    factors = sizes[1:] / sizes[:-1]
    if len(factors) and factors.max() >= _APART:
        decodes = known & (size <= sizes[int(factors.argmax())])
    else:
        decodes = known & (sizes[-1] <= _MOST_DECODED)
    phase[known] = Phase.MIXED if decodes.any() else Phase.PREFILL
    phase[decodes] = Phase.DECODE
    return phase


def _as_their_like(phase: I64, busy: I64) -> I64:
    """Give batches whose message was cut off the phase of those that take about as long."""
    found = phase.copy()
    for batch in np.flatnonzero(phase == Phase.UNKNOWN).tolist():
        nearest: tuple[float, int] | None = None
        for place in np.flatnonzero(busy[batch] > 0).tolist():
            for known in np.unique(phase[phase != Phase.UNKNOWN]).tolist():
                like = busy[(phase == known) & (busy[:, place] > 0), place]
                if len(like):
                    off = abs(float(np.log(busy[batch, place] / np.median(like))))
                    nearest = min(nearest or (off, known), (off, known))
        found[batch] = nearest[1] if nearest else Phase.UNKNOWN
    return found


def phase_word(phase: int) -> str:
    """Return a phase as it is written."""
    return Phase(phase).name.lower()
