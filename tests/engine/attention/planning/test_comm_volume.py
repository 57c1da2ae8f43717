"""The bytes that a plan computes are those that are posted, and they decide the backward side."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from engine import ContextParallel
from engine.attention.comm.collectives import token_runs_in_order
from engine.attention.comm.symm_mem.all_to_all import CopyPlanner
from engine.attention.comm_volume import CallBytes, GradientWidths, RingVolume, SentBytes, Shards, all_to_all_bytes
from engine.attention.cost import HardwareModel
from engine.attention.geometry.layout import Ring, layout_named
from engine.attention.kernels.reference import ReferenceKernel
from engine.attention.masks import BlockSparse, Causal, Documents, Full, LocalGlobal, Mask, SlidingWindow
from engine.attention.op import run_attention
from engine.attention.problem import ULYSSES_SCHEDULES
from engine.attention.resolve import balanced, cheaper_backward, group_backward_bytes
from tests.plans import plan_attention
from tests.ranks import run_on_ranks
from tests.slow import slow

TOKENS = 8  # of a rank
MASKS = (
    Full(),
    Causal(),
    SlidingWindow(5),
    SlidingWindow(3, 4),
    Documents((5, 6), repeat=True),
    BlockSparse(LocalGlobal(1, 1), 3),
    BlockSparse([[False]], 4 * TOKENS),
)
HEADS = ((8, 8), (16, 8))
SIDES = ("query", "key_value")


class WritesInputs(ReferenceKernel):
    """Writes gradients in the inputs' dtype, as all kernels for GPUs do."""

    writes_input_dtype = True

    def backward(self, given, band, scale, deterministic):
        gradients = super().backward(given, band, scale, deterministic)
        return tuple(gradient.to(given.q_BLND.dtype) for gradient in gradients)


def choices(schedules: tuple[str, ...], layout: str) -> Iterator[dict[str, Any]]:
    for schedule, exchange, side in itertools.product(schedules, ("relay", "direct"), SIDES):
        if schedule not in ULYSSES_SCHEDULES or layout != "striped":
            yield {"schedule": schedule, "exchange": exchange, "backward": side}


class Posted:
    """Bytes passed to torch.distributed for other ranks, while it is used as a context; `seen` gets the tensors."""

    def __init__(self, cp: ContextParallel, seen: Callable[[torch.Tensor], object] = id) -> None:
        self.node_size, self.rank, self.seen = cp.node_size, cp.rank, seen
        self.sent = SentBytes()
        self._point = dist.P2POp

    def __enter__(self) -> Posted:
        self._patch = mock.patch.object(dist, "P2POp", self._operation)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()

    def _operation(self, op, tensor, peer, group, tag):
        if op is dist.isend:
            near = peer // self.node_size == self.rank // self.node_size
            self.seen(tensor)
            nbytes = tensor.numel() * tensor.itemsize
            self.sent += SentBytes(nbytes, 0) if near else SentBytes(0, nbytes)
        return self._point(op, tensor, peer, group, tag)


WIDTHS = (
    (torch.bfloat16, "fp32"), (torch.bfloat16, "input"), (torch.bfloat16, "input_across"),
    (torch.float32, "fp32"), (torch.float64, "fp32"),
)  # fmt: skip


