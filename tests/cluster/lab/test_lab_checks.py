"""Node checks against hosts that are really broken: silent, down, someone else's key, a full disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.cli import main
from tests.hosts import lab as lab_module
from tests.hosts.lab import Lab, open_lab
from tests.patience import scaled

if reason := lab_module.unavailable():
    pytest.skip(reason, allow_module_level=True)

ROOMY = (
    "host_memory: {warn_percent: 100}\ngpu_memory: {one_gpu_mib: 1000000, all_gpus_mib: 8000000}\n"
    "ranks_per_node: 1\nray: {object_store_gib: 0.1}\n"
)


def write_inventory(lab: Lab, disk: Path) -> Path:
    """All hosts of the lab; each must have room at `disk`, and none is too busy, at any load of this machine."""
    path = lab.folder / "inventory.yaml"
    nodes = "".join(f"  - {{hosts: {host.name}, address: {host.address}}}\n" for host in lab.hosts)
    path.write_text(
        f"ssh: {{user: root, key: {lab.key}}}\ndisks: [{{path: {disk}, warn_percent: 99.5, fail_percent: 99.5}}]\n"
        f"{ROOMY}nodes:\n{nodes}"
    )
    return path


@pytest.mark.hosts
def test_broken_hosts_are_found_each_with_its_reason_and_none_is_free(tmp_path, capsys):
    (disk := tmp_path / "disk").mkdir()
    with open_lab(5, tmp_path) as lab:
        inventory = write_inventory(lab, disk)
        _, full, silent, other, down = lab.hosts
        lab.mount(full, disk, "64k")
        lab.run(full, "sh", "-c", f"head -c 65536 /dev/zero > {disk}/full 2>/dev/null || true")
        lab.freeze(silent)
        lab.replace_host_key(other)
        lab.stop_sshd(down)
        given = [str(inventory), "--known-hosts", str(lab.known_hosts), "--timeout", f"{scaled(5.0):g}", "--no-history"]
        given += ["--only", "disk,interface,host_memory"]
        code = main(["cluster", "check", *given, "--json"])
        found = {node["node"]: node for node in map(json.loads, capsys.readouterr().out.splitlines())}
        assert code == 2
        assert {name: node["usable"] for name, node in found.items()} == {
            "lab1": True, "lab2": False, "lab3": False, "lab4": False, "lab5": False
        }  # fmt: skip
        assert found["lab1"]["checks"]["disk"]["verdict"] == "ok"
        assert found["lab2"]["checks"]["disk"]["verdict"] == "fail"
        assert "100% full" in found["lab2"]["checks"]["disk"]["summary"]
        reasons = {name: found[name]["checks"]["reachability"]["summary"] for name in ("lab3", "lab4", "lab5")}
        assert "did not answer" in reasons["lab3"] or "no answer" in reasons["lab3"] or "banner" in reasons["lab3"]
        assert "another machine may be answering" in reasons["lab4"]
        assert "cannot be reached" in reasons["lab5"]
        main(["cluster", "check", *given, "--free"])
        assert capsys.readouterr().out.split() == ["lab1"]
        lab.thaw(silent)
    assert lab.left_behind() == []
