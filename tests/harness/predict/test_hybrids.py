"""Plans and predictions of models with linear layers count attention in the layers that have it, and what linear layers
do in the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.checkpoint.planning.memory import memory_of
from engine.method import method_unsupported_reason
from engine.settings import Checkpoint, TrialSettings
from harness.metrics.flops import work_of
from harness.metrics.hardware import HardwareSpeeds
from harness.predict.step import step_time
from harness.spec.methods import method_named
from harness.spec.models import named_model

SPEEDS = HardwareSpeeds(
    gemm_tflops=600, attention_forward_tflops=500, attention_backward_tflops=400, memory_gib=4000, inside_gib=50,
    across_gib=20, across_default_gib=20, ring_step_seconds=1e-5,
)  # fmt: skip
FULL, DELTA, MAMBA = (named_model(name) for name in ("1b", "hybrid_1b", "mamba_1b"))
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
