"""AdamW whose moments are in host memory, or have 8 bits, on parameters that may be sharded.

Moments in host memory pass through the device a piece at a time. They are two thirds of the memory that sharded fp32
training holds of a parameter besides its gradient, and are used once per step. The idea is ZeRO-Offload's
(arXiv:2101.06840), with the update left on the device: it is limited by the same link, and its results are bit for bit
those of the fused AdamW.

Copies take longer than anything else of an update, and no computation hides them where the next forward waits for the
whole update. So it waits for that of each layer alone (`PiecewiseAdamW.update_in_forward`): the others run meanwhile.
Unlike ZeRO-Offload's delayed update, no forward sees an older parameter.

Gradients can be in host memory as well (`engine.memory.hosted_gradients`), and come with the moments of their piece.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import StateDict

from engine.cuda.streams import own_stream
from engine.memory.hosted_gradients import HostedGradients
from engine.memory.offload import host_like, local_shard
from engine.ops import adamw_8bit
from engine.ops.copies import mark_written
from engine.settings import BUFFERS, PIECE_ELEMENTS, STATES_BLOCK, places_hosted

MOMENTS = ("exp_avg", "exp_avg_sq")
# Of a parameter whose moments have 8 bits: of each moment its codes, and the scales of blocks. Both have the
# parameter's rows, so that a checkpoint can be read by any number of ranks.
PARTS_8BIT = tuple(f"{moment}_{part}" for moment in MOMENTS for part in ("codes", "scales"))
MOST_ELEMENTS = 1 << 30  # of any piece: the library's kernel counts with 32 bits
ALIGNMENT_BYTES = 256  # of each state's place in a buffer
# Stages that are launched before they are needed: enough that the link is never idle. All at once would be more than a
# stream's queue holds, which makes the host wait, thousands of pieces in a model of 8B.
AHEAD = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """Some consecutive elements of this rank's shard of one parameter; flat views of equal length."""

    value: Tensor  # on the device
    gradient: Tensor  # there too, if it is not `taken`
    states: tuple[Tensor, ...]  # both moments, or where they have 8 bits their parts
    offloaded: bool  # whether the states are in host memory
    taken: bool  # whether the gradient is in host memory
    scale: Tensor | None  # one element, that such a gradient is still multiplied by
    steps_done: float
    steps: Tensor  # that number and this step, 0-dim on the device
    group: dict[str, Any]  # settings of this step
    stage: int  # of the next forward, which needs the update

    @property
    def copied_in(self) -> tuple[Tensor, ...]:
        """What an update needs from host memory: the states come first."""
        return (*self.states, self.gradient) if self.taken else self.states

    def update(self, states: Sequence[Tensor], gradient: Tensor) -> None:
        """The AdamW step of these elements, given their states and gradient on the device: torch's fused one, or the
        library's."""
        if len(states) == len(PARTS_8BIT):
            adamw_8bit.adamw(
                self.value,
                gradient,
                (states[0], states[1], states[2], states[3]),
                step=int(self.steps_done) + 1,
                rate=self.group["lr"],
                betas=self.group["betas"],
                epsilon=self.group["eps"],
                decay=self.group["weight_decay"],
            )
            return
        (beta1, beta2), (exp_avg, exp_avg_sq) = self.group["betas"], states
        torch._fused_adamw_(  # one kernel; torch.optim.adamw.adamw adds one that counts the step
            [self.value],
            [gradient],
            [exp_avg],
            [exp_avg_sq],
            [],
            [self.steps],
            amsgrad=False,
            lr=self.group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=self.group["weight_decay"],
            eps=self.group["eps"],
            maximize=False,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pass:
    """Updates of one stage that have been launched."""

    stage: int
    over: torch.Event | None  # the parameters are updated, and their states in host memory; None on a CPU
    pieces: list[_Piece]  # whose gradients are read until then
    buffers: list[Tensor]  # likewise


class PiecewiseAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with the same arguments, `fused=True` included, whose states are elsewhere or have 8 bits.

    `offload` is the fraction of the elements whose states are in host memory, page-locked, from 0 to 1, in whole
    parameters: those of `places_hosted`. The states of the others are on the device. Parameters and states are those of
    torch bit for bit.

    The moments of the matrices in `eight_bit`, whose rows are whole blocks of STATES_BLOCK elements, have 8 bits.

    A state of a DTensor is one with the same shards: `torch.distributed.checkpoint` saves and loads it like any other.
    """

    def __init__(
        self, *args: object, offload: float = 1.0, eight_bit: Iterable[Tensor] = (), **options: object
    ) -> None:
        super().__init__(*args, **options)
        self._eight_bit = frozenset(eight_bit)
        parameters = [each for group in self.param_groups for each in group["params"]]
        hosted = places_hosted([each.numel() for each in parameters], offload)
        self._offloaded = frozenset(each for place, each in enumerate(parameters) if place in hosted)
        self._stages: dict[Tensor, int] = {}  # of the forward, by the parameters that it needs
        self._to_launch: Iterator[_Pass] = iter(())  # updates of the last step
        self._running: deque[_Pass] = deque()  # those of them that are launched and may still run, by stage
        self.taken: HostedGradients | None = None
        self.gradient_scale: Tensor | None = None  # one element: what taken gradients are multiplied by in this step
        self._streams: dict[torch.device, tuple[Any, Any, Any]] = {}
        self.register_state_dict_pre_hook(lambda optimizer: self._settle())

    def update_in_forward(self, model: nn.Module, parts: Sequence[nn.Module]) -> None:
        """From now on `step` leaves the updates of parameters with states in host memory to run while the next forward
        computes, which waits for them part by part.

        `parts` are modules of the model in the order of its forward, each called once. Before one is called its own
        parameters are updated and those of the next, which FSDP2 may gather meanwhile; those of no part are before the
        model is. `wait` is for everything else that reads parameters or gradients after a step; forwards and state
        dicts of the model and of this optimizer do so themselves. Gradients are held until then.

        Without effect on moments in 8 bits: their library's kernel runs on the stream of the forward.
        """
        if self._eight_bit:
            return
        for stage, part in enumerate(parts):
            for parameter in part.parameters():
                self._stages.setdefault(parameter, stage)
            # Before the hooks of FSDP2, which gather.
            part.register_forward_pre_hook(lambda *_, following=stage + 1: self.wait(following), prepend=True)
        for parameter in model.parameters():
            self._stages.setdefault(parameter, 0)
        model.register_forward_pre_hook(lambda module, _: self._begin_forward(module), prepend=True)
        model.register_state_dict_pre_hook(lambda *_: self.wait())
        model.register_load_state_dict_pre_hook(lambda *_: self.wait())

    def take_gradients(self) -> None:
        """From now on gradients of parameters with moments in host memory go there too. After `update_in_forward`."""
        self.taken = HostedGradients(self._offloaded, self._stages)

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """This rank's shard of a gradient, wherever it is; None where there is none."""
        if (taken := self._taken(parameter)) is not None:
            device = local_shard(parameter).device
            torch.get_device_module(device).synchronize(device)  # it may still come
            return taken
        return None if parameter.grad is None else local_shard(parameter.grad)

    def _taken(self, parameter: Tensor) -> Tensor | None:
        return None if self.taken is None else self.taken.get(parameter)

    def _begin_forward(self, model: nn.Module) -> None:
        self.wait(0)
        if self.taken is not None:
            device = local_shard(next(model.parameters())).device
            self.taken.compute = torch.get_device_module(device).current_stream()

    def wait(self, stage: int | None = None) -> None:
        """Until the parameters that the next forward needs up to this stage are updated, by default all, and their
        states in host memory. Blocks the host, which then frees their gradients."""
        self._launch(None if stage is None else stage + AHEAD)
        while self._running and (stage is None or self._running[0].stage <= stage):
            if (over := self._running[0].over) is not None:
                over.synchronize()
            self._running.popleft()

    def _launch(self, stage: int | None) -> None:
        """Launch the updates of the last step up to this stage, by default all."""
        while stage is None or not self._running or self._running[-1].stage < stage:
            if (launched := next(self._to_launch, None)) is None:
                return
            self._running.append(launched)

    def join(self) -> None:
        """Make the current stream wait for all updates, in place of the host."""
        self._launch(None)
        for device, (_, _, outbound) in self._streams.items():
            torch.get_device_module(device).current_stream().wait_stream(outbound)
        self._running.clear()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient. Copies and updates of different pieces overlap."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.wait()
        if self.taken is not None:
            self.taken.let_go()
        parameters = [each for group in self.param_groups for each in group["params"]]
        updated = [each for each in parameters if each.grad is not None or self._taken(each) is not None]
        pieces = [piece for group in self.param_groups for piece in self._pieces(group)]
        for piece in pieces:
            if not piece.offloaded:
                piece.update(piece.states, piece.gradient)
        passing = deque(sorted((piece for piece in pieces if piece.offloaded), key=lambda piece: piece.stage))
        if passing:
            self._to_launch = self._pass_through(passing, passing[0].value.device)
            self._launch(AHEAD)
        if not self._stages:
            self.join()
        mark_written(updated)
        self.gradient_scale = None
        if self.taken is not None:
            self.taken.forget()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Gradients that updates still read are not overwritten."""
        if not set_to_none:
            self.wait()
        if self.taken is not None:
            self.taken.forget()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Copy states of equal sharding to where they live, parameter by parameter. No other state is on the device."""
        self._settle()
        hosted = dict(self.state)
        super().load_state_dict(state_dict | {"state": {}})  # torch's own would move all states to the device
        numbers = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in state_dict["state"]:
                saved, own = state_dict["state"][number], hosted.get(parameter) or self._new_state(parameter)
                own["step"].copy_(torch.as_tensor(saved["step"]))
                for name in own.keys() - {"step"}:
                    local_shard(own[name]).copy_(local_shard(saved[name]))
                self.state[parameter] = own

    def _pieces(self, group: dict[str, Any]) -> Iterator[_Piece]:
        """This rank's elements of a group, in order; counts the step and creates missing states."""
        counts: dict[tuple[torch.device, float], Tensor] = {}
        settings = {name: value for name, value in group.items() if name != "params"}  # a schedule may change them
        for parameter in group["params"]:
            taken = self._taken(parameter)
            if parameter.grad is None and taken is None:
                continue
            state = self.state[parameter]
            if not state:
                state.update(self._new_state(parameter))
            steps_done = state["step"].item()
            state["step"] += 1
            device = local_shard(parameter).device
            if (device, steps_done) not in counts:
                counts[device, steps_done] = torch.full((), steps_done + 1, dtype=torch.float32, device=device)
            elements, offloaded = local_shard(parameter).numel(), parameter in self._offloaded
            if not elements:
                continue
            most = PIECE_ELEMENTS if offloaded else MOST_ELEMENTS
            gradient = local_shard(parameter.grad).contiguous() if taken is None else taken
            if offloaded and taken is None and parameter.ndim < 2:
                gradient = gradient.clone()  # FSDP2 forms those of a layer in one tensor, which lives with each of them
            own = (local_shard(parameter.detach()), gradient)
            parts = (local_shard(part) for name, part in state.items() if name != "step")
            flat = [each.view(-1) for each in (*own, *parts)]
            for value, gradient, *states in zip(
                *(each.split(most * each.numel() // elements) for each in flat), strict=True
            ):
                yield _Piece(
                    value=value, gradient=gradient, states=tuple(states), group=settings, steps_done=steps_done,
                    steps=counts[device, steps_done], offloaded=offloaded, taken=taken is not None,
                    scale=None if taken is None else self.gradient_scale, stage=self._stages.get(parameter, 0),
                )  # fmt: skip

    def _pass_through(self, pieces: deque[_Piece], device: torch.device) -> Iterator[_Pass]:
        """Copy each piece's states in, update, and copy them out, on three streams that wait for one another. There is
        one pass for each stage. It is launched when the caller asks for it.

        `pieces` are sorted by stage. Each leaves the queue for its pass, and only the pass holds its gradient then.

        The buffers are allocated for the step alone: the rest of forward, and backward, can use their memory.
        """
        runtime = torch.get_device_module(device)
        compute = runtime.current_stream()
        inbound, updating, outbound = self._streams_of(device)
        if self._eight_bit:
            updating = compute
        most_bytes = max(sum(map(_bytes_in_buffer, piece.copied_in)) for piece in pieces)
        buffers = [torch.empty(most_bytes, dtype=torch.uint8, device=device) for _ in range(min(BUFFERS, len(pieces)))]
        left: list[Any] = [None] * len(buffers)  # events: the buffer's last piece is in host memory
        inbound.wait_stream(compute)  # the buffers' memory may still be in use there
        inbound.wait_stream(outbound)  # which writes what the step before left
        if self.taken is not None:
            self.taken.followed_by(inbound)
        updating.wait_stream(compute)  # where the gradients are formed, and the parameters read
        number = 0
        while pieces:
            stage, passed = pieces[0].stage, list[_Piece]()
            while pieces and pieces[0].stage == stage:
                passed.append(pieces.popleft())
            try:
                for piece in passed:
                    index, number = number % len(buffers), number + 1
                    left[index] = self._pass(piece, buffers[index], left[index], runtime, (inbound, updating, outbound))
            except BaseException:
                runtime.synchronize(device)  # which may still use what goes now
                raise
            launched = _Pass(stage=stage, over=outbound.record_event(), pieces=passed, buffers=buffers)
            del passed, piece
            yield launched
            del launched

    def _pass(self, piece: _Piece, buffer: Tensor, left: Any, runtime: Any, streams: tuple[Any, Any, Any]) -> Any:
        """The same of one piece, in a buffer whose last piece has left at an event; returns the event of this one."""
        inbound, updating, outbound = streams
        came = _views(buffer, piece.copied_in)
        states, gradient = came[: len(piece.states)], came[-1] if piece.taken else piece.gradient
        with runtime.stream(inbound):
            if left is not None:
                inbound.wait_event(left)
            for part, hosted in zip(came, piece.copied_in, strict=True):
                part.copy_(hosted, non_blocking=True)
        updating.wait_event(inbound.record_event())
        with runtime.stream(updating):
            if piece.scale is not None:
                gradient.mul_(piece.scale)
            piece.update(states, gradient)
        outbound.wait_event(updating.record_event())
        with runtime.stream(outbound):
            for state, hosted in zip(states, piece.states, strict=True):
                hosted.copy_(state, non_blocking=True)
            return outbound.record_event()

    def _streams_of(self, device: torch.device) -> tuple[Any, Any, Any]:
        """Those of copies in, of updates, and of copies out. Updates come before the blocks of a forward's kernel that
        have not begun: else the link would wait for the end of attention."""
        if device not in self._streams:
            self._streams[device] = own_stream(device), own_stream(device, priority=-1), own_stream(device)
        return self._streams[device]

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Moments of 0 where they live, and no step done."""
        hosted, zero = parameter in self._offloaded, {"step": torch.zeros(())}
        if parameter not in self._eight_bit:
            return zero | {name: _zeros(parameter, 1, parameter.dtype, hosted) for name in MOMENTS}
        codes, scales = (1, torch.uint8), (STATES_BLOCK, torch.float32)
        return zero | {
            name: _zeros(parameter, *part, hosted) for name, part in zip(PARTS_8BIT, (codes, scales) * 2, strict=True)
        }

    def __del__(self) -> None:
        if not sys.is_finalizing():  # the host memory goes with the states
            for device in getattr(self, "_streams", ()):
                torch.get_device_module(device).synchronize(device)

    def _settle(self) -> None:
        """Wait until host memory holds the last step's moments."""
        self.wait()
        for device in self._streams:
            torch.get_device_module(device).synchronize(device)


def _zeros(parameter: Tensor, run: int, dtype: torch.dtype, hosted: bool) -> Tensor:
    """Zeros, one for each `run` elements of a row, sharded as the parameter; in host memory or on its device."""
    local = local_shard(parameter)
    sizes = [torch.Size((*each.shape[:-1], each.shape[-1] // run)) for each in (local, parameter)]
    like = torch.empty(sizes[0], dtype=dtype, device="meta")
    zeros = (host_like(like, local.device) if hosted else torch.empty_like(like, device=local.device)).zero_()
    if not isinstance(parameter, DTensor):
        return zeros
    whole = torch.empty(sizes[1], device="meta")
    meta = parameter._spec.tensor_meta._replace(shape=whole.shape, stride=whole.stride(), dtype=dtype)
    # DTensor.from_local would move host memory to the mesh's device.
    return DTensor(zeros, replace(parameter._spec, tensor_meta=meta), requires_grad=False)


def _bytes_in_buffer(state: Tensor) -> int:
    return -(-state.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _views(buffer: Tensor, states: Sequence[Tensor]) -> list[Tensor]:
    """Tensors like these in a buffer of bytes, one after another."""
    places = itertools.accumulate(map(_bytes_in_buffer, states), initial=0)
    return [buffer[at : at + state.nbytes].view(state.dtype) for at, state in zip(places, states, strict=False)]
