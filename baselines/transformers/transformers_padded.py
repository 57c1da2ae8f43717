"""The same loop without packing: each document is a row of its own, padded to the longest of the sequence."""

from __future__ import annotations

from baselines.transformers import Transformers


class TransformersPadded(Transformers):
    """What a trainer does that refuses packing. Padding has no label, and FlashAttention leaves it out."""

    name = "transformers_padded_upstream"
    system = "transformers + Liger-Kernel, documents padded"
    padded = True


METHOD = TransformersPadded()
