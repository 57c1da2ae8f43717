"""Rounds as values: their random order, what a trial lacks, several as one record."""

from __future__ import annotations

import functools
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from engine.measurement import ALLOCATION_RETRIES, WARM_UP, GpuState, Measurement
from engine.settings import TrialSettings
from engine.shape import ModelShape
from harness.records.record import Record, Round, Status
from harness.run.rounds import PendingRounds, arranged, rounds_of, statuses_of, with_round
from harness.spec.trial import Trial
from tests.harness import synthetic_records

MODEL = ModelShape(name="m", layers=1, hidden=16, ffn=32, heads=2, kv_heads=2, head_dim=8, vocab=32)


def trials(count: int) -> list[Trial]:
    return [
        Trial(
            experiment="exp",
            title="E",
            settings=TrialSettings(task="train", method="burst", model=MODEL, seq_len=16, seed=seed),
            deadline_seconds=60,
        )
        for seed in range(count)
    ]


def test_every_trial_is_in_the_order_once_and_every_order_is_as_likely():
    some = trials(3)
    shuffle = random.Random(0).shuffle
    orders = Counter(tuple(trial.settings.seed for trial in arranged(some, "random", shuffle)) for _ in range(3000))
    assert len(orders) == 6
    assert all(sorted(order) == [0, 1, 2] for order in orders)
    assert min(orders.values()) > 400  # of 500; 4.9 standard deviations


def one(number: int, seconds: list[float], status: Status = "ok", reason: str = "") -> Round:
    return Round(
        number=number, place=number, started_at=f"2026-01-0{number}", wall_seconds=10.0, step_seconds=seconds,
        forward_seconds=[value / 2 for value in seconds], status=status, reason=reason, hosts=["here"],
    )  # fmt: skip


def attempt(number: int, seconds: list[float], status: Status = "ok", reason: str = "", **changes: object) -> Record:
    """The record of one round alone."""
    measured = Measurement(
        step_seconds=seconds, forward_seconds=[value / 2 for value in seconds], loss=[3.0, 2.0], grad_norm=[1.0],
        peak_allocated_bytes=[100 + number, 100 - number], peak_rss_bytes=[7, 7], sent_bytes=[5, 6],
        chosen={"kernel": "cpu"}, software={"torch": "2"}, extra={"error": {"out": 1e-6}, "link": number},
    )  # fmt: skip
    return replace(
        synthetic_records.record(),
        measurement=replace(measured, **changes) if seconds else None,  # type: ignore[arg-type]
        status=status,
        reason=reason,
        rounds=[one(number, seconds, status, reason)],
        hosts=["here"],
        wall_seconds=10.0,
        started_at=f"2026-01-0{number}",
    )


def test_a_record_from_before_there_were_rounds_keeps_the_link_of_its_only_one() -> None:
    found = replace(attempt(1, [1.0], extra={"link_gib_per_second": {"before": 2.0}}), rounds=[])
    assert [each.link_gib_per_second for each in rounds_of(found)] == [{"before": 2.0}]


def test_rounds_become_one_record_with_all_steps_the_largest_peaks_and_the_rest_of_the_last():
    both = with_round(with_round(attempt(1, [1.0, 2.0]), attempt(2, [3.0])), attempt(3, [4.0, 5.0]))
    assert (both.status, both.reason) == ("ok", "")
    measured = both.measurement
    assert measured is not None
    assert measured.step_seconds == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert measured.forward_seconds == [0.5, 1.0, 1.5, 2.0, 2.5]
    assert measured.peak_allocated_bytes == [103, 99]
    assert measured.peak_rss_bytes == [7, 7]
    assert (measured.loss, measured.extra["link"]) == ([3.0, 2.0], 3)
    assert [each.number for each in both.rounds] == [1, 2, 3]
    assert both.step_seconds_by_round == [[1.0, 2.0], [3.0], [4.0, 5.0]]
    assert (both.wall_seconds, both.started_at) == (30.0, "2026-01-01")


def test_a_warm_up_has_settled_where_that_of_each_round_has():
    def together(*rounds: tuple[int, bool] | None) -> Any:
        records = [
            attempt(number, [1.0], extra={} if one is None else {WARM_UP: {"steps": one[0], "settled": one[1]}})
            for number, one in enumerate(rounds, 1)
        ]
        whole = functools.reduce(with_round, records)
        assert whole.measurement is not None
        return whole.measurement.extra.get(WARM_UP)

    assert together((3, True), (2, True), (2, True)) == {"steps": 3, "settled": True}
    assert together((6, False), (3, True)) == together((3, True), (6, False)) == {"steps": 6, "settled": False}
    assert together(None, None) is None


def test_repeated_allocations_of_all_rounds_are_added_up_for_each_rank():
    def with_retries(number: int, retries: list[int] | None) -> Record:
        return attempt(number, [1.0], extra={} if retries is None else {ALLOCATION_RETRIES: retries})

    for each, together in (
        ([[0, 4], None, [1, 2]], {ALLOCATION_RETRIES: [1, 6]}),
        ([None, [3, 0]], {ALLOCATION_RETRIES: [3, 0]}),
        ([None, None], {}),
    ):
        first, *others = [with_retries(number, retries) for number, retries in enumerate(each, 1)]
        for other in others:
            first = with_round(first, other)
        assert first.measurement is not None
        assert first.measurement.extra == together
        failed = with_round(first, attempt(9, [], "failed", "rank 0: no"))  # has made none
        assert failed.measurement is not None
        assert failed.measurement.extra == together


