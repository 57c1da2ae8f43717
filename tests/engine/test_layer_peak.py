"""What a layer's backward holds at its peak, in hidden states of all tokens: the range of docs/memory.md."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention import op, plan
from engine.attention.context import ContextParallel
from engine.attention.kernels import BackwardInputs, Gradients
from engine.attention.kernels.cpu import CpuKernel
from engine.attention.kernels.fa4 import kv_heads_at_once
from engine.burst import METHOD
from engine.checkpoint.planning.memory import MemoryModel
from engine.checkpoint.planning.memory_settings import memory_settings_of
from engine.checkpoint.recompute import Recompute
from engine.linear import kernels
from engine.lora import Lora
from engine.memory.offload import HostStore
from engine.models import decoder
from engine.models.decoder import Decoder
from engine.ops import products, runs
from engine.parallelize import set_layers
from engine.settings import Checkpoint, TrialSettings
from engine.shape import ModelShape
from harness.spec.models import named_model
from tests.engine.live_bytes import LiveBytes, SavesInputs
from tests.slow import slow

TOKENS, TILES = 1024, 32


@dataclass(frozen=True)
class Allocating(CpuKernel):
    """Attention that makes the tensors a GPU kernel makes, and computes nothing."""

    writes_input_dtype = True
    takes_delta: bool = True
    takes_output = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Any, scale: float) -> tuple[Tensor, Tensor]:
        batch, tokens, heads, _ = q.shape
        return q.new_zeros(batch, tokens, heads, v.shape[-1]), torch.zeros(batch, heads, tokens)

    def backward(self, given: BackwardInputs, band: Any, scale: float, deterministic: bool) -> Gradients:
        dq, dk, dv = (torch.zeros_like(t) for t in (given.q_BLND, given.k_BMKD, given.v_BMKD))
        return dq, dk, dv


class LibraryRule(torch.autograd.Function):
    """The tensors that flash-linear-attention 0.6 makes for the gated delta rule: states of chunks of 64 tokens, and
    what it forms again in backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        batch, tokens, heads, value_dim = v.shape
        chunk = v.new_zeros(batch, tokens, heads, 64)
        ctx.save_for_backward(q.clone(), k.clone(), v.contiguous(), g.clone(), beta, chunk)
        return torch.zeros_like(v.contiguous()), v.new_zeros(batch, heads, q.shape[-1], value_dim, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dstate: Tensor) -> tuple[Tensor, ...]:
        q, k, v, g, beta, _ = ctx.saved_tensors
        dout = dout.contiguous()
        dw, dq, dk = (q.new_zeros(*v.shape[:3], q.shape[-1]) for _ in range(3))
        written, states = (dw.clone(), v.clone(), v.clone(), v.clone()), (states_of(k, v), states_of(k, v))
        dq, dk = (part.unflatten(2, (q.shape[2], -1)).sum(3) for part in (dq, dk))
        more = dw.clone(), v.clone()
        del written, states, more
        return dq, dk, torch.zeros_like(v), torch.zeros_like(g), torch.zeros_like(beta)


