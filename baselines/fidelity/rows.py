"""What was found about one case, and the sentence and verdict that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["equal", "gradients wrong", "wrong", "refused", "fails", "not installed"]

# The largest error that counts as equal: of a tensor, relative to the norm of the float64 one. A dense run in bf16 has
# 2e-3 (results/published/cpu/attention_precision); fp32 sums of a few hundred terms stay below 1e-6.
TOLERANCE: Mapping[str, float] = {"fp32": 1e-5, "bf16": 1e-2}


@dataclass(frozen=True, kw_only=True, slots=True)
class FidelityError:
    """How far a tensor is from its float64 counterpart."""

    relative: float  # norm of the difference over the counterpart's norm
    largest: float  # absolute


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One case of one system."""

    system: str
    release: str  # package and version, or commit
    case: str
    form: str  # in words: which of the system's functions, in which arrangement
    kernel: str  # what computes attention of one block
    ranks: int
    dtype: str
    verdict: Verdict
    heads: int = 0
    kv_heads: int = 0
    found: str = ""  # one sentence where the verdict needs one
    errors: dict[str, FidelityError] = field(default_factory=dict)  # of out, dq, dk, dv; of training, of gradients
    sent_bytes: int | None = None  # by the rank that sends most
    sent_formula: str = ""
    sent_expected: int | None = None  # by that formula
    native: str = ""  # our method of the same algorithm
    native_errors: dict[str, FidelityError] = field(default_factory=dict)
    native_sent_bytes: int | None = None  # counted from outside, in the same way
    native_sent_expected: int | None = None  # by the engine's own arithmetic
    loss: float | None = None  # of the last step
    loss_expected: float | None = None  # of our model in float64, on one process
    reproduce: str = ""

    @property
    def worst(self) -> float | None:
        """The largest relative error."""
        return max((error.relative for error in self.errors.values()), default=None)

    @property
    def native_worst(self) -> float | None:
        return max((error.relative for error in self.native_errors.values()), default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A line of `fidelity.jsonl`: all rows of one system, and what they were made with."""

    name: str
    commit: str  # of this repository; with -dirty where files differed from it
    made_at: str
    pin: str  # digest of the installation's pin; "" of torch itself
    python: str
    torch: str
    packages: dict[str, str] = field(default_factory=dict)  # of the system's environment
    stand_ins: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)


def verdict_of(errors: Mapping[str, FidelityError], dtype: str) -> tuple[Verdict, str]:
    """Whether these tensors are the float64 ones, to what `dtype` allows; and which are not."""
    wrong = [name for name, error in errors.items() if not error.relative <= TOLERANCE[dtype]]
    if not wrong:
        return "equal", ""
    kind: Verdict = "wrong" if "out" in wrong or "loss" in wrong else "gradients wrong"
    largest = max(errors[name].relative for name in wrong)
    return kind, f"{', '.join(wrong)} off by up to {largest:.1g} of the norm"
