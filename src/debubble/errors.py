"""Every error raised on purpose, and the gaps that are reported instead of raised.

DebubbleError            anything debubble says no to; printed as `error:` and `hint:`, exit code 2
├── UsageError           the words on the command line do not fit together
│   └── CannotBeTold     a framework has no words for a change
├── MissingExtra         an optional dependency is not installed
├── RunNotFound          no traces where the user pointed, or no such capture
├── TraceError           one file cannot be read
│   ├── NotATrace        it is readable, but it is something else
│   └── TraceTooLarge    it inflates beyond the limits
├── EngineError          the workers that should read cannot be had
├── LogError             the log of a link test cannot be read
├── NoPipeline           traces without a pipeline in them
├── NoSplitFits          the layers do not fit the stages' memory, however they are split
├── LinkTestError        the hops could not be measured
├── CaptureError         a job or a server could not be captured
├── StoreError           the history cannot be read or written
│   └── StoreAway        not now: it is locked, full or not there
├── TuneError            a command cannot be tuned
│   └── MachineBusy      something else on this machine disturbed all that was measured
├── WatchError           the service cannot start
├── GateError            the answer does not tell what it was to be judged by
├── DemoError            the demo's own pipeline failed
├── MachineError         the machine says no: a file cannot be read or written
├── Interrupted          the user ended it
└── Unforeseen           a fault of debubble's own
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

# `//user:password@`, up to the last @: who forgets to write one in a password as %40 still has it.
# Digits alone up to a slash are a port.
_PASSWORD = re.compile(r"""(//[^:/@?#\s"']*):(?![0-9]*(?:[/?#\s"']|$))[^\s"'<>]*@""")
# A name alone is a token where browsers would send it.
_TOKEN = re.compile(r"""(?i)(https?://)[^:/@?#\s"']+@""")
# What follows it in a sentence is not part of its value.
_PARAMETER = re.compile(
    r"""(?ix) ([?&;][^=&?\s"']*(?:pass|secret|token|key|sig|credential|auth)[^=&\s"']*=)
    [^&\#\s"'<>]*? (?=[,:;.)\]]*(?:[&\#\s"'<>]|$))"""
)


def mask_secrets(text: str) -> str:
    """Return a text as it may be shown: URLs in it without passwords, tokens and signatures."""
    if "//" not in text:
        return text
    return _PARAMETER.sub(r"\1***", _TOKEN.sub(r"\1***@", _PASSWORD.sub(r"\1:***@", text)))


class DebubbleError(Exception):
    """Says what is wrong, in which file and rank, and what to do about it."""

    def __init__(
        self, message: str, *, hint: str = "", file: str = "", rank: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.file = file
        self.rank = rank

    def __str__(self) -> str:
        return mask_secrets(f"{place(self.file, self.rank)}{self.message}")

    @property
    def with_cure(self) -> str:
        """What is wrong and what to do about it, where both stand in one line."""
        return f"{self.message}; {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        """Survive the way back from a worker process."""
        return _rebuild, (type(self), self.message, self.hint, self.file, self.rank)


def _rebuild(
    kind: type[DebubbleError], message: str, hint: str, file: str, rank: int | None
) -> DebubbleError:
    return kind(message, hint=hint, file=file, rank=rank)


class UsageError(DebubbleError):
    """The words on the command line do not fit together."""


class CannotBeTold(UsageError):
    """A framework has no words for a change."""


class MissingExtra(DebubbleError):
    """An optional dependency is not installed."""


class RunNotFound(DebubbleError):
    """No traces where the user pointed, or no capture of that name."""


class TraceError(DebubbleError):
    """One file cannot be read; the files beside it can."""


class NotATrace(TraceError):
    """The file is readable, but it is something else than a trace."""


class TraceTooLarge(TraceError):
    """The file inflates beyond the limits that guard against gzip bombs."""


class EngineError(DebubbleError):
    """The workers that should read the files cannot be reached, or cannot do the work."""


class LogError(DebubbleError):
    """The log of a link test is damaged, cut off, or something else."""


class NoPipeline(DebubbleError):
    """The traces can be read, but no pipeline is in them."""


class NoFit(DebubbleError):
    """A model that misses the run as it is prices nothing."""


class NoSplitFits(DebubbleError):
    """The layers do not fit the stages' memory, however they are split."""


class LinkTestError(DebubbleError):
    """The hops could not be measured."""


class CaptureError(DebubbleError):
    """A job or a server could not be captured."""


class StoreError(DebubbleError):
    """The history cannot be read or written."""


class StoreAway(StoreError):
    """It cannot be reached or written now; later it may be."""


class TuneError(DebubbleError):
    """A command cannot be tuned: its first run told nothing, or its record is another's."""


class MachineBusy(TuneError):
    """Something else on this machine disturbed all that was measured: it tells nothing."""


class WatchError(DebubbleError):
    """The service cannot start: its configuration, its address or its lock says no."""


class GateError(DebubbleError):
    """An answer was given, and the gate that was asked for cannot be judged by it."""


class DemoError(DebubbleError):
    """The demo's own pipeline did not run."""


class MachineError(DebubbleError):
    """The machine says no: no room, no right, no such file."""


class Interrupted(DebubbleError):
    """The user ended it before there was an answer."""


class Unforeseen(DebubbleError):
    """A fault of debubble's own."""


class Code(StrEnum):
    """What can be missing or broken. docs/reference/warnings.md explains each."""

    B_IS_INPUT_GRADIENT = "b_is_input_gradient"
    BAD_TEXT = "bad_text"
    BAD_TIMES = "bad_times"
    BUSY_MACHINE = "busy_machine"
    CLOCK_OFF = "clock_off"
    CLOSED_GRAPHS = "closed_graphs"
    COLD_STEPS = "cold_steps"
    COPY_ENGINE = "copy_engine"
    CUT_STEPS = "cut_steps"
    DAMAGED_RECORD = "damaged_record"
    DIGEST_DIFFERS = "digest_differs"
    DIGEST_NOT_WRITTEN = "digest_not_written"
    DUPLICATE_RANK = "duplicate_rank"
    FOREIGN_DEVICE = "foreign_device"
    GAPS_COUNT_AS_BUSY = "gaps_count_as_busy"
    GAPS_FROM_CAPTURE = "gaps_from_capture"
    HOST_TIMES = "host_times"
    HOSTS_SLOWED = "hosts_slowed"
    IMPOSSIBLE = "impossible"
    LAYERS_DIFFER = "layers_differ"
    LINK_ERRORS = "link_errors"
    LINKS_INACTIVE = "links_inactive"
    LOG_CUT = "log_cut"
    LOST_OPERATORS = "lost_operators"
    MALFORMED = "malformed"
    MISSING_RANKS = "missing_ranks"
    MISSING_REPLICAS = "missing_replicas"
    MIXED_RUNS = "mixed_runs"
    NEWER_INCOMPLETE = "newer_incomplete"
    NO_CLOCK = "no_clock"
    NO_COMMON_SPAN = "no_common_span"
    NO_KERNELS = "no_kernels"
    NO_PIPELINE = "no_pipeline"
    NO_RANK = "no_rank"
    NO_STEPS = "no_steps"
    NOT_UNDERSTOOD = "not_understood"
    ORDER_CYCLE = "order_cycle"
    OPEN_RANGES = "open_ranges"
    RANK_ASSUMED = "rank_assumed"
    REPLAY_MISSES = "replay_misses"
    RING_NAMES_NO_HOP = "ring_names_no_hop"
    SCHEDULE_DIFFERS = "schedule_differs"
    SCHEDULE_UNCHECKED = "schedule_unchecked"
    SEVERAL_RUNS = "several_runs"
    SIDECAR_DIFFERS = "sidecar_differs"
    STAGES_ASSUMED = "stages_assumed"
    STAGES_SHARED = "stages_shared"
    STAGES_UNKNOWN = "stages_unknown"
    STEPS_INFERRED = "steps_inferred"
    TRUNCATED = "truncated"
    UNEVEN_STEPS = "uneven_steps"
    UNIT_ASSUMED = "unit_assumed"
    UNKNOWN_GROUP = "unknown_group"
    UNLINKED_MESSAGES = "unlinked_messages"
    UNMATCHED_TRANSFERS = "unmatched_transfers"
    UNREADABLE = "unreadable"
    WRONG_FIELDS = "wrong_fields"
    WRONG_MEMORY = "wrong_memory"
    WRONG_VALUES = "wrong_values"


class Touch(StrEnum):
    """What a doubt may have made wrong. A gate closes only on doubts that touch what it judges."""

    TIMES = "times"
    MESSAGES = "messages"
    MEMORY = "memory"
    LAYERS = "layers"


_EVERYTHING = frozenset(Touch)
_RUN = frozenset({Touch.TIMES, Touch.MESSAGES})
# Codes that are not here say what an answer lacks: what it does say holds.
TOUCHES: dict[Code, frozenset[Touch]] = {
    Code.BAD_TIMES: _RUN,
    Code.CLOCK_OFF: _RUN,
    Code.DUPLICATE_RANK: _EVERYTHING,
    Code.IMPOSSIBLE: _RUN,
    Code.LOST_OPERATORS: frozenset({Touch.TIMES, Touch.LAYERS}),
    Code.MALFORMED: _EVERYTHING,
    Code.MIXED_RUNS: _EVERYTHING,
    Code.NO_KERNELS: _RUN,
    Code.NO_RANK: _EVERYTHING,
    Code.TRUNCATED: _EVERYTHING,
    Code.UNMATCHED_TRANSFERS: frozenset({Touch.MESSAGES}),
    Code.UNREADABLE: _EVERYTHING,
    Code.WRONG_FIELDS: _EVERYTHING,
    Code.WRONG_MEMORY: frozenset({Touch.MEMORY}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Something missing or broken that the answer had to do without: a warning in every output."""

    code: Code
    message: str
    hint: str = ""
    file: str = ""
    rank: int | None = None
    moves_ns: int | None = None
    """The most that a window, or what a rank is busy of it, could be off by; None: unknown."""
    only: frozenset[Touch] | None = None
    """What it touches, where that is less than others of its code do."""

    def __str__(self) -> str:
        return mask_secrets(f"{place(self.file, self.rank)}{self.message}")

    @property
    def touches(self) -> frozenset[Touch]:
        """What it may have made wrong."""
        return TOUCHES.get(self.code, frozenset()) if self.only is None else self.only


def as_gap(error: DebubbleError, *, code: Code) -> Gap:
    """Turn the error of one file into a gap of the whole answer."""
    return Gap(code=code, message=error.message, hint=error.hint, file=error.file, rank=error.rank)


def place(file: str, rank: int | None) -> str:
    """Return where something is the matter, such as "rank 3, a/b.json: ", as far as known."""
    parts = [] if rank is None else [f"rank {rank}"]
    if file:
        parts.append(file)
    return ", ".join(parts) + ": " if parts else ""
