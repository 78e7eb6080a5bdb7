"""Memory and layers of the recorded runs, against what is known of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.traces.read_once import build_recording
from support.traces.recordings import recorded_run

from debubble.timeline.layers import (
    PassKernels,
    StagePasses,
    count_layers,
    recomputed_share,
    weight_share,
)
from debubble.timeline.model import PassKind

MIB = 1024**2
# One block of width 4096 keeps, of 1024 tokens in bf16: input, norm's output, 4x wide twice.
MESSAGE_BYTES = 1024 * 4096 * 2
BLOCK_BYTES = MESSAGE_BYTES * (1 + 1 + 4 + 4)


def timeline_of(name):
    folder = recorded_run(name)
    return build_recording(folder), folder


def layers_of(forwards, backwards=None):
    """Count the layers of stages whose passes launch these kernels, each for 900 ns."""
    numbers = {}

    def launched(names):
        start = np.arange(len(names), dtype=np.int64) * 1_000
        rows = [numbers.setdefault(name, len(numbers)) for name in names]
        return PassKernels(name=np.array(rows, dtype=np.int32), start_ns=start, end_ns=start + 900)

    stages = [
        StagePasses(
            stage=stage,
            forward=launched(names),
            backward=launched(backwards[stage]) if backwards else None,
        )
        for stage, names in enumerate(forwards)
    ]
    layers = count_layers(stages, tuple(numbers))
    return layers, recomputed_share(stages, layers)


def counted(forwards):
    return [held.layers for held in layers_of(forwards)[0].values()]


# A part of it repeats inside the layer, and nothing in it looks like attention.
LAYER = ["norm", "nvjet_qkv", "scan", "nvjet_out", "norm", "nvjet_up", "act", "nvjet_down"]
EMBEDDING, HEAD = ["gather", "add_position"], ["norm", "nvjet_head", "log_softmax", "nll"]


@given(counts=st.lists(st.integers(1, 5), min_size=3, max_size=6))
def test_layers_are_counted_beside_an_embedding_and_a_head(counts):
    forwards = [LAYER * count for count in counts]
    forwards[0] = EMBEDDING + forwards[0]
    forwards[-1] = forwards[-1] + HEAD
    layers, _ = layers_of(forwards)
    held = [layers[stage].layers for stage in sorted(layers)]
    # Nothing tells one layer from several that always come together.
    assert [count * held[1] for count in counts] == [count * counts[1] for count in held]
    assert layers[0].before_ns == 900 * len(EMBEDDING)
    assert layers[len(counts) - 1].after_ns == 900 * len(HEAD)


MIXERS = {
    "fused": ["flash_fwd_kernel"],
    "sliding": ["flash_fwd_kernel<local>"],
    "softmax": ["nvjet_scores", "masked_softmax", "nvjet_values"],
    "ring": ["flash_fwd_kernel", "copy", "flash_fwd_kernel", "logaddexp", "add"],
    "split": ["reshape_and_cache_flash_kernel", "flash_fwd_splitkv", "flash_fwd_combine"],
    "states": ["causal_conv1d", "selective_scan_fwd"],
}
KINDS = {
    "dense": ["nvjet_up", "silu", "nvjet_down"],
    "experts": ["nvjet_router", "router_softmax", "gatherTopK", "sort", "nvjet_expert", "add"],
}


@given(data=st.data())
def test_layers_of_several_kinds_are_counted_apart_whatever_devices_are_given(data):
    """Any mix of layers in any split; other products on each device; kernels that are missing."""
    fused = data.draw(st.booleans())
    mixers = [name for name in MIXERS if (name != "softmax") == fused]
    layer = st.tuples(st.sampled_from(mixers), st.sampled_from(list(KINDS)))
    split = data.draw(st.lists(st.lists(layer, min_size=1, max_size=5), min_size=2, max_size=5))
    lost = data.draw(st.sets(st.sampled_from(["norm", "silu", "sort", "add", "copy"]), max_size=3))
    forwards = []
    for stage, layers in enumerate(split):
        kernels = [] if stage else ["flash_prepare_kernel", *EMBEDDING]
        for mixer, kind in layers:
            kernels += ["norm", "nvjet_qkv", *MIXERS[mixer], "nvjet_out", "norm"]
            kernels += [*KINDS[kind], "residual"]
        kernels += HEAD if stage == len(split) - 1 else []
        forwards.append(
            [
                f"{name}_{stage}x64" if name.startswith("nvjet") else name
                for name in kernels
                if name not in lost
            ]
        )
    layers, _ = layers_of(forwards)
    assert [layers[stage].layers for stage in range(len(split))] == list(map(len, split))
    kinds = {kind for held in split for _, kind in held}
    for stage, held in enumerate(split):
        told = [part.name for part in layers[stage].kinds for _ in range(part.layers)]
        assert told == ([kind for _, kind in held] if len(kinds) > 1 else [])


def test_a_stage_may_hold_a_head_and_no_layer():
    assert counted([EMBEDDING + LAYER, LAYER * 2, LAYER, HEAD]) == [1, 2, 1, 0]


def test_nothing_is_counted_where_stages_contradict_each_other():
    assert counted([LAYER * 2, ["x", "y", "z"] * 4, LAYER * 2]) == []
    assert counted([[f"a{n}" for n in range(30)], [f"b{n}" for n in range(30)]]) == []
    assert counted([]) == []


def test_what_layers_take_backward_is_told_where_as_many_are_found_there():
    backward = ["act_grad", "nvjet_grad", "act_grad", "norm_grad"]
    forwards = [EMBEDDING + LAYER, LAYER * 2, LAYER + HEAD]
    backwards = [[*backward, "scatter"], backward * 2, ["nll_grad", "head_grad", *backward]]
    layers, _ = layers_of(forwards, backwards)
    assert [layers[stage].backward_layer_ns for stage in range(3)] == [900 * 4] * 3
    assert [layers[stage].backward_rest_ns for stage in range(3)] == [900, 0, 1800]


def test_recomputing_shows_as_forward_kernels_in_backward_passes():
    forwards, grads = [LAYER, LAYER * 2, LAYER], ["act_grad", "norm_grad"]
    again = [*LAYER, *grads]
    assert layers_of(forwards, [again, again * 2, again])[1]
    assert not layers_of(forwards, [grads, grads * 2, grads])[1]


@pytest.mark.parametrize("name", ["1f1b_p2_m4", "1f1b_m8", "1f1b_m8_split3337", "gpipe_m8"])
def test_a_microbatch_in_flight_costs_what_its_activations_weigh(name):
    timeline, folder = timeline_of(name)
    for rank in timeline.ranks:
        truth = json.loads((folder / f"truth{rank.rank}.json").read_text())
        layers = rank.layers[0].layers
        # The last stage has an output and its gradient as well.
        ends = 2 * MESSAGE_BYTES * (rank.rank == timeline.ranks[-1].rank)
        weight = layers * BLOCK_BYTES + ends
        assert rank.memory.per_microbatch_bytes == pytest.approx(weight, rel=0.02)
        # Parameters and their gradients, both in bf16; the batch, receive buffers, work spaces.
        beyond = rank.memory.static_bytes - 2 * truth["param_bytes"]
        assert 0 < beyond < 512 * MIB
        assert rank.memory.transient_bytes < 200 * MIB
        assert rank.memory.limit_bytes == 150_109_880_320


ADD = "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>"
GELU, NORM = "GeluBackwardCUDAKernelImpl", "layer_norm_grad_input_kernel_vectorized"


def share_of(*kernels):
    return weight_share([name for name, _ in kernels], np.array([took for _, took in kernels]))


@pytest.mark.parametrize(
    ("weight", "inward"),
    [
        (
            "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN",
            "nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_NNT",
        ),
        (
            "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_nt",
            "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_nn",
        ),
        (
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_nt_n_tilesize128x128x64_warpgroupsize1x1x1",
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_nn_n_tilesize128x128x64_warpgroupsize1x1x1",
        ),
        (
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_nt>(P)",
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_32x6_nn>(P)",
        ),
        ("Cijk_Ailk_Bjlk_BBS_BH_MT128x128x64", "Cijk_Ailk_Bljk_BBS_BH_MT256x128x64"),
    ],
)
def test_products_tell_gradients_of_weights_by_what_is_transposed(weight, inward):
    layer = [(GELU, 10), ("Memset (Device)", 1), (weight, 40), (inward, 40), (ADD, 9)]
    assert share_of(*layer, *layer) == pytest.approx(0.49)
    # Either gradient may come first; what adds up activations, behind another kernel, is no weight.
    assert share_of((inward, 40), (weight, 40), (ADD, 10), (NORM, 5), (ADD, 5)) == 0.5
    # Frozen layers make no gradients of weights.
    assert share_of((GELU, 10), (inward, 40), (ADD, 10)) == 0.0


def test_no_share_of_weights_is_told_without_products_or_where_it_is_no_share():
    assert share_of((GELU, 10), ("triton_poi_fused_add_3", 90)) is None
    # Products of 8-bit numbers all look as if they were run forward.
    eight_bits = ("nvjet_sm90_qqtst_128x256_128x4_2x1_v_bz_TNN", 45)
    head = [("nvjet_sm90_tst_128x256_64x4_NTN", 5), ("nvjet_sm90_tst_320x128_64x3_NNT", 5)]
    assert share_of((GELU, 10), eight_bits, eight_bits) is None
    assert share_of((GELU, 10), eight_bits, eight_bits, *head) is None
    assert share_of((GELU, 10), ("nvjet_sm90_tst_128x256_64x4_NTN", 90)) is None
    assert weight_share([], np.zeros(0, dtype=np.int64)) is None


def test_the_share_of_weights_in_a_recorded_run_is_that_of_the_same_layers_run_apart():
    """1F1B and ZBV of one model; W has sums besides that B has not, some 3 % of it."""
    whole, _ = timeline_of("1f1b_m8")
    apart, _ = timeline_of("zbv_m8")
    told = np.mean([share for rank in whole.ranks for share in rank.weight_shares.values()])
    passes = apart.passes
    later = (passes.stage > 0) & (passes.microbatch > 0)
    took = [
        passes.busy_ns[later & (passes.kind == kind)].sum() for kind in (PassKind.I, PassKind.W)
    ]
    assert told == pytest.approx(took[1] / sum(took), abs=0.02)
    assert not any(rank.weight_shares for rank in apart.ranks)
