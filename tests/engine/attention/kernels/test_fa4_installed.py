"""FlashAttention-4 is distinguished from FlashAttention-2, which is imported by the same name, without importing
either."""

from __future__ import annotations

import sys

import pytest

from engine.attention.kernels import fa4


@pytest.mark.parametrize(
    ("files", "is_missing"), [([], True), (["flash_attn/__init__.py"], True), (["flash_attn/cute/__init__.py"], False)]
)
def test_version_4_is_found_by_its_own_folder(tmp_path, monkeypatch, files, is_missing) -> None:
    for name in files:
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text("raise ImportError('needs a GPU')" if name == "flash_attn/__init__.py" else "")
    monkeypatch.setattr(fa4, "gpu_unsupported_reason", lambda kernel, capability: None)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    for module in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, module)  # an earlier test may have imported it
    sentence = fa4.KERNEL.unsupported_reason()
    assert (sentence is not None) == is_missing
    assert sentence is None or "FlashAttention-4, which is not installed" in sentence
