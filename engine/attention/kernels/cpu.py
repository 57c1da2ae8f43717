"""Kernel `cpu`: torch's own flash attention for CPUs, whose backward takes an external LSE.

The op aligns its causal mask top-left. Other bands go in as additive masks, of which the op computes every element,
hidden or not. Such a tile is computed in blocks of queries, each against the keys that its queries see, so that time
and memory follow the visible pairs. Inputs narrower than fp32 are widened first, so that partial results are not
rounded before they are summed: the error of a bf16 run is then the same on any number of ranks. The op is equally
fast in both. Short documents are computed many at a time. It takes one head dim: a narrower V is padded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from engine.attention.geometry.tiles import Band, Integers, Tile, VarlenGroup, Visible, row_blocks
from engine.attention.kernels import (
    Gradients,
    KernelProblem,
    WholeInputs,
    repeat_heads,
    softcap_unsupported_reason,
    sum_heads,
)
from engine.attention.kernels.padded import padded_backward, padded_forward
from engine.attention.kernels.stand_in import StandInKernel
from engine.ops.autograd import accumulation_dtype

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


# Queries per call for a band. Measured on one core, windows of 64 to 1024 tokens, head dims 32 and 128: blocks of 32 to
# 128 are equally fast, 256 up to 1.5 times slower for windows of 64 and 256, and smaller blocks cost more calls.
_BLOCK_ROWS = 128


def _additive(band: Band, rows: int, columns: int, dtype: torch.dtype) -> Tensor | None:
    """The band as an additive mask, or None when the op's causal flag is enough."""
    if band.kind != "band":
        return None
    mask = torch.zeros(rows, columns, dtype=dtype)
    if band.lo is not None:
        mask += torch.full_like(mask, -torch.inf).tril(band.lo - 1)
    if band.hi is not None:
        mask += torch.full_like(mask, -torch.inf).triu(band.hi + 1)
    return mask


def _calls(visible: Visible, rows: int, columns: int, dtype: torch.dtype) -> Iterator[tuple[Tile, Tensor | None]]:
    """The calls of the op, one after another, that compute a call of ours: the rectangle of each, and its additive
    mask."""
    alike, mask = None, None
    whole = Tile(slice(0, rows), slice(0, columns))
    tiles = _packed(visible).single if isinstance(visible, VarlenGroup) else (whole._replace(band=visible),)
    for sequence in tiles:
        if sequence.band.kind != "band":
            yield sequence, None
            continue
        top, left = sequence.q.start, sequence.k.start
        for tile in row_blocks(sequence.band, sequence.rows, sequence.columns, _BLOCK_ROWS):
            shape = (tile.band, tile.rows, tile.columns)
            if shape != alike:  # the blocks inside a window are all alike
                alike, mask = shape, _additive(*shape, dtype)
            q, k = (slice(at + each.start, at + each.stop) for at, each in ((top, tile.q), (left, tile.k)))
            yield Tile(q, k, tile.band), mask


@dataclass(frozen=True)
class _Padded:
    """One side of some sequences, padded to equal lengths with tokens of their own."""

    tokens: Tensor  # of the call, [sequences * padded length]
    real: Tensor | None  # which of them are no padding; None where none is
    unique: Tensor  # those tokens of the call, once each

    @classmethod
    def of(cls, starts: Integers, stops: Integers, length: int) -> _Padded:
        place = np.arange(length)
        tokens = np.minimum(starts[:, None] + place, stops[:, None] - 1).reshape(-1)
        real = (place < (stops - starts)[:, None]).reshape(-1)
        kept = None if real.all() else torch.from_numpy(np.flatnonzero(real))
        return cls(torch.from_numpy(tokens), kept, torch.from_numpy(tokens[real]))

    def taken(self, tensor_BLND: Tensor, sequences: int) -> Tensor:
        """[B, L, heads, D] -> [B * sequences, heads, padded length, D]."""
        return tensor_BLND.index_select(1, self.tokens).unflatten(1, (sequences, -1)).flatten(0, 1).transpose(1, 2)

    def taken_rows(self, rows_BNL: Tensor, sequences: int) -> Tensor:
        """[B, heads, L] -> [B * sequences, heads, padded length]."""
        return rows_BNL.index_select(2, self.tokens).unflatten(2, (sequences, -1)).transpose(1, 2).flatten(0, 1)

    def put(self, part: Tensor, into_BLND: Tensor) -> None:
        """[B * sequences, heads, padded length, D] -> its tokens of [B, L, heads, D]."""
        part_BLND = part.transpose(1, 2).unflatten(0, (len(into_BLND), -1)).flatten(1, 2)
        into_BLND.index_copy_(1, self.unique, part_BLND if self.real is None else part_BLND[:, self.real])

    def put_rows(self, part: Tensor, into_BNL: Tensor) -> None:
        """[B * sequences, heads, padded length] -> its tokens of [B, heads, L]."""
        part_BNL = part.unflatten(0, (len(into_BNL), -1)).transpose(1, 2).flatten(2)
        into_BNL.index_copy_(2, self.unique, part_BNL if self.real is None else part_BNL[:, :, self.real])


