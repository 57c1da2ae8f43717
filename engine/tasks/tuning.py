"""What is done once for each length of a sequence, done before a step that is measured: kernels of linear layers tune
themselves, and the memory of layers on the host is locked."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from engine.checkpoint.hosted import HostedLayers
from engine.checkpoint.recompute import set_activations
from engine.models.decoder import Block, Decoder, keep_all
from engine.ops.autograd import accumulation_dtype
from engine.settings import Checkpoint


def tune_linear_layers(model: Decoder, like_BLE: Tensor) -> None:
    """Forward and backward of one linear layer, on random hidden states of this rank's tokens, of the shape and dtype
    of `like_BLE`; nothing where the model has none. Collective.

    flash-linear-attention tries its kernels anew for each number of tokens. All linear layers of a model call the same
    kernels, and no other layer calls them, so one layer is enough. It runs as in a step: parameters are gathered,
    tokens exchanged, and it is computed again where a step computes it again. So it takes no more memory than a step,
    which holds more beside it.

    Gradients are dropped, and no generator's state is changed. To be called after a whole step, with no gradient left.
    """
    block = next((each for each in model.blocks if each.linear), None)
    if block is None:
        return
    activations = block.activations
    if activations is not keep_all:
        set_activations(Checkpoint(every=1), [block])  # of this layer alone, and with nothing on the host
    try:
        _run(block, like_BLE, 0)  # a linear layer rotates nothing
    finally:
        block.activations = activations


def lock_hosted_layers(model: Decoder, like_BLE: Tensor, hosted: HostedLayers) -> None:
    """Lock the host memory of all layers that are kept whole there, of this rank's tokens: forward and backward of the
    first of each kind say how much one takes. Nothing where there are none. Collective, and to be called as
    `tune_linear_layers` is."""
    device = next(model.parameters()).device
    buffers: Counter[int] = Counter()
    kinds: dict[tuple[bool, bool], list[Block]] = {}
    for block in (model.blocks[place] for place in hosted.places):
        kinds.setdefault((block.linear, block.mlp is None), []).append(block)
    for (linear, _), blocks in kinds.items():
        hosted.store.reserve({}, device)  # what is free afterwards is this layer's
        _run(blocks[0], like_BLE, 0 if linear else model.shape.rotated_dim // 2)
        hosted.forget()
        for nbytes, count in hosted.store.free_buffers().items():
            buffers[nbytes] += count * len(blocks)
    if buffers:
        hosted.store.reserve(buffers, device)


def _run(block: Block, like_BLE: Tensor, angles: int) -> None:
    """Forward and backward of a block, as in a step, on random hidden states; so many angles of rotation are 0."""
    device = next(block.parameters()).device
    x_BLE = torch.empty(like_BLE.shape, dtype=like_BLE.dtype, device=device)
    x_BLE.normal_(generator=torch.Generator(device).manual_seed(0)).requires_grad_()
    cos_LD = torch.ones(x_BLE.shape[1], angles, dtype=accumulation_dtype(x_BLE.dtype), device=device)
    out_BLE = block(x_BLE, (cos_LD, torch.zeros_like(cos_LD)))
    out_BLE.backward(out_BLE.detach())
    block.zero_grad()
