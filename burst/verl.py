"""verl's sequence parallelism (`ulysses_sequence_parallel_size`) with this package's attention.

    actor_rollout_ref.model.external_lib=burst.verl
    +actor_rollout_ref.model.override_config.attn_implementation=burst

verl imports `external_lib` in each worker before it builds a model, and cuts batches without padding into consecutive
parts, positions alike. Importing this module registers the attention: for each call, among the ranks that verl then has
as its sequence parallel group. The reference and the critic have settings of the same names.
"""

from __future__ import annotations

from functools import lru_cache

import torch.distributed as dist

from burst.transformers import register
from engine.attention.context import ContextParallel

try:
    from verl.utils.ulysses import get_ulysses_sequence_parallel_group
except ImportError as error:
    raise ImportError(f"burst.verl needs verl 0.9: {error}") from error


@lru_cache(maxsize=16)
def _ranks(group: dist.ProcessGroup | None) -> ContextParallel:
    """Those of a group, in the order in which verl cuts. Collective at first."""
    return ContextParallel.single() if group is None else ContextParallel(group, layout="contiguous")


register(lambda: _ranks(get_ulysses_sequence_parallel_group()))
