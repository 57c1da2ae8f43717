"""Layers kept whole in host memory: equal gradients, one copy of each tensor there and back, one layer ahead."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import engine.memory.offload
from engine.attention.context import ContextParallel
from engine.burst import METHOD
from engine.checkpoint.hosted import HostedLayer
from engine.checkpoint.planning.memory import MemoryModel
from engine.checkpoint.planning.memory_settings import memory_settings_of
from engine.checkpoint.recompute import Recompute
from engine.initialise import initialise
from engine.lora import Lora
from engine.models.decoder import Decoder
from engine.parallelize import set_layers
from engine.settings import Checkpoint, Steps, TrialSettings
from engine.shape import ModelShape
from tests.engine.parity import task_of
from tests.ranks import run_on_ranks

LAYERS, SEQ_LEN, BATCH = 7, 32, 2
SHAPE = ModelShape(name="deep", layers=LAYERS, hidden=16, ffn=24, heads=4, kv_heads=2, head_dim=4, vocab=61)
NORMED = dataclasses.replace(SHAPE, name="normed", qk_norm=True, gated=False)
HYBRID = dataclasses.replace(
    SHAPE, name="hybrid", layer_pattern="lf", linear="gated_delta_net", linear_heads=4, linear_key_heads=2,
    linear_key_dim=4, linear_value_dim=4,
)  # fmt: skip
ADAPTED = Lora(rank=3, alpha=5.0, targets=("q", "v", "output", "gate", "down"))
CHOICES = [
    Checkpoint(every=0, host_layers=1),
    Checkpoint(every=0, host_layers=4, mlp=0.3),
    Checkpoint(every=0, host_layers=99, mlp=0.0),
    Checkpoint(every=1, whole_layers=4, host_layers=2, offload="all", mlp=0.5),
    Checkpoint(every=2, whole_layers=3, host_layers=2, tail=0.4),
]


def settings_of(checkpoint: Checkpoint, **changes: Any) -> TrialSettings:
    return TrialSettings(
        task="train", method="burst", seq_len=SEQ_LEN, batch_size=BATCH, dtype="fp64", checkpoint=checkpoint,
        **{"model": SHAPE} | changes,
    )  # fmt: skip


def model_with(settings: TrialSettings) -> tuple[Decoder, Recompute | None]:
    model = Decoder(settings.model).double()
    if settings.lora is not None:
        model.adapt(settings.lora, torch.float64)
    initialise(model, 0, torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("head") or "lora" in name or ".b." in name:  # else no gradient reaches what they follow
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return model, set_layers(model, settings, METHOD.attention(ContextParallel(), settings))


def loss_of(model: Decoder, seed: int = 1) -> Tensor:
    tokens = torch.randint(61, (BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(seed))
    return model(tokens[:, :-1], torch.arange(SEQ_LEN), tokens[:, 1:])


def gradients(model: Decoder) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]


def assert_those_of_keeping_everything(model: Decoder, settings: TrialSettings, seeds: tuple[int, ...] = (1,)) -> None:
    plain, _ = model_with(dataclasses.replace(settings, checkpoint=Checkpoint(every=0), mlp_tiles=1))
    for seed in seeds:
        loss_of(plain, seed).backward()
    torch.testing.assert_close(gradients(model), gradients(plain), rtol=1e-10, atol=1e-12)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tensors of each copy back from the host."""
    found: list[int] = []
    fetch = engine.memory.offload._OnHost.fetch

    def counted(self: Any) -> Any:
        tensors = fetch(self)
        found.append(len(tensors))
        return tensors

    monkeypatch.setattr(engine.memory.offload._OnHost, "fetch", counted)
    return found


@pytest.mark.parametrize("checkpoint", CHOICES, ids=str)
@pytest.mark.parametrize(
    "changes",
    [{}, {"mlp_tiles": 3, "projection_tiles": 2}, {"lora": ADAPTED}, {"model": NORMED}, {"model": HYBRID}],
    ids=["plain", "tiles", "adapters", "normed", "hybrid"],
)
def test_gradients_are_those_of_keeping_everything(
    checkpoint: Checkpoint, changes: dict[str, Any], copied: list[int]
) -> None:
    settings = settings_of(checkpoint, **changes)
    model, kept = model_with(settings)
    assert kept is not None
    loss = loss_of(model)
    hosted = checkpoint.hosted(LAYERS)
    assert hosted
    assert kept.hosted.store.held_bytes > len(hosted) * BATCH * SEQ_LEN * SHAPE.hidden * 8
    copied.clear()
    loss.backward()
    assert_those_of_keeping_everything(model, settings)
    assert kept.hosted.store.held_bytes == 0
    again = checkpoint.layers_again(LAYERS)
    assert len([each for each in copied if each > 2]) == len(hosted)  # one copy of each layer's tensors
    assert len(copied) <= len(hosted) + 2 * again


@pytest.mark.parametrize("mlp", [1.0, 0.25])
@pytest.mark.parametrize("tiles", [1, 4])
def test_the_host_holds_what_the_memory_model_says(mlp: float, tiles: int) -> None:
    settings = settings_of(Checkpoint(every=0, host_layers=3, mlp=mlp), mlp_tiles=tiles)
    model, kept = model_with(settings)
    loss = loss_of(model)
    assert kept is not None
    expected = 3 * MemoryModel(settings).saved_of_layer(memory_settings_of(settings))
    assert kept.hosted.store.held_bytes == pytest.approx(expected, rel=0.03)  # LSE is fp64 here, and counted as fp32
    with torch.no_grad():
        loss_of(model)
    assert kept.hosted.store.held_bytes == pytest.approx(expected, rel=0.03)  # evaluation saves nothing
    del loss
    gc.collect()
    assert kept.hosted.store.held_bytes == 0


