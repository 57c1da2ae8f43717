"""Initial parameters that do not depend on how the model is sharded.

Programs of compared systems load this file by its path, with torch alone beside it, so that their losses begin where
ours do (`draw`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

if TYPE_CHECKING:
    from engine.models.decoder import Decoder
    from engine.shape import ModelShape

Part = tuple[int, int, int]  # of a parameter: (dimension that is divided, number of the part, parts)

STD = 0.02  # GPT-2's; the projections that end a residual branch are narrowed by sqrt(all branches), as there
# As torchtitan's Llama. At 0.02 the residual stream starts so small that a first Adam step outweighs it: the loss of a
# 1B model then jumps about for dozens of steps even at a learning rate of 1e-5.
EMBEDDING_STD = 1.0
ENDS_OF_BRANCHES = ("attention.output.weight", "mixer.output.weight", "mlp.down.weight")
# The first matrix A of an adapter has deviation 1 / sqrt(3 x inputs), that of peft's uniform values, and so have the
# taps of a short convolution, as torch's.


# Most elements drawn at once, 16 MiB in fp32. Larger parameters are drawn in blocks of rows, each from a generator of
# its own, so that a rank draws only the blocks that it holds rows of.
BLOCK_ELEMENTS = 1 << 22


def initialise(
    model: Decoder, seed: int, device: torch.device, part_of: Callable[[str], Part | None] = lambda name: None
) -> None:
    """Materialise a meta-device model on `device`, whole or sharded by FSDP2, with seeded values.

    Every block of a parameter's rows has a generator seeded by (seed, name, block), so every sharding starts from the
    same numbers, and beyond its shards a rank holds one block. CPU and CUDA generators differ, so values are equal
    between machines of one device type only.

    `part_of` a parameter's name is what the model holds of it, None for the whole: the values are those of the same
    part of the whole.
    """
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            first_row, local = held_rows(parameter)
            if name.endswith((".decay_log", ".decay_bias")):
                local.copy_(_of_heads(name, first_row, parameter.shape[0], local))
            elif parameter.ndim == 1:
                local.fill_(0.0 if name.endswith((".bias", ".sinks")) else 1.0)  # else norms
            elif name.endswith(".lora_B"):
                local.zero_()  # the adapters' product is zero at first
            elif local.numel():
                own = name.endswith((".lora_A", ".conv.weight"))
                std = (3 * parameter.shape[1]) ** -0.5 if own else std_of(name, model.shape)
                draw(local, first_row, parameter.shape[0], f"{seed}:{name}", std, part_of(name))


def _of_heads(name: str, first_row: int, heads: int, like: Tensor) -> Tensor:
    """Of the decays of a linear layer's heads, the rows from `first_row` on: evenly spread over what Mamba-2 draws them
    from, A from 1 to 16 and time steps from 0.001 to 0.1. No generator, so that every sharding has them."""
    places = torch.arange(first_row, first_row + len(like), dtype=torch.float64, device=like.device) / max(1, heads - 1)
    if name.endswith(".decay_log"):
        return (1 + 15 * places).log().float()  # a float64 run starts from the numbers of the fp32 one
    return (1e-3 * 100**places).expm1().log().float()  # softplus undone


def std_of(name: str, shape: ModelShape) -> float:
    """Standard deviation of a matrix's initial values."""
    if name == "embedding.weight" and not shape.tied:  # a tied one is the LM head as well
        return EMBEDDING_STD
    return STD / (shape.layers + sum(shape.mlps)) ** 0.5 if name.endswith(ENDS_OF_BRANCHES) else STD


def draw(local: Tensor, first_row: int, all_rows: int, key: str, std: float, part: Part | None = None) -> None:
    """Fill `local`, the rows from `first_row` on of a matrix of `all_rows`, with its part of the whole's values, which
    follow from `key`: seed and name of the parameter, `0:blocks.1.mlp.up.weight`.

    With `part` that matrix is a part of another one.
    """
    dim, index, parts = part or (0, 0, 1)
    width, columns = local.shape[1], slice(0, local.shape[1])
    if dim == 0:
        first_row, all_rows = first_row + index * all_rows, all_rows * parts
    else:
        columns, width = slice(index * width, (index + 1) * width), width * parts
    rows = max(1, BLOCK_ELEMENTS // width)
    end_row = first_row + local.shape[0]
    for block in range(first_row // rows, -(-end_row // rows)):
        start, end = block * rows, min((block + 1) * rows, all_rows)
        generator = _generator(f"{key}:{block}" if block else key, local.device)
        # Drawn in fp32 for every dtype of the parameter: a float64 run starts from the numbers of the fp32 one.
        drawn = torch.empty(end - start, width, device=local.device).normal_(0.0, std, generator=generator)
        low, high = max(start, first_row), min(end, end_row)
        local[low - first_row : high - first_row].copy_(drawn[low - start : high - start, columns])


def _generator(key: str, device: torch.device) -> torch.Generator:
    digest = hashlib.sha256(key.encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def held_rows(parameter: Tensor) -> tuple[int, Tensor]:
    """(first row, rows) that this rank holds of a parameter; all of them when it is not sharded."""
    if not isinstance(parameter, DTensor):
        return 0, parameter
    mesh, placements = parameter.device_mesh, parameter.placements
    expected = (*[Replicate()] * (mesh.ndim - 1), Shard(0))
    assert placements == expected, f"expected {expected}, found {placements}"
    rows = -(-parameter.shape[0] // mesh.size(mesh.ndim - 1))  # ceiling: the last ranks may hold fewer rows, or none
    return rows * mesh.get_local_rank(mesh.ndim - 1), parameter.to_local()
