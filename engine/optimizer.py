"""AdamW on the model's shards, its states on the device or in host memory."""

from __future__ import annotations

import torch

from engine.memory.offloaded_adamw import OffloadedAdamW
from engine.model import Decoder
from engine.recipe import Recipe


def adamw(model: Decoder, learning_rate: float, recipe: Recipe, *, offload: bool = False) -> torch.optim.AdamW:
    """The optimizer of a model whose parameters may be sharded: each rank holds the states of its shards.

    Matrices are decayed, norms are not. With `offload` the states live in host memory; parameters and states are bit
    for bit the same.
    """
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    kind = OffloadedAdamW if offload else torch.optim.AdamW
    return kind(
        [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=learning_rate,
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.epsilon,
        fused=True,
    )
