"""`burst plan`: the trial matrix, with the reason for every trial that cannot run. Starts nothing."""

from __future__ import annotations

import argparse
import json
import sys

from harness.cluster_arguments import add_cluster_arguments
from harness.errors import UsageError
from harness.experiment_arguments import add_experiment_arguments, chosen_experiment


class Plan:
    help = "print the trials of an experiment and why some cannot run; starts nothing"
    forwards = False

    def configure(self, parser: argparse.ArgumentParser) -> None:
        add_experiment_arguments(parser)
        add_cluster_arguments(
            parser,
            nodes_help="inventory or list of hosts: plan for what burst run --nodes would have of them now",
        )
        parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")

    def run(self, arguments: argparse.Namespace) -> int:
        from harness.machine import discover
        from harness.plan import nothing_can_run, plan, plan_table

        experiment = chosen_experiment(arguments)
        if arguments.nodes:
            from harness.launch.cluster import planned_machine

            machine = planned_machine(arguments, _say)
            where = f"the nodes ({machine.nodes} x {machine.node_ranks} ranks)"
        else:
            machine, where = discover(), "this machine"
        trials = plan(experiment, machine)
        rows = plan_table(trials, machine if arguments.nodes else None)
        if arguments.json:
            print(json.dumps(rows, indent=1))
        else:
            _print_table(rows, where)
        if problem := nothing_can_run(trials):
            raise UsageError(problem)
        return 0


def _print_table(rows: list[dict[str, object]], where: str) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from harness.terminal import print_table, stdout_console

    # What all trials share is said once above the table, which then fits a terminal; ids are in --json.
    left_out = {"trial_id", "can_run", "reason"}
    if all(row["world_size"] == row["cp_size"] for row in rows):
        left_out.add("world_size")
    settings = [name for name in (rows[0] if rows else ()) if name not in left_out]
    varying = [name for name in settings if len({row[name] for row in rows}) > 1]
    shared = [f"{name} {_cell(name, rows[0][name])}" for name in settings if name not in varying]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in varying:
        numeric = all(isinstance(row[name], int | float) for row in rows)
        table.add_column(name, justify="right" if numeric else "left", no_wrap=True)
    table.add_column("runs", no_wrap=True)
    reasons: dict[object, int] = {}  # numbered, because one reason often holds for many trials and is a sentence long
    for row in rows:
        if row["can_run"]:
            verdict = Text("yes", style="green")
        else:
            verdict = Text(f"no ({reasons.setdefault(row['reason'], len(reasons) + 1)})", style="yellow")
        table.add_row(*(Text(_cell(name, row[name])) for name in varying), verdict)
    console = stdout_console()
    if shared:
        console.print(f"In all trials: {', '.join(shared)}", markup=False, highlight=False)
    print_table(console, table)
    for reason, number in reasons.items():
        console.print(f"({number}) {reason}", markup=False, highlight=False)
    runnable = sum(bool(row["can_run"]) for row in rows)
    console.print(f"{len(rows)} trials, {runnable} can run on {where}", highlight=False)


def _cell(name: str, value: object) -> str:
    from harness.lengths import format_length
    from harness.tables import significant

    if name == "seq_len" and isinstance(value, int):
        return format_length(value)
    return significant(3)(value) if isinstance(value, float) else str(value)


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


COMMAND = Plan()
