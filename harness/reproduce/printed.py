"""What upstream systems printed of themselves while they ran in trials of ours, beside the one formula of `burst`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from harness.base.lengths import format_length
from harness.records.record import RecordPlace
from harness.report.results import Row
from harness.report.tables.table import Column, Table, significant
from harness.reproduce.figure_points import gpu_text

_PRINTED = "extra_upstream.printed."  # beginning of the columns of what a system prints, under its own names
_APART = 0.05  # of the recomputed figure: marked beyond it


@dataclass(frozen=True, kw_only=True, slots=True)
class PrintedTrial:
    """TFLOP/s per GPU and MFU of one trial: as the system printed them, and by our formula from the trial's time."""

    system: str
    row: Row
    record: RecordPlace
    tflops: float | None
    mfu: float | None  # as a fraction

    @property
    def ratio(self) -> float:
        """Printed over recomputed, by TFLOP/s where those were printed."""
        if self.tflops is not None:
            return float(self.tflops / self.row["tflops_per_gpu"])
        assert self.mfu is not None, "one of the two was printed"
        return float(self.mfu / self.row["mfu"])


def printed_by_systems(rows: Sequence[tuple[Row, RecordPlace]]) -> list[PrintedTrial]:
    """Every trial whose system printed TFLOP/s or MFU, by system, length and record."""
    found = []
    for row, record in rows:
        own = {name.removeprefix(_PRINTED).casefold(): row[name] for name in row if name.startswith(_PRINTED)}
        rates = [value for name, value in own.items() if "tflop" in name and value]
        shares = [value / 100 for name, value in own.items() if name == "mfu" and value]
        if (rates and row["tflops_per_gpu"]) or (shares and row["mfu"]):
            release = row.get("extra_upstream.release")
            system = f"{row['system']} ({release})" if release else str(row["system"])
            found.append(
                PrintedTrial(
                    system=system, row=row, record=record, tflops=rates[0] if rates else None,
                    mfu=shares[0] if shares else None,
                )
            )  # fmt: skip
    return sorted(found, key=lambda one: (one.system.casefold(), one.row["seq_len"], one.record))


def printed_table(found: Sequence[PrintedTrial]) -> Table:
    """A line for each trial; those that differ by more than a twentieth are marked."""
    number, percent = significant(4), significant(3, 100)
    middle = f" The median ratio is {statistics.median(one.ratio for one in found):.4f}." if found else ""
    return Table(
        name="printed",
        title="What systems printed of themselves in our records, beside one formula",
        columns=(
            Column(header="system"), Column(header="model"), Column(header="tokens"), Column(header="on"),
            Column(header="TFLOP/s, printed", form=number, numeric=True),
            Column(header="TFLOP/s, recomputed", form=number, numeric=True),
            Column(header="MFU %, printed", form=percent, numeric=True),
            Column(header="MFU %, recomputed", form=percent, numeric=True),
            Column(header="printed ÷ recomputed", form=number, numeric=True), Column(header="run"),
        ),
        rows=tuple(
            (
                one.system, one.row["model"], format_length(one.row["seq_len"]),
                f"{one.row['world_size']} × {gpu_text(str(one.row['gpu']))}", one.tflops, one.row["tflops_per_gpu"],
                one.mfu, one.row["mfu"], one.ratio, one.row["run"],
            )
            for one in found
        ),
        note="Printed by the program after its last step; recomputed from the median step of the trial: exact causal "
        f"pairs, recomputation not counted. Marked: more than 5% apart.{middle}",
        marked=frozenset(place for place, one in enumerate(found) if abs(one.ratio - 1) > _APART),
    )  # fmt: skip
