"""What a reader of a record's figures has to know: what the record shows itself, and what is stated about it."""

from __future__ import annotations

from collections.abc import Sequence

from engine.measurement import ALLOCATION_RETRIES, UNCHECKED
from harness.records.provenance import DIRTY
from harness.records.record import Record
from harness.records.stated import StatedProvenance

ONE_ROUND = "one round"
TWO_ROUNDS = "two rounds"
ONE_STEP = "one step"

_STEADY = 0.005  # from the first to the last step of a round

# By NVML's names: reasons that say a GPU was too hot or its supply too weak, unlike the power cap of normal work.
_FAULTS = frozenset({"hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown"})


def caveats_of(record: Record, stated: StatedProvenance) -> list[str]:
    """Sentences without full stops, each once: first what the record shows, then what provenance.yaml states."""
    reasons = (one.says for one in stated.reasons_of(record.trial_id))
    return list(dict.fromkeys([*_shown_by(record), *reasons, *_machines_of(record, stated)]))


def _machines_of(record: Record, stated: StatedProvenance) -> list[str]:
    """Which rounds ran on which machine, as one sentence; nothing where provenance.yaml names no machine."""
    rounds = [one.number for one in record.rounds] or [1]  # a record from before there were rounds holds the first
    by_machine: dict[str, list[int]] = {}
    for number in rounds:
        if machine := stated.machine(record.trial_id, number):
            by_machine.setdefault(machine, []).append(number)
    if not by_machine:
        return []
    if len(by_machine) == 1:
        return [f"ran on {next(iter(by_machine))}"]
    places = [
        f"{'rounds' if len(numbers) > 1 else 'round'} {' and '.join(map(str, numbers))} on {machine}"
        for machine, numbers in by_machine.items()
    ]
    return [f"not all rounds ran on one machine: {', '.join(places)}"]


def _shown_by(record: Record) -> list[str]:
    found = []
    if record.commit.endswith(DIRTY):
        found.append("the code differed from its commit")
    measured = record.measurement
    if record.status != "ok" or measured is None:
        return found
    if why := measured.extra.get(UNCHECKED):
        found.append(f"not compared with float64 ({why})")
    if len(record.step_seconds_by_round) == 1:
        found.append(ONE_ROUND)
    if len(record.step_seconds_by_round) == 2:
        found.append(TWO_ROUNDS)
    if change := _change_within_rounds(record.step_seconds_by_round):
        longer = "longer" if change > 0 else "shorter"
        found.append(
            f"steps still changed: in every round the last took {abs(change):.1%} {longer} than the first or more"
        )
    if len(measured.step_seconds) == 1:
        found.append(ONE_STEP)
    profile = measured.extra.get("profile")
    if profile is not None and profile["of"] == "measured_step":
        found.append("a measured step is the traced one")
    if retries := measured.extra.get(ALLOCATION_RETRIES):
        found.append(
            f"a GPU's memory ran out {max(retries)} times in the measured steps: it freed cached blocks and waited"
        )
    if record.reason:  # of an ok record: what went wrong after its figures were there
        found.append(record.reason)
    states = [*measured.gpus_before, *measured.gpus_after]
    states += [one for part in record.rounds for one in (*part.gpus_before, *part.gpus_after)]
    if faults := sorted(_FAULTS & {reason for one in states for reason in one.throttle or ()}):
        found.append(f"GPU clocks were lowered ({', '.join(faults)})")
    return found


def _change_within_rounds(rounds: Sequence[Sequence[float]]) -> float:
    """By how much the last step of a round differs from its first, as a share of the first: the smallest change of all
    rounds, where each has one of more than _STEADY in the same direction; else 0. One round shows no such pattern."""
    changes = [steps[-1] / steps[0] - 1 for steps in rounds]
    if len(rounds) < 2 or not (min(changes) > _STEADY or max(changes) < -_STEADY):
        return 0.0
    return min(changes, key=abs)
