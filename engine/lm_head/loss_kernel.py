"""Implementations of the LM head's loss: which can run, and the one of a trial's settings.

`own` is `engine.lm_head.loss`; the others are libraries, called as they ship. Plans, workers and `burst doctor` use
the same functions and so give the same reasons. Nothing imports torch before a loss is formed, since plans do not.

Cut Cross-Entropy (arXiv:2411.09009): logits exist in a kernel's registers only, once in forward for the log-partition
and once more in backward for the gradients. Its backward leaves out blocks of the logits' gradient that are all below
2^-12, a part of what bf16 tells from 1, and sums both gradients in the inputs' dtype.

Liger Kernel (arXiv:2410.10989): logits of a run of tokens in the inputs' dtype, gradients formed in the forward pass in
their place. The weight gradient is summed in fp32, as in `fused`. Its backward scales the saved gradients in place, so
backward may run only once.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.settings import TrialSettings

if TYPE_CHECKING:
    from torch import Tensor

    from engine.lm_head.loss import LossSum

IGNORE = -100  # label of a token that predicts nothing: torch's own convention


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """A library with a fused LM head and loss for GPUs."""

    module: str  # as imported
    requirement: str  # as pip takes it; pyproject.toml has the same
    source: str
    dtypes: tuple[str, ...]  # of the settings, those it supports
    z_loss: bool  # it has this term

    def unsupported_reason(self) -> str | None:
        """One sentence with the line that installs it, or None when it is installed."""
        if importlib.util.find_spec(self.module) is not None:
            return None
        return f"{self.module} is not installed; pip install {self.requirement}"


LIBRARIES = {
    "liger": Library(
        module="liger_kernel",
        requirement="liger-kernel==0.8.5",
        source="Liger Kernel, arXiv:2410.10989",
        dtypes=("bf16", "fp32"),
        z_loss=True,
    ),
    "cce": Library(
        module="cut_cross_entropy",
        requirement="cut-cross-entropy==25.1.1",
        source="Cut Cross-Entropy, arXiv:2411.09009",
        dtypes=("bf16",),
        z_loss=False,
    ),
}


# Bytes of one tile's logits on a GPU, unless the hidden states take more. Every tile of tokens adds to the V x E weight
# gradient, which is read and written whole: with a 128256 x 4096 head 1 GiB is 4K tokens in bf16, whose matmuls
# outweigh that traffic many times on an H200.
GPU_TILE_BYTES = 1 << 30
# Tokens beyond which a larger tile gains little: an eighth of all, between these two.
ENOUGH_TOKENS = (4096, 8192)


def gpu_tile_tokens(vocabulary: int, width: int, itemsize: int, tokens: float) -> float:
    """Tokens of a tile that the fused loss takes of `tokens` hidden states of this width and bytes per element on a
    GPU, before it is rounded down."""
    low, high = ENOUGH_TOKENS
    fit = max(GPU_TILE_BYTES, itemsize * tokens * width) / (itemsize * vocabulary)
    return min(fit, max(low, tokens / 8), high)


def forms_tiles(settings: TrialSettings) -> bool:
    """Whether the engine's fused loss runs, which takes a number of tiles."""
    return settings.lm_head_fusion and settings.loss_kernel == "own"


def unsupported_reason(settings: TrialSettings, device_type: str) -> str | None:
    """One sentence why the LM head's loss cannot be formed as asked on this device (cuda, cpu) and machine, or None.

    Reasons that hold on any machine are first.
    """
    name = settings.loss_kernel
    library = LIBRARIES.get(name)
    if settings.head_tiles and not forms_tiles(settings):
        other = f"loss_kernel {name} sizes its own" if settings.lm_head_fusion else "lm_head_fusion is false"
        return f"head_tiles is {settings.head_tiles}, but {other}; set head_tiles to 0, or let the engine form the loss"
    if library is None:
        return None
    if not settings.lm_head_fusion:
        return f"loss_kernel {name} is fused, but lm_head_fusion is false; set loss_kernel to own or fuse"
    if settings.dtype not in library.dtypes:
        takes = " or ".join(library.dtypes)
        return f"loss_kernel {name} takes dtype {takes}, found {settings.dtype}; choose loss_kernel own for it"
    if settings.z_loss and not library.z_loss:
        return (
            f"loss_kernel {name} has no z-loss, found z_loss {settings.z_loss:g}; choose own or liger, or set it to 0"
        )
    if device_type != "cuda":
        return f"loss_kernel {name} needs a GPU, and this machine has none; choose loss_kernel own"
    reason = library.unsupported_reason()
    return None if reason is None else f"loss_kernel {name} cannot run: {reason}"


def available(device_type: str) -> list[tuple[str, bool, str]]:
    """Every implementation: name, whether this machine can run it, and one sentence. The lines of `burst doctor`."""
    lines = [("own", True, "ready")]
    for name, library in LIBRARIES.items():
        reason = library.unsupported_reason()
        if reason is None and device_type != "cuda":
            reason = f"{library.requirement.partition('==')[0]} is installed, but needs a GPU"
        lines.append((name, reason is None, reason or f"ready ({library.source})"))
    return lines


def loss_sum_of(settings: TrialSettings, device_type: str) -> LossSum:
    """(hidden_TE, weight_VE, labels_T) -> sum of this rank's losses, z-loss included; `device_type` is cuda or cpu.

    Raises ValueError with one sentence when that device or this machine cannot run the setting.
    """
    from engine.lm_head.loss import fused_loss_sum, plain_loss_sum

    reason = unsupported_reason(settings, device_type)
    if reason:
        raise ValueError(reason)
    if not settings.lm_head_fusion:
        return functools.partial(plain_loss_sum, z_loss=settings.z_loss)
    if settings.loss_kernel == "cce":
        return cce_loss_sum  # a z-loss has been refused
    if settings.loss_kernel == "liger":
        return functools.partial(liger_loss_sum, z_loss=settings.z_loss)
    return functools.partial(fused_loss_sum, z_loss=settings.z_loss, tiles=settings.head_tiles)


def cce_loss_sum(hidden_TE: Tensor, weight_VE: Tensor, labels_T: Tensor) -> Tensor:
    """`engine.lm_head.loss.plain_loss_sum` without z-loss, by cut-cross-entropy; bf16 on a GPU only."""
    from cut_cross_entropy import linear_cross_entropy

    from engine.lm_head.loss import fused_loss_sum

    if not bool((labels_T != IGNORE).any()):  # the library drops ignored tokens, and knows no kernel over none
        return fused_loss_sum(hidden_TE, weight_VE, labels_T)
    labels_T = labels_T.to(hidden_TE.device, non_blocking=True)
    loss: Tensor = linear_cross_entropy(hidden_TE, weight_VE, labels_T, ignore_index=IGNORE, reduction="sum")
    return loss


def liger_loss_sum(hidden_TE: Tensor, weight_VE: Tensor, labels_T: Tensor, z_loss: float = 0.0) -> Tensor:
    """`engine.lm_head.loss.plain_loss_sum` by liger-kernel; without gradients where neither input requires them."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    from engine.ops.autograd import accumulation_dtype

    loss_of = LigerFusedLinearCrossEntropyLoss(
        ignore_index=IGNORE, lse_square_scale=z_loss, reduction="sum", accum_dtype=accumulation_dtype(weight_VE.dtype)
    )
    loss: Tensor = loss_of(weight_VE, hidden_TE, labels_T.to(hidden_TE.device, non_blocking=True))
    return loss
