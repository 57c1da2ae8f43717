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
from tests.plans import plan_attention
from tests.ranks import run_on_ranks
from tests.slow import slow

TOKENS, HEADS, HEAD_DIM = 16, 4, 128


def shards(cp: ContextParallel, heads: int, kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(cp.rank)
    shapes = [(1, TOKENS, n, HEAD_DIM) for n in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


Sent = tuple[int, int]  # bytes of a forward, and of its backward


def bytes_sent(calls: dict[str, dict[str, object]]) -> dict[str, Sent]:
    """What this rank sends in each call, of 16 tokens of 4 heads in bf16 unless the call says otherwise."""
    found = {}
    for name, call in calls.items():
        given = {"layout": "zigzag", "node_size": None, "heads": 4, "kv_heads": 4, "dtype": torch.bfloat16} | call
        cp = ContextParallel(layout=given.pop("layout"), node_size=given.pop("node_size"))
        q, k, v = shards(cp, given.pop("heads"), given.pop("kv_heads"), given.pop("dtype"))
        out = burst_attention(q, k, v, cp=cp, kernel="reference", **given)
        forward = cp.traffic.sent_bytes
        cp.traffic.reset()
        out.backward(torch.ones_like(out))
        found[name] = forward, cp.traffic.sent_bytes
    return found


def test_the_query_side_sends_a_quarter_to_a_third_fewer_bytes_and_each_gradient_crosses_nodes_once() -> None:
    relay = {"exchange": "relay"}
    calls = {
        f"{side} {dtype}": {"backward": side, "grad_comm_dtype": dtype, **relay}
        for side in ("query", "key_value")
        for dtype in ("fp32", "input")
    }
    nodes_of_one = {"node_size": 1, "mask": Full(), "backward": "query", "schedule": "double_ring"}
    rows, steps = TOKENS * HEADS, 2
    for found in run_on_ranks(3, bytes_sent, calls | {"nodes of one": nodes_of_one}):
        # Every rank is a node of its own: what is sent in steps, then the gradient.
        assert found.pop("nodes of one")[1] == 2 * (rows * (HEAD_DIM * (2 + 2) + 8) + rows * HEAD_DIM * 4)
        assert {forward for forward, _ in found.values()} == {steps * rows * HEAD_DIM * 4}
        for dtype, width, saving in (("fp32", 4, 0.33), ("input", 2, 0.24)):
            query, key_value = found[f"query {dtype}"][1], found[f"key_value {dtype}"][1]
            assert query == steps * rows * (HEAD_DIM * (4 + width) + 8)
            assert key_value == steps * rows * HEAD_DIM * (4 + 2 * width)
            assert 1 - query / key_value == pytest.approx(saving, abs=0.005)


def test_grouped_heads_are_sent_unrepeated_and_direct_transfers_send_only_what_the_receivers_mask_sees() -> None:
    grouped = {"heads": 8, "kv_heads": 2, "backward": "key_value", "grad_comm_dtype": "input", "exchange": "relay"}
    direct = {"dtype": torch.float32, "backward": "query", "exchange": "direct"}
    first, second = run_on_ranks(2, bytes_sent, {"grouped": grouped, "direct": direct})
    assert first["grouped"] == second["grouped"] == (TOKENS * 2 * HEAD_DIM * 4, TOKENS * 2 * HEAD_DIM * 8)
    per_token = HEADS * HEAD_DIM * 4
    rows = 2 * HEADS * 4  # LSE and delta of one token
    (forward_0, backward_0), (forward_1, backward_1) = first["direct"], second["direct"]
    # Rank 1 (chunks 1 and 2) sees only the first half of rank 0's keys; rank 0's last chunk sees all of rank 1's.
    assert (forward_0, forward_1) == (8 * 2 * per_token, 16 * 2 * per_token)
    # Only the second half of rank 0's queries sees rank 1's keys, all of rank 1's queries see some of rank 0's.
    queries_0, queries_1 = 8 * (2 * per_token + rows), 16 * (2 * per_token + rows)
    # Each returns the other's dQ: as many tokens as it received.
    assert (backward_0, backward_1) == (queries_0 + 16 * per_token, queries_1 + 8 * per_token)


def test_a_window_sends_the_last_few_tokens_alone_also_between_nodes() -> None:
    window = {"layout": "contiguous", "dtype": torch.float32, "mask": SlidingWindow(3), "exchange": "direct"}
    calls = {"node": window, "nodes": window | {"node_size": 2, "backward": "key_value", "schedule": "double_ring"}}
    found = run_on_ranks(4, bytes_sent, calls)
    keys_and_values = 2 * 3 * HEADS * HEAD_DIM * 4  # of three tokens
    assert [rank["node"][0] for rank in found] == [keys_and_values] * 3 + [0]
    # Rank 0 sends its last tokens to rank 1 and rank 2 to rank 3. Rank 1's go to rank 3, same slot of the next node,
    # and from there to rank 2. Backward sends them again and returns gradients, across nodes once.
    assert [rank["nodes"] for rank in found] == [(keys_and_values, n * keys_and_values) for n in (1, 2, 2, 3)]


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
