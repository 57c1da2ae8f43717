"""Which way of sharing one attention is cheapest: a cost model over bytes, compute and launches. No torch here.

Schedules:
    ring            shards travel around one circle of all ranks
    double_ring     circles inside the nodes, joined by one across them; transfers between nodes overlap whole laps
    ulysses   every rank trades tokens for heads with all others and attends alone (Ulysses, arXiv:2309.14509)
    usp    heads are traded inside a node, shards travel between nodes (as USP, arXiv:2405.07719)
    usp_transposed    heads are traded between nodes, shards travel inside

A ring overlaps its transfers with compute and pays a launch and a merge per hop. An exchange of heads launches once and
pays its transfers in full, or comes in parts: then all but the first arrival and the last return overlap with compute,
and every part pays its launches. Inside a node copy engines carry it beside the kernels; between nodes NCCL does, which
sorts by rank before and by token after.

The link between nodes varies from machine to machine by more than schedules differ, so it is measured before a choice
(`engine.attention.comm.link_speed`), unless the run is to repeat bit for bit: then it is a constant as the other hardware.

Between nodes a ring moves 2 (M - 1) K/N chunks of Q's size in forward, an exchange (2 + 2 K/N) (M - 1) / M: with
grouped heads the ring moves less on few nodes, with equal heads the exchange does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.attention.geometry.ring import RingTraffic

BACKWARD_SIDES = ("query", "key_value")
RING_SCHEDULES = ("ring", "double_ring")
ULYSSES_SCHEDULES = ("ulysses", "usp", "usp_transposed")
GIB = 1 << 30
TILE_ROWS = 128  # of queries in a kernel's tile
MAX_HEAD_CHUNKS = 8  # of the heads of a rank: beyond, what is left uncovered is an eighth of the transfers


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareModel:
    """What a rank's kernels and links do. The defaults were measured on 4 x H200 (docs/attention-performance.md)."""

    forward_tflops: float = 660.0
    backward_tflops: float = 625.0
    inside_gib: float = 315.0  # per second and rank, to the ranks of its node
    spanning_gib: float = 46.0  # the same in an all-to-all that also spans nodes
    across_gib: float = 2.9  # to other nodes, where nobody measured it
    hop_seconds: float = 1.2e-3  # host time of one more hop, forward and backward: launches, messages, merges
    memory_gib: float = 3300.0  # per second, read and written
    merge_seconds: float = 0.25e-3  # what one more hop costs the device, forward and backward
    hop_share: float = 0.025  # what a hop's smaller tiles and sums add to the compute
    exchange_seconds: float = 1.0e-3  # host time of an exchange of heads by all-to-all, forward and backward
    copies_seconds: float = 0.8e-3  # what one more part costs by copy engine: gaps between kernels, copies beside them
    start_seconds: float = 0.15e-3  # from a call to its first kernel, where transfers come before it
    processors: int = 132  # of a GPU; each works on one tile of queries of one head at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsAndRanks:
    """All that decides whether a schedule can share a problem: a plan knows it before there are tensors."""

    cp_size: int
    node_size: int
    heads: int
    kv_heads: int

    @property
    def nodes(self) -> int:
        return self.cp_size // self.node_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload(HeadsAndRanks):
    """One rank's part of the problem, in the terms the model needs."""

    query_bytes: int  # of Q on one rank; K and V have kv_heads / heads of it each
    gradient_factor: float  # bytes of a gradient on the wire over those of its tensor
    forward_flops: float  # of one rank
    rows: int  # query rows of one rank: batch x tokens
    left: RingTraffic = field(default_factory=RingTraffic)  # what the mask leaves of a ring
    recompute: bool = False  # checkpointing calls attention twice, and what arrived in an exchange is not kept

    @property
    def key_bytes(self) -> float:
        return self.query_bytes * self.kv_heads / self.heads


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of forward and backward by schedule, cheapest first."""

    seconds: tuple[tuple[str, float], ...]

    @property
    def best(self) -> str:
        return self.seconds[0][0]

    def __str__(self) -> str:
        """As recorded: milliseconds by schedule."""
        return ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in self.seconds)


def schedule_unsupported_reason(schedule: str, share: HeadsAndRanks, layout: str) -> str | None:
    """Why a schedule cannot share this problem, or None."""
    if schedule not in RING_SCHEDULES + ULYSSES_SCHEDULES:
        known = ", ".join(("auto", *RING_SCHEDULES, *ULYSSES_SCHEDULES))
        return f"schedule {schedule!r} is unknown; choose one of {known}"
    if schedule in RING_SCHEDULES:
        return None
    ranks = _traders(schedule, share)
    for label, heads in (("query", share.heads), ("KV", share.kv_heads)):
        if heads % ranks:
            return (
                f"schedule {schedule} shares {label} heads among {ranks} ranks and {heads} do not divide by that; "
                "choose schedule ring or double_ring"
            )
    if layout == "striped" and share.cp_size > 1:
        return (
            f"schedule {schedule} needs runs of consecutive tokens, found layout striped; choose zigzag or contiguous"
        )
    return None


def estimate(schedule: str, share: Workload, hardware: HardwareModel, parts: int = 1) -> float:
    """Seconds of forward and backward under a schedule, heads traded in `parts` parts."""
    forward = share.forward_flops / hardware.forward_tflops / 1e12
    backward = 2.5 * share.forward_flops / hardware.backward_tflops / 1e12
    inside, spanning, across = (gib * GIB for gib in (hardware.inside_gib, hardware.spanning_gib, hardware.across_gib))
    query, key, nodes = share.query_bytes, share.key_bytes, share.nodes

    def traded(ranks: int, far: float, inner: float) -> float:
        """Seconds of `inner` between exchanges of q, k, v, out, dout, dq, dk, dv, and of q, k, v again when recompute;
        `far` of the bytes leave the node."""
        nbytes = 4 * query + 4 * key + (query + 2 * key if share.recompute else 0)
        near = (ranks - 1) / ranks - far
        travel = nbytes * near / (spanning if far else inside) + nbytes * far / across
        inner *= _tail_factor(share, parts, hardware.processors)
        if far == 0:
            unpacked = 2 * (2 * query + 2 * key) / (hardware.memory_gib * GIB)
            exposed = (min(inner, travel) + unpacked) / parts
            return hardware.start_seconds + max(inner, travel) + exposed + (parts - 1) * hardware.copies_seconds
        copies = 4 * nbytes / (hardware.memory_gib * GIB)
        overlapped = max(inner + travel / parts, travel + inner / parts) if parts > 1 else inner + travel
        return overlapped + copies + parts * hardware.exchange_seconds

    def ring(hops: float, inner_rings: int, gradient_factor: float = share.gradient_factor) -> float:
        """Seconds of a ring of `hops` stops whose shards cross nodes `laps` - 1 times."""
        shard_forward, far = 2 * key, (inner_rings - 1) / across
        travel = min(2 * query, 2 * key)
        returning = gradient_factor * (query if 2 * query + query <= 4 * key else 2 * key)
        left = share.left
        hops, near, far = max(1.0, hops * left.steps), left.near * (hops - inner_rings) / inside, left.far * far
        compute = 1 + hardware.hop_share * (hops - 1)
        passes = max(forward * compute, shard_forward * max(near, far))
        # In parts, all but the last part's gradients return while another part is computed.
        overlapping = travel * far + returning * far * (1 - 1 / parts)
        passes += max(backward * compute, (travel + returning) * near, overlapping) + returning * far / parts
        passes += (hops - 1) * hardware.merge_seconds
        return max(passes, parts * hops * hardware.hop_seconds) + returning / inside

    if schedule in RING_SCHEDULES:
        if nodes == 1:
            return ring(share.cp_size, 1)
        # On a flat circle every shard crosses every boundary: all of it through the slow link, one after the other.
        return ring(share.cp_size, nodes if schedule == "double_ring" else share.cp_size)
    if schedule == "ulysses":
        return traded(share.cp_size, (nodes - 1) / nodes, forward + backward)
    if schedule == "usp":
        # Each gradient that crosses is one kernel's result: nothing was added to it, so it crosses as it was written.
        return traded(share.node_size, 0, ring(nodes, nodes, gradient_factor=1.0))
    return traded(nodes, (nodes - 1) / nodes, ring(share.node_size, 1))


def _tail_factor(share: Workload, parts: int, processors: int) -> float:
    """How much longer a kernel takes because a GPU runs out of tiles at its end: few heads of few rows are few tiles,
    and under a causal mask the longest takes twice the mean. Measured with FlashAttention-4 on H200: 1.02, 1.09 and 2.1
    with 512, 256 and 128 tiles."""
    per_tile = processors * parts * TILE_ROWS / (share.rows * share.heads)
    return max(1 + 0.3 * per_tile**2, 2 * per_tile)


def choose_num_head_chunks(schedule: str, share: Workload, hardware: HardwareModel | None = None) -> int:
    """How many parts the heads of a rank should come in: the cheapest of those its KV heads divide into."""
    if schedule not in ULYSSES_SCHEDULES:
        return 1
    mine = share.kv_heads // _traders(schedule, share)
    able = [parts for parts in range(1, MAX_HEAD_CHUNKS + 1) if mine % parts == 0]
    return min(able, key=lambda parts: estimate(schedule, share, hardware or HardwareModel(), parts))


def _traders(schedule: str, share: HeadsAndRanks) -> int:
    """Ranks among which heads are shared out."""
    return {"ulysses": share.cp_size, "usp": share.node_size, "usp_transposed": share.nodes}[schedule]


def link_bound_seconds(share: Workload, forward: float, backward: float, across_gib: float) -> float:
    """Least seconds of forward and backward that any schedule could take over a link of `across_gib` GiB per second.

    `forward` and `backward` are the compute's own seconds, overlapped with all transfers of the same pass; links inside
    a node cost nothing, and partial gradients cross in the inputs' dtype. A ring sends K and V to every other node, and
    in backward the cheaper side with its gradients; an exchange trades Q, K, V and O, and in backward their gradients
    (what arrived in forward is still there).
    """
    query, key, nodes = share.query_bytes, share.key_bytes, share.nodes
    volumes = [
        ((nodes - 1) * 2 * key, (nodes - 1) * min(3 * query, 4 * key)),
        ((nodes - 1) / nodes * 2 * (query + key), (nodes - 1) / nodes * 2 * (query + key)),
    ]
    if schedule_unsupported_reason("usp_transposed", share, "zigzag"):
        del volumes[1]
    link = across_gib * GIB
    return min(max(forward, out / link) + max(backward, back / link) for out, back in volumes)


def choose_schedule(share: Workload, layout: str, hardware: HardwareModel | None = None) -> Estimate:
    """Every schedule that can share the problem, cheapest first; on a tie the simpler one."""
    names = ["ring", "ulysses"] if share.nodes == 1 else [*RING_SCHEDULES, *ULYSSES_SCHEDULES]
    if share.cp_size == 1:
        names = ["ring"]
    if share.nodes == share.cp_size:  # nodes of one rank: inside a node there is nothing to trade or to travel
        names = [name for name in names if name not in ("usp", "usp_transposed", "double_ring")]
    able = [name for name in names if schedule_unsupported_reason(name, share, layout) is None]
    hardware = hardware or HardwareModel()
    costs = [(name, estimate(name, share, hardware, choose_num_head_chunks(name, share, hardware))) for name in able]
    return Estimate(tuple(sorted(costs, key=lambda pair: pair[1])))
