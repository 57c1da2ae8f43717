"""FlashAttention's own call: exact, handed the lengths of documents as the library documents them, refusals."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from baselines.flash_attn import attention
from baselines.flash_attn.attention import PlainCall
from engine.attention.masks import parse_mask
from engine.attention.reference import dense_gradients
from harness.spec.methods import method_module, method_named
from tests.baselines.attention_runs import run_attention, settings_for

MASKS = ("causal", "full", "documents:7,17,8", "documents:7,17,8:full", "documents:5,1,...")


@pytest.mark.parametrize("mask", MASKS)
def test_it_equals_dense_float64(mask: str) -> None:
    settings = settings_for("flash_attn", 1, mask=mask, kernel="auto")
    assert method_named("flash_attn").refuse(settings) is None
    run = run_attention(method_module("flash_attn"), settings)
    assert run.error < 1e-10
    assert run.resolved == {"kernel": "cpu", "mask": mask}


@pytest.mark.parametrize("mask", MASKS)
def test_the_library_gets_what_its_documentation_asks_for(monkeypatch, mask: str) -> None:
    """Each document of each sequence is one of the library's sequences, here computed by dense attention."""

    def whole(q, k, v, causal):
        kind = parse_mask("causal" if causal else "full")
        return dense_gradients(q, k, v, q, kind)[0]

    def packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal):
        assert cu_seqlens_q.dtype == torch.int32
        lengths = cu_seqlens_q.diff().tolist()
        assert cu_seqlens_k is cu_seqlens_q
        assert max_seqlen_q == max_seqlen_k == max(lengths)
        parts = zip(*(t[None].split(lengths, dim=1) for t in (q, k, v)), strict=True)
        return torch.cat([whole(*part, causal)[0] for part in parts]), None

    library = SimpleNamespace(flash_attn_func=whole, flash_attn_varlen_func=packed)
    monkeypatch.setattr(attention, "library", lambda: library)
    settings = settings_for("flash_attn", 1, mask=mask, kernel="auto")
    q, k, v = (torch.randn(2, 32, heads, 8, dtype=torch.float64) for heads in (8, 4, 4))
    found = PlainCall(settings)._by_library(q, k, v)
    torch.testing.assert_close(found, dense_gradients(q, k, v, q, parse_mask(mask))[0])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"cp_size": 2}, "flash_attn attends to whole sequences, found cp_size 2; set cp_size to 1"),
        ({"kernel": "cudnn"}, "flash_attn calls FlashAttention-4, found kernel cudnn; set kernel to auto or fa4"),
        ({"task": "train"}, "flash_attn is one call of attention, found task train; set task to attention"),
        ({"layout": "zigzag"}, "flash_attn has no choice of layout, found zigzag; set layout to auto"),
        (
            {"mask": "documents:7,17,8:left-3"},
            "flash_attn attends with masks causal, full and documents:LENGTHS, found documents:7,17,8:left-3; choose "
            "one of them",
        ),
    ],
)
def test_it_refuses_in_one_sentence(changes: dict, sentence: str) -> None:
    settings = settings_for("flash_attn", **({"cp_size": 1, "kernel": "auto"} | changes))
    assert method_named("flash_attn").refuse(settings) == sentence
