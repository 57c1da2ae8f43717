"""`burst plan`: the trial matrix, with the reason for every trial that cannot run. Starts nothing.

For GPUs with a file in experiments/hardware/, found here or named, it also predicts time and memory of each trial:
`--phases` says where they go, `--longest` finds the longest sequence that fits, `--frontier` what less memory costs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from typing import TYPE_CHECKING, Any

from cluster.files.errors import counted, shown, shown_value
from cluster.files.progress import Progress, say
from harness.base.errors import UsageError, one_of
from harness.commands import add_cluster_arguments
from harness.commands.plan.question import add_question_arguments, asks_question, hardware_asked, question
from harness.spec.experiment import Experiment, Search, add_experiment_arguments, chosen_experiment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.settings import TrialSettings
    from harness.metrics.hardware import Hardware
    from harness.plan.forecast import Cost
    from harness.report.results import Row
    from harness.spec.trial import Trial


class PlanCommand:
    help = "print the trials of an experiment, time and memory they need, and why some cannot run; starts nothing"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        from harness.metrics.hardware import hardware_names

        add_experiment_arguments(parser, may_lack=True)
        add_question_arguments(parser)
        add_cluster_arguments(
            parser,
            nodes_help="inventory or list of hosts: plan for those of them that burst run --nodes would use now",
        )
        parser.add_argument(
            "--hardware", metavar="NAME",
            help="plan for nodes of these GPUs, as many as a trial needs, and predict step time and memory: "
            f"{one_of(hardware_names())}, or the path of a file that `burst setup calibrate` wrote",
        )  # fmt: skip
        parser.add_argument(
            "--phases", action="store_true",
            help="with --hardware: the time of every phase with its range, and the memory at its moments",
        )  # fmt: skip
        parser.add_argument(
            "--longest", action="store_true",
            help="with --hardware: for each combination the longest sequence that fits, instead of --seq-len",
        )  # fmt: skip
        parser.add_argument(
            "--frontier", action="store_true",
            help="with --hardware: for each combination the step time under less and less memory",
        )  # fmt: skip
        parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")

    def run(self, arguments: argparse.Namespace) -> int:
        from harness.machine.this_machine import discover
        from harness.metrics.hardware import hardware_for
        from harness.plan.forecast import machine_of
        from harness.plan.matrix import asked_for, nothing_can_run, plan, plan_table, unused_exclusions
        from harness.records.forecasts import records_with_plan

        experiment = _asked(arguments)
        named = None if arguments.hardware is None else hardware_asked(arguments)
        over_hosts = bool(arguments.nodes or arguments.ray)
        if over_hosts + bool(arguments.nodes and arguments.ray) + (arguments.hardware is not None) > 1:
            raise UsageError("--nodes, --ray and --hardware all name the machine to plan for; give one of them")
        if named is not None and arguments.frontier:
            return _frontiers(arguments, asked_for(experiment), named)
        with Progress(f"planning {arguments.experiment or 'what the options ask'}", quiet=arguments.json):
            if over_hosts:
                from harness.launch.ray.inventory import joined

                with contextlib.closing(joined(arguments, say)) as launcher:
                    machine = launcher.machine
                where = f"the nodes ({machine.nodes} x {machine.node_ranks} ranks)"
            elif named is not None:
                machine, where = machine_of(named), f"GPUs of kind {named.title}"
            else:
                machine, where = discover(), "this machine"
            hardware = named or hardware_for(machine.gpu_name)
            trials = plan(experiment, machine, [] if named else records_with_plan(), hardware=hardware)
            in_detail = named is not None and (arguments.phases or arguments.longest)
            rows = [] if in_detail else plan_table(trials, machine if over_hosts else None, hardware)
        if named is not None and in_detail:
            return _predict(arguments, trials, named)
        if arguments.json:
            rounds = {"rounds": experiment.rounds}
            print(json.dumps([row | rounds for row in rows], indent=1))
        else:
            _print_table(rows, where, experiment.rounds)
            if experiment.search != Search():
                print(f"Search: {experiment.search}")
            if hardware:
                from harness.plan.forecast import cost_of

                fitting = [trial.settings for trial, row in zip(trials, rows, strict=True) if _runs(row)]
                hosts = machine if over_hosts else None
                cost = cost_of(fitting, hardware, rounds=experiment.rounds, hosts=hosts)
                print(_cost(cost, rows))
                for sentence in _too_large(rows, hardware.memory_gib):
                    print(sentence)
            if arguments.scale is None and not arguments.overrides:
                for sentence in unused_exclusions(experiment):
                    print(shown(sentence))
        if problem := nothing_can_run(trials):
            lacks = arguments.experiment is None and named is None and not machine.gpu_count
            raise UsageError(problem + ("; add --hardware NAME to plan for GPUs, such as h100" if lacks else ""))
        return 0


def _predict(arguments: argparse.Namespace, trials: Sequence[Trial], hardware: Hardware) -> int:
    """What the trials are predicted to take, in detail."""
    from harness.commands.plan.prediction import predicted, prediction_row, print_prediction
    from harness.plan.matrix import plan_table

    with Progress(f"predicting time and memory of {counted(len(trials), 'trial')}", quiet=arguments.json):
        found = predicted(trials, hardware, at_longest=arguments.longest)
    if arguments.json:
        print(json.dumps([prediction_row(*each) for each in found], indent=1))
        return 0
    print_prediction(found, hardware, phases=arguments.phases)
    for line in origin_lines(plan_table([trial for trial, _ in found])):
        print(line)
    return 0


def _frontiers(arguments: argparse.Namespace, asked: Sequence[TrialSettings], hardware: Hardware) -> int:
    """What less memory costs each of the trials."""
    from harness.commands.plan.frontier import frontier_row, frontiers, print_frontier

    with Progress(f"planning {counted(len(asked), 'trial')} under less and less memory", quiet=arguments.json) as told:
        found = frontiers(asked, hardware, told.so_far)
    if arguments.json:
        print(json.dumps([frontier_row(each) for rows in found for each in rows], indent=1))
    else:
        for rows in found:
            print_frontier(rows)
    return 0


def _detail(arguments: argparse.Namespace) -> str:
    """The option that asks for a prediction in detail, or nothing."""
    if arguments.frontier and (arguments.phases or arguments.longest):
        raise UsageError("--frontier has a table of its own; give it without --phases and --longest")
    return next((f"--{name}" for name in ("frontier", "longest", "phases") if getattr(arguments, name)), "")


def _asked(arguments: argparse.Namespace) -> Experiment:
    """The experiment of the file, or of the options that stand for one. Raises UsageError."""
    if arguments.gpus_per_node is not None and arguments.hardware is None:
        raise UsageError("--gpus-per-node belongs to --hardware; name the GPUs to plan for")
    detailed = _detail(arguments)
    if detailed and arguments.hardware is None:
        raise UsageError(f"{detailed} is a prediction for a kind of GPU; name it with --hardware")
    if arguments.experiment is None:
        if not detailed and not asks_question(arguments):
            raise UsageError("give an experiment file, or --model, --seq-len and --gpus")
        if arguments.scale is not None:
            raise UsageError("--scale belongs to an experiment file; name one")
        return question(arguments)
    if asks_question(arguments):
        if not arguments.experiment.exists():
            raise UsageError(
                f"there is no file {shown_value(str(arguments.experiment))}; lists have commas and no spaces, such as "
                "--seq-len 16k,64k"
            )
        raise UsageError(
            f"{shown_value(str(arguments.experiment))} says what to plan, so --model, --method, --seq-len, --gpus and "
            "--task have no meaning beside it; use --set, such as --set model=7b"
        )
    return chosen_experiment(arguments)


def _runs(row: dict[str, Any]) -> bool:
    """Whether a trial can run, and is not predicted to be too large."""
    return bool(row["can_run"]) and row.get("predicted_to_fit") is not False


def _cost(cost: Cost, rows: list[dict[str, Any]]) -> str:
    """What the trials that are predicted to fit take, one after another."""
    if not cost.trials:
        can_run = [row for row in rows if row["can_run"]]
        if not any(map(_runs, can_run)):
            return f"None of them {'is predicted to fit' if can_run else 'can run'}, so no time is added up"
        return (
            "No time is predicted for any of them; predictions are for trials in bf16 that can run and fit, of the "
            "methods in docs/plan.md, of kernels made for GPUs (head dims up to 256) and of other tasks than linear"
        )
    wall = f"{cost.seconds / 60:,.1f} min" if cost.seconds < 7200 else f"{cost.seconds / 3600:,.1f} h"
    more = f"; {cost.unknown} further trials have no prediction" if cost.unknown else ""
    return f"One after another they take about {wall} and {cost.gpu_hours:,.2f} GPU-hours{more}"


def _too_large(rows: list[dict[str, Any]], memory_gib: float) -> list[str]:
    """A sentence for each size of room that trials are predicted not to fit."""
    from engine.checkpoint.planning.plan import ALLOCATED_WITHIN, NOTHING_FITS
    from harness.report.tables.table import significant

    beyond: dict[tuple[float, bool], list[dict[str, Any]]] = {}
    for row in rows:
        if row["can_run"] and row["predicted_to_fit"] is False:
            tried = str(row.get("checkpoint_plan")).startswith(NOTHING_FITS)  # by the planner
            beyond.setdefault((row["gpu_room_gib"], tried), []).append(row)
    further = "further " if any(map(_runs, rows)) else ""
    found = []
    for (room, tried), large in sorted(beyond.items()):
        where, more = f"a GPU has {room:g} GiB", "GPUs with more memory"
        if room != memory_gib:
            where, more = f"the setting memory leaves {room:g} GiB", "a larger setting memory"
        trials = counted(len(large), f"{further}trial")
        if tried:
            found.append(
                f"For {trials} nothing fits that the planner may choose, where {where}; take more GPUs, a shorter "
                f"sequence or {more}"
            )
            continue
        least = min(row["predicted_gpu_gib"] for row in large)
        found.append(
            f"{trials} would hold {significant(3)(least)} GiB of tensors or more by this prediction, which may be "
            f"{ALLOCATED_WITHIN:.0%} too low, where {where}; docs/memory.md has settings that need less"
        )
    return found


def _print_table(rows: list[dict[str, Any]], where: str, rounds: int) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from harness.base.terminal import print_table, stdout_console

    # Settings that all trials share are printed once, above the table, which then fits a terminal; ids are in --json.
    left_out = {
        "trial_id",
        "can_run",
        "reason",
        "predicted_to_fit",
        "gpu_room_gib",
        "planned",
        "checkpoint_plan",
        "from_table",
        "by_hand",
        "notes",
    }
    left_out |= {name for row in rows for name in row.get("from_table", ())}  # a line each, below
    left_out |= {name for name in (rows[0] if rows else ()) if all(row[name] is None for row in rows)}
    if all(row["world_size"] == row["cp_size"] for row in rows):
        left_out.add("world_size")
    settings = [name for name in (rows[0] if rows else ()) if name not in left_out]
    varying = [name for name in settings if len({row[name] for row in rows}) > 1]
    shared = [f"{name} {_cell(name, rows[0][name])}" for name in settings if name not in varying]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in varying:
        numeric = all(isinstance(row[name], int | float) for row in rows)
        table.add_column(name, justify="right" if numeric else "left", no_wrap=True)
    plans: dict[object, str] = {}  # with a letter each: sentences are too wide for a column
    if planning := any(row.get("checkpoint_plan") for row in rows):
        table.add_column("plan", no_wrap=True)
    table.add_column("runs", no_wrap=True)
    reasons: dict[object, int] = {}  # numbered, because many trials often have the same reason
    for row in rows:
        if row["can_run"] and row.get("predicted_to_fit") is False:
            verdict = Text("too large?", style="yellow")
        elif row["can_run"]:
            verdict = Text("yes", style="green")
        else:
            verdict = Text(f"no ({reasons.setdefault(row['reason'], len(reasons) + 1)})", style="yellow")
        cells = [Text(_cell(name, row[name])) for name in varying]
        if planning:
            words = row.get("checkpoint_plan")
            cells.append(Text(plans.setdefault(words, _letters(len(plans))) if words else ""))
        table.add_row(*cells, verdict)
    console = stdout_console()
    if shared:
        console.print(f"In all trials: {', '.join(shared)}", markup=False, highlight=False)
    print_table(console, table)
    for line in origin_lines(rows):
        console.print(line, markup=False, highlight=False)
    for words, letters in plans.items():
        console.print(f"({letters}) checkpoint auto: {words}", markup=False, highlight=False)
    for reason, number in reasons.items():
        console.print(f"({number}) {reason}", markup=False, highlight=False)
    runnable = sum(map(_runs, rows))
    often = "" if rounds == 1 else f", in {rounds} rounds"
    console.print(f"{counted(len(rows), 'trial')}, {runnable} can run on {where}{often}", markup=False, highlight=False)


def origin_lines(rows: Sequence[Row]) -> list[str]:
    """For each method that settings were filled for, which came from the table and which from the experiment."""
    from harness.report.results import cell

    lines: list[str] = []
    for row in rows:
        if "from_table" not in row:
            continue
        filled = ", ".join(f"{name} {cell(value)}" for name, value in row["from_table"].items())
        line = f"{row['settings']} of {row['method']}, from baselines/settings.yaml: {filled or 'no setting'}"
        if row["by_hand"]:
            line += f"; by hand: {', '.join(row['by_hand'])}"
        lines += [line, *(f"  note: {note}" for note in row["notes"])]
    return list(dict.fromkeys(lines))


def _letters(number: int) -> str:
    """a to z, then aa, ab, ... for 0, 1, ..."""
    first, last = divmod(number, 26)
    return (_letters(first - 1) if first else "") + chr(ord("a") + last)


def _cell(name: str, value: object) -> str:
    from harness.base.lengths import format_length
    from harness.report.tables.table import significant

    if name == "seq_len" and isinstance(value, int):
        return format_length(value)
    if value is None:
        return ""
    return significant(3)(value) if isinstance(value, float) else str(value)


COMMAND = PlanCommand()
