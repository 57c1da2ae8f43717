"""GPU memory that a rank holds to receive into by copy engine, from a trial's settings: no tensors, no communication.

Peers copy into slots of memory that torch's allocator does not manage (`engine.attention.comm.symm_mem`). They grow to
the largest message, at the first calls, and stay. The sizes are those of the messages that `engine.attention.comm` and
`engine.attention.algorithms` send; tests/engine/attention/planning/test_receive_slots.py compares them with the slots
that the ranks of one node make. Not counted: the slots of their own that passes captured as CUDA graphs have.
"""

from __future__ import annotations

import itertools

from engine.attention.geometry.layout import Gathered, Layout, as_layout
from engine.attention.geometry.ring import Ring
from engine.attention.masks import Mask, parse_mask
from engine.attention.planning.comm_plan import ring_tables
from engine.attention.planning.comm_volume import RingVolume, Shards, cheaper_backward, gradient_widths
from engine.attention.planning.cost_model import (
    HardwareModel,
    choose_num_head_chunks,
    choose_schedule,
    model_chooses,
    ring_by_name,
    schedule_unsupported_reason,
)
from engine.attention.planning.layout_choice import trial_layout
from engine.attention.planning.workload import workload_of
from engine.settings import BYTES_OF, TrialSettings

CHUNK_SLOTS = 2  # one chunk is used while the next arrives
HELD_GRADIENTS = 2  # received gradients that may wait in their slots, to be summed together, while the next is awaited
GRADIENT_SLOTS = HELD_GRADIENTS + 1
HEAD_SLOTS = 2  # in each direction: one head chunk is used while the next arrives


def receive_slot_bytes(settings: TrialSettings) -> int:
    """Bytes of all receive slots of the fullest rank in a trial of method `burst` whose GPUs of a node can copy into
    each other's memory; 0 where nothing moves by copy engine. A node is one of `emulate_nodes`; between nodes `auto`
    chooses as with the cost model's own speed of the link, which ranks measure.

    A schedule that cannot run has no slots: the trial is refused elsewhere.
    """
    nodes, cp_size = settings.emulate_nodes, settings.cp_size
    node_size = cp_size // nodes
    if cp_size % nodes or node_size == 1 or settings.exchange not in ("auto", "copy_engine"):
        return 0
    layout, schedule = as_layout(trial_layout(settings)), str(settings.schedule)
    recompute = settings.task == "train" and settings.checkpoint.reuses_attention(settings.model.layers)
    asks = model_chooses(schedule, settings.backward, settings.exchange)
    shape, mask, item = settings.model, parse_mask(settings.mask), BYTES_OF[settings.dtype]
    wire = "fp32" if settings.grad_comm_dtype == "auto" else settings.grad_comm_dtype
    first, later, across = gradient_widths(wire, item, written=item)  # as kernels of GPUs write them
    workload = workload_of(
        mask, layout, cp_size=cp_size, node_size=node_size, seq_len=settings.seq_len, batch=settings.batch_size,
        heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim, input_bytes=item,
        gradient_bytes=(across if nodes > 1 else first).summed,
        recompute=recompute, counts_traffic=asks,
    )  # fmt: skip
    hardware = HardwareModel()
    if schedule == "auto":
        schedule = choose_schedule(workload, layout.name, hardware).best if asks else ring_by_name(nodes)
    if schedule_unsupported_reason(schedule, workload, layout.name):
        return 0
    chunks = choose_num_head_chunks(schedule, workload, hardware)
    shared_by = nodes if schedule == "usp_transposed" else 1  # whose heads are divided among nodes, before a ring
    ring = Ring(cp_size=node_size if shared_by > 1 else cp_size, node_size=node_size)
    shards = Shards(
        batch=settings.batch_size, tokens=settings.seq_len // ring.cp_size, heads=shape.heads // shared_by,
        kv_heads=shape.kv_heads // shared_by, head_dim=shape.head_dim, input_bytes=item,
        intra_node=first, inter_node=across, later_rings=later,
    )  # fmt: skip
    if schedule == "usp" or (schedule == "ulysses" and nodes == 1):
        return _of_heads(shards, recompute) // chunks
    if schedule == "usp_transposed":
        columns = tuple(tuple(range(first, cp_size, node_size)) for first in range(node_size))
        return _of_ring(settings, mask, Gathered(layout, columns), ring, shards, hardware) // chunks
    if schedule == "double_ring" or (schedule == "ring" and nodes == 1):
        return _of_ring(settings, mask, layout, ring, shards, hardware)
    return 0  # between nodes and in collectives nothing is copied


def _of_heads(shards: Shards, recompute: bool) -> int:
    """Of an all-to-all of all heads at once: q, k and v arrive, results return; backward sends again what it has not
    saved, with dout and rows of LSE and delta."""
    query, key_value, row = (each * shards.tokens for each in (shards.query, 2 * shards.key, shards.row))
    outbound = 2 * query + key_value + 2 * row if recompute else query + max(key_value, row)
    return HEAD_SLOTS * (outbound + query + max(key_value, row))


def _of_ring(
    settings: TrialSettings, mask: Mask, layout: Layout, ring: Ring, shards: Shards, hardware: HardwareModel
) -> int:
    """Of the inner rings: forward receives keys and values, backward the side that is sent, and its gradients."""
    seq_len, side = settings.seq_len, str(settings.backward)
    if side == "auto":
        volume = RingVolume(ring=ring, node_size=ring.node_size, exchange="copy_engine")
        side = cheaper_backward(mask, layout, volume, seq_len, shards, hardware)
    sends_queries = side == "query"
    keys, _ = ring_tables(mask, layout, ring, seq_len, False).in_nodes
    sent, unreduced = ring_tables(mask, layout, ring, seq_len, sends_queries).in_nodes
    chunk = max(2 * shards.key * max(map(max, keys)), shards.sent_side(sends_queries) * max(map(max, sent)))
    gradient = 0
    for here, there in itertools.product(range(ring.nodes), repeat=2):  # nodes that compute, and that own the chunk
        width = shards.inside((here - there) % ring.nodes).of(unreduced[here][there])
        gradient = max(gradient, sent[here][there] * shards.gradient(sends_queries, width))
    return CHUNK_SLOTS * chunk + GRADIENT_SLOTS * gradient
