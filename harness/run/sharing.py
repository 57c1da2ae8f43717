"""Which trials of a round share ranks, and so follow one another, and how many ranks a set of them is started with."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from pathlib import Path

from harness.launch.ranks import kind
from harness.run.attempt import RunContext, job_of
from harness.spec.trial import Trial


class Sharing:
    """Trials of one kind form a group, whatever their number of ranks: a set with the most of them runs all.

    Where trials cannot share ranks with those of another size (`Job.same_size`), each size is a group, and trials that
    can share with any go to the largest.
    """

    def __init__(self, trials: Iterable[Trial], host: RunContext) -> None:
        own: dict[str, tuple[Hashable, bool, int]] = {}  # by trial: kind, whether sizes must be equal, number of ranks
        largest: dict[Hashable, int] = {}  # by kind: the most ranks of a trial whose size must be equal
        for trial in trials:
            if not trial.share_ranks or trial.unsupported_reason is not None:
                continue
            job = job_of(trial, Path(trial.id), host)
            job_kind = kind(job)
            if job_kind is None:
                continue
            own[trial.id] = job_kind, job.same_size, job.ranks
            if job.same_size:
                largest[job_kind] = max(job.ranks, largest.get(job_kind, 0))
        self._groups: dict[str, Hashable] = {}
        self._sizes: dict[Hashable, set[int]] = {}
        for trial_id, (of, same_size, ranks) in own.items():
            group = of, ranks if same_size else largest.get(of, 0)
            self._groups[trial_id] = group
            self._sizes.setdefault(group, set()).add(ranks)

    def group(self, trial: Trial) -> Hashable:
        """Equal for trials that the same ranks are to run one after another; None for one with ranks of its own."""
        return self._groups.get(trial.id)

    def sizes(self, trial: Trial) -> tuple[int, ...]:
        """World sizes of the trials of its group; none for a trial of no group."""
        group = self.group(trial)
        return tuple(sorted(self._sizes[group])) if group is not None else ()
