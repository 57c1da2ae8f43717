"""Which schedule of attention is cheapest: a cost model over bytes, compute and launches. No torch here.

Schedules:
    ring              one ring of all ranks
    double_ring       a ring inside every node and one across nodes, whose transfers overlap a whole inner ring
    ulysses           all-to-all among all ranks: each holds all tokens of some heads (Ulysses, arXiv:2309.14509)
    usp               all-to-all inside a node, ring between nodes (as USP, arXiv:2405.07719)
    usp_transposed    all-to-all between nodes, ring inside a node
    all_gather        every rank receives K and V of all ranks at once, and their gradients are reduced and scattered;
                      never the model's choice: it sends what a ring sends and overlaps nothing

A ring overlaps its transfers with compute, except the return of the last gradient. Each further step adds launches, a
merge and the end of a kernel, where multiprocessors run out of tiles: the longer the shards, the smaller its share. A
mask whose tiles are several kernel calls in a step adds a launch for each; packed documents are mostly one call. An
all-to-all launches once and its transfers are exposed in full, or it is cut into head chunks: then all transfers but
the first and the last overlap with compute, and every chunk adds its launches and the end of a kernel. Inside a node
copy engines move the heads beside the kernels; between nodes NCCL does, with a copy that sorts by rank before and one
that sorts by token after.

The link between nodes varies from machine to machine by more than schedules differ, so it is measured before a choice
(`engine.attention.comm.link_speed`), unless the run has to be deterministic: then it is a constant.

Between nodes a ring sends 2 (M - 1) K/N chunks of Q's size in forward, an all-to-all (2 + 2 K/N) (M - 1) / M: with
grouped heads the ring sends less on few nodes, with equal heads the all-to-all does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from engine.attention.comm_plan import RingTraffic, traffic_left
from engine.attention.comm_volume import narrowed
from engine.attention.masks import imbalance
from engine.attention.problem import (
    RING_SCHEDULES,
    ULYSSES_SCHEDULES,
    HeadsAndRanks,
    Problem,
    all_to_all_ranks,
    schedule_unsupported_reason,
)

GIB = 1 << 30
TILE_ROWS = 128  # of queries in a kernel's tile
MAX_HEAD_CHUNKS = 8  # of the heads of a rank: an eighth of the transfers is then exposed


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareModel:
    """Speeds of a rank's kernels and links, of H200 by default (docs/notes/2026-11-23-cost-model-of-auto.md).

    Those marked F are fitted to records of one node by `harness.predict.schedules`, and a test holds them to that fit.
    """

    forward_tflops: float = 658.0  # F: of the kernel over the whole problem on one GPU
    backward_tflops: float = 620.0  # F
    together_share: float = 0.0218  # F: that kernels take longer where several GPUs compute at once
    inside_gib: float = 346.0  # per second and rank, to the ranks of its node, by copy engine
    spanning_gib: float = 46.0  # the same in an all-to-all that also spans nodes
    across_gib: float = 2.9  # to other nodes, where the link has not been measured
    memory_gib: float = 3300.0  # per second, read and written
    ring_step_seconds: float = 1.68e-3  # F: host time of a ring step, forward and backward: launches, merges
    call_seconds: float = 0.69e-3  # host time of one more kernel call in a step, forward and backward
    merge_seconds: float = 0.276e-3  # F: device time that one more ring step adds to both passes: gaps, short kernels
    step_tail: float = 0.492  # F: of a tile's time, at the end of each further ring step's or head chunk's kernel
    all_to_all_seconds: float = 1.0e-3  # host time of an all-to-all by NCCL, forward and backward
    head_call_seconds: float = 5.17e-3  # F: host time of a call by copy engine, forward and backward
    head_chunk_seconds: float = 0.447e-3  # F: that one more head chunk adds by copy engine: gaps, copies
    start_seconds: float = 0.15e-3  # from a call to its first kernel, where transfers come before it
    processors: int = 132  # of a GPU; each works on one tile of queries of one head at a time

    def __post_init__(self) -> None:
        if not 0 < self.across_gib < math.inf:
            raise ValueError(f"across_gib is {self.across_gib:g}; give a speed above 0")

    def link_seconds(self, near: float, far: float) -> float:
        """How long the links take for bytes inside a node and between nodes, one after the other."""
        return near / (self.inside_gib * GIB) + far / (self.across_gib * GIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload(HeadsAndRanks):
    """One rank's part of the problem, as the cost model reads it."""

    query_bytes: int  # of Q on one rank, and of dQ
    output_bytes: int  # of O, and of dO
    key_side_bytes: int  # of K and V together, and of their gradients; of the latent that they are formed from
    gradient_factor: float  # bytes of a gradient on the wire over those of its tensor
    forward_flops: float  # of one rank
    backward_flops: float  # five products of a tile, where forward has two
    rows: int  # query rows of one rank: batch x tokens
    left: RingTraffic = field(default_factory=RingTraffic)  # steps and bytes of a ring that the mask leaves
    expansion_flops: float = 0.0  # of one rank's latent to K and V of all heads; 0 without one
    recompute: bool = False  # checkpointing calls attention twice, and what an all-to-all received is not saved

    @classmethod
    def of(
        cls,
        problem: Problem,
        *,
        grad_comm_dtype: str = "fp32",
        recompute: bool = False,
        counts_traffic: bool = True,
    ) -> Workload:
        """That of a problem, with the width of gradients at the slowest links that they cross.

        No rank's own number enters it, so that every rank estimates, and chooses, the same. Without `counts_traffic` a
        ring counts with all its steps and bytes, whatever the mask leaves.
        """
        narrow = narrowed(grad_comm_dtype).at_slowest(problem.nodes)
        rows, left = problem.batch * (problem.seq_len // problem.cp_size), RingTraffic()
        queries, keys, values = problem.head_dim, problem.head_dim, problem.value_dim
        row_bytes, flops = rows * problem.input_bytes, problem.pair_flops / (queries + values)
        pairs = problem.mask.area(problem.seq_len) / problem.cp_size
        latent = problem.latent_dim + problem.shared_key_dim
        if counts_traffic:
            left = traffic_left(problem.mask, problem.layout, problem.cp_size, problem.node_size, problem.seq_len)
        return cls(
            cp_size=problem.cp_size,
            node_size=problem.node_size,
            heads=problem.heads,
            kv_heads=problem.kv_heads,
            query_bytes=row_bytes * problem.heads * queries,
            output_bytes=row_bytes * problem.heads * values,
            key_side_bytes=row_bytes * (latent or problem.kv_heads * (keys + values)),
            gradient_factor=1.0 if narrow else max(4, problem.input_bytes) / problem.input_bytes,
            forward_flops=problem.pair_flops * pairs,
            backward_flops=flops * (3 * queries + 2 * values) * pairs,
            rows=rows,
            left=left,
            expansion_flops=problem.expansion_flops * (problem.seq_len // problem.cp_size),
            recompute=recompute,
        )


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


def estimate(schedule: str, workload: Workload, hardware: HardwareModel, chunks: int = 1) -> float:
    """Seconds of forward and backward under a schedule, with the heads of an all-to-all in `chunks` chunks."""
    slower = 1 + (hardware.together_share if workload.cp_size > 1 else 0.0)
    forward = slower * workload.forward_flops / hardware.forward_tflops / 1e12
    backward = slower * workload.backward_flops / hardware.backward_tflops / 1e12
    inside, spanning, across = (gib * GIB for gib in (hardware.inside_gib, hardware.spanning_gib, hardware.across_gib))
    memory = hardware.memory_gib * GIB
    query, output, keys, nodes = workload.query_bytes, workload.output_bytes, workload.key_side_bytes, workload.nodes
    # Of a kernel's time the share that one of its tiles takes. A ring step has as many tiles as the whole call, each
    # shorter; a head chunk has fewer.
    tile_share = hardware.processors * chunks * TILE_ROWS / (workload.rows * workload.heads)

    # A latent is expanded by each rank of a ring for all heads, in backward again, where two more products contract
    # the gradients of K and V; in a ring that sends queries only once, which is not counted apart.
    expanding = workload.expansion_flops / hardware.forward_tflops / 1e12
    rings = {"ulysses": 1, "usp": nodes, "usp_transposed": workload.node_size}
    forward += expanding * rings.get(schedule, workload.cp_size)
    backward += 3 * expanding * rings.get(schedule, workload.cp_size)

    def all_to_all(ranks: int, far: float, inner: float, kernels: int = 1) -> float:
        """Seconds of `inner` between all-to-alls of q, k, v, out, dout, dq, dk, dv, and of q, k, v again with
        recompute; a fraction `far` of the bytes leaves the node. `kernels`: into which a head chunk's compute is
        divided, each with tiles so many times shorter."""
        # A latent is sent whole to each rank with each of its head chunks.
        sent = keys * ranks * chunks if workload.expansion_flops else keys
        nbytes = 2 * (query + output + sent) + (query + sent if workload.recompute else 0)
        near = (ranks - 1) / ranks - far
        transfer = nbytes * near / (spanning if far else inside) + nbytes * far / across
        inner *= _tail_factor(tile_share)
        # The end of the kernel of each further head chunk; those within a chunk are in `inner`.
        inner += hardware.step_tail * tile_share * (chunks - 1) / chunks / kernels * (forward + backward)
        if far == 0:
            # What stays on its rank is copied while the rest arrives.
            more_chunks = (chunks - 1) * hardware.head_chunk_seconds
            passes = hardware.start_seconds + max(inner, transfer) + min(inner, transfer) / chunks
            return max(passes, hardware.head_call_seconds) + more_chunks
        copies = 4 * nbytes / memory
        overlapped = max(inner + transfer / chunks, transfer + inner / chunks) if chunks > 1 else inner + transfer
        return overlapped + copies + chunks * hardware.all_to_all_seconds

    def ring(steps: float, inner_rings: int, gradient_factor: float = workload.gradient_factor) -> float:
        """Seconds of a ring of `steps` steps whose chunks cross nodes `inner_rings` - 1 times."""
        far = (inner_rings - 1) / across
        # Inside a node a gradient is sent as the kernel wrote it.
        _, sent, gradient = ring_backward(workload, 1.0 if inner_rings == 1 else gradient_factor)
        returning = gradient_factor * gradient
        left = workload.left
        steps, near, far = max(1.0, steps * left.steps), left.near * (steps - inner_rings) / inside, left.far * far
        compute = 1 + hardware.step_tail * tile_share * (steps - 1) / steps
        passes = max(forward * compute, keys * max(near, far))
        # The gradients of all head chunks but the last return while another chunk is computed.
        overlapping = sent * far + returning * far * (1 - 1 / chunks)
        passes += max(backward * compute, (sent + gradient) * near, overlapping) + returning * far / chunks
        # Each partial output, dQ, dK and dV is read once more.
        passes += (steps - 1) * (hardware.merge_seconds + (query + output + keys) / memory)
        launches = hardware.ring_step_seconds + (left.calls - 1) * hardware.call_seconds
        return max(passes, chunks * steps * launches) + left.near * gradient / inside

    if workload.cp_size == 1:
        launches = (workload.left.whole_calls - 1) * hardware.call_seconds
        return max((forward + backward) * _tail_factor(tile_share), launches)
    if schedule in RING_SCHEDULES:
        if nodes == 1:
            return ring(workload.cp_size, 1)
        # On a flat ring every chunk crosses every node boundary, one after the other over the slow link.
        return ring(workload.cp_size, nodes if schedule == "double_ring" else workload.cp_size)
    if schedule == "ulysses":
        launches = chunks * (workload.left.whole_calls - 1) * hardware.call_seconds
        return all_to_all(workload.cp_size, (nodes - 1) / nodes, max(forward + backward, launches))
    if schedule == "usp":
        # Each gradient sent between nodes is one kernel's result, so it is sent in the dtype the kernel wrote.
        return all_to_all(workload.node_size, 0, ring(nodes, nodes, gradient_factor=1.0), kernels=nodes)
    return all_to_all(nodes, (nodes - 1) / nodes, ring(workload.node_size, 1), kernels=workload.node_size)


def ring_seconds(problem: Problem, hardware: HardwareModel | None = None) -> float:
    """Seconds of forward and backward of a ring, whose ranks wait for the one with the most visible pairs: what a
    layout changes."""
    mask, layout, cp_size, seq_len = problem.mask, problem.layout, problem.cp_size, problem.seq_len
    workload = Workload.of(problem, counts_traffic=False)
    workload = replace(
        workload,
        left=traffic_left(mask, layout, cp_size, problem.node_size, seq_len, every_rank=True),
        forward_flops=imbalance(mask, layout, seq_len, cp_size) * workload.forward_flops,
    )
    return estimate("ring" if problem.nodes == 1 else "double_ring", workload, hardware or HardwareModel())


class RingBackward(NamedTuple):
    """The side that a ring sends in backward, and the bytes of one of its chunks."""

    side: str
    sent: float
    gradient: float  # in the inputs' dtype


def ring_backward(workload: Workload, gradient_factor: float) -> RingBackward:
    """The side that sends less, as `engine.attention.resolve.cheaper_backward` chooses it by the bytes of a plan;
    gradients are sent with `gradient_factor` times the bytes of their tensors."""
    query, keys, lse_and_delta = workload.query_bytes, workload.key_side_bytes, 2 * 4 * workload.rows * workload.heads
    sent = query + workload.output_bytes + lse_and_delta
    sides = (RingBackward("query", sent, query), RingBackward("key_value", keys, keys))
    return min(sides, key=lambda side: side.sent + gradient_factor * side.gradient)


def _tail_factor(tile_share: float) -> float:
    """How much longer a kernel takes because a GPU runs out of tiles at its end: few heads of few rows are few tiles,
    and under a causal mask the longest takes twice the mean. Measured with FlashAttention-4 on H200: 1.02, 1.09 and 2.1
    with 512, 256 and 128 tiles."""
    return max(1 + 0.3 * tile_share**2, 2 * tile_share)


def choose_num_head_chunks(schedule: str, workload: Workload, hardware: HardwareModel | None = None) -> int:
    """How many chunks a rank's heads should be cut into: the cheapest number that divides its KV heads."""
    if schedule not in ULYSSES_SCHEDULES:
        return 1
    mine = workload.kv_heads // all_to_all_ranks(schedule, workload)
    able = [chunks for chunks in range(1, MAX_HEAD_CHUNKS + 1) if mine % chunks == 0]
    return min(able, key=lambda chunks: estimate(schedule, workload, hardware or HardwareModel(), chunks))


def choose_schedule(
    workload: Workload, layout: str, hardware: HardwareModel | None = None, num_head_chunks: int | None = None
) -> Estimate:
    """Every schedule that can run the problem, cheapest first; on a tie the simpler one. `num_head_chunks`: of an
    all-to-all, where they are given; otherwise those that the model would choose."""
    names = ["ring", "ulysses"] if workload.nodes == 1 else [*RING_SCHEDULES, *ULYSSES_SCHEDULES]
    if workload.cp_size == 1:
        names = ["ring"]
    if workload.nodes == workload.cp_size:  # nodes of one rank: nothing is sent inside a node
        names = [name for name in names if name not in ("usp", "usp_transposed", "double_ring")]
    able = [name for name in names if schedule_unsupported_reason(name, workload, layout) is None]
    hardware = hardware or HardwareModel()
    costs = []
    for name in able:
        chunks = num_head_chunks if name in ULYSSES_SCHEDULES else 1
        chunks = chunks or choose_num_head_chunks(name, workload, hardware)
        costs.append((name, estimate(name, workload, hardware, chunks)))
    return Estimate(tuple(sorted(costs, key=lambda pair: pair[1])))
