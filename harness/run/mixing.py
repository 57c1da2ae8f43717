"""Whether a run that is resumed would add rows to those of another experiment, commit, GPU or driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from harness.base.errors import UsageError
from harness.records.record import Record
from harness.run.attempt import RunContext


def differences(
    records: Iterable[Record],
    experiment: str,
    host: RunContext,
    planned: Callable[[Record], bool],
    *,
    adds: bool,
    changed: Collection[str] = (),
) -> list[str]:
    """In which respects records that stay are unlike those that the run would add, in words; empty for none.

    `planned` says whether the experiment has the trial of a record. `adds`: the run executes some trials; one that adds
    no record mixes no commits. `changed` are the digests of the changed trees from which the run has records so far.
    What one side does not know is no difference.
    """
    found: Counter[str] = Counter()
    for record in records:
        if record.experiment != experiment:
            found[f"of experiment {record.experiment}, not {experiment}"] += 1
        elif not planned(record):
            found["of trials that this experiment does not have"] += 1
        if not adds or (record.status == "refused" and not record.launcher):  # the plan's own word: nothing ran
            continue
        driver = record.measurement.software.get("driver", "") if record.measurement else ""
        for what, then, now in (
            ("at commit", record.commit, host.commit),
            ("on", record.gpu, host.gpu),
            ("with driver", driver, host.machine.driver),
        ):
            if then and now and then not in now.split(" + "):
                found[f"{what} {then}, not {now}"] += 1
        if host.changes and record.commit == host.commit and set(changed) - {host.changes}:
            found[f"at commit {host.commit}, whose changes were others"] += 1
    return [f"{count} {'record' if count == 1 else 'records'} {what}" for what, count in found.items()]


def refuse_mixing(run_dir: Path, found: list[str]) -> None:
    """Raise UsageError where there are differences."""
    if found:
        raise UsageError(
            f"{run_dir} holds {'; '.join(found)}; give --out another directory, or --mix to "
            "keep both in one results.csv"
        )
