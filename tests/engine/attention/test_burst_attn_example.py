"""The example of the documentation runs, and its sharded step is the step of one device."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.ranks import run_on_ranks

EXAMPLE = Path(__file__).parents[3] / "examples" / "attention_in_your_model.py"


def run_example() -> tuple[float, float, float]:
    spec = importlib.util.spec_from_file_location("attention_in_your_model", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main()


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_the_sharded_step_of_the_example_is_the_step_of_one_device(world_size) -> None:
    for loss, alone, error in run_on_ranks(world_size, run_example):
        assert 3 < loss < 6  # about log(vocabulary), untrained
        assert loss == pytest.approx(alone, rel=1e-6)
        assert error < 1e-6
