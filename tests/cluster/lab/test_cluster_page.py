"""docs/cluster.md: its look-up tables are those of the code, and its six commands are all that three hosts need."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from cluster.checks import discover
from cluster.inventory.site import Site
from cluster.probing.verdict import EXIT_CODES
from cluster.profiles import load_profiles
from harness.launch.ports import usable_ports
from harness.records.record import read_record
from tests.hosts import lab as lab_module
from tests.hosts.lab import Lab, open_lab
from tests.patience import AMPLE
from tests.processes import command_of
from tests.programs import shell_program

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
OF_ALL_NODES = {"reachability", "clock", "drift", "history"}  # judged apart from the files in cluster/checks


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    """Cells of the section's table, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_page_lists_every_check_once() -> None:
    listed = [row[0] for row in rows("All checks")]
    assert len(listed) == len(set(listed))
    assert set(listed) == set(discover()) | OF_ALL_NODES


def test_thresholds_on_the_page_are_those_of_the_checks() -> None:
    fails, warns = ({row[0]: row[column] for row in rows("All checks")} for column in (1, 2))
    site = Site()
    (disk,) = site.disks
    profiles = load_profiles()
    clocks, limits = profiles.models["NVIDIA H200"].clocks, profiles.limits
    said = [
        (warns["clock"], f"more than {limits.clock_warn_seconds:g} s"),
        (
            warns["gpu_memory"],
            f"{site.gpu_memory.one_gpu_mib:g} MiB on one GPU or {site.gpu_memory.all_gpus_mib:g} MiB",
        ),
        (fails["gpu_clocks"], f"{clocks.fail_below_mhz} MHz"),
        (warns["gpu_clocks"], f"{clocks.warn_below_mhz} MHz"),
        (fails["link_flaps"], f"{limits.flaps_fail} losses"),
        (warns["memlock"], f"{limits.memlock_least_gib:g} GiB"),
        (warns["shared_memory"], f"{limits.shm_gib_per_gpu:g} GiB"),
        (warns["host_memory"], f"{site.host_memory.warn_percent:g}%"),
        (fails["disk"], f"{disk.fail_percent:g}%"),
        (warns["disk"], f"{disk.warn_percent:g}%"),
        (warns["cpu_idle"], f"{limits.idle_warn_above_us} us"),
    ]
    assert [wanted for cell, wanted in said if wanted not in cell] == []


def test_verdicts_have_the_exit_codes_of_the_page() -> None:
    assert {row[0]: int(row[1]) for row in rows("Check the nodes")} == EXIT_CODES


def test_the_page_lists_every_section_of_a_site() -> None:
    listed = {name for row in rows("All sections of a site") for name in re.findall(r"`(\w+)`", row[0])}
    assert listed == {field.name for field in fields(Site)} - {"name"}


def test_ports_on_the_page_are_the_defaults() -> None:
    ray, table = Site().ray, section("Security")
    assert f"| {ray.head_port} |" in table
    assert f"| {ray.dashboard_port} |" in table
    assert f"| {ray.worker_port_first} to {ray.worker_port_last} |" in table
    named = set(re.findall(r"`(\w+_port\w*)`", table))
    assert named == {field.name for field in fields(ray) if "_port" in field.name}
    free = usable_ports("32768 60999", "")  # Linux' own range of ports
    above = next(port for port in free if port > 60999)
    assert f"{free[0]} to 32767 or {above} to {free[-1]}" in table


@pytest.mark.hosts
def test_a_newcomer_types_the_six_commands_of_the_page_on_three_hosts(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    if reason := lab_module.unavailable():
        pytest.skip(reason)
    inventory, commands = blocks("Six commands")[1:]
    lines = commands.splitlines()
    assert len(lines) == 6
    with open_lab(3, tmp_path) as lab:
        folder = tmp_path / "newcomer"
        (folder / "home").mkdir(parents=True)
        (folder / "experiments").symlink_to(ROOT / "experiments")
        (folder / "lab.yaml").write_text(yaml.safe_dump(of_these_hosts(yaml.safe_load(inventory), lab)))
        shell_program(folder / "burst", f'exec {sys.executable} -m harness "$@"')
        environment = os.environ | {
            "HOME": str(folder / "home"), "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
            "COLUMNS": "200",
        }  # fmt: skip
        for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
            environment.pop(name, None)

        def typed(line: str) -> tuple[int, str]:
            done = subprocess.run(
                ["sh", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, timeout=3 * AMPLE
            )
            assert "Traceback" not in done.stderr, done.stderr
            return done.returncode, done.stdout + done.stderr

        nodes, check, up, run, status, down = lines
        code, said = typed(nodes)
        assert code == 0, said
        assert all(f"root@{host.address}" in said for host in lab.hosts), said
        code, said = typed(check)
        assert code in (EXIT_CODES["ok"], EXIT_CODES["warn"]), said  # this machine may have a fault of its own
        assert "3 nodes of lab" in said, said
        assert "3 usable" in said, said
        code, said = typed(up)
        assert (code, "3 nodes are up, head lab1" in said) == (0, True), said
        code, said = typed(run)
        assert code == 0, said
        records = [read_record(path) for path in folder.glob("results/runs/quickstart/trials/*/record.json")]
        ran = [record for record in records if record.status == "ok"]
        assert {len(record.hosts) for record in ran} == {1, 2}, said  # four ranks are more than these hosts have
        assert {record.status for record in records} <= {"ok", "refused"}, said
        assert (folder / "results/runs/quickstart/report.html").stat().st_size > 1000
        code, said = typed(status)
        assert (code, f"{len(ran)} ok" in said) == (0, True), said
        code, said = typed(down)
        assert (code, "3 nodes ended; no process or file of burst is left" in said) == (0, True), said
        left = [command_of(pid) for host in lab.hosts for pid in lab.processes(host)]
        assert [line for line in left if line and not line.startswith("sshd")] == []
    assert lab.left_behind() == []


def blocks(title: str) -> list[str]:
    """The indented blocks of a section, as it shows them."""
    return re.findall(r"^```\w*\n(.*?)\n```$", section(title), re.DOTALL | re.MULTILINE)


def of_these_hosts(inventory: dict[str, object], lab: Lab) -> dict[str, object]:
    """The inventory of the page, its values replaced by those of the lab, key by key."""
    ours: dict[str, object] = {
        "site": {
            "name": "lab", "host_memory": {"warn_percent": 100}, "ray": {"object_store_gib": 0.1},
            "disks": [{"path": "/", "warn_percent": 99.5, "fail_percent": 99.5}],
        },
        "ssh": {"user": "root", "key": str(lab.key)},
        "software": {"python": sys.executable, "folder": str(ROOT)},
        "nodes": [{"hosts": host.name, "address": host.address} for host in lab.hosts],
    }  # fmt: skip
    assert list(ours) == list(inventory)
    return ours
