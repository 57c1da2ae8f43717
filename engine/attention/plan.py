"""From a call's tensors to a plan: inputs checked, choices resolved, communicators and kernel made.

The result is an `engine.attention.algorithms.saved.AttentionPlan`: ring attention, Ulysses around it, or attention over
gathered keys. A context keeps the plans used last (`cached_plan`). Choices are those of `engine.attention.resolve`.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import index
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from engine.attention.algorithms.all_gather import AllGatherPlan
from engine.attention.algorithms.ring import RingPlan
from engine.attention.algorithms.saved import AttentionPlan
from engine.attention.algorithms.ulysses import UlyssesPlan
from engine.attention.comm.collectives import TokenRun, token_runs_in_order
from engine.attention.comm.link_speed import Link
from engine.attention.context import ContextParallel
from engine.attention.geometry.tile_table import TileTable
from engine.attention.inputs import check_inputs
from engine.attention.kernels import Kernel, KernelProblem, choose_kernel
from engine.attention.masks import Documents, Mask
from engine.attention.masks.mask import check_mask
from engine.attention.masks.pairs import PairTable, pair_table, tiles_of_all_keys
from engine.attention.problem import ALL_GATHER, Problem
from engine.attention.resolve import Choices, HardwareModel, Resolved, asks_for_link, check_choices, resolve
from engine.cuda.alternate import streams_of

MAX_READ = 16  # tensors of cu_seqlens whose values are kept
Bounds: TypeAlias = Tensor | Sequence[int]  # cu_seqlens: where documents start, and where the last one ends


def cached_plan(
    q_BLND: Tensor,
    k_BLKD: Tensor,
    v_BLKD: Tensor,
    expand_NXC: Tensor | None,
    mask: Mask,
    cp: ContextParallel,
    choices: Choices,
    sinks: bool = False,
) -> AttentionPlan:
    """The plan that `cp` keeps for such tensors, this mask and these choices, made where it has none. `sinks`: whether
    the call has some, on which ranks agree.

    The tensors are of one dtype and device. A new plan may be collective, on all ranks alike. Raises ValueError when
    nothing fits.
    """
    try:  # no context manager, which would take host time in every call
        check_mask(mask)
    except ValueError as error:
        cp.comms.refuse(error)
        raise
    shapes = q_BLND.shape, k_BLKD.shape, v_BLKD.shape[-1], None if expand_NXC is None else expand_NXC.shape
    key = (shapes, q_BLND.dtype, q_BLND.device, mask, choices, sinks)
    try:
        plan: AttentionPlan | None = cp.plans.get(key)
    except TypeError as error:
        reason = ValueError(
            f"the mask or a setting of the call has no hash ({error}); give numbers and words, and a mask that is a "
            "frozen dataclass"
        )
        cp.comms.refuse(reason)
        raise reason from error
    if plan is None:
        with cp.comms.refusals_told():
            check_inputs(q_BLND, k_BLKD, v_BLKD, expand_NXC)
            if cp.size > 1 and q_BLND.device.type == "meta":
                raise ValueError(f"q, k, v are on meta and {cp.size} ranks send values; pass tensors on CPUs or GPUs")
            check_choices(choices)
        said = {
            "q": tuple(q_BLND.shape),
            "k": tuple(k_BLKD.shape),
            "v": tuple(v_BLKD.shape),
            "expand": None if expand_NXC is None else tuple(expand_NXC.shape),
            "dtype": str(q_BLND.dtype),
            "device": q_BLND.device.type,
            "mask": _described(mask),
            "sinks": sinks,
            **choices._asdict(),
        }
        number = cp.agree(key, said)
        plan = cp.plans.put(
            key, plan_attention(q_BLND, k_BLKD, v_BLKD, expand_NXC, mask, cp.without_plans(number), choices)
        )
    return plan


def _described(mask: Mask) -> str:
    """The mask in words that are the same on every rank, also for a mask without words of its own."""
    words = f"{type(mask).__name__} {mask}"
    return re.sub(r" at 0x[0-9a-f]+", "", words)


def plan_attention(
    q_BLND: Tensor,
    k_BLKD: Tensor,
    v_BLKD: Tensor,
    expand_NXC: Tensor | None,
    mask: Mask,
    cp: ContextParallel,
    choices: Choices,
) -> AttentionPlan:
    """Everything about attention on shards of this shape, dtype and device but its tensors. Collective where it makes
    communicators. Raises ValueError when nothing fits.

    Without `lse_gradient`, kernels that form delta from O need no check that makes the host wait for the GPU, and a
    gradient of the LSE is an error with them.
    """
    problem = _problem(q_BLND, k_BLKD, v_BLKD, expand_NXC, mask, cp, choices)
    link = _link(problem, cp, choices, q_BLND.device)
    hardware = HardwareModel() if link is None else HardwareModel(across_gib=link.gib)
    choice = resolve(problem, hardware, choices)
    kernel = _kernel(choice, q_BLND.device, q_BLND.dtype)
    item = q_BLND.itemsize
    choice = choice.written_as(item if kernel.writes_input_dtype else max(4, item))
    scale = problem.head_dim**-0.5 if choices.scale is None else choices.scale
    if choice.schedule == ALL_GATHER:
        return AllGatherPlan(
            cp=cp,
            choice=choice,
            gather=cp.comms.gather(),
            token_runs=_token_runs(problem, range(cp.size)),
            kernel=kernel,
            scale=scale,
            streams=streams_of(choices.forward_streams, q_BLND.device),
        )
    division = choice.division
    all_to_all, members = None, division.members(cp.rank)
    if choice.head_exchange is not None:
        all_to_all = cp.comms.all_to_all(members, choice.head_exchange)
    inner = cp.ring_of(division)
    ring = RingPlan(
        cp=inner,
        choice=choice,
        comms=cp.comms.ring(division.ring, division.ring_ranks(cp.rank), inner.rank, choice.exchange),
        kernel=kernel,
        scale=scale,
        link=link,
        # Copies into receive slots follow the stream that they were posted on.
        streams=streams_of(choices.forward_streams if choice.exchange == "relay" else 1, q_BLND.device),
    )
    if all_to_all is None:
        return ring
    return UlyssesPlan(
        cp=cp,
        choice=choice,
        kernel=kernel,
        scale=scale,
        link=link,
        all_to_all=all_to_all,
        token_runs=_token_runs(problem, members),
        inner=ring,
    )


def _problem(
    q_BLND: Tensor,
    k_BLKD: Tensor,
    v_BLKD: Tensor,
    expand_NXC: Tensor | None,
    mask: Mask,
    cp: ContextParallel,
    choices: Choices,
) -> Problem:
    """What the tensors ask for. Raises ValueError for a length that the layout cannot split."""
    batch, tokens, heads, head_dim = q_BLND.shape
    cp.segments(tokens * cp.size)  # raises where the layout cannot split them
    if batch > 1 and isinstance(mask, Documents) and not mask.repeat and mask.tokens == batch * tokens * cp.size:
        raise ValueError(
            f"{len(mask.lengths)} documents hold {mask.tokens} tokens, those of all {batch} sequences of the batch, "
            f"and each has {tokens * cp.size}; give q, k and v as [tokens, heads, head_dim] with "
            'tensor_layout="THD", or the documents of one sequence, which all share'
        )
    # Ranks ask each other whether they can copy, which is collective, only where that may decide something.
    copies = choices.exchange in ("auto", "copy_engine") and choices.schedule != ALL_GATHER
    kv_heads, value_dim, latent_dims = k_BLKD.shape[2], v_BLKD.shape[3], (0, 0)
    if expand_NXC is not None:
        latent_dims = v_BLKD.shape[3], k_BLKD.shape[3]
        kv_heads, value_dim = heads, expand_NXC.shape[1] - (head_dim - latent_dims[1])
    return Problem(
        mask=mask,
        layout=cp.layout,
        seq_len=tokens * cp.size,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        input_bytes=q_BLND.itemsize,
        value_dim=value_dim,
        latent_dim=latent_dims[0],
        shared_key_dim=latent_dims[1],
        cp_size=cp.size,
        node_size=cp.node_size,
        on_gpu=q_BLND.is_cuda,
        copies_unsupported_reason=cp.comms.copies_unsupported_reason(q_BLND.device) if copies else None,
    )


def _link(problem: Problem, cp: ContextParallel, choices: Choices, device: torch.device) -> Link | None:
    """The speed of the link between nodes, where a choice depends on it. Measured once, and never where a run must
    repeat bit for bit: another measurement could lead to another schedule, which sums in another order."""
    if not asks_for_link(problem, choices):
        return None
    if choices.deterministic:
        return Link(HardwareModel().across_gib, measured=False)
    return Link(cp.comms.across_gib(device), measured=True)


def _kernel(choice: Resolved, device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel for a rank's part of the heads, and the bands that any rank's tiles have: the same on every rank."""
    problem, division, choices, part = choice.problem, choice.division, choice.choices, choice.shards
    if choice.schedule == ALL_GATHER:
        table: TileTable | PairTable = tiles_of_all_keys(problem.mask, problem.layout, problem.seq_len, problem.cp_size)
    else:
        table = pair_table(problem.mask, division.layout, problem.seq_len, division.ring.cp_size)
    return choose_kernel(
        choices.kernel,
        KernelProblem(
            device=device,
            dtype=dtype,
            heads=part.heads,
            kv_heads=part.kv_heads,
            head_dim=problem.head_dim,
            value_dim=problem.value_dim,
            bands=table.kinds,
            sequences=table.has_sequences,
            deterministic=choices.deterministic,
            softcap=choices.softcap,
            any_delta=choices.lse_gradient,
        ),
    )


