"""What forms its gradients out of autograd's sight refuses create_graph, where the next derivative would be wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.layers.tiled_mlp import add_mlp_in
from engine.layers.tiled_projection import project_in
from engine.lm_head.loss import fused_loss_sum
from engine.models.decoder import MLP, Attention
from engine.ops.norm import RMSNorm
from engine.rope import rotary_tables
from engine.shape import ModelShape

SHAPE = ModelShape(name="small", layers=1, hidden=12, ffn=20, heads=4, kv_heads=2, head_dim=6, vocab=61)
TOKENS = 7


def fused_loss(x_BLE: Tensor) -> Tensor:
    return fused_loss_sum(x_BLE.flatten(0, 1), torch.ones(SHAPE.vocab, SHAPE.hidden), torch.arange(TOKENS))


def tiled_projection(x_BLE: Tensor) -> Tensor:
    rotary = rotary_tables(torch.arange(TOKENS), SHAPE.head_dim, 100.0, torch.float32)
    return project_in(2)(RMSNorm(SHAPE.hidden), Attention(SHAPE), x_BLE, rotary)[0].sum()


def tiled_mlp(x_BLE: Tensor) -> Tensor:
    return add_mlp_in(2)(RMSNorm(SHAPE.hidden), MLP(SHAPE), x_BLE).sum()


@pytest.mark.parametrize(
    ("call", "name"),
    [(fused_loss, "the fused loss"), (tiled_projection, "a projection in tiles"), (tiled_mlp, "an MLP in tiles")],
)
def test_a_second_derivative_is_refused_rather_than_zero(call: Callable[[Tensor], Tensor], name: str) -> None:
    x_BLE = torch.randn(1, TOKENS, SHAPE.hidden, requires_grad=True)
    out = call(x_BLE)
    with pytest.raises(ValueError, match=f"create_graph is set and {name} has no second derivative; take gradients"):
        torch.autograd.grad(out, x_BLE, create_graph=True, retain_graph=True)
    [dx_BLE] = torch.autograd.grad(out, x_BLE)  # a refusal spoils nothing
    assert dx_BLE.shape == x_BLE.shape
