"""Starting from a model somebody trained before, in Hugging Face's layout."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from engine.model import Decoder
from engine.training.preflight import check_shape


def start_from(model: Decoder, directory: Path) -> None:
    """Put the weights of `directory` into a model, sharded or not; at most one whole tensor exists at a time.

    Raises ValueError when they cannot be read or belong to another shape.
    """
    from engine.hf import import_hugging_face

    found, tensors = import_hugging_face(directory)
    check_shape(directory, found, model.shape)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, whole in tensors:
            parameter = parameters.pop(name)
            whole = whole.to(dtype=parameter.dtype, device=parameter.device)
            if isinstance(parameter, DTensor):
                # Every rank has read the whole tensor, so its shard is cut out here and nothing travels.
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(whole)
    assert not parameters, f"no weights for {sorted(parameters)}"
