"""`burst doctor`: the devices, kernels, launchers and methods that this machine can use, with a reason for each no."""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from cluster.files.progress import Progress

if TYPE_CHECKING:
    from harness.machine.this_machine import Machine


class DoctorCommand:
    help = "say what this machine can run: devices, kernels, launchers, methods, and why not"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")

    def run(self, arguments: argparse.Namespace) -> int:
        with Progress("looking at the devices, kernels and methods of this machine", quiet=arguments.json):
            findings = examine()
        if arguments.json:
            print(json.dumps([asdict(finding) for finding in findings], indent=1))
            return 0

        from rich import box
        from rich.table import Table
        from rich.text import Text

        from harness.base.terminal import print_table, stdout_console

        print(verdict(findings))
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


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorLine:
    """One line of `burst doctor`."""

    section: str
    name: str
    ok: bool
    sentence: str


def verdict(lines: Sequence[DoctorLine]) -> str:
    """What this machine is good for, in one sentence of what was found."""
    [gpu] = [line for line in lines if (line.section, line.name) == ("devices", "gpu")]
    kernels = [line for line in lines if line.section == "kernels"]  # in order of preference
    fastest, chosen = kernels[0], next(line for line in kernels if line.ok)
    if gpu.sentence.startswith("none"):
        return f"burst plans here, and runs small models on the CPU (kernel {chosen.name}): there is no GPU."
    if not gpu.ok:
        return f"burst cannot use the GPUs of this machine: {gpu.sentence}."
    if fastest.ok:
        return f"burst runs here with its fastest kernel, {fastest.name}, on {gpu.sentence}."
    return f"burst runs here on {gpu.sentence}, with kernel {chosen.name}; {fastest.sentence}."


def examine() -> list[DoctorLine]:
    """All findings, in sections. Imports torch, which lists the kernels that it was built with."""
    from harness.machine.this_machine import discover

    machine = discover()
    return [*_software(), *_devices(machine), *_kernels(), *_loss_kernels(machine), *_launchers(), *_methods(machine)]


def _software() -> list[DoctorLine]:
    import torch

    from harness.records.provenance import commit, version

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return [
        DoctorLine(section="software", name="burst", ok=True, sentence=f"{version()}, commit {commit() or 'unknown'}"),
        DoctorLine(section="software", name="python", ok=True, sentence=platform.python_version()),
        DoctorLine(section="software", name="torch", ok=True, sentence=f"{torch.__version__}, {build}"),
    ]


def _devices(machine: Machine) -> list[DoctorLine]:
    import torch

    findings = [
        DoctorLine(
            section="devices",
            name="cpu",
            ok=True,
            sentence=f"{machine.cores} cores, {machine.memory_gib:g} GiB of memory, up to {machine.max_ranks} ranks"
            if machine.device == "cpu"
            else f"{machine.cores} cores, {machine.memory_gib:g} GiB of memory",
        )
    ]
    if machine.gpu_problem:
        findings.append(DoctorLine(section="devices", name="gpu", ok=False, sentence=machine.gpu_problem))
    elif not machine.gpu_count:
        findings.append(
            DoctorLine(section="devices", name="gpu", ok=False, sentence="none; trials run on the CPU with Gloo")
        )
    elif not torch.cuda.is_available():
        sentence = (
            f"{machine.gpu_count} x {machine.gpu_name}, but this torch ({torch.__version__}) cannot use them; "
            "install its CUDA build"
        )
        findings.append(DoctorLine(section="devices", name="gpu", ok=False, sentence=sentence))
    else:
        sentence = f"{machine.gpu_count} x {machine.gpu_name}, {machine.gpu_memory_gib:g} GiB each"
        findings.append(DoctorLine(section="devices", name="gpu", ok=True, sentence=sentence))
    return findings


def _kernels() -> list[DoctorLine]:
    from engine.attention.kernels import available

    return [DoctorLine(section="kernels", name=name, ok=ok, sentence=sentence) for name, ok, sentence in available()]


def _loss_kernels(machine: Machine) -> list[DoctorLine]:
    from engine.lm_head import loss_kernel

    lines = loss_kernel.available(machine.device)
    return [DoctorLine(section="loss kernels", name=name, ok=ok, sentence=sentence) for name, ok, sentence in lines]


def _launchers() -> list[DoctorLine]:
    from importlib import metadata

    local = DoctorLine(section="launchers", name="local", ok=True, sentence="processes on this machine, without Ray")
    if importlib.util.find_spec("ray") is None:
        unsupported_reason = "for several machines; Ray is not installed: pip install 'burst-harness[ray]'"
        return [local, DoctorLine(section="launchers", name="ray", ok=False, sentence=unsupported_reason)]
    sentence = f"for several machines; Ray {metadata.version('ray')}"
    return [local, DoctorLine(section="launchers", name="ray", ok=True, sentence=sentence)]


def _methods(machine: Machine) -> list[DoctorLine]:
    """Every method: a native one needs only the engine, a foreign system its installation."""
    from engine.method import unavailable_reason
    from harness.spec.methods import all_methods

    findings = []
    for name, method in all_methods().items():
        reason = unavailable_reason(method, machine.device)
        findings.append(
            DoctorLine(
                section="methods", name=name, ok=reason is None, sentence=reason or f"{method.system} ({method.source})"
            )
        )
    return findings


COMMAND = DoctorCommand()
