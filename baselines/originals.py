"""Which upstream systems each native baseline is written after: where both ran, reports say when ours is slower.

`ring` has none: RingAttention itself is a program of JAX, and the other systems' rings balance causal work, as `ring`
does not. `flash_attn` and `flash_linear_attention` are libraries' own calls, and need none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Original:
    """A method that runs a system as its authors ship it."""

    method: str
    # Of its setting `schedule`, where that decides which native baseline it is; its own schedule is then fixed by its
    # name. Empty: both ran with the same one.
    schedules: tuple[str, ...] = ()


ORIGINALS: Mapping[str, tuple[Original, ...]] = {
    "burst": (Original("burst_engine_upstream"), Original("burst_attention_upstream")),
    "megatron_cp": (Original("megatron_lm_upstream"), Original("transformer_engine_upstream")),
    "megatron_tp": (Original("megatron_lm_upstream"),),
    "ulysses": (
        Original("deepspeed_upstream"),
        Original("megatron_deepspeed_upstream"),
        Original("yunchang_upstream", ("ulysses",)),
    ),
    "loongtrain_double_ring": (
        Original("internevo_upstream", ("auto", "double_ring")),
        Original("loongtrain_upstream", ("auto", "double_ring")),
    ),
    "loongtrain_usp": (Original("internevo_upstream", ("usp",)), Original("yunchang_upstream", ("auto", "usp"))),
    "torch_cp": (Original("torchtitan_upstream"),),
}
