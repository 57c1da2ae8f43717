"""What needs no measurement agrees with what is published, to the digit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.shape import ModelShape
from harness.metrics.flops import work_of
from harness.predict.published import published_rows
from harness.reproduce.computed import BF16, FP32, ComputedNumber, backward_bytes, digits_of, settings_of, shape
from harness.reproduce.figures import paper_figures

SLIP = 1.024  # 1024 tokens per k over 1000
COMPUTED = [figure for figure in paper_figures().values() if figure.computed]


def paper_flops(model: ModelShape, seq_len: int) -> float:
    """Model FLOPs of one causal sequence by the artifact's scripts (results/paper/models.yaml, `flops`).

    F = 12 S L h^2 [1 + K/N + S/(2 h) + 1.5 f/h + V/(2 L h)]. It counts S^2 / 2 pairs where this project counts
    S (S + 1) / 2.
    """
    hidden, layers = model.hidden, model.layers
    terms = (
        1 + model.kv_heads / model.heads + seq_len / (2 * hidden) + 1.5 * model.ffn / hidden
        + model.vocab / (2 * layers * hidden)
    )  # fmt: skip
    return 12.0 * seq_len * layers * hidden**2 * terms


def as_plotted(model: ModelShape, seq_len: int, tokens_per_gpu_per_second: float) -> float:
    """TFLOP/s per GPU as the artifact's scripts plot them: with the slip of 1024 tokens over 1000."""
    return SLIP * paper_flops(model, seq_len) / seq_len * tokens_per_gpu_per_second / 1e12


def test_three_figures_need_no_measurement() -> None:
    assert [figure.name for figure in COMPUTED] == [
        "checkpointing_memory_analytic", "lm_head_memory_analytic", "attention_share_analytic",
    ]  # fmt: skip


@pytest.mark.parametrize("figure", COMPUTED, ids=lambda figure: figure.name)
def test_every_published_digit_is_computed(figure) -> None:
    digits = digits_of(figure)
    assert len(digits) == len([row for row in published_rows() if row.experiment == figure.reference])
    assert [one.row.line for one in digits if not one.same] == []


def test_a_digit_that_differs_is_seen() -> None:
    one = digits_of(COMPUTED[0])[0]
    assert one.same
    assert not ComputedNumber(row=one.row, computed=one.computed * 1.1).same
    assert not ComputedNumber(row=replace(one.row, text="31.9"), computed=one.computed).same


@pytest.mark.parametrize("model", ["7b", "13b", "14b", "70b"])
@pytest.mark.parametrize("seq_len", [131072, 1048576])
def test_the_papers_flop_formula_differs_from_ours_by_the_diagonal_alone(model: str, seq_len: int) -> None:
    ours, model_shape = work_of(settings_of(shape(model), seq_len)), shape(model)
    diagonal = 3 * 4 * model_shape.heads * model_shape.head_dim * model_shape.layers * seq_len / 2
    assert ours.model - paper_flops(model_shape, seq_len) == pytest.approx(diagonal, rel=1e-6)


def test_the_plotted_rate_is_the_formula_with_the_slip_of_1024() -> None:
    rows = [row for row in published_rows() if row.experiment == "cp_scaling"]
    speeds = {row.gpus: row.value for row in rows if row.metric == "tokens_per_gpu_per_second"}
    plotted = [row for row in rows if row.metric == "tflops_per_gpu"]
    assert plotted
    for row in plotted:
        assert as_plotted(shape("14b"), row.seq_len, speeds[row.gpus]) == pytest.approx(row.value, rel=2e-5)


def test_the_query_side_sends_a_quarter_less_but_for_the_rows_of_lse_and_delta() -> None:
    model = shape("7b")
    found = backward_bytes(model)
    rows = 2 * model.heads * FP32
    assert (found.query - rows) / found.key_value == 0.75
    assert found.saved == pytest.approx(0.25 - rows / found.key_value)
    assert backward_bytes(model, FP32).saved > found.saved
    grouped = replace(model, kv_heads=8)
    assert backward_bytes(grouped, BF16).saved < 0, "with grouped heads the key side is the smaller"
