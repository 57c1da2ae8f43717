"""Nodes read and written to for real: on this machine, and over SSH on loopback."""

import json
import os
import stat
import subprocess

import pytest

from cluster.discovery.facts import NodeFacts
from cluster.environment.rendering import env_sh, render_node, table
from cluster.environment.survey import SurveyOptions, head_address, install, survey
from cluster.files.errors import UsageError
from cluster.inventory.hosts import Host, this_machine
from cluster.inventory.nodes import InventoryNode
from cluster.inventory.site import NetworkExpectation, Site
from cluster.transport.reach import LocalRunner, connect_local
from cluster.transport.runner import Unreachable
from cluster.transport.ssh import SshOptions, connector
from tests.patience import AMPLE


def rendered(**environment):
    return render_node(NodeFacts(node="gpu01"), Site(environment=environment))


def put(environment, path):
    return install(LocalRunner(), environment, str(path), deadline_seconds=AMPLE)


def test_a_file_is_written_then_left_alone_then_replaced_and_kept(tmp_path):
    path = tmp_path / "new folder" / "env.sh"
    assert put(rendered(), path).what == "written"
    first = path.read_text()
    assert first == env_sh(rendered())
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert put(rendered(), path).what == "unchanged"
    replaced = put(rendered(NCCL_DEBUG="INFO"), path)
    assert replaced.what == "replaced"
    assert path.read_text() == env_sh(rendered(NCCL_DEBUG="INFO"))
    kept = path.parent / replaced.kept
    assert kept.read_text() == first
    assert sorted(path.parent.iterdir()) == sorted([path, kept])  # nothing half-written is left


def test_a_file_with_a_secret_is_for_its_owner_alone(tmp_path):
    put(rendered(HF_TOKEN="abc"), tmp_path / "env.sh")
    assert stat.S_IMODE((tmp_path / "env.sh").stat().st_mode) == 0o600
    assert "abc" in (tmp_path / "env.sh").read_text()


def test_a_link_is_replaced_and_what_it_meant_stays(tmp_path):
    (tmp_path / "theirs").write_text("export A=1\n")
    (tmp_path / "env.sh").symlink_to(tmp_path / "theirs")
    kept = put(rendered(), tmp_path / "env.sh").kept
    assert (tmp_path / "theirs").read_text() == "export A=1\n"
    assert not (tmp_path / "env.sh").is_symlink()
    assert (tmp_path / kept).is_symlink()


def test_a_transfer_that_breaks_leaves_the_old_file(tmp_path):
    path = tmp_path / "env.sh"
    path.write_text("old\n")

    class Half(LocalRunner):
        def run(self, command, *, stdin="", deadline_seconds):
            content = b"" if isinstance(stdin, str) else b"".join(stdin)
            return super().run(command, stdin=[content[: len(content) // 2]], deadline_seconds=deadline_seconds)

    with pytest.raises(Unreachable, match="arrived with the checksum"):
        install(Half(), rendered(), str(path), deadline_seconds=AMPLE)
    assert path.read_text() == "old\n"
    assert {each.read_text() for each in tmp_path.iterdir()} == {"old\n"}  # itself and the copy that was to be kept


@pytest.mark.parametrize(("name", "complaint"), [("", "is a folder"), ("file/env.sh", "not written")])
def test_a_place_that_cannot_be_written_is_said(tmp_path, name, complaint):
    (tmp_path / "file").write_text("")
    with pytest.raises(Unreachable, match=complaint):
        put(rendered(), tmp_path / name)


def test_this_machine_is_read_for_real(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which nproc would believe
    found = survey([InventoryNode(host=this_machine(), site=Site())], connect_local, SurveyOptions(), AMPLE)
    (environment,) = found.environments
    assert found.silent == {}
    assert environment.variables["GLOO_SOCKET_IFNAME"] == "lo"
    assert environment.network.facts.cores == len(os.sched_getaffinity(0))
    assert environment.network.facts.interface("lo") is not None


def test_nodes_over_ssh_are_read_and_written_to_and_a_silent_one_is_named(sshd, tmp_path):
    hosts = [
        Host(name="one", address="127.0.0.1", port=sshd.port, key=sshd.key),
        Host(name="lost", address="127.0.0.2", port=1, key=sshd.key),
    ]
    site = Site(network=NetworkExpectation(interface="lo"), environment={"HF_TOKEN": "abc"})
    nodes = [InventoryNode(host=host, site=site) for host in hosts]
    path = tmp_path / "it's $HOME; here" / "env.sh"
    options = SurveyOptions(head=head_address(None, nodes), install=str(path))
    found = survey(nodes, connector(SshOptions(known_hosts=sshd.known_hosts)), options, AMPLE)
    assert list(found.silent) == ["lost"]
    assert found.installed["one"].what == "written"
    done = subprocess.run(
        ["sh", "-c", '. "$0"; printf "%s %s" "$GLOO_SOCKET_IFNAME" "$HF_TOKEN"', str(path)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "lo abc"
    shown = json.dumps(found.as_json()) + table(found.environments[0])
    assert "abc" not in shown


def test_a_node_that_cannot_be_written_to_is_named_and_still_shown(tmp_path):
    node = InventoryNode(host=Host(name="here"), site=Site())
    found = survey([node], connect_local, SurveyOptions(install=str(tmp_path)), AMPLE)
    assert "is a folder" in found.silent["here"]
    assert len(found.environments) == 1


def test_the_head_is_the_first_node_unless_named():
    nodes = [InventoryNode(host=Host(name="a", address="127.0.0.3"), site=Site())]
    assert head_address(None, nodes) == "127.0.0.3"
    assert head_address("10.0.0.1", nodes) == "10.0.0.1"
    assert head_address(None, [InventoryNode(host=this_machine(), site=Site())]) is None
    with pytest.raises(UsageError, match="give --head the address"):
        head_address("no.such.host.invalid", nodes)
