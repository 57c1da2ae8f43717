"""Names of kernels and operators, as traces have them, and the category each belongs to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from engine.ops.ranges import LM_HEAD, OPTIMIZER, RECOMPUTE
from engine.profile.breakdown import CATEGORIES, Category, category_of

ENGINE = Path(__file__).parents[3] / "engine"
FLASH = "kernel_cutlass_kernel_flash_attncuteflash_"

# Those of FlashAttention, of the filling elementwise kernel, of `_row_dot_kernel` and of copies between and within GPUs
# are as a trace on H200 had them. In the others what varies with shapes and releases is a stand-in.
KERNELS: dict[Category, tuple[str, ...]] = {
    "attention_forward": (
        f"{FLASH}fwd_sm90FlashAttentionForwardSm90_object_at__tensor0000o11101213_ten",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x128_4x1x1_kernel0_0",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, cutlass::bfloat16_t>>",
        "triton_tem_fused_flex_attention_0",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel::Params)",
    ),
    "attention_backward": (
        f"{FLASH}bwd_preprocessFlashAttentionBackwardPreprocess_object_at__tensorptrb",
        f"{FLASH}bwd_sm90FlashAttentionBackwardSm90_object_at__tensor0000o11101213_te",
        f"{FLASH}bwd_postprocessFlashAttentionBackwardPostprocess_object_at__tensorpt",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x64x128_4x1x1_kernel0_0",
        "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<128, 64, 128, 8>>",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 128, 8>>",
        "void pytorch_flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<128, 64, 128, 8>>",
        "triton_tem_fused_flex_attention_backward_1",
    ),
    "matmul": (
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
        "void cutlass::Kernel2<cutlass_80_tensorop_s16816gemm_bf16_128x256_32x3_tn_align8>",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true, false>",
        "ampere_sgemm_128x64_tn",
        "sm80_hopper_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_nn",
    ),
    "lm_head": (
        "_loss_and_gradient_kernel",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, LogSoftMaxForwardEpilogue>",
        "liger_cross_entropy_kernel",
        "_cce_lse_forward_kernel",
    ),
    "optimizer": (
        "void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float>>",
        "void at::native::multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor<float, NormType::L2>>",
    ),
    "other_compute": (
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<unsigned char>>",
        "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<direct_copy_kernel_cuda>>",
        "void at::native::multi_tensor_apply_kernel<TensorListMetadata<2>, CopyFunctor<float, float, 2, 1, 1>, Copy>",
    ),
    "merge": ("_row_dot_kernel", "_merge_kernel", "_add_kernel", "_stand_in_kernel"),
    "communication": (
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    ),
    "copies": (
        "Memcpy PtoP (Device -> Device)",
        "Memcpy DtoD (Device -> Device)",
        "Memcpy HtoD (Pinned -> Device)",
        "Memcpy DtoH (Device -> Pinned)",
        "Memset (Device)",
    ),
}
OPERATORS: dict[Category, tuple[str, ...]] = {
    "attention_forward": ("aten::_scaled_dot_product_flash_attention_for_cpu",),
    "attention_backward": ("aten::_scaled_dot_product_flash_attention_for_cpu_backward",),
    "matmul": ("aten::mm", "aten::addmm", "aten::bmm"),
    "lm_head": ("aten::_log_softmax", "aten::nll_loss_forward"),
    "optimizer": ("aten::_fused_adamw_",),
    "communication": ("c10d::alltoall_base_", "gloo:all_reduce"),
    "other_compute": ("aten::mul", "aten::copy_", "aten::_fused_rms_norm", "aten::softmax"),
}


@pytest.mark.parametrize(
    ("name", "category"),
    [(name, category) for group in (KERNELS, OPERATORS) for category, names in group.items() for name in names],
)
def test_each_name_belongs_to_its_category(name: str, category: Category) -> None:
    assert category_of(name) == category


def test_idle_is_the_last_category_and_every_other_has_a_rule() -> None:
    assert get_args(Category) == CATEGORIES
    assert CATEGORIES[-1] == "idle"
    of_ranges = {category_of(name, {RECOMPUTE}) for names in KERNELS.values() for name in names}
    assert of_ranges | KERNELS.keys() | {"idle"} == set(CATEGORIES)


def test_in_a_recomputation_only_attention_has_its_own_category() -> None:
    found = {category: {category_of(name, {RECOMPUTE}) for name in names} for category, names in KERNELS.items()}
    assert found["attention_forward"] == {"attention_recomputed"}
    assert found["communication"] == {"communication"}
    assert found["copies"] == {"copies"}
    for category in ("matmul", "merge", "other_compute"):
        assert found[category] == {"recomputed"}


def test_a_range_gives_the_category_of_operations_that_no_name_rule_matches() -> None:
    plain = "void at::native::elementwise_kernel<128, 2>"
    assert category_of(plain, {OPTIMIZER}) == "optimizer"
    assert category_of(plain, {LM_HEAD}) == "lm_head"
    assert category_of("nvjet_tst_128x256", {LM_HEAD}) == "matmul"
    assert category_of("ncclDevKernel_AllReduce_Sum_f32_RING_LL", {OPTIMIZER}) == "communication"


CATEGORY_OF_PACKAGE = {"accumulate": "merge", "lm_head": "lm_head", "ops": "other_compute"}


def test_every_triton_kernel_of_the_engine_is_known() -> None:
    """A new one must not hide among other compute, unless it belongs there."""
    found = {}
    for path in ENGINE.rglob("*_triton.py"):
        text = path.read_text(encoding="utf-8")
        kernels = re.findall(r"def (_\w+_kernel)\(", text)
        found |= {kernel: path.parent.name for kernel in kernels}
    assert found
    for kernel, package in found.items():
        assert category_of(kernel) == CATEGORY_OF_PACKAGE[package], kernel
