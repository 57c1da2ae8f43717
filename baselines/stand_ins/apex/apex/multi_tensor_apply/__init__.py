"""Stands for apex.multi_tensor_apply and the two functions of amp_C that the systems call through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


def multi_tensor_applier(function: Callable[..., Any], overflow: Tensor, lists: Sequence[Any], *arguments: Any) -> Any:
    return function(2048 * 32, overflow, lists, *arguments)
