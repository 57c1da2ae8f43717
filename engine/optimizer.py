"""AdamW on the model's shards, and clipping by the global norm: in one pass where nothing is sharded, in pieces where
states are in host memory or have 8 bits, torch's own elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from engine.memory.moments import PiecewiseAdamW
from engine.models.decoder import Decoder
from engine.ops import adamw_8bit
from engine.ops.autograd import kernels_for
from engine.ops.copies import copy_of, mark_written
from engine.settings import AdamWSettings, has_moments_in_8_bits

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
            mark_written(self._with_gradient())
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
    if isinstance(optimizer, OnePassAdamW | PiecewiseAdamW):
        # As torch's clip_grads_with_norm_, its 1e-6 included.
        optimizer.gradient_scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if not isinstance(optimizer, OnePassAdamW):
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    optimizer.step()
    return norm
