"""Processes, governors and NUMA balancing: outputs written by us after ps(1) and the kernel's documents."""

from __future__ import annotations

import platform
import subprocess
import sys
from typing import Any

import pytest

from cluster.checks.host import cpu_governor, cpu_idle, host_versions, hugepages, numa_balancing, processes
from cluster.inventory.site import Site
from cluster.probing.probe import Output, Probe
from cluster.transport.reach import LocalRunner
from tests.cluster.gpu_outputs import NO_GPUS, board
from tests.patience import AMPLE


def run(probe: Probe) -> Output:
    done = LocalRunner().run(["sh", "-c", probe.script], deadline_seconds=AMPLE)
    return Output(text=done.stdout, exit_status=done.exit_status)


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
        verdict = processes.judge(run(processes.probe(Site())), Site())
    finally:
        parent.kill()
        parent.communicate()
    assert verdict.level == "warn"
    assert "zombie" in verdict.summary


def test_processes_stuck_in_the_kernel_are_named_with_their_user() -> None:
    text = "stuck D 4242 alice python3\nstuck D 4243 alice python3\nstuck Z 99 bob sh\nend"
    verdict = processes.judge(Output(text=text), Site())
    assert (verdict.level, verdict.action) == ("warn", "monitor")
    assert verdict.summary == (
        "2 stuck in the kernel: python3 (pid 4242, alice), python3 (pid 4243, alice); 1 zombie: sh (pid 99, bob)"
    )


def test_many_zombies_are_counted_and_a_few_named() -> None:
    text = "\n".join([*(f"stuck Z {pid} root sh" for pid in range(40)), "end"])
    summary = processes.judge(Output(text=text), Site()).summary
    assert summary.startswith("40 zombie: sh (pid 0, root)")
    assert summary.endswith(" ...")
    assert summary.count("pid") == 5


def test_no_stuck_process_is_ok_and_no_ps_unknown() -> None:
    assert processes.judge(Output(text="end"), Site()).level == "ok"
    assert processes.judge(Output(text="", exit_status=127), Site()).level == "unknown"


@pytest.mark.parametrize(
    ("text", "gpus", "level"),
    [
        ("    128 performance\nend", True, "ok"),
        ("    120 performance\n      8 schedutil\nend", True, "warn"),
        ("    128 powersave\nend", True, "warn"),
        ("    128 powersave\nend", False, "ok"),
        ("end", True, "ok"),
        ("", True, "unknown"),
    ],
)
def test_cores_that_feed_gpus_keep_their_clock(text: str, gpus: bool, level: str) -> None:
    assert cpu_governor.judge(Output(text=text), Site(), board("h200") if gpus else NO_GPUS).level == level


@pytest.mark.parametrize(
    ("text", "gpus", "level"),
    [
        ("numa_balancing 0", True, "ok"),
        ("numa_balancing absent", True, "ok"),
        ("numa_balancing 1", True, "warn"),
        ("numa_balancing 2", True, "warn"),
        ("numa_balancing 1", False, "ok"),
        ("numa_balancing ", True, "unknown"),
    ],
)
def test_numa_balancing_is_off_where_gpus_copy(text: str, gpus: bool, level: str) -> None:
    assert numa_balancing.judge(Output(text=text), Site(), board("h200") if gpus else NO_GPUS).level == level


@pytest.mark.parametrize(
    ("states", "gpus", "level", "words"),
    [
        ("    128 state 1|0|C1\n    128 state 10|0|C1E\n    128 state 133|0|C6", True, "warn", "C6 (133 us)"),
        ("    128 state 1|0|C1\n    128 state 10|0|C1E\n    128 state 133|1|C6", True, "ok", "allowed: 10 us"),
        ("    128 state 0|0|POLL\n    100 state 400|1|C2\n     28 state 400|0|C2", True, "warn", "C2 (400 us)"),
        ("    128 state 133|0|C6", False, "ok", "allowed: 133 us"),
        ("", True, "ok", "hypervisor"),
    ],
)
def test_cores_that_feed_gpus_do_not_sleep_deeply(states: str, gpus: bool, level: str, words: str) -> None:
    output = Output(text=f"{states}\nend".lstrip("\n"))
    verdict = cpu_idle.judge(output, Site(), board("h200") if gpus else NO_GPUS)
    assert verdict.level == level
    assert words in verdict.summary


MEMINFO = (
    "MemTotal:       1056000000 kB\nHugePages_Total:   {total}\nHugePages_Free:    {free}\nHugepagesize:       2048 kB"
)


@pytest.mark.parametrize(("total", "free", "level"), [(0, 0, "ok"), (102400, 1024, "ok"), (102400, 102400, "warn")])
def test_huge_pages_that_nothing_uses_are_a_waste(total: int, free: int, level: str) -> None:
    text = MEMINFO.format(total=total, free=free) + "\ntransparent always [madvise] never"
    verdict = hugepages.judge(Output(text=text), Site())
    assert verdict.level == level
    assert verdict.facts["transparent"] == "madvise"


def test_versions_of_the_host_are_facts_to_compare() -> None:
    text = "kernel 5.15.0-1064-nvidia\nsystem Ubuntu 22.04.5 LTS\nofed MLNX_OFED_LINUX-23.10-0.5.5.0"
    verdict = host_versions.judge(Output(text=text), Site())
    assert verdict.facts == {
        "kernel": "5.15.0-1064-nvidia",
        "system": "Ubuntu 22.04.5 LTS",
        "ofed": "MLNX_OFED_LINUX-23.10-0.5.5.0",
    }
    assert host_versions.judge(Output(text="kernel 6.1\nsystem \nofed "), Site()).facts["ofed"] is None


@pytest.mark.parametrize("check", [cpu_idle, hugepages, host_versions])
def test_a_probe_that_prints_nothing_is_unknown(check: Any) -> None:
    assert check.judge(Output(text=""), Site()).level == "unknown"


def test_these_probes_answer_on_any_linux() -> None:
    assert cpu_idle.judge(run(cpu_idle.probe(Site())), Site()).level == "ok"
    assert hugepages.judge(run(hugepages.probe(Site())), Site()).level in ("ok", "warn")
    assert host_versions.judge(run(host_versions.probe(Site())), Site()).facts["kernel"] == platform.release()
    assert cpu_governor.judge(run(cpu_governor.probe(Site())), Site()).level == "ok"
    assert numa_balancing.judge(run(numa_balancing.probe(Site())), Site()).level == "ok"
