"""What one call of attention leaves to another: to its backward, and to a forward under activation checkpointing.

Sequence-level selective checkpointing (BurstEngine, arXiv:2509.19836): with causal attention a query's work grows with
its position, so saving the outputs of the last tokens avoids the most recomputation for the memory they take.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol, Self, TypeAlias

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from engine.attention.algorithms.latent import Expansion
from engine.attention.comm.link_speed import Link
from engine.attention.context import ContextParallel
from engine.attention.geometry.layout import tail_cut
from engine.attention.geometry.tiles import Visible
from engine.attention.inputs import to_bshd
from engine.attention.kernels import Kernel
from engine.attention.masks import Mask, imbalance
from engine.attention.masks.mask import FirstRows
from engine.attention.resolve import Resolved

SAVED_PER_CHUNK = 4  # Q, K, V and LSE of a gathered chunk


class Saved(NamedTuple):
    """What backward needs of a forward besides out and LSE."""

    tensors: tuple[Tensor, ...]  # this rank's shards of Q, K and V, unless `gathered`
    gathered: bool = False  # Q, K, V and LSE of this rank's heads over the whole group's tokens, chunk after chunk
    heads: tuple[slice, ...] = ()  # the query heads of each gathered chunk

    def with_sinks(self, sinks_N: Tensor) -> Saved:
        """The same with each gathered LSE final, which it is once it counts the sinks of its heads."""
        tensors = list(self.tensors)
        for index, heads in enumerate(self.heads):
            lse_BHT = tensors[SAVED_PER_CHUNK * index + 3]
            tensors[SAVED_PER_CHUNK * index + 3] = torch.logaddexp(lse_BHT, sinks_N[heads, None].to(lse_BHT.dtype))
        return self._replace(tensors=tuple(tensors))


@dataclass(frozen=True, kw_only=True)
class AttentionPlan:
    """One algorithm with every choice made: how (out, LSE) and the gradients come from this rank's shards. A subclass
    computes."""

    cp: ContextParallel  # the ranks that share the sequence
    choice: Resolved  # what every `auto` became
    kernel: Kernel  # computes tiles
    scale: float  # of the scores
    link: Link | None = None  # between nodes, when a choice rests on its speed
    cut: int | None = None  # global position that the computed rows lie before; None: all rows are computed
    # Of one pass where K and V are a shared key and a latent: forms K and V of all heads, and sums its gradient.
    expansion: Expansion | None = None
    key_gradient_dtype: torch.dtype | None = None  # of the dK and dV that are returned; None: that of the inputs

    @property
    def one_call(self) -> Visible | None:
        """What the one kernel call shows that is the whole problem; None where there are more, or other ranks."""
        return None

    def forward(self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, *, save: bool) -> tuple[Tensor, Tensor, Saved]:
        """(out_BLND, lse_BNL, saved) of this rank's queries over the whole sequence; of those before `cut`, its first
        rows, where there is one.

        `save`: received tensors are saved where backward would otherwise receive them again. Without it, `saved` holds
        the given shards only.
        """
        raise NotImplementedError

    def backward(
        self, saved: Saved, dout_BLND: Tensor, lse_BNL: Tensor, delta_BNL: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq_BLND, dk_BLKD, dv_BLKD) of this rank's shards, in the inputs' dtype."""
        raise NotImplementedError

    def before(self, cut: int) -> Self:
        """The plan of a forward of the queries before global position `cut` alone, from the tensors of the whole
        shards."""
        return replace(self, cut=cut)

    @cached_property
    def mask(self) -> Mask:
        """What the computed rows see."""
        mask = self.choice.problem.mask
        return mask if self.cut is None else FirstRows(mask, self.cut)

    def resolved(self) -> dict[str, str]:
        """What each `auto` became, for the record."""
        choice, division = self.choice, self.choice.division
        backward, exchange = choice.backward, choice.exchange
        found = {"estimate": str(choice.estimate)} if choice.estimate else {}
        if self.link is not None:
            found["link"] = str(self.link)
        if choice.head_exchange is not None:
            found["num_head_chunks"] = str(choice.num_head_chunks)
            heads = choice.head_exchange
            backward, exchange = (heads, heads) if exchange == "none" else (backward, f"{heads} + {exchange}")
        share = imbalance(choice.problem.mask, division.layout, choice.problem.seq_len, division.ring.cp_size)
        return found | {
            "kernel": self.kernel.name,
            "layout": choice.layout,
            "schedule": choice.schedule,
            "backward": backward,
            "exchange": exchange,
            "mask": str(choice.problem.mask),
            "imbalance": f"{share:.4f}",
        }


