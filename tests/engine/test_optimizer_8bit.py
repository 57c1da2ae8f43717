"""AdamW's moments in 8 bits: within the error of the format, in the bytes that plans count, and saved and resumed."""

from __future__ import annotations

import copy
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import engine.memory.moments
from engine.burst import METHOD
from engine.checkpoint.counts import moment_bytes
from engine.lora import Lora
from engine.memory.moments import PARTS_8BIT, PiecewiseAdamW
from engine.method import method_unsupported_reason
from engine.models.decoder import Decoder
from engine.optimizer import adamw
from engine.settings import STATES_BLOCK, AdamWSettings, TrialSettings
from engine.shape import ModelShape
from engine.training.config import Evaluation, Saving
from harness.spec.methods import method_named
from tests.engine.memory.test_optimizer_offload import contents, train
from tests.engine.training.training_runs import config, curve, order, several
from tests.ranks import run_on_ranks
from tests.slow import slow

# Rows of one block and more, rows that are no whole blocks (the MLP's last matrix), and rows that ranks share unevenly.
SHAPE = ModelShape(name="blocks", layers=2, hidden=256, ffn=96, heads=3, kv_heads=1, head_dim=64, vocab=257)
PIECE = 1 << 12
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the library has other kernels there")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]


def test_without_the_library_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ValueError, match=r"optimizer_states is 8bit, which needs bitsandbytes, and .*; pip install "):
        adamw(Decoder(SHAPE), 1e-2, AdamWSettings(), eight_bit=True)


TRIAL = TrialSettings(task="train", method="burst", model=SHAPE, seq_len=64, optimizer_states="8bit")
REFUSED: dict[str, dict[str, Any]] = {
    "task is lm_head": {"task": "lm_head"},
    "dtype is fp64": {"dtype": "fp64"},
    "lora is set": {"lora": Lora(rank=2, alpha=4.0, targets=("q",))},
    "tp_size is 2": {"tp_size": 2, "method": "megatron_tp"},
    "no matrix of model narrow has rows of whole blocks": {"model": replace(SHAPE, name="narrow", hidden=96)},
}


def test_what_cannot_have_moments_in_8_bits_is_refused_by_name() -> None:
    assert method_unsupported_reason(METHOD, TRIAL) is None
    for words, values in REFUSED.items():
        reason = method_unsupported_reason(METHOD, replace(TRIAL, **values))
        assert reason is not None, words
        assert reason.startswith(f"optimizer_states is 8bit, and {words}")
    foreign = method_named("trl_upstream")
    assert "has no choice of optimizer_states, found 8bit; set optimizer_states to null" in str(foreign.refuse(TRIAL))


@pytest.fixture
def library() -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: extra `test` has it")


needs_library = pytest.mark.usefixtures("library")


def values(state: dict[str, Tensor], moment: str) -> tuple[Tensor, Tensor]:
    """The moment that codes and scales stand for, in float64, and the scale of each element."""
    from bitsandbytes.functional import create_dynamic_map

    codes, scales = (state[f"exp_avg{moment}_{part}"].cpu() for part in ("codes", "scales"))
    each = scales.double().repeat_interleave(STATES_BLOCK, dim=-1)
    return create_dynamic_map(signed=not moment).double()[codes.long()] * each, each


