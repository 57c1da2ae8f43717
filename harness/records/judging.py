"""Did a trial compute what it should? Its errors against float64 beside what exact methods give. No torch.

Judged where a record is formed and wherever one is read, so a corrected bound needs no rerun: a trial beyond a bound
has status `wrong`. It keeps its measurement, and has no rank, no ratio and no place in a figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from engine.measurement import NOT_FINITE, TOKEN_FACTOR, ErrorPlace, Extra, Measurement
from engine.settings import TrialSettings

if TYPE_CHECKING:
    from harness.records.record import Record

T = TypeVar("T")

ERROR: Final = "error"  # entry of a measurement's `extra`
ERROR_AT: Final = "error_at"
ERROR_SCALE: Final = "error_scale"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """The largest error against float64 that an exact method may have, relative to the norm of the truth.

    About four times what exact methods give (`docs/reference.md`): rounding is no more than that in any shape, and a
    gradient that is off by a fiftieth is beyond it in every dtype.
    """

    task: str
    dtype: str
    error: float
    kernel: str = ""  # of attention, or of the loss; "" for every other
    tensors: tuple[str, ...] = ()  # none: all of the task


# The first that fits counts. What exact methods gave is beside each.
BOUNDS: tuple[Bound, ...] = (
    Bound(task="attention", dtype="fp64", error=1e-12),  # 2e-15
    Bound(task="attention", dtype="fp32", error=1e-5),  # 4.4e-7, growing with the number of sums
    Bound(task="attention", dtype="bf16", error=8e-3),  # 2.1e-3 on CPUs, 3.0e-3 by four kernels of an H200
    Bound(task="lm_head", dtype="fp64", error=1e-12),
    Bound(task="lm_head", dtype="fp32", error=1e-5),  # 1e-6
    Bound(task="lm_head", dtype="bf16", error=1e-4, tensors=("loss",)),  # 1.3e-5
    # It leaves out gradients of words whose probability bf16 would round to nothing: 1.7e-2 of dhidden.
    Bound(task="lm_head", dtype="bf16", kernel="cce", error=5e-2),
    Bound(task="lm_head", dtype="bf16", error=8e-3),  # 1.8e-3
    Bound(task="linear", dtype="fp64", error=1e-12),
    Bound(task="linear", dtype="fp32", error=1e-5),  # 4.2e-7
    Bound(task="linear", dtype="bf16", error=2e-2),  # 2.4e-3 on CPUs, 5.3e-3 on an H200
)
RANKS_ROUNDED = 8  # up to so many ranks a partial gradient that is sent in bf16 adds less than the kernels round


def bound_of(settings: TrialSettings, tensor: str, kernel: str = "") -> float | None:
    """The largest error that this tensor of an exact trial has; None where nothing is known of it.

    `kernel`: the one that ran, of attention or of the loss.
    """
    for one in BOUNDS:
        fits = one.task == settings.task and one.dtype == settings.dtype and one.kernel in ("", kernel)
        if fits and (not one.tensors or tensor in one.tensors):
            return one.error * _growth(settings, tensor)
    return None


def _growth(settings: TrialSettings, tensor: str) -> float:
    """Gradients that are summed in bf16 from rank to rank round once per rank, each time anew."""
    in_fp32 = settings.grad_comm_dtype == "fp32" or (settings.grad_comm_dtype == "auto" and settings.method == "burst")
    if settings.task != "attention" or settings.dtype != "bf16" or tensor == "out" or in_fp32:
        return 1.0
    return math.sqrt(max(1.0, settings.cp_size / RANKS_ROUNDED))


@dataclass(frozen=True, slots=True)
class Excess:
    """An error beyond its bound."""

    tensor: str
    error: float
    bound: float
    place: str  # such as `on rank 1, tokens 128 to 255, head 3`; empty where it is not known
    there: bool  # whether it is the error at that place, not that of the whole tensor

    @property
    def factor(self) -> float:
        return self.error / self.bound

    def __str__(self) -> str:
        if self.error >= NOT_FINITE:
            return f"{self.tensor} holds NaN or infinity" + (f", {self.place}" if self.place else "")
        differs = f"{self.tensor} differs from float64 by {self.error:.2g}"
        expected = f"expected at most {self.bound:.2g}"
        if self.there:
            return f"{differs} {self.place}, {expected}"
        return f"{differs}, {expected}" + (f"; most {self.place}" if self.place else "")


def excesses_of(settings: TrialSettings, measured: Measurement) -> list[Excess]:
    """The tensors whose error is beyond what exact methods give, the furthest first."""
    return sorted(_excesses(settings, measured), key=lambda one: -one.factor)


def _excesses(settings: TrialSettings, measured: Measurement) -> Iterator[Excess]:
    kernel = settings.loss_kernel if settings.task == "lm_head" else measured.chosen.get("kernel", "")
    places = measured.extra.get(ERROR_AT, {})
    for tensor, error in measured.extra.get(ERROR, {}).items():
        bound = bound_of(settings, tensor, kernel)
        if bound is None:
            continue
        at = places.get(tensor, ErrorPlace(error=0.0))
        there, bound_there = at["error"], bound
        if at.get("first_token") is not None and at.get("first_token") == at.get("last_token"):
            bound_there *= TOKEN_FACTOR
        if error > bound:
            yield Excess(tensor, error, bound, _place(at), there=False)
        elif there > bound_there:
            yield Excess(tensor, there, bound_there, _place(at), there=True)


def wrong_because(settings: TrialSettings, measured: Measurement) -> str:
    """One sentence without a full stop on what a trial computes wrongly; empty where it is exact, or was not checked.

    `my_ring: out differs from float64 by 0.21, expected at most 1e-05; most on rank 1, tokens 128 to 255, head 3`
    """
    if settings.task == "train":
        extra, kernel = measured.extra, measured.chosen.get("kernel", settings.kernel)
        errors, places, scales = extra.get(ERROR, {}), extra.get(ERROR_AT, {}), extra.get(ERROR_SCALE, {})
        return training_fault(settings.method, rounding_of(settings), kernel, errors, places, scales)
    found = excesses_of(settings, measured)
    if not found:
        return ""
    first, *others = found
    also = f"; beyond its bound as well: {_listed([one.tensor for one in others])}" if others else ""
    return f"{settings.method}: {first}{also}"


def judged(record: Record) -> Record:
    """The record with the status that its errors give it: `wrong` or, within bounds, ok. Others stay as they are."""
    measured = record.measurement
    if record.status not in ("ok", "wrong") or measured is None:
        return record
    says = wrong_because(record.settings, measured)
    if not says:
        # One without an error that is known here was judged by something else, and stays.
        if record.status == "ok" or not _known(record.settings, measured):
            return record
        return replace(record, status="ok", reason=record.reason_of_rounds())
    rounds = record.reason_of_rounds() if record.rounds or record.status == "wrong" else record.reason
    return replace(record, status="wrong", reason="; ".join(filter(None, [says, rounds])))


def _known(settings: TrialSettings, measured: Measurement) -> bool:
    """Whether the measurement has an error for which there is a bound."""
    errors = measured.extra.get(ERROR, {})
    return bool(errors) and (settings.task == "train" or any(bound_of(settings, name) is not None for name in errors))


def worse_errors(one: Extra, other: Extra) -> Extra:
    """The entries `error`, `error_scale` and `error_at` of two rounds as one: of each tensor what is larger, and the
    place of the larger error; none where neither has any."""
    found: Extra = {}
    if errors := _larger(one.get(ERROR, {}), other.get(ERROR, {}), key=abs):
        found[ERROR] = errors
    if scales := _larger(one.get(ERROR_SCALE, {}), other.get(ERROR_SCALE, {}), key=abs):
        found[ERROR_SCALE] = scales
    if places := _larger(one.get(ERROR_AT, {}), other.get(ERROR_AT, {}), key=lambda place: place["error"]):
        found[ERROR_AT] = places
    return found


def _larger(one: Mapping[str, T], other: Mapping[str, T], key: Callable[[T], float]) -> dict[str, T]:
    """By name, the larger value of two mappings; the only one where a side has none."""
    return {
        name: max((side[name] for side in (one, other) if name in side), key=key)
        for name in dict.fromkeys((*one, *other))
    }


def _place(at: ErrorPlace) -> str:
    if "row" in at:  # of a parameter's gradient, which is the sum of all ranks
        return f"in row {at['row']}"
    if (rank := at.get("rank")) is None:
        return ""
    words, first, last = [f"on rank {rank}"], at.get("first_token"), at.get("last_token")
    if first is not None and last is not None:
        words.append(f"token {first}" if first == last else f"tokens {first} to {last}")
    if "head" in at:
        words.append(f"head {at['head']}")
    return ", ".join(words)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


NAMES = {"hidden": "the final hidden state", "dinput": "the gradient at the embedding's output", "loss": "the loss"}


class AllowedDifference(NamedTuple):
    """What a tensor of a training step may differ by from a dense float64 step."""

    error: float  # of a gradient, relative, Frobenius norms
    states: float  # of `hidden` and `dinput`, likewise
    scale: float  # of <found, truth> / |truth|^2 from 1: what a wrong factor changes and rounding hardly does
    loss: float  # relative


# At least twice the largest error found among exact methods: the settings that `tests/engine/test_composition.py`
# combines, rings of up to 16 ranks, and the kernels cudnn, flex, fa2 and reference on one H200.
TRAINING = {
    "fp64": AllowedDifference(error=1e-10, states=1e-10, scale=1e-10, loss=1e-10),
    "fp32": AllowedDifference(error=1e-5, states=1e-5, scale=1e-5, loss=1e-5),
    "bf16": AllowedDifference(error=0.05, states=0.02, scale=0.01, loss=2e-3),
    # Rounding to 2 or 3 bits also makes numbers smaller on average: those just below a power of two have finer steps.
    "float8": AllowedDifference(error=0.36, states=0.15, scale=0.045, loss=2e-3),
}


def rounding_of(settings: TrialSettings) -> str:
    """The key of `TRAINING` for a training trial."""
    return settings.dtype if settings.linear_dtype == "same" else settings.linear_dtype


# Gradients of a linear layer's decays, one number for each head, are sums of terms of either sign over all tokens: what
# is left of them has three times the rounding.
DECAYS, DECAYS_TIMES = (".decay_log", ".decay_bias"), 3


class _Fault(NamedTuple):
    times: float  # of what is allowed
    name: str
    says: str


def training_fault(
    method: str,
    rounding: str,
    kernel: str,
    errors: Mapping[str, float],
    error_at: Mapping[str, ErrorPlace],
    scales: Mapping[str, float] | None = None,
) -> str:
    """One sentence that a training step differs from a dense float64 step by more than rounding; "" where none does.

    The arguments are the trial's method, `rounding_of` it and kernel, and `error`, `error_at` and `error_scale` of its
    `measurement.extra` (`engine.tasks.check_training`). Raises ValueError for a rounding without bounds.
    """
    if rounding not in TRAINING:
        raise ValueError(
            f"rounding {rounding!r} has no bounds for a training step; expected one of {', '.join(TRAINING)}"
        )
    faults = sorted(_faults(TRAINING[rounding], errors, scales or {}), reverse=True)
    if not faults:
        return ""
    by_name = {one.name: one for one in faults}
    worst = by_name.get("hidden", faults[0])  # backward follows from a forward that is wrong
    shown = [worst]
    if worst.name not in ("hidden", "dinput") and "dinput" in by_name and "dinput" in error_at:
        shown.append(by_name["dinput"])  # which has a rank and tokens
    says = "; ".join(
        f"{one.says}, most {_place(error_at[one.name])}" if one.name in error_at else one.says for one in shown
    )
    return (
        f"{method} with kernel {kernel} computes something else than a dense float64 step, beyond the rounding of "
        f"{rounding} in {len(by_name)} of {len(errors)} tensors: {says}"
    )


def _faults(allowed: AllowedDifference, errors: Mapping[str, float], scales: Mapping[str, float]) -> Iterator[_Fault]:
    """Every tensor beyond what is allowed."""
    limits = {"loss": allowed.loss, "hidden": allowed.states, "dinput": allowed.states}
    for name, error in errors.items():
        limit, scale = limits.get(name, allowed.error), scales.get(name, 0.0)
        limit *= DECAYS_TIMES if name.endswith(DECAYS) else 1
        times = max(error / limit, abs(scale) / allowed.scale)
        if times <= 1:
            continue
        says = f"is off by {error:.2g}{'' if name == 'loss' else ' of its norm'} (allowed {limit:g})"
        if error >= NOT_FINITE:
            says = "holds NaN or infinity"
        elif error <= limit or abs(scale) > max(allowed.scale, error / 2):  # the factor is most of the error
            says = f"is {1 + scale:.4g} times the true one (allowed 1 within {allowed.scale:g})"
        yield _Fault(times, name, f"{NAMES.get(name, f'the gradient of {name}')} {says}")