class LibrarySpace(torch.autograd.Function):
    """The same for `chunk_simple_gla`, whose states are fp32 in backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v.contiguous(), g.clone())
        return torch.zeros_like(v.contiguous()), states_of(k, v)[:, 0].float()

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dstate: Tensor) -> tuple[Tensor, ...]:
        q, k, v, g = ctx.saved_tensors
        states = states_of(k, v).float(), states_of(k, v).float()
        found = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), torch.zeros_like(g)
        del states
        return found


def states_of(k: Tensor, v: Tensor) -> Tensor:
    """A state of every chunk."""
    return k.new_zeros(v.shape[0], v.shape[1] // 64, v.shape[2], k.shape[-1], v.shape[-1])


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "choose_kernel", lambda *_, **__: Allocating())
    monkeypatch.setattr(op, "row_dot", lambda a, b: torch.zeros(a.shape[0], a.shape[2], a.shape[1]))
    monkeypatch.setattr(F, "rms_norm", lambda x, shape, weight=None, eps=None: SavesInputs.apply(x, weight))


def trial(checkpoint: Checkpoint, projection_tiles: int = TILES, **changes: Any) -> TrialSettings:
    sizes = {"hidden": 64, "ffn": 8, "heads": 4, "kv_heads": 4, "head_dim": 16, "vocab": 32}
    shape = ModelShape(name="s", layers=max(3, checkpoint.every + 1), **sizes | changes)
    return TrialSettings(
        task="train", method="burst", model=shape, seq_len=TOKENS, dtype="bf16", checkpoint=checkpoint,
        mlp_tiles=TILES, projection_tiles=projection_tiles,
    )  # fmt: skip


def peak(kv_heads: int, checkpoint: Checkpoint, projection_tiles: int = TILES) -> float:
    return peak_of(trial(checkpoint, projection_tiles, kv_heads=kv_heads))


def model_of(settings: TrialSettings) -> tuple[Decoder, Recompute | None]:
    """The trial's model in bf16, with gradients, and what keeps its activations."""
    model = Decoder(settings.model)
    if settings.lora is not None:
        model.adapt(settings.lora, torch.bfloat16)
    model.bfloat16()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    return model, set_layers(model, settings, METHOD.attention(ContextParallel.single(), settings))


def peak_of(settings: TrialSettings) -> float:
    """Bytes that live at once in the backward of a few layers, over those of one hidden state of all tokens."""
    shape = settings.model
    model, keeper = model_of(settings)
    tokens = torch.randint(shape.vocab, (1, TOKENS))
    with LiveBytes() as live:
        x_BLE = model.embedding(tokens)
        rotary = torch.ones(TOKENS, shape.rotated_dim // 2), torch.zeros(TOKENS, shape.rotated_dim // 2)
        for block in model.blocks:
            x_BLE = block(x_BLE, rotary)
        gradient = torch.zeros_like(x_BLE)
        live.peak = live.now
        x_BLE.backward(gradient)
    del keeper
    state = TOKENS * shape.hidden * 2
    return (live.peak - rotary[0].nbytes * 2) / state - 2  # this function holds the last output and its gradient


@pytest.mark.parametrize(("kv_heads", "states", "every"), [(2, 7.0, 1), *slow((1, 6.5, 8), (4, 9.0, 4))])
def test_a_layers_backward_holds_few_hidden_states(kv_heads: int, states: float, every: int) -> None:
    bisected = Checkpoint(every=every, tail=0, offload="inputs", replay="bisect")
    found = peak(kv_heads, bisected)
    assert found == pytest.approx(states, abs=0.5)
    assert peak(kv_heads, bisected, projection_tiles=1) > found + 0.9


def test_a_held_recomputation_holds_its_inputs_and_outputs_besides() -> None:
    held, bisected = (Checkpoint(every=4, tail=0, offload="inputs", replay=replay) for replay in ("hold", "bisect"))
    assert peak(1, held) > peak(1, bisected) + 4


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_groups_of_heads_hold_what_the_planner_counts(kv_heads: int) -> None:
    """No queries, keys and values of all heads, and the gradients of queries where outputs were. The recomputation of a
    layer forms none, so that its MLP's backward holds none either."""
    for offload in ("all", "inputs"):
        settings = trial(Checkpoint(offload=offload), kv_heads=kv_heads)
        grouped = dataclasses.replace(settings, head_groups=kv_heads)
        model, choice = MemoryModel(grouped), memory_settings_of(grouped)
        model._sums = 0.0  # a kernel's own, not made here
        counted = (model._layer(choice, model._kinds[0], 0.0) + model._kept(choice.checkpoint)[1]) / model._state
        assert peak_of(grouped) == pytest.approx(counted, abs=0.5)
        # Of four groups the sums of a kernel are a fourth as well; of two, all else is hardly less than of one.
        assert kv_heads == 2 or peak_of(settings) > peak_of(grouped) + 0.5


class Stream:
    """A stream of a GPU whose copies are done at once. What leaves is held as it is there."""

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostStore, "copies", lambda *_: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream())


