"""GPU memory that a rank holds to receive into by copy engine, from a trial's settings: no tensors, no communication.

Peers copy into slots of memory that torch's allocator does not manage (`engine.attention.comm.symm_mem`). They grow to
the largest message, at the first calls, and stay. The sizes are those of the messages that `engine.attention.comm` and
`engine.attention.algorithms` send; tests/engine/attention/planning/test_receive_slots.py compares them with the slots
that the ranks of one node make.
"""

from __future__ import annotations

import itertools

from engine.attention.geometry.layout import as_layout
from engine.attention.masks import parse_mask
from engine.attention.planning.comm_plan import ring_tables
from engine.attention.planning.comm_volume import Shards
from engine.attention.planning.cost_model import HardwareModel, chosen_schedule
from engine.attention.planning.layout_choice import trial_layout
from engine.attention.planning.workload import TrialRing, recomputes_attention, trial_ring, trial_workload
from engine.settings import TrialSettings

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
    layout, hardware = as_layout(trial_layout(settings)), HardwareModel()
    try:
        schedule, chunks, _ = chosen_schedule(
            trial_workload(settings, layout, node_size), layout.name, hardware,
            schedule=settings.schedule, backward=settings.backward, exchange=settings.exchange,
        )  # fmt: skip
    except ValueError:
        return 0
    if schedule == "usp" or (schedule == "ulysses" and nodes == 1):
        shards = trial_ring(settings, "ring", layout, node_size).shards  # of a rank before the all-to-all
        return _of_heads(shards, recomputes_attention(settings)) // chunks
    if schedule in ("usp_transposed", "double_ring") or (schedule == "ring" and nodes == 1):
        return _of_ring(settings, trial_ring(settings, schedule, layout, node_size), hardware) // chunks
    return 0  # between nodes and in collectives nothing is copied


def _of_heads(shards: Shards, recompute: bool) -> int:
    """Of an all-to-all of all heads at once: q, k and v arrive, results return; backward sends again what it has not
    saved, with dout and rows of LSE and delta."""
    query, key_value, row = (each * shards.tokens for each in (shards.query, 2 * shards.key, shards.row))
    outbound = 2 * query + key_value + 2 * row if recompute else query + max(key_value, row)
    return HEAD_SLOTS * (outbound + query + max(key_value, row))


def _of_ring(settings: TrialSettings, one: TrialRing, hardware: HardwareModel) -> int:
    """Of the inner rings: forward receives keys and values, backward the side that is sent, and its gradients."""
    mask, layout, ring, shards = parse_mask(settings.mask), one.layout, one.ring, one.shards
    seq_len, side = settings.seq_len, str(settings.backward)
    if side == "auto":
        side = one.cheaper_backward(settings, hardware)
    sends_queries = side == "query"
    keys, _ = ring_tables(mask, layout, ring, seq_len, False).in_nodes
    sent, unreduced = ring_tables(mask, layout, ring, seq_len, sends_queries).in_nodes
    chunk = max(2 * shards.key * max(map(max, keys)), shards.sent_side(sends_queries) * max(map(max, sent)))
    gradient = 0
    for here, there in itertools.product(range(ring.nodes), repeat=2):  # nodes that compute, and that own the chunk
        width = shards.inside((here - there) % ring.nodes).of(unreduced[here][there])
        gradient = max(gradient, sent[here][there] * shards.gradient(sends_queries, width))
    return CHUNK_SLOTS * chunk + GRADIENT_SLOTS * gradient
