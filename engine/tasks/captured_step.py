"""One training step captured as CUDA graphs, and replayed with each step's tokens and learning rate.

Up to some thousands of tokens the host takes longer to launch a step's kernels than the GPU to run them. A CUDA graph
launches all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from engine.attention.context import ContextParallel
from engine.attention.masks import Documents
from engine.lm_head.loss import check_labels
from engine.optimizer import OnePassAdamW

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedMask:
    """The documents of a packed row, and the ranks in the layout by which they share it."""

    documents: Documents
    cp: ContextParallel


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """This rank's tokens of one micro-batch."""

    tokens_BL: Tensor
    positions_L: Tensor  # of the tokens in the whole sequence, or in their documents
    labels_BL: Tensor  # in host memory: the LM head asks on the host which of them count
    targets: Tensor  # how many labels count, over all ranks and micro-batches of the step; 0-dim
    packed: PackedMask | None = None  # of a packed row, in place of the settings' mask and layout


def page_locked(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor in host memory that a GPU copies from while the host goes on, contiguous; itself for a CPU."""
    return tensor.contiguous().pin_memory() if device.type == "cuda" else tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device. The host does not wait for the copy, nor for work before it."""
    return page_locked(tensor, device).to(device, non_blocking=True)


Work = Generator[None, None, tuple[Tensor, Tensor]]  # ends with the loss and the gradients' norm, both 0-dim


class CapturedParts(Generic[Result]):
    """A generator's work, one graph for what lies between two of its stops, so that its caller can act at each of them.

    The capture runs the host's side of the work and launches nothing. Memory that the work allocates comes from a pool
    of the graphs' own and stays theirs, so its results lie at the same addresses after every replay.

    Args:
        work: launches kernels on the current stream, and neither waits for the device nor reads from it.
        stream: that captures; not the default one. The same work has run on it before, so that kernels are compiled and
            what is made once is made.
    """

    def __init__(self, work: Generator[None, None, Result], stream: torch.cuda.Stream) -> None:
        self._graphs: list[torch.cuda.CUDAGraph] = []
        pool, ended = torch.cuda.graph_pool_handle(), False
        while not ended:
            graph = torch.cuda.CUDAGraph()
            # Calls of other threads, such as the one that watches NCCL, do not end the capture.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                try:
                    next(work)
                except StopIteration as end:
                    self.result: Result = end.value
                    ended = True
            self._graphs.append(graph)

    def replay(self) -> Generator[None, None, Result]:
        """The work again on the current stream, with the same stops; its result is the same tensors each time."""
        *before, last = self._graphs
        for graph in before:
            graph.replay()
            yield
        last.replay()
        return self.result


class CapturedStep:
    """A step whose tokens, labels, number of targets and learning rates are read from memory that stays where it is.

    Args:
        work: the whole step of some micro-batches: forward, backward, update. It has run on `stream` before.
        like: micro-batches of a step; all later ones have their shapes and positions.
        optimizer: the one that `work` calls.
        vocabulary: words that a label may name.
        stream: that captures.
    """

    def __init__(
        self,
        work: Callable[[Sequence[Batch]], Work],
        like: Sequence[Batch],
        optimizer: OnePassAdamW,
        vocabulary: int,
        stream: torch.cuda.Stream,
    ) -> None:
        self._optimizer, self._vocabulary = optimizer, vocabulary
        device = like[0].tokens_BL.device
        targets = like[0].targets.clone()  # of the whole step
        self._batches = [
            replace(
                batch,
                tokens_BL=batch.tokens_BL.clone(),
                # Every label counts in the capture: a run of tokens without one would be left out of the graph.
                labels_BL=page_locked(torch.zeros_like(batch.labels_BL), device),
                targets=targets,
            )
            for batch in like
        ]
        self._rates = [torch.zeros((), dtype=torch.float32, device=device) for _ in optimizer.param_groups]
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # what the steps before used: the graphs have memory of their own
        torch.cuda.reset_peak_memory_stats(device)
        optimizer.device_rates = self._rates
        try:
            self._parts = CapturedParts(work(self._batches), stream)
        finally:
            optimizer.device_rates = None
        self.allocated_bytes = torch.cuda.max_memory_allocated(device)  # peak of a step, which no replay shows

    def run(self, batches: Sequence[Batch]) -> Work:
        """One step on these tokens, with the stops and the result of `work`. The step before it has ended.

        Raises ValueError for a label that is neither a word nor -100.
        """
        for kept, batch in zip(self._batches, batches, strict=True):
            check_labels(batch.labels_BL.flatten(), self._vocabulary)
            kept.labels_BL.copy_(batch.labels_BL)
            kept.tokens_BL.copy_(batch.tokens_BL)
        self._batches[0].targets.copy_(batches[0].targets)
        for rate, group in zip(self._rates, self._optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        return (yield from self._parts.replay())