@dataclass(frozen=True)
class _Batch:
    """Short sequences that one call of the op computes, as a batch."""

    sequences: int
    queries: _Padded
    keys: _Padded
    causal: bool
    hidden: Tensor | None  # boolean [sequences, rows, columns]: pairs that are not visible; None: as `causal` says

    def mask(self, batch: int, dtype: torch.dtype) -> Tensor | None:
        """The op's additive mask for so many sequences of the caller's."""
        if self.hidden is None:
            return None
        mask = torch.zeros(self.hidden.shape, dtype=dtype).masked_fill_(self.hidden, -torch.inf)
        return mask.repeat(batch, 1, 1).unsqueeze(1)


@dataclass(frozen=True)
class _Packed:
    """How the op computes several sequences."""

    batches: tuple[_Batch, ...]
    single: tuple[Tile, ...]  # longer ones, each by calls of its own


# Sequences of no more tokens are computed many at a time, padded to a multiple of `_PADDED`: calls of the op for a few
# tokens each would take longer than their work.
_SHORT, _PADDED = 128, 16
_known: WeakKeyDictionary[VarlenGroup, _Packed] = WeakKeyDictionary()


def _packed(sequences: VarlenGroup) -> _Packed:
    found = _known.get(sequences)
    if found is None:
        found = _known[sequences] = _divided(sequences)
    return found