def test_a_round_that_fails_leaves_the_figures_of_the_others_and_its_reason():
    first = attempt(1, [1.0])
    both = with_round(first, replace(attempt(2, [], "failed", "rank 0: no"), commit="other", launcher="other"))
    assert (both.status, both.reason) == ("ok", "round 2 failed: rank 0: no")
    assert (both.measurement, both.commit, both.launcher) == (first.measurement, first.commit, first.launcher)
    assert statuses_of(both) == {"ok", "failed"}
    again = with_round(both, attempt(2, [2.0]))
    assert (again.reason, again.step_seconds_by_round) == ("", [[1.0], [2.0]])


def test_a_round_that_runs_again_takes_its_place_among_the_others():
    record = with_round(with_round(attempt(1, [1.0]), attempt(2, [], "timeout", "late")), attempt(3, [3.0]))
    assert record.step_seconds_by_round == [[1.0], [3.0]]
    record = with_round(record, attempt(2, [2.0]))
    assert record.measurement is not None
    assert record.measurement.step_seconds == [1.0, 2.0, 3.0]


def test_a_record_from_before_there_were_rounds_is_one_round():
    old = replace(attempt(1, [1.0, 1.5], gpus_before=[GpuState(sm_mhz=5)]), rounds=[])
    assert rounds_of(old) == [
        Round(
            number=1, place=0, started_at="2026-01-01", wall_seconds=10.0, step_seconds=[1.0, 1.5],
            forward_seconds=[0.5, 0.75], hosts=["here"], gpus_before=[GpuState(sm_mhz=5)],
        )
    ]  # fmt: skip
    both = with_round(old, attempt(2, [2.0]))
    assert both.step_seconds_by_round == [[1.0, 1.5], [2.0]]
    assert both.rounds[0].gpus_before == [GpuState(sm_mhz=5)]
    assert rounds_of(replace(old, status="failed")) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"chosen": {"kernel": "fa4"}}, "round 2: kernel became fa4, not cpu"),
        ({"chosen": {}}, "round 2: kernel became nothing, not cpu"),
        ({"loss": [3.0, 2.5]}, "round 2: loss 2.5 at step 2, not 2"),
        ({"loss": []}, "round 2: 0 values of loss, not 2"),
        ({"grad_norm": [2.0]}, "round 2: gradient norm 2 at step 1, not 1"),
        ({"sent_bytes": [5, 9]}, "round 2: a rank sent up to 9 bytes, not 6"),
        ({"software": {"torch": "3"}}, "round 2: torch 3, not 2"),
        ({"data": {"sha256": "f"}}, "round 2: on other tokens than before"),
        ({"extra": {"error": {"out": 1e-5}}}, "round 2: error of out 1e-05, not 1e-06"),
        ({"loss": [3.0, 2.001], "grad_norm": [1.05], "extra": {"error": {"out": 1.5e-6}, "link": 9}}, ""),
    ],
)
def test_what_differs_between_rounds_is_said_and_rounding_is_not(changes, said):
    both = with_round(attempt(1, [1.0]), attempt(2, [1.0], **changes))
    assert (both.status, both.reason) == ("ok", said)


def test_where_a_round_was_measured_is_said_when_it_was_elsewhere_or_with_other_code():
    first = replace(attempt(1, [1.0], gpus=["a", "b"]), commit="one", environment={"A": "1", "B": "2"})
    latest = replace(
        attempt(2, [1.0], gpus=["b", "c"]), commit="two", hosts=["there"], launcher="ray", environment={"A": "1"}
    )
    both = with_round(replace(first, launcher="local"), latest)
    assert both.reason == (
        "round 2: at commit two, not one; on other hosts than before; on other GPUs than before; "
        "by launcher ray, not local; with other values of B"
    )
    assert (both.commit, both.launcher) == ("two", "ray")
    assert with_round(both, replace(latest, rounds=[one(3, [1.0])])).reason == both.reason  # said once


def test_deterministic_trials_must_repeat_their_losses_to_the_last_bit():
    def exact(record: Record) -> Record:
        return replace(record, settings=replace(record.settings, deterministic=True))

    both = with_round(exact(attempt(1, [1.0])), exact(attempt(2, [1.0], loss=[3.0, 2.000001])))
    assert both.reason == "round 2: loss 2.000001 at step 2, not 2"


def test_a_trial_is_due_in_the_rounds_it_lacks():
    pending = PendingRounds(3)
    assert [pending.due(None, number) for number in (1, 2, 3, 4)] == [True, False, False, False]
    record = attempt(1, [1.0])
    assert [pending.due(record, number) for number in (1, 2, 3, 4)] == [False, True, True, False]
    assert pending.lacks(record)
    record = with_round(with_round(record, attempt(2, [], "failed", "no")), attempt(3, [1.0]))
    assert not pending.lacks(record)
    assert [PendingRounds(3, retry_failed=True).due(record, number) for number in (1, 2, 3)] == [
        False, True, False,
    ]  # fmt: skip
    record = with_round(attempt(1, [1.0]), attempt(2, [], "interrupted", "stopped"))
    assert [pending.due(record, number) for number in (1, 2, 3)] == [False, True, True]
    record = with_round(attempt(1, [1.0]), attempt(2, [], "oom", "rank 0: full"))
    assert not PendingRounds(2, retry_failed=True).lacks(record)  # a result
    for status in ("oom", "failed", "refused", "timeout"):
        assert not pending.lacks(attempt(1, [], status, "no"))  # type: ignore[arg-type]


def rounds(*seconds: float) -> Record:
    record = attempt(1, [seconds[0]])
    for number, value in enumerate(seconds[1:], start=2):
        record = with_round(record, attempt(number, [value]))
    return record
