"""Calls that compute several sequences at once (`engine.attention.geometry.tiles.VarlenGroup`).

A kernel with a call for sequences of any lengths gets their tokens one after another, as [tokens, heads, head_dim] with
cumulative lengths (`Packed`). Where the sequences lie side by side and the batch is 1, these are views; otherwise their
rows are copied. Any other kernel computes one sequence after another (`forward_each`, `backward_each`).

Shape letters as in `engine.attention.kernels`, with T for the tokens of all sequences of all batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from engine.attention.geometry.tiles import Band, Integers, VarlenGroup
from engine.attention.kernels import BackwardInputs, Gradients, Kernel, WholeInputs

Inputs = TypeVar("Inputs", BackwardInputs, WholeInputs)


@dataclass(frozen=True, eq=False)
class _Side:
    """The queries, or the keys, of some sequences."""

    length: int  # tokens of the call
    bounds: Tensor  # cumulative lengths over all batches, int32 on the device
    longest: int
    covered: Tensor | None  # indices of the tokens that are in a sequence; None where all are

    def packed(self, tensor_BLND: Tensor) -> Tensor:
        """[B, L, heads, D] -> [T, heads, D]."""
        if self.covered is not None:
            tensor_BLND = tensor_BLND.index_select(1, self.covered)
        return tensor_BLND.flatten(0, 1)

    def packed_rows(self, rows_BNL: Tensor) -> Tensor:
        """[B, heads, L] -> [heads, T], contiguous."""
        if self.covered is not None:
            rows_BNL = rows_BNL.index_select(2, self.covered)
        return rows_BNL.transpose(0, 1).flatten(1).contiguous()

    def restored(self, packed_TND: Tensor, batch: int) -> Tensor:
        """[T, heads, D] -> [B, L, heads, D], with 0 between the sequences."""
        tensor_BLND = packed_TND.unflatten(0, (batch, -1))
        if self.covered is None:
            return tensor_BLND
        whole_BLND = tensor_BLND.new_zeros(batch, self.length, *packed_TND.shape[1:])
        return whole_BLND.index_copy_(1, self.covered, tensor_BLND)

    def restored_rows(self, packed_NT: Tensor, batch: int) -> Tensor:
        """[heads, T] -> [B, heads, L], with -inf between the sequences."""
        rows_BNL = packed_NT.unflatten(1, (batch, -1)).transpose(0, 1)
        if self.covered is None:
            return rows_BNL
        whole_BNL = rows_BNL.new_full((batch, packed_NT.shape[0], self.length), -torch.inf)
        return whole_BNL.index_copy_(2, self.covered, rows_BNL)


@dataclass(frozen=True, eq=False)
class Packed:
    """How the tensors of a call become those of a kernel with cumulative lengths. It is on the device, and the host
    waits for no copy."""

    queries: _Side
    keys: _Side
    as_they_are: bool  # a batch of one, whose tokens are all in a sequence: no tensor is copied
    _ready: torch.cuda.Event | None  # the copies to the device have ended
    _known_to: set[int]  # streams that waited for them, and with which their memory is recorded

    @classmethod
    def of(cls, sequences: VarlenGroup, q_BLND: Tensor, k_BMKD: Tensor) -> Packed:
        """For tensors like these. Made once for each batch and device, and kept as long as the sequences."""
        kept, key = _packed.setdefault(sequences, {}), (q_BLND.shape[:2], k_BMKD.shape[1], q_BLND.device)
        if key not in kept:
            kept[key] = cls._made(sequences, q_BLND, k_BMKD)
        found = kept[key]
        if found._ready is not None and (stream := _stream_number(q_BLND.device)) not in found._known_to:
            found._used_on(stream)
        return found

    @classmethod
    def _made(cls, sequences: VarlenGroup, q_BLND: Tensor, k_BMKD: Tensor) -> Packed:
        device, batch = q_BLND.device, q_BLND.shape[0]
        queries = _side(sequences.q_starts, sequences.q_stops, batch, q_BLND.shape[1], device)
        keys = _side(sequences.k_starts, sequences.k_stops, batch, k_BMKD.shape[1], device)
        as_they_are = batch == 1 and queries.covered is None and keys.covered is None
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return cls(queries, keys, as_they_are, None, set())
        ready = torch.cuda.current_stream(device).record_event()
        return cls(queries, keys, as_they_are, ready, {_stream_number(device)})

    def side_by_side(self, q_BLND: Tensor, k_BMKD: Tensor, v_BMKD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, heads, D] of the queries, keys and values."""
        return self.queries.packed(q_BLND), self.keys.packed(k_BMKD), self.keys.packed(v_BMKD)

    def _used_on(self, stream_number: int) -> None:
        """Another stream than that of the copies waits for them, and its kernels keep their memory."""
        if torch.cuda.is_current_stream_capturing():
            return
        assert self._ready is not None
        stream = torch.cuda.current_stream(self.queries.bounds.device)
        stream.wait_event(self._ready)
        for tensor in (self.queries.bounds, self.queries.covered, self.keys.bounds, self.keys.covered):
            if tensor is not None:
                tensor.record_stream(stream)
        self._known_to.add(stream_number)


