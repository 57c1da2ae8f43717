"""verl and prime-rl with this package's attention: log-probabilities and every gradient are those of one device.

verl's own functions cut the batch and gather the result. prime-rl is no package to install: modules of its names stand
in for it, with the signatures that were read from its source (559b4477, August 2026).
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import burst
import burst.prime_rl
from tests.ranks import run_on_ranks

tokenizers = pytest.importorskip("tokenizers", reason="transformers needs it")
transformers = pytest.importorskip("transformers", reason="the models are those of transformers: extra `test` has it")

LENGTHS = (9, 4, 8)  # of packed documents: 21 tokens, which verl pads
TOKENS = torch.randint(3, 50, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
WEIGHTS = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def model_of(attention: str) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).double()


def log_probabilities(logits: torch.Tensor, next_tokens: torch.Tensor) -> torch.Tensor:
    return logits[0].log_softmax(dim=-1).gather(1, next_tokens[0, :, None])[:, 0]


def need_verl() -> None:
    """Its wheel also holds a package `tests`, which hides ours where it is installed as a whole."""
    pytest.importorskip("tensordict", reason="verl 0.9.1 needs tensordict")
    pytest.importorskip("verl", reason="the adapter is tested against verl 0.9.1")


def by_verl() -> tuple[float, dict[str, Any]]:
    """As a worker of verl forms a loss: every rank has all log-probabilities, and gradients are averaged."""
    from verl.models.transformers import monkey_patch
    from verl.utils import ulysses
    from verl.utils.import_utils import import_external_libs

    import_external_libs("burst.verl")
    model, ranks = model_of("burst"), dist.get_world_size()
    monkey_patch.is_trl_available = lambda: False  # TRL 1.16 no longer has what it looks for
    monkey_patch.apply_monkey_patch(model, ulysses_sp_size=ranks)
    ulysses.set_ulysses_sequence_parallel_group(dist.group.WORLD)
    tokens, positions, added = ulysses.ulysses_pad_and_slice_inputs(TOKENS, POSITIONS, sp_size=ranks)
    following, _, _ = ulysses.ulysses_pad_and_slice_inputs(TOKENS.roll(-1, dims=1), None, sp_size=ranks)
    own = log_probabilities(model(input_ids=tokens, position_ids=positions, attention_mask=None).logits, following)
    whole = ulysses.gather_outputs_and_unpad(own, gather_dim=0, unpad_dim=0, padding_size=added)
    loss = (whole * WEIGHTS).sum()
    loss.backward()
    found = {name: each.grad.clone() for name, each in model.named_parameters()}
    for each in found.values():
        dist.all_reduce(each)
    return loss.item(), {name: (each / ranks).numpy() for name, each in found.items()}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_log_probabilities_of_verl_and_their_gradients_are_those_of_one_device(ranks: int) -> None:
    need_verl()
    loss, gradients = run_on_ranks(ranks, by_verl)[0]
    model, start = model_of("eager"), 0
    expected = torch.zeros((), dtype=torch.float64)
    following = TOKENS.roll(-1, dims=1)
    for length in LENGTHS:
        part = slice(start, start + length)
        own = log_probabilities(model(input_ids=TOKENS[:, part]).logits, following[:, part])
        expected, start = expected + (own * WEIGHTS[part]).sum(), start + length
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)  # eager attention forms its softmax in float32
    for name, parameter in model.named_parameters():
        error = (torch.from_numpy(gradients[name]) - parameter.grad).abs().max() / parameter.grad.abs().max()
        assert error < 1e-5, (name, error)


@pytest.mark.slow
def test_verls_worker_takes_the_same_steps_on_one_and_two_ranks(tmp_path: Path) -> None:
    need_verl()
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(at): at for at in range(64)}, unk_token="0"))
    named = {"unk_token": "0", "pad_token": "0", "eos_token": "2"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(tmp_path)
    norms = []
    for ranks in (1, 2):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        done = subprocess.run(
            [sys.executable, *launcher, str(Path(__file__).with_name("verl_worker.py")), str(tmp_path)],
            capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        norms.append([float(each) for each in re.findall(r"gradient norm (.*)", done.stdout)])
        assert len(norms[-1]) == 3, done.stdout + done.stderr
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


class FlashAttention:
    """In the place of each class of prime-rl."""

    sliding_window: int | None = None
    _compute_attention: Any = None


def stand_in(missing: str = "") -> ModuleType:
    """Modules of prime-rl with what `install` looks for."""
    names = {place: {name: type(name, (FlashAttention,), {})} for place, name in burst.prime_rl._CLASSES}
    names[burst.prime_rl._ULYSSES] = {
        "ULYSSES_PARAMS": {}, "substitute_ulysses_attn": None, "substitute_hf_ulysses_attn": None,
    }  # fmt: skip
    for place, held in names.items():
        parts = place.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        for name, value in held.items():
            if name != missing:
                setattr(sys.modules[place], name, value)
    return sys.modules[burst.prime_rl._ULYSSES]


def by_prime_rl(window: int | None) -> list[Any]:
    ulysses: Any = stand_in()
    burst.prime_rl.install()
    group = dist.group.WORLD
    ulysses.substitute_hf_ulysses_attn(group)
    ulysses.substitute_ulysses_attn(group, attn_impl="flash_attention_3")
    ulysses.ULYSSES_PARAMS["cu_seqlens"] = torch.tensor([0, 9, 13, 20], dtype=torch.int32)
    whole = [each.requires_grad_() for each in whole_tensors()]
    cp = burst.ContextParallel(group, layout="contiguous")
    layer = importlib.import_module("prime_rl.trainer.models.afmoe.modeling_afmoe").AfmoeFlashAttention()
    layer.sliding_window = window
    local = torch.tensor([0, 20 // cp.size])
    out = layer._compute_attention(*(cp.shard(each, dim=0) for each in whole), local, 20 // cp.size)
    out.square().sum().backward()
    gathered = cp.unshard(out.detach().contiguous(), dim=0)
    grads = [each.grad for each in whole]
    for each in grads:
        dist.all_reduce(each)
    return [each.numpy() for each in (gathered, *grads)]


def whole_tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(20, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]


@pytest.mark.parametrize("window", [None, 5])
def test_attention_of_prime_rl_and_its_gradients_are_those_of_one_device(window: int | None) -> None:
    found = run_on_ranks(2, by_prime_rl, window)[0]
    q, k, v = (each.requires_grad_() for each in whole_tensors())
    numbers = torch.cat([torch.full((length,), at) for at, length in enumerate((9, 4, 7))])
    at = torch.arange(20)
    behind = at[:, None] - at[None]
    seen = (behind >= 0) & (numbers[:, None] == numbers[None]) & (behind < (window or 20))
    heads_first = (each.transpose(0, 1) for each in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=seen, enable_gqa=True)
    out = out.transpose(0, 1)
    out.square().sum().backward()
    for each, expected in zip(found, (out.detach(), q.grad, k.grad, v.grad), strict=True):
        assert (torch.from_numpy(each) - expected).abs().max() < 1e-12


def test_another_prime_rl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    with pytest.raises(ImportError, match="install needs prime-rl"):
        burst.prime_rl.install()
    stand_in(missing="substitute_hf_ulysses_attn")
    with pytest.raises(ImportError, match="has no substitute_hf_ulysses_attn"):
        burst.prime_rl.install()


def test_ranks_may_change_from_call_to_call() -> None:
    asked = []

    def ranks() -> burst.ContextParallel:
        asked.append(alone)
        return alone

    alone = burst.ContextParallel.single()
    burst.register(ranks)
    attend = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["burst"]
    q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    attend(SimpleNamespace(), q, k, v, None)
    assert asked == [alone]
    with pytest.raises(ValueError, match="cp is a int"):
        burst.register(3)  # type: ignore[arg-type]
