"""AdamW on the model's shards, its states on the device or in host memory, and in one pass where nothing is sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from engine.memory.offloaded_adamw import OffloadedAdamW
from engine.models.decoder import Decoder
from engine.ops.copies import copy_of
from engine.ops.triton_kernels import kernels_for
from engine.recipe import Recipe

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
            return super().step(closure)
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
    model: Decoder, learning_rate: float, recipe: Recipe, *, offload: bool = False, one_pass: bool = False
) -> torch.optim.AdamW:
    """The optimizer of a model whose parameters may be sharded: each rank holds the states of its shards.

    Matrices are decayed, norms are not. With `offload` the states live in host memory; parameters and states are bit
    for bit the same. `one_pass` is for parameters that are not sharded; with it they are the same to rounding.
    """
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    kind = OffloadedAdamW if offload else OnePassAdamW if one_pass else torch.optim.AdamW
    return kind(
        [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=learning_rate,
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.epsilon,
        fused=True,
    )


def clip_gradients(model: Decoder, max_norm: float = 1.0) -> Tensor:
    """Scale all gradients down to a global norm of `max_norm`; returns the norm before that, 0-dim. Collective."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def clip_and_step(model: Decoder, optimizer: torch.optim.Optimizer, max_norm: float = 1.0) -> Tensor:
    """`clip_gradients`, then the optimizer's step, in one pass where the optimizer can; returns the norm, 0-dim, which
    stays on the device: nothing waits for it. Collective."""
    if not isinstance(optimizer, OnePassAdamW):
        norm = clip_gradients(model, max_norm)
        optimizer.step()
        return norm
    norm = torch.nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])
    # As torch's clip_grad_norm_, its 1e-6 included.
    optimizer.gradient_scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    optimizer.step()
    return norm
