"""Multi-head latent attention: a latent is sent and expanded where it arrives. Out, LSE and every gradient, that of the
matrix included, equal dense float64 attention with K and V formed first; the bytes are those that are computed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import ContextParallel, burst_attention, prepare_attention
from engine.attention.algorithms.saved import save_suffix
from engine.attention.geometry.layout import layout_named
from engine.attention.masks import BlockSparse, Causal, Documents, Full, SlidingWindow
from engine.attention.problem import Problem
from engine.attention.reference import dense_attention
from engine.attention.resolve import Choices, HardwareModel, Resolved, resolve
from tests.engine.attention.parity.test_parity import worst_error
from tests.plans import plan_attention
from tests.ranks import run_on_ranks
from tests.slow import slow

SEQ_LEN, HEADS, HEAD_DIM, SHARED, LATENT, VALUE_DIM = 48, 4, 10, 4, 7, 8
GRID = torch.rand(6, 6, generator=torch.Generator().manual_seed(3)).lt(0.6).logical_or(torch.eye(6, dtype=torch.bool))
MASKS = (
    Full(), Causal(), SlidingWindow(5), BlockSparse(GRID.tolist(), 8, causal=True), Documents((1, 30, 2, 15)),
    Documents((6,) * 8),
)  # fmt: skip
SINKS = torch.linspace(-1.0, 2.0, HEADS, dtype=torch.float64)


def whole_problem(seq_len: int = SEQ_LEN, heads: int = HEADS) -> list[torch.Tensor]:
    """q, shared key, latent, matrix and dout of the whole sequence in float64, the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    shapes = (
        (2, seq_len, heads, HEAD_DIM), (2, seq_len, 1, SHARED), (2, seq_len, 1, LATENT),
        (heads, HEAD_DIM - SHARED + VALUE_DIM, LATENT), (2, seq_len, heads, VALUE_DIM),
    )  # fmt: skip
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def expected_of(whole: list[torch.Tensor], mask: Any, sinks: torch.Tensor) -> list[torch.Tensor]:
    """out, lse and the gradients of q, shared key, latent, matrix and sinks, by autograd of the dense formula."""
    *inputs, dout = whole
    leaves = [each.clone().requires_grad_() for each in (*inputs, sinks)]
    q, shared, latent, expand, sinks = leaves
    formed = torch.einsum("bsc,nxc->bsnx", latent[:, :, 0], expand)
    k = torch.cat((formed[..., : HEAD_DIM - SHARED], shared.expand(-1, -1, q.shape[2], -1)), -1)
    out, lse = dense_attention(q, k, formed[..., HEAD_DIM - SHARED :], mask, sinks_N=sinks)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]


def found_of(cp: ContextParallel, whole: list[torch.Tensor], mask: Any, **choices: Any) -> list[torch.Tensor]:
    """The same by the ranks, gathered."""
    q, shared, latent, expand, dout = whole
    shards = [cp.shard(each, 1).clone().requires_grad_() for each in (q, shared, latent)]
    expand, sinks = expand.clone().requires_grad_(), SINKS.clone().requires_grad_()
    arguments: dict[str, Any] = {"mask": mask, "cp": cp, "return_lse": True, "tensor_layout": "BSHD"} | choices
    out, lse = burst_attention(*shards, expand_NXC=expand, sinks_N=sinks, **arguments)
    if arguments.get("recompute"):  # as activation checkpointing calls it: again, with what was kept
        kept = save_suffix(out, lse, cp, 0.5)
        out, lse = burst_attention(*shards, expand_NXC=expand, sinks_N=sinks, saved=kept, **arguments)
    out.backward(cp.shard(dout, 1))
    summed = [expand.grad, sinks.grad]
    for each in summed:
        if cp.size > 1:
            torch.distributed.all_reduce(each)
    gathered = [cp.unshard(each, 1) for each in (out.detach(), lse.detach().transpose(1, 2), *(s.grad for s in shards))]
    gathered[1] = gathered[1].transpose(1, 2)
    return [*gathered, *summed]


def bytes_of(cp: ContextParallel, whole: list[torch.Tensor], mask: Any, **choices: Any) -> int:
    """Bytes that this rank's plan of the call sends in forward and backward, computed."""
    q, shared, latent = (cp.shard(each, 1) for each in whole[:3])
    plan = plan_attention(q, shared, latent, expand_NXC=whole[3], mask=mask, cp=cp, **choices)
    return plan.choice.sent(cp.rank, gathered=True).total


def errors_of(layout: str, node_size: int | None, choices: dict[str, Any]) -> dict[str, float]:
    """Error of every mask; where attention is called once, that of the bytes computed among them."""
    cp, whole = ContextParallel(layout=layout, node_size=node_size), whole_problem()
    errors = {}
    for mask in MASKS:
        cp.traffic.reset()
        errors[str(mask)] = worst_error(found_of(cp, whole, mask, **choices), expected_of(whole, mask, SINKS))
        sent = cp.traffic.sent_bytes
        if "recompute" not in choices:
            errors[f"bytes of {mask}"] = abs(sent - bytes_of(cp, whole, mask, **choices))
    return errors


REFERENCE, RECOMPUTE = {"kernel": "reference"}, {"recompute": True}
BACKWARDS = [dict(zip(("exchange", "backward"), each, strict=True)) for each in itertools.product(
    ("relay", "direct"), ("query", "key_value"))]  # fmt: skip


