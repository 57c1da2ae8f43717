"""`burst plan --frontier`: what a trial's step takes when it may use less and less of a GPU's memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.files.errors import counted
from harness.base.errors import UsageError

if TYPE_CHECKING:
    from engine.settings import TrialSettings
    from harness.metrics.hardware import Hardware
    from harness.plan.forecast import TrialForecast

_BAR = 20  # characters of the longest bar


def frontiers(
    asked: Sequence[TrialSettings], hardware: Hardware, so_far: Callable[[str], None] = lambda _: None
) -> list[list[TrialForecast]]:
    """The frontier of each trial, as `asked` before the planner chose. Of trials that differ in their budget alone the
    largest counts. Calls `so_far` with the number of budgets planned. Raises UsageError for a trial that has none."""
    from engine.checkpoint.planning.plan import fits_with_gradients_away, least_gpu_bytes
    from harness.base.lengths import format_length
    from harness.metrics.throughput import GIB
    from harness.plan.checkpointing import budget_of
    from harness.plan.forecast import frontier, machine_of
    from harness.plan.predict import gpu_room

    largest: dict[TrialSettings, TrialSettings] = {}
    for each in asked:
        key = replace(each, memory="")
        largest[key] = max(each, largest.get(key, each), key=lambda settings: gpu_room(settings, hardware))
    found: list[list[TrialForecast]] = []
    for each in largest.values():
        rows = []
        try:
            for row in frontier(each, hardware):
                rows.append(row)
                so_far(counted(sum(map(len, found)) + len(rows), "budget"))
        except ValueError as error:
            raise UsageError(str(error)) from None
        if not rows:
            room, least = gpu_room(each, hardware), math.ceil(least_gpu_bytes(each) / GIB)
            away = fits_with_gradients_away(each, budget_of(each, machine_of(hardware), hardware))
            advice = "gradient_offload true, " if away else ""
            where, larger = (hardware.title, "") if room == hardware.memory_gib else ("memory", "memory, ")
            trial = (
                f"{each.method} with {each.model.name}, {format_length(each.seq_len)} tokens and cp_size {each.cp_size}"
            )
            if least <= room:
                raise UsageError(
                    f"{trial} needs more of a host than {each.host_memory or 'is assumed'} beside {room:g} GiB of a "
                    f"GPU ({where}); give {advice}a larger host_memory, {larger}--gpus or a smaller --seq-len"
                )
            raise UsageError(
                f"{trial} needs at least {least:,} GiB of a GPU, found {room:g} ({where}); give {advice}a larger "
                f"{larger}--gpus or a smaller --seq-len"
            )
        found.append(rows)
    return found


def frontier_row(found: TrialForecast) -> dict[str, object]:
    """One budget as plain values, for JSON."""
    from harness.plan.predict import gpu_room

    settings = found.settings
    return {
        "method": settings.method, "model": settings.model.name, "seq_len": settings.seq_len,
        "cp_size": settings.cp_size, "world_size": settings.world_size, "hardware": found.hardware.name,
        "budget_gib": gpu_room(settings, found.hardware), "gpu_gib": found.gpu_gib, "host_gib": found.host_gib,
        "seconds": found.time.seconds if found.time else None,
        "tokens_per_gpu_per_second": found.tokens_per_gpu_per_second, "plan": found.plan_words, "reason": found.reason,
    }  # fmt: skip


def print_frontier(rows: Sequence[TrialForecast]) -> None:
    """One trial under its budgets as a table, with bars of memory and speed, and what each plan keeps."""
    from rich import box
    from rich.table import Table

    from engine.checkpoint.planning.plan import kept_in_words, with_gradients_away
    from harness.base.lengths import format_length
    from harness.base.terminal import print_table, stdout_console
    from harness.plan.predict import gpu_room
    from harness.report.tables.table import significant

    three = significant(3)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("budget GiB", "peak GiB", "host GiB", "step s", "longer", "tok/s/GPU"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("memory", "speed", "plan"):
        table.add_column(name, no_wrap=True)
    settings, hardware = rows[0].settings, rows[0].hardware
    seconds = [each.time.seconds for each in rows if each.time]
    plans: dict[str, int] = {}
    for alike in _of_one_plan(rows):
        each, budgets = alike[0], [three(gpu_room(one.settings, hardware)) for one in alike]
        peak, own = each.gpu_gib or 0.0, each.time.seconds if each.time else None
        times = ["", "", ""]
        if own is not None and each.tokens_per_gpu_per_second is not None:
            times = [three(own), f"{own / min(seconds) - 1:.1%}", three(each.tokens_per_gpu_per_second)]
        words = "; ".join(kept_in_words(each.settings))
        number = plans.setdefault(words or "nothing is computed again or moved", len(plans) + 1)
        table.add_row(
            " to ".join(dict.fromkeys((budgets[-1], budgets[0]))), three(peak), three(each.host_gib or 0.0), *times,
            _bar(peak / hardware.memory_gib), _bar(min(seconds) / own if own else 0.0), f"({number})",
        )  # fmt: skip
    console = stdout_console()
    length = format_length(settings.seq_len)
    title = f"{settings.method}, {settings.model.name}, {length} tokens, {settings.world_size} x {hardware.title}"
    console.print(title, markup=False, highlight=False)
    print_table(console, table)
    for words, number in plans.items():
        console.print(f"({number}) {words}", markup=False, highlight=False)
    if rows[0].reason:
        console.print(f"No time is predicted: {rows[0].reason}", markup=False, highlight=False)
    away = with_gradients_away(settings)
    least = "" if away is None else " without gradient_offload, which is not chosen on several GPUs"
    console.print(
        "Memory is the peak as a part of the GPU's, speed a part of the fastest row's. The last row's budget is the "
        f"least in whole GiB{least}.", markup=False, highlight=False,
    )  # fmt: skip


def _of_one_plan(rows: Sequence[TrialForecast]) -> list[list[TrialForecast]]:
    """Budgets side by side, as many together as have the same plan."""
    return [list(alike) for _, alike in itertools.groupby(rows, lambda row: replace(row.settings, memory=""))]


def _bar(share: float) -> str:
    """A bar of full and half characters; `share` is of the longest bar."""
    halves = round(2 * _BAR * share)
    return "█" * (halves // 2) + "▌" * (halves % 2)
