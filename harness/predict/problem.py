"""One layer's attention as the prediction sees it: what a method's ranks resolve to, and what a pass takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from engine.attention.geometry.layout import Layout, as_layout
from engine.attention.geometry.ring import Ring
from engine.attention.masks import Mask
from engine.attention.masks.pairs import pair_table
from engine.attention.problem import Problem, problem_of_trial
from engine.attention.resolve import HardwareModel, Resolved, asks_for_link, resolve
from engine.method import planned_method
from engine.settings import TrialSettings
from harness.metrics.flops import ATTENTION_KERNEL_BACKWARD
from harness.metrics.hardware import Speeds
from harness.predict.speeds import TERA
from harness.spec.methods import all_methods, method_named


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerAttention:
    """One layer's attention of a method: what its ranks resolve to, and what only a prediction knows."""

    resolved: Resolved
    tuned_links: bool = True  # NCCL set up for the site, rather than its defaults
    tensor_parallel: bool = False  # heads are divided with the columns of matrices: attention itself sends nothing

    @property
    def schedule(self) -> str:
        """That of the ranks, or tensor_parallel."""
        return "tensor_parallel" if self.tensor_parallel else self.resolved.schedule

    def across_gib(self, speeds: Speeds) -> float:
        """GiB/s of each GPU to another node, as NCCL is set up for the method."""
        return speeds.across_gib if self.tuned_links else speeds.across_default_gib


def context_ranks_of_node(settings: TrialSettings, node_ranks: int) -> int:
    """Context-parallel ranks that share a node, of which the trial uses `node_ranks` GPUs."""
    if settings.emulate_nodes > 1:
        node_ranks = settings.world_size // settings.emulate_nodes
    size = min(settings.cp_size, max(1, node_ranks // settings.tp_size))
    while settings.cp_size % size:
        size -= 1
    return size


def attention_problem(settings: TrialSettings, node_size: int) -> Problem:
    """Attention of one layer of a trial. Raises ValueError for a method that is not modelled, and for a mask or layout
    that does not exist."""
    method = planned_method(method_named(settings.method))
    if method is None:
        known = ", ".join(name for name, each in all_methods().items() if planned_method(each))
        raise ValueError(f"method {settings.method} is not predicted; choose one of {known}")
    problem = problem_of_trial(settings, as_layout(method.layout(settings)), node_size)
    return replace(problem, kv_heads=max(1, method.kv_heads(settings) // settings.tp_size))


def layer_attention(settings: TrialSettings, problem: Problem, speeds: Speeds) -> LayerAttention:
    """What the engine's ranks choose for `problem`, which is that of the trial, given the speed of the link between
    nodes where they would measure it. Raises ValueError for what cannot run."""
    method = planned_method(method_named(settings.method))
    assert method is not None, f"method {settings.method} has no `attention_problem`"
    choices = method.choices(settings)
    measured = asks_for_link(problem, choices) and not choices.deterministic
    hardware = HardwareModel(across_gib=speeds.across_gib) if measured else HardwareModel()
    return LayerAttention(
        resolved=resolve(problem, hardware, choices),
        tuned_links=settings.method == "burst" or settings.settings != "as_published",
        tensor_parallel=is_tensor_parallel(settings),
    )


def is_tensor_parallel(settings: TrialSettings) -> bool:
    """Whether the method divides matrices rather than the sequence."""
    return hasattr(method_named(settings.method), "tensor_parallel")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """Seconds of one pass on the slowest of the simulated ranks, and what it waited for."""

    kernels: float
    inside: float = 0.0  # waiting for transfers inside the node
    across: float = 0.0  # waiting for transfers between nodes
    steps: float = 0.0  # what the steps of a ring add

    @property
    def seconds(self) -> float:
        return self.kernels + self.inside + self.across + self.steps

    def __add__(self, other: Pass) -> Pass:
        return Pass(
            kernels=self.kernels + other.kernels,
            inside=self.inside + other.inside,
            across=self.across + other.across,
            steps=self.steps + other.steps,
        )


def kernel_seconds(forward_flops: float, pairs: float, speeds: Speeds, backward: bool) -> float:
    """Of one call: at the speed of the causal tile with as many visible pairs where speeds are known by tile."""
    tflops = speeds.attention_backward_tflops if backward else speeds.attention_forward_tflops
    if speeds.tiles is not None:
        tflops = speeds.tiles.tflops(math.sqrt(2 * pairs), backward=backward)
    return (ATTENTION_KERNEL_BACKWARD if backward else 1.0) * forward_flops / (tflops * TERA)


@lru_cache(maxsize=512)
def step_areas(mask: Mask, layout: Layout, seq_len: int, ring: Ring, rank: int, sends_queries: bool) -> tuple[int, ...]:
    """Visible pairs of each of a rank's steps."""
    pairs = pair_table(mask, layout, seq_len, ring.cp_size)
    areas = []
    for step in range(ring.cp_size):
        owner = ring.owner(rank, step)
        q_rank, k_rank = (owner, rank) if sends_queries else (rank, owner)
        areas.append(pairs.area(q_rank, k_rank))
    return tuple(areas)
