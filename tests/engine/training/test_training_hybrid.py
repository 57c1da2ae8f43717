"""A run of a model with linear layers: evaluated, and resumed bit for bit on these ranks, or within rounding on others,
packed and not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.settings import Checkpoint
from engine.training.config import Evaluation
from tests.engine.training.training_runs import SHAPE, config, curve, order, several
from tests.ranks import run_on_ranks
from tests.slow import slow

HYBRID = replace(
    SHAPE, layers=3, layer_pattern="lf", linear="gated_delta_net", linear_heads=4, linear_key_heads=2,
    linear_key_dim=8, linear_value_dim=8, attention_gate=True,
)  # fmt: skip


def losses(result: dict[str, Any], kind: str) -> list[tuple]:
    """(step, tokens, loss) of every line."""
    return [line[:3] for line in curve(result, kind)]


@pytest.mark.parametrize("choices", [{"model": replace(HYBRID, linear="mamba2")}, *slow({"mask": "documents"})])
def test_a_hybrid_resumes_and_is_evaluated(choices: dict[str, Any], tmp_path: Path) -> None:
    choices = {"model": HYBRID, "evaluate": Evaluation(every=3, sequences=3)} | choices
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    six = config(cp_size=2, checkpoint=Checkpoint(every=2, tail=0.5), **choices)
    starts = [(whole, order(six), None), (parts, order(six), 3), (parts, order(six, resume=True), None)]
    once, _, resumed = run_on_ranks(2, several, starts)[0]
    assert curve(resumed) == curve(once)
    assert resumed["parameters"] == once["parameters"]
    assert "`burst train export` will refuse it: model" in once["notes"][-1]
    assert len(curve(once, "evaluation")) == 3

    (tmp_path / "parts" / "checkpoints" / "step-00000006").rename(tmp_path / "later")
    other = order(config(batch_size=1, gradient_accumulation=2, mlp_tiles=2, **choices), resume=True)
    [alone] = run_on_ranks(1, several, [(parts, other, None)])[0]
    for kind in ("step", "evaluation"):
        for line, expected in zip(losses(alone, kind), losses(once, kind), strict=True):
            assert line == pytest.approx(expected, rel=2e-5)
