"""The measurement in docs/notes/2026-11-21-cluster-times.md can be repeated: its nodes answer the real program, each as
a healthy one."""

import subprocess
import sys
from pathlib import Path

from tests.cluster.measure_fleet import PER_NETWORK, address
from tests.patience import AMPLE

ROOT = Path(__file__).parents[2]


def test_addresses_are_distinct_and_on_loopback():
    addresses = [address(number) for number in range(3 * PER_NETWORK)]
    assert len(set(addresses)) == 3 * PER_NETWORK
    assert (addresses[0], addresses[PER_NETWORK]) == ("127.0.1.1", "127.0.2.1")


def test_every_node_of_the_measured_fleet_answers_and_is_well(sshd):  # sshd: skipped where there is none
    command = [sys.executable, "-m", "tests.cluster.measure_fleet", "--nodes", "1", "20", "--seconds", "0.1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=AMPLE, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines()[2:]]
    assert [row[1].strip() for row in rows] == ["1", "20"]
