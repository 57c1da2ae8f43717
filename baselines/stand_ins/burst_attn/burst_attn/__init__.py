"""Stands for Burst-Attention, which needs BMTrain's compiled part; InternEvo imports one function of it, and calls it
for `burst=dict(enable=True)` alone."""

from __future__ import annotations

from typing import Any


def burst_attn_func(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("the stand-in for burst_attn computes nothing; install Burst-Attention and BMTrain")
