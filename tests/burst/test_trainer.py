"""The Trainer of transformers on ranks that share sequences takes the steps of one process, with its predictions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.burst.programs import transformers_trainer
from tests.ranks import run_on_ranks

pytest.importorskip("accelerate", reason="the Trainer needs it: extra `test` has it")


@pytest.mark.parametrize("fsdp", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["ddp", "fsdp2"])
def test_steps_evaluation_metrics_and_predictions_on_two_ranks_are_those_of_one(fsdp: bool, tmp_path: Path) -> None:
    expected = run_on_ranks(1, transformers_trainer, False, str(tmp_path / "one"))[0]
    found = run_on_ranks(2, transformers_trainer, fsdp, str(tmp_path / "two"))[0]
    for name in ("predictions", "labels"):
        np.testing.assert_allclose(found.pop(name), expected.pop(name), atol=1e-5)
    expected = {key: value for key, value in expected.items() if key in found or not fsdp}
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_noise_that_depends_on_the_length_of_a_sequence_is_refused() -> None:
    from burst.accelerate import _create_accelerator, parallelism

    accelerator = SimpleNamespace(parallelism_config=parallelism(cp_size=2))
    trainer = SimpleNamespace(accelerator=accelerator, args=SimpleNamespace(neftune_noise_alpha=5.0))
    with pytest.raises(ValueError, match=r"neftune_noise_alpha is 5\.0"):
        _create_accelerator(lambda trainer: None)(trainer)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"cp_size": "2"}, "cp_size is '2'; give the number of ranks"),
        ({"cp_size": 2.0}, "cp_size is 2.0; give the number of ranks"),
        ({"cp_size": 2, "layout": None}, "layout is None; give zigzag"),
    ],
)
def test_a_configuration_of_no_number_of_ranks_or_no_layout_is_refused(given: dict, sentence: str) -> None:
    from burst.accelerate import parallelism

    with pytest.raises(ValueError, match=sentence):
        parallelism(**given)


def test_more_ranks_than_processes_are_refused_before_meshes_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from burst.accelerate import parallelism

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"the configuration describes 4 processes, found 2; start as many"):
        parallelism(cp_size=4).build_device_mesh("cpu")
