"""Sentences below figures: peaks, ceilings, samples, whiskers."""

from __future__ import annotations

from collections.abc import Sequence

from harness.metrics.hardware import hardware_for
from harness.metrics.intervals import TwoRounds
from harness.metrics.throughput import OWN_GEMMS
from harness.report.results import Row, spread_of


def peaks_of(rows: Sequence[Row]) -> list[tuple[str, float]]:
    """GPUs of the rows, and the peak behind their MFU in TFLOP/s."""
    return sorted({(row["gpu"], row["peak_tflops"]) for row in rows if row.get("peak_tflops")})


def peak_note(rows: Sequence[Row]) -> str:
    """The peak behind MFU, and where it is published; empty where no row has one."""
    return " ".join(
        f"Peak: {peak:,.0f} TFLOP/s ({gpu}; {_source(gpu, 'peak_bf16_tflops')})." for gpu, peak in peaks_of(rows)
    )


def ceiling_note(rows: Sequence[Row]) -> str:
    """What the ceiling is, and where and when its kernels were measured; empty where no row has one."""
    drawn = [row for row in rows if row.get("mfu_ceiling") or row.get("tflops_ceiling")]
    if not drawn:
        return ""
    without = {row["gpu"] for row in drawn if not (row.get("ceiling_source") or "").startswith(OWN_GEMMS)}
    own = any(row["gpu"] not in without for row in drawn)
    measured = ["GEMM of the trials' own shapes, measured in them"] if own else []
    for gpu in sorted({row["gpu"] for row in drawn}):
        gemm = f"GEMM {_source(gpu, 'gemm_tflops')}; " if gpu in without else ""
        measured.append(f"{gpu}: {gemm}attention {_source(gpu, 'kernel_ceilings')}")
    return f"Ceiling: the same work at the speeds of kernels alone, no transfer exposed ({'; '.join(measured)})."


def samples_note(rows: Sequence[Row]) -> str:
    """How many steps and rounds stand behind each number."""
    counts = sorted({row["samples"] for row in rows if row["samples"]})
    if not counts:
        return "No trial was measured."
    rounds = sorted({row["rounds"] for row in rows if row["rounds"]})
    seeds = len({row["seed"] for row in rows})
    sweep = f", each with {seeds} seeds (median over seeds)" if seeds > 1 else ""
    return (
        f"n = {_from_to(counts)} measured {'step' if counts == [1] else 'steps'} per trial, warm-up excluded, in "
        f"{'one round' if rounds in ([], [1]) else f'{_from_to(rounds)} rounds'}{sweep}."
    )


def whisker_note(points: Sequence[Sequence[Row]]) -> str:
    """What whiskers are, of the trials at each point; empty where there is none."""
    kinds = []
    if any(len(rows) > 1 for rows in points):
        kinds.append("range of the trials at a point")
    single = [rows[0] for rows in points if len(rows) == 1]
    if any(row["step_seconds_low"] is not None for row in single):
        kinds.append("95% interval of the median over rounds")
    if any(isinstance(spread_of(row), TwoRounds) for row in single):
        kinds.append("both values of two rounds")
    if any(spread_of(row) is None and row["step_seconds_iqr"] for row in single):
        several = " where there is one round" if len(kinds) else ""
        kinds.append(f"interquartile range of the measured steps{several}")
    return f"Whiskers: {'; '.join(kinds)}." if kinds else ""


def _from_to(counts: Sequence[int]) -> str:
    return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _source(gpu: str, figure: str) -> str:
    hardware = hardware_for(gpu)
    return hardware.sources.get(figure, "not stated") if hardware else "not stated"
