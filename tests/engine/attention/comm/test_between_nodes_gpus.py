"""Every remedy of `between_nodes` on several GPUs, which count as two nodes: results equal dense float64, and NCCL got
what the setting says."""

from __future__ import annotations

import pytest
import torch

from engine import ContextParallel
from engine.attention.masks import parse_mask
from engine.attention.reference import dense_gradients
from tests.engine.attention.calls_in_a_row import worst_error_in_a_row
from tests.engine.attention.test_gpu_ranks import GPUS, TOLERANCE
from tests.plans import plan_attention
from tests.ranks import run_on_ranks

REMEDIES = (
    "priority", "no_clusters", "ctas:4", "reserve:4", "blocks:512", "ahead",
    "priority+no_clusters+ctas:4+reserve:12+blocks:512",
)  # fmt: skip
SCHEDULES = ("double_ring", "ulysses") if GPUS < 4 else ("double_ring", "usp", "usp_transposed", "ulysses")


def cases() -> list[tuple[str, dict]]:
    found: list[tuple[str, dict]] = []
    for remedy in REMEDIES:
        for schedule in SCHEDULES:
            choices = {"schedule": schedule} | ({} if schedule == "double_ring" else {"num_head_chunks": 4})
            if remedy != "ahead" or schedule in ("ulysses", "usp_transposed"):
                found.append((remedy, choices))
    # Kernels by CuTe, cuDNN, CUDA C++ and Triton on a part of the GPU.
    found += [("reserve:12", {"schedule": "double_ring", "kernel": kernel}) for kernel in ("cudnn", "fa2", "flex")]
    return found


def errors_of_all(seq_len: int, heads: int) -> dict[str, str]:
    """By case: its worst error over all calls, or the exception."""
    device, mask = torch.device("cuda", torch.cuda.current_device()), parse_mask("causal")
    generator = torch.Generator(device).manual_seed(8)
    shape = (1, seq_len, heads, 64)
    whole = [torch.randn(shape, generator=generator, device=device).bfloat16() for _ in range(4)]
    truth, found = dense_gradients(*whole, mask), {}
    for remedy, choices in cases():
        case = ", ".join([remedy, *(f"{name} {value}" for name, value in choices.items())])
        try:
            cp = ContextParallel(node_size=GPUS // 2, between_nodes=remedy)
            worst = worst_error_in_a_row(cp, whole, mask, choices, truth)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            found[case] = f"{type(error).__name__}: {error}"
            continue
        found[case] = f"{worst:.2e}"
        assert cp.traffic.pending == 0
    return found


@pytest.mark.gpu
@pytest.mark.skipif(GPUS not in (2, 4, 8), reason="needs 2, 4 or 8 CUDA GPUs")
def test_every_remedy_equals_dense_float64_on_gpus() -> None:
    first, *others = run_on_ranks(GPUS, errors_of_all, 4096, 32, backend="nccl")
    assert first
    for found in (first, *others):
        wrong = {case: error for case, error in found.items() if not error[0].isdigit() or float(error) > TOLERANCE}
        assert wrong == {}


def options_of_groups(setting: str) -> dict[str, tuple[bool, int, int]]:
    """(high priority, most blocks, blocks of a cluster) of a double ring's groups between nodes and inside them."""
    device = torch.device("cuda", torch.cuda.current_device())
    cp = ContextParallel(node_size=1, between_nodes=setting)
    q = torch.zeros(1, 128, 4, 64, dtype=torch.bfloat16, device=device)
    plan = plan_attention(q, q, mask=parse_mask("causal"), cp=cp, schedule="double_ring")
    groups = {"between": plan.comms.inter_node._group, "all": cp.group}
    found = {name: group._get_backend(device).options for name, group in groups.items()}
    return {
        name: (each.is_high_priority_stream, each.config.max_ctas, each.config.cga_cluster_size)
        for name, each in found.items()
    }


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs several CUDA GPUs")
def test_nccl_has_the_options_between_nodes_alone() -> None:
    plain, *_ = run_on_ranks(2, options_of_groups, "plain", backend="nccl")
    found, *_ = run_on_ranks(2, options_of_groups, "priority+no_clusters+ctas:4", backend="nccl")
    assert plain["between"] == plain["all"] == found["all"]
    assert plain["all"][0] is False
    assert found["between"] == (True, 4, 0)
