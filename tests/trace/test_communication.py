"""Which kernel communicates, by all the names it has had."""

from __future__ import annotations

import pytest

from debubble.trace.columns import KernelKind, Operation
from debubble.trace.communication import classify_kernel_name, classify_operation

KERNELS = {
    KernelKind.COMMUNICATION: """
        ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)
        ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long)
        ncclDevKernel_SendRecv(ncclDevComm*, unsigned long, ncclWork*)
        ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)
        ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)
        Memcpy PtoP (Device -> Device)""",
    KernelKind.COLLECTIVE: """
        ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long)
        ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)
        ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)
        void deep_ep::intranode::dispatch<8>(int4*)
        void dpsk::ep::internode::combine<8>(int4*)
        nvshmemi_transfer_rma_kernel
        void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(x)
        void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot(x)
        void (anonymous namespace)::all_reduce_one_shot_push_kernel<__nv_bfloat16>""",
    KernelKind.COPY: """
        Memcpy DtoD (Device -> Device)
        Memcpy HtoD (Pinned -> Device)""",
    KernelKind.MEMSET: "Memset (Device)",
    KernelKind.COMPUTE: """
        nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN
        void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(x)
        void cutlass::device_kernel<deepep_free_gemm>(x)""",
}
OPERATORS = {
    Operation.SEND: ["c10d::send", "nccl:send 0->1"],
    Operation.RECEIVE: ["c10d::recv_", "nccl:recv 1<-0", "gloo:recv", "recv"],
    Operation.WAIT: ["wait"],
    Operation.COLLECTIVE: ["c10d::allreduce_", "all_to_all", "c10d::alltoall_base_"],
    Operation.BARRIER: ["gloo:barrier", "c10d::barrier"],
    Operation.OTHER: ["nccl:coalesced", "record_param_comms"],
}


@pytest.mark.parametrize("kind", KERNELS)
def test_kernel_names(kind):
    names = [name.strip() for name in KERNELS[kind].strip().splitlines()]
    assert {name: classify_kernel_name(name) for name in names} == dict.fromkeys(names, kind)


@pytest.mark.parametrize("operation", OPERATORS)
def test_operator_names(operation):
    names = OPERATORS[operation]
    assert {name: classify_operation(name) for name in names} == dict.fromkeys(names, operation)
