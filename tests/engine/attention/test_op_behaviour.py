"""What the attention op promises beyond the right numbers: bytes sent, replay from storage, repeatability, refusals."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist

from engine import ContextParallel, burst_attention
from engine.attention.algorithms.ring import KEY_SIDE_DIMS, ring_steps
from engine.attention.algorithms.saved import save_suffix
from engine.attention.comm.exchange import RemoteChunk
from engine.attention.masks import Causal, Full, SlidingWindow
from engine.attention.reference import dense_attention
from tests.plans import plan_attention
from tests.ranks import run_on_ranks
from tests.slow import slow

HEAD_DIM = 128


def shards(cp: ContextParallel, heads: int, kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(cp.rank)
    shapes = [(1, 16, n, HEAD_DIM) for n in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def posted_bytes(heads: int, kv_heads: int, route: str, comm_dtype: str) -> tuple[int, int]:
    """(forward, backward) bytes this rank posted in bf16."""
    cp = ContextParallel()
    q, k, v = shards(cp, heads, kv_heads, torch.bfloat16)
    out = burst_attention(
        q, k, v, cp=cp, backward=route, grad_comm_dtype=comm_dtype, exchange="relay", kernel="reference"
    )
    forward = cp.traffic.sent_bytes
    cp.traffic.reset()
    out.backward(torch.ones_like(out))
    return forward, cp.traffic.sent_bytes


@pytest.mark.parametrize(("comm_dtype", "gradient_bytes", "saving"), [("fp32", 4, 0.33), *slow(("input", 2, 0.24))])
def test_the_query_side_sends_a_quarter_to_a_third_fewer_bytes(comm_dtype, gradient_bytes, saving) -> None:
    world_size, tokens, heads = 3, 16, 4
    steps = world_size - 1
    expected = {
        "query": steps * tokens * heads * (HEAD_DIM * (4 + gradient_bytes) + 8),
        "key_value": steps * tokens * heads * HEAD_DIM * (4 + 2 * gradient_bytes),
    }
    backward = {}
    for route in expected:
        for forward_bytes, backward_bytes in run_on_ranks(world_size, posted_bytes, heads, heads, route, comm_dtype):
            assert forward_bytes == steps * tokens * heads * HEAD_DIM * 4
            assert backward_bytes == expected[route]
            backward[route] = backward_bytes
    assert 1 - backward["query"] / backward["key_value"] == pytest.approx(saving, abs=0.005)


def test_grouped_heads_are_sent_unrepeated() -> None:
    for forward_bytes, backward_bytes in run_on_ranks(2, posted_bytes, 8, 2, "key_value", "input"):
        assert forward_bytes == 16 * 2 * HEAD_DIM * 4
        assert backward_bytes == 16 * 2 * HEAD_DIM * 8


def replay() -> tuple[bool, int, list[bool]]:
    """(same output, bytes the recompute forward sent, gradients bit-equal to the ordinary backward's)."""
    cp = ContextParallel()
    q, k, v = shards(cp, 4, 2, torch.float32)
    out, lse = burst_attention(q, k, v, cp=cp, return_lse=True)
    expected = torch.autograd.grad(out.square().sum(), (q, k, v))
    kept = save_suffix(out, lse, cp, 1.0)
    cp.traffic.reset()
    again, _ = burst_attention(q, k, v, cp=cp, saved=kept, return_lse=True)
    sent = cp.traffic.sent_bytes
    found = torch.autograd.grad(again.square().sum(), (q, k, v))
    return torch.equal(again, out), sent, [torch.equal(f, e) for f, e in zip(found, expected, strict=True)]


def test_a_recomputation_from_saved_outputs_sends_nothing_and_gives_the_same_gradients() -> None:
    for same_output, sent, same_gradients in run_on_ranks(2, replay):
        assert same_output
        assert sent == 0
        assert same_gradients == [True] * 3


def lse_gradient_errors(kernel: str) -> dict[str, float]:
    """Largest difference of gradients through LSE between this rank's shards and dense attention: of LSE alone, and of
    out in some rows and LSE in all."""
    cp = ContextParallel()
    torch.manual_seed(0)
    whole = [torch.randn(2, 16, heads, 7, dtype=torch.float64) for heads in (4, 2, 2)]
    used = torch.arange(16)[:, None, None] % 3 == 0
    errors = {}
    for name, kept in (("lse alone", 0), ("out of some rows", 1), ("out as good as unused", 1e-200)):
        shards, dense = ([t.clone().requires_grad_() for t in each] for each in (map(cp.shard, whole), whole))
        out, lse = burst_attention(*shards, cp=cp, return_lse=True, kernel=kernel)
        expected_out, expected_lse = dense_attention(*dense, Causal())
        (out.square() * cp.shard(used, 0) * kept).sum().add(lse.square().sum()).backward()
        (expected_out.square() * used * kept).sum().add(expected_lse.square().sum()).backward()
        pairs = zip(shards, dense, strict=True)
        errors[name] = max((cp.unshard(t.grad) - truth.grad).abs().max().item() for t, truth in pairs)
    return errors


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
def test_the_lse_is_differentiable_also_where_the_output_was_not_used(kernel) -> None:
    for errors in run_on_ranks(2, lse_gradient_errors, kernel):
        assert {name: error for name, error in errors.items() if not error < 1e-10} == {}


def uses_of_models(schedule: str) -> dict[str, float]:
    """Largest difference of a gradient, summed over the ranks, to that of one process, by use: a weight that is both
    embedding and LM head, with every one of q, k and v frozen in turn or some of them on some ranks; two models on one
    context, whose graphs overlap."""
    cp = ContextParallel(node_size={"usp": 2, "double_ring": 1}.get(schedule))
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(16, (2, 24), generator=generator)
    weights = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((16, 32), (3, 32, 32))]

    def loss_of(leaves: list[torch.Tensor], cp: ContextParallel, frozen: set[int]) -> torch.Tensor:
        table, projections = leaves
        tokens = cp.shard(words)
        x = torch.nn.functional.embedding(tokens, table)
        qkv = [(x @ projection).unflatten(-1, (4, 8)) for projection in projections]
        qkv = [t.detach() if place in frozen else t for place, t in enumerate(qkv)]
        out = burst_attention(*qkv, cp=cp, schedule=schedule).flatten(-2)
        return (out @ table.T).logsumexp(-1).sum() / words.numel()

    def gradients(cp: ContextParallel, frozen: set[int], models: int = 1) -> list[torch.Tensor]:
        made = [[weight.mul(0.2 + 0.1 * number).requires_grad_() for weight in weights] for number in range(models)]
        losses = [loss_of(leaves, cp, frozen) for leaves in made]
        for loss in losses:  # all forwards are before the first backward
            loss.backward()
        found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaves in made for leaf in leaves]
        for gradient in found if cp.size > 1 else []:
            dist.all_reduce(gradient)
        return found

    alone, errors = ContextParallel.single(), {}
    uses = {"tied": (set(), 1), "two models": (set(), 2)}
    uses |= {f"frozen {place}": ({place}, 1) for place in range(3)} | {"frozen q and k": ({0, 1}, 1)}
    for name, (frozen, models) in uses.items():
        pairs = zip(gradients(cp, frozen, models), gradients(alone, frozen, models), strict=True)
        errors[name] = max((found - truth).abs().max().item() for found, truth in pairs)
    # Frozen on some ranks only: each still gets its own tokens' gradients of the others.
    shards = [cp.shard(torch.randn(1, 24, 4, 8, generator=generator, dtype=torch.float64)) for _ in range(3)]
    everything, some = ([t.clone().requires_grad_() for t in shards] for _ in range(2))
    some[cp.rank % 3].requires_grad_(False)
    for leaves in (everything, some):
        burst_attention(*leaves, cp=cp, schedule=schedule).square().sum().backward()
    kept = [place for place in range(3) if place != cp.rank % 3]
    errors["frozen on some ranks"] = max(
        (some[place].grad - everything[place].grad).abs().max().item() for place in kept
    )
    return errors


