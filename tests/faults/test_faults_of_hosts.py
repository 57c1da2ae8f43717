"""A host's network is dropped at every point of a trial's life: what needed the host at that moment is lost and nothing
else, no host keeps ranks, and the next command says what to do.
"""

from __future__ import annotations

import sys
import time

import pytest

from tests.cluster.lab.test_lab_cluster import opened_site
from tests.faults.command import (
    EXPERIMENT,
    GONE_SECONDS,
    burst,
    failures,
    next_command,
    outcomes,
    records,
    status_of,
    variables,
    wait_for_hold,
)
from tests.faults.matrix import NETWORK, POINTS
from tests.hosts import lab as lab_module
from tests.patience import AMPLE, wait_until
from tests.processes import with_variable

if reason := lab_module.unavailable():
    pytest.skip(reason, allow_module_level=True)
pytest.importorskip("ray")

RANKS_END_SECONDS = 30.0  # on a host that nothing reaches; elsewhere it is GONE_SECONDS


@pytest.mark.hosts
@pytest.mark.parametrize(("point", "ends"), NETWORK.possible().items())
def test_after_a_hosts_network_is_dropped_what_is_finished_stays_and_the_next_command_goes_on(
    point, ends, tmp_path, monkeypatch
):
    hold, lab_folder = tmp_path / "hold", tmp_path / "lab"
    hold.mkdir()
    lab_folder.mkdir()
    with opened_site(3, lab_folder) as site:
        _, second, _ = site.lab.hosts
        for name, value in variables(hold).items():
            monkeypatch.setenv(name, value)
        python = tmp_path / "python"  # of the hosts, whose logins know nothing of this program's environment
        added = variables(hold) | {"BURST_TEST_PYTHON": str(python)}
        exported = " ".join(f"{name}={value}" for name, value in added.items())
        python.write_text(f'#!/bin/sh\nexport {exported}\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        site.inventory.write_text(f"software: {{python: {python}}}\n{site.inventory.read_text()}")
        experiment, run_dir = tmp_path / "exp.yaml", tmp_path / "run"
        experiment.write_text(EXPERIMENT)
        arguments = ["run", str(experiment), *site.nodes(), "--out", str(run_dir), "--order", "file"]
        if point == "import":
            code, said = site.burst(*arguments, "--limit", "1")
            assert code == 0, said
            arguments.append("--resume")

        POINTS[point].hold_in(hold)
        run = site.start(*arguments)
        wait_for_hold(hold, run, run.communicate)
        finished = records(run_dir)
        site.lab.cut(second)
        cut_at = time.monotonic()
        (hold / "hold.json").unlink()
        (hold / "released").touch()
        wait_until(lambda: not site.ranks(second), "a host that is cut off keeps its ranks", RANKS_END_SECONDS)
        print(f"ranks ended {time.monotonic() - cut_at:.0f} s after the link was lost")
        out, err = run.communicate(timeout=AMPLE)
        assert "Traceback" not in out + err
        left = records(run_dir)
        found = outcomes(left).split()
        assert all(end in may.split("/") for end, may in zip(found, ends.split(), strict=True)), out + err
        assert run.returncode == (0 if set(found) == {"ok"} else 1), out + err
        assert [trial for trial, record in finished.items() if left.get(trial) != record] == []

        def elsewhere() -> set[int]:
            return set(with_variable("BURST_TEST_HOLD", str(hold))) - set(site.lab.processes(second))

        wait_until(lambda: not elsewhere(), "something runs on that is not on the host that is cut off", GONE_SECONDS)

        site.lab.mend(second)
        if command := next_command(run_dir):
            kept = {trial: record for trial, record in left.items() if status_of(record) == "ok"}
            code, said = burst(tmp_path, *command[1:])
            assert code == 0, said
            assert [trial for trial, record in kept.items() if records(run_dir)[trial] != record] == []
        else:
            site.burst("cluster", "down")
        assert outcomes(records(run_dir)) == "ok ok ok ok"
        assert failures(run_dir) == []
        assert next_command(run_dir) == []
        assert site.rays() == []
