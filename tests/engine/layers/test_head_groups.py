"""Attention's backward in groups of heads: the gradients of all heads at once, and no more heads than a group's."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention.context import ContextParallel
from engine.burst import METHOD
from engine.checkpoint.counts import heads_at_once
from engine.memory.offload import _OnHost
from engine.method import method_unsupported_reason
from engine.models.decoder import Decoder
from engine.ops.runs import runs
from engine.parallelize import set_layers
from engine.settings import Checkpoint, TrialSettings
from engine.shape import ModelShape
from tests.engine.parity import dense_run, errors, parallel_runs
from tests.ranks import run_on_ranks
from tests.slow import slow

SHAPE = ModelShape(name="grouped", layers=3, hidden=20, ffn=24, heads=8, kv_heads=4, head_dim=4, vocab=257)
NORMED = dataclasses.replace(SHAPE, name="normed", qk_norm=True, kv_heads=8)
TRIAL = TrialSettings(task="train", method="burst", model=SHAPE, seq_len=40, batch_size=2, dtype="fp64")
CHECKPOINTS = {
    "kept": Checkpoint(),
    "from the host": Checkpoint(offload="all", whole_layers=1),
    "a part": Checkpoint(tail=0.4, offload="inputs"),
    "nothing": Checkpoint(tail=0.0),
    "held": Checkpoint(every=3, offload="all"),
    "bisected": Checkpoint(every=3, tail=0.4, replay="bisect"),
}


def test_every_head_is_in_one_group_and_groups_are_equal_but_for_the_last() -> None:
    sizes = {(8, 8): [1] * 8, (8, 3): [3, 3, 2], (4, 3): [2, 2], (2, 8): [1, 1], (1, 4): [1], (8, 1): [8]}
    for (heads, groups), expected in sizes.items():
        found = list(runs(heads, heads_at_once(heads, groups)))
        assert [each.stop - each.start for each in found] == expected
        assert heads_at_once(heads, groups) == expected[0]
        assert [head for each in found for head in range(each.start, each.stop)] == list(range(heads))


@pytest.mark.parametrize("ranks", [*slow(1), 2])
def test_the_gradients_are_those_of_a_dense_run(ranks: int) -> None:
    cases = {}
    for number, (name, checkpoint) in enumerate(CHECKPOINTS.items()):
        for shape in (SHAPE, NORMED):
            cases[f"{shape.name}, {name}"] = dataclasses.replace(
                TRIAL, model=shape, checkpoint=checkpoint, world_size=ranks, head_groups=(2, 3, 4)[number % 3],
                projection_tiles=1 + 2 * (number % 2),
            )  # fmt: skip
    found = run_on_ranks(ranks, parallel_runs, cases)[0]
    alone = (dataclasses.replace(TRIAL, model=shape, world_size=ranks) for shape in (SHAPE, NORMED))
    truth = {each.model: dense_run(each, torch.float64) for each in alone}
    wrong = {name: errors(found[name], truth[settings.model]) for name, settings in cases.items()}
    assert {name: each for name, each in wrong.items() if not max(each.values()) < 1e-10} == {}


def passed_twice(checkpoint: Checkpoint, head_groups: int) -> tuple[list[Tensor], list[tuple[int, bool]]]:
    """Gradients of two backwards of one forward; of each call of attention its query heads, and whether it computes."""
    settings = dataclasses.replace(TRIAL, checkpoint=checkpoint, head_groups=head_groups)
    torch.manual_seed(0)
    model = Decoder(SHAPE).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.3)
    whole, calls = METHOD.attention(ContextParallel.single(), settings), []

    class Noting:
        def __call__(self, q: Tensor, k: Tensor, v: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
            calls.append((q.shape[2], named.get("saved") is None))
            return whole(q, k, v, **named)

        keep = staticmethod(whole.keep)

    kept = set_layers(model, settings, Noting())
    tokens = torch.randint(SHAPE.vocab, (2, 41))
    loss = model(tokens[:, :-1], torch.arange(40), tokens[:, 1:])
    loss.backward(retain_graph=True)
    loss.backward()
    del kept
    return [parameter.grad for parameter in model.parameters()], calls


@pytest.mark.parametrize("name", ["kept", "from the host", "a part"])
def test_a_second_backward_finds_what_the_first_one_found(name: str) -> None:
    expected, _ = passed_twice(CHECKPOINTS[name], 1)
    found, calls = passed_twice(CHECKPOINTS[name], 2)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    # One call of all heads in forward; where all outputs are kept, every other one is of a group and computes nothing.
    again = [heads for heads, computes in calls if not computes]
    assert set(again) == ({4} if CHECKPOINTS[name].tail == 1 else {4, 8})
    assert [heads for heads, computes in calls if computes] == [8] * SHAPE.layers


def test_the_input_of_the_layer_before_comes_back_after_the_last_group(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    prefetch, attend = _OnHost.prefetch, METHOD.attention(ContextParallel.single(), TRIAL)

    def noted(kept: _OnHost) -> None:
        if kept._coming is None:
            log.append("input")
        prefetch(kept)

    class Noting:
        def __call__(self, q: Tensor, k: Tensor, v: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
            if named.get("saved") is not None:
                log.append("group")
            return attend(q, k, v, **named)

        keep = staticmethod(attend.keep)

    monkeypatch.setattr(_OnHost, "prefetch", noted)
    torch.manual_seed(0)
    model = Decoder(SHAPE).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.3)
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, out: out.register_hook(lambda dout: log.append("layer")) and None)
    checkpoint = Checkpoint(every=1, offload="inputs")
    kept = set_layers(model, dataclasses.replace(TRIAL, checkpoint=checkpoint, head_groups=2), Noting())
    tokens = torch.randint(SHAPE.vocab, (2, 41))
    loss = model(tokens[:, :-1], torch.arange(40), tokens[:, 1:])
    assert log == []
    loss.backward()
    # Only the last layer's own input comes when that layer is computed again.
    others = ["input", "layer", "group", "group"] * (SHAPE.layers - 1)
    assert log == ["layer", "input", "group", "group", *others]
    del kept


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cp_size": 2}, "2 ranks share one"),
        ({"task": "attention"}, "task train"),
        ({"model": dataclasses.replace(SHAPE, sinks=True)}, "model grouped"),
        ({"model": dataclasses.replace(SHAPE, qkv_bias=True)}, "model grouped"),
        ({"head_groups": 5}, "head_groups is 5, and model grouped has 4 KV heads; set it to at most 4"),
    ],
)
def test_what_has_no_groups_is_refused(changes: dict[str, Any], words: str) -> None:
    trial = dataclasses.replace(TRIAL, world_size=0, head_groups=4)
    assert method_unsupported_reason(METHOD, trial) is None
    found = method_unsupported_reason(METHOD, dataclasses.replace(trial, **changes))
    assert found is not None
    assert words in found
