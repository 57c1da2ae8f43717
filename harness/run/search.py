"""Which sequence lengths a run need not try any more, and which it tries next to find the longest that trains.

Everything follows from the records of the trials, so a run that is resumed goes on where it was, and the trials of a
search are trials like all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from engine.settings import TrialSettings
from harness.records.record import Status
from harness.spec.experiment import Search
from harness.spec.trial import Trial, id_of

TOO_LONG: dict[str, frozenset[Status]] = {
    "no": frozenset(),
    "oom": frozenset({"oom", "host_oom"}),
    "failure": frozenset({"oom", "host_oom", "failed", "timeout", "hang"}),
}


class LengthSearch:
    """The search of one run: for each combination of all settings but `seq_len`, a group, on its own."""

    def __init__(self, search: Search, trials: Sequence[Trial], at_length: Callable[[Trial, int], Trial]) -> None:
        """`trials` are those of the plan that may run; `at_length` plans one of them at another length."""
        self._search = search
        self._at_length = at_length
        self._planned: dict[str, list[Trial]] = {}
        for trial in trials if self.active else ():
            self._planned.setdefault(group_of(trial.settings), []).append(trial)

    @property
    def active(self) -> bool:
        return self._search.until != "no"

    def groups(self) -> list[str]:
        return list(self._planned)

    def has(self, settings: TrialSettings) -> bool:
        """Whether a trial with these settings may be one of the search."""
        return bool(self._search.bisect) and group_of(settings) in self._planned

    def ascending(self, trials: Sequence[Trial]) -> list[Trial]:
        """The trials in the same order, but those of each group by length in the places that they have together."""
        if not self.active:
            return list(trials)
        places: dict[str, list[int]] = {}
        for place, trial in enumerate(trials):
            places.setdefault(group_of(trial.settings), []).append(place)
        arranged = list(trials)
        for taken in places.values():
            by_length = sorted((trials[place] for place in taken), key=lambda trial: trial.settings.seq_len)
            for place, trial in zip(taken, by_length, strict=True):
                arranged[place] = trial
        return arranged

    def needless(self, settings: TrialSettings, outcomes: Mapping[int, Status]) -> str | None:
        """Why a trial need not run, given how lengths of its group ended; None where it does."""
        ended = {length: status for length, status in outcomes.items() if status in TOO_LONG[self._search.until]}
        shorter = min((length for length in ended if length < settings.seq_len), default=None)
        if shorter is None:
            return None
        return f"not run because {shorter} tokens ended as {ended[shorter]} (search.until: {self._search.until})"

    def further(self, group: str, outcomes: Mapping[int, Status]) -> Trial | None:
        """The next trial of a group, given how its lengths ended; None where it has been searched, is not yet to be, or
        ran into an end that tells nothing of its length."""
        if not self._search.bisect:
            return None
        planned = self._planned.get(group, ())  # none where the plan refuses the whole group
        for trial in planned:
            if trial.settings.seq_len not in outcomes and self.needless(trial.settings, outcomes) is None:
                return None  # of the plan, and still to run
        length = next_length(self._search, outcomes)
        if not planned or length is None or length in outcomes:
            return None
        return self._at_length(planned[0], length)


def next_length(search: Search, outcomes: Mapping[int, Status]) -> int | None:
    """The next length to try: twice the longest that trained while none was too long, else half-way to the shortest too
    long one, in steps of `search.bisect`. None where both are one step apart, or no length is left."""
    step = search.bisect
    trained = max((length for length, status in outcomes.items() if status == "ok"), default=0)
    too_long = [
        length for length, status in outcomes.items() if length > trained and status in TOO_LONG[search.until]
    ]  # fmt: skip
    if not too_long:
        return min(2 * trained, search.at_most) if 0 < trained < search.at_most else None
    steps = -(-(min(too_long) - trained) // step)
    return trained + steps // 2 * step if steps > 1 else None


def group_of(settings: TrialSettings) -> str:
    """Equal for settings that differ in their sequence length alone, and in what the planner chose for it."""
    return id_of(replace(settings, seq_len=1))
