"""This package's context parallelism, for its targets: ranks in layout zigzag, and shards of padded tensors."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from burst import ContextParallel
from conform.target import CaseProblem


@lru_cache(maxsize=4)
def context_of(group: dist.ProcessGroup | None) -> ContextParallel:
    """The ranks of a group. Collective at the first call."""
    return ContextParallel(group)


def added_tokens(problem: CaseProblem) -> int:
    """Tokens of padding at the end of a sequence, so that the layout divides it. They are a document of their own."""
    cp = context_of(problem.group)
    return -problem.tokens % cp.layout.chunks(cp.size) if cp.size > 1 else 0


def padded_part(whole: Tensor, dim: int, problem: CaseProblem) -> Tensor:
    """This rank's tokens of a whole tensor, padded with zeros."""
    if added := added_tokens(problem):
        shape = [added if each == dim else size for each, size in enumerate(whole.shape)]
        whole = torch.cat((whole, whole.new_zeros(shape)), dim)
    return context_of(problem.group).shard(whole, dim)


def unpadded_whole(part: Tensor, dim: int, problem: CaseProblem) -> Tensor:
    """`padded_part` undone, on every rank. Collective."""
    return context_of(problem.group).unshard(part, dim).narrow(dim, 0, problem.tokens)
