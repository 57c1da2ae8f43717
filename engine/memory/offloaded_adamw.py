"""AdamW whose two moments are in host memory and copied through the device a piece at a time.

The moments are two thirds of the memory that sharded fp32 training holds of a parameter besides its gradient, and are
used once per step. The idea is ZeRO-Offload's (arXiv:2101.06840), with the update left on the device: it is limited by
the same link, and its results are bit for bit those of the fused AdamW.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from engine.cuda.streams import own_stream
from engine.memory.host_memory import host_like

MOMENTS = ("exp_avg", "exp_avg_sq")
# Long enough that a copy runs at the link's speed, short enough that the buffers take little memory.
PIECE_ELEMENTS = 1 << 23
BUFFERS = 3  # one piece is copied in, one is updated, one is copied out


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """Some consecutive elements of this rank's shard of one parameter; flat views of equal length."""

    value: Tensor  # on the device
    gradient: Tensor  # on the device
    hosted: tuple[Tensor, ...]  # the moments
    steps_done: float
    group: dict[str, Any]

    def update(self, moments: list[Tensor]) -> None:
        """The fused AdamW step of these elements, given their moments on the device."""
        (beta1, beta2), exp_avg, exp_avg_sq = self.group["betas"], *([moment] for moment in moments)
        adamw(
            [self.value],
            [self.gradient],
            exp_avg,
            exp_avg_sq,
            [],
            [torch.full((), self.steps_done, dtype=torch.float32, device=self.value.device)],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=self.group["lr"],
            weight_decay=self.group["weight_decay"],
            eps=self.group["eps"],
            maximize=False,
        )


class OffloadedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with the same arguments, `fused=True` included, and the same parameters and states.

    A state is a DTensor with the shards of its parameter, but its local tensor is page-locked host memory;
    `torch.distributed.checkpoint` saves and loads it like any other.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._streams: dict[torch.device, tuple[Any, Any]] = {}
        self.register_state_dict_pre_hook(lambda optimizer: self._settle())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient. Copies and updates of different pieces overlap."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pieces = [piece for group in self.param_groups for piece in self._pieces(group)]
        for (device, dtype), some in itertools.groupby(pieces, lambda piece: (piece.value.device, piece.value.dtype)):
            self._pass_through(list(some), device, dtype)
        return loss

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy states of equal sharding into host memory, parameter by parameter. No whole state is on the device."""
        self._settle()
        hosted = dict(self.state)
        super().load_state_dict(state_dict | {"state": {}})  # torch's own would move all states to the device
        numbers = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in state_dict["state"]:
                saved, own = state_dict["state"][number], hosted.get(parameter) or _new_state(parameter)
                own["step"].copy_(torch.as_tensor(saved["step"]))
                for name in MOMENTS:
                    _local(own[name]).copy_(_local(saved[name]))
                self.state[parameter] = own

    def _pieces(self, group: dict[str, Any]) -> Iterator[_Piece]:
        """This rank's elements of a group, in order; counts the step and creates missing states."""
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state.update(_new_state(parameter))
            steps_done = state["step"].item()
            state["step"] += 1
            flat = (parameter.detach(), parameter.grad, *(state[name] for name in MOMENTS))
            for value, gradient, *hosted in zip(*(_local(t).view(-1).split(PIECE_ELEMENTS) for t in flat), strict=True):
                if value.numel():
                    yield _Piece(
                        value=value, gradient=gradient, hosted=tuple(hosted), steps_done=steps_done, group=group
                    )

    def _pass_through(self, pieces: list[_Piece], device: torch.device, dtype: torch.dtype) -> None:
        """Copy each piece's moments in, update, and copy them out, on three streams that wait for one another.

        The buffers are allocated for the step alone: forward and backward can use their memory.
        """
        runtime = torch.get_device_module(device)
        compute = runtime.current_stream()
        if device not in self._streams:
            self._streams[device] = own_stream(device), own_stream(device)
        inbound, outbound = self._streams[device]
        longest = max(piece.value.numel() for piece in pieces)
        buffers = [torch.empty(len(MOMENTS), longest, dtype=dtype, device=device) for _ in range(BUFFERS)]
        left: list[Any] = [None] * BUFFERS  # events: the buffer's last piece is in host memory
        inbound.wait_stream(compute)  # the buffers' memory may still be in use there
        for number, piece in enumerate(pieces):
            index = number % BUFFERS
            moments = [row[: piece.value.numel()] for row in buffers[index]]
            with runtime.stream(inbound):
                if left[index] is not None:
                    inbound.wait_event(left[index])
                for moment, hosted in zip(moments, piece.hosted, strict=True):
                    moment.copy_(hosted, non_blocking=True)
            compute.wait_event(inbound.record_event())
            piece.update(moments)
            outbound.wait_event(compute.record_event())
            with runtime.stream(outbound):
                for moment, hosted in zip(moments, piece.hosted, strict=True):
                    hosted.copy_(moment, non_blocking=True)
                left[index] = outbound.record_event()
        compute.wait_stream(outbound)  # before the buffers' memory is reused, and the next step reads host memory

    def _settle(self) -> None:
        """Wait until host memory holds the last step's moments."""
        for device in self._streams:
            torch.get_device_module(device).synchronize(device)


def _new_state(parameter: Tensor) -> dict[str, Tensor]:
    """Moments of 0 in host memory, and no step done."""
    return {"step": torch.zeros(()), **{name: _hosted_zeros(parameter) for name in MOMENTS}}


def _hosted_zeros(parameter: Tensor) -> Tensor:
    local = _local(parameter)
    hosted = host_like(local, local.device).zero_()
    if not isinstance(parameter, DTensor):
        return hosted
    # DTensor.from_local would move it to the mesh's device.
    return DTensor(hosted, parameter._spec, requires_grad=False)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