def differing(
    schedules: tuple[str, ...], node_size: int, layout: str, widths: tuple[tuple[torch.dtype, str], ...], most: int
) -> tuple[int, dict[str, Any]]:
    """Number of cases, at most `most` of all, and (computed, posted, counted) bytes of those where they differ."""
    cp, kernel = ContextParallel(layout=layout, node_size=node_size), WritesInputs()
    chance = random.Random(0)  # the same on every rank
    count, found = 0, {}
    cases = list(itertools.product(HEADS, MASKS, choices(schedules, layout)))
    for (heads, kv_heads), mask, choice in chance.sample(cases, min(most, len(cases))):
        dtype, comm_dtype = chance.choice(widths)
        recompute, chunks = chance.choice((False, True)), chance.choice((1, 2))
        value_dim, latent = chance.choice((3, 5)), chance.choice((False, False, True))
        shapes = ((heads, 3), (1, 2), (1, 7)) if latent else ((heads, 3), (kv_heads, 3), (kv_heads, value_dim))
        q, k, v = (torch.ones(2, TOKENS, *shape, dtype=dtype, requires_grad=True) for shape in shapes)
        expand = torch.ones(heads, 1 + value_dim, 7, dtype=dtype) if latent else None
        with mock.patch("engine.attention.plan.choose_kernel", return_value=kernel):
            plan = plan_attention(
                q,
                k,
                v,
                mask=mask,
                cp=cp,
                grad_comm_dtype=comm_dtype,
                num_head_chunks=chunks if choice["schedule"] in ULYSSES_SCHEDULES else None,
                expand_NXC=expand,
                **choice,
            )
        cp.traffic.reset()
        with Posted(cp) as forward:
            out = run_attention(plan, q, k, v, expand_NXC=expand, recompute=recompute)
        computed = plan.choice.sent(plan.cp.rank, gathered=not recompute)
        with Posted(cp) as backward:
            out.sum().backward()
        posted, counted = CallBytes(forward.sent, backward.sent), cp.traffic.sent_bytes
        count += 1
        if computed != posted or computed.total != counted:
            case = f"{heads}:{kv_heads}:{value_dim} {latent} {mask} {dtype} {comm_dtype} {recompute} {chunks} {choice}"
            found[case] = computed, posted, counted
    return count, found


ALL_SCHEDULES = ("ring", "double_ring", "ulysses", "usp", "usp_transposed")


NODES = [(2, 1, ("double_ring",)), (4, 2, ALL_SCHEDULES)]


@pytest.mark.parametrize(
    ("world_size", "node_size", "schedules", "layout", "widths", "most"),
    [
        (2, 1, ("double_ring",), "striped", WIDTHS, 40),
        (4, 2, ALL_SCHEDULES, "zigzag", WIDTHS, 80),
        *slow(
            *(
                (*nodes, layout, widths, 1000)
                for nodes, layout in itertools.product(NODES, ("contiguous", "zigzag", "striped"))
                for widths in (WIDTHS[:1], WIDTHS[1:])
            )
        ),
    ],
)
def test_the_bytes_computed_are_the_bytes_posted(world_size, node_size, schedules, layout, widths, most) -> None:
    for count, found in run_on_ranks(world_size, differing, schedules, node_size, layout, widths, most):
        assert count >= min(most, len(HEADS) * len(MASKS) * 4)
        assert found == {}


CHUNK = 8  # tokens of half a shard
LAYOUTS_OF_DOCUMENTS = ("balanced", "contiguous", "zigzag")


def whole_and_mixed(ranks: int) -> dict[str, Documents]:
    """Documents that all fit on a rank and end with its chunks; and one that does not fit, before others that do."""
    return {
        "whole": Documents((5, 3) * 2 * ranks),
        "mixed": Documents(((ranks + 1) * CHUNK, *(3, 5) * (ranks - 1))),
    }


def positions_posted(layouts: tuple[str, ...]) -> dict[str, tuple[list[int], SentBytes, SentBytes]]:
    """For each layout and mask the positions whose keys this rank posts in a forward, and the bytes of both passes.
    Keys and values of a token are its position."""
    ranks, found = dist.get_world_size(), {}
    for name, (kind, mask) in itertools.product(layouts, whole_and_mixed(ranks).items()):
        cp = ContextParallel(layout=balanced(mask) if name == "balanced" else name)
        positions = cp.positions(mask.tokens).double()
        q, k, v = (positions.reshape(1, -1, 1, 1).repeat(1, 1, heads, 4).requires_grad_() for heads in (4, 2, 2))
        plan = plan_attention(q, k, mask=mask, cp=cp, schedule="ring", exchange="direct")
        keys: set[float] = set()
        with Posted(cp, lambda tensor, keys=keys: keys.update(tensor.unique().tolist())) as forward:
            out = run_attention(plan, q, k, v)
        with Posted(cp) as backward:
            out.sum().backward()
        found[f"{name} {kind}"] = sorted(map(int, keys)), forward.sent, backward.sent
    return found


