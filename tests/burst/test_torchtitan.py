"""torchtitan's models over sequences that context-parallel ranks share: loss and every gradient are those of one rank
with dense attention under torchtitan's own mask."""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_on_ranks

pytest.importorskip("triton", reason="torchtitan 0.3 imports triton, also on CPUs")
pytest.importorskip(
    "torchtitan", reason="the adapter is tested against torchtitan 0.3.0, which has many packages of its own"
)

import torchtitan.models.common.attention as titan
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_cp
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask

import burst
import burst.torchtitan

VOCABULARY, ROWS, LAYERS = 2048, 2, 2


class Dense(titan.FlexAttention):
    """What FlexAttention computes, from the same mask function: FlexAttention has no backward on CPUs."""

    def forward(self, q: Any, k: Any, v: Any, *, attention_masks: BlockMask, scale: Any = None, **_: Any) -> Any:
        at = torch.arange(q.shape[1])
        rows = [attention_masks.mask_mod(torch.tensor(row), None, at[:, None], at[None]) for row in range(q.shape[0])]
        seen = torch.stack([row.expand(len(at), len(at)) for row in rows])[:, None]
        heads_first = (each.transpose(1, 2) for each in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            *heads_first, attn_mask=seen, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2)


def prepare() -> None:
    """Masks without a compiler, meshes of CPUs."""
    titan._compiled_create_block_mask = torch_cp._compiled_create_block_mask = create_block_mask
    from torchtitan.distributed import parallel_dims

    parallel_dims.device_type = "cpu"


def model_of(name: str, ranks: int) -> tuple[Any, Any]:
    """A model with the same weights in each call, and torchtitan's description of the ranks."""
    from torchtitan.config import OverrideConfig, ParallelismConfig, apply_overrides
    from torchtitan.distributed import ParallelDims, utils

    prepare()
    registry = importlib.import_module(f"torchtitan.models.{name}").model_registry
    config = registry("debugmodel", attn_backend="flex").model
    config.layers = config.layers[:LAYERS]
    parallelism = ParallelismConfig(context_parallel_degree=ranks)
    utils.set_spmd_backend(parallelism.spmd_backend)
    config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    if ranks > 1:
        apply_overrides(OverrideConfig(imports=["burst.torchtitan.attention"]), config)
    torch.manual_seed(0)
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))
    dims = ParallelDims.from_config(parallelism, ranks) if ranks > 1 else None
    if dims is None:
        for layer in model.layers.values():
            layer.attention.inner_attention = Dense(titan.FlexAttention.Config())
    else:
        dims.build_mesh()
        model.parallelize(dims)
    return model, dims


