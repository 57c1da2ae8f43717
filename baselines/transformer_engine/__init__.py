"""TransformerEngine's context parallelism as its authors ship it: what Megatron-LM calls, alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baselines.called import UpstreamAttention, one_sequence_reason

if TYPE_CHECKING:
    from engine.settings import TrialSettings


class TransformerEngine(UpstreamAttention):
    """A zigzag ring with point-to-point transfers on two streams."""

    name = "transformer_engine_upstream"
    package = "transformer_engine"
    system = "TransformerEngine"
    source = "github.com/NVIDIA/TransformerEngine"

    def own_reason(self, settings: TrialSettings) -> str | None:
        return one_sequence_reason(self, settings)


METHOD = TransformerEngine()
