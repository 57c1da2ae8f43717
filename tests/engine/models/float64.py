"""Code that asks for fp32 computes in float64 inside `in_float64`: a reference that is exact where it rounds else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Float64(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        wide = [torch.float64 if one is torch.float32 else one for one in args]
        named = {key: torch.float64 if one is torch.float32 else one for key, one in (kwargs or {}).items()}
        return func(*wide, **named)


@contextmanager
def in_float64() -> Iterator[None]:
    """New tensors, and every cast to fp32, are float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64():
            yield
    finally:
        torch.set_default_dtype(before)
