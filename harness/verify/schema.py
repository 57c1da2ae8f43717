"""What strict reading of a record does not see: whether its parts agree with each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

from engine.measurement import WARM_UP, Measurement
from harness.records.record import MEASURED, Record, Round
from harness.spec.trial import id_of
from harness.verify.finding import Failure

# Start times are kept in whole seconds.
_CLOCK = timedelta(seconds=2)
_PER_RANK = (
    "peak_allocated_bytes", "peak_reserved_bytes", "peak_rss_bytes", "sent_bytes", "gpus", "gpus_before", "gpus_after",
)  # fmt: skip
_WITH_LOSS = ("train", "lm_head")  # tasks whose every step gives a loss and a gradient norm


def is_of_our_engine(measured: Measurement) -> bool:
    """Whether our engine measured this, and no compared system that runs its own program."""
    return "upstream" not in measured.extra


def schema_failures(trial: str, record: Record) -> Iterator[Failure]:
    """Everything in which the record of a trial contradicts itself."""
    place = record.trial_id if trial == record.trial_id else f"trials/{trial}"

    def wrong(found: str, expected: str) -> Failure:
        return Failure(place, "schema", found, expected)

    if trial != record.trial_id:
        yield wrong(f"trial_id {record.trial_id}", "the name of its folder")
    if record.trial_id != (expected := id_of(record.settings)):
        yield wrong(f"trial_id {record.trial_id}", f"the digest of its settings, {expected}")
    settings = record.settings
    parts = settings.cp_size * settings.tp_size
    if settings.world_size % parts:
        yield wrong(f"world_size {settings.world_size}", f"a multiple of cp_size x tp_size, {parts}")
    if record.status != "ok" and not record.reason:
        yield wrong(f"status {record.status} without a reason", "a reason")
    if record.status not in MEASURED and record.measurement is not None:
        yield wrong(f"status {record.status} with a measurement", "none: only an ok or wrong record has figures")
    if record.status == "wrong":
        yield Failure(record.trial_id, "float64", record.reason, "no wrong trial")
    if len(set(record.hosts)) > settings.world_size:
        yield wrong(f"{len(set(record.hosts))} hosts", f"at most one for each of {settings.world_size} ranks")
    for name, value, least in (
        ("attempts", record.attempts, 1),
        ("ranks_turn", record.ranks_turn, 0),
        ("idle_ranks", record.idle_ranks, 0),
    ):
        if value < least:
            yield wrong(f"{name} {value}", f"at least {least}")
    if record.wall_seconds < 0:
        yield wrong(f"wall_seconds {record.wall_seconds:g}", "seconds of at least 0")
    if record.started_at and _moment(record.started_at) is None:
        yield wrong(f"started_at {record.started_at[:40]!r}", "a time in UTC by ISO 8601")
    if record.measurement is not None:
        for found, expected in _measurement(record, record.measurement):
            yield wrong(found, expected)
    for found, expected in _rounds(record):
        yield wrong(found, expected)


def _measurement(record: Record, measured: Measurement) -> Iterator[tuple[str, str]]:
    """Pairs of what was found and expected of the raw figures."""
    settings, steps = record.settings, record.settings.steps
    for name in _PER_RANK:
        values = getattr(measured, name)
        if len(values) not in (0, settings.world_size):
            yield f"{name} of {len(values)} ranks", f"one per rank, {settings.world_size}"
    for name in _PER_RANK[:4]:
        if min(getattr(measured, name), default=0) < 0:
            yield f"{name} {min(getattr(measured, name))}", "bytes of at least 0"
    if measured.forward_seconds and len(measured.forward_seconds) != len(measured.step_seconds):
        yield (
            f"{len(measured.forward_seconds)} forward_seconds",
            f"one for each of {len(measured.step_seconds)} step_seconds",
        )
    for forward, step in zip(measured.forward_seconds, measured.step_seconds, strict=False):
        # Task attention times forward by itself, so a disturbance may make that longer than forward with backward.
        if forward <= 0 or (forward > step and settings.task != "attention"):
            yield f"forward_seconds {forward:g} in a step of {step:g} s", "more than 0 and no longer than its step"
    given = max(1, sum(bool(one.step_seconds) for one in record.rounds))
    if len(measured.step_seconds) != steps.measured * given:
        yield f"{len(measured.step_seconds)} step_seconds", f"steps.measured x rounds, {steps.measured * given}"
    ours = is_of_our_engine(measured)
    for name in ("loss", "grad_norm"):
        values = getattr(measured, name)
        if settings.task == "attention" and values:
            yield f"{name} of task attention", "none: attention alone has no loss"
        elif not ours and len(values) > steps.total:
            continue  # a foreign program may need further steps of warm-up, and its record keeps what it printed
        elif not values and not (ours and settings.task in _WITH_LOSS):
            continue  # attention, linear layers, and a foreign program that prints none
        elif len(values) != steps.total:
            yield f"{len(values)} values of {name}", f"one per step, {steps.total}"
    warm_up = measured.extra.get(WARM_UP)
    if (warm_up is not None) != bool(steps.settle) and measured.step_seconds:
        yield f"warm_up {warm_up} in the measurement", f"one where steps.settle is not 0, and it is {steps.settle}"
    most = steps.warmup + steps.settle
    if warm_up is not None and ours and not steps.warmup <= warm_up["steps"] <= most:
        yield f"{warm_up['steps']} steps of warm-up", f"from steps.warmup to steps.warmup + steps.settle, {most}"
    if min(measured.grad_norm, default=0.0) < 0:
        yield f"grad_norm {min(measured.grad_norm):g}", "a norm of at least 0"
    if record.gpu and measured.device != record.gpu:
        yield f"device {measured.device[:40]!r} in the measurement", f"{record.gpu[:40]!r} as in the record"
    if not record.rounds and 0 < record.wall_seconds < sum(measured.step_seconds):
        yield f"wall_seconds {record.wall_seconds:g}", f"no less than its steps, {sum(measured.step_seconds):g} s"
    profile = measured.extra.get("profile")
    if profile is not None and "seconds" in profile:
        total, span = sum(profile["seconds"].values()), profile.get("span_seconds", 0.0)
        if not math.isclose(total, span, rel_tol=1e-3):
            yield f"a trace of {span:g} s", f"the sum of its categories, {total:g} s"


def _rounds(record: Record) -> Iterator[tuple[str, str]]:
    """Pairs of what was found and expected of the rounds, and of the measurement that holds them all."""
    rounds, settings = record.rounds, record.settings
    if not rounds:
        return
    numbers = [one.number for one in rounds]
    if numbers != sorted(set(numbers)) or numbers[0] < 1:
        yield f"rounds {numbers}", "ascending numbers from 1, each once"
    for one in rounds:
        name = f"round {one.number}"
        if one.place < 0:
            yield f"{name} at place {one.place}", "a place in its order from 1, or 0 where it is not known"
        if _moment(one.started_at) is None and (one.started_at or one.status != "refused"):
            yield f"{name} started_at {one.started_at[:40]!r}", "a time in UTC by ISO 8601"
        if (one.status == "ok") != bool(one.step_seconds):
            yield f"{name} of status {one.status} with {len(one.step_seconds)} steps", "steps exactly where it is ok"
        if one.status != "ok" and not one.reason:
            yield f"{name} of status {one.status} without a reason", "a reason"
        if min(one.step_seconds, default=1.0) <= 0:
            yield f"{name} with a step of {min(one.step_seconds):g} s", "seconds above 0"
        if min(one.link_gib_per_second.values(), default=1.0) <= 0:
            yield f"{name} with a link of {min(one.link_gib_per_second.values()):g} GiB/s", "speeds above 0"
        if one.wall_seconds < sum(one.step_seconds):
            yield f"{name} of {one.wall_seconds:g} s", f"no less than its steps, {sum(one.step_seconds):g} s"
        if len(one.gpus) not in (0, settings.world_size):
            yield f"{name} with the GPUs of {len(one.gpus)} ranks", f"one per rank, {settings.world_size}"
        for states in (one.gpus_before, one.gpus_after):
            if len(states) not in (0, settings.world_size):
                yield f"{name} with GPU states of {len(states)} ranks", f"one per rank, {settings.world_size}"
    yield from _order(rounds)
    measured = record.measurement
    for part in ("step_seconds", "forward_seconds"):
        joined = [value for one in rounds for value in getattr(one, part)]
        whole: Sequence[float] = getattr(measured, part) if measured else []
        if len(whole) == len(joined) and list(whole) != joined:
            first, ours, theirs = next(
                (at, one, other) for at, (one, other) in enumerate(zip(whole, joined, strict=True), 1) if one != other
            )
            yield f"{ours:g} as number {first} of {part} in the measurement", f"{theirs:g}, as its rounds have it"
        elif list(whole) != joined:
            yield f"{len(whole)} {part} in the measurement", f"those of its rounds one after another, {len(joined)}"
    if any(one.status == "ok" for one in rounds) != (record.status in MEASURED):
        yield f"status {record.status}", "ok or wrong exactly where a round gave a figure"


def _order(rounds: Sequence[Round]) -> Iterator[tuple[str, str]]:
    """No round starts before the one that started before it has ended. One that was repeated may be out of order."""
    started = sorted(((start, one) for one in rounds if (start := _moment(one.started_at))), key=lambda pair: pair[0])
    for (earlier, before), (later, after) in itertools.pairwise(started):
        if later + _CLOCK < earlier + timedelta(seconds=min(before.wall_seconds, 1e9)):
            yield f"round {after.number} started at {after.started_at}", f"after the end of round {before.number}"


def _moment(text: str) -> datetime | None:
    """A time with its offset of 0 from UTC, else None."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.utcoffset() == timedelta(0) else None
