"""All-gather of some tensors among all context-parallel ranks, and the reduction of their gradients to the owners.

By the process group (NCCL or gloo). Gradients are reduced by an all-to-all of each rank's parts and one sum in fp32 on
the rank that owns the tokens: as many bytes as a reduce-scatter, and one rounding whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from engine.attention.accumulate.accumulators import tensor_specs
from engine.attention.comm.all_to_all import GroupAllToAll, message, sections
from engine.attention.comm.p2p import Traffic, peers_needed, send_rows
from engine.ops.autograd import accumulation_dtype

# The name since torch 2.13, and the one before it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class GroupGather:
    """Gathers and reduces among the ranks of a group, whose bytes are counted as sent to each other rank."""

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic) -> None:
        self._group, self._traffic, self._all_to_all = group, traffic, GroupAllToAll(group, traffic)
        self.size = dist.get_world_size(group)
        self._peers = f"ranks {', '.join(map(str, dist.get_process_group_ranks(group)))}"

    def start(self, tensors: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
        """Send these to every rank. Calling the result makes the current stream wait and returns every rank's, each
        [ranks, *shape]."""
        specs = tensor_specs(tensors)
        row = message(specs, 1, tensors[0].device)
        for section, tensor in zip(sections(row, specs), tensors, strict=True):
            section[0].copy_(tensor)
        rows = row.new_empty(self.size, row.shape[1])
        self._traffic.sent_bytes += (self.size - 1) * row.numel()
        with peers_needed(self._group, self._peers):
            if row.is_cuda:
                works = [_all_gather(rows, row, group=self._group, async_op=True)]
            else:
                works = send_rows(row, rows, self._group, self._traffic.tag)

        def receive() -> tuple[Tensor, ...]:
            with peers_needed(self._group, self._peers):
                for work in works:
                    work.wait()
            return sections(rows, specs)

        return receive

    def reduced(self, by_owner: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Sums over the ranks of this rank's part of each tensor [ranks, *shape], in the dtype of accumulation."""
        specs = tensor_specs(tuple(tensor[0] for tensor in by_owner))
        rows = message(specs, self.size, by_owner[0].device)
        for section, tensor in zip(sections(rows, specs), by_owner, strict=True):
            section.copy_(tensor)
        received = sections(self._all_to_all.exchange(rows)(), specs)
        return tuple(part.sum(dim=0, dtype=accumulation_dtype(part.dtype)) for part in received)
