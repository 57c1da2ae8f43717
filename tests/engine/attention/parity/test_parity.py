"""Every combination of layout, mask, heads, route and kernel equals dense float64 attention: out, lse, dq, dk, dv."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

from engine import ContextParallel, burst_attention
from engine.attention.masks import Causal, Documents, Full, SlidingWindow
from engine.attention.reference import dense_gradients
from engine.attention.resolve import balanced
from tests.ranks import run_on_ranks
from tests.slow import combinations, slow

MASKS = (Full(), Causal(), SlidingWindow(5), SlidingWindow(3, 4), SlidingWindow(0))
LAYOUTS = ("contiguous", "zigzag", "striped")
HEADS = ((4, 2), (3, 1))
ROUTES = ("query", "key_value")


def problem(seq_len: int, heads: int, kv_heads: int, batch: int = 2, head_dim: int = 8) -> list[torch.Tensor]:
    """Whole-sequence q, k, v, dout in float64, the same on every rank."""
    generator = torch.Generator().manual_seed(seq_len * 1000 + heads * 10 + kv_heads)
    shapes = [(batch, seq_len, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


dense = partial(dense_gradients, return_lse=True)


def distributed(cp, whole, mask, dtype, **choices):
    """This call's results, gathered to whole sequences in float64."""
    q, k, v, dout = (cp.shard(t, 1).to(dtype, copy=True) for t in whole)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out, lse = burst_attention(q, k, v, mask=mask, cp=cp, return_lse=True, tensor_layout="BSHD", **choices)
    out.backward(dout)
    assert out.dtype == q.dtype == q.grad.dtype
    tensors = (out.detach(), lse.detach().transpose(1, 2), q.grad, k.grad, v.grad)
    out, lse, dq, dk, dv = (cp.unshard(t, 1).double() for t in tensors)
    return out, lse.transpose(1, 2), dq, dk, dv


def worst_error(found, expected) -> float:
    assert all(torch.isfinite(f).all() == torch.isfinite(e).all() for f, e in zip(found, expected, strict=True))
    return max(
        ((f - e).nan_to_num(0, 0, 0).abs().max() / e.nan_to_num(0, 0, 0).abs().max().clamp_min(1)).item()
        for f, e in zip(found, expected, strict=True)
    )


def parity_cases(
    layout: str, dtype: torch.dtype, kernel: str, exchange: str, node_size: int | None
) -> dict[str, float]:
    """Error of every case, by its name: one process start serves them all."""
    cp = ContextParallel(layout=layout, node_size=node_size)
    seq_len = 12 * cp.size if layout != "zigzag" else 12 * cp.size + 2 * cp.size
    errors = {}
    for (heads, kv_heads), mask in itertools.product(HEADS, MASKS):
        whole = problem(seq_len, heads, kv_heads)
        expected = dense(*whole, mask)
        for route in ROUTES:
            found = distributed(cp, whole, mask, dtype, kernel=kernel, exchange=exchange, backward=route)
            errors[f"{mask} {heads}:{kv_heads} {route}"] = worst_error(found, expected)
    return errors


@combinations(
    {
        "world_size, node_size": [(1, None), (2, None), (3, None), (4, None), (4, 2), (2, 1), (3, 1)],
        "exchange": ["relay", "direct"],
        "layout": LAYOUTS,
    }
)
def test_every_combination_equals_dense_float64(world_size, node_size, exchange, layout) -> None:
    for errors in run_on_ranks(world_size, parity_cases, layout, torch.float64, "reference", exchange, node_size):
        assert len(errors) == len(MASKS) * len(HEADS) * len(ROUTES)
        assert {case: error for case, error in errors.items() if not error < 1e-10} == {}


@pytest.mark.parametrize("layout", ["zigzag", *slow("contiguous", "striped")])
def test_the_cpu_kernel_equals_dense_in_float32(layout: str) -> None:
    for errors in run_on_ranks(3, parity_cases, layout, torch.float32, "cpu", "auto", None):
        assert {case: error for case, error in errors.items() if not error < 2e-6} == {}


