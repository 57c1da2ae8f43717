"""`burst cluster env` for an operator."""

import json
import socket
import subprocess
import sys

import pytest

from harness.cli import main
from tests.patience import AMPLE

HERE = socket.gethostname()


def test_this_machine_is_shown_with_reasons(capsys):
    assert main(["cluster", "env"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == HERE
    assert "GLOO_SOCKET_IFNAME" in out
    assert "no other node takes part" in out
    assert err == ""


def test_json_holds_values_origins_and_reasons(capsys):
    assert main(["cluster", "env", "--json", "--head", "127.0.0.1"]) == 0
    found = json.loads(capsys.readouterr().out)
    (node,) = found["nodes"]
    values = {entry["name"]: entry for entry in node["variables"]}
    assert node["node"] == HERE
    assert values["GLOO_SOCKET_IFNAME"]["value"] == "lo"
    assert values["RAY_USAGE_STATS_ENABLED"] == {
        "name": "RAY_USAGE_STATS_ENABLED",
        "value": "0",
        "origin": "default",
        "reason": "Ray reports its use to its makers by default",
    }
    assert (found["drift"], found["silent"], node["installed"]) == ([], {}, None)


def test_install_writes_on_the_node_and_keeps_what_was_there(tmp_path, capsys):
    path = tmp_path / "env.sh"
    path.write_text("export MINE=1\n")
    assert main(["cluster", "env", "--install", str(path)]) == 0
    assert "the earlier one is" in capsys.readouterr().err
    assert sorted("MINE" in each.read_text() for each in tmp_path.iterdir()) == [False, True]
    assert main(["cluster", "env", "--install", str(path)]) == 0
    assert "is up to date" in capsys.readouterr().err


def test_a_site_file_and_an_inventory_are_both_understood(tmp_path, capsys):
    (tmp_path / "site.yaml").write_text("environment: {NCCL_DEBUG: WARN, A_TOKEN: hidden}\n")
    assert main(["cluster", "env", "--site", str(tmp_path / "site.yaml")]) == 0
    out = capsys.readouterr().out
    assert "NCCL_DEBUG" in out
    assert "hidden" not in out
    (tmp_path / "lab.yaml").write_text("nodes: ['127.0.0.1:1']\nsite: site.yaml\n")
    assert main(["cluster", "env", str(tmp_path / "lab.yaml"), "--timeout", f"{AMPLE:g}"]) == 1
    assert "127.0.0.1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--method", "brust"], "did you mean burst?"),
        (["--install", "env.sh"], "expected an absolute path on the nodes"),
        (["--timeout", "0"], "--timeout is 0; expected seconds above 0"),
        (["--head", "no.such.host.invalid"], "give --head the address"),
        (["missing.yaml"], "no such inventory"),
        (["a[3-1]"], "counts down"),
        (["{tmp}/list.txt", "gpu02"], "gpu02 is no node of the inventory list.txt"),
        (["--key", "{tmp}/none", "gpu01"], "is no file"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(tmp_path, capsys, arguments, sentence):
    (tmp_path / "list.txt").write_text("gpu01\n")
    assert main(["cluster", "env", *(argument.replace("{tmp}", str(tmp_path)) for argument in arguments)]) == 2
    err = capsys.readouterr().err
    assert sentence in err
    assert err.count("\n") == 1


def test_help_asks_for_no_yaml_and_no_ssh():
    program = "import sys; from harness.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    program += "assert not {'paramiko', 'jinja2', 'cluster.transport.reach'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
