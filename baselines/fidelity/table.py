"""The fidelity table as CSV, with every figure, and as Markdown, which reads in one go."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from baselines.fidelity.rows import TOLERANCE, FidelityError, Result, Row

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
