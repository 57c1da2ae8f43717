"""`burst plan --phases` and `--longest`: time by phase, memory by moment, and the longest sequence that fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.base.errors import UsageError

if TYPE_CHECKING:
    from engine.settings import TrialSettings
    from harness.metrics.hardware import Hardware
    from harness.plan.forecast import TrialForecast
    from harness.spec.trial import Trial

Predicted = tuple["Trial", "TrialForecast"]


def predicted(trials: Sequence[Trial], hardware: Hardware, *, at_longest: bool) -> list[Predicted]:
    """Each trial with its prediction, `at_longest` with the longest sequence that fits. Raises UsageError where no
    trial has one."""
    from harness.plan.forecast import forecast, longest, machine_of
    from harness.plan.matrix import at_length

    found: dict[str, Predicted] = {}
    for trial in trials:
        if at_longest:
            held = longest(trial.settings, hardware)
            if held is None:
                found[trial.id] = trial, _without_length(trial.settings, hardware)
                continue
            trial = at_length(trial, held.seq_len, machine_of(hardware), [], hardware)
        found[trial.id] = trial, forecast(trial.settings, hardware, plan=trial.plan)
    if all(_no_length(each) for _, each in found.values()):
        _, first = next(iter(found.values()))
        raise UsageError(
            f"{first.settings.method} with {first.settings.model.name} and cp_size {first.settings.cp_size} on "
            f"{hardware.title}: {first.reason}"
        )
    return list(found.values())


def print_prediction(found: Sequence[Predicted], hardware: Hardware, *, phases: bool) -> None:
    """A table of the trials, and what the planner chose; with `phases` also the parts of each one's time and memory."""
    from harness.base.lengths import format_length
    from harness.metrics.hardware import assumed

    _print([each for _, each in found], phases=phases)
    for trial, each in found:
        name = f"{each.settings.method}, {format_length(each.settings.seq_len)}"
        if words := each.plan_words:
            print(f"{name}: checkpoint auto: {words}")
        if trial.unsupported_reason and each.time is not None:
            print(f"{name} cannot run: {trial.unsupported_reason}")
    if missing := assumed(hardware):
        print(
            f"{hardware.title} has no measured {', '.join(missing)}: common values stand for them; "
            "`burst setup calibrate` measures them"
        )


def _without_length(settings: TrialSettings, hardware: Hardware) -> TrialForecast:
    """The row of a combination for which no sequence is known to fit, with the reason."""
    from harness.plan.forecast import TrialForecast
    from harness.plan.predict import gpu_room, memory_is_modelled

    room = gpu_room(settings, hardware)
    reason = f"no sequence fits {room:g} GiB; give a larger --cp-size"
    if room < hardware.memory_gib:
        reason += " or memory"
    if not settings.planned:
        reason += ", or keep less, such as checkpoint.tail 0 (docs/memory.md)"
    if not memory_is_modelled(settings):
        of = f"task {settings.task}" if settings.task != "train" else f"method {settings.method}"
        reason = f"no memory is predicted of {of}, so no length is known to be the longest; give --seq-len"
    return TrialForecast(settings=settings, hardware=hardware, nodes=0, time=None, reason=reason, gpu_gib=None)


def _no_length(found: TrialForecast) -> bool:
    return not found.nodes


def prediction_row(trial: Trial, found: TrialForecast) -> dict[str, object]:
    """One trial as plain values, for JSON."""
    from harness.plan.predict import memory_by_moment

    settings, time = found.settings, found.time
    row: dict[str, Any] = {
        "trial_id": trial.id, "method": settings.method, "model": settings.model.name,
        "seq_len": None if _no_length(found) else settings.seq_len,
        "cp_size": settings.cp_size, "world_size": settings.world_size, "nodes": found.nodes,
        "hardware": found.hardware.name, "seconds": time.seconds if time else None,
        "interval": list(found.interval) if found.interval else None,
        "tokens_per_gpu_per_second": found.tokens_per_gpu_per_second, "mfu": found.mfu, "gpu_gib": found.gpu_gib,
        "system_gib": found.system_gib, "fits": found.fits, "schedule": time.attention.schedule if time else None,
        "schedule_reason": time.attention.resolved.reason if time else None,
        "backward": time.attention.resolved.backward if time else None, "bottleneck": time.bottleneck if time else None,
        "phases": dict(time.phases) if time else None,
        "gib_by_moment": memory_by_moment(settings) if found.nodes else None,
        "reason": found.reason or trial.unsupported_reason or "",
    }  # fmt: skip
    if trial.settings.settings != "equal":
        row["from_table"] = list(trial.table.filled)
    return row | ({"plan": found.plan_words} if found.plan else {})


def _print(found: list[TrialForecast], *, phases: bool) -> None:
    from rich import box
    from rich.table import Table

    from harness.base.lengths import format_length
    from harness.base.terminal import print_table, stdout_console
    from harness.plan.predict import memory_by_moment
    from harness.report.tables.table import significant

    three = significant(3)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("method", "model"):
        table.add_column(name, no_wrap=True)
    published = any(each.system_gib is not None for each in found)
    memory = ("GiB", "published GiB") if published else ("GiB",)
    for name in ("tokens", "CP", "nodes", "step s", "from", "to", "tok/s/GPU", "MFU %", *memory):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("fits", "schedule", "most time"):
        table.add_column(name, no_wrap=True)
    for each in found:
        settings, time = each.settings, each.time
        size = ("", settings.cp_size, "") if _no_length(each) else (
            format_length(settings.seq_len), settings.cp_size, each.nodes
        )  # fmt: skip
        cells: list[Any] = [settings.method, settings.model.name, *size]
        if time is None or each.interval is None or each.mfu is None or each.tokens_per_gpu_per_second is None:
            cells += ["", "", "", "", ""]
        else:
            cells += [three(value) for value in (time.seconds, *each.interval, each.tokens_per_gpu_per_second)]
            cells.append(three(100 * each.mfu))
        sizes = (each.gpu_gib, each.system_gib) if published else (each.gpu_gib,)
        cells += ["" if size is None else three(size) for size in sizes]
        cells.append({None: "", True: "yes", False: "no"}[each.fits])
        cells += [time.attention.schedule, time.bottleneck] if time else ["", each.reason]
        table.add_row(*map(str, cells))
    console = stdout_console()
    print_table(console, table)
    if phases:
        for each in found:
            if each.time is not None:
                print(f"{each.settings.method}, {format_length(each.settings.seq_len)} tokens:")
                moments = {f"memory, {name}": gib for name, gib in memory_by_moment(each.settings).items()}
                width = max(42, *map(len, (*each.time.phases, *moments)))
                for name, seconds in each.time.phases.items():
                    print(f"  {name:{width}} {seconds:10.4g} s  {100 * seconds / each.time.seconds:5.1f}%")
                for name, gib in moments.items():
                    fullest = ", the fullest" if gib == max(moments.values()) else ""
                    print(f"  {name:{width}} {gib:10.4g} GiB{fullest}")
    if published:
        print("Published GiB: of the paper's own program of that method with these settings; GiB: of this engine.")
    print("From and to: nine of ten published configurations that were held out lay within (docs/plan.md).")
