"""How tiles of logits are sized."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from engine.lm_head.loss import CPU_TILE_BYTES, tile_tokens
from engine.lm_head.loss_kernel import ENOUGH_TOKENS, GPU_TILE_BYTES


def hidden(tokens: int, device: str, width: int = 4096, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Hidden states as far as a tile is chosen by them, on a device that need not be there."""
    return SimpleNamespace(
        device=torch.device(device),
        shape=(tokens, width),
        itemsize=dtype.itemsize,
        nbytes=tokens * width * dtype.itemsize,
    )


@pytest.mark.parametrize("vocabulary", [1, 256, 32000, 128256, 151936, 262144, 524288, 1 << 20])
def test_a_tile_on_a_cpu_fills_its_bytes_and_no_more(vocabulary) -> None:
    logits = tile_tokens(vocabulary, hidden(1 << 20, "cpu")) * vocabulary
    assert 0.9 * CPU_TILE_BYTES / 4 < logits <= CPU_TILE_BYTES / 4


@pytest.mark.parametrize("tokens", [1, 1 << 14, 1 << 16, 1 << 18, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [1, 32000, 128256, 1 << 20, 1 << 26])
def test_a_tile_on_a_gpu_takes_at_most_its_bytes_or_the_hidden_states(vocabulary, dtype, tokens) -> None:
    given = hidden(tokens, "cuda", dtype=dtype)
    run = tile_tokens(vocabulary, given)
    assert run * vocabulary * dtype.itemsize <= max(GPU_TILE_BYTES, given.nbytes)
    assert run <= ENOUGH_TOKENS[1]


def test_a_tile_on_a_gpu_grows_with_the_tokens_it_may_hold() -> None:
    def tokens_of(tokens: int, vocabulary: int) -> int:
        return tile_tokens(vocabulary, hidden(tokens, "cuda"))

    assert [tokens_of(tokens, 32000) for tokens in (1 << 14, 3 << 14, 1 << 16, 1 << 18)] == [4096, 6144, 8192, 8192]
    # Of 128256 words, 1 GiB holds 4185 tokens' logits; 2 GiB, of 256K hidden states, hold 8371.
    assert [tokens_of(tokens, 128256) for tokens in (1 << 14, 1 << 16, 1 << 18)] == [4096, 4185, 8192]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_one_token_is_a_tile_where_its_logits_take_more(device) -> None:
    assert tile_tokens(1 << 30, hidden(1 << 10, device)) == 1


def test_a_number_of_tiles_divides_the_tokens() -> None:
    assert tile_tokens(1000, hidden(100, "cpu"), 8) == 13
    assert tile_tokens(1000, hidden(100, "cpu"), 1) == 100
    assert tile_tokens(1000, hidden(3, "cpu"), 8) == 1
