"""`burst doctor`: the devices, kernels, launchers and methods that this machine can use, with a reason for each no."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict


class DoctorCommand:
    help = "say what this machine can run: devices, kernels, launchers, methods, and why not"
    forwards = False

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")

    def run(self, arguments: argparse.Namespace) -> int:
        from harness.machine.doctor import examine

        findings = examine()
        if arguments.json:
            print(json.dumps([asdict(finding) for finding in findings], indent=1))
            return 0

        from rich import box
        from rich.table import Table
        from rich.text import Text

        from harness.base.terminal import print_table, stdout_console

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("", "name", "", "what was found"):
            table.add_column(name, overflow="fold", no_wrap=name != "what was found")
        section = ""
        for finding in findings:
            mark = Text("yes", style="green") if finding.ok else Text("no", style="yellow")
            heading = finding.section if finding.section != section else ""
            table.add_row(Text(heading, style="bold"), Text(finding.name), mark, Text(finding.sentence))
            section = finding.section
        print_table(stdout_console(), table)
        return 0


COMMAND = DoctorCommand()
