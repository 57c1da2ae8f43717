"""What FlashAttention-4 is handed in backward: a zero output and minus delta, or O itself, and no more heads than
its memory allows. The library itself is stood in for by the reference kernel."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engine.attention.accumulate.accumulators import row_dot
from engine.attention.geometry.tiles import CAUSAL
from engine.attention.kernels import BackwardInputs, WholeInputs, fa4, kernel_named

REFERENCE = kernel_named("reference")


class Library:
    """Computes as the library does, by the reference, and notes the bytes of its fp32 sum of dQ."""

    def __init__(self) -> None:
        self.workspaces: list[int] = []

    def _flash_attn_bwd(
        self, q, k, v, out, dout, lse, *, softmax_scale, deterministic, causal, dlse=0.0, dq=None, dk=None, dv=None
    ):
        assert causal
        assert lse.is_contiguous()
        for each in (q, v):  # what the library writes by 16 and reads by 32 is the same
            assert -each.shape[-1] % 32 < 16
        self.workspaces.append(4 * q.numel())
        given = BackwardInputs(q, dout, lse, row_dot(dout, out) - dlse, k, v)
        found = REFERENCE.backward(given, CAUSAL, softmax_scale, deterministic)
        if dq is None:
            return found
        return tuple(into.copy_(gradient) for into, gradient in zip((dq, dk, dv), found, strict=True))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 3)])
@pytest.mark.parametrize("most", [1, 2 * 16 * 2 * 24 * 4, 2 * 16 * 4 * 24 * 4, 1 << 31])
@pytest.mark.parametrize("whole", [False, True])
def test_heads_in_groups_give_the_gradients_of_all_at_once(monkeypatch, whole, heads, kv_heads, most) -> None:
    library = Library()
    monkeypatch.setattr(fa4, "library", lambda: library)
    monkeypatch.setattr(fa4, "_zeros", {})
    monkeypatch.setattr(fa4, "WORKSPACE_BYTES", most)
    generator = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(2, 16, heads, 24, dtype=torch.float64, generator=generator) for _ in range(2))
    k, v = (torch.randn(2, 16, kv_heads, 24, dtype=torch.float64, generator=generator) for _ in range(2))
    out, lse = REFERENCE.forward(q, k, v, CAUSAL, 0.3)
    given = BackwardInputs(q, dout, lse, row_dot(dout, out), k, v)
    if whole:  # O itself in place of delta
        found = fa4.KERNEL.backward_of_whole(WholeInputs(q, out, dout, lse, k, v), CAUSAL, 0.3, False)
    else:
        found = fa4.KERNEL.backward(given, CAUSAL, 0.3, False)
    for gradient, truth in zip(found, REFERENCE.backward(given, CAUSAL, 0.3, False), strict=True):
        assert gradient.is_contiguous() or len(library.workspaces) == 1
        torch.testing.assert_close(gradient, truth, rtol=1e-12, atol=1e-12)
    group = 4 * q.numel() // kv_heads  # of one KV head: less is not possible
    assert max(library.workspaces) <= max(most, group)
    assert sum(library.workspaces) == 4 * q.numel()


def test_short_tiles_are_one_call() -> None:
    assert fa4.kv_heads_at_once(SimpleNamespace(numel=lambda: (128 << 10) * 32 * 128), 8) == 8
    assert fa4.kv_heads_at_once(SimpleNamespace(numel=lambda: (1 << 20) * 32 * 128), 8) == 1


def test_heads_are_divided_evenly() -> None:
    """31 of 32 heads would fit into one call: two calls of 16, not one more of a single head."""
    q = torch.empty(1, 128 << 10, 32, 128, device="meta")
    assert fa4.kv_heads_at_once(q, 32, sequences=28) == 16


@pytest.mark.parametrize(("dim", "value_dim"), [(8, 8), (16, 16), (40, 40), (80, 80), (48, 8), (32, 80), (24, 24)])
@pytest.mark.parametrize("whole", [False, True])
def test_head_dims_that_the_library_gets_wrong_have_zeros_beside_them(monkeypatch, whole, dim, value_dim) -> None:
    monkeypatch.setattr(fa4, "library", lambda: Library())
    monkeypatch.setattr(fa4, "_zeros", {})
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, 16, heads, width, dtype=torch.float64, generator=generator)
        for heads, width in ((4, dim), (2, dim), (2, value_dim), (4, value_dim))
    )
    out, lse = REFERENCE.forward(q, k, v, CAUSAL, 0.3)
    given = BackwardInputs(q, dout, lse, row_dot(dout, out), k, v)
    if whole:
        found = fa4.KERNEL.backward_of_whole(WholeInputs(q, out, dout, lse, k, v), CAUSAL, 0.3, False)
    else:
        found = fa4.KERNEL.backward(given, CAUSAL, 0.3, False)
    for gradient, truth in zip(found, REFERENCE.backward(given, CAUSAL, 0.3, False), strict=True):
        torch.testing.assert_close(gradient, truth, rtol=1e-12, atol=1e-12)
