"""The image for CPUs on hosts of the lab: built here, pushed to each host's own podman, and a trial over both in it."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.cluster.lab.test_lab_checks import ROOMY
from tests.cluster.lab.test_lab_cluster import EXPERIMENT
from tests.hosts import lab as lab_module
from tests.hosts import podman
from tests.hosts.lab import open_lab
from tests.hosts.test_image import PINS

if reason := lab_module.unavailable():
    pytest.skip(reason, allow_module_level=True)

SITE = """
ssh: {{user: root, key: {key}}}
{roomy}software: {{python: /opt/burst/bin/python, folder: /burst}}
container: {{engine: podman, image: "{image}", gpus: "", ulimits: {{}}}}
nodes:
"""


@pytest.mark.hosts
def test_the_image_is_pushed_to_two_hosts_and_a_trial_runs_in_it_over_both(tmp_path):
    if reason := podman.unavailable():
        pytest.skip(reason)
    stores = Path(tempfile.mkdtemp(prefix="burst-lab-podman-", dir="/var/tmp"))  # gigabytes, which pytest would keep
    try:
        with podman.built(podman.IMAGE) as image, open_lab(2, tmp_path) as lab:
            inventory = tmp_path / "inventory.yaml"
            nodes = "".join(f"  - {{hosts: {host.name}, address: {host.address}}}\n" for host in lab.hosts)
            inventory.write_text(SITE.format(key=lab.key, roomy=ROOMY, image=image) + nodes)
            for host in lab.hosts:
                podman.give_podman(lab, host, stores / host.name)
                assert lab.run(host, "podman", "images", "--quiet") == ""
            reach = [str(inventory), "--known-hosts", str(lab.known_hosts)]

            said = podman.burst("setup", "image", "push", *reach)
            assert "2 of 2 nodes have their image" in said
            assert [line.split()[2] for line in said.splitlines() if re.match(r"lab\d  ", line)] == ["loaded", "loaded"]
            said = podman.burst("setup", "image", "push", *reach)
            assert [line.split()[2] for line in said.splitlines() if re.match(r"lab\d  ", line)] == [
                "present",
                "present",
            ]
            podman.burst(
                "cluster", "check", *reach, "--only", "docker", "--no-history"
            )  # exits with 0: every host has its image

            # The launcher has to have the hosts' Python, so it runs in the image too.
            def inside(*words: str) -> str:
                shared = ["--user", "0", "--volume", f"{tmp_path}:{tmp_path}"]
                state = ["--state", str(tmp_path / "state")]
                done = podman.run(tmp_path, *shared, image, *words, *state, network="host")
                return done.stdout + done.stderr

            assert "2 nodes are up with room for 2 ranks, head lab1" in inside("cluster", "up", *reach)
            experiment = tmp_path / "experiment.yaml"
            experiment.write_text(EXPERIMENT.format(cp_sizes="2", steps=2, seeds="0", seconds="600"))
            runs = tmp_path / "runs"
            known = ["--known-hosts", str(lab.known_hosts)]
            inside("run", str(experiment), "--nodes", str(inventory), *known, "--out", str(runs))
            (record,) = [json.loads(path.read_text()) for path in runs.glob("trials/*/record.json")]
            assert (record["status"], record["hosts"]) == ("ok", ["lab1", "lab2"]), record
            assert record["measurement"]["software"]["torch"] == f"{PINS['torch']}+cpu"
            assert inside("cluster", "status").count(" up ") == 2
            inside("cluster", "down")
            for host in lab.hosts:
                assert lab.run(host, "podman", "ps", "--all", "--quiet") == ""
        assert lab.left_behind() == []
    finally:
        shutil.rmtree(stores)