@pytest.mark.parametrize(
    ("world_size", "node_size", "layout", "choices"),
    [
        (1, None, "zigzag", {}),
        (2, None, "zigzag", BACKWARDS[0] | REFERENCE),
        (2, None, "zigzag", {"schedule": "ulysses", "num_head_chunks": 2} | RECOMPUTE),
        (4, 2, "zigzag", {"schedule": "double_ring"} | BACKWARDS[3] | RECOMPUTE),
        (4, None, "contiguous", {"schedule": "all_gather"}),
        *slow(
            *((2, None, "zigzag", choice) for choice in BACKWARDS[1:]),
            (1, None, "zigzag", {"schedule": "ulysses", "num_head_chunks": 2} | REFERENCE),
            (2, None, "zigzag", {"schedule": "all_gather"} | RECOMPUTE),
            (2, None, "striped", BACKWARDS[3]),
            (4, None, "zigzag", {"schedule": "ulysses"} | REFERENCE),
            (4, None, "contiguous", BACKWARDS[1] | RECOMPUTE),
            (4, 2, "striped", {"schedule": "double_ring"} | BACKWARDS[1]),
            (4, 2, "zigzag", {"schedule": "usp", "num_head_chunks": 2}),
            (4, 2, "zigzag", {"schedule": "usp", "backward": "query"} | RECOMPUTE),
            (4, 2, "contiguous", {"schedule": "usp_transposed", "backward": "key_value"}),
            *((8, 4, "contiguous", {"schedule": "double_ring"} | choice) for choice in BACKWARDS),
            (8, 2, "contiguous", {"schedule": "usp"}),
        ),
    ],
)
def test_every_case_equals_dense_float64(world_size, node_size, layout, choices) -> None:
    for errors in run_on_ranks(world_size, errors_of, layout, node_size, choices):
        assert len(errors) == len(MASKS) * (1 if "recompute" in choices else 2)
        assert {case: error for case, error in errors.items() if not error < 1e-10} == {}


def test_a_prepared_call_is_the_same_and_arguments_are_checked() -> None:
    q, shared, latent, expand, _ = whole_problem()
    attend = prepare_attention(q, shared, latent, expand_NXC=expand)
    assert torch.equal(
        attend(q, shared, latent, expand_NXC=expand), burst_attention(q, shared, latent, expand_NXC=expand)
    )
    with pytest.raises(ValueError, match="was prepared for expand_NXC"):
        attend(q, shared, latent)
    for arguments, words in (
        ((q, shared, latent, expand[:2]), "does not form K and V of 4 query heads"),
        ((q, shared, latent, expand[..., :3]), "does not form K and V"),
        ((q, q[:, :, :1], latent, expand), "a shared key narrower than q"),
        ((q, shared.expand(-1, -1, 2, -1), latent.expand(-1, -1, 2, -1), expand), "both with one head"),
        ((q, shared, latent, expand.float()), "make them alike"),
        ((q, shared, latent, expand[0]), "dims of the latent"),
        ((q, shared[:, 1:], latent[:, 1:], expand), "differ in batch, tokens"),
    ):
        with pytest.raises(ValueError, match=words):
            burst_attention(*arguments[:3], expand_NXC=arguments[3])


DEEPSEEK_V3: dict[str, Any] = {"heads": 128, "kv_heads": 128, "head_dim": 192, "value_dim": 128, "input_bytes": 2}
SENT = {"latent_dim": 512, "shared_key_dim": 64}
PAGE = Path(__file__).parents[4] / "docs/hybrids.md"


def resolved(tokens: int, sent: dict[str, int], choices: dict[str, Any]) -> Resolved:
    """Causal attention of DeepSeek-V3's heads on 8 ranks of `tokens` tokens each."""
    problem = Problem(
        mask=Causal(), layout=layout_named("zigzag"), seq_len=8 * tokens, batch=1, cp_size=8, node_size=8,
        **DEEPSEEK_V3 | sent,
    )  # fmt: skip
    return resolve(problem, HardwareModel(), Choices(**choices))


def test_the_table_of_the_page_is_what_the_plans_send() -> None:
    """That plans send what they compute is tested above, and in `planning/test_comm_volume` for every dtype."""
    rows, tokens = [], 1024
    cases = [
        *(("`ring`, exchange `{exchange}`", {"schedule": "ring"} | choice) for choice in BACKWARDS),
        ("`ulysses`", {"schedule": "ulysses", "num_head_chunks": 1}),
        ("`all_gather`", {"schedule": "all_gather"}),
    ]
    for name, choice in cases:
        found = []
        for sent in ({}, SENT):
            plan = resolved(tokens, sent, choice)
            calls = [plan.sent(rank, gathered=True) for rank in range(8)]
            for direction in ("forward", "backward"):
                found.append(sum(getattr(call, direction).total for call in calls) / 8 / tokens / 1024)
        side = "" if "ulysses" in name else f"`{plan.backward}`"
        rows.append(f"| {name.format(**choice)} | {side} | {' | '.join(f'{each:.1f}' for each in found)} |")
    page = PAGE.read_text(encoding="utf-8").replace("|  |", "| |")
    assert [row for row in rows if row.replace("|  |", "| |") not in page] == []


def test_auto_sends_the_latent_in_backward_too_and_queries_where_keys_and_values_are_sent() -> None:
    for sent, side in (({}, "query"), (SENT, "key_value")):
        for exchange in ("relay", "direct"):
            assert resolved(1024, sent, {"schedule": "ring", "exchange": exchange}).backward == side