@needs_library
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_twenty_steps_stay_within_the_error_of_the_format_of_adamw_in_float64(device: str, decay: float) -> None:
    # Neighbours of the codebook are at most so far apart, in scales. A GPU may take the second nearest, for its sign.
    gaps, nearest = {"": 0.0141, "_sq": 0.0071}, 0.5 if device == "cpu" else 1.0
    rate, (beta1, beta2), epsilon = 1e-2, (0.9, 0.95), 1e-8
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 2 * STATES_BLOCK, generator=generator)
    parameter = torch.nn.Parameter(start.to(device, copy=True))
    optimizer = PiecewiseAdamW(
        [parameter], rate, (beta1, beta2), epsilon, decay, fused=True, offload=0.0, eight_bit=[parameter]
    )
    truth, m, v = start.double(), torch.zeros_like(start).double(), torch.zeros_like(start).double()
    of_m, of_v, of_p = (torch.zeros_like(m) for _ in range(3))  # bounds of the errors
    tightness = 0.0
    for step in range(1, 21):
        size = torch.rand(start.shape, generator=generator) + 0.5
        gradient = size * torch.randn(start.shape, generator=generator).sign()
        parameter.grad = gradient.to(device)
        optimizer.step()
        g = gradient.double()
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        of_m, of_v = beta1 * of_m, beta2 * of_v  # the update is of moments in fp32: rounded ones come next step
        roots = [((v + sign * of_v).clamp(min=0).sqrt() / (1 - beta2**step) ** 0.5 + epsilon) for sign in (-1, 1)]
        moved = [(m + sign * of_m) / (1 - beta1**step) / root for sign, root in itertools.product((-1, 1), roots)]
        update = m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + epsilon)
        of_update = torch.stack([(each - update).abs() for each in moved]).amax(0)
        truth = (1 - rate * decay) * truth - rate * update
        of_p = (1 - rate * decay) * of_p + rate * of_update + 1e-6 + rate**2 * decay * update.abs()
        error = (parameter.detach().cpu().double() - truth).abs()
        assert (error <= of_p).all(), step
        state = optimizer.state[parameter]
        for moment, exact, bound in (("", m, of_m), ("_sq", v, of_v)):
            found, scales = values(state, moment)
            bound += nearest * gaps[moment] * scales + 1e-6 * scales
            assert ((found - exact).abs() <= bound).all(), (step, moment)
            tightness = max(tightness, ((found - exact).abs() / bound).max().item())
    assert state["step"] == 20
    assert tightness > 0.5  # the bounds are not loose
    assert of_p.max() < 0.25 * (parameter.detach().cpu() - start).abs().mean()


def model_of(device: str = "cpu") -> Decoder:
    torch.manual_seed(0)
    model = Decoder(SHAPE)
    torch.nn.init.normal_(model.head.weight)
    return model.to(device)


def trained(offload: float, ranks: int = 1, device: str = "cpu") -> dict[str, Tensor]:
    """Every parameter and state by name, whole, after three steps."""
    model = model_of(device)
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = adamw(model, 1e-2, AdamWSettings(), offload=offload, eight_bit=True)
    train(model, optimizer, range(3))
    for parameter in model.parameters() if ranks > 1 else ():
        for part in (part for name, part in optimizer.state[parameter].items() if name != "step"):
            whole = (*parameter.shape[:-1], part.to_local().shape[-1])
            assert (part.placements, part.shape) == (
                parameter.placements,
                whole if parameter.ndim > 1 else parameter.shape,
            )
    return contents(model, optimizer)


def differing(ranks: int, offloads: tuple[float, ...], device: str = "cpu") -> list[str]:
    """Names of what differs from one rank with all on the device. Torch's fused step rounds vectors by their length."""
    engine.memory.moments.PIECE_ELEMENTS = PIECE
    expected = trained(0.0, device=device)
    found = [trained(offload, ranks, device) for offload in offloads]
    assert all(each.keys() == expected.keys() for each in found)
    limits = {name: 0.0 if expected[name].ndim > 1 else 1e-6 for name in expected}
    return [
        name
        for each in found
        for name in expected
        if not torch.allclose(each[name].double(), expected[name].double(), rtol=limits[name], atol=0)
    ]


