"""Packed documents on any ranks equal dense float64: lengths of one token and of all, windows, spans, sinks,
soft-capping, grouped heads, under every layout and schedule, forward and backward."""

from __future__ import annotations

import itertools

import pytest
import torch

from engine import ContextParallel, burst_attention
from engine.attention.geometry.layout import LAYOUTS
from engine.attention.masks import Causal, Documents, DocumentsOfBatch, SlidingWindow, parse_mask
from engine.attention.reference import dense_gradients
from tests.engine.attention.call.calls_in_a_row import worst_error_in_a_row
from tests.ranks import run_on_ranks
from tests.slow import slow

TOKENS = 96
HEADS, KV_HEADS, HEAD_DIM = 16, 8, 4
MASKS = (
    Documents((TOKENS,)),
    Documents((1,) * TOKENS),
    Documents((1, 31, 2, 1, 17, 44)),
    Documents((1, 31, 2, 1, 17, 44), causal=False),
    Documents((7,) * 12 + (5, 7), left=3),
    Documents((40, 3, 1, 50, 2), left=11),
    Documents((40, 3, 1, 50, 2), spans=((0, 8), (20, 40), (43, 44), (50, 90))),
    Documents((13,), repeat=True),
)
SCHEDULES = ("ring", "double_ring", "all_gather", "ulysses", "usp", "usp_transposed")


def wrong_calls(kernel: str, masks: tuple[Documents, ...], every: int) -> list[str]:
    """Every `every`-th combination of mask, layout, schedule and side sent whose output or some gradient errs."""
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    generator = torch.Generator().manual_seed(ranks)
    shapes = [(1, TOKENS, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    whole = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    sinks_N = torch.randn(HEADS, generator=generator, dtype=torch.float64)
    node_size = max(1, ranks // 2)
    contexts = {layout: ContextParallel(layout=layout, node_size=node_size) for layout in LAYOUTS}
    wrong = []
    for number, mask in enumerate(masks):
        softcap = 1.5 if number % 2 and kernel == "reference" else None
        sinks = sinks_N if number % 3 else None
        truths = dense_gradients(*whole, mask, softcap=softcap, sinks_N=sinks)
        cases = itertools.product(LAYOUTS, SCHEDULES, ("query", "key_value"))
        for layout, schedule, backward in itertools.islice(cases, number % every, None, every):
            if layout == "striped" and schedule not in ("ring", "double_ring") and ranks > 1:
                continue
            if schedule == "all_gather":
                backward = "auto"
            choices = {"kernel": kernel, "schedule": schedule, "backward": backward, "softcap": softcap}
            error = worst_error_in_a_row(contexts[layout], whole, mask, choices, truths, 1, sinks)
            if not error < 1e-10:
                wrong.append(f"{mask} {layout} {schedule} {backward}: {error:.1e}")
    return wrong


@pytest.mark.parametrize(
    ("ranks", "kernel", "every"),
    [(1, "cpu", 18), (2, "reference", 7), (4, "cpu", 11), *slow((2, "cpu", 1), (4, "reference", 1), (8, "cpu", 2))],
)
def test_documents_equal_dense_float64(ranks: int, kernel: str, every: int) -> None:
    assert run_on_ranks(ranks, wrong_calls, kernel, MASKS, every) == [[]] * ranks


def test_a_document_does_not_depend_on_what_it_is_packed_with() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 50, 4, 8, generator=generator, dtype=torch.float64) for _ in range(4))

    def of(*parts: tuple[int, int]) -> list[torch.Tensor]:
        """out, dq, dk, dv of the last document of several, each a run of tokens."""
        chosen = torch.cat([torch.arange(*part) for part in parts])
        leaves = [each[:, chosen].clone().requires_grad_() for each in (q, k, v)]
        out = burst_attention(*leaves, cu_seqlens=[0, *torch.tensor([b - a for a, b in parts]).cumsum(0).tolist()])
        last = parts[-1][1] - parts[-1][0]
        return [each[:, -last:] for each in (out, *torch.autograd.grad(out, leaves, dout[:, chosen]))]

    alone = of((30, 50))
    for others in (((0, 30),), ((0, 1), (1, 2), (2, 25)), ((3, 10), (0, 30))):
        torch.testing.assert_close(of(*others, (30, 50)), alone, rtol=1e-12, atol=1e-12)


def test_the_setting_is_the_placeholder() -> None:
    assert parse_mask("documents") == DocumentsOfBatch()
    assert str(DocumentsOfBatch()) == "documents"
    assert parse_mask("documents:left-4") == DocumentsOfBatch(4)
    assert str(DocumentsOfBatch(4)) == "documents:left-4"
    assert DocumentsOfBatch().area(40) == Causal().area(40)
    assert DocumentsOfBatch(4).area(40) == SlidingWindow(4).area(40)


def test_attention_refuses_it_and_names_the_mask_to_pass() -> None:
    q_BLND = torch.zeros(1, 8, 1, 4)
    with pytest.raises(ValueError, match=r"has no lengths.*pass Documents\(lengths\) or Documents\.from_cu_seqlens"):
        burst_attention(q_BLND, q_BLND, q_BLND, mask=DocumentsOfBatch())
