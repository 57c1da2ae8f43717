"""V with a head dim of its own (192 and 128 in DeepSeek-V3): every schedule, mask, kernel and call equals float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from engine import ContextParallel, burst_attention, prepare_attention
from engine.attention.kernels import KernelProblem
from engine.attention.kernels.fa4 import KERNEL as FA4
from engine.attention.masks import BlockSparse, Causal, Documents, Full, SlidingWindow
from engine.attention.reference import dense_gradients
from tests.engine.attention.parity.test_parity import worst_error
from tests.ranks import run_on_ranks
from tests.slow import slow

SEQ_LEN = 48
GRID = torch.rand(6, 6, generator=torch.Generator().manual_seed(3)).lt(0.6).logical_or(torch.eye(6, dtype=torch.bool))
MASKS = (
    Full(), Causal(), SlidingWindow(5), SlidingWindow(3, 4), BlockSparse(GRID.tolist(), 8, causal=True),
    Documents((1, 30, 2, 15)), Documents((30, 18), causal=False), Documents((6,) * 8),
)  # fmt: skip
DIMS = ((12, 8), (8, 12))  # of Q and K, and of V
HEADS = ((4, 4), (8, 4))
SINKS = torch.linspace(-1.0, 2.0, 8, dtype=torch.float64)


def whole_problem(heads: int, kv_heads: int, head_dim: int, value_dim: int) -> list[torch.Tensor]:
    """Whole-sequence q, k, v, dout in float64, the same on every rank."""
    generator = torch.Generator().manual_seed(heads * 100 + head_dim)
    shapes = ((heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim), (heads, value_dim))
    return [torch.randn(2, SEQ_LEN, *shape, generator=generator, dtype=torch.float64) for shape in shapes]


def errors_of(layout: str, node_size: int | None, choices: dict[str, Any]) -> dict[str, float]:
    """Error of every case: masks x heads x head dims, with sinks where the heads are grouped."""
    cp = ContextParallel(layout=layout, node_size=node_size)
    errors = {}
    for mask, (heads, kv_heads), dims in itertools.product(MASKS, HEADS, DIMS):
        whole = whole_problem(heads, kv_heads, *dims)
        sinks = SINKS.clone().requires_grad_() if heads != kv_heads else None
        expected = dense_gradients(*whole, mask, return_lse=True, sinks_N=None if sinks is None else sinks.detach())
        q, k, v, dout = (cp.shard(tensor, 1) for tensor in whole)
        leaves = [each.clone().requires_grad_() for each in (q, k, v)]
        out, lse = burst_attention(
            *leaves, mask=mask, cp=cp, return_lse=True, sinks_N=sinks, tensor_layout="BSHD", **choices
        )
        out.backward(dout)
        gathered = [out.detach(), lse.detach().transpose(1, 2), *(leaf.grad for leaf in leaves)]
        found = [cp.unshard(tensor, 1) for tensor in gathered]
        found[1] = found[1].transpose(1, 2)
        if sinks is not None:
            if cp.size > 1:
                torch.distributed.all_reduce(sinks.grad)
            found.append(sinks.grad)
        errors[f"{mask} {heads}:{kv_heads} {dims}"] = worst_error(found, expected)
    return errors


RING, REFERENCE = {"schedule": "ring"}, {"kernel": "reference"}


@pytest.mark.parametrize(
    ("world_size", "node_size", "layout", "choices"),
    [
        (1, None, "zigzag", {"kernel": "cpu"}),
        (2, None, "zigzag", RING | REFERENCE | {"exchange": "relay", "backward": "key_value"}),
        (4, 2, "zigzag", {"schedule": "double_ring", "exchange": "direct", "backward": "query"}),
        (4, 2, "contiguous", {"schedule": "usp"} | REFERENCE),
        *slow(
            (1, None, "zigzag", REFERENCE),
            (2, None, "zigzag", RING | {"exchange": "direct", "backward": "query"}),
            (2, None, "striped", RING | REFERENCE | {"backward": "query"}),
            (2, None, "zigzag", {"schedule": "ulysses", "num_head_chunks": 2}),
            (4, None, "zigzag", {"schedule": "all_gather"}),
            (4, None, "zigzag", {"schedule": "ulysses"} | REFERENCE),
            (4, 2, "zigzag", {"schedule": "usp_transposed"}),
            (4, None, "contiguous", RING | {"exchange": "relay", "backward": "query"}),
            (4, 2, "striped", {"schedule": "double_ring", "exchange": "relay", "backward": "key_value"} | REFERENCE),
        ),
    ],
)
def test_every_case_equals_dense_float64(world_size, node_size, layout, choices) -> None:
    for errors in run_on_ranks(world_size, errors_of, layout, node_size, choices):
        assert len(errors) == len(MASKS) * len(HEADS) * len(DIMS)
        assert {case: error for case, error in errors.items() if not error < 1e-10} == {}


def test_a_prepared_call_refuses_another_dim_of_v() -> None:
    q, k, v, _ = whole_problem(4, 4, 12, 8)
    attend = prepare_attention(q, k, v)
    assert torch.equal(attend(q, k, v), burst_attention(q, k, v))
    with pytest.raises(ValueError, match=r"v \(2, 48, 4, 8\).*found.*v \(2, 48, 4, 12\)"):
        attend(q, k, k)
    with pytest.raises(ValueError, match="is empty"):
        burst_attention(q, k, v[..., :0])


@pytest.mark.parametrize(
    ("dims", "capability", "runs"),
    [((192, 128), 9, 1), ((192, 128), 10, 1), ((128, 64), 10, 1), ((192, 64), 9, 1), ((192, 64), 10, 0)],
)
def test_flash_attention_4_takes_the_head_dims_of_its_library(dims, capability, runs, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (capability, 0))
    problem = KernelProblem(
        device=torch.device("cuda"), dtype=torch.bfloat16, heads=8, kv_heads=8, head_dim=dims[0], value_dim=dims[1]
    )
    assert (FA4.refuse(problem) is None) == bool(runs)
