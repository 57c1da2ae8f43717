"""Speed of a trial's own matrix products, and of the link between nodes, measured beside its steps.

A figure of a large square GEMM, from another day and machine, is a poor ceiling: products of narrow weights are slower,
and so is a GPU that is warm from training. The products are measured one by one right after the last step, on random
numbers (zeros take less power, so clocks stay higher), with a cold L2 cache as between the other kernels of a step.

The link is measured before the warm-up, among the measured steps, and after them. On shared machines its speed drifts
within seconds, so a single measurement says little about the steps beside it; three show by how much it drifted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from engine.attention.comm.link_speed import GIB, LATENCY_BYTES, MESSAGE_BYTES
from engine.attention.context import ContextParallel
from engine.distributed import World
from engine.measurement import LINK, Extra
from engine.ops.float8 import Float8Products
from engine.ops.products import PLAIN, Products
from engine.settings import Steps, TrialSettings
from engine.tasks.products import DIRECTIONS, MatrixProduct, matrix_products
from engine.tasks.task import DTYPES, l2_flush

ROWS = 16384  # tokens of a product at most: enough for a GEMM's full speed
_OUTPUT_BYTES = 1 << 30  # of a product's result at most: a tile of the fused LM head has as many
_ROW_STEP = 128  # rows are a multiple of it where there are as many
_REPEATS = 3

IN_THIS_TRIAL = "in this trial, after its last step"

ProductSpeeds = dict[str, dict[str, float]]  # TFLOP/s by product and direction


def gemm_figures(world: World, settings: TrialSettings) -> Extra:
    """Extras of a training record: `gemm_tflops`, and in `gemm` the shapes, when and where; or the reason for none.

    Empty where there is no ceiling to form: on CPUs, and in other dtypes than bf16. Every rank measures at the same
    time, because GPUs of a host share its power; the figure is the median over the ranks. Memory that is not there
    costs the figure, never the trial. Call it when all figures of the trial have been read: it raises every peak.
    Collective.
    """
    if world.device.type != "cuda" or settings.dtype != "bf16":
        return {}
    products = matrix_products(settings.model)
    tokens = settings.batch_size * settings.seq_len // settings.cp_size
    rows = {product.name: rows_of(product, tokens, DTYPES[settings.dtype].itemsize) for product in products}
    started_at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    mine: tuple[ProductSpeeds, str] | str
    try:
        float8 = Float8Products() if settings.linear_dtype == "float8" else PLAIN
        mine = measure_products(world.device, products, rows, DTYPES[settings.dtype], float8), started_at
    except (RuntimeError, MemoryError) as error:  # OutOfMemoryError is one, and so is a cuBLAS handle without memory
        mine = f"rank {world.rank}: {str(error).strip().partition(chr(10))[0] or type(error).__name__}"
    return _combined(world.gather(mine), products, rows)


def rows_of(product: MatrixProduct, tokens: int, itemsize: int) -> int:
    """Tokens that a product is measured with on a rank that holds `tokens`."""
    rows = min(tokens, ROWS, max(_ROW_STEP, _OUTPUT_BYTES // (product.outputs * itemsize)))
    return rows // _ROW_STEP * _ROW_STEP or rows


def measure_products(
    device: torch.device,
    products: tuple[MatrixProduct, ...],
    rows: dict[str, int],
    dtype: torch.dtype,
    float8: Products = PLAIN,
) -> ProductSpeeds:
    """TFLOP/s of every product in every direction on this device, the median of a few calls each. `float8`: how those
    are formed that `linear_dtype: float8` is about, without their casts."""
    flush = l2_flush(device)
    known: dict[tuple[int, int, int, bool], dict[str, float]] = {}  # products of one shape are measured once
    speeds = {}
    for product in products:
        shape = (rows[product.name], product.inputs, product.outputs, product.float8)
        if shape not in known:
            flops = 2.0 * shape[0] * shape[1] * shape[2]
            own = float8 if product.float8 else PLAIN
            calls = zip(DIRECTIONS, _calls(device, *shape[:3], dtype, own), strict=True)
            known[shape] = {name: flops / _seconds(call, flush) / 1e12 for name, call in calls}
        speeds[product.name] = known[shape]
    return speeds


def _calls(
    device: torch.device, rows: int, inputs: int, outputs: int, dtype: torch.dtype, products: Products
) -> tuple[Callable[[], Tensor], ...]:
    """Forward, dgrad and wgrad of one product, with the operands as autograd hands them to the GEMMs."""
    generator = torch.Generator(device).manual_seed(0)
    x_TI, dy_TO, w_OI = (
        torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)
        for shape in ((rows, inputs), (rows, outputs), (outputs, inputs))
    )
    x, weight = products.operand(x_TI, columns=True), products.operand(w_OI, columns=True)
    dy = products.operand(dy_TO, columns=True, gradient=True)
    return (
        lambda: products.output(x, weight),
        lambda: products.input_gradient(dy, weight),
        lambda: products.weight_gradient(dy, x, dtype),
    )


def _seconds(call: Callable[[], Tensor], flush: Tensor) -> float:
    """Median seconds of a call, after one that is not counted."""
    call()
    if flush.device.type != "cuda":
        return statistics.median(_wall_seconds(call) for _ in range(_REPEATS))
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_REPEATS)]
    for start, end in pairs:
        flush.zero_()  # while it runs, the host launches what is measured
        start.record()
        call()
        end.record()
    torch.cuda.synchronize(flush.device)
    return statistics.median(start.elapsed_time(end) / 1000 for start, end in pairs)  # milliseconds


def _wall_seconds(call: Callable[[], Tensor]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _combined(found: list[Any], products: tuple[MatrixProduct, ...], rows: dict[str, int]) -> Extra:
    """The record's extras from what the ranks found, in rank order."""
    reasons = [each for each in found if isinstance(each, str)]
    if reasons:
        return {"gemm": {"reason": f"the GEMMs of this trial's shapes were not measured: {reasons[0]}"}}
    _speeds, started_at = found[0]
    median = {
        product.name: {name: statistics.median(each[0][product.name][name] for each in found) for name in DIRECTIONS}
        for product in products
    }
    shapes = {product.name: [rows[product.name], product.inputs, product.outputs] for product in products}
    return {"gemm_tflops": median, "gemm": {"shapes": shapes, "where": IN_THIS_TRIAL, "started_at": started_at}}


