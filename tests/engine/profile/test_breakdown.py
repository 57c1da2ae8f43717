"""Categories of operations by their names, and seconds by category that add up to the step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.ops import LM_HEAD, OPTIMIZER, RECOMPUTE, STEP
from engine.profile.breakdown import CATEGORIES, Category, TimedOp, breakdown_of, category_of, seconds_by_category

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


CUDNN_FORWARD = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_knob_3"
NCCL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
PLAIN = "void at::native::elementwise_kernel<128, 2>"
PROCESS = 100


def event(category: str, name: str, start: float, length: float, thread: int = 1, **arguments: Any) -> dict[str, Any]:
    return {
        "ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "pid": PROCESS, "tid": thread,
        "args": arguments,
    }  # fmt: skip


def kernel(name: str, start: float, length: float, correlation: int = 0) -> dict[str, Any]:
    return event("kernel", name, start, length, thread=7, correlation=correlation)


def launch(start: float, correlation: int, thread: int = 1) -> dict[str, Any]:
    return event("cuda_runtime", "cudaLaunchKernel", start, 1, thread, correlation=correlation)


def microseconds(events: list[dict[str, Any]]) -> dict[Category, int]:
    """What the breakdown of `events` has that is not 0."""
    return {name: round(1e6 * seconds) for name, seconds in breakdown_of(events).seconds.items() if seconds}


def test_an_instant_counts_for_the_first_category_of_those_that_run() -> None:
    copy = event("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 0, 100)
    events = [kernel(CUDNN_FORWARD, 10, 20), kernel("nvjet_tst", 20, 20), kernel(NCCL, 35, 25), copy]
    assert microseconds(events) == {"attention_forward": 20, "matmul": 10, "communication": 20, "copies": 50}


def test_where_nothing_runs_is_idle() -> None:
    assert microseconds([kernel(CUDNN_FORWARD, 0, 10), kernel(CUDNN_FORWARD, 25, 5)]) == {
        "attention_forward": 15,
        "idle": 15,
    }


def test_two_of_one_category_at_once_count_once() -> None:
    assert microseconds([kernel(CUDNN_FORWARD, 0, 10), kernel(CUDNN_FORWARD, 5, 10), kernel(NCCL, 7, 1)]) == {
        "attention_forward": 15
    }


@given(
    st.lists(
        st.builds(
            lambda start, length, category: TimedOp(start, start + length, category),
            st.integers(0, 50),
            st.integers(0, 20),
            st.sampled_from(CATEGORIES[:-1]),
        ),
        min_size=1,
    )
)
def test_categories_add_up_to_the_span_and_agree_with_every_single_instant(spans: list[TimedOp]) -> None:
    first, last = min(span.start for span in spans), max(span.end for span in spans)
    expected = dict.fromkeys(CATEGORIES, 0)
    for moment in range(int(first), int(last)):
        running = [span.category for span in spans if span.start <= moment < span.end]
        expected[min(running, key=CATEGORIES.index) if running else "idle"] += 1
    found = seconds_by_category(spans)
    assert list(found) == list(CATEGORIES)
    assert {name: round(1e6 * seconds) for name, seconds in found.items()} == expected
    assert sum(found.values()) == pytest.approx((last - first) / 1e6)


def test_a_kernel_is_of_the_range_in_which_its_thread_launched_it() -> None:
    events = [
        event("user_annotation", RECOMPUTE, 0, 100, thread=1),
        event("user_annotation", OPTIMIZER, 200, 100, thread=1),
        launch(50, correlation=1),  # inside, and the kernel runs long after
        launch(50, correlation=2, thread=2),  # at the same time on another thread
        launch(150, correlation=3),  # between the ranges
        launch(250, correlation=4),
        kernel(CUDNN_FORWARD, 1000, 10, correlation=1),
        kernel(PLAIN, 1010, 1, correlation=1),
        kernel(CUDNN_FORWARD, 1011, 20, correlation=2),
        kernel(PLAIN, 1031, 2, correlation=3),
        kernel(PLAIN, 1033, 4, correlation=4),
        kernel(PLAIN, 1037, 8, correlation=5),  # launched by what the profiler did not see
    ]
    assert microseconds(events) == {
        "attention_recomputed": 10,
        "recomputed": 1,
        "attention_forward": 20,
        "other_compute": 10,
        "optimizer": 4,
    }


def test_a_driver_call_launches_as_well_as_one_of_the_runtime() -> None:
    call = event("cuda_driver", "cuLaunchKernelEx", 5, 1, correlation=1)
    assert microseconds([event("user_annotation", RECOMPUTE, 0, 10), call, kernel(PLAIN, 20, 3, 1)]) == {
        "recomputed": 3
    }


def test_events_that_began_before_the_step_do_not_count() -> None:
    before, step = kernel(PLAIN, 0, 90), event("user_annotation", STEP, 95, 100)
    after = kernel(NCCL, 200, 50)
    breakdown = breakdown_of([before, step, kernel(CUDNN_FORWARD, 100, 10), kernel(CUDNN_FORWARD, 120, 10), after])
    assert breakdown.on == "gpu"
    assert breakdown.span_seconds == pytest.approx(30e-6)
    assert sum(breakdown.seconds.values()) == breakdown.span_seconds


def test_the_mark_of_a_range_on_the_device_is_no_work() -> None:
    mark = event("gpu_user_annotation", OPTIMIZER, 0, 1000, thread=7)
    assert microseconds([mark, kernel(CUDNN_FORWARD, 10, 5)]) == {"attention_forward": 5}


def test_on_a_cpu_an_operator_has_the_time_in_which_it_calls_no_other() -> None:
    events = [
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 0, 100),  # contains, and does nothing
        event("cpu_op", "aten::matmul", 10, 50),
        event("cpu_op", "aten::mm", 20, 30),
        event("cpu_op", "aten::mul", 70, 10),
    ]
    breakdown = breakdown_of(events)
    assert breakdown.on == "cpu"
    assert microseconds(events) == {"other_compute": 30, "matmul": 30, "idle": 10}


def test_on_a_cpu_transfers_count_where_no_operator_runs_and_their_threads_do_nothing_else() -> None:
    events = [
        event("user_annotation", RECOMPUTE, 0, 12),
        event("cpu_op", "aten::mm", 0, 10),
        event("cpu_op", "c10d::send", 10, 2),
        event("user_annotation", "gloo:send", 12, 20),  # until it is through, on the thread that posted it
        event("cpu_op", "aten::mul", 14, 4),
        event("user_annotation", "gloo:all_reduce", 40, 10, thread=2),
        event("cpu_op", "aten::copy_", 42, 5, thread=2),
    ]
    assert microseconds(events) == {"recomputed": 10, "communication": 28, "other_compute": 4, "idle": 8}


def test_a_trace_without_events_has_no_time() -> None:
    assert breakdown_of([event("cpu_op", "PythonSubclass", 0, 10)]).span_seconds == 0
