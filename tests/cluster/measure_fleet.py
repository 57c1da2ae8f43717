"""How long `check_nodes.py` takes for many nodes: `python -m tests.cluster.measure_fleet`. Not a test.

Each node is an address of its own on loopback, behind a real sshd. What answers there is not the probes, of which
hundreds would compete for this machine's cores, but a forced command: it waits as long as a node takes, then prints
what the probes printed once, here, with an nvidia-smi that answers for eight GPUs (outputs/README.md) and the lines of
`GPU_NODE`. So what is measured is ours: connections, sending, reading, judging and printing, of the real program with
all of its checks.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from cluster import checks
from cluster.health.nodes import check_nodes
from cluster.inventory.file import load_inventory
from cluster.inventory.hosts import Host, this_machine
from cluster.inventory.nodes import InventoryNode
from cluster.transport.reach import LocalRunner
from cluster.transport.runner import Completed, Runner
from tests.cluster.gpu_outputs import BUSES, install_node
from tests.cluster.loopback_sshd import LoopbackSshd, running_sshd

ROOT = Path(__file__).parents[2]
PER_NETWORK = 250  # addresses 127.0.N.1 to 127.0.N.250
# Of a healthy node, independent of the disks and memory of the machine that answers for all.
SITE = {
    "gpus": {"count": 8, "model": "H200"},
    "gpu_memory": {"tries": 1},
    "host_memory": {"warn_percent": 100},
    "disks": [{"path": "/", "warn_percent": 100, "fail_percent": 100}],
}
# What only a machine with GPUs could print, by probe.
GPU_NODE = {
    "pcie": [*(f"gpu 0000:{bus}:00.0|16|16|32.0 GT/s PCIe|32.0 GT/s PCIe" for bus in BUSES), "end"],
    "fabric_manager": ["service active", "init systemd", "process yes"],
}
# Reads the script it is sent, up to its end, for the mark that its lines must begin with; the mark also stands in for
# the fabric's identity, so that no node prints quite what another does.
REPLAY = """\
awk -v answer={answer} -v seconds={seconds} '
match($0, /[0-9a-f]+ "\\$1" "\\$line"/) {{ mark = substr($0, RSTART, index(substr($0, RSTART), " ") - 1) }}
function clock(name,   now) {{
    "date +%s.%N" | getline now
    close("date +%s.%N")
    print mark, name, now
}}
END {{
    clock("@begin")
    fflush()
    system("sleep " seconds)
    while ((getline line < answer) > 0) {{
        sub(/00000000-0000-0000-0000-000000000000/, mark, line)
        print mark, line
    }}
    clock("@end")
}}'
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One run of the program over so many nodes."""

    nodes: int
    seconds: float
    own_cpu_seconds: float  # of the program and nothing else, its start included
    verdicts: Counter[str]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table; 0 when every node answered and is well, in every run."""
    parser = argparse.ArgumentParser(prog="measure_fleet", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 64, 200, 500])
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each node takes to answer")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        answer = folder / "answer"
        answer.write_text(recorded_answer(folder))
        replay = folder / "replay"
        replay.write_text("#!/bin/sh\n" + REPLAY.format(answer=shlex.quote(str(answer)), seconds=arguments.seconds))
        replay.chmod(0o755)
        addresses = [address(number) for number in range(max(arguments.nodes))]
        print("| nodes | seconds | our own processor time | verdicts | load average |\n|---|---|---|---|---|")
        unwell = 0
        with running_sshd(folder, addresses=addresses, options=f"\nForceCommand {replay}\n") as server:
            for count in arguments.nodes:
                row = measure(server, folder, count)
                unwell += row.verdicts["unknown"] + row.verdicts["fail"]
                found = ", ".join(f"{times} {level}" for level, times in sorted(row.verdicts.items()))
                seconds = f"{row.seconds:.1f} s | {row.own_cpu_seconds:.1f} s"
                print(f"| {row.nodes} | {seconds} | {found} | {os.getloadavg()[0]:.0f} |", flush=True)
    return 1 if unwell else 0


def measure(server: LoopbackSshd, folder: Path, count: int) -> Row:
    """Run the program over the first `count` nodes."""
    inventory = write_inventory(folder / f"{count}.yaml", count, server)
    command = [sys.executable, "check_nodes.py", str(inventory), "--known-hosts", str(server.known_hosts)]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run([*command, "--json", "--no-history"], cwd=ROOT, capture_output=True, text=True, check=False)
    seconds, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    if len(reports) != count:
        raise SystemExit(f"{len(reports)} of {count} nodes were reported: {done.stderr.strip()}")
    for name, check in reports[0]["checks"].items():
        if check["verdict"] in ("fail", "unknown"):
            print(f"{reports[0]['node']}: {name}: {check['summary']}", file=sys.stderr)
    return Row(
        nodes=count,
        seconds=seconds,
        own_cpu_seconds=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        verdicts=Counter(report["verdict"] for report in reports),
    )


def address(number: int) -> str:
    """Of the node of this number, from 0."""
    return f"127.0.{1 + number // PER_NETWORK}.{1 + number % PER_NETWORK}"


def write_inventory(path: Path, count: int, server: LoopbackSshd) -> Path:
    """An inventory with ranges, as a user writes it."""
    nodes = [
        {
            "hosts": f"n[{first + 1}-{min(first + PER_NETWORK, count)}]",
            "address": f"127.0.{1 + first // PER_NETWORK}.[1-{min(PER_NETWORK, count - first)}]",
        }
        for first in range(0, count, PER_NETWORK)
    ]
    login = {"port": server.port, "key": str(server.key)}
    path.write_text(json.dumps({"name": "fleet", "ssh": login, **SITE, "nodes": nodes}))  # JSON is YAML
    return path


def recorded_answer(folder: Path) -> str:
    """What all probes print on this machine beside eight GPUs, each line behind its probe's name."""
    (folder / "probed.yaml").write_text(json.dumps({**SITE, "nodes": ["here"]}))
    (here,) = load_inventory(folder / "probed.yaml").nodes
    printed: list[str] = []

    def connect(host: Host, seconds: float) -> AbstractContextManager[Runner]:
        return nullcontext(_Recorder(printed))

    install_node(_nvidia_smi_in(folder / "gpus"), "h200")
    list(check_nodes([InventoryNode(host=this_machine(), site=here.site)], connect, checks.discover(), 120.0))
    said = [line.partition(" ")[2] for line in printed[0].splitlines()]
    lines = [line for line in said if line.partition(" ")[0] not in ("@begin", "@end", *GPU_NODE)]
    lines += [f"{name} {line}" for name, shown in GPU_NODE.items() for line in (*shown, "exit 0")]
    return "".join(f"{line}\n" for line in lines)


class _Recorder(LocalRunner):
    """This machine, with what it printed kept."""

    def __init__(self, printed: list[str]) -> None:
        self._printed = printed

    def run(self, command: Sequence[str], **given: object) -> Completed:
        completed = super().run(command, **given)  # type: ignore[arg-type]
        self._printed.append(completed.stdout)
        return completed


def _nvidia_smi_in(folder: Path) -> Callable[[str], Path]:
    def install(body: str) -> Path:
        folder.mkdir()
        program = folder / "nvidia-smi"
        program.write_text(f"#!/bin/sh\nSTATE={shlex.quote(str(folder))}\n{body}\n")
        program.chmod(0o755)
        os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
        return folder

    return install


if __name__ == "__main__":
    sys.exit(main())
