"""Each native baseline sends the bytes of its original: the original's own formula, with the place it was read in,
against the bytes that the plan computes and those that gloo ranks counted.

Where one sends fewer or more, the difference is a term of its own here and stands in its module's docstring.
A kernel that writes gradients in the inputs' dtype stands for those of GPUs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from engine import ContextParallel
from engine.settings import TrialSettings
from harness.spec.methods import method_module
from tests.baselines.attention_runs import SHAPE, settings_for
from tests.engine.attention.planning.test_comm_volume import WritesInputs
from tests.ranks import run_on_ranks

BATCH, TOKENS = 2, 8  # of a rank
RANKS, NODE = 4, 2
BF16, FP32 = 2, 4
FEW = replace(SHAPE, name="few", kv_heads=2)


@dataclass(frozen=True)
class Elements:
    """Of one rank's shards."""

    query: int = BATCH * TOKENS * SHAPE.heads * SHAPE.head_dim
    key: int = BATCH * TOKENS * SHAPE.kv_heads * SHAPE.head_dim
    rows: int = BATCH * TOKENS * SHAPE.heads


E = Elements()


def bytes_sent(module: str, trials: list[TrialSettings], node_size: int) -> list[tuple[int, int]]:
    """(bytes the plan computes, bytes counted) of a bf16 forward and backward of each."""
    method, found = importlib.import_module(module).METHOD, []
    for settings in trials:
        cp, shape = ContextParallel(layout=method.layout(settings), node_size=node_size), settings.model
        heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        q, k, v = (
            torch.ones(BATCH, TOKENS, n, shape.head_dim, dtype=torch.bfloat16, requires_grad=True) for n in heads
        )
        kernel = WritesInputs()
        with mock.patch("engine.attention.plan.choose_kernel", return_value=kernel):
            attend = method.attention(cp, settings)
            attend(q, k, v)[0].sum().backward()
        found.append((attend.computed_sent().total, cp.traffic.sent_bytes))
    return found


def transformer_engine_p2p() -> int:
    """TransformerEngine 2.12, context_parallel.py, AttnFuncWithCPAndKVP2P: `p2p_comm_buffers` hold K and V, in backward
    also dK and dV, all in the dtype of K; P - 1 steps send K and V in each pass, and P - 1 send dK and dV."""
    return 3 * (RANKS - 1) * 2 * E.key * BF16


def transformer_engine_all_gather() -> int:
    """The same file, AttnFuncWithCPAndKVAllGather: K and V gathered in both passes, dK and dV reduced and scattered."""
    return 3 * (RANKS - 1) * 2 * E.key * BF16


def all_to_all(ranks: int, query: int, key: int) -> int:
    """q, k, v and out, and the gradients of each: 1 - 1/P of them leave the rank."""
    return 2 * (2 * query + 2 * key) * BF16 * (ranks - 1) // ranks


def our_rows(ranks: int) -> int:
    """Ours alone: the LSE of a rank's own tokens, and delta in place of a saved second O."""
    return 2 * E.rows * FP32 * (ranks - 1) // ranks


def transformer_engine_a2a() -> int:
    """The same file, AttnFuncWithCPAndQKVOA2A."""
    return all_to_all(RANKS, E.query, E.key) + our_rows(RANKS)


