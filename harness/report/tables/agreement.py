"""Do the methods compute the same thing? Loss and gradient norm of every trial against one reference trial.

Methods and parallel sizes are different ways to compute one function, so trials that differ in nothing else must show
the same numbers up to rounding. A system that trains in a program of its own starts from weights of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.report.results import UPSTREAM, Row

LIMIT = 1e-4  # largest relative difference accepted in fp32 and fp64; narrower types round more and are only shown


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """One trial beside its reference. Differences are relative, one per step both ran, warm-up included."""

    row: Row
    reference: Row
    loss_by_step: list[float]
    grad_norm_by_step: list[float]

    @property
    def loss(self) -> float:
        """Largest relative difference of the loss over all steps."""
        return max(self.loss_by_step)

    @property
    def grad_norm(self) -> float | None:
        """Largest relative difference of the gradient norm over all steps; None when it was not recorded."""
        return max(self.grad_norm_by_step, default=None)

    @property
    def agrees(self) -> bool | None:
        """Whether all differences are within LIMIT; None for types it does not bind."""
        if self.row["dtype"] not in ("fp32", "fp64"):
            return None
        return max(self.loss, self.grad_norm or 0.0) <= LIMIT


def agreements(rows: Sequence[Row]) -> list[Agreement]:
    """Every ok trial with a loss beside the first ok trial that computes the same function, the reference included;
    none that starts from weights of its own."""
    references: dict[tuple[object, ...], Row] = {}
    found = []
    for row in rows:
        if row["status"] != "ok" or not row["loss_by_step"] or has_own_weights(row):
            continue
        reference = references.setdefault(function_of(row), row)
        found.append(
            Agreement(
                row=row,
                reference=reference,
                loss_by_step=relative_differences(row["loss_by_step"], reference["loss_by_step"]),
                grad_norm_by_step=relative_differences(row["grad_norm_by_step"], reference["grad_norm_by_step"]),
            )
        )
    return found


def has_own_weights(row: Row) -> bool:
    """Whether a trial trained in the program of another system, whose initial weights are not the engine's."""
    return bool(row["task"] == "train" and row["method"].endswith(UPSTREAM))


def own_weights_sentence(rows: Sequence[Row]) -> str:
    """Which systems' losses are not compared, and why; empty where there is none."""
    methods = sorted({row["method"] for row in rows if row["loss_by_step"] and has_own_weights(row)})
    if not methods:
        return ""
    if len(methods) == 1:
        return f"{methods[0]} starts from weights of its own; its loss is not compared."
    listed = f"{', '.join(methods[:-1])} and {methods[-1]}"
    return f"{listed} start from weights of their own; their losses are not compared."


def function_of(row: Row) -> tuple[object, ...]:
    """Key of what a trial computes, however it computes it. Within one run, as devices may initialise differently."""
    shape = tuple((name, value) for name, value in sorted(row.items()) if name.startswith("model."))
    sequences = row["batch_size"] * row["dp_size"] * row["gradient_accumulation"]
    names = ("run", "task", "seq_len", "dtype", "mask", "z_loss", "learning_rate", "data", "seed")
    shares = row["cp_size"] if row["task"] == "lm_head" else None  # its ranks draw inputs of their own
    return (*(row[name] for name in names), sequences, shares, shape)


def relative_differences(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    """|a - b| over the larger of |a| and |b|, step by step over the steps both have; two zeros do not differ."""
    return [abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0 for a, b in zip(values, reference, strict=False)]
