"""`burst predict`: time by phase and memory of trials on GPUs that need not be here."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.files.errors import shown_value
from harness.base.errors import UsageError, nearest

if TYPE_CHECKING:
    from engine.settings import TrialSettings
    from harness.metrics.hardware import Hardware
    from harness.plan.forecast import TrialForecast
    from harness.spec.experiment import Experiment
    from harness.spec.trial import Trial

_MOST = 1000  # combinations that are printed


class PredictCommand:
    help = "predict step time by phase, memory and the bottleneck of trials on a kind of GPU; starts nothing"
    forwards = False

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("experiment", nargs="?", help=argparse.SUPPRESS)  # refused with the command that takes one
        parser.add_argument(
            "--hardware", required=True, metavar="NAME",
            help="a file of experiments/hardware/, such as a800, or a path of one that `burst setup calibrate` wrote",
        )  # fmt: skip
        add_question_arguments(parser)
        parser.add_argument(
            "--set", action="append", default=[], metavar="NAME=VALUE", dest="overrides",
            help="another setting of all trials, such as checkpoint.tail=0.5 or settings=as_published; may be repeated",
        )  # fmt: skip
        parser.add_argument(
            "--longest", action="store_true",
            help="for each combination the longest sequence that fits, instead of --seq-len",
        )  # fmt: skip
        parser.add_argument(
            "--phases", action="store_true", help="print the time of every phase, and the memory at its moments"
        )
        parser.add_argument("--json", action="store_true", help="one JSON list instead of tables")

    def run(self, arguments: argparse.Namespace) -> int:
        from harness.base.lengths import format_length
        from harness.commands.plan import origin_lines
        from harness.metrics.hardware import assumed
        from harness.plan.forecast import forecast, longest, machine_of
        from harness.plan.matrix import at_length, plan, plan_table

        if arguments.experiment is not None:
            raise UsageError(
                f"burst predict takes settings and no file, and {shown_value(arguments.experiment)} was given; "
                "for the trials of an experiment use burst plan FILE --hardware NAME"
            )
        hardware = hardware_asked(arguments)
        trials, found = [], []
        for trial in plan(question(arguments), machine_of(hardware), hardware=hardware):
            if arguments.longest:
                held = longest(trial.settings, hardware)
                if held is None:
                    trials.append(trial)
                    found.append(_without_length(trial.settings, hardware))
                    continue
                trial = at_length(trial, held.seq_len, machine_of(hardware), [], hardware)
            trials.append(trial)
            found.append(forecast(trial.settings, hardware, plan=trial.plan))
        if all(_no_length(each) for each in found):
            first = found[0]
            raise UsageError(
                f"{first.settings.method} with {first.settings.model.name} and cp_size {first.settings.cp_size} on "
                f"{hardware.title}: {first.reason}"
            )
        if arguments.json:
            print(json.dumps([_row(*each) for each in zip(trials, found, strict=True)], indent=1))
            return 0
        _print(found, phases=arguments.phases or len(found) == 1)
        for trial, each in zip(trials, found, strict=True):
            name = f"{each.settings.method}, {format_length(each.settings.seq_len)}"
            if words := each.plan_words:
                print(f"{name}: checkpoint auto: {words}")
            if trial.unsupported_reason and each.time is not None:
                print(f"{name} cannot run: {trial.unsupported_reason}")
        for line in origin_lines(plan_table(trials)):
            print(line)
        if missing := assumed(hardware):
            print(
                f"{hardware.title} has no measured {', '.join(missing)}: common values stand for them; "
                "`burst setup calibrate` measures them"
            )
        return 0


# Options that describe trials without a file, and their defaults.
_DEFAULTS = {"model": "7b", "method": "burst", "seq_len": "1M", "cp_size": "8"}
_OPTION = {"model": "--model", "method": "--method", "seq_len": "--seq-len", "cp_size": "--cp-size"}


def add_question_arguments(parser: argparse.ArgumentParser) -> None:
    """How `burst predict`, and `burst plan` without a file, take models, methods, lengths and numbers of GPUs."""
    parser.add_argument("--model", metavar="LIST", help="models (default: 7b)")
    parser.add_argument("--method", metavar="LIST", help="methods (default: burst)")
    parser.add_argument("--seq-len", metavar="LIST", help="tokens of a sequence (default: 1M)")
    parser.add_argument(
        "--gpus", "--cp-size", dest="cp_size", metavar="LIST", help="context-parallel sizes, one GPU each (default: 8)"
    )
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="ranks of a node (default: the hardware file's)")
    parser.add_argument("--task", choices=("train", "attention"), help="(default: train)")


def asks_question(arguments: argparse.Namespace) -> bool:
    """Whether one of these options is given."""
    return any(getattr(arguments, name) is not None for name in (*_DEFAULTS, "task"))


def hardware_asked(arguments: argparse.Namespace) -> Hardware:
    """The hardware file, with nodes as the command line says."""
    from harness.metrics.hardware import hardware_named

    hardware, asked = hardware_named(arguments.hardware), arguments.gpus_per_node
    if asked is not None and asked < 1:
        raise UsageError(f"--gpus-per-node is {asked}; give a number of at least 1")
    return hardware if asked is None else replace(hardware, gpus_per_node=asked)


def question(arguments: argparse.Namespace) -> Experiment:
    """The experiment that the options describe: the product of the lists. Raises UsageError for what no trial may
    have."""
    from engine.settings import Steps
    from harness.base.lengths import parse_length
    from harness.spec.experiment import Experiment, Limits, Search
    from harness.spec.methods import method_named
    from harness.spec.models import named_model

    reads: dict[str, Callable[[str], Any]] = {
        "model": named_model, "method": lambda text: method_named(text).name, "seq_len": parse_length,
        "cp_size": lambda text: _count("--cp-size", text),
    }  # fmt: skip
    sweep: dict[str, tuple[Any, ...]] = {}
    for name, default in _DEFAULTS.items():
        parts = [part.strip() for part in (getattr(arguments, name) or default).split(",") if part.strip()]
        if not parts:
            raise UsageError(f"{_OPTION[name]} names nothing; give at least one")
        try:
            sweep[name] = tuple(map(reads[name], parts))
        except ValueError as error:
            raise UsageError(str(error)) from error
    if math.prod(map(len, sweep.values())) > _MOST:
        raise UsageError(f"these lists have more than {_MOST} combinations; name fewer")
    fixed = dict(_change(text) for text in arguments.overrides)
    steps = {key.partition(".")[2]: fixed.pop(key) for key in tuple(fixed) if key.startswith("steps.")}
    try:
        return Experiment(
            name="question", title="", path=Path("--set"), scale=None,
            tasks=(fixed.pop("task", arguments.task or "train"),),
            sweep={key: values for key, values in sweep.items() if key not in fixed}, exclude=(),
            seeds=(fixed.pop("seed", 0),), fixed=fixed, steps=Steps(**steps), limits=Limits(),
            search=Search(), reference={},
        )  # fmt: skip
    except ValueError as error:
        raise UsageError(str(error)) from error


def _without_length(settings: TrialSettings, hardware: Hardware) -> TrialForecast:
    """The row of a combination for which no sequence is known to fit, with the reason."""
    from harness.plan.forecast import TrialForecast
    from harness.plan.predict import memory_is_modelled

    reason = "no sequence fits; give a larger --cp-size, or keep less with --set checkpoint.tail=0"
    if not memory_is_modelled(settings):
        of = f"task {settings.task}" if settings.task != "train" else f"method {settings.method}"
        reason = f"no memory is predicted of {of}, so no length is known to be the longest; give --seq-len"
    return TrialForecast(settings=settings, hardware=hardware, nodes=0, time=None, reason=reason, gpu_gib=None)


def _no_length(found: TrialForecast) -> bool:
    return not found.nodes


def _count(option: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{option} is {text}; give whole numbers of at least 1")
    return int(text)


def _change(text: str) -> tuple[str, Any]:
    """One NAME=VALUE as a setting and its value, read as in an experiment file. Raises UsageError."""
    from cluster.files.reader import parse_yaml
    from harness.spec.experiment import AUTO_KEY
    from harness.spec.setting import SETTINGS, read_setting

    name, equals, value = text.partition("=")
    place = f"--set {text}"
    if not equals or not name:
        raise UsageError(f"{place}: expected NAME=VALUE, such as checkpoint.tail=0.5")
    if (name, value) == ("checkpoint", "auto"):
        name = AUTO_KEY
    if name not in SETTINGS:
        owner, _, field = name.rpartition(".")
        beside = [known.removeprefix(f"{owner}.") for known in SETTINGS if known.rpartition(".")[0] == owner]
        hint = nearest(field, beside) if beside else nearest(name, SETTINGS)
        raise UsageError(f"{place}: unknown setting; {hint}")
    return name, read_setting(parse_yaml(value, place, lambda _line: place), name, Path())


def _row(trial: Trial, found: TrialForecast) -> dict[str, Any]:
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
                for name, seconds in each.time.phases.items():
                    print(f"  {name:42} {seconds:10.4g} s  {100 * seconds / each.time.seconds:5.1f}%")
                moments = memory_by_moment(each.settings)
                for name, gib in moments.items():
                    fullest = ", the fullest" if gib == max(moments.values()) else ""
                    print(f"  {f'memory, {name}':42} {gib:10.4g} GiB{fullest}")
    if published:
        print("Published GiB: of the paper's own program of that method with these settings; GiB: of this engine.")
    print("From and to: nine of ten published configurations that were held out lay within (docs/plan.md).")


COMMAND = PredictCommand()