def transformer_engine_a2a_p2p() -> int:
    """AttnFuncWithCPAndKVP2P with cp_size_a2a > 1: an all-to-all inside, then a ring of the other ranks' chunks."""
    return all_to_all(NODE, E.query, E.key) + our_rows(NODE) + 3 * (RANKS // NODE - 1) * 2 * E.key * BF16


def loongtrain_double_ring() -> int:
    """InternEvo in thunlp/BurstEngine@426eb7a, zigzag_ring_flash_attn_with_sliding_window.py. K and V: W - 1 steps in
    each of n windows and n - 1 between them, in both passes. dK and dV: W steps in each window, fp32 in the first and
    the inputs' dtype in the others, and n between windows: the last of each returns them to where they began.

    Ours keeps a rank's own part where it is: one step less in each window, and one less between windows."""
    windows, keys = RANKS // NODE, 2 * E.key
    forward = (windows * (NODE - 1) + windows - 1) * keys * BF16
    gradients = NODE * keys * FP32 + (windows - 1) * NODE * keys * BF16 + windows * keys * BF16
    returning = keys * FP32 + (windows - 1) * keys * BF16 + keys * BF16
    return 2 * forward + gradients - returning


def loongtrain_head_first() -> int:
    """InternEvo's all-to-all of heads inside a node, the double ring above with windows of one rank across nodes."""
    windows, keys = RANKS // NODE, 2 * E.key
    ring = 2 * (windows - 1) * keys * BF16 + windows * keys * BF16
    return all_to_all(NODE, E.query, E.key) + our_rows(NODE) + ring - keys * BF16


def loongtrain_context_first() -> int:
    """The same with the ring inside a node, one window of all its ranks, and the all-to-all across nodes."""
    keys = 2 * E.key
    ring = 2 * (NODE - 1) * keys * BF16 + NODE * keys * FP32
    return all_to_all(RANKS // NODE, E.query, E.key) + our_rows(RANKS // NODE) + ring - keys * FP32


def deepspeed() -> int:
    """DeepSpeed 0.19.8, sequence/layer.py, DistributedAttention: one all-to-all for each of q, k, v and the output."""
    return all_to_all(RANKS, E.query, E.key) + our_rows(RANKS)


def deepspeed_few_kv_heads() -> int:
    """DeepSpeed 0.19.8, runtime/sequence_parallel/ulysses_sp.py: K and V heads are repeated to P, then exchanged."""
    repeated = BATCH * TOKENS * RANKS * SHAPE.head_dim
    return all_to_all(RANKS, E.query, repeated) + our_rows(RANKS)


def ring_attention() -> int:
    """haoliuhl/ringattention@d2dd057, ringattention_jax.py: P permutations of K and V in forward, P of K, V, dK and dV
    in backward, the gradients in fp32 (`float32_logits`, the default, makes K fp32 as well). Ours keeps K in the
    inputs' dtype, and leaves the last permutation of each pass out, which returns the chunks to their owners."""
    keys = 2 * E.key
    original = RANKS * (2 * keys * BF16 + keys * FP32)
    return original - (2 * keys * BF16 + keys * FP32)


def torch_context_parallel() -> int:
    """torch 2.13, _context_parallel/_attention.py: K and V gathered in each pass (`_AllGatherRotater`), dK and dV
    permuted P times in fp32 (`_AllToAllRotater`, `convert_to_f32`)."""
    keys = 2 * E.key
    return 2 * (RANKS - 1) * keys * BF16 + RANKS * keys * FP32


# Between nodes the originals send whole chunks, ours the tokens that the mask lets the other nodes see: all of these.
FULL = {"mask": "full"}
CASES: list[tuple[str, dict[str, Any], Callable[[], int]]] = [
    ("megatron_cp", {}, transformer_engine_p2p),
    ("megatron_cp", {"schedule": "all_gather"}, transformer_engine_all_gather),
    ("megatron_cp", {"schedule": "ulysses"}, transformer_engine_a2a),
    ("megatron_cp", {"schedule": "usp", **FULL}, transformer_engine_a2a_p2p),
    ("loongtrain_double_ring", FULL, loongtrain_double_ring),
    ("loongtrain_usp", FULL, loongtrain_head_first),
    ("loongtrain_usp", {"schedule": "usp_transposed"}, loongtrain_context_first),
    ("ulysses", {}, deepspeed),
    ("ulysses", {"model": FEW}, deepspeed_few_kv_heads),
    ("ring", {}, ring_attention),
]


def test_a_native_form_sends_the_bytes_of_its_original() -> None:
    for name in dict.fromkeys(name for name, _, _ in CASES):
        cases = [(changes, formula) for each, changes, formula in CASES if each == name]
        trials = [settings_for(name, RANKS, dtype="bf16", **changes) for changes, _ in cases]
        for of_rank in run_on_ranks(RANKS, bytes_sent, method_module(name), trials, NODE):
            expected = [(formula(), formula()) for _, formula in cases]
            assert of_rank == expected, (name, [formula.__name__ for _, formula in cases])


def test_between_nodes_a_causal_mask_leaves_fewer_bytes_than_the_originals_send() -> None:
    for name, changes, formula in CASES:
        if changes.get("mask") == "full":
            trials = [settings_for(name, RANKS, dtype="bf16", **changes | {"mask": "causal"})]
            found = [of_rank for (of_rank,) in run_on_ranks(RANKS, bytes_sent, method_module(name), trials, NODE)]
            assert all(computed == counted <= formula() for computed, counted in found)
            assert min(found) < (formula(), formula())


class Posted:
    """Bytes that torch's functional collectives send to other ranks, while it is used as a context."""

    def __init__(self) -> None:
        import torch.distributed._functional_collectives as collectives

        self.sent, self._module = 0, collectives
        names = ("all_gather_single", "all_gather_tensor", "permute_tensor")
        self._originals = {name: getattr(collectives, name) for name in names if hasattr(collectives, name)}

    def __enter__(self) -> Posted:
        for name, original in self._originals.items():
            setattr(self._module, name, self._counting(original, 1 if name == "permute_tensor" else RANKS - 1))
        return self

    def __exit__(self, *_: object) -> None:
        for name, original in self._originals.items():
            setattr(self._module, name, original)

    def _counting(self, original: Callable[..., Any], times: int) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, *args: Any, **named: Any) -> Any:
            self.sent += times * tensor.numel() * tensor.itemsize
            with mock.patch.multiple(self._module, **self._originals):  # one may call another
                return original(tensor, *args, **named)

        return call


def torch_bytes(settings: TrialSettings) -> tuple[int, int, int]:
    """(computed, counted by the context, sent by torch's collectives) of a bf16 forward and backward."""
    method = importlib.import_module(method_module("torch_cp")).METHOD
    cp, shape = ContextParallel(layout=method.layout(settings), node_size=NODE), settings.model
    q, k, v = (
        torch.ones(BATCH, TOKENS, n, shape.head_dim, dtype=torch.bfloat16, requires_grad=True)
        for n in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    attend = method.attention(cp, settings)
    with Posted() as posted:
        attend(q, k, v)[0].sum().backward()
    dist.barrier()
    return attend.computed_sent().total, cp.traffic.sent_bytes, posted.sent


def test_torchs_ring_sends_what_its_code_says() -> None:
    settings = settings_for("torch_cp", RANKS, dtype="bf16")
    assert run_on_ranks(RANKS, torch_bytes, settings) == [(torch_context_parallel(),) * 3] * RANKS


MIB = 1 << 20


@pytest.mark.parametrize(("sent", "expected"), [("auto", 2304), ("fp32", 3072)])
def test_megatrons_ring_sends_2304_mib_of_a_7b_layer_at_64k_on_four_ranks(sent: str, expected: int) -> None:
    from engine.attention.comm_plan import comm_plan
    from engine.attention.comm_volume import GradientWidths, RingVolume, Shards, narrowed
    from engine.attention.geometry.layout import Ring, layout_named
    from engine.attention.masks import Causal
    from harness.spec.methods import method_named

    taken = method_named("megatron_cp").grad_comm_dtype if sent == "auto" else sent
    width = GradientWidths(2, 2 if narrowed(taken).first_ring else 4)
    shards = Shards(
        batch=1, tokens=16384, heads=32, kv_heads=32, head_dim=128, input_bytes=2, intra_node=width, inter_node=width
    )
    ring = Ring(cp_size=4, node_size=4)
    work = comm_plan(Causal(), layout_named("zigzag"), ring, 65536, 0, False)
    volume = RingVolume(ring=ring, node_size=4, exchange="relay")
    forward, backward = volume.chunks(work, 0, shards.tokens, shards.key_side), volume.backward(work, 0, shards, False)
    assert (forward + backward).total == expected * MIB
