"""How tiles of logits are sized."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from engine.lm_head.plain import ENOUGH_TOKENS, FEWEST_TOKENS, TILE_BYTES, LogitTile, choose_tile


def hidden(tokens: int, device: str, width: int = 4096, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Hidden states as far as a tile is chosen by them, on a device that need not be there."""
    return SimpleNamespace(
        device=torch.device(device),
        shape=(tokens, width),
        itemsize=dtype.itemsize,
        nbytes=tokens * width * dtype.itemsize,
    )


@pytest.mark.parametrize("vocabulary", [1, 256, 32000, 128256, 151936, 262144, 524288, 1 << 20, 1 << 26])
def test_a_tile_on_a_cpu_fills_its_bytes_and_no_more(vocabulary) -> None:
    tile = choose_tile(vocabulary, hidden(1 << 20, "cpu"))
    logits = tile.tokens * min(tile.words, vocabulary)
    assert 0.9 * TILE_BYTES["cpu"] / 4 < logits <= TILE_BYTES["cpu"] / 4 or vocabulary == 1
    assert tile.tokens >= FEWEST_TOKENS["cpu"]


@pytest.mark.parametrize("tokens", [1, 1 << 14, 1 << 16, 1 << 18, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [1, 32000, 128256, 1 << 20, 1 << 26])
def test_a_tile_on_a_gpu_takes_at_most_its_bytes_or_the_hidden_states(vocabulary, dtype, tokens) -> None:
    given = hidden(tokens, "cuda", dtype=dtype)
    tile = choose_tile(vocabulary, given)
    assert tile.tokens * tile.words * dtype.itemsize <= max(TILE_BYTES["cuda"], given.nbytes)
    assert tile.words < vocabulary or tile.tokens <= ENOUGH_TOKENS[1]


def test_a_tile_on_a_gpu_grows_with_the_tokens_it_may_hold() -> None:
    def tokens_of(tokens: int, vocabulary: int) -> int:
        return choose_tile(vocabulary, hidden(tokens, "cuda")).tokens

    assert [tokens_of(tokens, 32000) for tokens in (1 << 14, 3 << 14, 1 << 16, 1 << 18)] == [4096, 6144, 8192, 8192]
    # Of 128256 words, 1 GiB holds 4185 tokens' logits; 2 GiB, of 256K hidden states, hold 8371.
    assert [tokens_of(tokens, 128256) for tokens in (1 << 14, 1 << 16, 1 << 18)] == [4096, 4185, 8192]


def test_the_vocabulary_is_tiled_only_where_too_few_tokens_would_be_left() -> None:
    on_gpu, on_cpu = hidden(1 << 14, "cuda"), hidden(1 << 14, "cpu")
    assert choose_tile(1 << 20, on_gpu) == LogitTile(tokens=512, words=1 << 20)
    assert choose_tile((1 << 20) + 1, on_gpu) == LogitTile(tokens=16384, words=16384)
    assert choose_tile(262144, on_cpu) == LogitTile(tokens=64, words=262144)
    assert choose_tile(262145, on_cpu) == LogitTile(tokens=4096, words=4096)


@pytest.mark.parametrize("size", [(0, 5), (5, 0)])
def test_an_empty_tile_is_refused(size) -> None:
    with pytest.raises(ValueError, match="holds no logit; give at least 1 x 1"):
        LogitTile(tokens=size[0], words=size[1])


def test_a_number_of_tiles_divides_the_tokens_and_not_the_vocabulary() -> None:
    assert choose_tile(1000, hidden(100, "cpu"), 8) == LogitTile(tokens=13, words=1000)
    assert choose_tile(1000, hidden(100, "cpu"), 1) == LogitTile(tokens=100, words=1000)
    assert choose_tile(1000, hidden(3, "cpu"), 8) == LogitTile(tokens=1, words=1000)
