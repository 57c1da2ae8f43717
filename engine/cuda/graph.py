"""Work of one GPU as CUDA graphs: captured once, replayed on the same memory."""

from __future__ import annotations

from collections.abc import Generator
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")


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
