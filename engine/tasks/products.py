"""The matrix products of a model, by shape: where all its FLOPs outside attention go. No torch here.

The engine computes queries, keys and values as three products and a gated MLP's first two as two, so these are the
shapes that its GEMMs have.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.settings import ModelShape

DIRECTIONS = ("forward", "dgrad", "wgrad")  # Y = X W', dX = dY W, dW = dY' X: equally many FLOPs each


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixProduct:
    """Products of tokens with a weight of `outputs` x `inputs`, of which a forward of the model has `count`."""

    name: str
    inputs: int
    outputs: int
    count: int

    @property
    def weights(self) -> int:
        """Of all `count` products."""
        return self.inputs * self.outputs * self.count


def matrix_products(model: ModelShape) -> tuple[MatrixProduct, ...]:
    """Every product that a token takes part in; products of one shape and kind are one entry."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    projections: tuple[tuple[str, int, int, int], ...] = (
        ("query", model.hidden, queries, model.layers),
        ("key_value", model.hidden, keys, 2 * model.layers),
    )
    if model.kv_latent:
        projections = tuple(
            (name, inputs, outputs, model.layers) for name, inputs, outputs, _ in model.latent_matrices()
        )
    first = "gate_up" if model.gated else "up"
    shapes = (
        *projections,
        ("out", model.heads * model.output_dim, model.hidden, model.layers),
        (first, model.hidden, model.ffn, (2 if model.gated else 1) * model.layers),
        ("down", model.ffn, model.hidden, model.layers),
        ("lm_head", model.hidden, model.vocab, 1),
    )
    return tuple(
        MatrixProduct(name=name, inputs=inputs, outputs=outputs, count=count) for name, inputs, outputs, count in shapes
    )