@pytest.mark.parametrize(
    ("schedule", "ranks"), [("double_ring", 2), ("ulysses", 2), *slow(("ring", 3), ("usp", 4), ("all_gather", 3))]
)
def test_tied_and_frozen_weights_and_two_models_on_one_context_have_the_gradients_of_one_process(
    schedule, ranks
) -> None:
    for errors in run_on_ranks(ranks, uses_of_models, schedule):
        assert {name: error for name, error in errors.items() if not error < 1e-10} == {}


def repeats_bit_for_bit() -> bool:
    cp = ContextParallel()
    q, k, v = shards(cp, 4, 4, torch.bfloat16)
    runs = []
    for _ in range(2):
        out = burst_attention(q, k, v, cp=cp, deterministic=True)
        runs.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    return all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


def test_a_deterministic_call_repeats_bit_for_bit() -> None:
    assert all(run_on_ranks(3, repeats_bit_for_bit))


def sharding_round_trip(layout: str) -> bool:
    cp = ContextParallel(layout=layout)
    whole = torch.arange(2 * 24 * 3).view(2, 24, 3)
    local = cp.shard(whole, 1)
    positions_match = torch.equal(local[0, :, 0], whole[0, cp.positions(24), 0])
    return positions_match and torch.equal(cp.unshard(local, 1), whole)


