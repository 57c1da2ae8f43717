"""Initial parameters that do not depend on how the model is sharded."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from engine.model import Decoder

STD = 0.02  # GPT-2's; the two projections that end a residual branch are narrowed by sqrt(2 x layers), as there
# As torchtitan's Llama. At 0.02 the residual stream starts so small that a first Adam step outweighs it: the loss of a
# 1B model then jumps about for dozens of steps even at a learning rate of 1e-5.
EMBEDDING_STD = 1.0


def initialise(model: Decoder, seed: int, device: torch.device) -> None:
    """Materialise a meta-device model on `device`, whole or sharded by FSDP2, with seeded values.

    Each parameter draws its full tensor from a generator seeded by (seed, its name) and keeps the local rows, so every
    world size starts from the same numbers; at most one full parameter exists at a time. CPU and CUDA generators
    differ, so values are equal between machines of one device type only.
    """
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            full = _initial_value(name, parameter.shape, model.shape.layers, seed, local.dtype, device)
            local.copy_(_local_rows(full, parameter))


def _initial_value(
    name: str, size: torch.Size, layers: int, seed: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    if len(size) == 1:  # norms
        return torch.ones(size, dtype=dtype, device=device)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    std = STD
    if name == "embedding.weight":
        std = EMBEDDING_STD
    elif name.endswith(("attention.output.weight", "mlp.down.weight")):
        std = STD / (2 * layers) ** 0.5
    # Drawn in fp32 whatever the parameter's dtype: a float64 run starts from the numbers of the fp32 one.
    return torch.empty(size, device=device).normal_(0.0, std, generator=generator).to(dtype)


def _local_rows(full: Tensor, parameter: Tensor) -> Tensor:
    """The rows of `full` that this rank holds of `parameter`; all of them when it is not sharded."""
    if not isinstance(parameter, DTensor):
        return full
    assert parameter.placements == (Shard(0),), f"expected rows sharded over one axis, found {parameter.placements}"
    mesh = parameter.device_mesh
    rows = -(-full.shape[0] // mesh.size())  # ceiling: the last ranks may hold fewer rows, or none
    return full[rows * mesh.get_local_rank() : rows * (mesh.get_local_rank() + 1)]
