"""The recipes of docs/cluster.md for checks on a schedule, run: Slurm's program with a scontrol that notes what it is
told, cron's line by a real shell and check."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.probing.verdict import EXIT_CODES
from tests.programs import shell_program

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "examples" / "slurm_health_check.sh"
PAGE = ROOT / "docs" / "cluster.md"
IDLE = "NodeName=gpu01 State=IDLE ThreadsPerCore=1"
DRAINED = IDLE.replace("IDLE", "IDLE+DRAIN") + " Reason={} [root@2026-11-20T12:00:00]"
FINDING = 'NODES CRITICAL - 0 of 1 usable; gpu01: gpus: 7 x NVIDIA "H200" | usable=0;;;0;1'


def told(folder: Path, code: int, state: str) -> list[str]:
    """What the program tells scontrol, when the check ends with this code and the node is in this state."""
    (folder / "bin").mkdir()
    (folder / "state").write_text(state + "\n")
    programs = {
        "burst": f"echo '{FINDING}'; exit {code}",
        "scontrol": f'[ "$1" = show ] && exec cat {folder}/state; printf "%s\\n" "$@" >>{folder}/told',
        "logger": f'printf "%s\\n" "$3" >>{folder}/told',
    }
    for name, body in programs.items():
        shell_program(folder / "bin" / name, body)
    environment = {"PATH": f"{folder}/bin:/usr/bin:/bin", "BURST": f"{folder}/bin/burst", "SLURMD_NODENAME": "gpu01"}
    subprocess.run([PROGRAM], env=environment, check=True)
    found = folder / "told"
    return found.read_text().splitlines() if found.exists() else []


def test_a_failed_check_drains_the_node_with_its_finding(tmp_path: Path) -> None:
    assert told(tmp_path, EXIT_CODES["fail"], IDLE) == [
        "update",
        "NodeName=gpu01",
        "State=DRAIN",
        "Reason=burst check: NODES CRITICAL - 0 of 1 usable; gpu01: gpus: 7 x NVIDIA H200",
    ]


@pytest.mark.parametrize("level", ["ok", "warn"])
def test_a_passed_check_resumes_what_a_failed_one_drained(level: str, tmp_path: Path) -> None:
    drained = DRAINED.format("burst check: NODES CRITICAL")
    assert told(tmp_path, EXIT_CODES[level], drained) == ["update", "NodeName=gpu01", "State=RESUME"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("level", "state"),
    [
        ("ok", IDLE),
        ("warn", IDLE),
        ("ok", DRAINED.format("new DIMM on Monday")),
        ("fail", DRAINED.format("new DIMM on Monday")),
        ("fail", DRAINED.format("burst check: NODES CRITICAL")),
    ],
)
def test_a_node_that_is_well_or_drained_by_somebody_else_is_left_alone(level: str, state: str, tmp_path: Path) -> None:
    assert told(tmp_path, EXIT_CODES[level], state) == []  # type: ignore[index]


@pytest.mark.parametrize("code", [EXIT_CODES["unknown"], 124, 127])
def test_a_check_without_an_answer_neither_drains_nor_resumes(code: int, tmp_path: Path) -> None:
    [said] = told(tmp_path, code, DRAINED.format("burst check: NODES CRITICAL"))
    assert said.startswith(f"the check gave no answer (status {code})")


def test_the_line_for_cron_speaks_up_only_about_faults(tmp_path: Path, roomy_site: Path) -> None:
    [line] = re.findall(r"^\d+ \* \* \* \* burst (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert "%" not in line, "cron would end the command there"
    burst = shell_program(tmp_path / "burst", f'cd {ROOT} && exec {sys.executable} -m harness "$@"')
    full = tmp_path / "full.yaml"
    full.write_text("disks: [{path: /, warn_percent: 0.001, fail_percent: 0.001}]\n")
    for site, speaks in ((roomy_site, False), (full, True)):
        command = line.replace("/opt/burst/.venv/bin/burst", str(burst))
        command = command.replace("/etc/burst/lab.yaml", f"--site {site} --no-history --only disk")
        command = command.replace("/var/www/html/nodes.html", str(tmp_path / "nodes.html"))
        command = command.replace("/run/lock/burst-check", str(tmp_path / "lock"))
        done = subprocess.run(["sh", "-c", command], env=os.environ, capture_output=True, text=True, check=False)
        assert ("disk" in done.stdout, done.stderr) == (speaks, "")
        assert (tmp_path / "nodes.html").exists()