@pytest.mark.parametrize("layout", ["zigzag", *slow("contiguous", "striped")])
def test_sharding_follows_positions_and_is_undone_by_unsharding(layout) -> None:
    assert all(run_on_ranks(3, sharding_round_trip, layout))


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((1, 8, 4, 16), (1, 8, 3, 16)), "4 query heads are not divisible by 3"),
        (((1, 8, 4, 16), (1, 6, 4, 16)), "differ in batch, tokens or head_dim"),
        (((8, 4, 16), (8, 4, 16)), r"are not \[batch, tokens, heads, head_dim\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, words) -> None:
    q, k = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=words):
        burst_attention(q, k, k)


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"backward": "value"}, "backward 'value' is unknown"),
        ({"kernel": "fa9"}, "kernel 'fa9' is unknown"),
        ({"grad_comm_dtype": "fp8"}, "grad_comm_dtype 'fp8' is unknown"),
    ],
)
def test_unknown_choices_are_refused_with_the_known_ones(choice, words) -> None:
    q = torch.zeros(1, 8, 4, 16)
    with pytest.raises(ValueError, match=words):
        burst_attention(q, q, q, **choice)


def refused_length() -> str:
    cp = ContextParallel(layout="zigzag")
    try:
        burst_attention(*[torch.zeros(1, 5, 1, 8)] * 3, cp=cp)
    except ValueError as error:
        return str(error)
    return ""


def test_a_length_the_layout_cannot_split_is_refused_on_every_rank() -> None:
    assert all("nearest lengths that do: 8 and 12" in words for words in run_on_ranks(2, refused_length))


def test_the_choices_made_can_be_read_off_the_plan() -> None:
    q = torch.zeros(1, 8, 4, 16)
    plan = plan_attention(q, q, mask=Causal(), cp=ContextParallel())
    assert plan.resolved() == {
        "kernel": "cpu",
        "layout": "zigzag",
        "schedule": "ring",
        "backward": "query",
        "exchange": "none",
        "mask": "causal",
        "imbalance": "1.0000",
    }


def live_buffers(exchange: str) -> int:
    """Most received shards alive at once in a forward's circulation."""
    cp = ContextParallel(layout="contiguous")
    q = torch.zeros(1, 8, 2, 8)
    plan = plan_attention(q, q, mask=Full(), cp=cp, exchange=exchange)
    seen, most = weakref.WeakSet(), 0
    for step, chunk in ring_steps(plan, RemoteChunk((q, q), KEY_SIDE_DIMS), plan.comm_plan(sends_queries=False)):
        if step.inner_step:
            seen.update(tensor.untyped_storage() for tensor in chunk.tensors)
        most = max(most, len(seen))
        del chunk
    return most


@pytest.mark.parametrize("exchange", ["direct", *slow("relay")])
def test_transfer_buffers_do_not_grow_with_the_number_of_ranks(exchange) -> None:
    few, many = (max(run_on_ranks(size, live_buffers, exchange)) for size in (3, 6))
    assert 0 < many <= few <= 4


