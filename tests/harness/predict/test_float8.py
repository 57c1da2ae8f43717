"""Products in float8 in a prediction: which are faster, and the bytes of casts as a step's products ask for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from engine import parallelize
from engine.checkpoint.planning.memory import memory_of
from engine.ops.float8 import Float8Products
from engine.ops.products import Operand
from engine.settings import Checkpoint, TrialSettings
from engine.shape import ModelShape
from harness.metrics.flops import work_of
from harness.metrics.hardware import hardware_named, speeds_of
from harness.predict.step import CAST_SPEED, step_time, terms
from harness.spec.models import named_model
from tests.engine.parity import parallel_runs
from tests.ranks import run_on_ranks

BF16 = TrialSettings(
    task="train", method="burst", model=named_model("1b"), seq_len=1 << 16, checkpoint=Checkpoint(every=0)
)
SMALL = ModelShape(name="small", layers=2, hidden=64, ffn=96, heads=8, kv_heads=4, head_dim=16, vocab=256)
SPEEDS = speeds_of(hardware_named("h200"))
CAST = "casts to float8"


def phases(settings: TrialSettings) -> dict[str, float]:
    return dict(step_time(settings, SPEEDS, node_ranks=1).phases)


def test_products_of_layers_take_the_time_of_float8_and_the_others_that_of_bf16() -> None:
    for name, share in (("1b", 1.0), ("hybrid_1b", None)):
        plain = replace(BF16, model=named_model(name))
        before, after = phases(plain), phases(replace(plain, linear_dtype="float8"))
        ratio = after["matrix products"] / before["matrix products"]
        faster = SPEEDS.gemm_tflops / SPEEDS.float8_tflops
        assert ratio == pytest.approx(faster) if share else faster < ratio < 0.9
        assert CAST not in before
        assert 0 < after[CAST] < before["matrix products"] - after["matrix products"]
        same = before.keys() - {"matrix products"}
        assert {key: after[key] for key in same} == {key: before[key] for key in same}


def counted(settings: TrialSettings) -> float:
    """Bytes that the products of a step ask casts and sums to read and write."""
    total = 0.0

    class Counting(Float8Products):
        def swiglu(self, gate_TF: Tensor, up_TF: Tensor) -> Operand:
            nonlocal total
            total -= 2 * gate_TF.numel()  # a kernel finds the largest value as it writes
            return super().swiglu(gate_TF, up_TF)

        def swiglu_again(self, *tensors: Tensor, saved: bool) -> Any:
            nonlocal total
            before = total
            found = super().swiglu_again(*tensors, saved=saved)
            # A kernel reads three tensors twice, and writes numbers in place of three tensors.
            total = before + (2 * 6 + 5 - 12) * tensors[0].numel()
            return found

        def operand(self, matrix_RC: Tensor, *, rows: bool = True, columns: bool = False, **asked: Any) -> Operand:
            nonlocal total
            total += matrix_RC.numel() * ((2 if asked.get("known") else 4) + rows + columns)
            found = super().operand(matrix_RC, rows=rows, columns=columns, **asked)
            return replace(found, known=(found.unit,))

        def normed(self, x_TE: Tensor, *norm: Any, **asked: Any) -> Operand:
            nonlocal total
            before = total
            found = super().normed(x_TE, *norm, **asked)
            # Read once or twice, and numbers are written, where a norm alone reads once and writes two bytes.
            again = 2 if asked.get("known") else 4
            total = before + x_TE.numel() * (again + asked.get("rows", True) + asked.get("columns", False) - 4)
            return found

        def add_normed(self, x_TE: Tensor, *others: Any) -> Operand:
            nonlocal total
            before = total
            found = super().add_normed(x_TE, *others)
            total = before + x_TE.numel()
            return found

        def input_gradient(self, dout: Operand, matrix: Operand, dx_TI: Tensor | None = None) -> Tensor:
            nonlocal total
            found = super().input_gradient(dout, matrix, dx_TI)
            total += 0 if dx_TI is None else 6 * found.numel()
            return found

        def add_weight_gradient(self, sum_OI: Tensor, dout: Operand, x: Operand) -> None:
            nonlocal total
            super().add_weight_gradient(sum_OI, dout, x)
            total += 8 * sum_OI.numel()  # beside the sum itself, read and written

    parallelize.Float8Products = Counting  # type: ignore[misc]
    parallel_runs({"": settings})
    return total


@pytest.mark.parametrize("way", [{}, {"checkpoint": Checkpoint(every=1)}, {"gradient_accumulation": 2}], ids=str)
def test_casts_read_and_write_the_bytes_that_a_steps_products_ask_for(way: dict[str, Any]) -> None:
    settings = replace(BF16, model=SMALL, seq_len=512, linear_dtype="float8", **way)
    [cast] = [term for term in terms(settings, work_of(settings)) if term.phase == CAST]
    [found] = run_on_ranks(1, counted, settings)
    assert found == pytest.approx(cast.memory_bytes * CAST_SPEED, rel=0.05)


def test_a_step_in_float8_needs_little_more_memory() -> None:
    for way in ({}, {"checkpoint": Checkpoint(every=1), "mlp_tiles": 8}, {"checkpoint": Checkpoint(every=0, mlp=0.5)}):
        plain = replace(BF16, **way)
        before, after = (memory_of(replace(plain, linear_dtype=each)).allocated for each in ("same", "float8"))
        assert before <= after < 1.05 * before
        assert before < after or way.get("mlp_tiles") == 8  # of which the LM head holds most
