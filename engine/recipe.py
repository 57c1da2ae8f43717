"""Settings of the optimizer apart from the learning rate. Pure data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """AdamW (arXiv:1711.05101). The defaults are those of the timed task, and common for language models."""

    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1  # of matrices; norms are not decayed
    max_grad_norm: float = 1.0  # gradients are scaled down to this global norm

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name} is {getattr(self, name):g}; give a number from 0 to below 1")
        if self.weight_decay < 0:
            raise ValueError(f"optimizer.weight_decay is {self.weight_decay:g}; give 0 or more")
        for name in ("epsilon", "max_grad_norm"):
            if getattr(self, name) <= 0:
                raise ValueError(f"optimizer.{name} is {getattr(self, name):g}; give a number above 0")
