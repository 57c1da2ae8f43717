"""What kernels of linear layers do once for each length of a sequence, done before a step that is measured."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.checkpoint.recompute import set_activations
from engine.models.decoder import Decoder, keep_all
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
    device, activations = next(block.parameters()).device, block.activations
    x_BLE = torch.empty(like_BLE.shape, dtype=like_BLE.dtype, device=device)
    x_BLE.normal_(generator=torch.Generator(device).manual_seed(0)).requires_grad_()
    if activations is not keep_all:
        set_activations(Checkpoint(every=1), [block])  # of this layer alone, and with nothing on the host
    unread = x_BLE.new_empty(0)  # a linear layer rotates nothing
    try:
        out_BLE = block(x_BLE, (unread, unread))
        out_BLE.backward(out_BLE.detach())
    finally:
        block.activations = activations
    block.zero_grad()
