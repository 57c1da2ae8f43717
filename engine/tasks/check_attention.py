"""Is a trial's attention right? Its out, dq, dk and dv beside dense attention in float64, at any length.

Up to DENSE_TOKENS tokens every query row is compared. Beyond that, rows of every run of positions on every rank are:
where the gradient of the output is 0 in all other rows, `out` and `dq` of these rows, and `dk` and `dv` of *all*
tokens, follow from these rows alone. So the truth costs rows x seq_len instead of seq_len squared, and still every run
of queries meets every run of keys.

Each rank forms the truth of its own keys: all ranks get the rows, and sums over keys are added up between ranks. Of
what is being checked, only the positions of a rank's tokens and the mask take part.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.context import ContextParallel
from engine.attention.geometry.layout import Segment
from engine.attention.masks import Mask
from engine.attention.masks.mask import regions_of
from engine.distributed import World
from engine.measurement import NOT_FINITE, TOKEN_FACTOR, UNCHECKED, ErrorPlace, Extra

DENSE_TOKENS = 4096  # up to this length all rows are compared
SAMPLED_ROWS = 256  # of a longer sequence; one of each run of positions where there are more runs
TENSORS = ("out", "dq", "dk", "dv")
_LARGEST_ERROR = 1e9  # what is recorded of a larger one
_BLOCK_BYTES = 64 << 20  # of the scores that are held at once; about six tensors of that size are
_FINITE = 1e100  # beyond it squares overflow; no value of a correct method comes near
_LEAST_OF_SCALE = 0.1  # of the size of its terms that a tensor counts as at least, where they cancel

ForwardBackward = Callable[[Tensor], tuple[Tensor, ...]]
Result = TypeVar("Result")


class NotChecked(Exception):
    """Some rank could not form the truth, or compare with it; the text says which and why."""


def checked_rows(cp: ContextParallel, seq_len: int) -> list[int]:
    """Global positions of the queries that are compared, ascending, the same on every rank: all of a short sequence; of
    a longer one the first and last of each run of positions of each rank, and others at random."""
    if seq_len <= DENSE_TOKENS:
        return list(range(seq_len))
    runs = [part.positions() for rank in range(cp.size) for part in cp.layout.segments(seq_len, cp.size, rank)]
    chance = random.Random(seq_len)  # noqa: S311 - a sample, no secret
    of_each = max(1, SAMPLED_ROWS // len(runs))
    rows: set[int] = set()
    for run in runs:
        ends = [run[0], run[-1]] if of_each > 1 else []
        rows.update(ends, chance.sample(run, min(len(run), of_each - len(ends))))
    return sorted(rows)


def attention_errors(
    world: World, cp: ContextParallel, shards: Sequence[Tensor], mask: Mask, compute: ForwardBackward
) -> Extra:
    """Entries of a measurement's `extra`: `error` and `error_at` by tensor, and `checked` where rows are a sample; or
    `unchecked`, why a rank could not form the truth, as for want of memory. Collective over `world`.

    `shards` are q, k, v and the gradient of out of this rank's tokens; `compute` gives (out, dq, dk, dv) for such a
    gradient. The one given is used up: where rows are a sample it holds other numbers afterwards.

    `error` is the Frobenius norm of the difference over that of the truth, of all that is compared. `error_at` names
    the run of positions on which it is largest, or a single token whose error is more than TOKEN_FACTOR times that of
    any run, as where a query sees one key too many. There each token's difference counts relative to the size that its
    terms have before they are added up, so that late tokens of a causal sequence, whose outputs are small, count as
    early ones do. It also names the head that differs most, of the token that errs most. Both are NOT_FINITE where NaN
    or infinity is found.
    """
    q_BLND, k_BLKD, v_BLKD, dout_BLND = (shard.detach() for shard in shards)
    seq_len = q_BLND.shape[1] * cp.size
    rows = checked_rows(cp, seq_len)
    try:
        truth = agree(world, lambda: _DenseAttention64(cp, mask, rows, (q_BLND, k_BLKD, v_BLKD, dout_BLND)))
        if len(rows) < seq_len:
            # In place: a second gradient may not fit beside a step's tensors.
            dout_BLND.mul_(truth.checked_L[:, None, None])
        found = compute(dout_BLND)
        seen = _compared(world, cp, truth, found)
    except NotChecked as error:
        return {UNCHECKED: str(error)}
    finally:
        if len(rows) < seq_len:
            dout_BLND.normal_()  # as it was: power, and so clocks, depend on the numbers
    extra = combined(seen)
    if len(rows) < seq_len:
        extra["checked"] = {"tokens": seq_len, "rows": len(rows)}
    return extra


def _compared(
    world: World, cp: ContextParallel, truth: _DenseAttention64, found: Sequence[Tensor]
) -> list[dict[str, TensorError]]:
    """What each rank found of each tensor, in rank order. Collective."""
    out_BLND, dq_BLND, dk_BLKD, dv_BLKD = found
    cp_sum(cp, truth.q, truth.dout)
    agree(world, truth.attend)
    truth.join()
    of_keys = agree(world, lambda: truth.compare_keys(dk_BLKD, dv_BLKD))
    cp_sum(cp, truth.dq, truth.out_scale, truth.dq_scale)
    sums = agree(world, lambda: truth.compare_rows(out_BLND, dq_BLND)) | of_keys
    scales = [sums[name].scale_sums() for name in TENSORS]
    cp_sum(cp, *scales)
    mine = {name: sums[name].seen(*scale.tolist()) for name, scale in zip(TENSORS, scales, strict=True)}
    return world.gather(mine)


def agree(world: World, work: Callable[[], Result]) -> Result:
    """What `work` returns; where it fails on some rank, NotChecked on all of them, before the next collective."""
    # OutOfMemoryError is a RuntimeError, TooManyTiles a ValueError.
    result, failures = world.attempt(work, RuntimeError, MemoryError, ValueError)
    for rank, text in failures.items():
        raise NotChecked(f"rank {rank}: {text.splitlines()[0]}")
    return cast(Result, result)


def cp_sum(cp: ContextParallel, *tensors: Tensor) -> None:
    """Add up each tensor over the ranks that share a sequence, in place. Collective."""
    if cp.size > 1:
        for tensor in tensors:
            dist.all_reduce(tensor, group=cp.group)


class _DenseAttention64:
    """Dense float64 attention of some query rows over all keys, of which this rank holds some.

    R: rows that are compared. G: rows times the query heads of one KV head, which share its keys. M: keys of a block.
    """

    def __init__(self, cp: ContextParallel, mask: Mask, rows: Sequence[int], shards: Sequence[Tensor]) -> None:
        """With `q` and `dout` of this rank's rows, 0 in the others: their sums over the ranks are whole."""
        self._cp, self._rows = cp, rows
        q_BLND, self._k_BLKD, self._v_BLKD, dout_BLND = shards
        seq_len, device = q_BLND.shape[1] * cp.size, q_BLND.device
        self._segments, self._scale = cp.segments(seq_len), q_BLND.shape[-1] ** -0.5
        self._positions_L = cp.positions(seq_len, device)
        rows_R = torch.tensor(rows, device=device)
        self.checked_L = torch.isin(self._positions_L, rows_R)
        self._local = self.checked_L.nonzero()[:, 0]
        self._place = torch.searchsorted(rows_R, self._positions_L[self._local])
        self._starts_RI, self._stops_RI = (ends.to(device) for ends in seen_runs(mask, rows, seq_len))
        self.q, self.dout = (self._of_rows(tensor) for tensor in (q_BLND, dout_BLND))
        self._largest = self.q.new_full(self.q.shape[:3], -torch.inf)
        self._sum = torch.zeros_like(self._largest)
        self._out = torch.zeros_like(self.q)

    def _of_rows(self, tensor_BLND: Tensor) -> Tensor:
        """[K, B, G, D] in float64 with this rank's rows of a tensor of queries."""
        batch, _, heads, dim = tensor_BLND.shape
        whole = tensor_BLND.new_zeros(batch, len(self._rows), heads, dim, dtype=torch.float64)
        whole[:, self._place] = tensor_BLND[:, self._local].double()
        by_head = whole.unflatten(2, (self._k_BLKD.shape[2], -1)).permute(2, 0, 1, 3, 4)
        return by_head.flatten(2, 3).contiguous()

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of this rank's keys, and which of them each row sees: [R, 1, M]."""
        batch, grouped = self.q.shape[1:3]
        size = max(1, _BLOCK_BYTES // (8 * batch * grouped))
        for start in range(0, len(self._positions_L), size):
            keys = slice(start, start + size)
            at_RM = self._positions_L[keys].expand(len(self._rows), -1).contiguous()
            began, ended = (torch.searchsorted(ends, at_RM, right=True) for ends in (self._starts_RI, self._stops_RI))
            yield keys, (began > ended)[:, None]

    def _scores(self, head: int, k_BMD: Tensor, seen_R1M: Tensor) -> Tensor:
        """Scaled scores [B, G, M], -inf where a row does not see a key."""
        scores = self.q[head] @ k_BMD.transpose(1, 2) * self._scale
        by_row = scores.unflatten(1, (len(self._rows), -1))
        return by_row.masked_fill_(~seen_R1M, -torch.inf).view_as(scores)

    def attend(self) -> None:
        """Forward over this rank's keys: the largest score, the sum of exponentials and the sum of values."""
        for keys, seen_R1M in self._blocks():
            for head in range(len(self.q)):
                k_BMD, v_BMD = self._k_BLKD[:, keys, head].double(), self._v_BLKD[:, keys, head].double()
                scores = self._scores(head, k_BMD, seen_R1M)
                largest = torch.maximum(self._largest[head], scores.amax(dim=-1))
                p = (scores - finite(largest)[..., None]).exp()
                before = (self._largest[head] - finite(largest)).exp()
                self._sum[head] = self._sum[head] * before + p.sum(dim=-1)
                self._out[head] = self._out[head] * before[..., None] + p @ v_BMD
                self._largest[head] = largest

    def join(self) -> None:
        """Forward over all keys. Collective."""
        mine = self._largest.clone()
        if self._cp.size > 1:
            dist.all_reduce(self._largest, op=dist.ReduceOp.MAX, group=self._cp.group)
        before = (mine - finite(self._largest)).exp()
        self._sum *= before
        self._out *= before[..., None]
        cp_sum(self._cp, self._sum, self._out)
        self._over_sum = torch.where(self._sum > 0, 1 / self._sum, 0.0)
        self._out *= self._over_sum[..., None]
        self._delta = (self.dout * self._out).sum(dim=-1, keepdim=True)

    def compare_keys(self, dk_BLKD: Tensor, dv_BLKD: Tensor) -> dict[str, Sums]:
        """Backward over this rank's keys: dk and dv beside those found, and what these keys add to dq."""
        sums = {name: Sums(self._positions_L, self._segments) for name in ("dk", "dv")}
        self.dq = torch.zeros_like(self.q)
        self.out_scale, self.dq_scale = (torch.zeros_like(self._sum[..., None]) for _ in range(2))
        for keys, seen_R1M in self._blocks():
            for head in range(len(self.q)):
                q, dout, delta = self.q[head], self.dout[head], self._delta[head]
                k_BMD, v_BMD = self._k_BLKD[:, keys, head].double(), self._v_BLKD[:, keys, head].double()
                p = (self._scores(head, k_BMD, seen_R1M) - finite(self._largest[head])[..., None]).exp_()
                p *= self._over_sum[head][..., None]
                dp = dout @ v_BMD.transpose(1, 2)
                ds = p * (dp - delta) * self._scale
                self.dq[head] += ds @ k_BMD
                dk, dv = ds.transpose(1, 2) @ q, p.transpose(1, 2) @ dout
                del ds
                squared = p.square_()
                terms = dp.square_().add_(delta.square()).mul_(squared).mul_(self._scale**2)
                self.out_scale[head] += squared @ v_BMD.square().sum(dim=-1, keepdim=True)
                self.dq_scale[head] += terms @ k_BMD.square().sum(dim=-1, keepdim=True)
                of_dv = squared.transpose(1, 2) @ dout.square().sum(dim=-1, keepdim=True)
                of_dk = terms.transpose(1, 2) @ q.square().sum(dim=-1, keepdim=True)
                for name, found_BLKD, truth, size in (("dk", dk_BLKD, dk, of_dk), ("dv", dv_BLKD, dv, of_dv)):
                    sums[name].add(keys, head, found_BLKD[:, keys, head, None], truth[:, :, None], size[:, :, None])
        return sums

    def compare_rows(self, out_BLND: Tensor, dq_BLND: Tensor) -> dict[str, Sums]:
        """out and dq of this rank's rows beside those found."""
        kv_heads, sums = len(self.q), {}
        for name, found_BLND, truth, scale in (
            ("out", out_BLND, self._out, self.out_scale),
            ("dq", dq_BLND, self.dq, self.dq_scale),
        ):
            sums[name] = Sums(self._positions_L, self._segments)
            mine = found_BLND.detach()[:, self._local].unflatten(2, (kv_heads, -1))
            for head in range(kv_heads):
                wanted, size = (
                    one[head].unflatten(1, (len(self._rows), -1))[:, self._place] for one in (truth, scale)
                )  # fmt: skip
                sums[name].add(self._local, head * mine.shape[3], mine[:, :, head], wanted, size)
        return sums


class TokenError(NamedTuple):
    """The relative error of a run of tokens, or of a single one. The larger score is the worse error."""

    score: float  # the error; of a single token, divided by TOKEN_FACTOR
    first: int  # global positions
    last: int
    error: float
    head: int  # that differs most, of the token that errs most


@dataclass(frozen=True, slots=True)
class TensorError:
    """What one rank found of one tensor: sums of squares, and where its error is largest."""

    difference: float
    truth: float
    worst: TokenError


class Sums:
    """Of one tensor, for each of this rank's tokens: squares of the difference from the truth, of the truth and of the
    size of its terms, added up over sequences, heads and the head dim; and which head differs most."""

    def __init__(self, positions_L: Tensor, segments: Sequence[Segment]) -> None:
        self._segments = segments
        totals = torch.zeros(4, len(positions_L), dtype=torch.float64, device=positions_L.device)
        # Where a value is not finite the difference is infinite. `_largest` is that of the head `_head` alone.
        self._difference, self._truth, self._scale, self._largest = totals
        self._head = torch.zeros_like(positions_L)
        self._compared = torch.zeros_like(positions_L, dtype=torch.bool)

    def add(self, tokens: slice | Tensor, first_head: int, found: Tensor, truth: Tensor, scale: Tensor) -> None:
        """[B, tokens, heads, D] of what was found and of the truth, of the heads from `first_head` on; `scale`
        [B, tokens, heads, 1]: squares summed over D. Each head of a token is added once."""
        found = found.detach().double()
        off = torch.where(found.abs() <= _FINITE, (found - truth).square(), torch.inf)
        for total, values in ((self._difference, off), (self._truth, truth.square()), (self._scale, scale)):
            total[tokens] += values.sum(dim=(0, 2, 3))
        largest, head = off.sum(dim=(0, 3)).max(dim=1)
        self._head[tokens] = torch.where(largest > self._largest[tokens], first_head + head, self._head[tokens])
        self._largest[tokens] = torch.maximum(largest, self._largest[tokens])
        self._compared[tokens] = True

    def scale_sums(self) -> Tensor:
        """Sum of the squared sizes, and the number of tokens that have one."""
        return torch.stack([self._scale.sum(), (self._scale > 0).sum().double()])

    def seen(self, scale: float, tokens: float) -> TensorError:
        """What this rank found. `scale` and `tokens` are `scale_sums` of all ranks: a token without terms, which has to
        be 0, is measured by the mean size of the others."""
        usual = scale / tokens if tokens else 1.0
        relative = self._difference / torch.where(self._scale > 0, self._scale, usual)
        heads = self._head.cpu()
        places, offset = [TokenError(0.0, 0, 0, 0.0, 0)], 0
        for segment in self._segments:
            run, positions = slice(offset, offset + segment.count), segment.positions()
            # A token without terms, and rightly 0, says nothing of the others.
            compared = self._compared[run] & ((self._scale[run] > 0) | (self._difference[run] > 0))
            if self._difference[run].isinf().any():
                at = int(self._difference[run].argmax())
                head = int(heads[offset + at])
                places.append(TokenError(NOT_FINITE, positions[0], positions[-1], NOT_FINITE, head))
            elif compared.any():
                of_tokens = torch.where(compared, relative[run], 0.0)
                at = int(of_tokens.argmax())
                head = int(heads[offset + at])
                error = min(float(of_tokens.sum() / compared.sum()) ** 0.5, _LARGEST_ERROR)
                places.append(TokenError(error, positions[0], positions[-1], error, head))
                error = min(float(of_tokens.max()) ** 0.5, _LARGEST_ERROR)
                places.append(TokenError(error / TOKEN_FACTOR, positions[at], positions[at], error, head))
            offset += segment.count
        truth = max(self._truth.sum().item(), _LEAST_OF_SCALE**2 * self._scale.sum().item())
        return TensorError(self._difference.sum().item(), truth, max(places))


def combined(ranks: Sequence[dict[str, TensorError]]) -> Extra:
    """The entries `error` and `error_at` from what the ranks found, in rank order."""
    errors: dict[str, float] = {}
    worst: dict[str, ErrorPlace] = {}
    for name in TENSORS:
        seen = [found[name] for found in ranks]
        difference, truth = math.fsum(one.difference for one in seen), math.fsum(one.truth for one in seen)
        rank = max(range(len(seen)), key=lambda one: seen[one].worst.score)
        _, first, last, error, head = seen[rank].worst
        whole = (difference / truth) ** 0.5 if truth else _LARGEST_ERROR * (difference > 0)
        errors[name] = NOT_FINITE if error == NOT_FINITE else min(whole, _LARGEST_ERROR)
        worst[name] = {"error": error, "rank": rank, "first_token": first, "last_token": last, "head": head}
    return {"error": errors, "error_at": worst}


def finite(largest: Tensor) -> Tensor:
    """The largest scores, 0 for rows that see no key: all their exponentials are then 0."""
    return torch.where(largest > -torch.inf, largest, 0.0)


def seen_runs(mask: Mask, rows: Sequence[int], seq_len: int) -> tuple[Tensor, Tensor]:
    """The keys that each row sees as disjoint runs: their starts and their stops, each ascending, [R, runs] padded with
    `seq_len`. Raises ValueError for a mask that does not fit the length."""
    if unsupported_reason := mask.unsupported_reason(seq_len):
        raise ValueError(unsupported_reason)
    regions = regions_of(mask, seq_len)
    found = []
    for row in rows:
        _, _, start, stop, left, right = regions[(regions[:, 0] <= row) & (row < regions[:, 1])].T
        start, stop = np.maximum(start, row - left), np.minimum(stop, row + right + 1)
        found.append([run for run in zip(start.tolist(), stop.tolist(), strict=True) if run[0] < run[1]])
    most = max(map(len, found), default=0) or 1
    padded = [sorted(runs) + [(seq_len, seq_len)] * (most - len(runs)) for runs in found]
    starts_RI, stops_RI = torch.tensor(padded).unbind(dim=-1)
    return starts_RI.contiguous(), stops_RI.contiguous()