def _stream_number(device: torch.device) -> int:
    """Of the current stream. `torch.cuda.current_stream` takes a tenth of a short call's host time."""
    return torch._C._cuda_getCurrentRawStream(device.index)


_packed: WeakKeyDictionary[VarlenGroup, dict[object, Packed]] = WeakKeyDictionary()


def _side(starts: Integers, stops: Integers, batch: int, length: int, device: torch.device) -> _Side:
    lengths = stops - starts
    tokens = int(lengths.sum())
    bounds = np.concatenate(([0], np.cumsum(np.tile(lengths, batch)))).astype(np.int32)
    covered = None
    if tokens < length:
        covered = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(tokens)
    sent_covered = None if covered is None else _sent(torch.from_numpy(covered), device)
    return _Side(length, _sent(torch.from_numpy(bounds), device), int(lengths.max()), sent_covered)


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def forward_each(
    kernel: Kernel, q_BLND: Tensor, k_BMKD: Tensor, v_BMKD: Tensor, sequences: VarlenGroup, scale: float
) -> tuple[Tensor, Tensor]:
    """`kernel.forward` of one sequence after another."""
    out_BLND: Tensor | None = None
    lse_BNL = q_BLND.new_empty(0)
    for tile in sequences.tiles:
        part_BLND, part_lse_BNL = kernel.forward(
            q_BLND[:, tile.q], k_BMKD[:, tile.k], v_BMKD[:, tile.k], tile.band, scale
        )
        if out_BLND is None:
            batch, length, heads, _ = q_BLND.shape
            out_BLND = part_BLND.new_zeros(batch, length, heads, part_BLND.shape[-1])
            lse_BNL = part_lse_BNL.new_full((batch, heads, length), -torch.inf)
        out_BLND[:, tile.q], lse_BNL[:, :, tile.q] = part_BLND, part_lse_BNL
    assert out_BLND is not None, "a call has sequences"
    return out_BLND, lse_BNL


def backward_each(given: Inputs, sequences: VarlenGroup, one: Callable[[Inputs, Band], Gradients]) -> Gradients:
    """The backward `one` of one sequence after another."""
    found: list[Tensor] = []
    for queries, keys, band in sequences.tiles:
        parts = one(given.tokens(queries, keys), band)
        if not found:
            found = [part.new_zeros(like.shape) for part, like in zip(parts, (given[0], *given[-2:]), strict=True)]
        for whole, part, tokens in zip(found, parts, (queries, keys, keys), strict=True):
            whole[:, tokens] = part
    dq_BLND, dk_BMKD, dv_BMKD = found
    return dq_BLND, dk_BMKD, dv_BMKD