@needs_library
@pytest.mark.parametrize("device", DEVICES)
def test_states_on_the_host_give_the_same_bits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.memory.moments, "PIECE_ELEMENTS", PIECE)  # which cuts parameters
    assert differing(1, (0.4, 1.0), device) == []
    first, second = model_of(device), model_of(device)
    before, after = (
        adamw(model, 1e-2, AdamWSettings(), offload=offload, eight_bit=True)
        for model, offload in ((first, 0.0), (second, 0.6))
    )
    train(first, before, range(2))
    second.load_state_dict(first.state_dict())
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    train(second, after, range(2, 3))
    torch.testing.assert_close(contents(second, after), trained(0.0, device=device), rtol=0, atol=0)


@needs_library
def test_any_number_of_ranks_gives_the_same_bits() -> None:
    assert run_on_ranks(2, differing, 2, (0.0, 0.6)) == [[]] * 2  # 257 rows: shards of different sizes


@needs_library
def test_states_take_the_bytes_that_plans_count() -> None:
    model = model_of()
    optimizer = adamw(model, 1e-2, AdamWSettings(), eight_bit=True)
    train(model, optimizer, range(1))
    parts = [state[name] for state in optimizer.state.values() for name in state if name != "step"]
    names = set(optimizer.state[model.head.weight])
    assert names == {"step", *PARTS_8BIT}
    assert sum(part.nbytes for part in parts) == round(moment_bytes(TRIAL) * SHAPE.parameters)
    narrow = [name for name, parameter in model.named_parameters() if "exp_avg_codes" in optimizer.state[parameter]]
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in narrow} == {
        "q", "k", "v", "gate", "up", "head",
    }  # fmt: skip
    assert moment_bytes(replace(TRIAL, optimizer_states=None)) == 8


RUN = {"model": replace(SHAPE, layers=1), "learning_rate": 1e-3, "evaluate": Evaluation(), "save": Saving()}


def losses(folder: Path, ranks: int, *states: str | None) -> list[list[float]]:
    """Of fifty steps, with each kind of moments."""
    cases = [config(cp_size=ranks, steps=50, optimizer_states=each, **RUN) for each in states]
    starts = [(str(folder / f"{ranks}_{number}"), order(case), None) for number, case in enumerate(cases)]
    return [[line[2] for line in curve(found)] for found in run_on_ranks(ranks, several, starts)[0]]


@needs_library
@pytest.mark.parametrize("ranks", [1, *slow(2)])
def test_fifty_steps_have_nearly_the_loss_of_moments_in_fp32(tmp_path: Path, ranks: int) -> None:
    wide, narrow = losses(tmp_path, ranks, None, "8bit")
    assert wide[-1] < 0.7 * wide[0]
    assert narrow == pytest.approx(wide, rel=0.003)
    assert narrow != wide


@needs_library
def test_a_run_resumes_bit_for_bit_and_not_with_states_of_another_kind(tmp_path: Path) -> None:
    narrow, wide = (config(cp_size=2, optimizer_states=states, **RUN) for states in ("8bit", None))
    whole, parts, third, other = (str(tmp_path / name) for name in ("whole", "parts", "third", "other"))
    starts = [
        (whole, order(narrow), None),
        (parts, order(narrow), 3),
        (parts, order(wide, resume=True), None),
        (parts, order(narrow, resume=True), None),
        (third, order(narrow), 3),
        (other, order(wide), 3),
        (other, order(narrow, resume=True), None),
    ]
    straight, _, refused, resumed, _, _, refused_too = run_on_ranks(2, several, starts)[0]
    assert curve(resumed) == curve(straight)
    assert resumed["parameters"] == straight["parameters"]
    for sentence in (refused["refused"], refused_too["refused"]):
        assert sentence.startswith("checkpoint step-00000003 cannot be resumed from: it was made with")
        assert "optimizer_states" in sentence
    # Other ranks, and states in host memory: sums of gradients are rounded differently, and nothing else.
    alone = config(optimizer_states="8bit", optimizer_offload=0.5, **RUN)
    [changed] = run_on_ranks(1, several, [(third, order(alone, resume=True), None)])[0]
    assert [line[2] for line in curve(changed)] == pytest.approx([line[2] for line in curve(straight)], rel=2e-5)
