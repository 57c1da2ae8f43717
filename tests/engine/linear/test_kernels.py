"""The public calls of flash-linear-attention are made as it takes them: documents as packed sequences, a state for
each. A stand-in with its signatures, which is each sequence alone, computes what the forms in torch compute."""

from __future__ import annotations

import importlib.metadata
import itertools
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from engine import worker
from engine.burst import METHOD
from engine.linear import kernels
from engine.linear.convolution import shifted_sums
from engine.linear.gated_delta import chunked_delta_rule
from engine.linear.mamba2 import chunked_state_space
from engine.linear.runs import Runs
from engine.ops.norm import RMSNorm
from engine.settings import TrialSettings
from engine.shape import ModelShape
from harness.spec.models import named_model
from tests.engine.linear import library

RUNS = {
    "one": Runs(tokens=21, before=1),
    "several": Runs(tokens=21, starts=(0, 3, 4, 17), before=1),
}


GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
def test_a_call_of_the_library_gives_outputs_and_the_last_state(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    library.install(monkeypatch)
    q, k, v = normal(2, 21, 2, 4), normal(2, 21, 2, 4), normal(2, 21, 4, 6)
    decay, beta, initial = -normal(2, 21, 4).square(), normal(2, 21, 4).sigmoid(), normal(2, 4, 4, 6)
    for state in (None, initial):
        found = kernels._fla_delta_rule(q, k, v, decay, beta, runs, state)
        torch.testing.assert_close(found, chunked_delta_rule(q, k, v, decay, beta, runs, state))
    torch.testing.assert_close(
        kernels._fla_state_space(q, k, v, decay, runs), chunked_state_space(q, k, v, decay, runs)
    )


@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
def test_the_convolution_and_the_gated_norm_of_the_library_are_those_in_torch(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias, gate = normal(2, 21, 6), normal(6, 4), normal(6), normal(2, 21, 6)
    norm = RMSNorm(6, eps=1e-3, dtype=torch.float64)
    norm.weight.data = normal(6)
    expected = [shifted_sums(x, weight, each, runs) for each in (bias, None)] + [kernels.gated_norm(norm, x, gate)]
    library.install(monkeypatch)
    form = kernels.convolution_for(x)
    assert form is not shifted_sums
    found = [form(x, weight, each, runs) for each in (bias, None)] + [kernels.gated_norm(norm, x, gate)]
    torch.testing.assert_close(found, expected)


def test_the_library_is_for_sixteen_bits_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "library_installed", lambda: True)
    found = {
        (device, dtype): kernels.kernel_of(device, dtype)
        for device, dtype in itertools.product(("cpu", "cuda"), (torch.bfloat16, torch.float32, torch.float64))
    }
    assert [pair for pair, kernel in found.items() if kernel == "fla"] == [("cuda", torch.bfloat16)]


@pytest.mark.parametrize(
    ("release", "taken"),
    [(None, False), ("0.4.1", False), ("0.5.2", False), ("0.6.0", True), ("0.6.1.dev2", True), ("1.0", True)],
)
def test_a_release_without_these_calls_is_left_alone(
    release: str | None, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(_: str) -> str:
        if release is None:
            raise importlib.metadata.PackageNotFoundError
        return release

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setitem(sys.modules, "fla", SimpleNamespace(__spec__=SimpleNamespace()))  # can be imported
    kernels.library_installed.cache_clear()
    try:
        assert kernels.library_installed() is taken
    finally:
        kernels.library_installed.cache_clear()


@pytest.mark.parametrize(
    ("triton", "capability", "refused"),
    [("3.6.0", 9, True), ("3.7.0", 9, True), ("3.7.1", 9, False), ("3.3.1", 9, False), ("3.6.0", 10, False)],
)
def test_a_triton_with_which_the_librarys_backward_is_wrong_is_refused_before_the_first_call(
    triton: str, capability: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (capability, 0))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"triton": triton}.get(name, "0.6.0"))
    kernels.refused_here.cache_clear()
    try:
        assert bool(kernels.refused_here()) is refused
        if refused:
            with pytest.raises(
                ValueError, match=r"Triton is 3\.[67]\.0, with which flash-linear-attention's backward is"
            ):
                kernels._recurred(lambda **_: None, {}, Runs(tokens=4), None)
    finally:
        kernels.refused_here.cache_clear()


def test_a_key_dim_that_the_library_does_not_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library.install(monkeypatch)
    q, v, gate = normal(1, 4, 1, 264), normal(1, 4, 1, 8), normal(1, 4, 1)
    with pytest.raises(ValueError, match="linear_key_dim is 264, and flash-linear-attention takes at most 256"):
        kernels._fla_delta_rule(q, q, v, gate, gate, Runs(tokens=4))


def test_what_the_library_does_not_take_is_refused_before_a_trial_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = ModelShape(
        name="wide", layers=2, hidden=8, ffn=8, heads=2, kv_heads=1, head_dim=4, vocab=9, layer_pattern="lf",
        linear="gated_delta_net", linear_heads=2, linear_key_heads=1, linear_key_dim=264, linear_value_dim=8,
    )  # fmt: skip
    monkeypatch.setattr(kernels, "library_installed", lambda: True)
    monkeypatch.setattr(kernels, "refused_here", lambda: "Triton is 3.6.0")
    refused_on = kernels.linear_refused_on
    assert str(refused_on("cuda", torch.bfloat16, wide)).startswith("linear_key_dim is 264, and flash-linear-attention")
    narrow, mamba = replace(wide, linear_key_dim=8), replace(wide, linear="mamba2")
    assert refused_on("cuda", torch.bfloat16, narrow) == refused_on("cuda", torch.bfloat16, mamba) == "Triton is 3.6.0"
    # Where torch computes, and without linear layers, the library is not asked.
    assert refused_on("cpu", torch.bfloat16, wide) is refused_on("cuda", torch.float32, wide) is None
    assert refused_on("cuda", torch.bfloat16, named_model("1b")) is None


def test_ranks_ask_before_they_build_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = TrialSettings(
        task="train", method="burst", model=named_model("tiny_hybrid"), seq_len=256, dtype="fp32", kernel="cpu"
    )
    monkeypatch.setattr(worker, "linear_refused_on", lambda *given: f"asked of {given[0]}")
    monkeypatch.setattr(worker, "join", lambda _: SimpleNamespace(device=torch.device("cpu")))
    with pytest.raises(ValueError, match="asked of cpu"):
        worker.prepare(settings, METHOD)
    attention = replace(settings, task="attention")
    assert worker.prepare(attention, METHOD).device.type == "cpu"