@pytest.mark.parametrize("of_mlp", [{"ffn": 64}, {"ffn": 512, "mlp_tiles": 4}], ids=str)
@pytest.mark.parametrize("whole", [0, 1])
@pytest.mark.parametrize(
    "changes", [{}, {"every": 4}, {"tail": 0.0}, {"offload": "inputs"}, {"offload": "inputs", "every": 4}], ids=str
)
def test_a_forward_holds_what_the_planner_counts(
    changes: dict[str, Any], whole: int, of_mlp: dict[str, int], copying: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a layer's own tensors no more than attention's result of the layer before, which leaves for the host, and
    of its MLP no more than one run."""
    monkeypatch.setattr(products, "swiglu", lambda gate, up: torch.empty_like(gate))  # one kernel
    settings = trial(Checkpoint(**{"offload": "all", "whole_layers": whole} | changes), kv_heads=1, ffn=of_mlp["ffn"])
    settings = dataclasses.replace(settings, mlp_tiles=of_mlp.get("mlp_tiles", TILES))
    model, keeper = model_of(settings)
    counted, choice = MemoryModel(settings), memory_settings_of(settings)
    [kind], again = counted._kinds, len(model.blocks) - whole
    _, attention, _ = counted._kept(settings.checkpoint)
    half = settings.model.rotated_dim // 2
    with LiveBytes() as live:
        x_BLE = model.embedding(torch.randint(settings.model.vocab, (1, TOKENS)))
        rotary = torch.ones(TOKENS, half), torch.zeros(TOKENS, half)
        for place, block in enumerate(model.blocks):
            live.peak = live.now
            x_BLE = block(x_BLE, rotary)
            if 0 < place < again:
                kept = attention * (place + 1) / again + 2 * rotary[0].nbytes
                assert live.peak == pytest.approx(counted._again_forward(choice, kind) + kept, rel=0.06), place
    assert isinstance(keeper, Recompute)
    assert len(keeper._host._leaving) <= (0 if whole else 2)


@pytest.mark.parametrize(
    "changes", [{"every": 4, "offload": "inputs", "replay": "bisect"}, {"host_layers": 1}], ids=str
)
def test_a_backward_waits_for_no_copy_of_its_own_and_finds_those_of_forward_over(
    changes: dict[str, Any], copying: None
) -> None:
    settings = trial(Checkpoint(**{"offload": "all", "whole_layers": 2} | changes), kv_heads=1)
    model, keeper = model_of(settings)
    x_BLE = model.embedding(torch.randint(settings.model.vocab, (1, TOKENS)))
    half = settings.model.rotated_dim // 2
    for block in model.blocks:
        x_BLE = block(x_BLE, (torch.ones(TOKENS, half), torch.zeros(TOKENS, half)))
    assert isinstance(keeper, Recompute)
    assert not keeper._host._leaving
    assert keeper._host.leaving_puts >= 1


class OneKernel(torch.autograd.Function):
    """SwiGLU as one kernel."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, *_: object) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, dhidden: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors  # once: what is on the host comes back each time
        return torch.empty_like(gate), torch.empty_like(up)


class Head(torch.autograd.Function):
    """Takes the last hidden states, saves nothing, and gives their gradient."""

    @staticmethod
    def forward(ctx: Any, x_BLE: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = x_BLE.shape, x_BLE.dtype
        return x_BLE.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        return torch.zeros(ctx.shape, dtype=ctx.dtype)


@pytest.fixture
def in_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elementwise operations make the tensors that kernels of a GPU make."""

    def again(dhidden: Tensor, gate: Tensor, up: Tensor, *, saved: bool) -> tuple[Tensor, Tensor, Tensor]:
        return dhidden, *((torch.empty_like(gate), torch.empty_like(up)) if saved else (gate, up))

    def norm_gradients(x: Tensor, weight: Tensor, *_: object, dx_TE: Tensor | None, **__: object) -> tuple[Any, Tensor]:
        return torch.empty_like(x) if dx_TE is None else dx_TE, torch.zeros_like(weight)

    monkeypatch.setattr(products, "swiglu", OneKernel.apply)
    monkeypatch.setattr(decoder, "swiglu", OneKernel.apply)
    monkeypatch.setattr(products, "swiglu_again", again)
    monkeypatch.setattr(runs, "norm_gradients", norm_gradients)


def peaks_of(settings: TrialSettings) -> list[float]:
    """Bytes that live at once in each layer's backward, the last one's first, in hidden states of all tokens."""
    shape, found = settings.model, []
    model, keeper = model_of(settings)
    with LiveBytes() as live:

        def passed(_: Tensor | None = None) -> None:
            found.append(live.peak)
            live.peak = live.now

        half = shape.rotated_dim // 2
        rotary = torch.ones(settings.seq_len, half), torch.zeros(settings.seq_len, half)
        x_BLE = model.embedding(torch.randint(shape.vocab, (1, settings.seq_len)))
        for block in model.blocks:
            if block is not model.blocks[0]:
                x_BLE.register_hook(passed)
            x_BLE = block(x_BLE, rotary)
        x_BLE = Head.apply(x_BLE)
        live.peak = live.now
        x_BLE.backward()
        passed()
    del keeper
    state = settings.seq_len * shape.hidden * 2
    return [(nbytes - 2 * rotary[0].nbytes) / state for nbytes in found]


PART = {"mlp": 0.22, "every": 0}
LORA = Lora(rank=2, alpha=4, targets=("q", "k", "v", "output", "gate", "up", "down"))
LORA_WITHOUT_GATE = dataclasses.replace(LORA, targets=("q", "k", "v", "output", "up", "down"))
BACKWARDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"mlp": 1.0, "every": 0}, {"mlp_tiles": 1}),
    ({"mlp": 0.0, "every": 0}, {"mlp_tiles": 1}),
    ({"mlp": 0.0, "every": 0}, {"mlp_tiles": 2}),  # a run's tensors are gone before the next run's are formed
    ({"mlp": 0.0, "every": 0}, {"mlp_tiles": 1, "ffn": 16}),
    ({"mlp": 0.5, "every": 0, "host_layers": 2}, {"ffn": 16}),
    ({"mlp": 0.0, "every": 0}, {"mlp_tiles": 1, "gated": False}),
    ({"mlp": 0.0, "every": 0}, {"mlp_tiles": 1, "gated": False, "lora": LORA_WITHOUT_GATE}),
    ({"mlp": 1.0, "every": 0}, {"gated": False, "lora": LORA_WITHOUT_GATE}),
    ({"mlp": 0.22, "every": 0, "host_layers": 2}, {"lora": LORA}),
    ({"mlp": 0.6, "every": 0}, {"mlp_tiles": 2, "gated": False}),
    ({"offload": "all"}, {"gated": False}),
    (PART, {}),
    (PART, {"ffn": 16}),  # the mixer's backward is the fullest, when what the MLP saved is gone
    ({"mlp": 1.0, "every": 0}, {"lora": LORA}),
    ({"mlp": 0.06, "every": 0}, {"lora": LORA}),
    ({"mlp": 0.6, "every": 0}, {"lora": LORA, "mlp_tiles": 2}),
    ({"mlp": 0.22, "whole_layers": 2, "offload": "all"}, {"lora": LORA}),
    *(
        ({"every": 4, "replay": replay, "offload": offload, "tail": tail}, {})
        for replay in ("hold", "bisect")
        for offload, tail in (("all", 0.6), ("inputs", 1.0), ("inputs", 0.5), ("none", 1.0), ("none", 0.5))
    ),
]


@pytest.mark.parametrize(("of_checkpoint", "changes"), BACKWARDS, ids=str)
def test_a_backward_holds_what_the_planner_counts(
    of_checkpoint: dict[str, Any], changes: dict[str, Any], copying: None, in_kernels: None
) -> None:
    """Of layers kept whole with a part of their MLP's products, and of groups of layers computed again."""
    changes = {"ffn": 224, "mlp_tiles": 8} | changes
    settings = trial(Checkpoint(**of_checkpoint), 8, kv_heads=1, ffn=changes.pop("ffn"))
    shape = dataclasses.replace(settings.model, layers=4, gated=changes.pop("gated", True))
    settings = dataclasses.replace(settings, seq_len=8 * TOKENS, model=shape, **changes)
    within = 0.45 if settings.checkpoint.every else 0.3  # hidden states
    model, choice = MemoryModel(settings), memory_settings_of(settings)
    model._sums = 0.0  # a kernel's own, not made here
    held, layers = model._by_offload[False], settings.model.layers
    counted = {name: nbytes - model._always(choice) for name, nbytes in model.by_moment(choice).items()}
    # Neither the parameters of two layers, nor the gradients of those after, are among the live tensors.
    peaks, names, found = peaks_of(settings), {0: "first", 1: "second", layers - 1: "last"}, {}
    for place in range(layers):
        moments = {f"backward of layer {place + 1}", f"backward of the {names.get(place)} layer"} & counted.keys()
        if moments:
            nbytes = max(map(counted.__getitem__, moments)) - model._gradients(place, choice)
            found[place] = (nbytes - (held.gathered if place else held.gathered_first)) / model._state
            assert peaks[layers - 1 - place] < found[place] + within, place
    assert max(peaks) == pytest.approx(max(found.values()), abs=within)


def test_the_sums_of_a_kernel_are_those_of_the_heads_that_it_takes_at_once() -> None:
    shape = named_model("1b")
    for tokens, at_once in ((1 << 16, 8), (1 << 18, 8), (1 << 19, 4), (1 << 20, 2), (1 << 22, 1)):
        q_BLND = torch.empty(1, tokens, shape.heads, shape.head_dim, device="meta", dtype=torch.bfloat16)
        assert kv_heads_at_once(q_BLND, shape.kv_heads) == at_once
        model = MemoryModel(TrialSettings(task="train", method="burst", model=shape, seq_len=tokens, dtype="bf16"))
        of_head = 4.0 * tokens * shape.head_dim * (shape.heads / shape.kv_heads + 2)  # fp32: of dQ, dK and dV
        assert model._sums_of(shape.kv_heads) == at_once * of_head
        assert model._sums_of(1) == of_head


LATENT = {"head_dim": 24, "kv_latent": 24, "rope_dim": 8, "value_dim": 16}


def test_a_layer_of_a_latent_holds_what_the_planner_counts() -> None:
    """Keys and values of all heads, and their gradients, are there once, while they are used."""
    settings = trial(Checkpoint(every=1, tail=0, offload="inputs", replay="bisect"), **LATENT)
    model = MemoryModel(settings)
    model._sums = 0.0  # a kernel's own, not made here
    counted = model._layer(memory_settings_of(settings), model._kinds[0], 0.0)
    assert peak_of(settings) == pytest.approx(counted / (TOKENS * settings.model.hidden * 2), abs=0.5)


LINEAR: dict[str, Any] = {
    "layer_pattern": "lf", "linear_heads": 4, "linear_key_heads": 1, "linear_key_dim": 64, "linear_value_dim": 32,
}  # fmt: skip


def _called(form: Any, *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None, **_: object) -> Any:
    return form.apply(q, k, v, g) if beta is None else form.apply(q, k, v, g, beta)


@pytest.mark.parametrize("linear", ["gated_delta_net", "mamba2"])
def test_a_linear_layer_holds_what_the_planner_counts(linear: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "kernel_of", lambda *_: "fla")
    for name, call, form in (
        ("ops.gated_delta_rule", "chunk_gated_delta_rule", partial(_called, LibraryRule)),
        ("ops.simple_gla", "chunk_simple_gla", partial(_called, LibrarySpace)),
        ("modules.causal_conv1d", "causal_conv1d", lambda x, weight, **_: (SavesInputs.apply(x, weight), None)),
        (
            "modules.norm.fused_norm_gate",
            "rms_norm_gated",
            lambda x, gate, w, *_, **__: SavesInputs.apply(x, gate, w),
        ),
    ):
        monkeypatch.setitem(sys.modules, f"fla.{name}", SimpleNamespace(**{call: form}))
    settings = trial(Checkpoint(every=1, tail=0, offload="inputs", replay="bisect"), linear=linear, **LINEAR)
    model = MemoryModel(settings)
    [linear_kind] = [kind for kind in model._kinds if kind.linear]
    counted = model._layer(memory_settings_of(settings), linear_kind, 0.0)
    assert peak_of(settings) == pytest.approx(counted / (TOKENS * settings.model.hidden * 2), rel=0.04)
