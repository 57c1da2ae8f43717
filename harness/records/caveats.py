"""What a reader of a record's figures has to know: what the record shows itself, and what is stated about it."""

from __future__ import annotations

from engine.measurement import ALLOCATION_RETRIES, UNCHECKED
from harness.records.provenance import DIRTY
from harness.records.record import Record
from harness.records.stated import Stated

ONE_ROUND = "one round"
ONE_STEP = "one step"

# By NVML's names: reasons that say a GPU was too hot or its supply too weak, unlike the power cap of normal work.
_FAULTS = frozenset({"hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown"})


def caveats_of(record: Record, stated: Stated) -> list[str]:
    """Sentences without full stops, each once: first what the record shows, then what provenance.yaml states."""
    found = [*_shown_by(record), *(one.says for one in stated.reasons_of(record.trial_id))]
    return list(dict.fromkeys(found))


def _shown_by(record: Record) -> list[str]:
    found = []
    if record.commit.endswith(DIRTY):
        found.append("the code differed from its commit")
    measured = record.measurement
    if record.status != "ok" or measured is None:
        return found
    if len(record.step_seconds_by_round) == 1:
        found.append(ONE_ROUND)
    if record.lanes > 1:
        found.append(f"up to {record.lanes} trials ran on parts of the machine at the same time")
    if len(measured.step_seconds) == 1:
        found.append(ONE_STEP)
    profile = measured.extra.get("profile")
    if isinstance(profile, dict) and profile.get("of") == "measured_step":
        found.append("a measured step is the traced one")
    if retries := measured.extra.get(ALLOCATION_RETRIES):
        found.append(
            f"a GPU's memory ran out {max(retries)} times in the measured steps: it freed cached blocks and waited"
        )
    if why := measured.extra.get(UNCHECKED):
        found.append(f"not compared with a float64 run: {why}")
    if record.reason:  # of an ok record: what went wrong after its figures were there
        found.append(record.reason)
    states = [*measured.gpus_before, *measured.gpus_after]
    states += [one for part in record.rounds for one in (*part.gpus_before, *part.gpus_after)]
    if faults := sorted(_FAULTS & {reason for one in states for reason in one.throttle or ()}):
        found.append(f"GPU clocks were lowered ({', '.join(faults)})")
    return found
