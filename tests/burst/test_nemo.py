"""A model of transformers under NeMo Automodel's contract of context parallelism: loss and every gradient are those of
one device; token tensors keep their order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import burst
from tests.ranks import run_on_ranks

transformers = pytest.importorskip("transformers", reason="the adapter is for models of transformers")
pytest.importorskip(
    "nemo_automodel",
    reason="the adapter is tested against nemo-automodel 0.7.0 without its dependencies, which pin transformers 5.18",
)

from nemo_automodel.components.distributed.context_parallel import ContextParallelSharder  # noqa: E402

import burst.nemo  # noqa: E402

LENGTHS = (9, 4, 8)  # of packed documents: 21 tokens, which no number of ranks divides, and 3 of padding on the right


def model_of(attention: str) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).double()


def batch(rows: int = 2) -> dict[str, torch.Tensor]:
    """As a collator of packed rows gives it: labels are next tokens, the mask numbers documents."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 50, (rows, 24), generator=generator)
    labels = torch.randint(3, 50, (rows, 24), generator=generator)
    positions = torch.cat([*(torch.arange(length) for length in LENGTHS), torch.ones(3, dtype=torch.long)])
    numbers = torch.cat([torch.full((length,), at + 1) for at, length in enumerate(LENGTHS)] + [torch.zeros(3).long()])
    return {
        "input_ids": tokens,
        "labels": labels.masked_fill(numbers == 0, -100),
        "position_ids": positions[None].repeat(rows, 1),
        "attention_mask": numbers.repeat(rows, 1),
    }


def loss_of(model: Any, part: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=part["input_ids"], position_ids=part["position_ids"]).logits
    loss: torch.Tensor = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), part["labels"].flatten(), reduction="sum", ignore_index=-100
    )
    return loss


def sharded() -> tuple[float, dict[str, Any], bool]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = model_of("sdpa")
    burst.nemo.attach(model, burst.ContextParallel(mesh["cp"]))
    whole = batch()
    sharder = ContextParallelSharder(model, mesh, part := dict(whole), padding_token_id=7)
    context, part = sharder.shard(part)
    with context():
        loss = loss_of(model, part)
        loss.backward()
    total, own = loss.detach().clone(), {name: each.grad.clone() for name, each in model.named_parameters()}
    for each in (total, *own.values()):
        dist.all_reduce(each)
    local = sharder.shard_token_tensor(whole["labels"], fill=-100)
    again = sharder.gather_token_tensor(local, trim=True)
    kept = bool((local == part["labels"]).all()) and bool((again == whole["labels"]).all())
    kept = kept and bool(part["padding_mask"].sum() == part["padding_mask"][part["labels"] == -100].sum())
    return total.item(), {name: each.numpy() for name, each in own.items()}, kept


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_loss_and_gradients_are_those_of_one_device(ranks: int) -> None:
    found = run_on_ranks(ranks, sharded)
    model, whole, start = model_of("eager"), batch(), 0
    loss = torch.zeros((), dtype=torch.float64)
    for length in LENGTHS:
        part = {name: each[:, start : start + length] for name, each in whole.items()}
        loss, start = loss + loss_of(model, part), start + length
    loss.backward()
    assert all(kept for _, _, kept in found)
    assert found[0][0] == pytest.approx(loss.item(), rel=1e-6)  # eager attention forms its softmax in float32
    for name, parameter in model.named_parameters():
        error = (torch.from_numpy(found[0][1][name]) - parameter.grad).abs().max() / parameter.grad.abs().max()
        assert error < 1e-5, (name, error)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"seq_lens": torch.ones(2, 3)}, "the batch has seq_lens"),
        ({"inputs_embeds": torch.ones(2, 24, 4)}, "input_ids and inputs_embeds"),
        ({"position_ids": torch.ones(3, 2, 24)}, r"position_ids are \[3, 2, 24\]"),
        ({"attention_mask": torch.ones(2, 1, 24, 24)}, r"attention_mask is \[2, 1, 24, 24\]"),
        ({"attention_mask": torch.arange(24).expand(2, 24)}, "padding before a token"),
        ({"position_ids": torch.arange(24)[None]}, "numbers documents and position_ids do not begin again"),
    ],
)
def test_batches_that_cannot_be_cut(changed: dict[str, torch.Tensor], sentence: str) -> None:
    sharder = burst.nemo.sharder(burst.ContextParallel.single())
    if "padding before" in sentence:
        changed = {"attention_mask": changed["attention_mask"].clip(max=1)}
    with pytest.raises(ValueError, match=sentence):
        sharder.shard(batch() | changed)


def test_models_and_meshes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="Linear has attention of its own"):
        burst.nemo.attach(torch.nn.Linear(1, 1), burst.ContextParallel.single())
    made = burst.nemo.sharder(burst.ContextParallel.single())
    mesh: Any = type("Mesh", (), {"size": lambda self: 2, "get_local_rank": lambda self: 0})()
    with pytest.raises(ValueError, match="NeMo's mesh has 2 ranks in a sequence and the ContextParallel 1"):
        made.local_token_global_indices(mesh, 24)
