"""`mask: documents` before there is a batch: plans take one document, attention refuses."""

from __future__ import annotations

import pytest
import torch

from engine import burst_attention
from engine.attention.masks import Causal, DocumentsOfBatch, SlidingWindow, parse_mask


def test_the_setting_is_the_placeholder() -> None:
    assert parse_mask("documents") == DocumentsOfBatch()
    assert str(DocumentsOfBatch()) == "documents"
    assert parse_mask("documents:left-4") == DocumentsOfBatch(4)
    assert str(DocumentsOfBatch(4)) == "documents:left-4"
    assert DocumentsOfBatch().area(40) == Causal().area(40)
    assert DocumentsOfBatch(4).area(40) == SlidingWindow(4).area(40)


def test_attention_refuses_it_and_names_the_mask_to_pass() -> None:
    q_BLND = torch.zeros(1, 8, 1, 4)
    with pytest.raises(ValueError, match=r"has no lengths.*pass Documents\(lengths\) or Documents\.from_cu_seqlens"):
        burst_attention(q_BLND, q_BLND, q_BLND, mask=DocumentsOfBatch())
