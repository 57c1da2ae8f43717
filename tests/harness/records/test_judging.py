"""The bounds of errors against float64, and the status that they give a record."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.measurement import NOT_FINITE, UNCHECKED, Measurement
from harness.records.judging import bound_of, judged, worse_errors
from harness.records.record import RECORD_FILE, Record, read_record, write_record
from harness.records.stated import NOTHING_STATED, caveats_of
from harness.run.rounds import alone, with_round
from tests.harness import synthetic_records
from tests.harness.run.test_rounds import attempt

EXACT = {"out": 3e-7, "dq": 4e-7, "dk": 4e-7, "dv": 4e-7}


def at(error: float, first: int | None = 128, last: int | None = 255, rank: int = 1) -> dict[str, Any]:
    return {"rank": rank, "first_token": first, "last_token": last, "error": error}


def record(extra: dict[str, Any], **settings: Any) -> Record:
    found = synthetic_records.record(**{"task": "attention", "method": "my_ring", **settings})
    assert found.measurement is not None
    found.measurement.extra = extra
    return found


@pytest.mark.parametrize(
    ("settings", "extra", "reason"),
    [
        ({}, {}, ""),  # a record from before every trial was compared
        ({}, {"error": EXACT}, ""),
        ({}, {"error": EXACT, "error_at": {"out": at(9e-6), "dk": at(3.9e-5, 7, 7)}}, ""),
        (
            {},
            {"error": EXACT | {"out": 0.21}, "error_at": {"out": at(0.3)}},
            "my_ring: out differs from float64 by 0.21, expected at most 1e-05; most on rank 1, tokens 128 to 255",
        ),
        ({}, {"error": {"out": 0.21}}, "my_ring: out differs from float64 by 0.21, expected at most 1e-05"),
        (
            {},
            {"error": EXACT, "error_at": {"dk": at(2e-3)}},
            "my_ring: dk differs from float64 by 0.002 on rank 1, tokens 128 to 255, expected at most 1e-05",
        ),
        (
            {},
            {"error": EXACT, "error_at": {"dv": at(5e-5, 7, 7)}},
            "my_ring: dv differs from float64 by 5e-05 on rank 1, token 7, expected at most 4e-05",
        ),
        (
            {"dtype": "bf16"},
            {"error": EXACT | {"dk": 0.0196}, "error_at": {"dk": at(0.02) | {"head": 3}}},
            "my_ring: dk differs from float64 by 0.02, expected at most 0.008; most on rank 1, tokens 128 to 255, "
            "head 3",
        ),
        (
            {"dtype": "bf16"},
            {"error": {"out": 2e-3, "dq": 2e-3, "dk": 2e-2, "dv": 2e-3}},
            "my_ring: dk differs from float64 by 0.02, expected at most 0.008",
        ),
        (
            {},
            {"error": {"out": 0.01, "dq": NOT_FINITE, "dv": 0.1}, "error_at": {"dq": at(NOT_FINITE, rank=0)}},
            "my_ring: dq holds NaN or infinity, on rank 0, tokens 128 to 255; beyond its bound as well: dv and out",
        ),
        (
            {"dtype": "fp64"},
            {"error": {"dq": 1e-9}},
            "my_ring: dq differs from float64 by 1e-09, expected at most 1e-12",
        ),
        (
            {"task": "lm_head", "method": "burst", "dtype": "bf16"},
            {"error": {"loss": 1e-5, "dhidden": 1.7e-2, "dweight": 2e-3}},
            "burst: dhidden differs from float64 by 0.017, expected at most 0.008",
        ),
        (
            {"task": "lm_head", "method": "burst", "dtype": "bf16", "loss_kernel": "cce"},
            {"error": {"loss": 1e-5, "dhidden": 1.7e-2, "dweight": 2e-3}},
            "",
        ),
        ({"task": "train"}, {"error": {"loss": 1e-6, "hidden": 1e-6}}, ""),
    ],
)  # fmt: skip
def test_errors_beyond_what_exact_methods_give_are_wrong(settings: Any, extra: Any, reason: str) -> None:
    found = judged(record(extra, **settings))
    assert (found.status, found.reason) == ("wrong" if reason else "ok", reason)
    assert judged(found) == found
    assert found.measurement is not None


def test_gradients_summed_in_bf16_may_round_once_per_rank_beyond_eight() -> None:
    def bound(tensor: str, **changes: Any) -> float | None:
        return bound_of(synthetic_records.settings(**{"task": "attention", "dtype": "bf16", **changes}), tensor)

    for tensor, ranks, dtype, expected in [
        ("dk", 8, "bf16", 8e-3),
        ("dk", 32, "bf16", 16e-3),
        ("out", 32, "bf16", 8e-3),
        ("dk", 32, "fp32", 8e-3),
        ("dk", 32, "auto", 8e-3),  # of burst, which sends fp32
    ]:
        found = bound(tensor, cp_size=ranks, world_size=ranks, grad_comm_dtype=dtype)
        assert found == pytest.approx(expected), (tensor, ranks, dtype)


def test_a_record_is_judged_when_it_is_read_whatever_it_said(tmp_path: Path) -> None:
    path = tmp_path / RECORD_FILE

    def read(found: Record) -> Record:
        write_record(tmp_path, found)
        return read_record(path)

    beyond = {"error": EXACT | {"dk": 0.02}}
    old = read(record(beyond))  # of a time when nothing looked at it
    assert old.status == "wrong"
    assert old.reason.startswith("my_ring: dk differs from float64 by 0.02")
    # A bound that was corrected since, or an error that was: no rerun.
    stricter = replace(record({"error": EXACT}), status="wrong", reason="my_ring: out differs by more than 1e-9")
    assert (read(stricter).status, read(stricter).reason) == ("ok", "")
    # Nothing that is known here says why, so it stays as it was written.
    kept = read(replace(record({}, task="train"), status="wrong", reason="my_ring: another tensor is off"))
    assert (kept.status, kept.reason) == ("wrong", "my_ring: another tensor is off")
    empty = replace(record({}), status="wrong", reason="no figures", measurement=None)
    write_record(tmp_path, empty)
    with pytest.raises(ValueError, match="its status is wrong, but it holds no step times"):
        read_record(path)
    assert json.loads(path.read_text())["status"] == "wrong"


def test_a_round_that_was_wrong_makes_the_trial_wrong_and_later_ones_do_not_mend_it() -> None:
    def measured(number: int, error: float) -> Record:
        one = attempt(number, [1.0], extra={"error": {"out": error}, "error_at": {"out": at(error, rank=number)}})
        return replace(one, settings=record({}).settings)

    good = with_round(measured(1, 2e-7), measured(2, 3e-7))
    assert good.status == "ok"
    bad = with_round(good, measured(3, 0.5))
    assert bad.status == "wrong"
    assert bad.reason.startswith("my_ring: out differs from float64 by 0.5")
    assert "most on rank 3, tokens 128 to 255; round 3: error of out 0.5, not 3e-07" in bad.reason
    assert bad.step_seconds_by_round == [[1.0]] * 3
    assert (alone(bad, 3).status, alone(bad, 3).wall_seconds) == ("wrong", 10.0)
    mended = with_round(bad, measured(4, 2e-7))
    assert (mended.status, mended.measurement and mended.measurement.extra["error"]) == ("wrong", {"out": 0.5})


def test_of_two_rounds_the_larger_error_of_each_tensor_counts_with_its_place() -> None:
    one = {"error": {"out": 1.0, "dq": 5.0}, "error_at": {"out": at(1.5), "dq": at(6.0, rank=0)}}
    other = {"error": {"out": 2.0, "dk": 1.0}, "error_at": {"out": at(2.5, rank=3)}}
    assert worse_errors(one, other) == {
        "error": {"out": 2.0, "dq": 5.0, "dk": 1.0},
        "error_at": {"out": at(2.5, rank=3), "dq": at(6.0, rank=0)},
    }
    assert worse_errors({}, {"link": 1}) == {}


def test_what_could_not_be_compared_is_a_caveat() -> None:
    found = record({UNCHECKED: "rank 1: CUDA out of memory."})
    assert isinstance(found.measurement, Measurement)
    assert "not compared with float64 (rank 1: CUDA out of memory.)" in caveats_of(judged(found), NOTHING_STATED)
