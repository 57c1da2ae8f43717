"""Heads in chunks: the same attention and the same bytes, with one chunk sent while another is computed."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from engine import ContextParallel, burst_attention
from engine.attention.accumulate.accumulators import TensorSpec
from engine.attention.algorithms.ulysses import UlyssesPlan
from engine.attention.comm.collectives import GroupAllToAll, TokenRun, message, sections, token_runs_in_order
from engine.attention.comm.p2p import Traffic
from engine.attention.cost import HardwareModel, choose_num_head_chunks, estimate
from engine.attention.geometry.layout import layout_named
from engine.attention.kernels import kernel_named
from engine.attention.masks import Causal, SlidingWindow
from engine.attention.problem import Problem
from engine.attention.resolve import Choices, resolve
from tests.engine.attention.parity.test_parity import dense, distributed, problem, worst_error
from tests.engine.attention.planning.test_cost_model import share
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
            found = distributed(
                cp, whole, mask, torch.float64, kernel="reference", schedule=schedule, num_head_chunks=parts
            )
            errors[f"{mask} {heads}:{kv_heads} {parts}"] = worst_error(found, expected)
    return errors


@pytest.mark.parametrize(
    ("schedule", "world_size", "node_size"), [("ulysses", 2, 2), ("usp", 4, 2), ("usp_transposed", 4, 2)]
)
def test_heads_in_chunks_equal_dense_float64(schedule, world_size, node_size) -> None:
    for errors in run_on_ranks(world_size, parts_cases, schedule, node_size):
        assert len(errors) >= 4
        assert {case: error for case, error in errors.items() if not error < 1e-10} == {}


def sent(parts: int) -> int:
    cp = ContextParallel()
    q, k, v = (torch.ones(1, 8, 8, 4, requires_grad=True) for _ in range(3))
    burst_attention(q, k, v, cp=cp, schedule="ulysses", num_head_chunks=parts).sum().backward()
    return cp.traffic.sent_bytes


def test_head_chunks_send_no_byte_more() -> None:
    assert run_on_ranks(2, sent, 4) == run_on_ranks(2, sent, 1)


def sent_in_backward(recompute: bool) -> int:
    cp = ContextParallel()
    q, k, v = (torch.ones(1, 8, heads, 4, requires_grad=True) for heads in (8, 4, 4))
    out = burst_attention(q, k, v, cp=cp, schedule="ulysses", num_head_chunks=2, recompute=recompute)
    cp.traffic.reset()
    out.sum().backward()
    return cp.traffic.sent_bytes


def test_tensors_received_in_forward_are_not_sent_again_in_backward() -> None:
    tokens, item, head_dim, half = 8, 4, 4, 2
    row = tokens * 8 * item // half
    gradients = tokens * (8 + 8 + 4 + 4) * head_dim * item // half
    inputs = tokens * (8 + 4 + 4) * head_dim * item // half
    assert set(run_on_ranks(2, sent_in_backward, False)) == {gradients + row}
    assert set(run_on_ranks(2, sent_in_backward, True)) == {gradients + inputs + 2 * row}


def repeated_backward() -> bool:
    cp = ContextParallel()
    q, k, v = (torch.randn(1, 8, 4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out = burst_attention(q, k, v, cp=cp, schedule="ulysses", num_head_chunks=2, kernel="reference").sum()
    first, second = (torch.autograd.grad(out, (q, k, v), retain_graph=True) for _ in range(2))
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_backward_may_run_again() -> None:
    assert all(run_on_ranks(2, repeated_backward))


def unsupported_reason() -> str:
    cp = ContextParallel()
    q = torch.zeros(1, 8, 4, 4)
    with pytest.raises(ValueError, match="num_head_chunks") as error:
        burst_attention(q, q, q, cp=cp, schedule="ulysses", num_head_chunks=3)
    return str(error.value)


def test_parts_that_do_not_divide_the_heads_are_refused() -> None:
    assert "num_head_chunks 3 does not divide the 2 KV heads of a rank" in run_on_ranks(2, unsupported_reason)[0]


def test_the_cost_model_cuts_heads_where_the_link_is_slow_and_not_where_launches_dominate() -> None:
    slow, short = share(128 << 10, node_size=2), share(8 << 10)
    assert choose_num_head_chunks("usp_transposed", slow) > 1
    assert choose_num_head_chunks("ulysses", short) == 1
    assert choose_num_head_chunks("ring", slow) == 1


def test_head_chunks_overlap_at_most_all_transfers_but_the_first_and_the_last() -> None:
    problem_share = share(128 << 10, node_size=2)
    whole = estimate("usp_transposed", problem_share, HardwareModel())
    in_parts = estimate("usp_transposed", problem_share, HardwareModel(), chunks=8)
    nothing_to_send = estimate("usp_transposed", problem_share, HardwareModel(across_gib=1e9), chunks=1)
    assert nothing_to_send < in_parts < whole


@pytest.mark.parametrize("parts", [1, 2])
def test_a_single_rank_also_computes_its_heads_in_chunks(parts) -> None:
    cp = ContextParallel.single()
    whole = problem(16, 4, 2)
    found = distributed(
        cp, whole, Causal(), torch.float64, kernel="reference", schedule="ulysses", num_head_chunks=parts
    )
    assert worst_error(found, dense(*whole, Causal())) < 1e-10


class Buffers(GroupAllToAll):
    """Stands in for the messages of two ranks with equal tensors; a weak reference to each received buffer tells
    whether it still exists."""

    def __init__(self) -> None:
        super().__init__(None, Traffic())
        self.size = 2
        self.received: list[weakref.ref[torch.Tensor]] = []

    def exchange(self, rows):
        buffer = rows.clone()
        self.received.append(weakref.ref(buffer))
        return lambda: buffer

    def alive(self) -> int:
        return sum(buffer() is not None for buffer in self.received)


def test_receive_buffers_are_freed_when_the_work_on_them_begins() -> None:
    heads, alive, here = Buffers(), [], []
    alone = SimpleNamespace(cp=ContextParallel.single())
    token_runs = (TokenRun(0, 0, 4), TokenRun(1, 0, 4))
    plan = UlyssesPlan(
        cp=alone.cp,
        choice=resolve(
            Problem(
                mask=Causal(),
                layout=layout_named("zigzag"),
                seq_len=8,
                batch=1,
                heads=8,
                kv_heads=8,
                head_dim=4,
                input_bytes=4,
                cp_size=2,
                node_size=2,
                on_gpu=False,
                copies_unsupported_reason="no GPU",
            ),
            HardwareModel(),
            Choices(schedule="ulysses", num_head_chunks=4),
        ),
        kernel=kernel_named("reference"),
        scale=1.0,
        all_to_all=heads,
        token_runs=token_runs,
        inner=alone,
    )

    def compute(part, arrived):
        here.extend(weakref.ref(tensor) for tensor in arrived.tensors)
        alive.append((heads.alive(), sum(tensor() is not None for tensor in here)))
        return tuple(tensor + 1 for tensor in arrived.tensors)

    results = plan._exchanged((torch.zeros(1, 4, 8, 3), torch.zeros(1, 4, 8)), compute, token_runs)
    # While a part is computed: the next one, at most two parts of results on their way, and its own two tensors.
    assert alive == [(1, 2), (2, 2), (3, 2), (2, 2)]
    assert heads.alive() == 0
    assert [result.shape for result in results] == [(1, 4, 8, 3), (1, 4, 8)]
    assert all(result.eq(1).all() for result in results)


def messages(parts: int) -> list[list[int]]:
    """How many messages forward and backward took, kept and recompute."""
    counts = []
    for recompute in (False, True):
        cp = ContextParallel()
        q, k, v = (torch.ones(1, 8, heads, 4, requires_grad=True) for heads in (16, 8, 8))
        with mock.patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv) as posted:
            out = burst_attention(
                q,
                k,
                v,
                cp=cp,
                schedule="ulysses",
                num_head_chunks=parts,
                recompute=recompute,
                kernel="reference",
                tensor_layout="BSHD",
            )
            forward = posted.call_count
            out.sum().backward()
            counts.append([forward, posted.call_count - forward])
    return counts


@pytest.mark.parametrize("parts", [1, 4])
def test_a_part_is_one_message_out_and_one_back(parts) -> None:
    assert run_on_ranks(2, messages, parts) == 2 * [2 * [[2 * parts, 2 * parts]]]


ODD = ((1, torch.bfloat16), (3, torch.float32), (1, torch.uint8), (1, torch.float64), (3, torch.bfloat16))


def odd_tensors() -> tuple[bool, int]:
    """Tokens of heads of odd sizes go to their ranks in two parts and come back: (unchanged, bytes sent)."""
    cp = ContextParallel(layout="contiguous")
    members = range(cp.size)
    all_to_all = cp.comms.all_to_all(members, "all_to_all")
    token_runs = token_runs_in_order(tuple(cp.layout.segments(3 * cp.size, cp.size, rank) for rank in members))
    tokens = torch.arange(3)[None, :, None, None] + 10 * cp.rank
    tensors = tuple((tokens + 40 * torch.arange(4)[:, None]).expand(1, 3, 4, n).to(dtype) for n, dtype in ODD)
    exchange = all_to_all.begin(token_runs, 2, alternate=False)
    same = True
    for part in range(2):
        arrived = exchange.send(tensors, part)().tensors
        everyone = torch.cat([torch.arange(3) + 10 * rank for rank in range(cp.size)])[None, :, None, None]
        expected = everyone + 40 * (2 * cp.rank + part)
        for tensor, (width, dtype) in zip(arrived, ODD, strict=True):
            same &= torch.equal(tensor, expected.expand(1, 6, 1, width).to(dtype))
        exchange.send_back(arrived, part)
    same &= all(map(torch.equal, exchange.results(), tensors))
    return same, cp.traffic.sent_bytes


def test_tensors_of_any_dtypes_share_a_message() -> None:
    unaligned = 3 * sum(width * dtype.itemsize for width, dtype in ODD)
    row_bytes = -(-unaligned // 8) * 8
    assert row_bytes > unaligned
    for same, sent_bytes in run_on_ranks(2, odd_tensors):
        assert same
        assert sent_bytes == 4 * row_bytes


def test_every_section_of_a_message_is_aligned_and_none_overlap() -> None:
    tensor_specs = tuple(TensorSpec((3, width), dtype) for width, dtype in ODD)
    rows = message(tensor_specs, 2, torch.device("cpu"))
    views = sections(rows, tensor_specs)
    for index, view in enumerate(views):
        assert (view.dtype, view.shape) == (tensor_specs[index].dtype, (2, *tensor_specs[index].shape))
        assert all(row.data_ptr() % view.itemsize == 0 for row in view)
        view.fill_(index)
    assert all(view.eq(index).all() for index, view in enumerate(views))