def _token_runs(problem: Problem, cp_ranks: Iterable[int]) -> tuple[TokenRun, ...]:
    """Runs of consecutive tokens of these ranks, in order of position."""
    layout, seq_len, size = problem.layout, problem.seq_len, problem.cp_size
    return token_runs_in_order(tuple(layout.segments(seq_len, size, rank) for rank in cp_ranks))


def mask_of(mask: Mask | None, cu_seqlens: Bounds | None, max_seqlen: int | None) -> Mask | None:
    """The mask of a call: the given one, or causal documents between `cu_seqlens`. A tensor of them is read once, at
    its first call with these values. Raises ValueError for both, for values that are no boundaries of documents, and
    for a `max_seqlen` that some document exceeds."""
    if cu_seqlens is None:
        if max_seqlen is not None:
            raise ValueError(f"max_seqlen {max_seqlen} is given without cu_seqlens; pass both, or neither")
        return mask
    if mask is not None:
        raise ValueError(
            f"cu_seqlens is given beside mask {mask}; pass one of them: Documents.from_cu_seqlens(cu_seqlens, "
            "causal=..., left=...) is a mask"
        )
    found = _read(cu_seqlens) if isinstance(cu_seqlens, Tensor) else _listed(cu_seqlens)
    try:
        longest = max(found.lengths) if max_seqlen is None else index(max_seqlen)
    except TypeError as error:
        raise ValueError(f"max_seqlen is {max_seqlen!r}; give a whole number of tokens, or None") from error
    if longest < max(found.lengths):
        raise ValueError(
            f"max_seqlen is {max_seqlen} and a document has {max(found.lengths)} tokens; give the length of the "
            "longest one, or None"
        )
    return found


