"""`python -m harness.plan.frontier`: every point of `burst` in experiments/frontier.yaml, planned and predicted, into
results/published/frontier_predicted.csv. Takes minutes: each point has its own search.

Predictions are committed before a point is measured; a record and the file's history tell how far they were off.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import yaml

from engine.checkpoint.planning.plan import kept_in_words
from engine.settings import TrialSettings
from harness.base.errors import UsageError
from harness.metrics.hardware import Hardware, hardware_named
from harness.plan.checkpointing import HOST_SHARE, with_plan
from harness.plan.forecast import machine_of
from harness.plan.matrix import asked_for
from harness.plan.own_records import PUBLISHED
from harness.plan.predict import fits_gpu, predict
from harness.predict.validation import write_table
from harness.spec.experiment import load_experiment

FRONTIER = Path(__file__).parents[2] / "experiments" / "frontier.yaml"
TABLE_FILE = PUBLISHED / "frontier_predicted.csv"
HEADER = [
    "scale", "model", "seq_len", "memory", "host_memory_gib", "predicted_seconds",
    "predicted_tokens_per_gpu_per_second", "predicted_allocated_gib", "predicted_reserved_gib", "predicted_host_gib",
    "fits", "plan",
]  # fmt: skip
SMALL_HOST_GIB = 128  # of the hosts that measured; a plan that needs more has a second row for such a host


def points(scale: str | None) -> Iterator[TrialSettings]:
    """The trials of `burst` in a scale of the file, as it asks for them."""
    yield from (asked for asked in asked_for(load_experiment(FRONTIER, scale=scale)) if asked.method == "burst")


def scales() -> list[str | None]:
    """All scales but the one for CPUs; None is the file without one."""
    file = yaml.safe_load(FRONTIER.read_text(encoding="utf-8"))
    return [None, *(name for name in file["scales"] if name != "smoke")]


def table_rows(hardware: Hardware) -> list[list[str]]:
    """The table with its header: a row for each point, and a second one where a small host has too little for it."""
    rows = [HEADER]
    for scale in scales():
        for asked in points(scale):
            row, host_gib = predicted_row(scale, asked, asked.host_memory.removesuffix("GiB"), hardware)
            rows.append(row)
            most = HOST_SHARE * SMALL_HOST_GIB
            if host_gib > most and asked.checkpoint.plan == "auto" and not asked.host_memory:
                on_small = replace(asked, host_memory=f"{most:.1f}GiB")
                rows.append(predicted_row(scale, on_small, str(SMALL_HOST_GIB), hardware)[0])
    return rows


def predicted_row(
    scale: str | None, asked: TrialSettings, host_memory: str, hardware: Hardware
) -> tuple[list[str], float]:
    """The row of one point, and the GiB of host memory that it needs. `host_memory`: what the row says of it."""
    settings, plan = with_plan(asked, machine_of(hardware), hardware=hardware)
    found = predict(settings, hardware)
    if found.seconds is None or found.gpu_gib is None or found.host_gib is None:
        raise UsageError(
            f"scale {scale} of {FRONTIER.name} has a point without a prediction: {settings.seq_len} tokens"
        )
    figures = [f"{found.seconds:.4g}", f"{settings.seq_len / found.seconds:.5g}"]
    figures += [f"{each:.4g}" for each in (found.gpu_gib, found.reserved_gib, found.host_gib)]
    fits = "yes" if fits_gpu(found.gpu_gib, settings, hardware, plan) else "no"
    size, kept = str(settings.seq_len), "; ".join(kept_in_words(settings))
    return [scale or "", settings.model.name, size, settings.memory, host_memory, *figures, fits, kept], found.host_gib


def main() -> None:
    write_table(TABLE_FILE, table_rows(hardware_named("h200")))


if __name__ == "__main__":
    main()
