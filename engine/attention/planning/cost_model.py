"""Which schedule of attention is cheapest: a cost model over bytes, compute and launches. No torch here.

Schedules:
    ring              one ring of all ranks
    double_ring       a ring inside every node and one across nodes, whose transfers overlap a whole inner ring
    ulysses           all-to-all among all ranks: each holds all tokens of some heads (Ulysses, arXiv:2309.14509)
    usp               all-to-all inside a node, ring between nodes (as USP, arXiv:2405.07719)
    usp_transposed    all-to-all between nodes, ring inside a node
    all_gather        every rank receives K and V of all ranks at once, and their gradients are reduced and scattered;
                      never the model's choice: it sends what a ring sends and overlaps nothing

A ring overlaps its transfers with compute and adds a launch and a merge per step. An all-to-all launches once and its
transfers are exposed in full, or it is cut into head chunks: then all transfers but the first and the last overlap with
compute, and every chunk adds its launches. Inside a node copy engines move the heads beside the kernels; between nodes
NCCL does, with a copy that sorts by rank before and one that sorts by token after.

The link between nodes varies from machine to machine by more than schedules differ, so it is measured before a choice
(`engine.attention.comm.link_speed`), unless the run has to be deterministic: then it is a constant.

Between nodes a ring sends 2 (M - 1) K/N chunks of Q's size in forward, an all-to-all (2 + 2 K/N) (M - 1) / M: with
grouped heads the ring sends less on few nodes, with equal heads the all-to-all does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.attention.geometry.ring import RingTraffic

BACKWARD_SIDES = ("query", "key_value")
RING_SCHEDULES = ("ring", "double_ring")
ULYSSES_SCHEDULES = ("ulysses", "usp", "usp_transposed")
ALL_GATHER = "all_gather"
RUNS_OF_TOKENS = (*ULYSSES_SCHEDULES, ALL_GATHER)  # schedules whose shards are runs of consecutive tokens
GIB = 1 << 30
TILE_ROWS = 128  # of queries in a kernel's tile
MAX_HEAD_CHUNKS = 8  # of the heads of a rank: an eighth of the transfers is then exposed


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareModel:
    """Speeds of a rank's kernels and links. The defaults were measured on 4 x H200 (docs/attention-performance.md)."""

    forward_tflops: float = 660.0
    backward_tflops: float = 625.0
    inside_gib: float = 315.0  # per second and rank, to the ranks of its node
    spanning_gib: float = 46.0  # the same in an all-to-all that also spans nodes
    across_gib: float = 2.9  # to other nodes, where the link has not been measured
    ring_step_seconds: float = 1.2e-3  # host time of one more ring step, forward and backward: launches, merges
    memory_gib: float = 3300.0  # per second, read and written
    merge_seconds: float = 0.25e-3  # device time that one more ring step adds, forward and backward
    ring_step_share: float = 0.025  # that a step's smaller tiles and sums add to the compute
    all_to_all_seconds: float = 1.0e-3  # host time of an all-to-all by NCCL, forward and backward
    head_chunk_seconds: float = 0.8e-3  # that one more head chunk adds by copy engine: gaps between kernels, copies
    start_seconds: float = 0.15e-3  # from a call to its first kernel, where transfers come before it
    processors: int = 132  # of a GPU; each works on one tile of queries of one head at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsAndRanks:
    """All that decides whether a schedule can run a problem, known before there are tensors."""

    cp_size: int
    node_size: int
    heads: int
    kv_heads: int

    @property
    def nodes(self) -> int:
        return self.cp_size // self.node_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload(HeadsAndRanks):
    """One rank's part of the problem, as the cost model reads it."""

    query_bytes: int  # of Q on one rank; K and V have kv_heads / heads of it each
    gradient_factor: float  # bytes of a gradient on the wire over those of its tensor
    forward_flops: float  # of one rank
    rows: int  # query rows of one rank: batch x tokens
    left: RingTraffic = field(default_factory=RingTraffic)  # steps and bytes of a ring that the mask leaves
    recompute: bool = False  # checkpointing calls attention twice, and what an all-to-all received is not saved

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


def schedule_unsupported_reason(schedule: str, workload: HeadsAndRanks, layout: str) -> str | None:
    """One sentence why a schedule cannot run this problem, or None."""
    if schedule not in RING_SCHEDULES + RUNS_OF_TOKENS:
        known = ", ".join(("auto", *RING_SCHEDULES, ALL_GATHER, *ULYSSES_SCHEDULES))
        return f"schedule {schedule!r} is unknown; choose one of {known}"
    if schedule in RING_SCHEDULES:
        return None
    ranks = 1 if schedule == ALL_GATHER else _all_to_all_ranks(schedule, workload)
    for label, heads in (("query", workload.heads), ("KV", workload.kv_heads)):
        if heads % ranks:
            return (
                f"schedule {schedule} divides {label} heads among {ranks} ranks and {heads} do not divide by that; "
                "choose schedule ring or double_ring"
            )
    if layout == "striped" and workload.cp_size > 1:
        return (
            f"schedule {schedule} needs runs of consecutive tokens, found layout striped; choose zigzag or contiguous"
        )
    return None


