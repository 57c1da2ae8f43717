"""Ray over SSH on hosts of the lab, from inventory to report: started, used by sweeps, half of it lost and back, ended.

One cluster serves the sweeps, because starting it takes the longest. Every test counts what runs on each host.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.inventory.checkout import CODE
from harness.records.provenance import PROJECT_ROOT
from tests.cluster.lab.test_lab_checks import write_inventory
from tests.hosts import lab as lab_module
from tests.hosts.lab import Lab, LabHost, open_lab
from tests.patience import AMPLE, scaled, wait_until
from tests.processes import command_of, content, output_of

if reason := lab_module.unavailable():
    pytest.skip(reason, allow_module_level=True)
pytest.importorskip("ray")

ROOT = Path(__file__).resolve().parents[3]

EXPERIMENT = """
title: Attention over hosts
task: attention
model: tiny
sweep: {{cp_size: [{cp_sizes}]}}
fixed: {{method: burst, seq_len: 256, dtype: fp32}}
steps: {{warmup: 1, measured: {steps}}}
seeds: [{seeds}]
limits: {{trial_seconds: {seconds}}}
"""


class Site:
    """The lab, an inventory of it, and `burst` on the machine beside it."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.inventory = write_inventory(lab, Path("/"))
        self.state = lab.folder / "state"
        self.runs = lab.folder / "runs"
        self.programs: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        program = subprocess.Popen(
            [sys.executable, "-m", "harness", *arguments, "--state", str(self.state)],
            cwd=ROOT,
            env={**os.environ, "COLUMNS": "200"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.programs.append(program)
        return program

    def close(self) -> None:
        """After a test that failed half-way: end what it started, and what that left in the hosts' common /tmp."""
        for program in self.programs:
            program.kill()
            program.communicate()
        if (state := self.state / "cluster.json").exists():
            for node in json.loads(state.read_text())["nodes"]:
                shutil.rmtree(node["directory"], ignore_errors=True)

    def burst(self, *arguments: str) -> tuple[int, str]:
        """Exit code, and everything it printed."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=AMPLE)
        return process.returncode, out + err

    def up(self) -> tuple[int, str]:
        return self.burst("cluster", "up", str(self.inventory), "--known-hosts", str(self.lab.known_hosts))

    def experiment(self, name: str, cp_sizes: str, steps: int, seeds: str = "0", seconds: float = 3600) -> list[str]:
        path = self.lab.folder / f"{name}.yaml"
        path.write_text(EXPERIMENT.format(cp_sizes=cp_sizes, steps=steps, seeds=seeds, seconds=f"{seconds:g}"))
        return ["run", str(path), *self.nodes(), "--out", str(self.runs / name)]

    def variant(self, name: str, line: str) -> str:
        """The inventory with one more line; its path."""
        path = self.lab.folder / f"{name}.yaml"
        path.write_text(f"{line}\n{self.inventory.read_text()}")
        return str(path)

    def nodes(self) -> list[str]:
        return ["--nodes", str(self.inventory), "--known-hosts", str(self.lab.known_hosts)]

    def records(self, name: str) -> list[dict]:
        """In the order of the plan."""
        plan = json.loads((self.runs / name / "run.json").read_text())["trials"]
        files = [self.runs / name / "trials" / trial / "record.json" for trial in plan]
        return [json.loads(file.read_text()) for file in files if file.exists()]

    def started(self, name: str) -> list[dict]:
        """Records in the order in which their trials began."""
        return sorted(self.records(name), key=lambda record: record["started_at"])

    def wait_for_progress(self, name: str, trials: int = 1) -> None:
        """Until so many trials have measured something, in whatever order they run."""

        def measured() -> bool:
            files = (self.runs / name / "trials").glob("*/progress.jsonl")
            return sum(file.stat().st_size > 0 for file in files) >= trials

        wait_until(measured, f"no progress of {trials} trials in {name}")

    def ranks(self, host: LabHost) -> list[int]:
        """Processes on a host that write a rank's log."""
        return [pid for pid in self.lab.processes(host) if "/logs/rank" in output_of(pid)]

    def rays(self) -> list[str]:
        """What runs on the hosts besides sshd."""
        found = []
        for host in self.lab.hosts:
            for pid in self.lab.processes(host):
                line = command_of(pid).strip()
                if line and not line.startswith("sshd"):
                    found.append(f"{host.name}: {line[:120]}")
        return found


@contextlib.contextmanager
def opened_site(count: int, folder: Path) -> Iterator[Site]:
    with open_lab(count, folder) as lab, contextlib.closing(Site(lab)) as site:
        yield site
    assert lab.left_behind() == []


def guests() -> set[Path]:
    """Folders of launchers that take part in some cluster."""
    return set(Path("/tmp").glob("burst-guest-*"))


@pytest.mark.hosts
def test_two_hosts_become_a_cluster_run_a_trial_of_two_ranks_and_are_left_as_they_were(tmp_path):
    with opened_site(2, tmp_path) as site:
        code, said = site.up()
        assert (code, "2 nodes are up, head lab1" in said) == (0, True), said
        code, said = site.burst(*site.experiment("two", cp_sizes="2", steps=2))
        assert code == 0, said
        [record] = site.records("two")
        assert (record["status"], record["launcher"], record["hosts"]) == ("ok", "ray", ["lab1", "lab2"])
        trial = site.runs / "two" / "trials" / record["trial_id"]
        rendered = [json.loads((trial / "environment" / f"{host.name}.json").read_text()) for host in site.lab.hosts]
        assert [node["environment"]["GLOO_SOCKET_IFNAME"] for node in rendered] == [
            host.interface for host in site.lab.hosts
        ]
        assert [node["ranks"] for node in rendered] == [[0], [1]]
        assert {log.name for log in trial.glob("logs/rank*.log")} == {"rank0.log", "rank1.log"}
        assert not any(map(site.ranks, site.lab.hosts))
        code, said = site.burst("cluster", "down")
        assert (code, "2 nodes ended; no process or file of burst is left" in said) == (0, True), said
        assert site.rays() == []


@pytest.mark.hosts
def test_a_cluster_is_started_swept_over_half_lost_and_ended(tmp_path):
    guests_before = guests()
    with opened_site(4, tmp_path) as site:
        lab = site.lab
        head, second, third, down = lab.hosts
        lab.stop_sshd(down)

        code, said = site.up()
        assert code == 1, said  # one node was left out
        assert "3 nodes are up, head lab1" in said
        assert "left out: lab4 is not usable" in said
        token = (site.state / "token").read_text()
        assert token not in said
        for host in (head, second, third):
            for pid in lab.processes(host):
                assert token.encode() not in content(pid, "cmdline") + content(pid, "environ")
        code, said = site.burst("cluster", "status")
        assert (code, said.count(" up ")) == (0, 3), said
        before = site.rays()
        assert "3 nodes are up, head lab1" in site.up()[1]
        assert site.rays() == before  # nothing is started twice
        for host in (head, second, third):
            assert ":10001 " not in lab.run(host, "ss", "-ltn")  # Ray Client

        # A sweep over one host and over two, connected through interfaces of different names. They do not see the
        # run directory: what they get is staged, and what they leave is fetched.
        hidden = site.runs / "sweep"
        hidden.mkdir(parents=True)
        for host in (head, second):
            lab.mount(host, hidden, "1m")
        code, said = site.burst(*site.experiment("sweep", cp_sizes="1, 2", steps=2))
        assert code == 0, said
        one, two = site.records("sweep")
        assert (one["hosts"], two["hosts"]) == (["lab1"], ["lab1", "lab2"])
        assert {record["launcher"] for record in (one, two)} == {"ray"}
        assert len(two["measurement"]["peak_rss_bytes"]) == 2
        trial = site.runs / "sweep" / "trials" / two["trial_id"]
        rendered = [json.loads((trial / "environment" / f"{name}.json").read_text()) for name in two["hosts"]]
        assert [node["environment"]["GLOO_SOCKET_IFNAME"] for node in rendered] == [head.interface, second.interface]
        assert [node["ranks"] for node in rendered] == [[0], [1]]
        assert {log.name for log in trial.glob("logs/rank*.log")} == {"rank0.log", "rank1.log"}
        assert all(lab.run(host, "find", str(hidden), "-mindepth", "1") == "" for host in (head, second))
        assert not [path for host in lab.hosts for path in host.temporary.glob(f"burst-{os.getuid()}-*")]
        assert (site.runs / "sweep" / "report.html").stat().st_size > 1000
        rows = (site.runs / "sweep" / "results.csv").read_text().splitlines()
        assert len(rows) == 3
        assert not any(map(site.ranks, lab.hosts))

        # A host is lost in the middle of the first trial: the sweep goes on with the others.
        run = site.start(*site.experiment("loss", cp_sizes="2", steps=100_000, seeds="0, 1"))
        site.wait_for_progress("loss")
        lab.kill(second)
        site.wait_for_progress("loss", trials=2)
        assert site.ranks(head)
        assert site.ranks(third)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=AMPLE)
        assert run.returncode == 1, out + err
        lost, stopped = site.started("loss")
        assert lost["status"] == "node_lost"
        assert lost["reason"].startswith("lab2 was lost (")
        assert "the ranks on lab1 were ended" in lost["reason"]
        assert stopped["status"] == "interrupted"
        assert not any(map(site.ranks, lab.hosts))
        assert guests() <= guests_before

        # A host that does not answer costs `up` nothing; when it is back, it joins the cluster again.
        code, said = site.burst("cluster", "status", "--timeout", f"{scaled(5.0):g}")
        assert code == 1
        assert "2 of 3 nodes of inventory are up" in said
        code, said = site.up()
        assert (code, "2 nodes are up, head lab1" in said) == (1, True), said
        lab.revive(second)
        lab.start_sshd(down)
        code, said = site.up()
        assert (code, "4 nodes are up, head lab1" in said) == (0, True), said
        code, said = site.burst(*site.experiment("back", cp_sizes="4", steps=2))
        assert code == 0, said
        assert site.records("back")[0]["hosts"] == ["lab1", "lab2", "lab3", "lab4"]

        # What `down` cannot reach is named and not forgotten.
        lab.kill(third)
        code, said = site.burst("cluster", "down", "--timeout", f"{scaled(5.0):g}")
        assert (code, "3 nodes ended, lab3 not." in said) == (1, True), said
        lab.revive(third)
        code, said = site.burst("cluster", "down")
        assert (code, "1 node ended; no process or file of burst is left" in said) == (0, True), said
        assert site.rays() == []
        assert site.burst("cluster", "down")[0] == 2


@pytest.mark.hosts
def test_a_killed_start_and_a_killed_run_leave_what_down_can_end(tmp_path):
    guests_before = guests()
    with opened_site(2, tmp_path) as site:
        # Nothing was started on a node that does not answer, and the next attempt is not blocked.
        no_python = site.variant("no-python", "software: {python: /absent/python}")
        code, said = site.burst("cluster", "up", no_python, "--known-hosts", str(site.lab.known_hosts))
        assert (code, said.count("\n")) == (2, 3), said
        assert "left out: lab1 is not usable" in said
        assert "/absent/python is no executable file" in said
        assert "burst: none of the 2 nodes is usable" in said

        starting = site.start("cluster", "up", str(site.inventory), "--known-hosts", str(site.lab.known_hosts))
        wait_until(lambda: any("gcs_server" in line for line in site.rays()), "no head was started")
        starting.kill()
        starting.communicate()
        assert site.burst("cluster", "down")[0] == 0
        assert site.rays() == []  # also no `ray start` that was still under way

        starting = site.start("cluster", "up", str(site.inventory), "--known-hosts", str(site.lab.known_hosts))
        wait_until(lambda: any("gcs_server" in line for line in site.rays()), "no head was started")
        starting.kill()
        starting.communicate()
        code, said = site.up()  # goes on from there
        assert (code, "2 nodes are up" in said) == (0, True), said
        run = site.start(*site.experiment("killed", cp_sizes="2", steps=100_000))
        site.wait_for_progress("killed")
        assert all(map(site.ranks, site.lab.hosts))
        run.kill()
        run.communicate()
        wait_until(lambda: not any(map(site.ranks, site.lab.hosts)), "ranks outlived the run that started them")
        wait_until(lambda: guests() <= guests_before, "the guest outlived the run that started it")
        assert site.burst("cluster", "down")[0] == 0
        assert site.rays() == []


@pytest.mark.hosts
def test_without_its_head_a_run_ends_with_a_reason_and_the_printed_command_goes_on_at_once(tmp_path):
    guests_before = guests()
    with opened_site(3, tmp_path) as site:
        head, second, third = site.lab.hosts
        assert site.up()[0] == 0
        command = site.experiment("headless", cp_sizes="2", steps=100_000, seeds="0, 1")
        run = site.start(*command)
        site.wait_for_progress("headless")
        site.lab.kill(head)
        out, err = run.communicate(timeout=AMPLE)
        assert run.returncode == 1, out + err
        first, last = site.started("headless")
        assert (first["status"], last["status"]) == ("node_lost", "node_lost"), out + err
        for record in (first, last):
            assert record["reason"].endswith("; --resume --retry-failed goes on with the hosts that answer"), record
        assert (site.runs / "headless" / "report.html").exists(), out + err
        wait_until(lambda: not any(map(site.ranks, (second, third))), "ranks outlived the head")
        wait_until(lambda: guests() <= guests_before, "the guest outlived the run")
        code, said = site.burst("cluster", "status", "--timeout", f"{scaled(5.0):g}")
        assert (code, "0 of 3 nodes of inventory are up" in said) == (1, True), said
        assert "The head is lost: burst cluster up INVENTORY starts a cluster of the nodes that answer" in said

        # The head stays lost: the others make a cluster of their own, without any other command before.
        run = site.start(*command, "--resume", "--retry-failed")
        wait_until(lambda: site.ranks(second) and site.ranks(third), "the run does not go on without the head")
        site.wait_for_progress("headless")
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=AMPLE)
        assert "the head lab1 is lost (" in err
        assert "left out: lab1: " in err
        assert "interrupted" in [record["status"] for record in site.records("headless")], out + err
        site.lab.revive(head)
        code, said = site.up()  # ends what is left on the host that was the head, and lets it join
        assert (code, "3 nodes are up, head lab2" in said) == (0, True), said
        assert site.burst("cluster", "down")[0] == 0
        assert site.rays() == []


