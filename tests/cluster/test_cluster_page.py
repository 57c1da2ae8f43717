"""The look-up tables of docs/cluster.md are those of the code: checks with thresholds, exit codes, ports, sections."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from cluster.checks import discover
from cluster.inventory.site import Site
from cluster.probing.verdict import EXIT_CODES
from cluster.profiles import load_profiles
from harness.launch.ports import usable_ports

PAGE = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text(encoding="utf-8")
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