def batch(seq_len: int, lengths: tuple[tuple[int, ...], ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (ROWS, seq_len + 1), generator=torch.Generator().manual_seed(1))
    positions = torch.stack([torch.cat([torch.arange(each) for each in row]) for row in lengths])
    return tokens[:, :-1], tokens[:, 1:].contiguous(), positions


def loss_of(model: Any, tokens: Any, labels: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    logits = model(tokens, **kwargs)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters()}


def one(name: str, seq_len: int, lengths: tuple[tuple[int, ...], ...]) -> tuple[float, dict[str, torch.Tensor]]:
    model, _ = model_of(name, 1)
    tokens, labels, positions = batch(seq_len, lengths)
    masks = model.get_attention_masks(positions=positions)
    loss = loss_of(model, tokens, labels, {"positions": positions, "attention_masks": masks})
    loss.backward()
    return loss.item(), gradients(model)


def many(name: str, balancer: str | None, seq_len: int, lengths: Any) -> tuple[float, dict[str, Any]]:
    from torchtitan.distributed.context_parallel import prepare_context_parallel_input

    model, dims = model_of(name, dist.get_world_size())
    tokens, labels, positions = batch(seq_len, lengths)
    kwargs = {"positions": positions, "attention_masks": model.get_attention_masks(positions=positions)}
    tokens, labels, kwargs = prepare_context_parallel_input(
        tokens, labels, kwargs, dims.get_mesh("cp"), torch.device("cpu"), balancer
    )
    loss = loss_of(model, tokens, labels, kwargs)
    loss.backward()
    own, total = gradients(model), loss.detach().clone()
    for each in (total, *own.values()):
        dist.all_reduce(each)
    return total.item(), {name: each.numpy() for name, each in own.items()}


@pytest.mark.parametrize(
    ("name", "ranks", "balancer", "lengths"),
    [
        ("llama3", 2, "headtail", ((100, 156), (3, 250, 3))),
        pytest.param("llama3", 2, None, ((256,), (256,)), marks=pytest.mark.slow),
        pytest.param("llama3", 4, "headtail", ((300, 212), (512,)), marks=pytest.mark.slow),
        pytest.param("qwen3", 2, "headtail", ((100, 156), (3, 250, 3)), marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 2, "headtail", ((100, 156), (3, 250, 3)), marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_are_those_of_one_rank(name: str, ranks: int, balancer: str | None, lengths: Any) -> None:
    seq_len = sum(lengths[0])
    found, gradients = run_on_ranks(ranks, many, name, balancer, seq_len, lengths)[0]
    loss, expected = one(name, seq_len, lengths)
    assert found == pytest.approx(loss, rel=1e-6)
    if "lm_head.weight" not in expected:  # tied to the embedding, before the model was parallelized
        gradients["tok_embeddings.weight"] += gradients.pop("lm_head.weight")
    assert gradients.keys() == expected.keys()
    for key, gradient in expected.items():
        error = (torch.from_numpy(gradients[key]) - gradient).abs().max() / gradient.abs().max()
        assert error < (1e-2 if ".moe." in key else 1e-4), (key, error)  # experts compute in bf16


def write(folder: Path) -> None:
    """A tokenizer of bytes, and short texts, several to a sequence."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    (folder / "data").mkdir()
    vocabulary = {byte: at for at, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | {"<s>": 256, "</s>": 257}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    draw = random.Random(0)
    texts = (" ".join(draw.choices(["lorem", "ipsum", "dolor", "sit"], k=draw.randint(5, 80))) for _ in range(100))
    (folder / "data" / "train.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.mark.slow
def test_the_trainer_takes_the_same_steps_on_one_and_two_ranks_beside_fsdp(tmp_path: Path) -> None:
    """By gradient norms: under `full_dtensor` torchtitan 0.3 logs losses times the ranks, with FlexAttention too."""
    pytest.importorskip("datasets", reason="torchtitan's trainer needs it")
    pytest.importorskip("torchdata", reason="torchtitan's trainer needs it")
    write(tmp_path)
    norms = []
    for ranks in (1, 2):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        done = subprocess.run(
            [sys.executable, *launcher, str(Path(__file__).with_name("titan_trainer.py")), str(tmp_path)],
            capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        norms.append([float(each) for each in re.findall(r"gradient norm (.*)", done.stdout)])
        assert len(norms[-1]) == 3, done.stdout + done.stderr
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


SEQ_LEN = 24
POSITIONS = torch.stack([torch.arange(SEQ_LEN), torch.cat((torch.arange(10), torch.arange(14)))])


def block_mask(*functions: Any, rows: int = ROWS, heads: Any = None) -> BlockMask:
    return create_block_mask(and_masks(*functions), rows, heads, SEQ_LEN, SEQ_LEN, device="cpu")


def tensors(channels: int = 8) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, ROWS, SEQ_LEN, 2, 8, dtype=torch.float64)
    return q, k, v[..., :channels]


@pytest.mark.parametrize(
    ("functions", "rows"),
    [
        ([titan.get_causal_mask_mod()], 1),
        ([titan.get_causal_mask_mod(), titan.get_document_mask_mod(POSITIONS)], ROWS),
        ([titan.get_causal_mask_mod(), titan.get_efficient_causal_mask_mod_for_packed_document(POSITIONS[1:])], 1),
        ([titan.get_efficient_causal_mask_mod_for_packed_document(POSITIONS), titan.get_sliding_window_mask_mod(4)], 2),
        ([titan.get_sliding_window_mask_mod(4), titan.get_fixed_block_mask_mod(6)], 1),
        ([titan.get_document_mask_mod(POSITIONS)], ROWS),
    ],
)
def test_masks_are_read_from_the_functions_that_they_are_made_of(functions: list[Any], rows: int) -> None:
    mask = block_mask(*functions, rows=rows)
    found = burst.torchtitan.BurstFlexAttention.Config().build()(*tensors(4), attention_masks=mask)
    assert (found - Dense.forward(None, *tensors(4), attention_masks=mask)).abs().max() < 1e-12  # type: ignore[arg-type]


def test_a_transform_of_the_output_gets_the_lse() -> None:
    """gpt-oss applies its sinks so."""
    q, k, v = tensors()
    sink = 0.7

    def transform(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        return out * torch.sigmoid(lse - sink).unsqueeze(-1)

    mask = block_mask(titan.get_causal_mask_mod(), rows=1)
    found = burst.torchtitan.BurstFlexAttention.Config().build()(q, k, v, attention_masks=mask, out_transform=transform)
    sinks = torch.full((2,), sink, dtype=torch.float64)
    expected = burst.burst_attention(q, k, v, sinks_N=sinks)
    assert (found - expected).abs().max() < 1e-12


def unknown(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


@pytest.mark.parametrize(
    ("passed", "sentence"),
    [
        ({"score_mod": unknown}, "attention has a score_mod"),
        ({"is_causal": True}, "attention has is_causal"),
        ({"attention_masks": titan.VarlenMetadata(torch.ones(1), torch.ones(1), 1, 1)}, "the mask is a VarlenMetadata"),
        ({"functions": [titan.get_causal_mask_mod(), unknown]}, "made of get_causal_mask_mod, unknown"),
        (
            {"functions": [titan.get_efficient_causal_mask_mod_for_packed_document(POSITIONS)]},
            "made of get_efficient_causal",
        ),
        ({"functions": [titan.get_causal_mask_mod()], "heads": 2}, "2 rows and 2 heads"),
        ({"functions": [titan.get_causal_mask_mod()], "ranks": 2}, "2 ranks share a sequence and its mask is whole"),
    ],
)
def test_what_is_not_exact_is_refused(passed: dict[str, Any], sentence: str) -> None:
    passed = dict(passed)
    functions, heads = passed.pop("functions", [titan.get_causal_mask_mod()]), passed.pop("heads", None)
    module = burst.torchtitan.BurstFlexAttention.Config().build()
    if ranks := passed.pop("ranks", None):
        module._mesh = SimpleNamespace(size=lambda: ranks)
    with pytest.raises(ValueError, match=sentence):
        module(*tensors(), **{"attention_masks": block_mask(*functions, heads=heads)} | passed)


def test_another_order_of_tokens_is_refused() -> None:
    """By all ranks, because each sees the order of all: here every second token is on the second of two ranks."""
    prepare()
    order = torch.arange(256).reshape(128, 2).T.reshape(1, 256)
    mesh: Any = SimpleNamespace(size=lambda: 2, get_local_rank=lambda: 0, device_type="cpu")
    balancer: Any = SimpleNamespace(_generate_indices=lambda restore: order)
    mask = torch_cp._create_cp_block_mask(titan.get_causal_mask_mod(), 1, 1, 256, 256, mesh, balancer)
    module = burst.torchtitan.BurstFlexAttention.Config().build()
    module._mesh = mesh
    with pytest.raises(ValueError, match="neither head to tail nor into consecutive parts"):
        module(*torch.randn(3, 1, 128, 2, 8), attention_masks=mask)
