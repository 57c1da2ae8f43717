"""`python -m engine.tasks.calibrate REQUEST.json OUT.json`: one rank that measures kernels and links.

RANK, WORLD_SIZE and LOCAL_RANK are torchrun's; BURST_STORE is a file in which the ranks of the host meet.

Each figure is measured several times; rank 0 writes the median over ranks and repeats, the least and the largest.
Kernels are measured on all ranks at once, because GPUs of a host share its power. What this machine cannot run is left
out.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.atomic import write_atomic
from engine.attention.comm.link_speed import LATENCY_BYTES, across_gib_per_second
from engine.attention.geometry.tiles import CAUSAL
from engine.attention.kernels import KERNELS, BackwardInputs, KernelProblem, kernel_named, unsupported_reason
from engine.distributed import limit_threads, local_device
from engine.settings import from_json
from engine.shape import ModelShape
from engine.tasks.products import DIRECTIONS, MatrixProduct, matrix_products
from engine.tasks.speeds import measure_products, rows_of
from engine.tasks.task import DTYPES

_GIB = 1 << 30
_REPEATS = 5
_CHECKED_KERNELS = tuple(name for name in KERNELS if name != "reference")

Figures = dict[str, dict[str, object]]


def main(words: list[str]) -> int:
    """Measure what the request names; returns the exit code."""
    if len(words) != 2:
        print("usage: python -m engine.tasks.calibrate REQUEST.json OUT.json", file=sys.stderr)
        return 2
    request = json.loads(Path(words[0]).read_text(encoding="utf-8"))
    limit_threads()
    device = local_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Ranks of one host meet in a file: no port is opened for it.
    dist.init_process_group(backend, store=dist.FileStore(os.environ["BURST_STORE"], size), rank=rank, world_size=size)
    try:
        figures = _Calibration(device, request).figures()
        if dist.get_rank() == 0:
            write_atomic(Path(words[1]), json.dumps(figures, indent=1) + "\n")
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0


class _Calibration:
    """All measurements of one rank. Every method is collective."""

    def __init__(self, device: torch.device, request: dict[str, Any]) -> None:
        self._device, self._request = device, request
        self._dtype = DTYPES["bf16" if device.type == "cuda" else "fp32"]

    def figures(self) -> Figures:
        """Every figure by name: median, least, largest and samples, in its unit, and on what."""
        found: Figures = {"device": {"name": self._name(), "ranks": dist.get_world_size(), "torch": torch.__version__}}
        for name, unit, what, samples in (*self._gemms(), *self._attention(), *self._memory(), *self._links()):
            values = [value for each in self._gathered(samples) for value in each]
            found[name] = {
                "median": statistics.median(values), "least": min(values), "largest": max(values),
                "samples": len(values), "unit": unit, "what": what,
            }  # fmt: skip
        return found

    def _name(self) -> str:
        return torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu"

    def _gathered(self, samples: list[float]) -> list[list[float]]:
        everyone: list[list[float]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, samples)
        return everyone

    def _gemms(self) -> Iterator[tuple[str, str, str, list[float]]]:
        """TFLOP/s of a model's own products, each with its share of the model's FLOPs; then of each by itself."""
        for data in self._request["models"]:
            model = from_json(ModelShape, data)
            products = matrix_products(model)
            rows = {each.name: rows_of(each, self._request["tokens"], self._dtype.itemsize) for each in products}
            measured = [measure_products(self._device, products, rows, self._dtype) for _ in range(_REPEATS)]
            samples = [_together(products, speeds) for speeds in measured]
            yield f"gemm {model.name}", "TFLOP/s", f"products of {model.name}, {max(rows.values())} tokens", samples
            for each in products:
                what = f"{rows[each.name]} x {each.inputs} x {each.outputs}, forward and both gradients"
                yield f"gemm {model.name} {each.name}", "TFLOP/s", what, [
                    _together((each,), speeds) for speeds in measured
                ]  # fmt: skip

    def _attention(self) -> Iterator[tuple[str, str, str, list[float]]]:
        """TFLOP/s of every kernel that runs here, by tokens of a causal tile."""
        heads, head_dim = self._request["heads"], self._request["head_dim"]
        for name in _CHECKED_KERNELS:
            for tokens in self._request["tiles"]:
                problem = KernelProblem(
                    device=self._device, dtype=self._dtype, heads=heads, kv_heads=heads, head_dim=head_dim,
                    bands=frozenset({"causal"}), deterministic=False,
                )  # fmt: skip
                if unsupported_reason(kernel_named(name), problem) is not None:
                    break
                for direction, samples in self._kernel(name, tokens, heads, head_dim).items():
                    what = f"{tokens} tokens, causal, {heads} heads x {head_dim}"
                    yield f"attention {name} {direction} {tokens}", "TFLOP/s", what, samples

    def _kernel(self, name: str, tokens: int, heads: int, head_dim: int) -> dict[str, list[float]]:
        kernel = kernel_named(name)
        q, k, v, dout = (torch.randn(1, tokens, heads, head_dim, device=self._device).to(self._dtype) for _ in range(4))
        scale = head_dim**-0.5
        flops = 4.0 * heads * head_dim * tokens * (tokens + 1) / 2
        out, lse = kernel.forward(q, k, v, CAUSAL, scale)
        delta = (dout.float() * out.float()).sum(-1).transpose(1, 2).contiguous()
        given = BackwardInputs(q, dout, lse, delta, k, v)
        seconds = {
            "forward": self._times(lambda: kernel.forward(q, k, v, CAUSAL, scale)),
            "backward": self._times(lambda: kernel.backward(given, CAUSAL, scale, False)),
        }
        factor = {"forward": 1.0, "backward": 2.5}
        return {way: [factor[way] * flops / each / 1e12 for each in times] for way, times in seconds.items()}

    def _memory(self) -> Iterator[tuple[str, str, str, list[float]]]:
        """GiB/s read and written by an elementwise pass, and of copies to pinned host memory and back at once."""
        nbytes = self._request["memory_bytes"]
        x = torch.randn(nbytes // 2 // self._dtype.itemsize, device=self._device).to(self._dtype)
        y = torch.empty_like(x)
        samples = [2 * x.numel() * x.itemsize / _GIB / each for each in self._times(lambda: torch.mul(x, 1.5, out=y))]
        yield "memory", "GiB/s", f"one elementwise pass over {x.numel() * x.itemsize / _GIB:g} GiB", samples
        if self._device.type != "cuda":
            return
        there, back = (torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for _ in range(2))
        streams = torch.cuda.Stream(), torch.cuda.Stream()

        def both(count: int) -> None:
            now = torch.cuda.current_stream()
            for stream in streams:
                stream.wait_stream(now)
            for stream, (target, source) in zip(streams, ((there, x), (y, back)), strict=True):
                with torch.cuda.stream(stream):
                    target[:count].copy_(source[:count], non_blocking=True)
            for stream in streams:  # after both copies began: neither waits for the other
                now.wait_stream(stream)

        nbytes_each = x.numel() * x.itemsize / _GIB
        yield "host", "GiB/s", "to and from pinned host memory at once, each way", [
            nbytes_each / each for each in self._times(lambda: both(x.numel()))
        ]  # fmt: skip
        few = LATENCY_BYTES // x.itemsize
        yield "latency host", "us", f"{LATENCY_BYTES} bytes to and from pinned host memory at once", [
            1e6 * each for each in self._times(lambda: both(few))
        ]  # fmt: skip

    def _links(self) -> Iterator[tuple[str, str, str, list[float]]]:
        """GiB/s of messages to the next rank while every rank sends one, and microseconds of a small one."""
        if dist.get_world_size() == 1:
            return
        assert dist.group.WORLD is not None, "ranks have a group"
        for nbytes in (LATENCY_BYTES, *self._request["message_bytes"]):
            message = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
            what = f"{nbytes} bytes to the next rank"
            # As between nodes of one rank each.
            speeds = [across_gib_per_second(dist.group.WORLD, 1, message) for _ in range(_REPEATS)]
            if nbytes == LATENCY_BYTES:
                yield "latency inside", "us", what, [1e6 * nbytes / _GIB / each for each in speeds]
            else:
                yield f"link inside {nbytes}", "GiB/s", what, speeds

    def _times(self, call: Callable[[], object]) -> list[float]:
        """Seconds of some calls, after one that is not counted."""
        call()
        found = []
        for _ in range(_REPEATS):
            self._wait()
            started = time.perf_counter()
            call()
            self._wait()
            found.append(time.perf_counter() - started)
        return found

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _together(products: Sequence[MatrixProduct], speeds: Mapping[str, Mapping[str, float]]) -> float:
    """TFLOP/s of some products one after another, in all directions."""
    flops = sum(each.weights for each in products) * len(DIRECTIONS)
    return flops / sum(each.weights / speeds[each.name][way] for each in products for way in DIRECTIONS)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # a thread of gloo that drops tensors while the interpreter ends aborts the process
