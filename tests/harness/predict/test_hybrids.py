"""Plans and predictions of models with linear layers count attention in the layers that have it, and what linear layers
do in the others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from engine.checkpoint.counts import layers_run_again
from engine.checkpoint.planning.memory import MemoryModel, memory_of
from engine.checkpoint.planning.memory_settings import memory_settings_of
from engine.checkpoint.recompute import set_activations
from engine.initialise import initialise
from engine.method import method_unsupported_reason
from engine.models.decoder import Decoder
from engine.settings import Checkpoint, TrialSettings
from engine.shape import ModelShape
from engine.tasks.products import matrix_products
from harness.metrics.flops import work_of
from harness.metrics.hardware import HardwareSpeeds
from harness.predict.step import step_time
from harness.spec.methods import method_named
from harness.spec.models import named_model

SPEEDS = HardwareSpeeds(
    gemm_tflops=600, attention_forward_tflops=500, attention_backward_tflops=400, memory_gib=4000, inside_gib=50,
    across_gib=20, across_default_gib=20, ring_step_seconds=1e-5,
)  # fmt: skip
FULL, DELTA, MAMBA, NEMOTRON = (named_model(name) for name in ("1b", "hybrid_1b", "mamba_1b", "nemotron_h_8b"))
SMALL = ModelShape(
    name="small", layers=6, hidden=16, ffn=24, heads=4, kv_heads=2, head_dim=4, vocab=61, gated=False,
    activation="relu2", rope=False, layer_pattern="lf", linear="mamba2", linear_heads=4, linear_key_heads=2,
    linear_key_dim=6, linear_value_dim=5,
)  # fmt: skip
TRIAL = TrialSettings(task="train", method="burst", model=FULL, seq_len=1 << 18, cp_size=4, checkpoint=Checkpoint())


def phases(settings: TrialSettings) -> dict[str, float]:
    return dict(step_time(settings, SPEEDS, node_ranks=4).phases)


@pytest.mark.parametrize("model", [DELTA, MAMBA])
def test_a_quarter_of_the_layers_has_a_quarter_of_attention(model: object) -> None:
    hybrid, full = replace(TRIAL, model=model), TRIAL  # type: ignore[arg-type]
    assert work_of(hybrid).attention == work_of(full).attention / 4
    found, expected = phases(hybrid), phases(full)
    for name in ("attention forward", "attention backward"):
        assert found[name] == pytest.approx(expected[name] / 4)
    assert found["waiting inside nodes"] > expected.get("waiting inside nodes", 0.0) / 4  # tokens change their order


def test_attention_of_a_quarter_of_the_layers_goes_to_the_host() -> None:
    layers, tokens = 16, TRIAL.seq_len // 4
    state, attention = 2 * tokens * 2048, tokens * 16 * (2 * 128 + 4)
    for model, with_attention in ((FULL, 16), (DELTA, 4)):
        inputs, both = (
            memory_of(replace(TRIAL, model=model, checkpoint=Checkpoint(offload=offload))).host
            for offload in ("inputs", "all")
        )
        assert both - inputs == with_attention * attention
        assert inputs - memory_of(replace(TRIAL, model=model)).host == layers * state


def test_layers_without_an_mlp_count_what_they_have() -> None:
    """24 of Mamba-2, of which 4 have no MLP, 4 of attention, and 24 MLPs."""
    hidden, ffn, inner, tokens = 4096, 21504, 128 * 64, TRIAL.seq_len
    into, out, recurrence = hidden * (2 * inner + 2 * 8 * 128 + 128), inner * hidden, 2 * 128 * inner
    attention, mlp = 2 * hidden * (32 + 8) * 128, 2 * hidden * ffn
    products = 24 * (into + out + recurrence) + 4 * attention + 24 * mlp
    one_a_head = 24 * hidden * 128
    of_kinds = sum(each.weights for each in matrix_products(NEMOTRON)) - hidden * NEMOTRON.vocab
    assert of_kinds == products - 24 * recurrence - one_a_head
    kept, again = (work_of(replace(TRIAL, model=NEMOTRON, checkpoint=Checkpoint(every=n))) for n in (0, 1))
    assert kept.layers == again.layers == pytest.approx(2 * tokens * products)
    assert kept.recomputed_layers == 0
    assert again.recomputed_layers == pytest.approx(2 * tokens * (products - 24 * mlp / 2 - 4 * out))


@pytest.mark.parametrize("pattern", ["LlfFlL", "llflfl"])
def test_products_that_backward_repeats_are_those_that_run(pattern: str) -> None:
    shape = replace(SMALL, layer_pattern=pattern)
    found, counted = [], []
    for every in (0, 1):
        settings = TrialSettings(
            task="train", method="burst", model=shape, seq_len=32, dtype="fp64", checkpoint=Checkpoint(every=every)
        )
        with torch.device("meta"):
            model = Decoder(shape)
        initialise(model, 0, torch.device("cpu"))
        set_activations(settings.checkpoint, list(model.blocks))
        with FlopCounterMode(display=False) as counter:
            model(torch.arange(32)[None], torch.arange(32), torch.arange(32)[None]).backward()
        found.append(counter.get_flop_counts()["Global"][torch.ops.aten.mm])  # those of the recurrence are others
        recurrence = 2 * 32 * layers_run_again(shape, settings.checkpoint) * shape.recurrence_products
        counted.append(work_of(settings).recomputed_layers - recurrence)
    assert found[1] - found[0] == pytest.approx(counted[1] - counted[0])


def test_an_mlp_is_planned_and_predicted_in_the_layers_that_have_one() -> None:
    tokens, model = TRIAL.seq_len // 4, NEMOTRON
    kept = [replace(TRIAL, model=model, checkpoint=Checkpoint(every=0, mlp=mlp)) for mlp in (0.0, 1.0)]
    none, all_kept = (MemoryModel(each).by_moment(memory_settings_of(each))["LM head"] for each in kept)
    assert all_kept - none == pytest.approx(24 * 2 * tokens * (2 * model.ffn + 2 * model.hidden), rel=0.02)
    whole = replace(TRIAL, checkpoint=Checkpoint(every=0))
    grown = {}  # what an MLP twice as wide adds
    for pattern in ("llff", "lLff"):
        shape = replace(MAMBA, layer_pattern=pattern)
        narrow, wide = (phases(replace(whole, model=each)) for each in (shape, replace(shape, ffn=2 * shape.ffn)))
        grown[pattern] = {name: wide[name] - narrow[name] for name in ("matrix products", "elementwise", "optimizer")}
    assert grown["lLff"] == pytest.approx({name: 3 / 4 * seconds for name, seconds in grown["llff"].items()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": "full"}, "mask is full, and model hybrid_1b has linear layers, which are causal"),
        ({"mask": "documents:4,5:full"}, "mask is documents:4,5:full, and model"),
        ({"cp_size": 1, "tp_size": 4, "method": "megatron_tp"}, "tp_size is 4, and model hybrid_1b has linear layers"),
        ({"seq_len": 8}, "each of 4 ranks holds 2 tokens, and model hybrid_1b has linear layers, whose convolution"),
        ({"method": "ulysses"}, ""),
    ],
)
def test_what_linear_layers_cannot_do_is_refused(changes: dict[str, object], message: str) -> None:
    settings = replace(TRIAL, model=DELTA, world_size=0, **changes)  # type: ignore[arg-type]
    reason = method_unsupported_reason(method_named(settings.method), settings)
    assert (reason or "").startswith(message)
    assert bool(reason) == bool(message)