@pytest.mark.hosts
def test_a_run_without_a_cluster_has_one_of_its_own_and_a_late_trial_leaves_nothing(tmp_path):
    with opened_site(2, tmp_path) as site:
        seconds = scaled(5.0)
        run = site.experiment("late", cp_sizes="1, 2, 3", steps=100_000, seconds=seconds)
        run += ["--set", "fixed.seq_len=240"]  # which three ranks could divide
        code, said = site.burst("plan", run[1], *site.nodes(), "--json")  # which starts nothing
        assert (code, "no cluster is up; start it with burst cluster up" in said) == (2, True), said
        assert site.rays() == []

        running = site.start(*run)
        wait_until((site.runs / "late" / "run.json").exists, "the run has not begun")
        code, said = site.burst(*run)
        assert (code, "belongs to another burst run" in said) == (2, True), said
        out, err = running.communicate(timeout=AMPLE)
        assert running.returncode == 1, out + err
        *late, refused = site.records("late")
        assert [(record["status"], record["hosts"]) for record in late] == [
            ("timeout", ["lab1"]), ("timeout", ["lab1", "lab2"])
        ], err  # fmt: skip
        assert late[1]["reason"].startswith(f"not finished within its {seconds:g} s")
        assert refused["status"] == "refused"
        assert "3 ranks do not spread evenly over the 2 nodes with 1 each" in refused["reason"]
        assert site.rays() == []
        assert site.burst("cluster", "down")[0] == 2  # nothing is left to end


