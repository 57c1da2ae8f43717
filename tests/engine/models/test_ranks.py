"""Every architecture trains on several ranks as on one: loss and every gradient, whatever shares the sequence.

What one device computes is that of transformers (`test_parity`).
"""

from __future__ import annotations

import pytest
import torch

from engine.initialise import initialise
from engine.models.architecture import shape_of
from engine.models.decoder import Decoder
from engine.settings import Checkpoint, TrialSettings
from tests.engine.models.architectures import CASES, configuration
from tests.engine.parity import dense_run, errors, parallel_runs
from tests.ranks import run_on_ranks
from tests.slow import slow

pytest.importorskip("transformers", reason="shapes are those of transformers' configurations: extra `test` has it")

# 24 tokens a sequence, as `test_parity` has: longer than the contexts of the forms of RoPE that depend on its length,
# while no rank of four holds more than 10.
SETTINGS = {"task": "train", "method": "burst", "seq_len": 24, "batch_size": 2, "dtype": "fp64"}
ALIKE = ("llama 3", "linear RoPE")  # to llama 2 and llama 3.1, but for numbers that ranks do not see
KEPT = {"checkpoint": Checkpoint(every=0, mlp=0.4), "projection_tiles": 3, "mlp_tiles": 3}
RECOMPUTED = {"checkpoint": Checkpoint(every=2, tail=0.35), "projection_tiles": 2, "mlp_tiles": 2}
PLANS: dict[int, dict[str, dict[str, object]]] = {
    1: {"kept": KEPT, "recomputed": RECOMPUTED},
    2: {
        "ring, kept": {"schedule": "ring", **KEPT},
        "ulysses, recomputed": {"schedule": "ulysses", **RECOMPUTED},
    },
    4: {
        "ring, recomputed": {"schedule": "ring", **RECOMPUTED},
        "usp, kept": {"schedule": "usp", "emulate_nodes": 2, **KEPT},
        "two replicas": {"schedule": "ulysses", "cp_size": 2, "checkpoint": Checkpoint(every=1, tail=0.0)},
    },
}


def settings_of(name: str, world_size: int, plan: dict[str, object]) -> TrialSettings:
    shape = shape_of(configuration(name), "tiny")
    chosen = {"world_size": world_size, "cp_size": world_size} | plan
    return TrialSettings(model=shape, **SETTINGS | chosen)  # type: ignore[arg-type]


def one_device(settings: TrialSettings) -> Decoder:
    """The decoder by itself, as `test_parity` compares it with transformers, with the trial's initial values."""
    with torch.device("meta"):
        model = Decoder(settings.model)
    initialise(model, settings.seed, torch.device("cpu"))
    return model


def test_heads_that_ulysses_repeats_have_their_sinks() -> None:
    """Method ulysses on more ranks than KV heads."""
    settings = settings_of("gpt-oss", 4, {"method": "ulysses", **RECOMPUTED})
    found = run_on_ranks(4, parallel_runs, {"ulysses": settings})[0]["ulysses"]
    wrong = errors(found, dense_run(settings, torch.float64, one_device(settings)))
    assert {name: error for name, error in wrong.items() if not error < 1e-10} == {}


EACH = [name for name in CASES if name not in ALIKE]


@pytest.mark.parametrize(
    ("world_size", "names", "in_turn"),
    [(1, EACH, True), (2, EACH, True), *slow((1, EACH, False), (2, EACH, False)), *slow((4, EACH, False))],
)
def test_loss_and_gradients_are_those_of_one_device(world_size: int, names: list[str], in_turn: bool) -> None:
    """`in_turn`: each architecture under one of the plans."""
    cases = {}
    for number, name in enumerate(names):
        plans = list(PLANS[world_size].items())
        for plan, choices in plans[(number + world_size) % len(plans) :][:1] if in_turn else plans:
            cases[f"{name}: {plan}"] = settings_of(name, world_size, choices)
    found = run_on_ranks(world_size, parallel_runs, cases)[0]
    wrong = {}
    for name, settings in cases.items():
        truth = dense_run(settings, torch.float64, one_device(settings))
        wrong |= {f"{name}: {key}": value for key, value in errors(found[name], truth).items() if not value < 1e-10}
    assert wrong == {}
