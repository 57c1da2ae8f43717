"""Stands for ring-flash-attn, whose adapter of transformers cannot be imported beside transformers 5; BurstEngine's
program imports one function of it and calls it for `--sp ring` alone."""

from __future__ import annotations

from typing import Any


def zigzag_ring_flash_attn_func(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("the stand-in for ring_flash_attn computes nothing; install ring-flash-attn")
