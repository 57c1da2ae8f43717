"""`burst setup calibrate`: measure this machine's kernels and links, and write them as a hardware file."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path

from cluster.files.errors import counted
from cluster.files.progress import Progress
from harness.base.errors import UsageError

TIMEOUT_SECONDS = 900.0


class CalibrateCommand:
    help = "measure GEMMs, attention kernels, memory and links of this machine; writes a hardware file"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--out", type=Path, metavar="FILE",
            help="hardware file to write (default: results/runs/hardware/<gpu>.yaml); `burst plan --hardware` "
            "takes it",
        )  # fmt: skip
        parser.add_argument(
            "--ranks", type=int, metavar="N", help="processes that measure at once (default: one per GPU; 2 on a CPU)"
        )
        parser.add_argument(
            "--model", action="append", metavar="NAME",
            help="model whose matrix products are measured; may be repeated (default: 1b and 7b; tiny on a CPU)",
        )  # fmt: skip
        parser.add_argument(
            "--across", type=Path, metavar="RUN",
            help="a run over several nodes: the link between nodes, as its trials measured it, goes into "
            "the file",
        )  # fmt: skip
        parser.add_argument(
            "--timeout", type=float, default=TIMEOUT_SECONDS, metavar="SECONDS",
            help=f"end it after so long (default: {TIMEOUT_SECONDS:g})",
        )  # fmt: skip

    def run(self, arguments: argparse.Namespace) -> int:
        from harness.base.writable import make_writable
        from harness.machine.this_machine import discover
        from harness.metrics.hardware import load_hardware
        from harness.predict.calibration import hardware_document, links_across, measure, write_hardware_file
        from harness.spec.models import named_model

        machine = discover()
        cpu = machine.device == "cpu"
        ranks = arguments.ranks if arguments.ranks is not None else 2 if cpu else machine.gpu_count
        if not 1 <= ranks <= machine.max_ranks:
            raise UsageError(f"--ranks is {ranks}; this machine takes 1 to {machine.max_ranks}")
        if arguments.timeout <= 0:
            raise UsageError(f"--timeout is {arguments.timeout:g}; give a number of seconds above 0")
        models = [named_model(name) for name in arguments.model or (["tiny"] if cpu else ["1b", "7b"])]
        slug = re.sub(r"[^a-z0-9]+", "_", (machine.gpu_name or "cpu").casefold()).strip("_")
        path = arguments.out or Path("results/runs/hardware") / f"{slug}.yaml"
        if path.exists():
            raise UsageError(f"{path} exists; give --out another name, or move that file away")
        across = links_across(arguments.across) if arguments.across else {}
        make_writable(path.parent)
        with Progress(f"measuring matrix products, attention, memory and links on {counted(ranks, 'rank')}"):
            found = measure(ranks, machine.device, models, timeout_seconds=arguments.timeout)
        found = replace(found, figures={**found.figures, **across})
        document = hardware_document(
            found, memory_gib=machine.memory_gib if cpu else machine.gpu_memory_gib, gpus_per_node=ranks
        )
        written = write_hardware_file(path, document)
        load_hardware(written)  # what was written can be read
        for name, figure in found.figures.items():
            print(
                f"{name:32} {figure.median:10.4g} {figure.unit:8} ({figure.least:.4g} to {figure.largest:.4g}, "
                f"{figure.samples} samples)"
            )
        if ranks == 1:
            print("Links inside the host were not measured: there was one rank.")
        if not across:
            print("The link between nodes was not measured: give --across a run over several nodes.")
        print(f"Hardware file: {written}")
        return 0
