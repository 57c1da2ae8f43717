"""The host's own checks, on outputs written by us after ps(1), proc(5), df(1) and the kernel's documents."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from cluster.checks import Check
from cluster.checks.host import (
    cpu_governor,
    cpu_idle,
    host_memory,
    host_versions,
    hugepages,
    numa_balancing,
    processes,
    shared_memory,
)
from cluster.inventory.site import HostMemoryLimit, Site
from cluster.probing.verdict import Level
from cluster.profiles import Board
from tests.cluster.gpu_outputs import ANY_SITE, EIGHT, NO_GPUS, board, judge, look

GPUS = board("h200")
MEMORY = "MemTotal:       24689880 kB\nMemFree:        21563104 kB\nMemAvailable:   24258020 kB\nBuffers: 1 kB\n"
STUCK = "stuck D 4242 alice python3\nstuck D 4243 alice python3\nstuck Z 99 bob sh\nend"


def huge(total: int, free: int) -> str:
    pages = f"HugePages_Total:   {total}\nHugePages_Free:    {free}\nHugepagesize:       2048 kB"
    return f"MemTotal:       1056000000 kB\n{pages}\ntransparent always [madvise] never"


def shm(free_kib: int) -> str:
    header = "Filesystem     1024-blocks  Used Available Capacity Mounted on"
    return f"{header}\ntmpfs  {free_kib + 5} 5 {free_kib}  1% /dev/shm"


@pytest.mark.parametrize(
    ("check", "text", "gpus", "level", "words"),
    [
        (cpu_governor, "    128 performance\nend", GPUS, "ok", "128 x performance"),
        (cpu_governor, "    120 performance\n      8 schedutil\nend", GPUS, "warn", "120 x performance, 8 x schedutil"),
        (cpu_governor, "    128 powersave\nend", GPUS, "warn", "cpupower frequency-set -g performance"),
        (cpu_governor, "    128 powersave\nend", NO_GPUS, "ok", ""),
        (cpu_governor, "end", GPUS, "ok", "hypervisor"),
        (numa_balancing, "numa_balancing 0", GPUS, "ok", "off"),
        (numa_balancing, "numa_balancing absent", GPUS, "ok", "has none"),
        (numa_balancing, "numa_balancing 1", GPUS, "warn", "kernel.numa_balancing=0"),
        (numa_balancing, "numa_balancing 2", GPUS, "warn", ""),
        (numa_balancing, "numa_balancing 1", NO_GPUS, "ok", "matters to no GPU"),
        (numa_balancing, "numa_balancing ", GPUS, "unknown", ""),
        (cpu_idle, "  128 state 1|0|C1\n  128 state 10|0|C1E\n  128 state 133|0|C6\nend", GPUS, "warn", "C6 (133 us)"),
        (cpu_idle, "  128 state 1|0|C1\n  128 state 10|0|C1E\n  128 state 133|1|C6\nend", GPUS, "ok", "allowed: 10 us"),
        (cpu_idle, "  128 state 0|0|POLL\n  9 state 400|1|C2\n  8 state 400|0|C2\nend", GPUS, "warn", "C2 (400 us)"),
        (cpu_idle, "  128 state 133|0|C6\nend", NO_GPUS, "ok", "allowed: 133 us"),
        (cpu_idle, "end", GPUS, "ok", "hypervisor"),
        (hugepages, huge(0, 0), NO_GPUS, "ok", "0 huge pages reserved, transparent ones: madvise"),
        (hugepages, huge(102400, 1024), NO_GPUS, "ok", "102400 huge pages"),
        (hugepages, huge(102400, 102400), NO_GPUS, "warn", "lower vm.nr_hugepages"),
        (host_memory, MEMORY, NO_GPUS, "ok", "host memory 2% in use, 23 of 24 GiB available"),
        (host_memory, "cat: /proc/meminfo: No such file or directory", NO_GPUS, "unknown", "No such file"),
        (shared_memory, shm(8 * 2**20), GPUS, "ok", ""),
        (shared_memory, shm(8 * 2**20 - 1), GPUS, "warn", "--ipc=host"),
        (shared_memory, shm(64 * 1024), NO_GPUS, "ok", ""),
        (shared_memory, shm(126 * 2**20), NO_GPUS, "ok", "/dev/shm has 126 GiB left"),
        (processes, "end", NO_GPUS, "ok", ""),
        (processes, STUCK, NO_GPUS, "warn", "2 stuck in the kernel: python3 (pid 4242, alice), python3 (pid 4243"),
        (processes, STUCK, NO_GPUS, "warn", "; 1 zombie: sh (pid 99, bob)"),
    ],
)  # fmt: skip
def test_the_verdict_on_an_output(check: Check, text: str, gpus: Board, level: Level, words: str) -> None:
    verdict = judge(check, text, ANY_SITE, gpus)
    assert (verdict.level, verdict.action) == (level, "monitor" if level == "warn" else "none")
    assert words in verdict.summary


def test_the_site_says_how_much_memory_is_too_much_and_how_many_gpus_share_it() -> None:
    assert judge(host_memory, MEMORY, Site(host_memory=HostMemoryLimit(warn_percent=1.0))).level == "warn"
    assert judge(shared_memory, shm(8 * 2**20 - 1), EIGHT).level == "warn"


def test_many_zombies_are_counted_and_a_few_named() -> None:
    summary = judge(processes, "\n".join([*(f"stuck Z {pid} root sh" for pid in range(40)), "end"])).summary
    assert summary.startswith("40 zombie: sh (pid 0, root)")
    assert summary.endswith(" ...")
    assert summary.count("pid") == 5


def test_a_zombie_is_found_and_named() -> None:
    # The child ends at once, its parent sees that and yet never takes its status.
    program = (
        "import os, time\npid = os.fork() or os._exit(0)\n"
        "os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)\nprint(flush=True)\ntime.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        parent.stdout.readline()
        verdict = processes.judge(look(processes), ANY_SITE)
    finally:
        parent.kill()
        parent.communicate()
    assert verdict.level == "warn"
    assert "zombie" in verdict.summary


def test_no_ps_is_unknown() -> None:
    assert "install procps" in judge(processes, "", exit_status=127).summary


def test_versions_of_the_host_are_facts_to_compare() -> None:
    text = "kernel 5.15.0-1064-nvidia\nsystem Ubuntu 22.04.5 LTS\nofed MLNX_OFED_LINUX-23.10-0.5.5.0"
    assert judge(host_versions, text).facts == {
        "kernel": "5.15.0-1064-nvidia",
        "system": "Ubuntu 22.04.5 LTS",
        "ofed": "MLNX_OFED_LINUX-23.10-0.5.5.0",
    }
    assert judge(host_versions, "kernel 6.1\nsystem \nofed ").facts["ofed"] is None
    assert host_versions.judge(look(host_versions), ANY_SITE).facts["kernel"] == platform.release()


@pytest.mark.parametrize("check", [cpu_idle, cpu_governor, numa_balancing, host_memory, shared_memory, hugepages])
def test_a_probe_answers_on_any_linux(check: Check) -> None:
    assert check.judge(look(check), ANY_SITE).level in ("ok", "warn")
