"""The same loop with weights, gradients and Adam's moments in bf16, and no copy of them in fp32."""

from __future__ import annotations

from baselines.transformers import Transformers


class TransformersBf16(Transformers):
    """The least memory that transformers takes; a small learning rate is lost in the rounding of the weights."""

    name = "transformers_bf16_upstream"
    system = "transformers + Liger-Kernel, weights in bf16"
    dtypes = ("bf16",)
    weights = "bf16"


METHOD = TransformersBf16()
