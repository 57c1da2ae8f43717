"""The matrix products of a model, by shape: where all its FLOPs outside attention go. No torch here.

The engine computes queries, keys and values as three products and a gated MLP's first two as two, so these are the
shapes that its GEMMs have.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.shape import ModelShape

DIRECTIONS = ("forward", "dgrad", "wgrad")  # Y = X W', dX = dY W, dW = dY' X: equally many FLOPs each


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixProduct:
    """Products of tokens with a weight of `outputs` x `inputs`, of which a forward of the model has `count`."""

    name: str
    inputs: int
    outputs: int
    count: int
    float8: bool = False  # `linear_dtype: float8` is about it

    @property
    def weights(self) -> int:
        """Of all `count` products."""
        return self.inputs * self.outputs * self.count


def matrix_products(model: ModelShape) -> tuple[MatrixProduct, ...]:
    """Every product that a token takes part in; products of one shape and kind are one entry."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    first, attention = "gate_up" if model.gated else "up", model.attention_layers
    mixers = model.layers - attention
    linear_keys, linear_values = (
        model.linear_key_heads * model.linear_key_dim, model.linear_heads * model.linear_value_dim
    )  # fmt: skip
    projections: tuple[tuple[str, int, int, int], ...] = (
        ("query", model.hidden, queries, (2 if model.attention_gate else 1) * attention),
        ("key_value", model.hidden, keys, 2 * attention),
    )
    if model.kv_latent:
        projections = tuple((name, inputs, outputs, attention) for name, inputs, outputs, _ in model.latent_matrices())
    shapes = (
        *projections,
        ("out", model.heads * model.output_dim, model.hidden, attention),
        # Of linear layers; products for one number a head are left out.
        ("linear_query_key", model.hidden, linear_keys, 2 * mixers),
        ("linear_value_gate", model.hidden, linear_values, 2 * mixers),
        ("linear_out", linear_values, model.hidden, mixers),
        (first, model.hidden, model.ffn, (2 if model.gated else 1) * sum(model.mlps)),
        ("down", model.ffn, model.hidden, sum(model.mlps)),
        ("lm_head", model.hidden, model.vocab, 1),
    )
    return tuple(
        MatrixProduct(
            name=name, inputs=inputs, outputs=outputs, count=count,
            float8=name not in ("kv_b", "lm_head") and not name.startswith("linear_"),
        )
        for name, inputs, outputs, count in shapes
        if count
    )  # fmt: skip
