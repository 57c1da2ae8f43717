"""Do the methods compute the same thing? Loss and gradient norm of every trial against one reference trial.

Methods and parallel sizes are different ways to compute one function, so trials that differ in nothing else must show
the same numbers up to rounding. A system that trains in a program of its own starts from weights of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.base.lengths import format_length
from harness.metrics.throughput import FORMULAS
from harness.report.results import UPSTREAM, Row, grouped
from harness.report.tables.table import Table, number, significant, table_of, text
from harness.report.tables.trials import CHECKED, difference, errors_of, lines_of

TITLE = "Do the methods compute the same thing?"
LIMIT = 1e-4  # largest relative difference accepted in fp32 and fp64; narrower types round more and are only shown
_DIFFERENCES = ("loss", "grad norm", *CHECKED)
_VERDICTS = {True: "agrees", False: "differs", None: "not compared"}


@dataclass(frozen=True, kw_only=True, slots=True)
class LossDifferences:
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
    def is_reference(self) -> bool:
        return self.row is self.reference

    @property
    def agrees(self) -> bool | None:
        """Whether all differences are within LIMIT; None for narrower numbers."""
        if self.row["dtype"] not in ("fp32", "fp64") or rounds_further(self.row):
            return None
        return max(self.loss, self.grad_norm or 0.0) <= LIMIT


def agreements(rows: Sequence[Row]) -> list[LossDifferences]:
    """Every ok trial with a loss beside the first ok trial that computes the same function, the reference included;
    none that starts from weights of its own. A trial that rounds further is a reference only where all do."""
    compared = [row for row in rows if row["status"] == "ok" and row["loss_by_step"] and not has_own_weights(row)]
    references: dict[tuple[object, ...], Row] = {}
    for row in sorted(compared, key=rounds_further):
        references.setdefault(function_of(row), row)
    found = []
    for row in compared:
        reference = references[function_of(row)]
        found.append(
            LossDifferences(
                row=row,
                reference=reference,
                loss_by_step=relative_differences(row["loss_by_step"], reference["loss_by_step"]),
                grad_norm_by_step=relative_differences(row["grad_norm_by_step"], reference["grad_norm_by_step"]),
            )
        )
    return found


def compared_of(rows: Sequence[Row]) -> list[LossDifferences]:
    """Those less the references."""
    return [pair for pair in agreements(rows) if not pair.is_reference]


def agreement_table(rows: Sequence[Row]) -> Table | None:
    """Loss and gradient norm of every training trial against the first ok trial that computes the same function; None
    where no two trials do. A trial that nothing is held against has no line."""
    found = agreements(rows)
    held = {id(pair.reference) for pair in found if pair.row is not pair.reference}
    names = {id(line.row): f"{line['shown_name']}, {line['shown_parallel']}" for line in lines_of(rows)}
    columns = (
        text("trial", lambda pair: names[id(pair.row)]),
        number("tokens", lambda pair: pair.row["seq_len"], format_length),
        text("dtype", lambda pair: pair.row["dtype"]),
        number("loss", lambda pair: pair.row["loss"], significant(6)),
        number("grad norm", lambda pair: pair.row["grad_norm"], significant(5)),
        number("loss difference", lambda pair: None if pair.is_reference else pair.loss, difference),
        number("grad norm difference", lambda pair: None if pair.is_reference else pair.grad_norm, difference),
        text("reference", lambda pair: None if pair.is_reference else names[id(pair.reference)]),
        text("verdict", lambda pair: "reference" if pair.is_reference else _VERDICTS[pair.agrees]),
    )
    return table_of(
        "agreement", TITLE, columns, [pair for pair in found if id(pair.reference) in held],
        marked=lambda pair: pair.agrees is False,
        note="Differences are |a − b| ÷ max(|a|, |b|), the largest over all steps both trials ran. fp32 and fp64 must "
        f"stay within {LIMIT:.0e}; narrower types round more and are shown without a verdict. "
        f"{FORMULAS['loss'].capitalize()}.",
    )  # fmt: skip


def agreement_summary(rows: Sequence[Row]) -> Table | None:
    """What the page shows first of trials on CPUs: for each task and method the largest differences of its trials from
    those they are held against; None where nothing is compared."""
    measured = [(pair.row, {"loss": pair.loss, "grad norm": pair.grad_norm}) for pair in compared_of(rows)]
    measured += [(row, dict(errors_of(row))) for row in rows if row["status"] == "ok"]
    told = [(row, found) for row, found in measured if any(value is not None for value in found.values())]
    alike = grouped(told, lambda one: (one[0]["task"], one[0]["method"], one[0]["dtype"]))
    lines = [
        {"task": task, "method": method, "dtype": dtype, "trials": len(members)}
        | {name: _largest(found.get(name) for _, found in members) for name in _DIFFERENCES}
        for (task, method, dtype), members in alike.items()
    ]
    columns = (
        text("method", "method"),
        text("task", "task"),
        number("differs by", lambda line: _largest(line[name] for name in _DIFFERENCES), difference),
        number("trials", "trials"),
        text("dtype", "dtype"),
        *(number(name, name, difference) for name in _DIFFERENCES),
    )
    return table_of(
        "same", TITLE, columns, lines,
        note="Largest relative differences: of training from the first trial that computes the same function, of "
        "attention from a dense float64 run.",
    )  # fmt: skip


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


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
    return "Upstream systems start from weights of their own; their losses are not compared."


def rounds_further(row: Row) -> bool:
    """Whether something is held or multiplied in narrower numbers than those of `dtype`."""
    return row["linear_dtype"] != "same" or row["optimizer_states"] is not None


def function_of(row: Row) -> tuple[object, ...]:
    """Key of what a trial computes, however it computes it. Within one run, as devices may initialise differently."""
    shape = tuple((name, value) for name, value in sorted(row.items()) if name.startswith("model."))
    sequences = row["batch_size"] * row["dp_size"] * row["gradient_accumulation"]
    names = (
        "run", "task", "seq_len", "dtype", "mask", "packing", "longer_documents", "z_loss", "learning_rate", "lora",
        "data", "seed",
    )  # fmt: skip
    shares = row["cp_size"] if row["task"] == "lm_head" else None  # its ranks draw inputs of their own
    return (*(row[name] for name in names), sequences, shares, shape)


def relative_differences(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    """|a - b| over the larger of |a| and |b|, step by step over the steps both have; two zeros do not differ."""
    return [abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0 for a, b in zip(values, reference, strict=False)]
