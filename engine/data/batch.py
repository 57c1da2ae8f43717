"""A rank's tokens of one micro-batch, and copies that do not stop the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """This rank's tokens of one micro-batch."""

    tokens_BL: Tensor
    positions_L: Tensor  # of the tokens in the whole sequence
    labels_BL: Tensor  # in host memory: the LM head asks on the host which of them count
    targets: Tensor  # how many labels count, over all ranks and micro-batches of the step; 0-dim


def page_locked(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor in host memory that a GPU copies from while the host goes on, contiguous; itself for a CPU."""
    return tensor.contiguous().pin_memory() if device.type == "cuda" else tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device. The host does not wait for the copy, nor for work before it."""
    return page_locked(tensor, device).to(device, non_blocking=True)
