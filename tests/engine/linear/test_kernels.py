"""The public calls of flash-linear-attention are made as it takes them: documents as packed sequences, a state for
each. A stand-in with its signatures, which is the recurrence of each sequence alone, computes what the chunked forms in
torch compute."""

from __future__ import annotations

import importlib.metadata
import itertools
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from engine.linear import kernels
from engine.linear.gated_delta import chunked_delta_rule
from engine.linear.mamba2 import chunked_state_space
from engine.linear.runs import Runs

RUNS = {
    "one": Runs(tokens=21, continues=True),
    "several": Runs(tokens=21, starts=(0, 3, 4, 17), continues=True),
}


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert use_qk_l2norm_in_kernel
    assert output_final_state
    assert state_v_first
    assert scale is None
    initial = None if initial_state is None else initial_state.mT
    out, states = sequences(chunked_delta_rule, initial, cu_seqlens, q, k, v, g, beta)
    return out, states.mT


def chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert q.shape[2] == v.shape[2]
    assert scale == 1.0
    assert initial_state is None
    return sequences(chunked_state_space, initial_state, cu_seqlens, q, k, v, g)


def sequences(form, initial_state, cu_seqlens, *tensors):
    """Every sequence alone, with its own state."""
    if cu_seqlens is None:
        runs = Runs(tokens=tensors[0].shape[1])
        return form(*tensors, runs) if initial_state is None else form(*tensors, runs, initial_state)
    assert len(tensors[0]) == 1, "packed sequences are one row"
    outs, states = [], []
    for number, (start, stop) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        initial = () if initial_state is None else (initial_state[number : number + 1],)
        out, state = form(*(tensor[:, start:stop] for tensor in tensors), Runs(tokens=stop - start), *initial)
        outs.append(out)
        states.append(state)
    return torch.cat(outs, 1), torch.cat(states)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, call in (("gated_delta_rule", chunk_gated_delta_rule), ("simple_gla", chunk_simple_gla)):
        monkeypatch.setitem(sys.modules, f"fla.ops.{name}", SimpleNamespace(**{call.__name__: call}))


@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
def test_a_call_of_the_library_gives_outputs_and_the_last_state(runs: Runs) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v = normal(2, 21, 2, 4), normal(2, 21, 2, 4), normal(2, 21, 4, 6)
    decay, beta, initial = -normal(2, 21, 4).square(), normal(2, 21, 4).sigmoid(), normal(2, 4, 4, 6)
    for state in (None, initial):
        found = kernels._fla_delta_rule(q, k, v, decay, beta, runs, state)
        torch.testing.assert_close(found, chunked_delta_rule(q, k, v, decay, beta, runs, state))
    torch.testing.assert_close(
        kernels._fla_state_space(q, k, v, decay, runs), chunked_state_space(q, k, v, decay, runs)
    )


def test_the_library_is_for_sixteen_bits_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "library_installed", lambda: True)
    found = {
        (device, dtype): kernels.kernel_of(device, dtype)
        for device, dtype in itertools.product(("cpu", "cuda"), (torch.bfloat16, torch.float32, torch.float64))
    }
    assert [pair for pair, kernel in found.items() if kernel == "fla"] == [("cuda", torch.bfloat16)]


@pytest.mark.parametrize(
    ("release", "taken"),
    [(None, False), ("0.5.9", False), ("0.6.0", True), ("0.6.1.dev2", True), ("1.0", True)],
)
def test_a_release_that_ignores_the_order_of_states_is_left_alone(
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