def estimate(schedule: str, workload: Workload, hardware: HardwareModel, chunks: int = 1) -> float:
    """Seconds of forward and backward under a schedule, with the heads of an all-to-all in `chunks` chunks."""
    forward = workload.forward_flops / hardware.forward_tflops / 1e12
    backward = 2.5 * workload.forward_flops / hardware.backward_tflops / 1e12
    inside, spanning, across = (gib * GIB for gib in (hardware.inside_gib, hardware.spanning_gib, hardware.across_gib))
    query, key, nodes = workload.query_bytes, workload.key_bytes, workload.nodes

    def all_to_all(ranks: int, far: float, inner: float) -> float:
        """Seconds of `inner` between all-to-alls of q, k, v, out, dout, dq, dk, dv, and of q, k, v again with
        recompute; a fraction `far` of the bytes leaves the node."""
        nbytes = 4 * query + 4 * key + (query + 2 * key if workload.recompute else 0)
        near = (ranks - 1) / ranks - far
        transfer = nbytes * near / (spanning if far else inside) + nbytes * far / across
        inner *= _tail_factor(workload, chunks, hardware.processors)
        if far == 0:
            unpacked = 2 * (2 * query + 2 * key) / (hardware.memory_gib * GIB)
            exposed = (min(inner, transfer) + unpacked) / chunks
            return hardware.start_seconds + max(inner, transfer) + exposed + (chunks - 1) * hardware.head_chunk_seconds
        copies = 4 * nbytes / (hardware.memory_gib * GIB)
        overlapped = max(inner + transfer / chunks, transfer + inner / chunks) if chunks > 1 else inner + transfer
        return overlapped + copies + chunks * hardware.all_to_all_seconds

    def ring(steps: float, inner_rings: int, gradient_factor: float = workload.gradient_factor) -> float:
        """Seconds of a ring of `steps` steps whose chunks cross nodes `inner_rings` - 1 times."""
        shard_forward, far = 2 * key, (inner_rings - 1) / across
        sent = min(2 * query, 2 * key)
        returning = gradient_factor * (query if 2 * query + query <= 4 * key else 2 * key)
        left = workload.left
        steps, near, far = max(1.0, steps * left.steps), left.near * (steps - inner_rings) / inside, left.far * far
        compute = 1 + hardware.ring_step_share * (steps - 1)
        passes = max(forward * compute, shard_forward * max(near, far))
        # The gradients of all head chunks but the last return while another chunk is computed.
        overlapping = sent * far + returning * far * (1 - 1 / chunks)
        passes += max(backward * compute, (sent + returning) * near, overlapping) + returning * far / chunks
        passes += (steps - 1) * hardware.merge_seconds
        return max(passes, chunks * steps * hardware.ring_step_seconds) + returning / inside

    if schedule in RING_SCHEDULES:
        if nodes == 1:
            return ring(workload.cp_size, 1)
        # On a flat ring every chunk crosses every node boundary, one after the other over the slow link.
        return ring(workload.cp_size, nodes if schedule == "double_ring" else workload.cp_size)
    if schedule == "ulysses":
        return all_to_all(workload.cp_size, (nodes - 1) / nodes, forward + backward)
    if schedule == "usp":
        # Each gradient sent between nodes is one kernel's result, so it is sent in the dtype the kernel wrote.
        return all_to_all(workload.node_size, 0, ring(nodes, nodes, gradient_factor=1.0))
    return all_to_all(nodes, (nodes - 1) / nodes, ring(workload.node_size, 1))


def _tail_factor(workload: Workload, chunks: int, processors: int) -> float:
    """How much longer a kernel takes because a GPU runs out of tiles at its end: few heads of few rows are few tiles,
    and under a causal mask the longest takes twice the mean. Measured with FlashAttention-4 on H200: 1.02, 1.09 and 2.1
    with 512, 256 and 128 tiles."""
    per_tile = processors * chunks * TILE_ROWS / (workload.rows * workload.heads)
    return max(1 + 0.3 * per_tile**2, 2 * per_tile)


def choose_num_head_chunks(schedule: str, workload: Workload, hardware: HardwareModel | None = None) -> int:
    """How many chunks a rank's heads should be cut into: the cheapest number that divides its KV heads."""
    if schedule not in ULYSSES_SCHEDULES:
        return 1
    mine = workload.kv_heads // _all_to_all_ranks(schedule, workload)
    able = [chunks for chunks in range(1, MAX_HEAD_CHUNKS + 1) if mine % chunks == 0]
    return min(able, key=lambda chunks: estimate(schedule, workload, hardware or HardwareModel(), chunks))


def _all_to_all_ranks(schedule: str, workload: HeadsAndRanks) -> int:
    """Ranks of the all-to-all, among which heads are divided."""
    return {"ulysses": workload.cp_size, "usp": workload.node_size, "usp_transposed": workload.nodes}[schedule]


def choose_schedule(workload: Workload, layout: str, hardware: HardwareModel | None = None) -> Estimate:
    """Every schedule that can run the problem, cheapest first; on a tie the simpler one."""
    names = ["ring", "ulysses"] if workload.nodes == 1 else [*RING_SCHEDULES, *ULYSSES_SCHEDULES]
    if workload.cp_size == 1:
        names = ["ring"]
    if workload.nodes == workload.cp_size:  # nodes of one rank: nothing is sent inside a node
        names = [name for name in names if name not in ("usp", "usp_transposed", "double_ring")]
    able = [name for name in names if schedule_unsupported_reason(name, workload, layout) is None]
    hardware = hardware or HardwareModel()
    costs = [
        (name, estimate(name, workload, hardware, choose_num_head_chunks(name, workload, hardware))) for name in able
    ]
    return Estimate(tuple(sorted(costs, key=lambda pair: pair[1])))
