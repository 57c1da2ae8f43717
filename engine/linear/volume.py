"""Bytes that the ranks of a linear layer send, from sizes alone. No torch: plans and predictions read it.

Consecutive linear layers move hidden states to consecutive tokens and back once. Each sends the last inputs of its
convolution to the next rank, and scans the states. Backward does the same in reverse, so that it sends as much.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from engine.attention.geometry.layout import Layout
from engine.settings import BYTES_OF, Dtype
from engine.shape import ModelShape

Integers = NDArray[np.int64]

CHUNK = 64  # tokens of a chunk of a recurrence: the most, as in flash-linear-attention


@lru_cache(maxsize=64)
def moved_tokens(layout: Layout, seq_len: int, cp_size: int) -> Integers:
    """[from, to]: tokens of each rank's shard that are among the consecutive tokens of each rank."""
    tokens, found = seq_len // cp_size, np.zeros((cp_size, cp_size), np.int64)
    for rank in range(cp_size):
        for segment in layout.segments(seq_len, cp_size, rank):
            owners = np.asarray(segment.positions()) // tokens
            found[rank] += np.bincount(owners, minlength=cp_size)
    return found


def scan_messages(cp_size: int, cp_rank: int) -> tuple[int, int]:
    """(messages with a map and a state, messages with a state alone) of one rank in a scan."""
    distances = [1 << number for number in range((cp_size - 1).bit_length()) if cp_rank + (1 << number) < cp_size]
    alone = sum(2 * distance >= cp_size for distance in distances)
    return len(distances) - alone, alone


def state_bytes(model: ModelShape, dtype: Dtype, batch_size: int) -> tuple[int, int]:
    """(bytes of a map, bytes of a state) of all heads and sequences, in fp32 or wider."""
    heads = max(4, BYTES_OF[dtype]) * batch_size * model.linear_heads
    width = model.linear_key_dim if model.linear == "gated_delta_net" else 1
    return heads * width * width, heads * model.linear_key_dim * model.linear_value_dim


def sent_bytes(
    model: ModelShape, layout: Layout, seq_len: int, cp_size: int, *, dtype: Dtype, batch_size: int
) -> Integers:
    """[from, to]: bytes that each rank sends to each other one in a forward of all linear layers. Backward sends the
    same along every link in the other direction."""
    if cp_size == 1:
        return np.zeros((1, 1), np.int64)
    moved = moved_tokens(layout, seq_len, cp_size) * (1 - np.eye(cp_size, dtype=np.int64))
    of_run = (moved + moved.T) * BYTES_OF[dtype] * batch_size * model.hidden
    return model.linear_runs * of_run + sum(model.linear_layers) * _of_layer(model, cp_size, dtype, batch_size)


def _of_layer(model: ModelShape, cp_size: int, dtype: Dtype, batch_size: int) -> Integers:
    """The same of the convolution and the scan of one layer."""
    item, found = BYTES_OF[dtype] * batch_size, np.zeros((cp_size, cp_size), np.int64)
    channels = 2 * model.linear_key_heads * model.linear_key_dim + model.linear_heads * model.linear_value_dim
    map_bytes, own_bytes = state_bytes(model, dtype, batch_size)
    for rank in range(cp_size - 1):
        found[rank, rank + 1] += item * channels * (model.linear_conv - 1)
        with_map, _ = scan_messages(cp_size, rank)
        to = [rank + (1 << number) for number in range((cp_size - 1).bit_length())]
        for number, other in enumerate(each for each in to if each < cp_size):
            found[rank, other] += own_bytes + (map_bytes if number < with_map else 0)
    return found