class Made(NamedTuple):
    """What decides a call's result besides its tensors."""

    mask: Mask
    scale: float
    softcap: float | None
    sinks: bool

    @classmethod
    def by(cls, plan: AttentionPlan, sinks_N: Tensor | None) -> Made:
        """Of a call with this plan."""
        choice = plan.choice
        return cls(choice.problem.mask, plan.scale, choice.choices.softcap, sinks_N is not None)


# Of the LSEs that calls returned, while they live. An attribute of theirs would be written by `torch.save`.
made_by_lse: MutableMapping[Tensor, Made] = WeakTensorKeyDictionary()


@dataclass(frozen=True, slots=True)
class SavedOutput:
    """What one call of attention gave, for this rank's tokens at or after global position `cut`.

    Handed to a later call with the same inputs, that call attends for the tokens before `cut` only.
    """

    out_BLND: Tensor  # rows from `cut` on, the last of the local tokens
    lse_BNL: Tensor
    cut: int = 0  # global position
    made: Made | None = None  # None: not known, as of a detached LSE

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.out_BLND, self.lse_BNL

    def check(self, plan: AttentionPlan, q_BLND: Tensor, sinks_N: Tensor | None) -> None:
        """Raise ValueError unless this is of a call with such shards, and, where its call is known, with the mask and
        factors of `plan`."""
        batch, tokens, heads, _ = q_BLND.shape
        rows = tokens - plan.cp.rows_before(self.cut, tokens * plan.cp.size)
        out_shape, lse_shape = (batch, rows, heads, plan.choice.problem.value_dim), (batch, heads, rows)
        if (self.out_BLND.shape, self.lse_BNL.shape) != (out_shape, lse_shape):
            raise ValueError(
                f"saved holds out {tuple(self.out_BLND.shape)} and lse {tuple(self.lse_BNL.shape)} from position "
                f"{self.cut} on, and this call has {out_shape} and {lse_shape} there; pass what save_suffix returned "
                "for these shards"
            )
        if self.out_BLND.dtype != q_BLND.dtype:
            raise ValueError(
                f"saved holds out in {self.out_BLND.dtype}, and this call has q in {q_BLND.dtype}; pass saved to a "
                "call in the same dtype"
            )
        now = Made.by(plan, sinks_N)
        if self.made is None or self.made == now:
            return
        names = [name for name in Made._fields if getattr(self.made, name) != getattr(now, name)]
        before, here = (", ".join(f"{name} {getattr(made, name)}" for name in names) for made in (self.made, now))
        raise ValueError(
            f"saved is of a call with {before}, and this one has {here}; pass saved to a call with the same mask, "
            "scale, softcap and sinks"
        )


# The result of attention from the part of it that was saved, None for nothing.
FromSaved: TypeAlias = Callable[[SavedOutput | None], tuple[Tensor, Tensor]]


