"""`burst predict`: time by phase and memory of trials on GPUs that need not be here."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.files.errors import shown_value
from harness.base.errors import UsageError, nearest

if TYPE_CHECKING:
    from engine.settings import TrialSettings
    from harness.metrics.hardware import Hardware
    from harness.plan.forecast import Forecast

_MOST = 1000  # combinations that are printed


class Predict:
    help = "predict step time by phase, memory and the bottleneck of trials on a kind of GPU; starts nothing"
    forwards = False

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("experiment", nargs="?", help=argparse.SUPPRESS)  # refused with the command that takes one
        parser.add_argument(
            "--hardware", required=True, metavar="NAME",
            help="a file of experiments/hardware/, such as a800, or a path of one that `burst calibrate` wrote",
        )  # fmt: skip
        parser.add_argument("--model", default="7b", metavar="LIST", help="models (default: 7b)")
        parser.add_argument("--method", default="burst", metavar="LIST", help="methods (default: burst)")
        parser.add_argument("--seq-len", default="1M", metavar="LIST", help="tokens of a sequence (default: 1M)")
        parser.add_argument("--cp-size", default="8", metavar="LIST", help="context-parallel sizes (default: 8)")
        parser.add_argument(
            "--gpus-per-node", type=int, metavar="N", help="ranks of a node (default: the hardware file's)"
        )
        parser.add_argument("--task", choices=("train", "attention"), default="train", help="(default: train)")
        parser.add_argument(
            "--set", action="append", default=[], metavar="NAME=VALUE",
            help="another setting of all trials, such as checkpoint.tail=0.5 or checkpoint=auto; may be repeated",
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
        from harness.metrics.hardware import hardware_named
        from harness.plan.forecast import forecast, longest, planned_on
        from harness.predict.speeds import assumed

        hardware = hardware_named(arguments.hardware)
        if arguments.experiment is not None:
            raise UsageError(
                f"burst predict takes settings and no file, and {shown_value(arguments.experiment)} was given; "
                "for the trials of an experiment use burst plan FILE --hardware NAME"
            )
        if arguments.gpus_per_node is not None and arguments.gpus_per_node < 1:
            raise UsageError(f"--gpus-per-node is {arguments.gpus_per_node}; give a number of at least 1")
        found: list[Forecast] = []
        for settings in _combinations(arguments):
            if arguments.longest:
                held = longest(settings, hardware, gpus_per_node=arguments.gpus_per_node)
                if held is None:
                    found.append(_without_length(settings, hardware))
                    continue
                settings = held
            settings, plan = planned_on(settings, hardware, gpus_per_node=arguments.gpus_per_node)
            found.append(forecast(settings, hardware, gpus_per_node=arguments.gpus_per_node, plan=plan))
        if all(_no_length(each) for each in found):
            first = found[0]
            raise UsageError(
                f"{first.settings.method} with {first.settings.model.name} and cp_size {first.settings.cp_size} on "
                f"{hardware.title}: {first.reason}"
            )
        if arguments.json:
            print(json.dumps([_row(each) for each in found], indent=1))
            return 0
        _print(found, phases=arguments.phases or len(found) == 1)
        for each in found:
            if words := each.plan_words:
                print(f"{each.settings.method}, {format_length(each.settings.seq_len)}: checkpoint auto: {words}")
        if missing := assumed(hardware):
            print(
                f"{hardware.title} has no measured {', '.join(missing)}: common values stand for them; "
                "`burst calibrate` measures them"
            )
        return 0


def _without_length(settings: TrialSettings, hardware: Hardware) -> Forecast:
    """The row of a combination for which no sequence is known to fit, with the reason."""
    from harness.plan.forecast import Forecast
    from harness.plan.predict import memory_is_modelled

    reason = "no sequence fits; give a larger --cp-size, or keep less with --set checkpoint.tail=0"
    if not memory_is_modelled(settings):
        of = f"task {settings.task}" if settings.task != "train" else f"method {settings.method}"
        reason = f"no memory is predicted of {of}, so no length is known to be the longest; give --seq-len"
    return Forecast(settings=settings, hardware=hardware, nodes=0, time=None, reason=reason, gpu_gib=None)


def _no_length(found: Forecast) -> bool:
    return not found.nodes


def _combinations(arguments: argparse.Namespace) -> list[TrialSettings]:
    """The product of the lists. Raises UsageError for what no trial may have."""
    from engine.checkpoint.planning.choice import left_open
    from engine.settings import TrialSettings, from_json, to_json
    from harness.base.lengths import parse_length
    from harness.spec.methods import method_named
    from harness.spec.models import named_model

    lists = [
        [part.strip() for part in text.split(",") if part.strip()]
        for text in (arguments.model, arguments.method, arguments.seq_len, arguments.cp_size)
    ]
    for option, values in zip(("--model", "--method", "--seq-len", "--cp-size"), lists, strict=True):
        if not values:
            raise UsageError(f"{option} names nothing; give at least one")
    changes = dict(_change(text) for text in arguments.set)
    made: list[TrialSettings] = []
    for model, method, length, cp_size in itertools.islice(itertools.product(*lists), _MOST + 1):
        if len(made) == _MOST:
            raise UsageError(f"these lists have more than {_MOST} combinations; name fewer")
        method_named(method)
        try:
            base = TrialSettings(
                task=arguments.task, method=method, model=named_model(model), seq_len=parse_length(length),
                cp_size=_count("--cp-size", cp_size),
            )  # fmt: skip
            data = to_json(base) | {"world_size": 0}
            for name, value in changes.items():
                *owner, field = name.split(".")
                (data[owner[0]] if owner else data)[field] = value
            made.append(left_open(from_json(TrialSettings, data), changes))
        except (ValueError, TypeError) as error:
            raise UsageError(str(error)) from error
    return made


def _count(option: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{option} is {text}; give whole numbers of at least 1")
    return int(text)


def _change(text: str) -> tuple[str, Any]:
    """One NAME=VALUE as a setting and its value, read as in an experiment file. Raises UsageError."""
    from cluster.files.document import parse_yaml
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


def _row(found: Forecast) -> dict[str, Any]:
    from harness.plan.predict import memory_by_moment

    settings, time = found.settings, found.time
    row = {
        "method": settings.method, "model": settings.model.name,
        "seq_len": None if _no_length(found) else settings.seq_len,
        "cp_size": settings.cp_size, "world_size": settings.world_size, "nodes": found.nodes,
        "hardware": found.hardware.name, "seconds": time.seconds if time else None,
        "interval": list(found.interval) if found.interval else None,
        "tokens_per_gpu_per_second": found.tokens_per_gpu_per_second, "mfu": found.mfu, "gpu_gib": found.gpu_gib,
        "system_gib": found.system_gib, "fits": found.fits, "schedule": time.exchange.schedule if time else None,
        "backward": time.exchange.backward if time else None, "bottleneck": time.bottleneck if time else None,
        "phases": dict(time.phases) if time else None,
        "gib_by_moment": memory_by_moment(settings) if found.nodes else None, "reason": found.reason,
    }  # fmt: skip
    return row | ({"plan": found.plan_words} if found.plan else {})


def _print(found: list[Forecast], *, phases: bool) -> None:
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
        cells += [time.exchange.schedule, time.bottleneck] if time else ["", each.reason]
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
    print("From and to: nine of ten published configurations that were held out lay within (docs/prediction.md).")


COMMAND = Predict()
