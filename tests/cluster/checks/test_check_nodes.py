"""check_nodes.py from the command line: this machine, and others through a real sshd on loopback."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.checks import discover
from cluster.cli import main
from cluster.discovery.drift import READS
from cluster.health.history import History
from cluster.render.html import refuse_foreign
from tests.cluster.loopback_sshd import LoopbackSshd, free_port, make_key
from tests.patience import AMPLE

ROOT = Path(__file__).parents[3]
# What a machine that runs tests may have wrong: nothing here depends on it.
QUIET = ["--skip", "processes,interface,xid,shared_memory"]


@pytest.fixture(autouse=True)
def state_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters are kept below the test's own folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_this_machine_is_ok_without_gpus(roomy_site, install_nvidia_smi, capsys):
    install_nvidia_smi("echo 'No devices were found'; exit 6")
    assert main(["--site", str(roomy_site), *QUIET]) == 0
    printed = capsys.readouterr().out
    assert socket.gethostname() in printed
    assert "1 node: 1 ok; 1 usable" in printed


def test_a_busy_machine_is_a_warning_and_not_free(tmp_path, install_nvidia_smi, capsys):
    install_nvidia_smi(
        'case $1 in *memory.used) echo "0, GPU-1, 5000";; *compute-apps*) echo "GPU-1, $$, 4990, python3";; '
        '*) echo "0, GPU-1, 0:6, NVIDIA H200, 580.1, 143771";; esac'
    )
    site = tmp_path / "site.yaml"
    site.write_text(
        "gpus: {count: 1, model: H200}\ngpu_memory: {tries: 1}\nhost_memory: {warn_percent: 100}\n"
        "disks: [{path: /, warn_percent: 100, fail_percent: 100}]\n"
    )
    assert main(["--free", "--site", str(site), "--only", "gpus,gpu_memory,disk,host_memory"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "busy: 5000 MiB of GPU memory in use on GPU 0" in printed.err


def test_a_site_with_gpus_fails_a_machine_without(tmp_path, install_nvidia_smi, capsys):
    install_nvidia_smi("echo 'No devices were found'; exit 6")
    site = tmp_path / "site.yaml"
    site.write_text("gpus: {count: 8}\n")
    assert main(["--json", "--site", str(site)]) == 2
    report = json.loads(capsys.readouterr().out)
    assert (report["verdict"], report["usable"], report["action"]) == ("fail", False, "isolate")
    assert report["checks"]["gpus"]["verdict"] == "fail"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--wat"], "unrecognized arguments: --wat"),
        (["--timeout", "soon"], "invalid float value"),
        (["--timeout", "nan"], "expected seconds above 0"),
        (["--json", "--free"], "not allowed with"),
        (["--free", "--only-faults"], "leave --free out"),
        (["gpu[3-1]"], "counts down"),
        (["--site", "/absent.yaml"], "no such site file"),
        (["--only", "disks"], "there is no check 'disks'; did you mean disk?"),
        (["--only", "disk", "--skip", "disk"], "leave no check"),
        (["--only", "drifts"], "there is no check 'drifts'; did you mean drift?"),
        (["--skip", "reachability"], "reachability cannot be skipped"),
        (["--only", "active_gemm"], "--only active_gemm is an active test, which loads nodes; add --active"),
        (["--json", "--nagios"], "not allowed with"),
        (["/absent.yaml"], "no such inventory"),
        (["/absent.yaml", "gpu01"], "no such inventory"),
        (["gpu01", "/absent.yaml"], "/absent.yaml is a file behind hosts"),
        (["--profiles", "/absent"], "/absent holds no profile"),
        (["--html", "/absent/page.html"], "no folder that exists"),
        (["--history", "/proc/none"], "--history cannot be used"),
        (["gpu01", "--key", "/absent"], "/absent is no file"),
    ],
)
def test_bad_usage_is_one_sentence_and_exit_code_three(arguments, sentence, capsys):
    assert main(arguments) == 3
    printed = capsys.readouterr()
    assert printed.out == ""
    assert sentence in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("form", ["--json", "--all"])
def test_a_reader_who_leaves_early_is_no_error(form: str, roomy_site: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "check_nodes.py", form, "--only", "disk", "--no-history", "--site", str(roomy_site)]
    with open(writer, "wb") as closed_pipe:
        done = subprocess.run(command, cwd=ROOT, stdout=closed_pipe, stderr=subprocess.PIPE, timeout=AMPLE, check=False)
    assert (done.returncode, b"Error" in done.stderr) == (141, False), done.stderr


def test_this_machine_needs_the_standard_library_and_pyyaml_only(roomy_site: Path) -> None:
    script = (
        "import sys\n"
        "for name in ('paramiko', 'torch', 'ray', 'rich', 'pandas', 'numpy', 'jinja2'): sys.modules[name] = None\n"
        "from cluster.cli import main\n"
        f"codes = [main(['--free', '--site', {str(roomy_site)!r}, *{QUIET!r}]), main(['gpu01'])]\n"
        "sys.exit(0 if codes[0] == 0 and codes[1] == 3 else 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "needs paramiko" in done.stderr


def test_the_script_runs_from_any_folder(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "check_nodes.py"), "--help"], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0
    assert b"exit codes: 0 all ok" in done.stdout


def test_a_node_over_ssh_gets_every_check(sshd, roomy_site, capsys):
    code = main([sshd.target(), *sshd.arguments(), "--site", str(roomy_site), "--json", *QUIET])
    report = json.loads(capsys.readouterr().out)
    assert set(report["checks"]) == set(discover()) - set(QUIET[1].split(",")) | {"reachability", "clock", "history"}
    assert report["checks"]["reachability"]["verdict"] == "ok"
    assert report["checks"]["disk"]["facts"]["/"]["available_gib"] >= 0
    assert (code, report["verdict"], report["node"]) == (0, "ok", "127.0.0.1")


def test_an_unknown_host_key_is_refused_and_not_learned(sshd, tmp_path, capsys):
    known_hosts = tmp_path / "known_hosts"
    assert main([sshd.target(), "--key", str(sshd.key), "--known-hosts", str(known_hosts)]) == 3
    printed = capsys.readouterr().out
    assert "known_hosts (SHA256:" in printed
    assert "--accept-new-host-keys" in printed
    assert not known_hosts.exists()


def test_an_accepted_host_key_is_kept_for_the_next_time(sshd, tmp_path, roomy_site, capsys):
    known_hosts = tmp_path / "new" / "known_hosts"
    arguments = [
        sshd.target(),
        "--key",
        str(sshd.key),
        "--known-hosts",
        str(known_hosts),
        "--site",
        str(roomy_site),
        *QUIET,
    ]
    assert main([*arguments, "--accept-new-host-keys"]) == 0
    assert known_hosts.read_text() == f"[127.0.0.1]:{sshd.port} {sshd.host_key}\n"
    assert main(arguments) == 0


def test_accepting_a_new_key_leaves_the_rest_of_the_file_alone(sshd, tmp_path, roomy_site, capsys):
    known_hosts = tmp_path / "known_hosts"
    known_hosts.write_text("# ours\n# no line break")
    arguments = ["--key", str(sshd.key), "--known-hosts", str(known_hosts), "--site", str(roomy_site), *QUIET]
    assert main([sshd.target(), *arguments, "--accept-new-host-keys"]) == 0
    assert known_hosts.read_text() == f"# ours\n# no line break\n[127.0.0.1]:{sshd.port} {sshd.host_key}\n"


def test_a_broken_line_of_known_hosts_is_named(sshd, tmp_path, capsys):
    known_hosts = tmp_path / "known_hosts"
    known_hosts.write_text(f"[127.0.0.1]:{sshd.port} ssh-ed25519 AAA\n")
    assert main([sshd.target(), "--key", str(sshd.key), "--known-hosts", str(known_hosts)]) == 3
    assert "ssh-ed25519 AAA', which holds no key" in capsys.readouterr().out


@pytest.mark.parametrize("extra", [[], ["--accept-new-host-keys"]])
def test_a_changed_host_key_is_unknown_whatever_is_accepted(sshd, tmp_path, extra, capsys):
    known_hosts = tmp_path / "known_hosts"
    before = f"[127.0.0.1]:{sshd.port} {make_key(tmp_path / 'other')}\n"
    known_hosts.write_text(before)
    assert main([sshd.target(), "--key", str(sshd.key), "--known-hosts", str(known_hosts), *extra]) == 3
    printed = capsys.readouterr().out
    assert "another machine may be answering" in printed
    assert "0 usable" in printed
    assert known_hosts.read_text() == before


def test_a_key_the_node_does_not_know_is_unknown_and_names_the_user(sshd, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    make_key(tmp_path / "no_profile")
    arguments = ["--key", str(tmp_path / "no_profile"), "--known-hosts", str(sshd.known_hosts)]
    assert main([sshd.target(), *arguments]) == 3
    assert f"refuses user {sshd.target().partition('@')[0]}" in capsys.readouterr().out


def test_a_closed_port_is_unknown_and_never_free(sshd: LoopbackSshd, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"127.0.0.1:{free_port()}", *sshd.arguments(), "--free"]) == 3
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "cannot be reached" in printed.err


def test_a_node_that_accepts_but_never_answers_is_unknown(sshd, capsys):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        assert main([target, *sshd.arguments(), "--timeout", "1"]) == 3
    assert "unknown" in capsys.readouterr().out


def test_a_fleet_reports_every_node_in_order_and_frees_only_the_good_ones(sshd, tmp_path, roomy_site, capsys):
    hosts = tmp_path / "hosts"
    hosts.write_text(f"{sshd.target('127.0.0.3')}  # no server listens there\n{sshd.target('127.0.0.[1-2]')}\n")
    arguments = [str(hosts), *sshd.arguments(), "--site", str(roomy_site), *QUIET]
    assert main([*arguments, "--free"]) == 3
    assert capsys.readouterr().out == "127.0.0.1\n127.0.0.2\n"
    assert main(arguments) == 3
    table = capsys.readouterr().out
    assert [line.split()[0] for line in table.splitlines() if line.startswith("127.")] == ["127.0.0.3", "127.0.0.[1-2]"]
    assert "3 nodes: 2 ok, 1 unknown; 2 usable" in table
    assert main([*arguments, "--json"]) == 3
    names = [json.loads(line)["node"] for line in capsys.readouterr().out.splitlines()]
    assert names == ["127.0.0.3", "127.0.0.1", "127.0.0.2"], "in the order in which they were named"
    assert main([*arguments, "--json", "--only-faults"]) == 3
    [faulty] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (faulty["node"], set(faulty["checks"])) == ("127.0.0.3", {"reachability"})


def test_an_inventory_judges_each_node_by_its_own_expectations(sshd, tmp_path, capsys):
    inventory = tmp_path / "lab.yaml"
    inventory.write_text(
        f"ssh: {{port: {sshd.port}, key: {sshd.key}}}\n"
        "disks: [{path: /, warn_percent: 100, fail_percent: 100}]\n"
        "nodes:\n  - {hosts: one, address: 127.0.0.1}\n  - {hosts: two, address: 127.0.0.2}\n"
        "overrides: {two: {storage: {shared: [{path: /absent}]}}}\n"
    )
    arguments = ["--known-hosts", str(sshd.known_hosts), "--only", "disk,shared_storage", "--json"]
    assert main([str(inventory), *arguments]) == 2
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(node["node"], node["verdict"]) for node in reports] == [("one", "ok"), ("two", "fail")]
    assert reports[1]["checks"]["shared_storage"]["summary"] == "/absent is absent; mount it"
    assert main([str(inventory), "one", *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["node"] == "one"
    assert main([str(inventory), "three", *arguments]) == 3
    assert "three is no node of the inventory lab" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--only", "clock"], {"reachability", "clock", "history"}),
        (["--only", "disk", "--skip", "clock,history"], {"reachability", "disk"}),
        (["--only", "drift", "--no-history"], {"reachability", "clock", "drift", *READS}),
    ],
)
def test_every_name_of_the_check_column_can_be_chosen(arguments, names, sshd, roomy_site, capsys):
    nodes = [sshd.target("127.0.0.1"), sshd.target("127.0.0.2")]
    main([*nodes, *sshd.arguments(), "--site", str(roomy_site), "--json", *arguments])
    lines = capsys.readouterr().out.splitlines()
    assert [set(json.loads(line)["checks"]) for line in lines] == [names] * 2


def test_a_counter_that_rose_since_the_last_look_is_told(tmp_path, install_nvidia_smi, capsys):
    state = install_nvidia_smi(f"[ $1 = -q ] && sed \"s/DRAM Correctable .*/DRAM Correctable : $(cat $STATE/count)/\" "
                               f"{ROOT}/tests/cluster/outputs/h200_q.txt")  # fmt: skip
    arguments = ["--only", "gpu_ecc", "--history", str(tmp_path / "kept"), "--json"]
    levels = []
    for count in (3, 3, 7):
        (state / "count").write_text(str(count))
        main(arguments)
        levels.append(json.loads(capsys.readouterr().out)["checks"]["history"])
    assert [one["verdict"] for one in levels] == ["ok", "ok", "warn"]
    assert "00000000:07:00.0 corrected by 4" in levels[2]["summary"]
    main(["--only", "gpu_ecc", "--no-history", "--json"])
    assert "history" not in json.loads(capsys.readouterr().out)["checks"]


def test_nagios_and_html_come_from_one_look(tmp_path, roomy_site, capsys):
    page = tmp_path / "nodes.html"
    assert main(["--nagios", "--html", str(page), "--site", str(roomy_site), *QUIET]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("NODES OK - 1 of 1 usable | usable=1;;;0;1 ")
    assert printed.count("\n") == 1
    assert socket.gethostname() in page.read_text()


def test_a_page_takes_the_place_of_an_earlier_page_alone(tmp_path, roomy_site, capsys):
    page = tmp_path / "nodes.html"
    page.write_text("<!doctype html><title>Nodes and edges: My own notes</title>")
    arguments = ["--nagios", "--only", "disk", "--html", str(page), "--site", str(roomy_site), *QUIET]
    assert main(arguments) == 3
    assert "nodes.html is no page of this command and would be overwritten; give --html" in capsys.readouterr().err
    assert page.read_text().endswith("My own notes</title>")
    page.unlink()
    os.mkfifo(page)  # is not waited for
    refuse_foreign(page)
    page.unlink()
    page.write_text("")
    for _ in range(2):
        assert main(arguments) == 0
    assert socket.gethostname() in page.read_text()


def test_a_history_that_cannot_be_written_costs_the_history_and_not_the_check(
    tmp_path: Path, roomy_site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(History, "append", full)
    assert main(["--only", "disk", "--site", str(roomy_site), "--json"]) == 0
    printed = capsys.readouterr()
    assert set(json.loads(printed.out)["checks"]) == {"reachability", "clock", "disk"}
    assert "are not kept (No space left on device); make room" in printed.err
