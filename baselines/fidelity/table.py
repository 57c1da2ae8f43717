"""What was found about each case, the verdict that follows, and the table of all of them.

As CSV it has every figure; as Markdown it reads in one go.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
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


TENSORS = ("out", "dq", "dk", "dv")
_PLAIN = (
    "system", "release", "case", "form", "kernel", "ranks", "dtype", "heads", "kv_heads", "verdict", "found",
)  # fmt: skip
_BYTES = ("sent_bytes", "sent_expected", "sent_formula")
_NATIVE = ("native_sent_bytes", "native_sent_expected")
_TRAINING = ("loss", "loss_expected")


def as_csv(rows: Sequence[Row]) -> str:
    """One line per row; an absent figure is an empty cell."""
    text = io.StringIO()
    errors = [f"{name}_{kind}" for name in (*TENSORS, "gradients") for kind in ("relative", "largest")]
    native = [f"native_{name}_{kind}" for name in TENSORS for kind in ("relative", "largest")]
    columns = [*_PLAIN, *errors, *_BYTES, "native", *native, *_NATIVE, *_TRAINING, "reproduce"]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        cells = {name: getattr(row, name) for name in (*_PLAIN, *_BYTES, *_NATIVE, *_TRAINING, "native", "reproduce")}
        for prefix, found in (("", row.errors), ("native_", row.native_errors)):
            for name, error in found.items():
                cells[f"{prefix}{name}_relative"] = f"{error.relative:.3e}"
                cells[f"{prefix}{name}_largest"] = f"{error.largest:.3e}"
        writer.writerow("" if (value := cells.get(name)) is None else value for name in columns)
    return text.getvalue()


def as_markdown(results: Sequence[Result], rows: Sequence[Row]) -> str:
    """Attention, training, faults, and what ran."""
    attention = [row for row in rows if row.loss is None and row.errors]
    training = [row for row in rows if row.loss is not None]
    faults = [row for row in rows if row.verdict != "equal"]
    tolerance = ", ".join(f"{value:g} in {dtype}" for dtype, value in TOLERANCE.items())
    parts = [
        "### Compared systems on CPU ranks, unmodified, beside float64 and beside our native baselines",
        "Errors are relative to the norm of the float64 tensor, with the largest absolute error in brackets. Equal is "
        f"at most {tolerance}. Bytes are those that the rank which sends most has sent in one forward and backward.",
        "#### Attention",
        _table(
            ["system", "form", "ranks", "dtype", "heads", *TENSORS, "bytes sent", "by formula", "verdict", "kernel"],
            [
                [
                    row.system, row.form, row.ranks, row.dtype, f"{row.heads}:{row.kv_heads}",
                    *(_error(row.errors.get(name)) for name in TENSORS),
                    _count(row.sent_bytes), _count(row.sent_expected), row.verdict, row.kernel,
                ]
                for row in attention
            ],
        ),
        "#### The same, beside our native baseline",
        _table(
            ["system", "form", "ranks", "dtype", "worst error", "bytes sent", "native baseline", "its worst error",
             "its bytes", "by the engine's arithmetic", "bytes, native over system"],
            [
                [
                    row.system, row.form, row.ranks, row.dtype, _short(row.worst), _count(row.sent_bytes), row.native,
                    _short(row.native_worst), _count(row.native_sent_bytes), _count(row.native_sent_expected),
                    _ratio(row.native_sent_bytes, row.sent_bytes),
                ]
                for row in attention
                if row.native
            ],
        ),
    ]  # fmt: skip
    if training:
        parts += [
            "#### Training",
            _table(
                ["system", "form", "ranks", "dtype", "loss", "ours in float64", "gradients", "bytes sent", "verdict"],
                [
                    [
                        row.system, row.form, row.ranks, row.dtype, f"{row.loss:.7f}",
                        "" if row.loss_expected is None else f"{row.loss_expected:.7f}",
                        _error(row.errors.get("gradients")), _count(row.sent_bytes), row.verdict,
                    ]
                    for row in training
                ],
            ),
        ]  # fmt: skip
    if faults:
        parts += [
            "#### Faults, and the command that shows each",
            _table(
                ["system", "form", "ranks", "dtype", "verdict", "found", "command"],
                [
                    [row.system, row.form, row.ranks or "", row.dtype, row.verdict, row.found, f"`{row.reproduce}`"]
                    for row in faults
                ],
            ),
        ]
    parts += [
        "#### Formulas of the bytes",
        "P ranks, X bytes per element of the inputs; q and kv are the elements of one rank's queries, and of its K and "
        "V together.",
        _table(
            ["system", "bytes of one forward and backward"],
            list(dict.fromkeys((row.system, row.sent_formula) for row in attention if row.sent_formula)),
        ),
        "#### What ran",
        _table(
            ["system", "release", "pin", "Python", "torch", "stand-in", "commit of this repository"],
            [
                [
                    one.rows[0].system, one.rows[0].release, one.pin, one.python, one.torch, ", ".join(one.stand_ins),
                    one.commit[:12],
                ]
                for one in results
                if one.rows
            ],
        ),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _table(columns: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    head = [f"| {' | '.join(columns)} |", f"|{'|'.join([' --- '] * len(columns))}|"]
    return "\n".join([*head, *(f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines)])


def _error(error: FidelityError | None) -> str:
    return "" if error is None else f"{error.relative:.1e} ({error.largest:.1e})"


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _ratio(ours: int | None, theirs: int | None) -> str:
    return f"{ours / theirs:.3f}" if ours and theirs else ""
