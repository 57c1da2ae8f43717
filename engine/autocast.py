"""Operations whose precision is their own: torch's autocast around a call, or around its backward, changes nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import ParamSpec, TypeVar

import torch

Args = ParamSpec("Args")
Result = TypeVar("Result")

_DEVICE_TYPES = ("cpu", "cuda")  # where the operations run


def outside_autocast(operation: Callable[Args, Result]) -> Callable[Args, Result]:
    """`operation` with autocast off on every device: it computes in its arguments' dtypes and what it widens them to.

    For both halves of an autograd function, since backward meets the autocast of its own surroundings, not that of the
    forward. torch's `custom_fwd` would cast the arguments, be for one device type, and hand the forward's autocast to
    backward.
    """

    @functools.wraps(operation)
    def run(*args: Args.args, **named: Args.kwargs) -> Result:
        with ExitStack() as off:
            for device_type in _DEVICE_TYPES:
                if torch.is_autocast_enabled(device_type):
                    off.enter_context(torch.autocast(device_type, enabled=False))
            return operation(*args, **named)

    return run