def _listed(cu_seqlens: Sequence[int]) -> Documents:
    """The documents of a sequence of numbers."""
    try:
        return _documents(tuple(map(index, cu_seqlens)))
    except TypeError:  # numbers that are not whole, and what is no sequence: refused in a sentence
        return Documents.from_cu_seqlens(cu_seqlens)


@lru_cache(maxsize=MAX_READ)
def _documents(bounds: tuple[int, ...]) -> Documents:
    return Documents.from_cu_seqlens(bounds)


class _Read(NamedTuple):
    """What a tensor of cu_seqlens said, and how to tell that it still does."""

    tensor: weakref.ref[Tensor]
    version: int
    values: Tensor | None  # a copy, on CPUs: numpy, `data` and receiving collectives write without a new version
    documents: Documents

    def holds(self, cu_seqlens: Tensor) -> bool:
        """Whether this is that tensor, and not written to since."""
        version = int(cu_seqlens._version)
        if self.tensor() is not cu_seqlens or self.version != version:
            return False
        return self.values is None or torch.equal(self.values, cu_seqlens)


_known: dict[int, _Read] = {}  # by the tensor's id


def _read(cu_seqlens: Tensor) -> Documents:
    """The documents of a tensor: known while it lives and is not written to, because layers of a model share one."""
    if cu_seqlens.is_inference():  # has no version
        return _listed(cu_seqlens.tolist()) if cu_seqlens.ndim == 1 else Documents.from_cu_seqlens(cu_seqlens)
    read = _known.get(id(cu_seqlens))
    if read is not None and read.holds(cu_seqlens):
        return read.documents
    found = Documents.from_cu_seqlens(cu_seqlens)
    while len(_known) >= MAX_READ:
        _known.pop(next(iter(_known)), None)
    values = cu_seqlens.detach().clone() if cu_seqlens.device.type == "cpu" else None
    _known[id(cu_seqlens)] = _Read(weakref.ref(cu_seqlens), int(cu_seqlens._version), values, found)
    return found
