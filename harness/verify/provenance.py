"""Whether a record says enough to run it again: commit, command, hosts, software, GPU; or states why it cannot."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from harness.records.provenance import DIRTY, HOME, PROJECT_ROOT, private_in, secret_variables
from harness.records.record import Record
from harness.records.stated import (
    ONE_ROUND,
    ONE_STEP,
    About,
    FailureReason,
    MachineOfRounds,
    StatedProvenance,
    TypedCommand,
)
from harness.verify.finding import Failure, Gap

_SOFTWARE = ("python", "torch")
NOT_HELD = "which the repository here does not hold"
_COMMIT = re.compile(r"[0-9a-f]{7,64}")


class CommitHistory:
    """The history of a checkout. Where it cannot be asked, `absent` says why, and no commit is judged."""

    def __init__(self, root: Path = PROJECT_ROOT) -> None:
        self._root = root
        self._judged: dict[str, str] = {}
        self.absent = self._why_absent()

    def problem(self, commit: str) -> str:
        """What is wrong with this commit, such as `which no repository here holds`; empty when it is an ancestor."""
        if not _COMMIT.fullmatch(commit):
            return "which is no commit's name"
        if self.absent:
            return ""
        if commit not in self._judged:
            code = self._git("merge-base", "--is-ancestor", commit, "HEAD").returncode
            self._judged[commit] = {0: "", 1: "which the history here does not lead to"}.get(code, NOT_HELD)
        return self._judged[commit]

    def _why_absent(self) -> str:
        try:
            top = self._git("rev-parse", "--show-toplevel")
            if top.returncode or Path(top.stdout.strip()).resolve() != self._root.resolve():
                return "no git repository here"
            if self._git("rev-parse", "--is-shallow-repository").stdout.strip() == "true":
                return "the git repository here is shallow (git fetch --unshallow completes it)"
            return ""
        except (OSError, subprocess.SubprocessError):
            return "no git here"

    def _git(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["git", "-C", str(self._root), *arguments], capture_output=True, text=True, timeout=60, check=False
        )


def provenance_findings(
    record: Record, text: str, stated: StatedProvenance, history: CommitHistory
) -> Iterator[Failure | Gap]:
    """Failures, and gaps that provenance.yaml or the tables state. `text` is the record's file."""
    for about, found, expected in _missing(record, text, stated, history):
        says = stated.reason(record.trial_id, about)
        if says is not None:
            yield Gap(record.trial_id, about, says)
        else:
            yield Failure(record.trial_id, about, found, expected)
    rounds = record.step_seconds_by_round if record.status == "ok" else []
    if len(rounds) == 1:  # tables say so beside the row, and there is no interval to be wrong
        says = stated.reason(record.trial_id, "rounds") or ONE_ROUND
        yield Gap(record.trial_id, "rounds", says)
        if len(rounds[0]) == 1:
            says = stated.reason(record.trial_id, "samples") or ONE_STEP
            yield Gap(record.trial_id, "samples", says)
    secrets = [kind for kind in private_in(text) if kind != HOME]
    secrets += [f"the variable {name} unhidden" for name in secret_variables(record.environment)]
    for kind in secrets:
        yield Failure(record.trial_id, "secrets", kind, "none in a record")
    for one in stated.reasons_of(record.trial_id):
        if "conditions" in one.about:
            yield Gap(record.trial_id, "conditions", one.says)


def unused_statements(stated: StatedProvenance, trials: list[str], lacking: list[str]) -> Iterator[Failure]:
    """Entries of provenance.yaml that name no record that is there, or for reasons about trials alone none of those
    that are `lacking`."""
    entries: list[TypedCommand | FailureReason | MachineOfRounds] = [
        *stated.commands,
        *stated.reasons,
        *stated.machines,
    ]
    for one in entries:
        ids, what = trials, "record"
        if isinstance(one, FailureReason) and one.only_of_lacking:
            ids, what = lacking, "trial without a record"
        elif isinstance(one, FailureReason) and "trials" in one.about:
            ids = [*trials, *lacking]
        if not any(map(one.names, ids)):
            yield Failure(
                "provenance.yaml",
                "trials",
                f"{', '.join(one.trials)}, which no {what} has as its id",
                "globs of trial ids in this folder",
            )


def _missing(
    record: Record, text: str, stated: StatedProvenance, history: CommitHistory
) -> Iterator[tuple[About, str, str]]:
    """What a check is about, what the record has, and what it should have."""
    commit = record.commit.removesuffix(DIRTY)
    if not commit:
        yield "commit", "none", "the commit of the code"
    elif problem := history.problem(commit):
        about: About = "lost_commit" if problem == NOT_HELD else "commit"
        yield (
            about,
            f"{commit[:40]}, {problem}",
            f"a commit of the history, or a reason about {about} in provenance.yaml",
        )
    elif record.commit != commit:
        yield "commit", f"{commit[:12]} with changes that are in no commit", "the code of a commit, unchanged"
    if not record.run_command and stated.command(record.trial_id) is None:
        yield "command", "none", "the `burst run` that made it, or `command` in provenance.yaml"
    if not record.hosts and record.status != "refused":
        yield "hosts", "none", "the hosts it ran on"
    if HOME in private_in(text):
        yield "paths", HOME, "paths that mean something elsewhere"
    measured = record.measurement
    if measured is None:
        return
    if not record.gpu:
        yield "gpu", "no name", "the GPU's name, or cpu"
    if lacking := [name for name in _SOFTWARE if not measured.software.get(name)]:
        yield "software", f"no version of {' and '.join(lacking)}", "the versions that ran"
    if measured.device != "cpu":
        if not measured.software.get("driver"):
            yield "driver", "no version", "the version of the GPU driver"
        if not measured.gpus:
            yield "gpu", "no digests", "a digest of each rank's GPU, which tells GPUs apart"
