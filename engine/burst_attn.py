"""The BurstAttention library's call on top of `burst_attention`: code written for it runs with one import changed.

    from engine.burst_attn import burst_attn_func
    out = burst_attn_func(q, k, v, None, "cuda", True)

q, k and v are this rank's tokens, [batch, tokens, heads, head_dim], in zigzag: of 2P equal chunks of the sequence,
rank r of P holds chunks r and 2P-1-r. Without `causal` any layout gives the same result.

Differences from the library: nothing has to be started (no BMTrain, no streams in a global), K and V may have fewer
heads than Q, sums are kept in fp32, and O is never sent in backward, with either `optimize_bwd_comm`.

Source of the interface: github.com/MayDomine/Burst-Attention (arXiv:2403.09347).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor

from engine.attention.context import ContextParallel
from engine.attention.inputs import Result
from engine.attention.masks import Causal, Full
from engine.attention.prepared import burst_attention

# `flash` of the library -> kernel of ours. Its Triton kernels were a plain FlashAttention; torch's own today is flex.
KERNELS = {"cuda": "auto", "triton": "flex", None: "reference"}


@runtime_checkable
class Communicator(Protocol):
    """An object with the torch process group of the ranks that share a sequence, such as a 1-D DeviceMesh."""

    def get_group(self) -> dist.ProcessGroup:
        """The ranks, in the order in which they hold the sequence."""
        ...


def burst_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    flash: str | None = "cuda",
    causal: bool = False,
    optimize_bwd_comm: bool = True,
    deterministic: bool = False,
    process_group: dist.ProcessGroup | Communicator | None = None,
    double_group: Sequence[dist.ProcessGroup | Communicator | None] | None = None,
    return_lse: bool = False,
) -> Result:
    """Attention of this rank's queries over the whole sequence. Collective over `process_group`.

    Args:
        q: [batch, local tokens, heads, head_dim].
        k, v: as q, possibly with fewer heads (a divisor of q's).
        softmax_scale: factor of the scores; head_dim ** -0.5 when None.
        flash: `cuda` takes the fastest kernel here, `triton` the one torch generates (`flex`), None plain torch.
        causal: hide later positions.
        optimize_bwd_comm: backward sends Q, dO, delta and LSE; otherwise K and V, as in RingAttention.
        deterministic: repeat bit for bit; refused by kernels that cannot.
        process_group: the ranks that share the sequence: a torch process group, a `Communicator` such as a 1-D
            DeviceMesh, a BMTrain communicator, or None for all ranks.
        double_group: (intra-node group, inter-node group): run the double ring. The node size is read off the first.
            None, or a pair of None: nodes are found from host names.
        return_lse: also return lse [batch, heads, local tokens], differentiable.

    Returns:
        out as q, or (out, lse).

    Raises:
        ValueError: a length zigzag cannot split, groups that do not fit each other, or a kernel this machine lacks.
    """
    if flash not in KERNELS:
        raise ValueError(f"flash {flash!r} is unknown; choose 'cuda', 'triton' or None")
    cp = _context(torch_group(process_group), *_groups_of(double_group))
    return burst_attention(
        q,
        k,
        v,
        mask=Causal() if causal else Full(),
        cp=cp,
        scale=softmax_scale,
        kernel=KERNELS[flash],
        schedule="ring" if cp.node_size == cp.size else "double_ring",
        backward="query" if optimize_bwd_comm else "key_value",
        deterministic=deterministic,
        return_lse=return_lse,
        tensor_layout="BSHD",
    )


class OpBurstAttn:
    """The library's autograd function: `OpBurstAttn.apply(q, k, v, ...)`, with arguments as of `burst_attn_func`."""

    apply = staticmethod(burst_attn_func)


def torch_group(process_group: object) -> dist.ProcessGroup | None:
    """`process_group` as a torch process group; None for all ranks, also when there is only one."""
    if process_group is None:
        return dist.group.WORLD if dist.is_initialized() else None
    if isinstance(process_group, dist.ProcessGroup):
        return process_group
    if type(process_group).__module__.partition(".")[0] == "bmtrain":
        return _bmtrain_group(process_group)
    if isinstance(process_group, Communicator):
        return process_group.get_group()
    raise ValueError(
        f"process_group is a {type(process_group).__name__}, which names no ranks; pass a torch process group or an "
        "object whose get_group() returns one"
    )


def _bmtrain_group(communicator: object) -> dist.ProcessGroup:
    """The torch process group over the ranks of a BMTrain communicator, which cannot send and receive on the streams
    used here. Raises ValueError when BMTrain is not installed, or torch.distributed runs other ranks."""
    if importlib.util.find_spec("bmtrain") is None:
        raise ValueError("process_group is a BMTrain communicator and BMTrain is missing; pip install bmtrain")
    nccl = importlib.import_module("bmtrain.nccl")
    theirs = int(nccl.commRank(communicator)), int(nccl.commCount(communicator))
    ours = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
    if theirs != ours:
        raise ValueError(
            f"the BMTrain communicator is (rank, ranks) {theirs} and torch.distributed is {ours}; initialise "
            "torch.distributed over the same ranks, or pass their torch process group"
        )
    return dist.group.WORLD


def _groups_of(double_group: Sequence[object] | None) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """(intra-node group, inter-node group), both or neither."""
    if double_group is None:
        return None, None
    if not isinstance(double_group, Sequence):
        raise ValueError(
            f"double_group is a {type(double_group).__name__}; pass (intra-node group, inter-node group) or None"
        )
    if len(double_group) != 2:
        raise ValueError(f"double_group has {len(double_group)} entries; pass (intra-node group, inter-node group)")
    if (double_group[0] is None) != (double_group[1] is None):
        raise ValueError("double_group has one group and one None; pass the groups inside and across nodes, or None")
    if double_group[0] is None:
        return None, None
    return torch_group(double_group[0]), torch_group(double_group[1])


@lru_cache(maxsize=32)
def _context(
    group: dist.ProcessGroup | None, intra: dist.ProcessGroup | None, inter: dist.ProcessGroup | None
) -> ContextParallel:
    """Ranks in zigzag, made once per group: making one is collective and creates communicators."""
    return ContextParallel(group=group, node_size=_node_size(group, intra, inter), layout="zigzag")


def _node_size(
    group: dist.ProcessGroup | None, intra: dist.ProcessGroup | None, inter: dist.ProcessGroup | None
) -> int | None:
    """Ranks per node as `double_group` says, or None. Raises ValueError when the groups are not a grid of `group`."""
    if group is None or intra is None or inter is None:
        return None
    ranks = dist.get_process_group_ranks(group)
    node_size, here = dist.get_world_size(intra), dist.get_rank(group)
    first = here // node_size * node_size
    expected = ranks[first : first + node_size], ranks[here % node_size :: node_size]
    found = dist.get_process_group_ranks(intra), dist.get_process_group_ranks(inter)
    if found != expected:
        raise ValueError(
            f"double_group holds ranks {found[0]} and {found[1]} and nodes of {node_size} in {ranks} would be "
            f"{expected[0]} and {expected[1]}; pass consecutive ranks inside a node and equal places across nodes"
        )
    return node_size
