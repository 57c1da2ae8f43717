"""`python -m harness.predict.schedules`: fit the cost model's constants, and show them beside those it has.

Every measured call with its estimate goes to results/published/schedules.csv, errors and choices to
docs/notes/2026-11-23-cost-model-of-auto.md, both under the model as it is: a new constant is put into
`engine.attention.cost.HardwareModel` by hand, and tests hold the two together.
"""

from __future__ import annotations

from engine.attention.cost import HardwareModel
from harness.predict.schedules.comparison import comparisons
from harness.predict.schedules.fit import GUESSES, fitted_model
from harness.predict.schedules.measured import measured_calls
from harness.predict.schedules.table import (
    CHOICES,
    CONSTANTS,
    ERRORS,
    PAGE,
    TABLE_FILE,
    comparison_table,
    constant_table,
    error_table,
    table_rows,
)
from harness.predict.validation_table import write_block, write_table


def main() -> None:
    calls, model = measured_calls(), HardwareModel()
    found = fitted_model(calls)
    print(f"{'constant':24} {'guess':>10} {'fitted':>10} {'in use':>10}")
    for name, guess in GUESSES.items():
        print(f"{name:24} {guess:10.4g} {getattr(found, name):10.4g} {getattr(model, name):10.4g}")
    rows = table_rows(calls, model)
    for row in rows:
        print("  ".join(row[1:]))
    write_table(TABLE_FILE, rows)
    write_block(CONSTANTS, constant_table(model), PAGE)
    for name, text in ((ERRORS, error_table(calls, model)), (CHOICES, comparison_table(comparisons(calls, model)))):
        print(text)
        write_block(name, text, PAGE)


if __name__ == "__main__":
    main()
