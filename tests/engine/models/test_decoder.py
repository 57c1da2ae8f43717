"""The one-device model: shapes, positions, parameter counts, initial values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.initialise import initialise
from engine.models.decoder import Decoder
from engine.ops.elementwise import rotate
from engine.rope import rotary_tables
from engine.shape import ModelShape

SHAPE = ModelShape(name="small", layers=2, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=61)
UNGATED = ModelShape(
    name="ungated", layers=1, hidden=24, ffn=40, heads=3, kv_heads=1, head_dim=10, vocab=7, gated=False
)
CPU = torch.device("cpu")


def model_of(shape: ModelShape, seed: int = 0) -> Decoder:
    with torch.device("meta"):
        model = Decoder(shape)
    initialise(model, seed, CPU)
    return model


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    first, again, other = (dict(model_of(SHAPE, seed).named_parameters()) for seed in (0, 0, 1))
    deeper = dict(model_of(replace(SHAPE, layers=3)).named_parameters())
    for name, value in first.items():
        assert torch.equal(value, again[name])
        if value.ndim > 1:
            assert not torch.equal(value, other[name])
    assert torch.equal(first["blocks.1.attention.q.weight"], deeper["blocks.1.attention.q.weight"])
    assert not torch.equal(first["blocks.0.attention.q.weight"], first["blocks.1.attention.q.weight"])


def test_norms_start_at_one_those_of_queries_and_keys_only_where_the_shape_has_them() -> None:
    found = {}
    for qk_norm in (False, True):
        norms = {
            name: each for name, each in model_of(replace(SHAPE, qk_norm=qk_norm)).named_parameters() if each.ndim == 1
        }
        assert all(torch.equal(value, torch.ones_like(value)) for value in norms.values())
        found[qk_norm] = {name for name in norms if "q_norm" in name or "k_norm" in name}
    assert found[False] == set()
    assert found[True] == {f"blocks.{layer}.attention.{each}_norm.weight" for layer in range(2) for each in "qk"}


def test_a_token_sees_nothing_after_it() -> None:
    model = model_of(SHAPE)
    tokens = torch.randint(SHAPE.vocab, (1, 12), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % SHAPE.vocab
    before, after = (model(t, torch.arange(12)) for t in (tokens, changed))
    assert before.shape == (1, 12, SHAPE.vocab)
    assert torch.equal(before[0, :7], after[0, :7])
    assert not torch.allclose(before[0, 7:], after[0, 7:])


def test_an_ungated_shape_computes_and_trains() -> None:
    model = model_of(UNGATED)
    tokens = torch.arange(6)[None] % UNGATED.vocab
    loss = model(tokens, torch.arange(6), tokens)
    loss.backward()
    assert loss.item() == pytest.approx(6 * torch.tensor(7.0).log().item(), rel=0.05)  # nearly uniform at the start
    assert all(parameter.grad is not None and parameter.grad.norm() > 0 for parameter in model.parameters())


def test_rotated_scores_depend_on_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def score(q_position: int, k_position: int) -> float:
        angles = [rotary_tables(torch.tensor([p]), 16, 10000.0, torch.float64) for p in (q_position, k_position)]
        return (rotate(q, angles[0]) * rotate(k, angles[1])).sum().item()

    assert score(5, 3) == pytest.approx(score(1_048_575, 1_048_573), rel=1e-8)
    assert score(5, 3) != pytest.approx(score(5, 4), rel=1e-3)


def test_angles_keep_their_precision_at_a_million_tokens() -> None:
    cos, sin = rotary_tables(torch.tensor([1_048_575]), 128, 500_000.0, torch.float32)
    exact_cos, exact_sin = rotary_tables(torch.tensor([1_048_575]), 128, 500_000.0, torch.float64)
    assert (cos.double() - exact_cos).abs().max() < 1e-7
    assert (sin.double() - exact_sin).abs().max() < 1e-7


def test_bf16_is_rotated_in_fp32() -> None:
    rotary = rotary_tables(torch.arange(100_000, 100_064), 32, 10000.0, torch.float32)
    x = torch.randn(1, 64, 2, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(rotate(x, rotary), rotate(x.float(), rotary).bfloat16())
