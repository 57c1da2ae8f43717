"""A real small Slurm: munged and slurmctld on this machine, a slurmd on each host of a lab.

It is Debian's Slurm with a configuration, a key, sockets, spool folders and logs of its own in the lab's folder;
nothing in /etc is read and no system service takes part. Jobs run as root, because slurmctld does. Each host has one
GPU as far as Slurm is concerned: the device /dev/null.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from cluster.active.rails import free_ports
from tests.hosts import lab as lab_module
from tests.hosts.debian import missing, path_of
from tests.hosts.lab import Lab, LabHost, open_lab
from tests.patience import AMPLE, wait_until

PROGRAMS = (("slurmctld", "slurmctld"), ("slurmd", "slurmd"), ("munged", "munge"), ("sbatch", "slurm-client"))
STARTING_SECONDS = 120.0  # of an idle machine, until every slurmd has registered
CPUS = 2  # of each host; all hosts share those of this machine


def unavailable() -> str:
    """Why there can be no Slurm on this machine; empty when there can."""
    return lab_module.unavailable() or missing(*PROGRAMS)


class Slurm:
    """The Slurm of a lab's hosts. Use `open_slurm`."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.folder = lab.folder / "slurm"
        self.conf = self.folder / "slurm.conf"
        self.environment = {**_without_slurm(os.environ), "SLURM_CONF": str(self.conf)}
        self._socket = self.folder / "munge.socket"
        self._programs: list[subprocess.Popen[bytes]] = []

    def open(self) -> None:
        """Start munged, slurmctld and the slurmd of each host; wait until all hosts are idle."""
        for name in ("", "spool", "state"):
            (self.folder / name).mkdir(mode=0o755)
        (self.folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self._write_configuration()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        paths = {"key-file": key, "pid-file": "munge.pid", "log-file": "munge.log", "seed-file": "munge.seed"}
        options = [f"--{name}={self.folder / path}" for name, path in paths.items()]
        munged = path_of("munged", "munge")
        self._start("munged", munged, "--foreground", "--force", f"--socket={self._socket}", *options)
        wait_until(self._socket.is_socket, "munged does not listen")
        self._start("slurmctld", path_of("slurmctld", "slurmctld"), "-D", "-c", "-f", str(self.conf))
        for host in self.lab.hosts:
            self.start_slurmd(host)
        wait_until(self._all_idle, lambda: f"not all hosts are idle; {self._log()}", STARTING_SECONDS)

    def close(self) -> None:
        """Cancel the jobs, then end the programs that `open` started; the lab ends what runs on its hosts."""
        with contextlib.suppress(subprocess.SubprocessError, AssertionError):
            self.run("scancel", "--user=root", "--signal=KILL")
        for program in reversed(self._programs):
            program.terminate()
        for program in self._programs:
            try:
                program.wait(10)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()

    def start_slurmd(self, host: LabHost) -> None:
        """Start the host's slurmd, under the host's own name, in its network, and with process numbers of its own:
        `ray symmetric-run` looks for a Ray among all processes, and ends all that it finds."""
        slurmd = [path_of("unshare", "util-linux"), "--pid", "--fork", "--kill-child", "--mount-proc"]
        slurmd.append(path_of("slurmd", "slurmd"))
        self._start(host.name, *host.inside(*slurmd, "-D", "-c", "-f", str(self.conf), "-N", host.name))

    def run(self, program: str, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
        """Output of one of Slurm's commands, run on the first host. The command has to end well."""
        done = subprocess.run(
            self.lab.hosts[0].inside(path_of(program, "slurm-client"), *arguments),
            env={**self.environment, **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=AMPLE,
        )
        assert done.returncode == 0, (done.args, done.stdout, done.stderr, self._log())
        return done.stdout

    def submit(self, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
        """Submit a job; its number."""
        return self.run("sbatch", "--parsable", *arguments, environment=environment).strip()

    def state(self, job: str) -> str:
        """The state of a job, such as RUNNING."""
        return self.fact(job, "JobState")

    def fact(self, job: str, name: str) -> str:
        """One value of `scontrol show job`."""
        words = self.run("scontrol", "show", "job", "--oneliner", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def wait_for(self, job: str, *states: str, seconds: float = AMPLE / 2) -> str:
        """Wait until the job is in one of these states; which."""
        wait_until(lambda: self.state(job) in states, f"job {job} is not {' or '.join(states)}", seconds)
        return self.state(job)

    def _all_idle(self) -> bool:
        for program in self._programs:
            assert program.poll() is None, self._log()
        done = subprocess.run(
            [path_of("sinfo", "slurm-client"), "--noheader", "--Node", "--format=%T"],
            env=self.environment, capture_output=True, text=True,
        )  # fmt: skip
        return done.returncode == 0 and done.stdout.split() == ["idle"] * len(self.lab.hosts)

    def _write_configuration(self) -> None:
        hosts = "\n".join(
            f"NodeName={host.name} NodeAddr={host.address} CPUs={CPUS} RealMemory=1000 Gres=gpu:1"
            for host in self.lab.hosts
        )
        controller_port, host_port = free_ports(2)
        self.conf.write_text(
            f"ClusterName=lab\nSlurmctldHost={socket.gethostname()}({self.lab.gateway})\n"
            f"SlurmctldPort={controller_port}\nSlurmdPort={host_port}\nSlurmUser=root\nSlurmdUser=root\n"
            # A job that is requeued waits as long as a credential holds.
            f"AuthType=auth/munge\nAuthInfo=socket={self._socket},cred_expire=5\n"
            f"CredType=cred/munge\nStateSaveLocation={self.folder}/state\nSlurmdSpoolDir={self.folder}/spool/%n\n"
            f"SlurmctldPidFile={self.folder}/slurmctld.pid\nSlurmdPidFile={self.folder}/slurmd.%n.pid\n"
            f"SlurmctldLogFile={self.folder}/slurmctld.log\nSlurmdLogFile={self.folder}/slurmd.%n.log\n"
            "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nJobAcctGatherType=jobacct_gather/none\n"
            "AccountingStorageType=accounting_storage/none\nSwitchType=switch/none\nMpiDefault=none\n"
            "SelectType=select/cons_tres\nSelectTypeParameters=CR_Core\nGresTypes=gpu\n"
            "SchedulerParameters=sched_interval=1,batch_sched_delay=1\nKillWait=30\nOverTimeLimit=1\n"
            f"ReturnToService=2\nInactiveLimit=0\nSlurmdTimeout=300\nMessageTimeout=60\nTCPTimeout=20\n{hosts}\n"
            "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO\n"
        )

    def _start(self, name: str, *command: str) -> None:
        """Start a program that runs until `close`; its output goes to NAME.out."""
        with_us = [path_of("setpriv", "util-linux"), "--pdeathsig=TERM"]  # it also ends where the tests are killed
        with open(self.folder / f"{name}.out", "ab") as output:
            self._programs.append(
                subprocess.Popen(
                    [*with_us, *command], env=self.environment, stdin=subprocess.DEVNULL,
                    stdout=output, stderr=output, start_new_session=True,
                )
            )  # fmt: skip

    def _log(self) -> str:
        """The last lines of all programs."""
        logs = [*self.folder.glob("*.out"), *self.folder.glob("*.log")]
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in logs)


@contextlib.contextmanager
def open_slurm(count: int, folder: Path) -> Iterator[Slurm]:
    """Slurm on `count` hosts for the block; `folder` is a new one for their files."""
    with open_lab(count, folder) as lab, contextlib.closing(Slurm(lab)) as slurm:
        slurm.open()
        yield slurm
    assert lab.left_behind() == []


def _without_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))}