def direct_bytes() -> tuple[int, int]:
    """(forward, backward) bytes of rank 1 of 2, zigzag causal, query side, fp32."""
    cp = ContextParallel(layout="zigzag")
    q, k, v = shards(cp, 4, 4, torch.float32)
    out = burst_attention(q, k, v, cp=cp, backward="query", exchange="direct", kernel="reference")
    forward = cp.traffic.sent_bytes
    cp.traffic.reset()
    out.backward(torch.ones_like(out))
    return forward, cp.traffic.sent_bytes


def test_direct_transfers_send_only_tokens_that_the_receivers_mask_can_see() -> None:
    per_token = 4 * HEAD_DIM * 4  # heads x head_dim x bytes
    rows = 2 * 4 * 4  # LSE and delta of one token
    (forward_0, backward_0), (forward_1, backward_1) = run_on_ranks(2, direct_bytes)
    # Rank 1 (chunks 1 and 2) sees only the first half of rank 0's keys; rank 0's last chunk sees all of rank 1's.
    assert (forward_0, forward_1) == (8 * 2 * per_token, 16 * 2 * per_token)
    # Only the second half of rank 0's queries sees rank 1's keys, all of rank 1's queries see some of rank 0's.
    queries_0, queries_1 = 8 * (2 * per_token + rows), 16 * (2 * per_token + rows)
    # Each returns the other's dQ: as many tokens as it received.
    assert (backward_0, backward_1) == (queries_0 + 16 * per_token, queries_1 + 8 * per_token)


def window_bytes(exchange: str) -> int:
    cp = ContextParallel(layout="contiguous")
    q, k, v = shards(cp, 4, 4, torch.float32)
    burst_attention(q, k, v, cp=cp, mask=SlidingWindow(3), exchange=exchange, kernel="reference")
    return cp.traffic.sent_bytes


def test_a_window_sends_each_neighbour_only_its_last_few_tokens() -> None:
    sent = run_on_ranks(4, window_bytes, "direct")
    assert sent == [3 * 4 * HEAD_DIM * 4 * 2] * 3 + [0]


def bytes_between_nodes_of_one() -> int:
    """Backward bytes in bf16, every rank a node of its own."""
    cp = ContextParallel(layout="zigzag", node_size=1)
    q, k, v = shards(cp, 4, 4, torch.bfloat16)
    out = burst_attention(q, k, v, mask=Full(), cp=cp, backward="query", kernel="reference", schedule="double_ring")
    cp.traffic.reset()
    out.backward(torch.ones_like(out))
    return cp.traffic.sent_bytes


def test_a_double_ring_sends_each_gradient_across_nodes_once() -> None:
    step_bytes = 16 * 4 * (HEAD_DIM * (2 + 2) + 8)
    gradient = 16 * 4 * HEAD_DIM * 4
    assert run_on_ranks(3, bytes_between_nodes_of_one) == [2 * (step_bytes + gradient)] * 3


def bytes_of_a_window_across_nodes() -> tuple[int, int]:
    """(forward, backward) bytes in fp32 under a window of three earlier tokens, two nodes of two ranks."""
    cp = ContextParallel(layout="contiguous", node_size=2)
    q, k, v = shards(cp, 4, 4, torch.float32)
    choices = {"mask": SlidingWindow(3), "backward": "key_value", "exchange": "direct", "schedule": "double_ring"}
    out = burst_attention(q, k, v, cp=cp, kernel="reference", **choices)
    forward = cp.traffic.sent_bytes
    cp.traffic.reset()
    out.backward(torch.ones_like(out))
    return forward, cp.traffic.sent_bytes


def test_only_tokens_that_a_window_needs_are_sent_between_nodes() -> None:
    keys_and_values = 2 * 3 * 4 * HEAD_DIM * 4  # of three tokens
    # Rank 0 sends its last tokens to rank 1 and rank 2 to rank 3. Rank 1's go to rank 3, same slot of the next node,
    # and from there to rank 2. Backward sends them again and returns gradients, across nodes once.
    assert run_on_ranks(4, bytes_of_a_window_across_nodes) == [
        (keys_and_values, keys_and_values),
        (keys_and_values, 2 * keys_and_values),
        (keys_and_values, 2 * keys_and_values),
        (keys_and_values, 3 * keys_and_values),
    ]
