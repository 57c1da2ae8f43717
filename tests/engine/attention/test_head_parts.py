"""Heads traded in parts: the same attention and the same bytes, with one part under way while another is computed."""

from __future__ import annotations

import pytest
import torch

from engine import ContextParallel, burst_attention
from engine.attention.masks import Causal, SlidingWindow
from engine.attention.schedule import Speeds, choose_parts, estimate
from tests.engine.attention.test_parity import dense, distributed, problem, worst_error
from tests.engine.attention.test_schedule import share
from tests.ranks import run_on_ranks


def parts_cases(schedule: str, node_size: int) -> dict[str, float]:
    cp = ContextParallel(node_size=node_size)
    errors = {}
    for (heads, kv_heads), mask in (((8, 8), Causal()), ((16, 8), SlidingWindow(7))):
        whole = problem(8 * cp.size, heads, kv_heads)
        expected = dense(*whole, mask)
        for parts in (1, 2, 4):
            if kv_heads // cp.size % parts:
                continue
            cp.traffic.reset()
            found = distributed(cp, whole, mask, torch.float64, kernel="reference", schedule=schedule, head_parts=parts)
            errors[f"{mask} {heads}:{kv_heads} {parts}"] = worst_error(found, expected)
    return errors


@pytest.mark.parametrize(
    ("schedule", "world_size", "node_size"), [("head_exchange", 2, 2), ("heads_inside", 4, 2), ("heads_across", 4, 2)]
)
def test_heads_in_parts_equal_dense_float64(schedule, world_size, node_size) -> None:
    for errors in run_on_ranks(world_size, parts_cases, schedule, node_size):
        assert len(errors) >= 4
        assert {case: error for case, error in errors.items() if not error < 1e-10} == {}


def sent(parts: int) -> int:
    cp = ContextParallel()
    q, k, v = (torch.ones(1, 8, 8, 4, requires_grad=True) for _ in range(3))
    burst_attention(q, k, v, cp=cp, schedule="head_exchange", head_parts=parts).sum().backward()
    return cp.traffic.sent_bytes


def test_parts_send_no_byte_more() -> None:
    assert run_on_ranks(2, sent, 4) == run_on_ranks(2, sent, 1)


def sent_in_backward(replayed: bool) -> int:
    cp = ContextParallel()
    q, k, v = (torch.ones(1, 8, heads, 4, requires_grad=True) for heads in (8, 4, 4))
    out = burst_attention(q, k, v, cp=cp, schedule="head_exchange", head_parts=2, replayed=replayed)
    cp.traffic.reset()
    out.sum().backward()
    return cp.traffic.sent_bytes


def test_what_arrived_in_forward_is_not_sent_again_in_backward() -> None:
    tokens, item, head_dim, half = 8, 4, 4, 2
    row = tokens * 8 * item // half
    gradients = tokens * (8 + 8 + 4 + 4) * head_dim * item // half
    inputs = tokens * (8 + 4 + 4) * head_dim * item // half
    assert set(run_on_ranks(2, sent_in_backward, False)) == {gradients + row}
    assert set(run_on_ranks(2, sent_in_backward, True)) == {gradients + inputs + 2 * row}


def repeated_backward() -> bool:
    cp = ContextParallel()
    q, k, v = (torch.randn(1, 8, 4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out = burst_attention(q, k, v, cp=cp, schedule="head_exchange", head_parts=2, kernel="reference").sum()
    first, second = (torch.autograd.grad(out, (q, k, v), retain_graph=True) for _ in range(2))
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_backward_may_run_again() -> None:
    assert all(run_on_ranks(2, repeated_backward))


def refusal() -> str:
    cp = ContextParallel()
    q = torch.zeros(1, 8, 4, 4)
    with pytest.raises(ValueError, match="head_parts") as error:
        burst_attention(q, q, q, cp=cp, schedule="head_exchange", head_parts=3)
    return str(error.value)


def test_parts_that_do_not_divide_the_heads_are_refused() -> None:
    assert "head_parts 3 does not divide the 2 KV heads of a rank" in run_on_ranks(2, refusal)[0]


def test_the_model_takes_parts_where_the_link_is_slow_and_none_where_launches_are_all() -> None:
    slow, short = share(128 << 10, node_size=2), share(8 << 10)
    assert choose_parts("heads_across", slow) > 1
    assert choose_parts("head_exchange", short) == 1
    assert choose_parts("ring", slow) == 1


def test_parts_hide_at_most_all_but_the_first_and_the_last() -> None:
    problem_share = share(128 << 10, node_size=2)
    whole = estimate("heads_across", problem_share, Speeds())
    in_parts = estimate("heads_across", problem_share, Speeds(), parts=8)
    nothing_to_send = estimate("heads_across", problem_share, Speeds(across_gib=1e9), parts=1)
    assert nothing_to_send < in_parts < whole
