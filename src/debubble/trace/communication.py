"""Kernels, launches and operators in → which kernel communicates, and which belong together.

A kernel's name tells that it communicates, and for collectives usually which one. It never tells a
pipeline's send from an all-to-all: both are `SendRecv` kernels. That is decided by the operator on
the host that launched it, which the joins of this file find. At its end stands what messages cannot
be: of a group that the rank is not of, without their kernel, kernels without their operator.
"""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from debubble.trace.columns import I32, I64, UNKNOWN, KernelKind, Operation

# NCCL before 2.19, since 2.19, and RCCL, which names every kernel `ncclDevKernel_Generic`.
_NCCL = re.compile(r"^(?:void )?(?:rccl|nccl)(?:Dev)?Kernels?(?:_|Generic|\b)", re.IGNORECASE)
_NCCL_COLLECTIVE = re.compile(
    r"ncclDevKernel_(?!SendRecv|Generic)[A-Z]\w*|ncclKernel_(?!SendRecv|Generic)[A-Z]\w*",
)
# Other libraries that move data between devices inside a kernel.
_OTHER_LIBRARIES = re.compile(
    r"nvshmem|deep_ep::|\bep::(?:intranode|internode|internode_ll)\b|mscclpp|\bmsccl|rocshmem",
    re.IGNORECASE,
)
# All-reduces that serving engines and torch's symmetric memory write themselves.
_OWN_COLLECTIVES = re.compile(
    r"cross_device_reduce|all_?reduce_(?:fusion_kernel|one_shot|two_shot)"
    r"|(?:one|two)_shot_all_?reduce|multimem_all_(?:reduce|gather)|custom_all_?reduce"
    r"|quick_?reduce::|trtllm_allreduce|userbuffers_fp16_sum|lamport_(?:all_?reduce|style)",
    re.IGNORECASE,
)
# oneCCL of Intel's devices; HCCL of Ascend's, whose names tell what they do.
_ONECCL = re.compile(r"oneccl|oneapi::ccl|\bccl::", re.IGNORECASE)
_HCCL = re.compile(r"hcom_(batchsendrecv|send|receive)?", re.IGNORECASE)
_PEER_COPY = re.compile(r"Memcpy (?:PtoP|P2P|Peer)", re.IGNORECASE)

# CUDA's and HIP's names, and those of Intel's runtime and driver (`urEnqueueUSMFill`, `zeEvent…`).
_QUEUES_OR_WAITS = re.compile(
    r"Launch|Memcpy|Memset|Graph|Synchronize|USMFill|AppendMemory|QueueFinish|urEventWait"
)
# Libraries that send by kernels of the device, as torch names them.
SENDS_BY_KERNELS = frozenset({"nccl", "cuda:nccl", "rccl"})
_SENDS = frozenset({"send", "isend"})
_RECEIVES = frozenset({"recv", "recv_", "irecv", "recv_any_source", "recv_any_source_"})
_NO_OPERATION = frozenset({"coalesced", "group", "init", "destroy", "end_coalescing"})

# Bytes of one element, as torch spells its types in traces: `BFloat16`, `c10::BFloat16`, `float`.
_ELEMENT_BYTES = {
    "double": 8, "float": 4, "half": 2, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8,
    "long": 8, "long int": 8, "int64": 8, "int": 4, "int32": 4, "short": 2, "int16": 2,
    "char": 1, "signed char": 1, "byte": 1, "unsigned char": 1, "int8": 1, "uint8": 1, "bool": 1,
    "uint16": 2, "uint32": 4, "uint64": 8, "complexfloat": 8, "complexdouble": 16,
    "complex<float>": 8, "complex<double>": 16, "complex64": 8, "complex128": 16,
}  # fmt: skip


@lru_cache(maxsize=4096)
def classify_kernel_name(name: str) -> KernelKind:
    """Say what a device event's name alone can tell.

    COMMUNICATION means that it communicates but the name does not say whether collectively.
    """
    if _NCCL.match(name):
        return KernelKind.COLLECTIVE if _NCCL_COLLECTIVE.match(name) else KernelKind.COMMUNICATION
    if _PEER_COPY.match(name) or _ONECCL.search(name):
        return KernelKind.COMMUNICATION
    if hccl := _HCCL.match(name):
        return KernelKind.PEER if hccl[1] else KernelKind.COLLECTIVE
    if name.startswith(("Memcpy", "Memset")):
        return KernelKind.COPY if name.startswith("Memcpy") else KernelKind.MEMSET
    if _OTHER_LIBRARIES.search(name) or _OWN_COLLECTIVES.search(name):
        return KernelKind.COLLECTIVE
    return KernelKind.COMPUTE


