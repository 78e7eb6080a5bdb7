"""Which kernel is communication, and which communication operator does what.

A kernel's name tells that it communicates, and for collectives usually which one. It never tells a
pipeline's send from an all-to-all: both are `SendRecv` kernels. That is decided by the operator on
the host that launched it (`trace/joins.py`).
"""

from __future__ import annotations

import re
from functools import lru_cache

from debubble.trace.columns import KernelKind, Operation

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
_PEER_COPY = re.compile(r"Memcpy (?:PtoP|P2P|Peer)", re.IGNORECASE)

_SENDS = frozenset({"send", "isend"})
_RECEIVES = frozenset({"recv", "recv_", "irecv", "recv_any_source", "recv_any_source_"})
_NO_OPERATION = frozenset({"coalesced", "group", "init", "destroy", "end_coalescing"})


@lru_cache(maxsize=4096)
def classify_kernel_name(name: str) -> KernelKind:
    """Say what a device event's name alone can tell.

    COMMUNICATION means that it communicates but the name does not say whether collectively.
    """
    if _NCCL.match(name):
        return KernelKind.COLLECTIVE if _NCCL_COLLECTIVE.match(name) else KernelKind.COMMUNICATION
    if _PEER_COPY.match(name):
        return KernelKind.COMMUNICATION
    if name.startswith("Memcpy"):
        return KernelKind.COPY
    if name.startswith("Memset"):
        return KernelKind.MEMSET
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


# Bytes of one element, as torch spells its types in traces: `BFloat16`, `c10::BFloat16`, `float`.
_ELEMENT_BYTES = {
    "double": 8, "float": 4, "half": 2, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8,
    "long": 8, "long int": 8, "int64": 8, "int": 4, "int32": 4, "short": 2, "int16": 2,
    "char": 1, "signed char": 1, "byte": 1, "unsigned char": 1, "int8": 1, "uint8": 1, "bool": 1,
    "uint16": 2, "uint32": 4, "uint64": 8, "complexfloat": 8, "complexdouble": 16,
    "complex<float>": 8, "complex<double>": 16, "complex64": 8, "complex128": 16,
}  # fmt: skip


@lru_cache(maxsize=256)
def element_bytes(dtype: str) -> int | None:
    """Return the size of one element; None for a type we do not know."""
    spelled = dtype.removeprefix("c10::").removeprefix("torch.").lower()
    if spelled.startswith(("float8", "float4")):
        return 1
    return _ELEMENT_BYTES.get(spelled)
