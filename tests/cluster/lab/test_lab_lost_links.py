"""Hosts of the lab whose link is lost, in the middle of a sweep and of a start: alone they pay, and they come back."""

from __future__ import annotations

import signal
import time

import pytest

from tests.cluster.lab.test_lab_cluster import guests, opened_site
from tests.hosts import lab as lab_module
from tests.patience import AMPLE, scaled, wait_until

if reason := lab_module.unavailable():
    pytest.skip(reason, allow_module_level=True)
pytest.importorskip("ray")


TOO_FEW = "3 ranks do not spread evenly over the 2 nodes with 1 each"


@pytest.mark.hosts
def test_a_host_without_its_link_ends_its_ranks_and_is_used_again_when_it_is_repaired(tmp_path):
    guests_before = guests()
    with opened_site(3, tmp_path) as site:
        lab = site.lab
        head, second, third = lab.hosts
        assert site.up()[0] == 0
        run = site.start(*site.experiment("loss", cp_sizes="2", steps=100_000, seeds="0, 1"))
        site.wait_for_progress("loss")
        lab.cut(second)
        # Nothing reaches it any more, so it must notice by itself; before, its ranks went on for minutes.
        cut_at = time.monotonic()
        wait_until(lambda: not site.ranks(second), "a host that is cut off keeps its ranks", seconds=30)
        print(f"ranks ended {time.monotonic() - cut_at:.0f} s after the link was lost")
        site.wait_for_progress("loss", trials=2)  # the sweep goes on with the third host
        assert site.ranks(head)
        assert site.ranks(third)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=AMPLE)
        assert run.returncode == 1, out + err
        assert "\x1b[" not in out + err
        assert "(raylet)" not in out + err
        lost, stopped = site.started("loss")
        assert (lost["status"], stopped["status"]) == ("node_lost", "interrupted"), out + err
        assert lost["reason"].startswith("lab2 was lost (")
        rendered = (site.runs / "loss" / "trials" / stopped["trial_id"] / "environment").iterdir()
        assert sorted(file.stem for file in rendered) == ["lab1", "lab3"]

        # With the cluster up, plan and run leave the host out before Ray is asked for it.
        command = [*site.experiment("three", cp_sizes="3", steps=2), "--set", "fixed.seq_len=240"]
        for words in (["plan", *command[1:2], *command[-2:], *site.nodes()], command):
            code, said = site.burst(*words)
            assert (code, TOO_FEW in said) == (2, True), said
        assert "left out: lab2: is no node of the Ray cluster now" in said

        # What `down` could not reach is named, and hinders no new cluster of the others.
        code, said = site.burst("cluster", "down", "--timeout", f"{scaled(5.0):g}")
        assert (code, "2 nodes ended, lab2 not." in said) == (1, True), said
        code, said = site.burst("cluster", "status", "--timeout", f"{scaled(5.0):g}")
        assert (code, said) == (1, "lab2 may hold processes of an earlier cluster; the next up or down ends them\n")
        code, said = site.burst(*command)
        assert (code, TOO_FEW in said) == (2, True), said
        assert not (site.runs / "three" / "run.json").exists()

        # Repaired, it is a host as any other: the run ends the rest there first.
        lab.mend(second)
        code, said = site.burst(*command)
        assert code == 0, said
        assert site.records("three")[0]["hosts"] == ["lab1", "lab2", "lab3"]
        assert site.rays() == []
        assert guests() <= guests_before


@pytest.mark.hosts
def test_a_host_that_loses_its_link_while_ray_starts_is_left_out_alone(tmp_path):
    with opened_site(3, tmp_path) as site:
        _, second, _ = site.lab.hosts
        starting = site.start("cluster", "up", str(site.inventory), "--known-hosts", str(site.lab.known_hosts))
        wait_until(lambda: any("gcs_server" in line for line in site.rays()), "no head was started")
        site.lab.cut(second)
        out, err = starting.communicate(timeout=AMPLE)
        assert starting.returncode == 1, out + err
        assert "2 nodes are up, head lab1" in out
        assert "left out: lab2: " in err
        code, said = site.burst("cluster", "status", "--timeout", f"{scaled(5.0):g}")
        assert code == 1
        assert "2 of 2 nodes of inventory are up" in said
        assert site.burst(*site.experiment("two", cp_sizes="2", steps=2))[0] == 0
        assert site.records("two")[0]["hosts"] == ["lab1", "lab3"]
        site.lab.mend(second)
        code, said = site.burst("cluster", "down")
        assert (code, "ended" in said) == (0, True), said
        assert site.rays() == []


@pytest.mark.hosts
def test_a_head_that_is_cut_off_ends_its_ranks(tmp_path):
    guests_before = guests()
    with opened_site(2, tmp_path) as site:
        head, other = site.lab.hosts
        assert site.up()[0] == 0
        run = site.start(*site.experiment("headless", cp_sizes="2", steps=100_000))
        site.wait_for_progress("headless")
        site.lab.cut(head)
        wait_until(lambda: not site.ranks(other), "the other host keeps its ranks", seconds=30)
        wait_until(lambda: not site.ranks(head), "the head keeps its ranks", seconds=30)
        out, err = run.communicate(timeout=AMPLE)
        assert run.returncode == 1, out + err
        assert "\x1b[" not in out + err
        assert "(raylet)" not in out + err
        assert site.records("headless")[0]["status"] == "node_lost", out + err
        wait_until(lambda: guests() <= guests_before, "the guest outlived the run")
        site.lab.mend(head)
        code, said = site.burst("cluster", "down")
        assert code == 0, said
        assert site.rays() == []


@pytest.mark.hosts
def test_a_connection_to_a_host_that_is_gone_breaks_long_before_its_command_is_late(tmp_path):
    from cluster.inventory.file import read_inventory
    from cluster.transport.reach import connection
    from cluster.transport.runner import Unreachable

    with opened_site(1, tmp_path) as site:
        [host] = site.lab.hosts
        [node] = read_inventory(site.inventory).nodes
        connect = connection([node.host], known_hosts=site.lab.known_hosts)
        with connect(node.host, AMPLE) as runner:
            site.lab.cut(host)
            with pytest.raises(Unreachable, match="broke the connection"):
                runner.run(["sleep", "600"], deadline_seconds=AMPLE)
        site.lab.mend(host)
