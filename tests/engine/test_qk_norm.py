"""The norm of queries and keys: its formula on one device, and the same loss and gradients on several."""

from __future__ import annotations

import dataclasses

import torch

from engine.initialise import initialise
from engine.models.decoder import Decoder
from engine.ops.elementwise import rotate
from engine.rope import rotary_tables
from engine.settings import Checkpoint, ModelShape, TrialSettings
from tests.engine.parity import dense_run, errors, parallel_runs
from tests.ranks import run_on_ranks

# head_dim 6 over four ranks: FSDP2 shards the norms' weights unevenly.
SHAPE = ModelShape(
    name="normed", layers=2, hidden=18, ffn=30, heads=6, kv_heads=2, head_dim=6, vocab=257, qk_norm=True, norm_eps=1e-3
)


def model_of(shape: ModelShape) -> Decoder:
    with torch.device("meta"):
        model = Decoder(shape)
    initialise(model, 0, torch.device("cpu"))
    return model


def test_the_norms_start_at_one_and_only_where_the_shape_has_them() -> None:
    norms = {name: value for name, value in model_of(SHAPE).named_parameters() if "attention.q_norm" in name}
    assert norms.keys() == {f"blocks.{layer}.attention.q_norm.weight" for layer in range(2)}
    assert all(torch.equal(value, torch.ones(6)) for value in norms.values())
    plain = model_of(dataclasses.replace(SHAPE, qk_norm=False)).state_dict()
    assert not any("q_norm" in name or "k_norm" in name for name in plain)


def test_every_head_is_normalised_by_itself_before_it_is_rotated() -> None:
    attention = model_of(SHAPE).blocks[0].attention.double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        attention.q_norm.weight.copy_(torch.rand(6, generator=generator))
        attention.k_norm.weight.copy_(torch.rand(6, generator=generator))
    x_BLE = torch.randn(2, 5, 18, dtype=torch.float64, generator=generator)
    rotary = rotary_tables(torch.arange(5), 6, SHAPE.rope_base, torch.float64)
    q_BLND, k_BLKD, v_BLKD = attention.project(x_BLE, rotary)

    for found, linear, norm in ((q_BLND, attention.q, attention.q_norm), (k_BLKD, attention.k, attention.k_norm)):
        heads = linear(x_BLE).unflatten(-1, (-1, 6))
        normed = heads / (heads.square().mean(-1, keepdim=True) + SHAPE.norm_eps).sqrt() * norm.weight
        torch.testing.assert_close(found, rotate(normed, rotary))
    torch.testing.assert_close(v_BLKD, attention.v(x_BLE).unflatten(-1, (-1, 6)))


def test_loss_and_gradients_on_four_ranks_equal_a_dense_run() -> None:
    settings = TrialSettings(
        task="train", method="burst", model=SHAPE, seq_len=48, batch_size=2, dtype="fp32", world_size=4, cp_size=2
    )
    cases = {str(tail): dataclasses.replace(settings, checkpoint=Checkpoint(every=1, tail=tail)) for tail in (0.0, 1.0)}
    truth = dense_run(settings)
    assert sum("k_norm" in name for name in errors(truth, truth)) == SHAPE.layers
    for found in run_on_ranks(4, parallel_runs, cases)[0].values():
        assert {name: error for name, error in errors(found, truth).items() if not error < 1e-5} == {}