@pytest.mark.parametrize("ranks", [2, 4, *slow(8)])
def test_nothing_of_a_document_that_lies_on_one_rank_is_sent(ranks: int) -> None:
    by_rank = run_on_ranks(ranks, positions_posted, LAYOUTS_OF_DOCUMENTS)
    for name, (kind, mask) in itertools.product(LAYOUTS_OF_DOCUMENTS, whole_and_mixed(ranks).items()):
        layout = balanced(mask) if name == "balanced" else layout_named(name)
        owner = {
            position: rank
            for rank in range(ranks)
            for segment in layout.segments(mask.tokens, ranks, rank)
            for position in segment.positions()
        }
        bounds = list(itertools.accumulate(mask.lengths, initial=0))
        divided = [
            position
            for start, stop in itertools.pairwise(bounds)
            if len({owner[position] for position in range(start, stop)}) > 1
            for position in range(start, stop)
        ]
        for rank, found in enumerate(by_rank):
            keys, forward, backward = found[f"{name} {kind}"]
            if (name, kind, ranks) != ("balanced", "mixed", 8):  # a run from one divided document to the next is sent
                assert set(keys) <= set(divided), (name, kind, rank)
            assert (kind == "mixed") or (forward, backward) == (SentBytes(), SentBytes()), (name, rank)
        assert bool(divided) == (kind == "mixed") == any(found[f"{name} {kind}"][0] for found in by_rank), name


