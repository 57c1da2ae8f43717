"""How tiles of logits are sized."""

from __future__ import annotations

import pytest

from engine.lm_head.tiles import FEWEST_TOKENS, TILE_BYTES, Tile, choose_tile


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("vocabulary", [1, 256, 32000, 128256, 151936, 262144, 524288, 1 << 20, 1 << 26])
def test_a_tile_fills_its_bytes_and_no_more(device, vocabulary) -> None:
    tile = choose_tile(vocabulary, device)
    logits = tile.tokens * min(tile.words, vocabulary)
    assert 0.9 * TILE_BYTES[device] / 4 < logits <= TILE_BYTES[device] / 4 or vocabulary == 1
    assert tile.tokens >= FEWEST_TOKENS[device]


def test_the_vocabulary_is_tiled_only_where_too_few_tokens_would_be_left() -> None:
    assert choose_tile(128256, "cuda") == Tile(tokens=2092, words=128256)
    assert choose_tile(524288, "cuda") == Tile(tokens=512, words=524288)
    assert choose_tile(524289, "cuda") == Tile(tokens=16384, words=16384)
    assert choose_tile(262144, "cpu") == Tile(tokens=64, words=262144)
    assert choose_tile(262145, "cpu") == Tile(tokens=4096, words=4096)


@pytest.mark.parametrize("size", [(0, 5), (5, 0)])
def test_an_empty_tile_is_refused(size) -> None:
    with pytest.raises(ValueError, match="holds no logit; give at least 1 x 1"):
        Tile(tokens=size[0], words=size[1])
