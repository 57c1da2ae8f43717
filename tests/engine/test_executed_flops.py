"""The matrix products that a training step really runs are those that `harness.metrics.flops` counts as executed."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.attention.algorithms.saved import SavedOutput
from engine.combinations import head_groups_unsupported_reason
from engine.lora import Lora
from engine.models.decoder import Decoder
from engine.parallelize import set_layers
from engine.settings import Checkpoint, TrialSettings
from engine.shape import ModelShape
from harness.metrics.flops import work_of
from tests.slow import combinations

GATED = ModelShape(name="gated", layers=5, hidden=12, ffn=20, heads=4, kv_heads=2, head_dim=6, vocab=31)
SHAPES = {
    "gated": GATED,
    "ungated": dataclasses.replace(GATED, gated=False),
    "normed": dataclasses.replace(GATED, qk_norm=True),
    "biased, tied": dataclasses.replace(GATED, qkv_bias=True, tied=True),
    "biased throughout": dataclasses.replace(GATED, output_bias=True, mlp_bias=True),
    "norms on both sides": dataclasses.replace(GATED, norms="both", qk_norm=True, activation="gelu_tanh"),
    "norms after": dataclasses.replace(GATED, norms="after", qk_norm=True, qk_norm_whole=True),
}
CHECKPOINTS = (
    Checkpoint(every=0),
    Checkpoint(every=0, mlp=0.4),
    Checkpoint(every=1),
    Checkpoint(every=1, whole_layers=2, mlp=0.0),
    Checkpoint(every=2, whole_layers=1, mlp=0.5),
    Checkpoint(every=3),
    Checkpoint(every=2, tail=0.0),
    Checkpoint(every=1, tail=0.0, whole_layers=1),
    Checkpoint(every=4, replay="bisect"),
    Checkpoint(every=9, offload="inputs", replay="bisect"),
)
ADAPTED = Lora(rank=3, alpha=6.0, targets=("q", "k", "v", "output", "gate", "up", "down"))
TOKENS = 10
FIRST = {
    torch.ops.aten.mm: 0,
    torch.ops.aten.addmm: 1,
    torch.ops.aten.addmm_: 1,
    torch.ops.aten.bmm: 0,
}  # place of a product's first factor


class Products(TorchDispatchMode):
    """Adds up the FLOPs of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        place = FIRST.get(func.overloadpacket)
        if place is not None:
            self.flops += 2 * args[place].numel() * args[place + 1].shape[-1]
        return func(*args, **(kwargs or {}))


class NoProducts:
    """Attention without a matrix product."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, saved: Any = None) -> tuple[Tensor, Tensor]:
        return q * k.repeat_interleave(2, 2) * v.repeat_interleave(2, 2), q[..., 0].transpose(1, 2)

    def keep(self, out: Tensor, lse: Tensor, tail: float) -> SavedOutput | None:
        return SavedOutput(out, lse) if tail == 1 else None


@combinations(
    {
        "shape": list(SHAPES.values()),
        "checkpoint": CHECKPOINTS,
        "tiles": [((1, 1),), ((3, 1),), ((1, 3),), ((3, 3),)],
        "head_groups": [1, 2],
        "lora": [ADAPTED, None, dataclasses.replace(ADAPTED, targets=("q", "up"))],
    }
)
def test_the_counted_flops_are_executed(
    shape: ModelShape, checkpoint: Checkpoint, tiles: tuple[int, int], head_groups: int, lora: Lora | None
) -> None:
    if lora is not None and not shape.gated:
        lora = dataclasses.replace(lora, targets=tuple(name for name in lora.targets if name != "gate"))
    settings = TrialSettings(
        task="train", method="burst", model=shape, seq_len=TOKENS, dtype="fp32", checkpoint=checkpoint,
        projection_tiles=tiles[0], mlp_tiles=tiles[1], lora=lora, head_groups=head_groups,
    )  # fmt: skip
    if head_groups_unsupported_reason(settings):
        settings = dataclasses.replace(settings, head_groups=1)
    model = Decoder(shape)
    if lora is not None:
        model.adapt(lora, torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    set_layers(model, settings, NoProducts())
    tokens = torch.randint(shape.vocab, (1, TOKENS + 1))
    with Products() as products:
        model(tokens[:, :-1], torch.arange(TOKENS), tokens[:, 1:]).backward()
    work = work_of(settings)
    assert products.flops == work.all_layers + work.all_head + work.recomputed_layers
