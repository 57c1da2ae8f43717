"""Low-rank adapters of frozen matrices (LoRA, arXiv:2106.09685): the setting, and how large they are.

The product of a frozen matrix W [O, I] becomes x W^T + alpha / rank (x A^T) B^T. A [rank, I] starts random and B
[O, rank] as zeros, so that the model starts as it was. Everything but A and B is frozen: it has no gradient, no master
weight in fp32 and no moments. Pure data; `engine.models.decoder.Linear` computes the sum. No dropout.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

from engine.shape import ModelShape

Target = Literal["q", "k", "v", "output", "gate", "up", "down"]

# The modules of a layer, by their names in `engine.models.decoder.Block`.
MODULES: dict[Target, str] = {
    name: f"{'mlp' if name in ('gate', 'up', 'down') else 'attention'}.{name}" for name in get_args(Target)
}
PROJECTIONS: tuple[Target, ...] = ("q", "k", "v")
MLP: tuple[Target, ...] = ("gate", "up", "down")


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """Which matrices of every layer get adapters, and of what rank."""

    rank: int
    alpha: float
    targets: tuple[Target, ...]

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank is {self.rank}; give a whole number of at least 1, or leave lora out")
        if self.alpha <= 0:
            raise ValueError(f"lora.alpha is {self.alpha:g}; give a number above 0")
        if not self.targets:
            raise ValueError(f"lora.targets is empty; name at least one of {', '.join(MODULES)}")
        if twice := [name for name in self.targets if self.targets.count(name) > 1]:
            raise ValueError(f"lora.targets has {twice[0]} twice; name each matrix once")
        object.__setattr__(self, "targets", tuple(name for name in MODULES if name in self.targets))  # one order

    def __str__(self) -> str:
        return f"rank {self.rank}, alpha {self.alpha:g}, {' '.join(self.targets)}"

    @property
    def scale(self) -> float:
        """Factor of the adapters' product."""
        return self.alpha / self.rank


def adapters_unsupported_reason(shape: ModelShape, lora: Lora) -> str | None:
    """Why a model cannot have such adapters, in one sentence, or None."""
    if "gate" in lora.targets and not shape.gated:
        return f"lora.targets has gate, but the MLP of model {shape.name} has no gate; leave it out"
    sizes = shape.layer_sizes()
    for name in lora.targets:
        if f"{MODULES[name]}.weight" not in sizes:
            return f"lora.targets has {name}, but model {shape.name} forms it from a latent; leave it out"
        size = sizes[f"{MODULES[name]}.weight"]
        if lora.rank > max(size):
            return (
                f"lora.rank is {lora.rank}, but {name} of model {shape.name} is a matrix of {size[0]} x {size[1]}; "
                f"give at most {max(size)}"
            )
    return None


def adapter_sizes(shape: ModelShape, lora: Lora) -> dict[str, tuple[int, ...]]:
    """Size of every adapter by its name in `engine.models.decoder.Decoder`, in the model's order."""
    modules = {MODULES[name] for name in lora.targets}
    found: dict[str, tuple[int, ...]] = {}
    of_layer = shape.layer_sizes()
    for layer in range(shape.layers):
        for name, size in of_layer.items():
            module, _, kind = name.rpartition(".")
            if module in modules and kind == "weight":
                found[f"blocks.{layer}.{module}.lora_A"] = (lora.rank, size[1])
                found[f"blocks.{layer}.{module}.lora_B"] = (size[0], lora.rank)
    return found


@cache
def adapter_parameters(shape: ModelShape, lora: Lora | None, among: tuple[Target, ...] = tuple(MODULES)) -> int:
    """Of the adapters of one layer, or of some of its matrices; 0 without LoRA."""
    if lora is None:
        return 0
    sizes = shape.layer_sizes()
    matrices = (sizes[f"{MODULES[name]}.weight"] for name in lora.targets if name in among)
    return lora.rank * sum(outputs + inputs for outputs, inputs in matrices)


def trained_weights(shape: ModelShape, lora: Lora | None, among: tuple[Target, ...]) -> float:
    """Of `MLP` or `PROJECTIONS` of a layer, the weights whose gradient is formed: those of their adapters, or all where
    nothing is frozen."""
    if lora is not None:
        return adapter_parameters(shape, lora, among)
    return shape.mlp_share * shape.mlp_parameters if among == MLP else shape.projection_parameters


def adapter_passes(shape: ModelShape, lora: Lora | None, among: tuple[Target, ...] = tuple(MODULES)) -> tuple[int, int]:
    """Elements per token and layer that forward and backward read and write in memory for adapters, or those of some
    matrices; 0 without LoRA.

    Their products are too narrow for the multiplications to hide this. In forward each reads the matrix's input once
    more, and writes the output, to which the frozen product adds. In backward both read the output's gradient, A reads
    the input, and its gradient is added to that of the frozen product. The frozen matrices of one input are apart: the
    gradients that they give it are added up.
    """
    if lora is None:
        return 0, 0
    sizes = shape.layer_sizes()
    matrices = [sizes[f"{MODULES[name]}.weight"] for name in lora.targets if name in among]
    sums = 3 * (3 if shape.gated else 2) * sizes["attention.q.weight"][1]
    forward = sum(2 * outputs + inputs for outputs, inputs in matrices)
    return forward, sums + sum(2 * outputs + 5 * inputs for outputs, inputs in matrices)
