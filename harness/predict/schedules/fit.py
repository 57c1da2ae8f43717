"""The constants of the engine's cost model for one node, fitted to the fitted half of the measured calls.

The fit minimises the squares of the logarithm of estimated over measured seconds, so short and long calls weigh alike.
Calls with an error above `_USUAL` weigh less (Huber's weights, iterated), so one bad run changes little. Each constant
has a guess: a constant that differs from it by a factor of e costs as much as a call with an error of `_USUAL`. So a
constant on which no call depends keeps its guess. The steps are Levenberg and Marquardt's, over logarithms of the
constants. The same calls give the same constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.attention.cost import HardwareModel, estimate
from harness.predict.schedules.measured import MeasuredCall

Vector = NDArray[np.float64]

# The value of each constant before the fit: round figures, from measurements of single kernels, copies and launches.
GUESSES: Mapping[str, float] = {
    "forward_tflops": 660.0,  # of a long causal call, FlashAttention-4
    "backward_tflops": 625.0,
    "together_share": 0.015,  # the slowest of four kernels at once, over the fastest
    "ring_step_seconds": 1.4e-3,  # 5.4 ms of Python at 16K on four GPUs
    "merge_seconds": 0.2e-3,
    "step_tail": 0.5,  # multiprocessors end at any time within the last tile's
    "head_call_seconds": 4e-3,  # 3.1 to 3.6 ms of launches, and a kernel after the last
    "head_chunk_seconds": 0.5e-3,
}

_USUAL = 0.02  # relative error of a call that counts in full
_STEP = 1e-4  # of a logarithm, in derivatives
_ROUNDS = 200


def fitted_model(calls: Iterable[MeasuredCall], guesses: Mapping[str, float] = GUESSES) -> HardwareModel:
    """The cost model's constants under which the calls of the fitted side are estimated best, to three digits."""
    chosen = [call for call in calls if call.side == "fit"]
    names, logs = list(guesses), np.log(np.array(list(guesses.values())))

    def errors(at: Vector) -> Vector:
        model = _with_constants(dict(zip(names, np.exp(at), strict=True)))
        return np.log([estimated(call, model) / call.seconds for call in chosen])

    found = _least_squares(errors, logs)
    return _with_constants({name: _rounded(math.exp(at)) for name, at in zip(names, found, strict=True)})


def estimated(call: MeasuredCall, model: HardwareModel) -> float:
    """Seconds of a call under the schedule and head chunks that it ran."""
    return estimate(call.schedule, call.workload, model, call.num_head_chunks)


def _with_constants(values: Mapping[str, Any]) -> HardwareModel:
    return replace(HardwareModel(), **values)


def _least_squares(errors: Callable[[Vector], Vector], guess: Vector) -> Vector:
    at, damping = guess.copy(), 1e-2
    here = errors(at)
    for _ in range(_ROUNDS):
        weights = np.minimum(1.0, _USUAL / np.maximum(np.abs(here), 1e-12)) / _USUAL**2
        slopes = np.stack(
            [(errors(at + step) - errors(at - step)) / (2 * _STEP) for step in _STEP * np.eye(len(at))], axis=1
        )
        gradient = slopes.T @ (weights * here) + (at - guess)
        curvature = (slopes.T * weights) @ slopes + np.eye(len(at))
        while damping < 1e9:
            tried = at - np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient)
            there = errors(tried)
            if _loss(there, tried - guess) < _loss(here, at - guess):
                break
            damping *= 4
        else:
            return at
        moved = float(np.abs(tried - at).max())
        at, here, damping = tried, there, damping / 8
        if moved < 1e-7:
            return at
    return at


def _loss(errors: Vector, from_guess: Vector) -> float:
    """Huber's."""
    far = np.abs(errors)
    each = np.where(far < _USUAL, far**2 / 2, _USUAL * (far - _USUAL / 2)) / _USUAL**2
    return float(each.sum() + (from_guess**2).sum() / 2)


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