DOCUMENTS = (  # of 48 tokens
    Documents((1, 30, 2, 15)), Documents((30, 18), causal=False), Documents((6,) * 8), Documents((5, 9), repeat=True),
)  # fmt: skip


def balanced_cases(exchange: str, node_size: int | None, schedule: str) -> dict[str, float]:
    """Error of every list of documents and head count where its own layout deals them."""
    errors = {}
    for (heads, kv_heads), mask in itertools.product(((8, 8), (8, 4)), DOCUMENTS):
        cp = ContextParallel(layout=balanced(mask), node_size=node_size)
        whole = problem(48, heads, kv_heads)
        expected = dense(*whole, mask)
        for route in ROUTES:
            choices = {"kernel": "reference", "exchange": exchange, "backward": route, "schedule": schedule}
            found = distributed(cp, whole, mask, torch.float64, **choices)
            errors[f"{mask} {heads}:{kv_heads} {route}"] = worst_error(found, expected)
    return errors


@pytest.mark.parametrize(
    ("world_size", "node_size", "exchange", "schedule"),
    [
        (4, 2, "direct", "auto"),
        *slow(
            (1, None, "direct", "auto"), (2, None, "direct", "auto"), (4, None, "relay", "ring"),
            (4, 2, "auto", "usp"), (4, None, "auto", "ulysses"), (8, 4, "direct", "auto"),
        ),
    ],
)  # fmt: skip
def test_documents_that_are_dealt_equal_dense_float64(world_size, node_size, exchange, schedule) -> None:
    for errors in run_on_ranks(world_size, balanced_cases, exchange, node_size, schedule):
        assert len(errors) == 2 * len(DOCUMENTS) * len(ROUTES)
        assert {case: error for case, error in errors.items() if not error < 1e-10} == {}


SCHEDULES = [  # schedule, ranks, ranks per node, layout
    ("ulysses", 2, 2, "contiguous"),
    ("ulysses", 4, 2, "zigzag"),
    ("usp", 4, 2, "contiguous"),
    ("usp_transposed", 4, 2, "zigzag"),
    *slow(("ulysses", 2, 2, "zigzag"), ("ulysses", 4, 2, "contiguous"), ("usp", 4, 2, "zigzag")),
    *slow(("usp_transposed", 4, 2, "contiguous"), ("usp", 6, 2, "zigzag"), ("usp_transposed", 8, 4, "contiguous")),
]


def schedule_cases(schedule: str, layout: str, node_size: int) -> dict[str, float]:
    """Error of every mask and head count under a Ulysses schedule."""
    cp = ContextParallel(layout=layout, node_size=node_size)
    errors = {}
    for (heads, kv_heads), mask in itertools.product(((4, 4), (8, 4)), MASKS):
        whole = problem(12 * cp.size, heads, kv_heads)
        expected = dense(*whole, mask)
        for route in ROUTES:
            choices = {"kernel": "reference", "schedule": schedule, "backward": route}
            found = distributed(cp, whole, mask, torch.float64, **choices)
            errors[f"{mask} {heads}:{kv_heads} {route}"] = worst_error(found, expected)
    return errors


@pytest.mark.parametrize(("schedule", "world_size", "node_size", "layout"), SCHEDULES)
def test_every_ulysses_schedule_equals_dense_float64(schedule, world_size, node_size, layout) -> None:
    for errors in run_on_ranks(world_size, schedule_cases, schedule, layout, node_size):
        assert len(errors) == 2 * len(MASKS) * len(ROUTES)
        assert {case: error for case, error in errors.items() if not error < 1e-10} == {}


def eight_rank_case(node_size: int) -> float:
    cp = ContextParallel(layout="zigzag", node_size=node_size)
    whole = problem(32, 2, 1, batch=1)
    return worst_error(distributed(cp, whole, Causal(), torch.float64), dense(*whole, Causal()))


@pytest.mark.parametrize("node_size", [4, *slow(8, 2)])
def test_eight_ranks_on_one_two_and_four_nodes_agree_too(node_size) -> None:
    assert max(run_on_ranks(8, eight_rank_case, node_size)) < 1e-10