def test_a_cluster_that_is_none_is_said_in_one_sentence(tmp_path, capsys):
    from harness.cli import main

    hosts = tmp_path / "hosts"
    hosts.write_text("gpu[01-02]\n")
    state = ["--state", str(tmp_path / "state")]
    experiment = str(ROOT / "experiments" / "quickstart.yaml")
    assert main(["run", experiment, "--nodes", str(hosts), "--launcher", "local", *state]) == 2
    assert "--launcher local starts ranks on this machine alone" in capsys.readouterr().err
    assert main(["run", experiment, "--nodes", str(tmp_path / "absent.yaml"), *state]) == 2
    assert main(["cluster", "up", str(tmp_path / "absent.yaml"), *state]) == 2
    assert main(["cluster", "status", "--timeout", "0", *state]) == 2
    for action in ("status", "down"):
        assert main(["cluster", action, *state]) == 2
    capsys.readouterr()


@pytest.mark.hosts
def test_hosts_that_cannot_take_part_cost_themselves_alone_also_the_first_of_them(tmp_path):
    """No interpreter, another checkout, a Ray that does not start: the fourth host is a cluster of its own."""
    checkout = tmp_path / "other" / "harness"
    for package in CODE:
        shutil.copytree(
            PROJECT_ROOT / package,
            tmp_path / "other" / package,
            ignore=shutil.ignore_patterns("upstream", "__pycache__"),
        )
    (checkout / "__init__.py").write_text("# another version\n")
    (tmp_path / "lab").mkdir()
    with opened_site(4, tmp_path / "lab") as site:
        bad = site.variant(
            "bad",
            "overrides:\n"
            "  lab1: {software: {python: /absent/python}}\n"
            f"  lab2: {{software: {{folder: {checkout.parent}}}}}\n"
            "  lab3: {ray: {object_store_gib: 1000000}}",
        )
        nodes = ["--nodes", bad, "--known-hosts", str(site.lab.known_hosts)]
        site.experiment("one", cp_sizes="1", steps=2)
        code, said = site.burst("cluster", "up", bad, "--known-hosts", str(site.lab.known_hosts))
        assert code == 1, said
        assert "1 node is up, head lab4" in said
        left_out = {line.split()[2].strip(":"): line for line in said.splitlines() if line.startswith("left out: ")}
        assert sorted(left_out) == ["lab1", "lab2", "lab3"]
        assert "/absent/python is no executable file" in left_out["lab1"]
        assert "code is " in left_out["lab2"]
        assert " on this machine; install the same there" in left_out["lab2"]
        assert left_out["lab3"].startswith("left out: lab3: Ray ended with exit code 1 as it started; see its log: ")
        log = Path(left_out["lab3"].rpartition("its log: ")[2])
        assert log.parent == site.state / "logs"
        assert "Traceback" in log.read_text()
        code, said = site.burst("cluster", "status")
        assert (code, said.split()[:2]) == (0, ["lab4", "head"]), said
        assert site.burst("run", str(site.lab.folder / "one.yaml"), *nodes, "--out", str(site.runs / "one"))[0] == 0
        assert site.records("one")[0]["hosts"] == ["lab4"]
        assert site.burst("cluster", "down")[0] == 0
        assert site.rays() == []
