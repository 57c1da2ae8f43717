"""The examples of the documentation run: the sharded step is that of one device, the library's call is right."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.slow import slow

EXAMPLES = Path(__file__).parents[4] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_example() -> tuple[float, float, float]:
    return example("attention_in_your_model").main()


def check_library_call() -> tuple[int, int]:
    return example("check_burst_attn").check(torch.device("cpu"), tokens_per_rank=32)


@pytest.mark.parametrize(("world_size", "cases"), [(2, 16), *slow((4, 32))])
def test_the_script_that_checks_the_librarys_call_finds_every_case_right(world_size, cases) -> None:
    assert run_on_ranks(world_size, check_library_call) == [(cases, 0)] * world_size


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_sharded_step_of_the_example_is_the_step_of_one_device(world_size) -> None:
    for loss, alone, error in run_on_ranks(world_size, run_example):
        assert 3 < loss < 6  # about log(vocabulary), untrained
        assert loss == pytest.approx(alone, rel=1e-6)
        assert error < 1e-6
