"""AdamW on the model's shards: states on the device, in host memory or in both, and in 8 bits where asked; in one pass
where nothing is sharded.

Offloaded moments are copied through the device a piece at a time. They are two thirds of the memory that sharded fp32
training holds of a parameter besides its gradient, and are used once per step. The idea is ZeRO-Offload's
(arXiv:2101.06840), with the update left on the device: it is limited by the same link, and its results are bit for bit
those of the fused AdamW.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.optimizer import StateDict

from engine.cuda.streams import own_stream
from engine.memory.offload import host_like
from engine.models.decoder import Decoder
from engine.ops import adamw_8bit
from engine.ops.autograd import kernels_for
from engine.ops.copies import copy_of
from engine.settings import STATES_BLOCK, AdamWSettings, has_moments_in_8_bits

MOMENTS = ("exp_avg", "exp_avg_sq")
# Of a parameter whose moments have 8 bits: of each moment its codes, and the scales of blocks. Both have the
# parameter's rows, so that a checkpoint can be read by any number of ranks.
PARTS_8BIT = tuple(f"{moment}_{part}" for moment in MOMENTS for part in ("codes", "scales"))
# Of a piece that is copied: long enough that a copy runs at the link's speed, short enough that the buffers take little
# memory.
PIECE_ELEMENTS = 1 << 23
MOST_ELEMENTS = 1 << 30  # of any piece: the library's kernel counts with 32 bits
ALIGNMENT_BYTES = 256  # of each state's place in a buffer
BUFFERS = 3  # one piece is copied in, one is updated, one is copied out


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """Some consecutive elements of this rank's shard of one parameter; flat views of equal length."""

    value: Tensor  # on the device
    gradient: Tensor  # on the device
    states: tuple[Tensor, ...]  # both moments, or where they have 8 bits their parts
    offloaded: bool  # whether the states are in host memory
    steps_done: float
    group: dict[str, Any]

    def update(self, states: Sequence[Tensor]) -> None:
        """The AdamW step of these elements, given their states on the device: torch's fused one, or the library's."""
        if len(states) == len(PARTS_8BIT):
            adamw_8bit.adamw(
                self.value,
                self.gradient,
                (states[0], states[1], states[2], states[3]),
                step=int(self.steps_done) + 1,
                rate=self.group["lr"],
                betas=self.group["betas"],
                epsilon=self.group["eps"],
                decay=self.group["weight_decay"],
            )
            return
        (beta1, beta2), exp_avg, exp_avg_sq = self.group["betas"], *([moment] for moment in states)
        torch_adamw(
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


class PiecewiseAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with the same arguments, `fused=True` included, whose states are elsewhere or have 8 bits.

    `offload` is the fraction of the elements whose states are in host memory, page-locked, from 0 to 1. The smallest
    parameters come first, so that it is exceeded by less than one parameter; the states of the others are on the
    device. Parameters and states are those of torch bit for bit.

    The moments of the matrices in `eight_bit`, whose rows are whole blocks of STATES_BLOCK elements, have 8 bits.

    A state of a DTensor is one with the same shards: `torch.distributed.checkpoint` saves and loads it like any other.
    """

    def __init__(
        self, *args: object, offload: float = 1.0, eight_bit: Iterable[Tensor] = (), **options: object
    ) -> None:
        super().__init__(*args, **options)
        self._eight_bit = frozenset(eight_bit)
        parameters = sorted((each for group in self.param_groups for each in group["params"]), key=Tensor.numel)
        before = itertools.accumulate((each.numel() for each in parameters), initial=0)
        wanted = offload * sum(each.numel() for each in parameters)
        self._offloaded = {each for each, hosted in zip(parameters, before, strict=False) if hosted < wanted}
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
        for piece in pieces:
            if not piece.offloaded:
                piece.update(piece.states)
        passing = [piece for piece in pieces if piece.offloaded]
        for device, some in itertools.groupby(passing, lambda piece: piece.value.device):
            self._pass_through(list(some), device)
        _mark_written(each for group in self.param_groups for each in group["params"] if each.grad is not None)
        return loss

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
                    _local(own[name]).copy_(_local(saved[name]))
                self.state[parameter] = own

    def _pieces(self, group: dict[str, Any]) -> Iterator[_Piece]:
        """This rank's elements of a group, in order; counts the step and creates missing states."""
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state.update(self._new_state(parameter))
            steps_done = state["step"].item()
            state["step"] += 1
            elements, offloaded = _local(parameter).numel(), parameter in self._offloaded
            if not elements:
                continue
            most = PIECE_ELEMENTS if offloaded else MOST_ELEMENTS
            own = (_local(parameter.detach()), _local(parameter.grad).contiguous())
            parts = (_local(part) for name, part in state.items() if name != "step")
            flat = [each.view(-1) for each in (*own, *parts)]
            for value, gradient, *states in zip(
                *(each.split(most * each.numel() // elements) for each in flat), strict=True
            ):
                yield _Piece(
                    value=value, gradient=gradient, states=tuple(states), group=group, steps_done=steps_done,
                    offloaded=offloaded,
                )  # fmt: skip

    def _pass_through(self, pieces: list[_Piece], device: torch.device) -> None:
        """Copy each piece's states in, update, and copy them out, on three streams that wait for one another.

        The buffers are allocated for the step alone: forward and backward can use their memory.
        """
        runtime = torch.get_device_module(device)
        compute = runtime.current_stream()
        if device not in self._streams:
            self._streams[device] = own_stream(device), own_stream(device)
        inbound, outbound = self._streams[device]
        most_bytes = max(sum(map(_bytes_in_buffer, piece.states)) for piece in pieces)
        buffers = [torch.empty(most_bytes, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        left: list[Any] = [None] * BUFFERS  # events: the buffer's last piece is in host memory
        inbound.wait_stream(compute)  # the buffers' memory may still be in use there
        for number, piece in enumerate(pieces):
            index = number % BUFFERS
            states = _views(buffers[index], piece.states)
            with runtime.stream(inbound):
                if left[index] is not None:
                    inbound.wait_event(left[index])
                for state, hosted in zip(states, piece.states, strict=True):
                    state.copy_(hosted, non_blocking=True)
            compute.wait_event(inbound.record_event())
            piece.update(states)
            outbound.wait_event(compute.record_event())
            with runtime.stream(outbound):
                for state, hosted in zip(states, piece.states, strict=True):
                    hosted.copy_(state, non_blocking=True)
                left[index] = outbound.record_event()
        compute.wait_stream(outbound)  # before the buffers' memory is reused, and the next step reads host memory

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Moments of 0 where they live, and no step done."""
        hosted, zero = parameter in self._offloaded, {"step": torch.zeros(())}
        if parameter not in self._eight_bit:
            return zero | {name: _zeros(parameter, 1, parameter.dtype, hosted) for name in MOMENTS}
        codes, scales = (1, torch.uint8), (STATES_BLOCK, torch.float32)
        return zero | {
            name: _zeros(parameter, *part, hosted) for name, part in zip(PARTS_8BIT, (codes, scales) * 2, strict=True)
        }

    def _settle(self) -> None:
        """Wait until host memory holds the last step's moments."""
        for device in self._streams:
            torch.get_device_module(device).synchronize(device)


def _zeros(parameter: Tensor, run: int, dtype: torch.dtype, hosted: bool) -> Tensor:
    """Zeros, one for each `run` elements of a row, sharded as the parameter; in host memory or on its device."""
    local = _local(parameter)
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


def _mark_written(parameters: Iterable[Tensor]) -> None:
    """Raise the parameters' versions, by which their copies see what was written: kernels leave them as they are."""
    torch.autograd.graph.increment_version(list(parameters))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


KERNELS = "engine.ops.adamw_triton"


class OnePassAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with the same arguments and states, which also clips, and writes the parameters' copies.

    Where Triton's kernel runs, `step` passes over memory once: it reads the gradients as multiplied by `gradient_scale`
    and writes each parameter and its copy in the dtype of the computation. Elsewhere the gradients are multiplied,
    torch's update runs, and the model's next forward makes the copies.
    """

    gradient_scale: Tensor | None = None  # one element, fp32; None for 1. `step` uses it up
    # Learning rates on the device, 0-dim in fp32, that the kernel reads in place of the parameter groups' own,
    # one each: for a CUDA graph, in which a number of the host is a constant. None outside of its capture.
    device_rates: list[Tensor] | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient."""
        scale, self.gradient_scale = self.gradient_scale, None
        if closure is not None or not all(map(_in_kernel, self._with_gradient())):
            assert self.device_rates is None, "torch's update takes the learning rate from the host"
            if scale is not None:
                torch._foreach_mul_([parameter.grad for parameter in self._with_gradient()], scale)
            loss: float | None = super().step(closure)
            _mark_written(self._with_gradient())
            return loss
        rates = self.device_rates or [group["lr"] for group in self.param_groups]
        for group, rate in zip(self.param_groups, rates, strict=True):
            self._step(group, rate, scale)
        return None

    def _with_gradient(self) -> list[Tensor]:
        return [each for group in self.param_groups for each in group["params"] if each.grad is not None]

    def _step(self, group: dict[str, Any], rate: float | Tensor, scale: Tensor | None) -> None:
        found: tuple[list[Tensor], ...] = ([], [], [], [], [], [])
        self._init_group(group, *found)  # makes missing states
        parameters, gradients, exp_avgs, exp_avg_sqs, _, steps = found
        if not parameters:
            return
        torch._foreach_add_(steps, 1.0)
        counts_P = torch.stack(steps).to(parameters[0].device, torch.float64)  # in fp32, 1 - 0.999^t loses four digits
        (beta1, beta2), factors_P3 = group["betas"], torch.empty(len(steps), 3, device=counts_P.device)
        factors_P3[:, 0] = 1 - beta1**counts_P
        factors_P3[:, 1] = (1 - beta2**counts_P).sqrt()
        factors_P3[:, 2] = rate
        for place, (parameter, gradient, exp_avg, exp_avg_sq) in enumerate(
            zip(parameters, gradients, exp_avgs, exp_avg_sqs, strict=True)
        ):
            kernels_for(parameter, KERNELS).adamw(
                parameter.detach(),
                gradient.contiguous(),
                exp_avg,
                exp_avg_sq,
                copy=copy_of(parameter),
                scale=scale,
                factors=factors_P3[place],
                betas=(beta1, beta2),
                epsilon=group["eps"],
                decay=group["weight_decay"],
            )


def _in_kernel(parameter: Tensor) -> bool:
    """Whether the kernel can update it: whole, in fp32, contiguous, on a GPU."""
    whole = not isinstance(parameter, DTensor) and parameter.dtype == torch.float32 and parameter.is_contiguous()
    return whole and kernels_for(parameter, KERNELS) is not None


def adamw(
    model: Decoder,
    learning_rate: float,
    recipe: AdamWSettings,
    *,
    offload: float = 0.0,
    one_pass: bool = False,
    eight_bit: bool = False,
) -> torch.optim.AdamW:
    """The optimizer of a model whose parameters may be sharded: each rank holds the states of its shards.

    Matrices are decayed, norms are not. The states of the fraction `offload` live in host memory; parameters and states
    are bit for bit the same. `one_pass` is for parameters that are not sharded; with it they are the same to rounding.
    With `eight_bit` moments are rounded to 8 bits, of those parameters that `has_moments_in_8_bits` names; raises
    ValueError where the library is missing.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    vectors = [parameter for parameter in trained if parameter.ndim == 1]
    kind: Callable[..., torch.optim.AdamW] = OnePassAdamW if one_pass else torch.optim.AdamW
    rounded: list[Tensor] = []
    if eight_bit:
        adamw_8bit.functions()
        rounded = [each for name, each in model.named_parameters() if has_moments_in_8_bits(name, each.shape)]
    if offload or eight_bit:
        kind = partial(PiecewiseAdamW, offload=offload, eight_bit=rounded)
    return kind(
        [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=learning_rate,
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.epsilon,
        fused=True,
    )


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Global norm of the gradients of parameters that may be sharded, 0-dim. Collective."""
    norm = torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def clip_and_step(
    model: Decoder, optimizer: torch.optim.Optimizer, max_norm: float = 1.0, norm: Tensor | None = None
) -> Tensor:
    """Scale all gradients down to a global norm of `max_norm`, then the optimizer's step, in one pass where the
    optimizer can; returns the norm before that, 0-dim, which stays on the device: nothing waits for it. Collective.

    `norm` is that of all gradients, by default `gradient_norm` of the model's.
    """
    norm = gradient_norm(model.parameters()) if norm is None else norm
    if isinstance(optimizer, OnePassAdamW):
        # As torch's clip_grads_with_norm_, its 1e-6 included.
        optimizer.gradient_scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    else:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    optimizer.step()
    return norm
