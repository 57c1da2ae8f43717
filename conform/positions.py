"""Shards by positions: which tokens a rank holds in the usual layouts, and the whole put together again.

For target files whose system leaves the sharding to its user. Only torch is used, so that a layout of this project is
not judged by itself.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from conform.target import CaseProblem


def positions_of(layout: str, tokens: int, rank: int, ranks: int) -> Tensor:
    """Positions of a rank's tokens, in its order: contiguous, striped (every so many-th) or zigzag (chunks r and
    2P-1-r of 2P). Raises ValueError for a length that does not split into equal parts."""
    if tokens % (2 * ranks if layout == "zigzag" else ranks):
        raise ValueError(f"{tokens} tokens do not split evenly over {ranks} ranks in layout {layout}; give a multiple")
    whole = torch.arange(tokens)
    if layout == "striped":
        return whole[rank::ranks]
    if layout == "contiguous":
        return whole.chunk(ranks)[rank]
    chunks = whole.chunk(2 * ranks)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))


def take(whole: Tensor, dim: int, positions: Tensor) -> Tensor:
    """A rank's tokens of a tensor that is whole."""
    return whole.index_select(dim, positions.to(whole.device))


def put_together(part: Tensor, dim: int, positions: list[Tensor], problem: CaseProblem) -> Tensor:
    """The whole tensor, on every rank, of the ranks' parts. `positions` has those of each rank. Collective."""
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in positions]
    if len(parts) > 1:
        dist.all_gather(parts, part.contiguous(), group=problem.group)
    else:
        parts = [part]
    return torch.cat(parts, dim).index_select(dim, torch.cat(positions).argsort().to(part.device))