@pytest.mark.parametrize("kept", [True, False])
def test_an_all_to_all_by_copy_engine_counts_the_bytes_of_its_copies(kept) -> None:
    ranks, parts, batch, tokens, heads, kv_heads, head_dim = 2, 2, 2, 5, 12, 4, 3
    token_runs = token_runs_in_order(
        tuple(layout_named("contiguous").segments(ranks * tokens, ranks, rank) for rank in (0, 1))
    )
    planner = CopyPlanner(0, ranks, token_runs, parts)

    def tensor(count: int, n: int, *dims: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(batch, count, n, *dims, dtype=dtype)

    here, share = ranks * tokens, ranks * parts  # of a part: the group's tokens of some heads
    q, k = tensor(tokens, heads, head_dim), tensor(tokens, kv_heads, head_dim)
    delta, rows = (tensor(tokens, heads, *dims, dtype=torch.float32) for dims in ((), (2,)))
    part_q, part_k = tensor(here, heads // share, head_dim), tensor(here, kv_heads // share, head_dim)
    part_lse = tensor(here, heads // share, dtype=torch.float32)
    back = (q, delta) if kept else (q, k, k, q, rows)
    forward = planner.send((q, k, k), 0).away_bytes + planner.send_back((part_q, part_lse)).away_bytes
    backward = planner.send(back, 0).away_bytes + planner.send_back((part_q, part_k, part_k)).away_bytes

    part = Shards(
        batch=batch,
        tokens=here,
        heads=heads // share,
        kv_heads=kv_heads // share,
        head_dim=head_dim,
        input_bytes=2,
        intra_node=GradientWidths(unreduced=2, summed=4),
        inter_node=GradientWidths(unreduced=2, summed=4),
    )
    assert all_to_all_bytes((0, 1), 0, 2, part, gathered=kept, packed=False) == CallBytes(
        SentBytes(forward), SentBytes(backward)
    )


SEQ_LEN = 1 << 14
SINK = BlockSparse(LocalGlobal(0, 1), 1024, causal=True)  # all see the first keys, few of which are needed


def shards(cp_size: int, heads: int, kv_heads: int, comm_dtype: str = "fp32") -> Shards:
    """Of bf16 inputs with heads of 128, under a kernel that writes gradients in bf16."""
    return Shards(
        batch=1,
        tokens=SEQ_LEN // cp_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        input_bytes=2,
        intra_node=GradientWidths(unreduced=2, summed=2 if comm_dtype == "input" else 4),
        inter_node=GradientWidths(unreduced=2, summed=2 if comm_dtype == "input" else 4),
    )


def choice(
    heads: int,
    kv_heads: int,
    mask: Mask,
    exchange: str,
    *,
    layout: str = "contiguous",
    node_size: int = 4,
    across_gib: float = 3,
) -> str:
    """Backward side of four ranks on a ring made for their nodes."""
    volume = RingVolume(ring=Ring(cp_size=4, node_size=node_size), node_size=node_size, exchange=exchange)
    hardware = HardwareModel(across_gib=across_gib)
    return cheaper_backward(mask, layout_named(layout), volume, SEQ_LEN, shards(4, heads, kv_heads), hardware)


@pytest.mark.parametrize("exchange", ["relay", "direct"])
@pytest.mark.parametrize("node_size", [1, 2, 4])
def test_equal_heads_send_queries_and_grouped_heads_keys(exchange, node_size) -> None:
    for mask, layout in itertools.product((Full(), Causal()), ("zigzag", "striped")):
        where = {"mask": mask, "exchange": exchange, "layout": layout, "node_size": node_size}
        sides = [choice(heads, kv_heads, **where) for heads, kv_heads in ((32, 32), (32, 4), (8, 4))]
        assert sides == ["query", "key_value", "key_value"]


@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(100)])
def test_between_nodes_keys_are_sent_over_fewer_links_to_later_queries(mask) -> None:
    # Chunks are sent to the next node, which holds the queries that see these keys; queries would cross all nodes.
    assert choice(32, 32, mask, "direct", node_size=1) == "key_value"
    assert choice(32, 32, mask, "direct", node_size=4) == "query"


def test_all_pairs_p2p_sends_the_few_keys_that_are_needed_rather_than_all_queries() -> None:
    assert choice(32, 32, SINK, "relay") == "query"
    assert choice(32, 32, SINK, "direct") == "key_value"


def test_bytes_between_nodes_count_more_the_slower_their_link() -> None:
    # Whole chunks are forwarded inside a node, where queries are fewer bytes; few keys are sent to other nodes.
    assert choice(32, 32, SINK, "relay", node_size=2, across_gib=3) == "key_value"
    assert choice(32, 32, SINK, "relay", node_size=2, across_gib=3000) == "query"


def test_a_single_rank_sends_nothing_and_resolves_to_the_query_side() -> None:
    volume = RingVolume(ring=Ring(cp_size=1, node_size=1), node_size=1, exchange="direct")
    known = (Causal(), layout_named("zigzag"), volume, SEQ_LEN, shards(1, 8, 1))
    assert cheaper_backward(*known, HardwareModel()) == "query"
    assert group_backward_bytes(*known, True) == SentBytes()


@pytest.mark.parametrize(("comm_dtype", "saving"), [("input", 0.24), ("fp32", 0.33)])
def test_a_p2p_ring_of_whole_chunks_sends_the_bytes_of_the_formulas(comm_dtype, saving) -> None:
    volume = RingVolume(ring=Ring(cp_size=4, node_size=4), node_size=4, exchange="relay")
    given, gradient = shards(4, 32, 32, comm_dtype), 2 if comm_dtype == "input" else 4
    query, key_value = (
        group_backward_bytes(Causal(), layout_named("zigzag"), volume, SEQ_LEN, given, sends_queries).total
        for sends_queries in (True, False)
    )
    sent_tokens = 4 * 3 * SEQ_LEN // 4
    assert query == sent_tokens * 32 * (128 * (4 + gradient) + 8)
    assert key_value == sent_tokens * 32 * 128 * (4 + 2 * gradient)
    assert 1 - query / key_value == pytest.approx(saving, abs=0.005)


def resolved_sides() -> list[str]:
    cp = ContextParallel(layout="contiguous", node_size=2)
    sides = []
    for heads, kv_heads, mask in ((4, 4, Causal()), (8, 1, Causal()), (4, 4, BlockSparse(LocalGlobal(0, 1), 2))):
        q, k = torch.zeros(1, 16, heads, 16), torch.zeros(1, 16, kv_heads, 16)
        sides.append(plan_attention(q, k, mask=mask, cp=cp, exchange="direct").resolved()["backward"])
    return sides


def test_every_rank_resolves_the_same_backward_side() -> None:
    first, *others = run_on_ranks(4, resolved_sides)
    assert first[:2] == ["query", "key_value"]
    assert all(sides == first for sides in others)
