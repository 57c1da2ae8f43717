"""The findings of `burst doctor`: the software, devices, kernels, launchers and methods of this machine."""

from __future__ import annotations

import importlib.util
import platform
from dataclasses import dataclass
from importlib import metadata

from engine.lm_head import loss_kernel
from engine.method import unavailable_reason
from harness.machine.this_machine import Machine, discover
from harness.records.provenance import commit, version
from harness.spec.methods import all_methods


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorLine:
    """One line of `burst doctor`."""

    section: str
    name: str
    ok: bool
    sentence: str


def examine() -> list[DoctorLine]:
    """All findings, in sections. Imports torch, which lists the kernels that it was built with."""
    machine = discover()
    return [*_software(), *_devices(machine), *_kernels(), *_loss_kernels(machine), *_launchers(), *_methods(machine)]


def _software() -> list[DoctorLine]:
    import torch

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
    lines = loss_kernel.available(machine.device)
    return [DoctorLine(section="loss kernels", name=name, ok=ok, sentence=sentence) for name, ok, sentence in lines]


def _launchers() -> list[DoctorLine]:
    local = DoctorLine(section="launchers", name="local", ok=True, sentence="processes on this machine, without Ray")
    if importlib.util.find_spec("ray") is None:
        unsupported_reason = "for several machines; Ray is not installed: pip install 'burst-harness[ray]'"
        return [local, DoctorLine(section="launchers", name="ray", ok=False, sentence=unsupported_reason)]
    sentence = f"for several machines; Ray {metadata.version('ray')}"
    return [local, DoctorLine(section="launchers", name="ray", ok=True, sentence=sentence)]


def _methods(machine: Machine) -> list[DoctorLine]:
    """Every method: a native one needs only the engine, a foreign system its installation."""
    findings = []
    for name, method in all_methods().items():
        reason = unavailable_reason(method, machine.device)
        findings.append(
            DoctorLine(
                section="methods", name=name, ok=reason is None, sentence=reason or f"{method.system} ({method.source})"
            )
        )
    return findings