def _divided(sequences: VarlenGroup) -> _Packed:
    rows, columns = sequences.q_stops - sequences.q_starts, sequences.k_stops - sequences.k_starts
    short = np.maximum(rows, columns) <= _SHORT
    padded = np.stack([-(-each // _PADDED) * _PADDED for each in (rows, columns)])
    batches = []
    for length, width in np.unique(padded[:, short], axis=1).T.tolist():
        own = np.flatnonzero(short & (padded[0] == length) & (padded[1] == width))
        length, width = int(rows[own].max()), int(columns[own].max())
        queries = _Padded.of(sequences.q_starts[own], sequences.q_stops[own], length)
        keys = _Padded.of(sequences.k_starts[own], sequences.k_stops[own], width)
        causal, hidden = sequences.kind == "causal", None
        if not causal and (sequences.kind == "band" or keys.real is not None):
            low, high = sequences.band.lo, sequences.band.hi
            offset = np.arange(width) - np.arange(length)[:, None]
            outside = (offset < (-length if low is None else low)) | (offset > (width if high is None else high))
            # Queries of the padding see what they like: they have no gradient, and their output is dropped.
            real_rows, real_columns = np.arange(length) < rows[own, None], np.arange(width) < columns[own, None]
            unseen = (outside | ~real_columns[:, None]) & real_rows[:, :, None]
            hidden = torch.from_numpy(unseen)
        batches.append(_Batch(len(own), queries, keys, causal, hidden))
    return _Packed(tuple(batches), tuple(sequences.tiles[at] for at in np.flatnonzero(~short).tolist()))


def _batches(visible: Visible) -> tuple[_Batch, ...]:
    return _packed(visible).batches if isinstance(visible, VarlenGroup) else ()


@dataclass(frozen=True)
class CpuKernel(StandInKernel):
    """aten::_scaled_dot_product_flash_attention_for_cpu, forward and backward."""

    name = "cpu"
    takes_sequences = True
    writes_input_dtype = False

    def refuse(self, problem: KernelProblem) -> str | None:
        if problem.device.type != "cpu":
            return f"kernel cpu runs on CPU tensors, found {problem.device.type}; choose kernel auto"
        return None if problem.softcap is None else softcap_unsupported_reason(self.name)

    def forward(
        self, q_BLND: Tensor, k_BMKD: Tensor, v_BMKD: Tensor, visible: Visible, scale: float
    ) -> tuple[Tensor, Tensor]:
        if q_BLND.shape[-1] != v_BMKD.shape[-1]:
            return padded_forward(self, q_BLND, k_BMKD, v_BMKD, visible, scale)
        heads, dtype = q_BLND.shape[2], accumulation_dtype(q_BLND.dtype)
        q_BLND, k_BMKD, v_BMKD = (each.to(dtype) for each in (q_BLND, k_BMKD, v_BMKD))
        k_BMND, v_BMND = repeat_heads(k_BMKD, heads), repeat_heads(v_BMKD, heads)
        q_BNLD, k_BNMD, v_BNMD = (each.transpose(1, 2) for each in (q_BLND, k_BMND, v_BMND))
        if isinstance(visible, Band) and visible.kind != "band":
            out_BNLD, lse_BNL = _forward(q_BNLD, k_BNMD, v_BNMD, 0.0, visible.kind == "causal", scale=scale)
            return out_BNLD.transpose(1, 2), lse_BNL
        if isinstance(visible, Band) or visible.gapless:  # every row is written
            out_BLND, lse_BNL = torch.empty_like(q_BLND), q_BNLD.new_empty(q_BNLD.shape[:3])
        else:
            out_BLND, lse_BNL = torch.zeros_like(q_BLND), q_BNLD.new_full(q_BNLD.shape[:3], -torch.inf)
        for tile, mask in _calls(visible, q_BLND.shape[1], k_BMKD.shape[1], dtype):
            part_BNLD, lse_BNL[:, :, tile.q] = _forward(
                q_BNLD[:, :, tile.q],
                k_BNMD[:, :, tile.k],
                v_BNMD[:, :, tile.k],
                0.0,
                tile.band.kind == "causal",
                attn_mask=mask,
                scale=scale,
            )
            out_BLND[:, tile.q] = part_BNLD.transpose(1, 2)
        for batch in _batches(visible):
            q = batch.queries.taken(q_BLND, batch.sequences)
            k, v = (batch.keys.taken(each, batch.sequences) for each in (k_BMND, v_BMND))
            mask = batch.mask(len(q_BLND), dtype)
            part, part_lse = _forward(q, k, v, 0.0, batch.causal, attn_mask=mask, scale=scale)
            batch.queries.put(part, out_BLND)
            batch.queries.put_rows(part_lse, lse_BNL)
        return out_BLND, lse_BNL

    def backward_of_whole(self, given: WholeInputs, visible: Visible, scale: float, deterministic: bool) -> Gradients:
        if given.q_BLND.shape[-1] != given.v_BLKD.shape[-1]:
            return padded_backward(given, lambda one: self.backward_of_whole(one, visible, scale, deterministic))
        heads, kv_heads = given.q_BLND.shape[2], given.k_BLKD.shape[2]
        dtype, lse_BNL = accumulation_dtype(given.q_BLND.dtype), given.lse_BNL
        q_BLND, out_BLND, dout_BLND, k_BMKD, v_BMKD = (each.to(dtype) for each in (*given[:3], *given[4:]))
        k_BMND, v_BMND = repeat_heads(k_BMKD, heads), repeat_heads(v_BMKD, heads)
        dout_BNLD, out_BNLD, q_BNLD, k_BNMD, v_BNMD = (
            each.transpose(1, 2) for each in (dout_BLND, out_BLND, q_BLND, k_BMND, v_BMND)
        )
        if isinstance(visible, Band) and visible.kind != "band":
            tensors = dout_BNLD, q_BNLD, k_BNMD, v_BNMD, out_BNLD, lse_BNL.contiguous()
            parts_BNLD = _backward(*tensors, 0.0, visible.kind == "causal", scale=scale)
            dq_BLND, dk_BMND, dv_BMND = (part_BNLD.transpose(1, 2) for part_BNLD in parts_BNLD)
            return dq_BLND, sum_heads(dk_BMND, kv_heads), sum_heads(dv_BMND, kv_heads)
        every_row = isinstance(visible, Band) or visible.gapless
        dq_BLND = torch.empty_like(q_BLND) if every_row else torch.zeros_like(q_BLND)
        dk_BMND, dv_BMND = (k_BMKD.new_zeros(*k_BMKD.shape[:2], *q_BLND.shape[2:]) for _ in range(2))
        for tile, mask in _calls(visible, q_BLND.shape[1], k_BMKD.shape[1], dtype):
            parts_BNLD = _backward(
                dout_BNLD[:, :, tile.q],
                q_BNLD[:, :, tile.q],
                k_BNMD[:, :, tile.k],
                v_BNMD[:, :, tile.k],
                out_BNLD[:, :, tile.q],
                lse_BNL[:, :, tile.q].contiguous(),
                0.0,
                tile.band.kind == "causal",
                attn_mask=mask,
                scale=scale,
            )
            dq_part, dk_part, dv_part = (part_BNLD.transpose(1, 2) for part_BNLD in parts_BNLD)
            dq_BLND[:, tile.q] = dq_part
            dk_BMND[:, tile.k] += dk_part
            dv_BMND[:, tile.k] += dv_part
        for batch in _batches(visible):
            queries, keys, count = batch.queries, batch.keys, batch.sequences
            dout, q, out = (queries.taken(each, count) for each in (dout_BLND, q_BLND, out_BLND))
            k, v = (keys.taken(each, count) for each in (k_BMND, v_BMND))
            if queries.real is not None:  # queries of the padding
                real = torch.zeros(len(queries.tokens), dtype=dtype).index_fill_(0, queries.real, 1)
                dout = dout * real.view(count, 1, -1, 1).repeat(len(q_BLND), 1, 1, 1)
            lse, mask = queries.taken_rows(lse_BNL, count).contiguous(), batch.mask(len(q_BLND), dtype)
            dq, dk, dv = _backward(dout, q, k, v, out, lse, 0.0, batch.causal, attn_mask=mask, scale=scale)
            queries.put(dq, dq_BLND)
            keys.put(dk, dk_BMND)
            keys.put(dv, dv_BMND)
        return dq_BLND, sum_heads(dk_BMND, kv_heads), sum_heads(dv_BMND, kv_heads)


KERNEL = CpuKernel()
