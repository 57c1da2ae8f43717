"""Stands for apex.optimizers: torch's AdamW and SGD."""

from __future__ import annotations

from typing import Any

import torch


class FusedAdam(torch.optim.AdamW):
    def __init__(self, params: Any, *arguments: Any, adam_w_mode: bool = True, **options: Any) -> None:
        if not adam_w_mode:
            raise NotImplementedError("the stand-in for apex's FusedAdam is AdamW; leave adam_w_mode True")
        options.pop("bias_correction", None)
        super().__init__(params, *arguments, **options)


FusedSGD = torch.optim.SGD
