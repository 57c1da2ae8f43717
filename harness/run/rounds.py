"""Rounds of a run: their random order, the rounds that a trial lacks, and several rounds as one record.

Every round runs all trials once, in an order of its own, so that what changes with time (clocks, neighbours, a warm
machine) does not favour the trial that the file names first.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import replace
from typing import Literal, Protocol, TypeVar

from engine.measurement import ALLOCATION_RETRIES, LINK, WARM_UP, Extra, Measurement
from harness.records.judging import judged, worse_errors
from harness.records.record import RESULTS, Record, Round, Status
from harness.spec.trial import Trial

Item = TypeVar("Item")


class Shuffle(Protocol):
    """Puts what it is given into another order, in place."""

    def __call__(self, order: MutableSequence[Item], /) -> None: ...


Order = Literal["random", "file", "shortest", "longest"]

# How far figures of two rounds may lie apart without a word: sums in another order change them on GPUs.
LOSS_APART = 0.01
GRAD_NORM_APART = 0.1
ERROR_FACTOR = 2.0  # between errors against float64
ERROR_FLOOR = 1e-9  # below it an error is rounding of float64 itself


def arranged(trials: Sequence[Trial], order: Order, shuffle: Shuffle) -> list[Trial]:
    """The trials of a round in the order asked for: at random, as in the file, or those first that have the least, or
    the most, model FLOPs per rank."""
    if order in ("shortest", "longest"):
        return sorted(trials, key=_rank_flops, reverse=order == "longest")
    arranged = list(trials)
    if order == "random":
        shuffle(arranged)
    return arranged


def _rank_flops(trial: Trial) -> float:
    """Model FLOPs of one step on one rank; 0 for a trial that cannot run."""
    from harness.metrics.flops import work_of  # loads numpy, for which `burst status` is not to wait

    return work_of(trial.settings).model / trial.settings.world_size if trial.unsupported_reason is None else 0.0


def rounds_of(record: Record) -> list[Round]:
    """The rounds of a record; of one from before there were rounds, the one that its measurement is."""
    if record.rounds or record.measurement is None or record.status != "ok":
        return list(record.rounds)
    return [round_of(record, number=1, place=0)]  # such records do not tell the place


def round_of(record: Record, *, number: int, place: int) -> Round:
    """The record of one attempt as a round; `place`: its position in the order of that round, from 1."""
    measured = record.measurement or Measurement(step_seconds=[])
    return Round(
        number=number,
        place=place,
        started_at=record.started_at,
        wall_seconds=record.wall_seconds,
        step_seconds=list(measured.step_seconds),
        forward_seconds=list(measured.forward_seconds),
        status=record.status,
        reason=record.reason,
        hosts=list(record.hosts),
        gpus=list(measured.gpus),
        gpus_before=list(measured.gpus_before),
        gpus_after=list(measured.gpus_after),
        link_gib_per_second=dict(measured.extra.get(LINK, {})),
    )


def finished_rounds(record: Record) -> list[Round]:
    """The rounds that no signal broke off."""
    return [one for one in rounds_of(record) if one.status != "interrupted"]


def round_in(record: Record, number: int) -> Round | None:
    """The round of that number, where the record has it."""
    return next((one for one in rounds_of(record) if one.number == number), None)


def statuses_of(record: Record) -> set[Status]:
    """How the trial, and each of its rounds, ended."""
    return {record.status, *(one.status for one in record.rounds)}


def alone(record: Record, number: int) -> Record:
    """The record with outcome, duration and hosts of one of its rounds; unchanged where it lacks that round."""
    one = round_in(record, number)
    if one is None:
        return record
    latest = replace(record, wall_seconds=one.wall_seconds, hosts=one.hosts)
    # A wrong trial runs no further rounds, so this is the one that showed it.
    return latest if record.status == "wrong" else replace(latest, status=one.status, reason=one.reason)


class PendingRounds:
    """Which round of which trial is still to run. A trial without figures runs in round 1 alone."""

    def __init__(self, rounds: int, *, retry_failed: bool = False) -> None:
        """`retry_failed`: rounds that failed after others had given figures run again."""
        self._rounds = rounds
        self._retry_failed = retry_failed

    def due(self, record: Record | None, number: int) -> bool:
        """Whether a trial that has left `record` runs in round `number`; None: it has left nothing to be kept."""
        if record is None or record.status != "ok":
            return record is None and number == 1
        if (one := round_in(record, number)) is not None:
            return one.status == "interrupted" or (self._retry_failed and one.status not in RESULTS)
        return number <= self._rounds

    def lacks(self, record: Record) -> bool:
        """Whether any round of a trial with this record is due."""
        last = max(self._rounds, *(one.number for one in rounds_of(record)), 1)
        return any(self.due(record, number) for number in range(1, last + 1))


def with_round(before: Record, latest: Record) -> Record:
    """The record of a trial that had figures (`before`) with one round more, or one that ran again.

    `latest` is the record of that round alone. Where it gave figures, launcher, commit, command and the like are its
    own; what is unlike the rounds before is said in its reason, and so in the record's.
    """
    [one] = latest.rounds
    if latest.measurement is not None:
        unlike = "; ".join(filter(None, [one.reason, *_differences(before, latest)]))
        one = replace(one, reason=unlike)
    others = [other for other in rounds_of(before) if other.number != one.number]
    rounds = sorted([*others, one], key=lambda each: each.number)
    measurement = before.measurement
    assert measurement is not None, before.trial_id
    whole = replace(
        latest if latest.measurement is not None else before,
        status="ok",
        measurement=_together(measurement, latest.measurement, rounds),
        started_at=rounds[0].started_at,
        wall_seconds=round(sum(each.wall_seconds for each in rounds), 3),
        attempts=latest.attempts,
        rounds=rounds,
    )
    return judged(replace(whole, reason=whole.reason_of_rounds()))


def _together(before: Measurement, latest: Measurement | None, rounds: Sequence[Round]) -> Measurement:
    """All rounds as one measurement; see `harness.records.record.Record`. None: the latest gave no figures."""
    whole = replace(
        latest or before,
        step_seconds=[seconds for one in rounds for seconds in one.step_seconds],
        forward_seconds=[seconds for one in rounds for seconds in one.forward_seconds],
    )
    if latest is None:
        return whole
    return replace(
        whole,
        peak_allocated_bytes=_largest(before.peak_allocated_bytes, latest.peak_allocated_bytes),
        peak_reserved_bytes=_largest(before.peak_reserved_bytes, latest.peak_reserved_bytes),
        peak_rss_bytes=_largest(before.peak_rss_bytes, latest.peak_rss_bytes),
        extra=latest.extra
        | worse_errors(before.extra, latest.extra)
        | _retries(before, latest)
        | _warm_up(before, latest),
    )


def _retries(before: Measurement, latest: Measurement) -> Extra:
    """The entry of `extra` with each rank's repeated allocations in all rounds; no entry where no round has one."""
    counts = [one.extra.get(ALLOCATION_RETRIES, []) for one in (before, latest)]
    added = [sum(pair) for pair in itertools.zip_longest(*counts, fillvalue=0)]
    return {ALLOCATION_RETRIES: added} if added else {}