MOMENTS = ("before", "between", "after")
PATTERNS = ("one_peer", "all_peers")  # that each rank sends to at once
TENSOR_BYTES = 128 << 20  # at most of a tensor that is given


class LinkProbes:
    """Measures the link around the steps of one trial. Where a sequence's ranks are on one node it does nothing.

    Each measurement takes both patterns in which schedules send between nodes, one peer for each rank and all peers at
    once, and keeps the faster: the speed of the slower one is no bound for schedules that send in the other.

    A measurement receives one message beside the tensors that exist between steps. A step holds more than that at its
    fullest, so no peak rises: the message is Q, or no larger than `message_bytes`, the size of Q, which a step has in
    memory several times over.
    """

    def __init__(
        self, world: World, cp: ContextParallel, steps: Steps, *, message: Tensor | None = None, message_bytes: int = 0
    ) -> None:
        self._world, self._cp, self._steps = world, cp, steps
        self._spans_nodes = cp.node_size < cp.size
        self._message_bytes = min(message_bytes, MESSAGE_BYTES)
        self._message = None if message is None else message.detach().flatten()[: TENSOR_BYTES // message.itemsize]
        self._patterns = dict.fromkeys(PATTERNS, 0.0)  # GiB/s, the fastest of all moments
        self._seconds_per_gib = dict.fromkeys(MOMENTS, 0.0)  # 0 where it was not measured

    def before_step(self, index: int) -> None:
        """Measure where it is time: before the first step, and in the middle of the measured ones. Collective.

        A single measured step has no middle: then between the warm-up and that step.
        """
        if index == 0:
            self._measure("before")
        if index == self._steps.warmup + self._steps.after_warmup // 2:
            self._measure("between")

    def figures(self) -> Extra:
        """Extras of the record, after one last measurement: GiB/s of the slowest replica, and seconds of a small
        message. Collective."""
        self._measure("after")
        latency = 0.0
        if self._spans_nodes:
            latency = LATENCY_BYTES / GIB / self._speed(self._bytes(LATENCY_BYTES), PATTERNS[0])
        *slowest, latency = self._world.slowest([*self._seconds_per_gib.values(), latency])
        if not all(slowest):
            return {}
        speeds = {moment: 1 / seconds for moment, seconds in zip(MOMENTS, slowest, strict=True)}
        return {
            LINK: speeds,
            "across_gib_per_second": speeds["after"],
            "link_by_pattern": {pattern: speed for pattern, speed in self._patterns.items() if speed},
            "link_latency_seconds": latency,
        }

    def _measure(self, moment: str) -> None:
        if not self._spans_nodes:
            return
        message = self._bytes(self._message_bytes) if self._message is None else self._message
        patterns = PATTERNS if self._cp.node_size > 1 else PATTERNS[:1]  # nodes of one rank: both are the same
        speeds = {pattern: self._speed(message, pattern) for pattern in patterns}
        for pattern, speed in speeds.items():
            self._patterns[pattern] = max(self._patterns[pattern], speed)
        self._seconds_per_gib[moment] = 1 / max(speeds.values())

    def _bytes(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self._world.device)

    def _speed(self, message: Tensor, pattern: str) -> float:
        """GiB per second of messages of this size. The ranks are on several nodes. Collective."""
        across = self._cp.comms.measure_link(message, spread=pattern == "all_peers")
        assert across is not None, "several nodes have a group"
        return across
