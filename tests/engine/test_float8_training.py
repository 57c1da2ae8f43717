"""Training with `linear_dtype: float8`: which matrices, what recomputation and ranks change, and who refuses it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine import parallelize
from engine.lora import Lora
from engine.method import method_unsupported_reason
from engine.models.decoder import Decoder
from engine.models.matrices import Linear
from engine.ops import float8
from engine.ops.products import PLAIN
from engine.parallelize import multiply_in_float8
from engine.settings import Checkpoint, TrialSettings
from engine.shape import ModelShape
from engine.training.config import Order, TrainingConfig
from engine.training.manifest import difference
from harness.spec.methods import method_named
from tests.engine.parity import Result, dense_run, parallel_runs
from tests.ranks import run_on_ranks

SHAPE = ModelShape(name="small", layers=3, hidden=64, ffn=96, heads=8, kv_heads=4, head_dim=16, vocab=256, qk_norm=True)
BF16 = TrialSettings(
    task="train", method="burst", model=SHAPE, seq_len=64, checkpoint=Checkpoint(every=0), dtype="bf16"
)
FLOAT8 = replace(BF16, linear_dtype="float8")
ORDER: dict[str, Any] = {
    "method": "engine.burst", "resume": False, "model_flops_per_step": 1.0, "peak_tflops": None
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "recomputed": {"checkpoint": Checkpoint(every=1)},
    "recomputed in groups, in tiles": {"checkpoint": Checkpoint(every=2, tail=0.5), "mlp_tiles": 3},
    "tiles": {"projection_tiles": 3, "mlp_tiles": 3, "checkpoint": Checkpoint(every=0, mlp=0.4)},
}


def distance(one: Result, other: Result) -> float:
    """Of the gradient of all layers' parameters, relative."""
    gradients = {name: each for name, each in other["gradients"].items() if name.startswith("blocks.")}
    pairs = [(one["gradients"][name], of_other) for name, of_other in gradients.items()]
    apart = sum(((of_one - of_other) ** 2).sum() for of_one, of_other in pairs)
    return float(np.sqrt(apart / sum((of_other**2).sum() for _, of_other in pairs)))


@pytest.mark.parametrize(("ranks", "cp_size"), [(1, 1), (2, 1), (2, 2)])
def test_a_step_differs_from_bf16_by_the_rounding_of_float8_alone(ranks: int, cp_size: int) -> None:
    sizes = {"world_size": ranks, "cp_size": cp_size, "batch_size": 2 // (ranks // cp_size)}
    cases = {"bf16": replace(BF16, **sizes), "float8": replace(FLOAT8, **sizes)}
    cases |= {name: replace(FLOAT8, **sizes, **way) for name, way in WAYS.items()}
    found = run_on_ranks(ranks, parallel_runs, cases)[0]
    exact = dense_run(replace(BF16, batch_size=2), torch.float64)
    plain, rounded = distance(found["bf16"], exact), distance(found["float8"], exact)
    assert plain < 0.02
    assert 0.02 < rounded < 0.2  # three layers of products whose operands are off by 2 to 6%
    assert found["float8"]["loss"] == pytest.approx(exact["loss"], rel=2e-3)
    # A recomputation forms the numbers of the first pass: what is left is bf16's. Tiles have scales of their own.
    assert distance(found["recomputed"], found["float8"]) < plain
    assert found["recomputed"]["loss"] == found["float8"]["loss"]
    for name in WAYS:
        assert distance(found[name], exact) < 1.2 * rounded, name


def test_matrices_of_attention_and_mlp_are_multiplied_in_float8_and_no_others() -> None:
    hybrid = replace(
        SHAPE, layer_pattern="lf", linear="gated_delta_net", linear_heads=4, linear_key_heads=2, linear_key_dim=16,
        linear_value_dim=16, layers=2, attention_gate=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = Decoder(hybrid)
    multiply_in_float8(model, "cpu")
    found = {name: each for name, each in model.named_modules() if isinstance(each, Linear)}
    matrices = {name for name, each in found.items() if each.products is not PLAIN}
    of_mlps = {f"blocks.{layer}.mlp.{name}" for layer in (0, 1) for name in ("up", "gate", "down")}
    assert sum(found[name].weight.numel() for name in matrices) == 2 * hybrid.float8_matrices
    assert matrices == of_mlps | {f"blocks.1.attention.{name}" for name in ("q", "k", "v", "gate", "output")}


def test_what_cannot_multiply_in_float8_says_so_by_name() -> None:
    to_same = "set linear_dtype to same"
    cases: dict[str, dict[str, Any]] = {
        "": {},
        f"linear_dtype float8 is for training, found task attention; {to_same}": {"task": "attention"},
        "linear_dtype float8 stands beside dtype bf16, found fp32; set dtype to bf16, or linear_dtype to same": {
            "dtype": "fp32"
        },
        "linear_dtype float8 was made for matrices that are trained, and lora freezes them; leave one of the two out": {
            "lora": Lora(rank=4, alpha=4, targets=("q",))
        },
        f"linear_dtype float8 takes widths that 16 divides, and model odd has ffn 100; {to_same}": {
            "model": replace(SHAPE, name="odd", ffn=100)
        },
        f"linear_dtype float8 takes widths that 16 divides, and model odd has kv_heads x head_dim 24; {to_same}": {
            "model": replace(SHAPE, name="odd", heads=6, kv_heads=3, head_dim=8)
        },
        f"linear_dtype float8 takes widths that 16 divides, and model odd has q_latent 24; {to_same}": {
            "model": replace(SHAPE, name="odd", kv_heads=8, kv_latent=40, q_latent=24, rope_dim=8, qk_norm=False)
        },
        "megatron_tp has no linear_dtype float8; set linear_dtype to same": {
            "method": "megatron_tp", "tp_size": 2, "world_size": 2
        },
        "trl_upstream has no choice of linear_dtype, found float8; set linear_dtype to same": {
            "method": "trl_upstream", "world_size": 1
        },
    }  # fmt: skip
    for words, changes in cases.items():
        settings = replace(FLOAT8, **changes)
        assert (method_unsupported_reason(method_named(settings.method), settings) or "") == words


def test_a_run_resumes_in_the_numbers_that_it_began_with() -> None:
    runs = [Order(config=TrainingConfig(settings=each, steps=1), **ORDER) for each in (BF16, FLOAT8)]
    assert runs[1].facts == {**runs[0].facts, "linear_dtype": "float8"}
    words = "it was made with linear_dtype float8, and the run now has same"
    assert difference(runs[1].facts, runs[0].facts) == words


def test_a_gpu_without_products_in_float8_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with torch.device("meta"):
        model = Decoder(SHAPE)
    expected = r"linear_dtype float8 needs compute capability 8.9 or newer, found 8.0; set linear_dtype to same"
    with pytest.raises(ValueError, match=expected):
        multiply_in_float8(model, "cuda")
    assert parallelize.gpu_unsupported_reason is float8.gpu_unsupported_reason
