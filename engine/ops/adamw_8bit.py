"""AdamW whose moments have 8 bits per element and a scale per block of 256, by bitsandbytes (arXiv:2110.02861).

Of the library only its kernel is called, on plain tensors: its optimizers know no sharded parameters (issue 1633 of
theirs). The kernel updates a parameter from moments in fp32 and rounds them afterwards.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor


def functions() -> ModuleType:
    """The library's functions. Raises ValueError where it is not installed."""
    try:
        import bitsandbytes.functional
    except ImportError as error:
        raise ValueError(
            f"optimizer_states is 8bit, which needs bitsandbytes, and it cannot be imported here ({error}); "
            "pip install 'burst-harness[8bit]', or leave optimizer_states out"
        ) from error
    module: ModuleType = bitsandbytes.functional
    return module


@cache
def codebooks(device: torch.device) -> tuple[Tensor, Tensor]:
    """What the 256 codes of a signed and of an unsigned element stand for, as parts of their block's scale, in fp32."""
    first, second = (functions().create_dynamic_map(signed=signed) for signed in (True, False))
    return first.to(device), second.to(device)


def adamw(
    parameter: Tensor,
    gradient: Tensor,
    states: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    step: int,
    rate: float,
    betas: tuple[float, float],
    epsilon: float,
    decay: float,
) -> None:
    """One update in place of consecutive elements, whole blocks; `step` counts it.

    `parameter` and `gradient` are contiguous and in fp32. `states` are of the first moment the codes (uint8) and the
    scales (fp32, one per block), then those of the second.
    """
    if parameter.is_cuda:
        # The library launches its kernel there, whatever stream is current.
        default = torch.cuda.default_stream(parameter.device)
        assert torch.cuda.current_stream(parameter.device) == default, "moments in 8 bits need the default stream"
    (codes1, scales1, codes2, scales2), (map1, map2) = states, codebooks(parameter.device)
    functions().optimizer_update_8bit_blockwise(
        "adam",
        g=gradient,
        p=parameter,
        state1=codes1,
        state2=codes2,
        beta1=betas[0],
        beta2=betas[1],
        beta3=0.0,
        alpha=0.0,
        eps=epsilon,
        step=step,
        lr=rate,
        qmap1=map1,
        qmap2=map2,
        absmax1=scales1,
        absmax2=scales2,
        weight_decay=decay,
    )