def _warm_up(before: Measurement, latest: Measurement) -> Extra:
    """The entry of `extra` for all rounds: the longest of them, and settled where each was; no entry where none has."""
    found = [one for each in (before, latest) if (one := each.extra.get(WARM_UP)) is not None]
    if not found:
        return {}
    return {WARM_UP: {"steps": max(one["steps"] for one in found), "settled": all(one["settled"] for one in found)}}


def _largest(before: list[int], latest: list[int]) -> list[int]:
    """Rank by rank; the newer ones where a side has none."""
    if len(before) != len(latest):
        return latest or before
    return [max(pair) for pair in zip(before, latest, strict=True)]


def _differences(before: Record, latest: Record) -> list[str]:
    """In which respects, but for its times, a round is unlike the ones before."""
    ours, theirs = latest.measurement, before.measurement
    assert ours is not None, latest.trial_id
    assert theirs is not None, before.trial_id
    exact = latest.settings.deterministic
    found = []
    if latest.commit != before.commit:
        found.append(f"at commit {latest.commit or 'unknown'}, not {before.commit or 'unknown'}")
    if set(latest.hosts) != set(before.hosts):
        found.append("on other hosts than before")
    if set(ours.gpus) != set(theirs.gpus) and theirs.gpus:
        found.append("on other GPUs than before")
    if latest.launcher != before.launcher:
        found.append(f"by launcher {latest.launcher}, not {before.launcher}")
    if changed := changed_names(before.environment, latest.environment):
        found.append(f"with other values of {', '.join(changed)}")
    for name in changed_names(theirs.software, ours.software):
        if name in ours.software and name in theirs.software:  # a driver that could not be asked once is no other one
            found.append(f"{name} {ours.software[name]}, not {theirs.software[name]}")
    for name in changed_names(theirs.chosen, ours.chosen):
        found.append(f"{name} became {ours.chosen.get(name, 'nothing')}, not {theirs.chosen.get(name, 'nothing')}")
    if ours.data != theirs.data:
        found.append("on other tokens than before")
    if ours.sent_bytes != theirs.sent_bytes:
        found.append(f"a rank sent up to {max(ours.sent_bytes, default=0)} bytes, "
                     f"not {max(theirs.sent_bytes, default=0)}")  # fmt: skip
    found += _other_steps("loss", theirs.loss, ours.loss, 0.0 if exact else LOSS_APART)
    found += _other_steps("gradient norm", theirs.grad_norm, ours.grad_norm, 0.0 if exact else GRAD_NORM_APART)
    return found + _other_errors(theirs.extra.get("error", {}), ours.extra.get("error", {}))


def changed_names(before: Mapping[str, str], latest: Mapping[str, str]) -> list[str]:
    """The keys that one side alone has, or that have two values."""
    return sorted(name for name in before.keys() | latest.keys() if before.get(name) != latest.get(name))


def _other_steps(what: str, before: Sequence[float], latest: Sequence[float], apart: float) -> list[str]:
    """The first step whose value is not that of the rounds before."""
    if len(before) != len(latest):
        return [f"{len(latest)} values of {what}, not {len(before)}"]
    for step, (old, new) in enumerate(zip(before, latest, strict=True), start=1):
        if abs(old - new) > apart * max(abs(old), abs(new)):
            return [f"{what} {new:.9g} at step {step}, not {old:.9g}"]
    return []


def _other_errors(before: Mapping[str, float], latest: Mapping[str, float]) -> list[str]:
    """Errors against float64, by tensor, that are far from those of the rounds before."""
    return [
        f"error of {name} {latest[name]:.2g}, not {before[name]:.2g}"
        for name in sorted(before.keys() & latest.keys())
        if max(before[name], latest[name]) > max(ERROR_FLOOR, ERROR_FACTOR * min(before[name], latest[name]))
    ]
