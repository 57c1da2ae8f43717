"""Nodes with several GPUs, made of the outputs of one (see outputs/README.md)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from cluster.checks import Check
from cluster.inventory.site import GpuExpectation, Site
from cluster.probing.probe import Output
from cluster.probing.verdict import Verdict
from cluster.profiles import Board, default_profiles
from cluster.transport.reach import LocalRunner
from tests.patience import AMPLE

OUTPUTS = Path(__file__).parent / "outputs"
MODELS = ("a100", "a800", "h100", "h200")
BUSES = ("07", "0F", "47", "4E", "87", "90", "B7", "BD")
NAMES = {
    "a100": "NVIDIA A100-SXM4-80GB",
    "a800": "NVIDIA A800-SXM4-80GB",
    "h100": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
}
ANY_SITE = Site()
EIGHT = Site(gpus=GpuExpectation(count=8))
NO_GPUS = Board()
STRANGER = Board(name="NVIDIA L40S", count=8)

Install = Callable[[str], Path]  # puts an nvidia-smi with this shell body on PATH; returns its $STATE


def board(model: str, count: int = 8) -> Board:
    return default_profiles().board(NAMES[model], count)


def report(model: str, broken: Callable[[str], str] = lambda gpu: gpu, count: int = 8) -> str:
    """What nvidia-smi -q prints for `count` GPUs, of which the third is `broken`."""
    text = (OUTPUTS / f"{model}_q.txt").read_text()
    start = text.index("GPU 00000000:")
    gpus = [text[start:].replace("00000000:07:00.0", f"00000000:{BUSES[n]}:00.0") for n in range(count)]
    gpus[min(2, count - 1)] = broken(gpus[min(2, count - 1)])
    return text[:start] + "".join(gpus)


def nvlink(model: str, form: str, broken: Callable[[str], str] = lambda gpu: gpu, count: int = 8) -> str:
    """What nvidia-smi nvlink -s or -e prints for `count` GPUs, of which the third is `broken`."""
    text = (OUTPUTS / f"{model}_nvlink_{form}.txt").read_text()
    gpus = [text.replace("GPU 0:", f"GPU {n}:") for n in range(count)]
    gpus[min(2, count - 1)] = broken(gpus[min(2, count - 1)])
    return "".join(gpus)


def setting(path: str, value: str) -> Callable[[str], str]:
    """Changes one entry of a report, found by the headings above it."""

    def change(text: str) -> str:
        *headings, key = path.split("/")
        at = 0
        for heading in headings:
            at = text.index(f" {heading}", at)
        changed, times = re.subn(rf"(\n +{re.escape(key)} +: ).*", rf"\g<1>{value}", text[at:], count=1)
        assert times == 1, path
        return text[:at] + changed

    return change


def judge(check: Check, text: str, site: Site = ANY_SITE, gpus: Board = NO_GPUS, exit_status: int = 0) -> Verdict:
    return check.judge(Output(text=text, exit_status=exit_status), site, gpus)


def look(check: Check, site: Site = ANY_SITE, **instead: object) -> Output:
    """What the probe of the check prints on this machine; `sys` and the others name a folder in the place of /sys."""
    script = check.probe(site).script
    for path, folder in instead.items():
        script = script.replace(f"/{path}/", f"{folder}/")
    done = LocalRunner().run(["sh", "-c", f"exec 2>&1\n{script}"], deadline_seconds=AMPLE)
    return Output(text=done.stdout, exit_status=done.exit_status)


def install_node(install: Install, model: str, broken: Callable[[str], str] = str, name: str = "") -> Path:
    """Put an nvidia-smi first on PATH that answers for eight GPUs; returns the folder it answers from."""
    state = install(
        'echo "$*" >> $STATE/calls\ncase "$*" in\n'
        "--query-gpu=index,uuid,memory.used*) cat $STATE/memory ;;\n--query-gpu=*) cat $STATE/gpus ;;\n"
        "--query-compute-apps*) ;;\n-q) cat $STATE/report ;;\nnvlink*) cat $STATE/nvlink${2} ;;\nesac"
    )
    rows = [f"{n}, GPU-{n}, 00000000:0{n}:00.0, {name or NAMES[model]}, 580.159.04, 143771" for n in range(8)]
    (state / "gpus").write_text("\n".join(rows) + "\n")
    (state / "memory").write_text("".join(f"{n}, GPU-{n}, 4\n" for n in range(8)))
    (state / "report").write_text(report(model, broken))
    for form in ("s", "e"):
        (state / f"nvlink-{form}").write_text(nvlink(model, form))
    return state
