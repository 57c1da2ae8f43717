"""Sweeps over hosts of the lab that repeat what a lost host ended."""

import json

import pytest

from tests.cluster.lab.test_lab_cluster import opened_site
from tests.hosts import lab as lab_module
from tests.patience import AMPLE

if reason := lab_module.unavailable():
    pytest.skip(reason, allow_module_level=True)
pytest.importorskip("ray")


@pytest.mark.hosts
def test_a_trial_whose_host_is_lost_runs_again_on_others(tmp_path):
    with opened_site(3, tmp_path) as site:
        head, second, third = site.lab.hosts
        code, said = site.up()
        assert code == 0, said

        # The first attempt loses a host; the second runs on those that are left, and is long enough to be seen.
        run = site.start(*site.experiment("retry", cp_sizes="2", steps=400), "--retry", "1")
        site.wait_for_progress("retry")
        site.lab.kill(second)
        out, err = run.communicate(timeout=AMPLE)
        assert run.returncode == 0, out + err
        assert "node_lost, runs again (1 of 1)  lab2 was lost (" in out + err
        [record] = site.records("retry")
        assert (record["status"], record["attempts"], record["hosts"]) == ("ok", 2, [head.name, third.name])
        [earlier] = (site.runs / "retry" / "trials" / record["trial_id"] / "attempts").glob("*/record.json")
        assert json.loads(earlier.read_text())["status"] == "node_lost"
        site.lab.revive(second)
        site.burst("cluster", "down")