@lru_cache(maxsize=4096)
def classify_operation(name: str) -> Operation:
    """Say what an operator does: `c10d::send`, `nccl:recv 1<-0`, `allreduce`, `gloo:barrier`."""
    word = name.rsplit(":", maxsplit=1)[-1].strip().split(" ", maxsplit=1)[0].lower()
    if word in _SENDS:
        return Operation.SEND
    if word in _RECEIVES:
        return Operation.RECEIVE
    if word == "wait":
        return Operation.WAIT
    if word in {"barrier", "monitored_barrier_", "monitored_barrier"}:
        return Operation.BARRIER
    if word in _NO_OPERATION or not word or name == "record_param_comms":
        return Operation.OTHER
    return Operation.COLLECTIVE


@lru_cache(maxsize=4096)
def queues_or_waits(name: str) -> bool:
    """Tell whether a call of a runtime or driver queues device work or waits for it."""
    return _QUEUES_OR_WAITS.search(name) is not None


@lru_cache(maxsize=256)
def element_bytes(dtype: str) -> int | None:
    """Return the size of one element; None for a type we do not know."""
    spelled = dtype.removeprefix("c10::").removeprefix("torch.").lower()
    if spelled.startswith(("float8", "float4")):
        return 1
    return _ELEMENT_BYTES.get(spelled)


def join_launches(kernel_correlation: I64, launch_correlation: I64) -> I32:
    """Return each kernel's row in the launches, by correlation; -1 where there is none."""
    if not len(launch_correlation):
        return np.full(len(kernel_correlation), UNKNOWN, dtype=np.int32)
    order = np.argsort(launch_correlation, kind="stable")
    found = np.searchsorted(launch_correlation, kernel_correlation, sorter=order)
    row = order[np.minimum(found, len(order) - 1)]
    matches = (launch_correlation[row] == kernel_correlation) & (kernel_correlation >= 0)
    return np.where(matches, row, UNKNOWN).astype(np.int32)


def find_enclosing(
    moment_ns: I64,
    thread: NDArray[np.signedinteger],
    start_ns: I64,
    end_ns: I64,
    range_thread: NDArray[np.signedinteger],
) -> NDArray[np.intp]:
    """Return the range of the same thread that holds each moment; -1 where none does.

    Of ranges that overlap, the one that started last is meant.
    """
    found = _last_before(moment_ns, thread, start_ns, range_thread)
    inside = found >= 0
    inside[inside] = moment_ns[inside] <= end_ns[found[inside]]
    return np.where(inside, found, UNKNOWN)


def find_next(
    moment_ns: I64,
    thread: NDArray[np.signedinteger],
    start_ns: I64,
    range_thread: NDArray[np.signedinteger],
) -> NDArray[np.intp]:
    """Return the first range of the same thread that starts at or after each moment, or -1."""
    found = _last_before(-moment_ns, thread, -start_ns[::-1], range_thread[::-1])
    return np.where(found < 0, UNKNOWN, len(start_ns) - 1 - found)


def _last_before(
    moment_ns: I64,
    thread: NDArray[np.signedinteger],
    start_ns: I64,
    range_thread: NDArray[np.signedinteger],
) -> NDArray[np.intp]:
    """Return the range of the same thread that starts last before, or at, each moment, or -1.

    One sort of moments and ranges together: a loop over threads would take minutes where a broken
    trace has a hundred thousand of them.
    """
    ranges = len(start_ns)
    found = np.full(len(moment_ns), UNKNOWN, dtype=np.intp)
    is_moment = np.arange(ranges + len(moment_ns)) >= ranges
    threads = np.concatenate((range_thread, thread))
    order = np.lexsort((is_moment, np.concatenate((start_ns, moment_ns)), threads))
    position = np.arange(len(order))
    nearest = np.maximum.accumulate(np.where(is_moment[order], UNKNOWN, position))
    asked = is_moment[order] & (nearest >= 0)
    neighbour, moment = order[nearest[asked]], order[asked]
    same = (threads[neighbour] == threads[moment]) & (threads[moment] != UNKNOWN)
    found[moment[same] - ranges] = neighbour[same]
    return found
