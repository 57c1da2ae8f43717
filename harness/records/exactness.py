"""Is what a trial computed right? Verdicts on the errors against float64 that its ranks measured. No torch.

What rounding may cost, by dtype, is at least twice the largest error found among exact methods. These were the settings
that `tests/engine/test_composition.py` combines (native methods, schedules, masks, checkpointing, one to four ranks),
rings of up to 16 ranks, and kernels cudnn, flex, fa2 and reference on one H200.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from engine.measurement import NOT_FINITE

NAMES = {"hidden": "the final hidden state", "dinput": "the gradient at the embedding's output", "loss": "the loss"}


class Allowed(NamedTuple):
    """What a tensor of a training step may differ by from a dense float64 step."""

    error: float  # of a gradient, relative, Frobenius norms
    states: float  # of `hidden` and `dinput`, likewise
    scale: float  # of <found, truth> / |truth|^2 from 1: what a wrong factor changes and rounding hardly does
    loss: float  # relative


TRAINING = {
    "fp64": Allowed(error=1e-10, states=1e-10, scale=1e-10, loss=1e-10),
    "fp32": Allowed(error=1e-5, states=1e-5, scale=1e-5, loss=1e-5),
    "bf16": Allowed(error=0.05, states=0.02, scale=0.01, loss=2e-3),
}


class _Fault(NamedTuple):
    times: float  # of what is allowed
    name: str
    says: str


def training_fault(
    method: str,
    dtype: str,
    kernel: str,
    errors: Mapping[str, float],
    error_at: Mapping[str, Mapping[str, Any]],
    scales: Mapping[str, float] | None = None,
) -> str:
    """One sentence that a training step differs from a dense float64 step by more than rounding; "" where none does.

    The arguments are the trial's method, dtype and kernel, and `error`, `error_at` and `error_scale` of its
    `measurement.extra` (`engine.tasks.dense_check`). Raises ValueError for a dtype without bounds.
    """
    if dtype not in TRAINING:
        raise ValueError(f"dtype {dtype!r} has no bounds for a training step; expected one of {', '.join(TRAINING)}")
    faults = sorted(_faults(TRAINING[dtype], errors, scales or {}), reverse=True)
    if not faults:
        return ""
    by_name = {one.name: one for one in faults}
    worst = by_name.get("hidden", faults[0])  # backward follows from a forward that is wrong
    says = worst.says
    if worst.name in error_at:
        says += _place(error_at[worst.name])
    elif "dinput" in by_name and "dinput" in error_at:
        says += f"; {by_name['dinput'].says}{_place(error_at['dinput'])}"
    return (
        f"{method} with kernel {kernel} computes something else than a dense float64 step, beyond the rounding of "
        f"{dtype} in {len(by_name)} of {len(errors)} tensors: {says}"
    )


def _faults(allowed: Allowed, errors: Mapping[str, float], scales: Mapping[str, float]) -> Iterator[_Fault]:
    """Every tensor beyond what is allowed."""
    limits = {"loss": allowed.loss, "hidden": allowed.states, "dinput": allowed.states}
    for name, error in errors.items():
        limit, scale = limits.get(name, allowed.error), scales.get(name, 0.0)
        times = max(error / limit, abs(scale) / allowed.scale)
        if times <= 1:
            continue
        says = f"is off by {error:.2g}{'' if name == 'loss' else ' of its norm'} (allowed {limit:g})"
        if error >= NOT_FINITE:
            says = "holds NaN or infinity"
        elif error <= limit or abs(scale) > max(allowed.scale, error / 2):  # the factor is most of the error
            says = f"is {1 + scale:.4g} times the true one (allowed 1 within {allowed.scale:g})"
        yield _Fault(times, name, f"{NAMES.get(name, f'the gradient of {name}')} {says}")


def _place(at: Mapping[str, Any]) -> str:
    return f", most on rank {at['rank']}, tokens {at['first_token']} to {at['last_token']}"
