"""Did a trial compute what it should? Its errors against float64 beside what exact methods give.

Judged where a record is formed and wherever one is read, so a corrected bound needs no rerun: a trial beyond a bound
has status `wrong`. It keeps its measurement, and has no rank, no ratio and no place in a figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine.measurement import NOT_FINITE, TOKEN_FACTOR, Measurement
from engine.settings import TrialSettings

if TYPE_CHECKING:
    from harness.records.record import Record

ERROR, ERROR_AT = "error", "error_at"  # entries of a measurement's `extra`


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """The largest error against float64 that an exact method may have, relative to the norm of the truth.

    About four times what exact methods give (`docs/metrics.md`): rounding is no more than that in any shape, and a
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
    Bound(task="attention", dtype="bf16", error=8e-3),  # 2.1e-3 on CPUs, 3e-3 by kernels of GPUs
    Bound(task="lm_head", dtype="fp64", error=1e-12),
    Bound(task="lm_head", dtype="fp32", error=1e-5),  # 1e-6
    Bound(task="lm_head", dtype="bf16", error=1e-4, tensors=("loss",)),  # 1.3e-5
    # It leaves out gradients of words whose probability bf16 would round to nothing: 1.7e-2 of dhidden.
    Bound(task="lm_head", dtype="bf16", kernel="cce", error=5e-2),
    Bound(task="lm_head", dtype="bf16", error=8e-3),  # 1.8e-3
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
    place: str  # such as `rank 1, tokens 128 to 255`; empty where it is not known
    there: bool  # whether it is the error at that place, not that of the whole tensor

    @property
    def factor(self) -> float:
        return self.error / self.bound

    def __str__(self) -> str:
        if self.error >= NOT_FINITE:
            return f"{self.tensor} holds NaN or infinity" + (f", on {self.place}" if self.place else "")
        differs = f"{self.tensor} differs from float64 by {self.error:.2g}"
        expected = f"expected at most {self.bound:.2g}"
        if self.there:
            return f"{differs} on {self.place}, {expected}"
        return f"{differs}, {expected}" + (f"; most on {self.place}" if self.place else "")


def excesses_of(settings: TrialSettings, measured: Measurement) -> list[Excess]:
    """The tensors whose error is beyond what exact methods give, the furthest first."""
    return sorted(_excesses(settings, measured), key=lambda one: -one.factor)


def _excesses(settings: TrialSettings, measured: Measurement) -> Iterator[Excess]:
    kernel = settings.loss_kernel if settings.task == "lm_head" else measured.chosen.get("kernel", "")
    places = _mapping(measured.extra.get(ERROR_AT))
    for tensor, error in _numbers(measured.extra.get(ERROR)).items():
        bound = bound_of(settings, tensor, kernel)
        if bound is None:
            continue
        at = _numbers(places.get(tensor))
        there, bound_there = at.get("error", 0.0), bound
        if "first_token" in at and at["first_token"] == at.get("last_token"):
            bound_there *= TOKEN_FACTOR
        if error > bound:
            yield Excess(tensor, error, bound, _place(at), there=False)
        elif there > bound_there:
            yield Excess(tensor, there, bound_there, _place(at), there=True)


def wrong_because(settings: TrialSettings, measured: Measurement) -> str:
    """One sentence without a full stop on what a trial computes wrongly; empty where it is exact, or was not checked.

    `my_ring: out differs from float64 by 0.21, expected at most 1e-05; most on rank 1, tokens 128 to 255`
    """
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
        if record.status == "ok" or not any(_known(record.settings, measured)):
            return record
        return replace(record, status="ok", reason=record.reason_of_rounds())
    rounds = record.reason_of_rounds() if record.rounds or record.status == "wrong" else record.reason
    return replace(record, status="wrong", reason="; ".join(filter(None, [says, rounds])))


def _known(settings: TrialSettings, measured: Measurement) -> Iterator[bool]:
    for tensor in _numbers(measured.extra.get(ERROR)):
        yield bound_of(settings, tensor) is not None


def worse_errors(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The entries `error` and `error_at` of two rounds as one: of each tensor the larger error, and the place of the
    larger one; none where neither has any."""
    errors, others = _numbers(one.get(ERROR)), _numbers(other.get(ERROR))
    found: dict[str, Any] = {}
    if errors or others:
        found[ERROR] = {
            name: max(errors.get(name, 0.0), others.get(name, 0.0)) for name in dict.fromkeys((*errors, *others))
        }
    places, theirs = _mapping(one.get(ERROR_AT)), _mapping(other.get(ERROR_AT))
    if places or theirs:
        found[ERROR_AT] = {
            name: max(
                (_mapping(side.get(name)) for side in (places, theirs)), key=lambda at: _numbers(at).get("error", -1.0)
            )
            for name in dict.fromkeys((*places, *theirs))
        }
    return found


def _place(at: Mapping[str, float]) -> str:
    if "rank" not in at:
        return ""
    rank = f"rank {at['rank']:.0f}"
    first, last = at.get("first_token"), at.get("last_token")
    if first is None or last is None:  # of a parameter
        return rank
    return f"{rank}, token {first:.0f}" if first == last else f"{rank}, tokens {first:.0f} to {last:.0f}"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _numbers(value: Any) -> dict[str, float]:
    """The numbers of a mapping out of JSON; what is none is passed over."""
    return {name: one for name, one in _mapping(value).items() if type(one) in (int, float)}
