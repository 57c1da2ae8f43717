"""Options of NCCL's communicators for groups whose ranks are on several nodes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from engine.attention.comm.between_nodes import BetweenNodes


def runs_nccl(group: dist.ProcessGroup) -> bool:
    """Whether the group's transfers between GPUs are NCCL's."""
    return "nccl" in dist.get_backend_config(group)


def nccl_options(setting: BetweenNodes, timeout: timedelta) -> Any:
    """Options for `new_group`, or None where the setting leaves NCCL's own.

    Of the numbers, NCCL keeps its own default where none is set: 32 blocks at most, in clusters of four on Hopper.
    """
    if not setting.sets_groups:
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=setting.priority)
    options._timeout = timeout
    if setting.no_clusters:
        options.config.cga_cluster_size = 0
    if setting.ctas:
        options.config.max_ctas = setting.ctas
    return options
