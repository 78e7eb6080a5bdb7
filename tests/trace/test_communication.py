"""Which kernel communicates, by all the names it has had."""

from __future__ import annotations

import pytest

from debubble.trace.columns import KernelKind, Operation
from debubble.trace.communication import classify_kernel_name, classify_operation, element_bytes


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", KernelKind.COMMUNICATION),
        (
            "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long)",
            KernelKind.COMMUNICATION,
        ),
        (
            "ncclDevKernel_SendRecv(ncclDevComm*, unsigned long, ncclWork*)",
            KernelKind.COMMUNICATION,
        ),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", KernelKind.COMMUNICATION),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", KernelKind.COMMUNICATION),
        (
            "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long)",
            KernelKind.COLLECTIVE,
        ),
        (
            "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            KernelKind.COLLECTIVE,
        ),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", KernelKind.COLLECTIVE),
        ("void deep_ep::intranode::dispatch<8>(int4*)", KernelKind.COLLECTIVE),
        ("void dpsk::ep::internode::combine<8>(int4*)", KernelKind.COLLECTIVE),
        ("nvshmemi_transfer_rma_kernel", KernelKind.COLLECTIVE),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(x)", KernelKind.COLLECTIVE),
        (
            "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot(x)",
            KernelKind.COLLECTIVE,
        ),
        (
            "void (anonymous namespace)::all_reduce_one_shot_push_kernel<__nv_bfloat16>",
            KernelKind.COLLECTIVE,
        ),
        ("Memcpy PtoP (Device -> Device)", KernelKind.COMMUNICATION),
        ("Memcpy DtoD (Device -> Device)", KernelKind.COPY),
        ("Memcpy HtoD (Pinned -> Device)", KernelKind.COPY),
        ("Memset (Device)", KernelKind.MEMSET),
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN", KernelKind.COMPUTE),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(x)",
            KernelKind.COMPUTE,
        ),
        ("void cutlass::device_kernel<deepep_free_gemm>(x)", KernelKind.COMPUTE),
        ("", KernelKind.COMPUTE),
    ],
)
def test_kernel_names(name, kind):
    assert classify_kernel_name(name) is kind


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("c10d::send", Operation.SEND),
        ("c10d::recv_", Operation.RECEIVE),
        ("nccl:send 0->1", Operation.SEND),
        ("nccl:recv 1<-0", Operation.RECEIVE),
        ("gloo:recv", Operation.RECEIVE),
        ("recv", Operation.RECEIVE),
        ("wait", Operation.WAIT),
        ("c10d::allreduce_", Operation.COLLECTIVE),
        ("all_to_all", Operation.COLLECTIVE),
        ("c10d::alltoall_base_", Operation.COLLECTIVE),
        ("gloo:barrier", Operation.BARRIER),
        ("c10d::barrier", Operation.BARRIER),
        ("nccl:coalesced", Operation.OTHER),
        ("record_param_comms", Operation.OTHER),
    ],
)
def test_operator_names(name, operation):
    assert classify_operation(name) is operation


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("BFloat16", 2),
        ("c10::BFloat16", 2),
        ("float", 4),
        ("Float8_e4m3fn", 1),
        ("long int", 8),
        ("Byte", 1),
    ],
)
def test_element_sizes(dtype, size):
    assert element_bytes(dtype) == size


def test_unknown_types_have_no_size():
    assert element_bytes("TensorList") is None
