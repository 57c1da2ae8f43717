"""Receive slots by a trial's settings alone, beside those that its attention makes on ranks of a node."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from engine import ContextParallel
from engine.attention.comm_volume import CHUNK_SLOTS, GRADIENT_SLOTS, HEAD_SLOTS
from engine.attention.geometry.tiles import Band
from engine.attention.kernels import BackwardInputs, Gradients
from engine.attention.kernels.reference import ReferenceKernel
from engine.attention.masks import parse_mask
from engine.attention.op import run_attention
from engine.attention.resolve import trial_layout
from engine.checkpoint.planning.memory import receive_slot_bytes
from engine.settings import Checkpoint, TrialSettings
from engine.shape import ModelShape
from tests.engine.attention.comm.symm_mem.node_on_host import become_a_gpu, by_copy_engine
from tests.plans import plan_attention
from tests.ranks import run_on_ranks
from tests.slow import slow

SEQ_LEN, HEADS, KV_HEADS, HEAD_DIM = 512, 8, 4, 16
SHAPE = ModelShape(
    name="s", layers=1, hidden=128, ffn=128, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, vocab=64
)  # fmt: skip
COUNTERS = 1024  # bytes of each buffer's counters at most, for four ranks
CASES = [
    {"schedule": "ring", "backward": backward, "mask": mask, "checkpoint": checkpoint, "grad_comm_dtype": dtype}
    for backward, mask, checkpoint, dtype in itertools.product(
        ("auto", "query", "key_value"),
        ("causal", "sliding_window:75", "documents:125,387"),
        (Checkpoint(), Checkpoint(tail=0.5)),
        ("auto", "input"),
    )
]
CASES += [{"schedule": "ulysses", "checkpoint": checkpoint} for checkpoint in (Checkpoint(every=0), Checkpoint())]
CASES += [{"schedule": schedule, "batch_size": 2} for schedule in ("ring", "ulysses")]
# 40 numbers of a token in place of keys and values of all heads.
LATENT = replace(SHAPE, kv_heads=HEADS, kv_latent=32, rope_dim=8, value_dim=24)
CASES += [
    {"model": LATENT, "schedule": schedule, "backward": backward, "checkpoint": checkpoint}
    for schedule, backward, checkpoint in (
        ("ring", "query", Checkpoint()), ("ring", "auto", Checkpoint(tail=0.5)), ("ulysses", "auto", Checkpoint()),
        ("ulysses", "auto", Checkpoint(every=0)),
    )
]  # fmt: skip
FEW = CASES[:-8:5] + CASES[-8:]  # each value of each setting


def trial(cp_size: int, **changes: Any) -> TrialSettings:
    return TrialSettings(
        task="train", method="burst", seq_len=SEQ_LEN, cp_size=cp_size, world_size=cp_size, dtype="bf16",
        **{"model": SHAPE} | changes,
    )  # fmt: skip


class _InputDtype(ReferenceKernel):
    """Writes gradients as the kernels of GPUs do."""

    writes_input_dtype = True

    def backward(self, given: BackwardInputs, band: Band, scale: float, deterministic: bool) -> Gradients:
        dq, dk, dv = super().backward(given, band, scale, deterministic)
        return dq.to(torch.bfloat16), dk.to(torch.bfloat16), dv.to(torch.bfloat16)


def slots_of(settings: TrialSettings) -> int:
    """Bytes that this rank holds after a forward and its backward."""
    cp = ContextParallel(layout=trial_layout(settings))
    model, heads, expand = settings.model, [(HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM)], None
    if model.kv_latent:
        heads = [(HEADS, HEAD_DIM), (1, model.rope_dim), (1, model.kv_latent)]
        expand = torch.randn(HEADS, model.expanded_dims, model.kv_latent, dtype=torch.bfloat16).requires_grad_()
    shapes = [(settings.batch_size, SEQ_LEN // cp.size, *own) for own in heads]
    shards = [torch.randn(shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    recompute = settings.checkpoint.reuses_attention(SHAPE.layers)
    with mock.patch("engine.attention.plan.choose_kernel", return_value=_InputDtype()):
        plan = plan_attention(
            *shards, expand_NXC=expand, mask=parse_mask(settings.mask), cp=cp, schedule=settings.schedule,
            backward=settings.backward, recompute=recompute,
            grad_comm_dtype="fp32" if settings.grad_comm_dtype == "auto" else settings.grad_comm_dtype,
        )  # fmt: skip
    plan = by_copy_engine(plan, dist.group.WORLD)
    run_attention(plan, *shards, expand_NXC=expand, recompute=recompute).sum().backward()
    assert expand is None or expand.grad.norm() > 0
    return cp.traffic.window_bytes


def slots_of_all(cases: list[dict[str, Any]]) -> list[int]:
    become_a_gpu()
    return [slots_of(trial(dist.get_world_size(), **case)) for case in cases]


@pytest.mark.parametrize(("ranks", "cases"), [(2, FEW), *slow((2, CASES), (4, CASES))])
def test_slots_are_as_large_as_those_that_ranks_make(ranks: int, cases: list[dict[str, Any]]) -> None:
    by_rank = run_on_ranks(ranks, slots_of_all, cases)
    for case, *found in zip(cases, *by_rank, strict=True):
        counted = receive_slot_bytes(trial(ranks, **case))
        assert counted <= max(found) <= counted + 2 * COUNTERS, case
    assert len({max(found) for found in zip(*by_rank, strict=True)}) > 5  # the cases differ


def test_nothing_is_received_in_slots_but_by_copy_engine_inside_a_node() -> None:
    assert receive_slot_bytes(trial(1)) == 0
    assert receive_slot_bytes(trial(4, exchange="relay")) == receive_slot_bytes(trial(4, exchange="direct")) == 0
    assert receive_slot_bytes(trial(4, schedule="all_gather")) == 0
    assert receive_slot_bytes(trial(4, emulate_nodes=4)) == receive_slot_bytes(trial(4, emulate_nodes=3)) == 0
    assert receive_slot_bytes(trial(4, emulate_nodes=2, schedule="ring")) == 0  # a flat ring's neighbours are anywhere
    assert receive_slot_bytes(trial(4, emulate_nodes=2, schedule="ulysses")) == 0


def test_slots_of_two_nodes_of_two_are_those_of_the_part_inside_a_node() -> None:
    """Full attention over contiguous shards: every rank needs all of every chunk, and no gradient of one is a sum."""
    query, key_value = (SEQ_LEN // 4 * heads * HEAD_DIM * 2 for heads in (HEADS, 2 * KV_HEADS))

    def slots(schedule: str, **changes: Any) -> int:
        fixed = {"mask": "full", "backward": "key_value", "emulate_nodes": 2, "schedule": schedule} | changes
        return receive_slot_bytes(trial(4, **fixed))

    assert slots("double_ring") == CHUNK_SLOTS * key_value + GRADIENT_SLOTS * key_value
    # Half of the heads, of twice the tokens.
    assert slots("usp_transposed") == CHUNK_SLOTS * key_value + GRADIENT_SLOTS * key_value
    rows = SEQ_LEN // 4 * HEADS * 4
    assert slots("usp") == HEAD_SLOTS * (2 * query + key_value + 2 * rows + query + key_value)
    assert slots("usp", checkpoint=Checkpoint(every=0)) == HEAD_SLOTS * 2 * (query + key_value)
    # Causal zigzag: a rank's gradients of a chunk of its node are those of several tiles, so they are sums in fp32, but
    # where the setting sends them in the inputs' dtype: of the node's own chunks, or of all.
    sums = {
        dtype: slots("double_ring", mask="causal", layout="zigzag", grad_comm_dtype=dtype)
        for dtype in ("fp32", "input_after_first", "input")
    }
    assert sums["fp32"] >= sums["input_after_first"] >= sums["input"] == slots("double_ring")


def test_auto_is_the_schedule_that_attention_takes() -> None:
    """Only where backward side and exchange are open too does the cost model choose; else it is a ring."""
    heads = replace(SHAPE, heads=32, kv_heads=32, head_dim=128)

    def slots(**changes: Any) -> int:
        return receive_slot_bytes(replace(trial(8, **changes), model=heads, seq_len=1 << 18))

    assert slots() == slots(schedule="ulysses") != slots(schedule="ring")
    for by_hand in ({"backward": "key_value"}, {"backward": "query"}, {"exchange": "copy_engine"}):
        assert slots(**by_hand) == slots(schedule="ring", **by_hand)
        assert slots(emulate_nodes=2, **by_hand) == slots(emulate_nodes=2, schedule="double_ring", **by_hand)


def test_head_chunks_share_the_slots() -> None:
    shape = replace(SHAPE, heads=32, kv_heads=32, head_dim=128)
    long = replace(trial(2, schedule="ulysses", checkpoint=Checkpoint(every=0)), model=shape, seq_len=1 << 17)
    query = (1 << 16) * 32 * 128 * 2
    at_once = HEAD_SLOTS * (3 * query + 3 * query)  # q, k and v one way, dq, dk and dv the other
    assert receive_slot_bytes(long) == at_once // 2  # two chunks of heads
