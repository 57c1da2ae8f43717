"""Gradients in host memory from the moment that backward has formed them until their update.

A step holds 4 bytes of gradient per trained parameter in fp32, as much as of the parameter itself, though backward
never reads one again. Each is copied to page-locked memory when FSDP2 has reduced it, while the layers before compute,
and comes back with the moments of its piece (`engine.memory.moments`). Its norm is formed before it leaves.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from engine.cuda.streams import own_stream
from engine.memory.offload import host_like, local_shard


class HostedGradients:
    """Takes the gradients of some parameters; `Tensor.grad` is None after backward. For one backward per step.

    Args:
        parameters: on one device.
        stages: parts of the model by parameter. Where all parameters are taken, the gradients of two parts at most are
            on the device.
    """

    def __init__(self, parameters: Iterable[Tensor], stages: Mapping[Tensor, int]) -> None:
        self.compute: Any = None  # the stream of forward and backward; the current one when None
        self._stages, self._paused = stages, False
        self._hosted = {each: host_like(local_shard(each), local_shard(each).device) for each in parameters}
        self._norms: dict[Tensor, Tensor] = {}  # of this step's
        self._leaving: deque[tuple[int, Any, Tensor]] = deque()  # stage, end of the copy, gradient
        self._copies: Any = None  # the stream of copies
        take = weakref.WeakMethod(self._take)  # a hook is not collected with what it holds
        for parameter in self._hosted:
            parameter.register_post_accumulate_grad_hook(lambda each: _call(take, each))

    def __del__(self) -> None:
        if not sys.is_finalizing() and self._copies is not None:  # the host memory goes
            device = local_shard(next(iter(self._hosted))).device
            torch.get_device_module(device).synchronize(device)

    def get(self, parameter: Tensor) -> Tensor | None:
        """This rank's shard of this step's gradient, in host memory after its copy (`followed_by`); else None."""
        return self._hosted[parameter] if parameter in self._norms else None

    def followed_by(self, stream: torch.Stream) -> None:
        """Make a stream wait for the copies so far."""
        if self._copies is not None:
            stream.wait_stream(self._copies)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Gradients that are formed inside stay where they are."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    @torch.no_grad()
    def _take(self, parameter: Tensor) -> None:
        """Start the copy of a gradient, on whichever stream has formed it."""
        if self._paused:
            return
        if parameter in self._norms:
            raise RuntimeError(
                "a second backward formed gradients before the step, and those of the first are in host memory; take "
                "a step after each backward, or leave gradient_offload out"
            )
        assert parameter.grad is not None, "the hook follows the gradient"
        local, stage = local_shard(parameter.grad), self._stages.get(parameter, 0)
        [self._norms[parameter]] = torch._foreach_norm([parameter.grad])  # as that of all is formed
        if self._copies is None:
            self._copies = own_stream(local.device)
        self.let_go(stage)
        runtime = torch.get_device_module(local.device)
        self._copies.wait_event(runtime.current_stream().record_event())
        with runtime.stream(self._copies):
            self._hosted[parameter].copy_(local, non_blocking=True)
        self._leaving.append((stage, self._copies.record_event(), local))
        parameter.grad = None

    def let_go(self, stage: int | None = None) -> None:
        """Drop gradients whose copies are under way, but for those of this stage: later work of the computation's
        stream may use their memory, and that of FSDP2's waits for it (`engine.parallelize.ReduceIntoFreedMemory`)."""
        while self._leaving and self._leaving[0][0] != stage:
            _, copied, gradient = self._leaving.popleft()
            compute = self.compute or torch.get_device_module(gradient.device).current_stream()
            compute.wait_event(copied)

    def norm(self, parameters: Iterable[Tensor]) -> Tensor:
        """Global norm of gradients, here or in `Tensor.grad`, 0-dim: as `torch.nn.utils.get_total_norm` forms it.
        Collective where parameters are sharded."""
        norms = [
            self._norms[each] if each in self._norms else torch._foreach_norm([each.grad])[0]
            for each in parameters
            if each in self._norms or each.grad is not None
        ]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def forget(self) -> None:
        """Let backward form new ones."""
        self._norms = {}


def _call(method: weakref.WeakMethod[Callable[[Tensor], None]], parameter: Tensor) -> None:
    if (found := method()) is not None:
        found(parameter)
