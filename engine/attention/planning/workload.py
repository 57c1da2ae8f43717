"""One rank's part of a problem, as the cost model reads it: from the mask, the layout and sizes that all ranks share.

No rank's own number enters it, so that every rank estimates, and chooses, the same. `trial_workload` and `trial_ring`
say it of a trial's settings alone: what a prediction chooses by is then what the ranks choose by.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.attention.geometry.layout import Gathered, Layout
from engine.attention.geometry.ring import Ring, RingTraffic
from engine.attention.masks import Mask, parse_mask
from engine.attention.planning.comm_plan import traffic_left
from engine.attention.planning.comm_volume import RingVolume, Shards, cheaper_backward, gradient_widths, narrowed
from engine.attention.planning.cost_model import HardwareModel, Workload, model_chooses
from engine.settings import BYTES_OF, TrialSettings


def workload_of(
    mask: Mask,
    layout: Layout,
    *,
    cp_size: int,
    node_size: int,
    seq_len: int,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    input_bytes: int,
    grad_comm_dtype: str = "fp32",
    recompute: bool = False,
    counts_traffic: bool = True,
) -> Workload:
    """The workload of attention over `seq_len` tokens in all.

    `input_bytes` are per element of Q, K and V; a gradient's are those at the slowest links that it crosses. Without
    `counts_traffic` a ring counts with all its steps and bytes, whatever the mask leaves.
    """
    narrow = narrowed(grad_comm_dtype)
    at_slowest = narrow.across if node_size < cp_size else narrow.first_ring
    gradient_bytes = input_bytes if at_slowest else max(4, input_bytes)
    query_elements = batch * (seq_len // cp_size) * heads * head_dim
    return Workload(
        cp_size=cp_size,
        node_size=node_size,
        heads=heads,
        kv_heads=kv_heads,
        query_bytes=query_elements * input_bytes,
        gradient_factor=gradient_bytes / input_bytes,
        forward_flops=4.0 * batch * heads * head_dim * mask.area(seq_len) / cp_size,
        rows=batch * (seq_len // cp_size),
        left=traffic_left(mask, layout, cp_size, node_size, seq_len) if counts_traffic else RingTraffic(),
        recompute=recompute,
    )


def recomputes_attention(settings: TrialSettings) -> bool:
    """Whether a trial's attention is called again in backward, with outputs that checkpointing has kept."""
    return settings.task == "train" and settings.checkpoint.reuses_attention(settings.model.layers)


def trial_grad_comm_dtype(settings: TrialSettings) -> str:
    """The dtype of partial gradients between ranks of a trial of method `burst`."""
    return "fp32" if settings.grad_comm_dtype == "auto" else settings.grad_comm_dtype


def trial_workload(
    settings: TrialSettings, layout: Layout, node_size: int, *, counts_traffic: bool | None = None
) -> Workload:
    """The workload of a trial of method `burst`, as its attention has it: `counts_traffic` by default where the cost
    model chooses."""
    chooses = model_chooses(settings.schedule, settings.backward, settings.exchange)
    shape = settings.model
    return workload_of(
        parse_mask(settings.mask),
        layout,
        cp_size=settings.cp_size,
        node_size=node_size,
        seq_len=settings.seq_len,
        batch=settings.batch_size,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        input_bytes=BYTES_OF[settings.dtype],
        grad_comm_dtype=trial_grad_comm_dtype(settings),
        recompute=recomputes_attention(settings),
        counts_traffic=chooses if counts_traffic is None else counts_traffic,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRing:
    """The ring that a trial of method `burst` runs under a schedule: of all ranks, or of those that an all-to-all
    leaves, each with a part of the heads."""

    ring: Ring
    layout: Layout  # of what the ring's ranks hold
    node_size: int  # consecutive ranks of the ring that share a node
    shards: Shards  # with gradients as kernels of GPUs write them

    @property
    def exchange(self) -> str:
        """What `exchange: auto` is on GPUs that can copy into each other's memory."""
        return "relay" if self.ring.node_size > self.node_size else "copy_engine"

    def cheaper_backward(self, settings: TrialSettings, hardware: HardwareModel) -> str:
        """The side that backward sends under `backward: auto`."""
        exchange = self.exchange if settings.exchange == "auto" else settings.exchange
        volume = RingVolume(ring=self.ring, node_size=self.node_size, exchange=exchange)
        mask = parse_mask(settings.mask)
        return cheaper_backward(mask, self.layout, volume, settings.seq_len, self.shards, hardware)


def trial_ring(settings: TrialSettings, schedule: str, layout: Layout, node_size: int) -> TrialRing:
    """The ring of a trial under `schedule`, of one rank where that is ulysses."""
    cp_size, shape = settings.cp_size, settings.model
    columns = [tuple(range(local, cp_size, node_size)) for local in range(node_size)]
    nodes = [tuple(range(first, first + node_size)) for first in range(0, cp_size, node_size)]
    # Ranks of each all-to-all; after it, the ring's ranks that share a node, and those of one of its inner rings.
    groups, near, inner = {
        "ulysses": ([tuple(range(cp_size))], 1, 1),
        "usp": (nodes, 1, 1),
        "usp_transposed": (columns, node_size, node_size),
    }.get(schedule, (None, node_size, node_size if schedule == "double_ring" else cp_size))
    shared_by = len(groups[0]) if groups else 1
    ring = Ring(cp_size=cp_size // shared_by, node_size=inner)
    item = BYTES_OF[settings.dtype]
    first, later, across = gradient_widths(trial_grad_comm_dtype(settings), item, written=item)
    shards = Shards(
        batch=settings.batch_size,
        tokens=settings.seq_len // ring.cp_size,
        heads=shape.heads // shared_by,
        kv_heads=shape.kv_heads // shared_by,
        head_dim=shape.head_dim,
        input_bytes=item,
        intra_node=first,
        inter_node=across,
        later_rings=later,
    )
    inside = Gathered(layout, tuple(groups)) if groups else layout
    return TrialRing(ring=ring, layout=inside, node_size=near, shards=shards)