def test_several_forwards_may_be_open_and_a_backward_may_be_repeated() -> None:
    settings = settings_of(CHOICES[1])
    model, kept = model_with(settings)
    losses = [loss_of(model, seed) for seed in (1, 2)]
    losses[0].backward(retain_graph=True)
    losses[1].backward()
    losses[0].backward()
    assert_those_of_keeping_everything(model, settings, (1, 2, 1))
    assert kept is not None
    assert kept.hosted.store.held_bytes == 0


def test_a_layer_comes_back_when_the_next_ones_backward_reaches_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    for name in ("prefetch", "fetch"):
        own = getattr(engine.memory.offload._OnHost, name)

        def noted(self: Any, name: str = name, own: Any = own) -> Any:
            if name == "fetch" or self._coming is None:
                events.append(name)
            return own(self)

        monkeypatch.setattr(engine.memory.offload._OnHost, name, noted)
    settings = settings_of(Checkpoint(every=0, host_layers=3))
    model, _ = model_with(settings)
    loss = loss_of(model)
    for index, block in enumerate(model.blocks):
        for matrix in (block.mlp.down, block.attention.q):
            where = "mlp" if matrix is block.mlp.down else "attention"
            matrix.weight.register_post_accumulate_grad_hook(
                lambda _, index=index, where=where: events.append(f"{where} {index}")
            )
    events.clear()
    loss.backward()
    for hosted in Checkpoint(every=0, host_layers=3).hosted(LAYERS):
        after = events.index(f"mlp {hosted + 1}")
        assert events[after + 1] == "prefetch"
        assert events.index(f"attention {hosted + 1}") > after + 1
        assert events.index("fetch", after) > events.index(f"attention {hosted + 1}")
    assert events.count("prefetch") == events.count("fetch") == 3


def test_a_backward_that_takes_a_part_of_a_layer_may_be_followed_by_another() -> None:
    settings = settings_of(CHOICES[1])
    model, _ = model_with(settings)
    loss = loss_of(model)
    weight = model.blocks[1].mlp.down.weight
    [part] = torch.autograd.grad(loss, [weight], retain_graph=True)
    loss.backward()
    assert_those_of_keeping_everything(model, settings)
    torch.testing.assert_close(part, weight.grad, rtol=1e-12, atol=1e-14)


def test_a_layer_that_changes_what_it_saved_is_refused() -> None:
    def layer(x_BLE: Tensor, *_: Any) -> Tensor:
        doubled = x_BLE * 2
        squared = doubled * doubled
        doubled.add_(1.0)
        return squared

    kept = HostedLayer(engine.memory.offload.HostStore(), frozenset(), torch.device("cpu"))
    x_BLE = torch.ones(1, 4, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match="changed in place after its layer had saved it; change a copy"):
        kept.run(layer, x_BLE, (x_BLE, x_BLE), None)
    assert not kept._leaving


def test_layers_are_spread_evenly_and_the_last_one_stays() -> None:
    assert Checkpoint(every=0, host_layers=3).hosted(7) == (0, 2, 4)
    assert Checkpoint(every=1, whole_layers=5, host_layers=2).hosted(16) == (11, 13)
    assert Checkpoint(every=1, host_layers=2).hosted(16) == ()
    for layers, count in itertools.product((1, 2, 9, 32), range(40)):
        found = Checkpoint(every=0, host_layers=count).hosted(layers)
        assert len(set(found)) == len(found) == min(count, layers - 1)
        assert all(0 <= place < layers - 1 for place in found)
    with pytest.raises(ValueError, match=r"checkpoint\.host_layers is -1; expected 0, or a number of layers"):
        Checkpoint(host_layers=-1)


def locked_by_a_run(settings: TrialSettings) -> tuple[list[float], int, int]:
    """Losses, and the buffers of host memory that were made in a run and within its measured step."""
    taken: list[int] = []
    own = engine.memory.offload.host_buffer

    def noted(nbytes: int, device: torch.device) -> Tensor:
        taken.append(nbytes)
        return own(nbytes, device)

    engine.memory.offload.host_buffer = noted
    _, task = task_of(settings)
    before: list[int] = []
    task.model.register_forward_pre_hook(lambda *_: before.append(len(taken)))
    try:
        figures = task.run(lambda step: None)
    finally:
        engine.memory.offload.host_buffer = own
    return figures.loss, len(taken), len(taken) - before[-1]


@pytest.mark.parametrize(
    ("checkpoint", "shape"),
    [
        (Checkpoint(every=0, host_layers=4, mlp=0.3), SHAPE),
        (Checkpoint(every=1, whole_layers=LAYERS - 1, host_layers=2, offload="all"), SHAPE),
        (Checkpoint(every=0, host_layers=5), HYBRID),
    ],
    ids=["parts", "offload", "hybrid"],
)
def test_after_a_shorter_warm_up_the_host_memory_of_a_full_step_is_locked(
    checkpoint: Checkpoint, shape: ModelShape
) -> None:
    settings = dataclasses.replace(
        settings_of(checkpoint),
        model=dataclasses.replace(shape, vocab=256),
        dtype="fp32",
        steps=Steps(warmup=1, measured=1, warmup_seq_len=8),
    )
    [(loss, made, within)] = run_on_ranks(1, locked_by_a_run, settings)
    [(plain, *_)] = run_on_ranks(1, locked_by_a_run, dataclasses.replace(settings, checkpoint=Checkpoint(every=0)))
    assert made > 2 * len(checkpoint.hosted(LAYERS))
    assert within == 0
    assert loss == pytest.approx(plain, rel=1e-5)
