"""Verdicts on errors against float64: beyond rounding, one sentence that names method, tensor, rank and tokens."""

from __future__ import annotations

from typing import Any

import pytest

from engine.measurement import NOT_FINITE
from harness.records.judging import training_fault

# Of an exact step in bf16, as one measures it.
ROUNDED = {"loss": 1e-4, "hidden": 5e-3, "dinput": 6e-3, "head.weight": 5e-3, "k.weight": 1e-2, "norm.weight": 2e-2}
AT: dict[str, dict[str, Any]] = {
    "hidden": {"rank": 3, "first_token": 64, "last_token": 95, "error": 0.3},
    "dinput": {"rank": 1, "first_token": 0, "last_token": 31, "error": 0.2},
    "head.weight": {"row": 17, "error": 0.1},
}
BEGINS = "ring with kernel fa4 computes something else than a dense float64 step, beyond the rounding of"


def fault(dtype: str, errors: dict[str, float], scales: dict[str, float] | None = None) -> str:
    return training_fault("ring", dtype, "fa4", ROUNDED | errors, AT, scales)


def test_rounding_is_no_fault() -> None:
    assert fault("bf16", {}, {"k.weight": -2e-3, "hidden": 1e-4}) == ""
    assert training_fault("ring", "fp32", "cpu", dict.fromkeys(ROUNDED, 1e-6), AT) == ""
    assert training_fault("ring", "fp64", "cpu", dict.fromkeys(ROUNDED, 1e-14), AT) == ""


@pytest.mark.parametrize(
    ("errors", "scales", "says"),
    [
        (
            {"hidden": 0.21, "k.weight": 0.9},
            {},
            "in 2 of 6 tensors: the final hidden state is off by 0.21 of its norm (allowed 0.02), most on rank 3, "
            "tokens 64 to 95",
        ),
        (
            {"dinput": 0.03, "k.weight": 0.9},
            {},
            "in 2 of 6 tensors: the gradient of k.weight is off by 0.9 of its norm (allowed 0.05); the gradient at the "
            "embedding's output is off by 0.03 of its norm (allowed 0.02), most on rank 1, tokens 0 to 31",
        ),
        (
            {"k.weight": 0.0224},
            {"k.weight": 0.02},
            "in 1 of 6 tensors: the gradient of k.weight is 1.02 times the true one (allowed 1 within 0.01)",
        ),
        (
            {"k.weight": 2.0},
            {"k.weight": -0.03},
            "in 1 of 6 tensors: the gradient of k.weight is off by 2 of its norm (allowed 0.05)",
        ),
        (
            {"k.weight": NOT_FINITE},
            {"k.weight": NOT_FINITE},
            "in 1 of 6 tensors: the gradient of k.weight holds NaN or infinity",
        ),
        (
            {"head.weight": 0.3},
            {},
            "in 1 of 6 tensors: the gradient of head.weight is off by 0.3 of its norm (allowed 0.05), most in row 17",
        ),
        (
            {"head.weight": 0.3, "dinput": 0.03},
            {},
            "in 2 of 6 tensors: the gradient of head.weight is off by 0.3 of its norm (allowed 0.05), most in row 17; "
            "the gradient at the embedding's output is off by 0.03 of its norm (allowed 0.02), most on rank 1, tokens "
            "0 to 31",
        ),
        ({"loss": 0.01}, {}, "in 1 of 6 tensors: the loss is off by 0.01 (allowed 0.002)"),
    ],
)
def test_a_fault_names_tensor_rank_and_tokens(errors: dict[str, float], scales: dict[str, float], says: str) -> None:
    assert fault("bf16", errors, scales) == f"{BEGINS} bf16 {says}"


def test_bf16_may_err_by_what_fp32_may_not() -> None:
    assert fault("fp32", {}).startswith(f"{BEGINS} fp32 in 6 of 6 tensors")


def test_float8_may_err_by_what_bf16_may_not() -> None:
    errors, scales = {"hidden": 0.05, "k.weight": 0.2}, {"k.weight": -0.02}
    assert fault("float8", errors, scales) == ""
    assert fault("bf16", errors, scales).startswith(f"{BEGINS} bf16 in 2 of 6 tensors")
    assert "k.weight is 1.06 times the true one" in fault("float8", errors, {"k.weight": 0.06})


def test_a_rounding_without_bounds_is_refused() -> None:
    with pytest.raises(
        ValueError, match="rounding 'fp8' has no bounds for a training step; expected one of fp64, fp32"
    ):
        fault("fp8", {})