class Attend(Protocol):
    """Attention over the whole sequence from one rank's shards; collective over the context-parallel ranks."""

    def __call__(
        self,
        q_BLND: Tensor,
        k_BLKD: Tensor,
        v_BLKD: Tensor,
        *,
        sinks_N: Tensor | None = None,
        saved: SavedOutput | None = None,
        expand_NXC: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(out_BLND, lse_BNL), out differentiable in q, k, v and the sinks; the LSE is for `keep` alone.

        `sinks_N` is a learned logit per query head, given where the model has them; `expand_NXC` the matrix that K and
        V are formed with, where it has a latent.

        `saved` is what `keep` returned of an earlier call with the same inputs: the forward is then computed only for
        the other rows, which is how checkpointing avoids computing attention again.
        """
        ...

    def keep(self, out_BLND: Tensor, lse_BNL: Tensor, tail: float) -> SavedOutput | None:
        """The part of a call's result to pass as `saved`: rows in the last `tail` of the sequence, None for none."""
        ...


class OnceAndAgain(Protocol):
    """Attention of a layer that is computed again (`engine.checkpoint.recompute.AttendOnce`)."""

    attend: Attend
    copies: bool  # whether what it passes to `once` may be written to

    def once(self, compute: FromSaved) -> tuple[Tensor, Tensor]:
        """The result of `compute` from what was saved of the first call, whose own result is saved."""
        ...

    def passed(self) -> None:
        """To be called when backward has passed attention: what the layer before needs is then prefetched."""
        ...


class AttentionFn(Attend, Protocol):
    """Attention among the ranks of a trial. A method that refuses models with sinks, or a latent, asserts that there
    are none."""

    def resolved(self) -> dict[str, str]:
        """The value of every `auto` (kernel, layout, backward, schedule, exchange); empty before the first call."""
        ...


def save_suffix(
    out_BLND: Tensor, lse_BNL: Tensor, cp: ContextParallel, tail: float, tensor_layout: str = "BSHD"
) -> SavedOutput | None:
    """What to keep of a call's result so that attention is computed again for the first 1 - `tail` of the sequence.

    `tail` 1 keeps the tensors themselves; a smaller tail a copy of its rows, since a view would keep everything; None
    when nothing is kept. Free of any graph. `tensor_layout` is that of the call. Raises ValueError when `tail` is no
    fraction, or the tensors are in another layout.
    """
    if not (isinstance(out_BLND, Tensor) and isinstance(lse_BNL, Tensor) and isinstance(cp, ContextParallel)):
        kinds = ", ".join(type(each).__name__ for each in (out_BLND, lse_BNL, cp))
        raise ValueError(f"found {kinds}; pass out and lse of a call with return_lse=True, and its ContextParallel")
    made = None if torch.compiler.is_compiling() else _made(lse_BNL)
    if tensor_layout != "BSHD":
        (out_BLND,) = to_bshd([out_BLND], tensor_layout)
        lse_BNL = lse_BNL.unsqueeze(0) if tensor_layout == "THD" else lse_BNL
    if lse_BNL.shape != (out_BLND.shape[0], out_BLND.shape[2], out_BLND.shape[1]):
        raise ValueError(
            f"out {tuple(out_BLND.shape)} and lse {tuple(lse_BNL.shape)} are not [batch, tokens, heads, head_dim] and "
            "[batch, heads, tokens]; give the tensor_layout of the call"
        )
    seq_len = out_BLND.shape[1] * cp.size
    cut = tail_cut(tail, seq_len, cp.size)
    if cut == seq_len:
        return None
    out_BLND, lse_BNL = out_BLND.detach(), lse_BNL.detach()
    if cut == 0:
        return SavedOutput(out_BLND, lse_BNL, made=made)
    head = cp.rows_before(cut, seq_len)
    return SavedOutput(out_BLND[:, head:].clone(), lse_BNL[:, :, head:].clone(), cut, made)


def _made(lse_BNL: Tensor) -> Made | None:
    """Of which call this LSE is, or the one that it is a view of: calls without a batch return a view."""
    base_BNL = lse_BNL if lse_BNL._base is None else lse_BNL._base
    return made_by_lse.get(lse_BNL) or made_by_lse.get(base_BNL)
