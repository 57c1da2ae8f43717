"""megatron_tp: loss, norm, gradients and updates of one process, Megatron's bytes, and what it refuses: models,
settings and labels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baselines.megatron_tp.tensor_parallel import _VocabParallelEmbedding
from engine.distributed import arrange
from engine.settings import Checkpoint, TrialSettings
from engine.shape import ModelShape
from engine.tasks.train import TrainTask
from harness.spec.methods import method_named
from tests.engine.parity import Result, apart, dense_parameters, dense_run, task_of
from tests.ranks import run_on_ranks
from tests.slow import slow

SHAPE = ModelShape(name="small", layers=2, hidden=18, ffn=24, heads=4, kv_heads=2, head_dim=4, vocab=260, qk_norm=True)
SETTINGS = TrialSettings(
    task="train", method="megatron_tp", model=SHAPE, seq_len=32, tp_size=2, dtype="fp64", kernel="reference",
    batch_size=2, z_loss=1e-3,
)  # fmt: skip
CASES = {
    "recomputed layers": SETTINGS,
    "nothing recomputed, whole logits": replace(SETTINGS, checkpoint=Checkpoint(every=0), lm_head_fusion=False),
    "part of attention kept, groups of layers": replace(SETTINGS, checkpoint=Checkpoint(every=2, tail=0.5)),
    "two micro-batches": replace(SETTINGS, batch_size=1, gradient_accumulation=2),
    "attention with a gate": replace(SETTINGS, model=replace(SHAPE, attention_gate=True, qkv_bias=True)),
}
STEPS = 2
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURST_CACHE", str(tmp_path))


def tensor_parallel_runs(cases: dict[str, TrialSettings]) -> dict[str, Result]:
    """Loss, norm, this rank's parts of gradients and updated parameters, and bytes sent."""
    results: dict[str, Result] = {}
    for name, settings in cases.items():
        _, task = task_of(settings)
        task.cp.traffic.reset()
        total = task.gradients(1)
        torch.distributed.all_reduce(total)
        sent = task.cp.traffic.sent_bytes
        gradients = {key: p.grad.full_tensor().numpy() for key, p in task.model.named_parameters()}
        norm = task.matrices.gradient_norm(task.model).item()
        task.optimizer.zero_grad()
        for step in range(STEPS):
            task.step(step)
        parameters = {key: p.full_tensor().detach().numpy() for key, p in task.model.named_parameters()}
        results[name] = {
            "loss": total.item(), "grad_norm": norm, "gradients": gradients, "parameters": parameters, "sent": sent,
            "divided": {key: task.matrices.part(key) for key in gradients},
        }  # fmt: skip
    return results


def joined(of_ranks: list[dict[str, Any]], divided: dict[str, Any], tp_size: int) -> dict[str, Any]:
    """The whole of every parameter, from its parts on the first `tp_size` ranks."""
    return {
        name: of_ranks[0][name]
        if where is None
        else np.concatenate([each[name] for each in of_ranks[:tp_size]], axis=where[0])
        for name, where in divided.items()
    }


def check(found: list[Result], settings: TrialSettings, tp_size: int) -> None:
    divided = found[0]["divided"]
    one = replace(settings, method="burst", tp_size=1, world_size=settings.dp_size)
    truth = dense_run(one, torch.float64)
    for rank in found:
        assert abs(rank["loss"] / truth["loss"] - 1) < 1e-10
        assert abs(rank["grad_norm"] / truth["grad_norm"] - 1) < 1e-10
    gradients = joined([each["gradients"] for each in found], divided, tp_size)
    assert {
        name: error for name in gradients if (error := apart(gradients[name], truth["gradients"][name])) > 1e-10
    } == {}
    parameters, expected = (
        joined([each["parameters"] for each in found], divided, tp_size),
        dense_parameters(one, STEPS),
    )
    assert {name: error for name in parameters if (error := apart(parameters[name], expected[name])) > 1e-9} == {}


@pytest.mark.parametrize("world_size", [2, *slow(4)])
def test_divided_matrices_give_the_step_of_one_process(world_size: int) -> None:
    names = list(CASES) if world_size == 2 else ["recomputed layers"]  # of four, two replicas of two
    cases = {name: replace(CASES[name], world_size=world_size) for name in names}
    per_rank = run_on_ranks(world_size, tensor_parallel_runs, cases)
    for name, settings in cases.items():
        check([each[name] for each in per_rank], settings, 2)


def test_a_step_sends_the_bytes_of_megatrons_formula() -> None:
    """arXiv:2205.05198, section 4.2.2: an all-gather before and a reduce-scatter behind each of attention and MLP, and
    their counterparts in backward; so for LM head (gather) and embedding (scatter). Each sends (P - 1)/P of the tokens'
    hidden states. Ours adds the words' numbers, labels, and two numbers of each token's loss; gradients of norms are
    summed by an all-reduce outside of what is counted, as Megatron's are."""
    settings = replace(SETTINGS, checkpoint=Checkpoint(every=0), world_size=2)
    own = settings.batch_size * settings.seq_len // 2  # tokens of a rank
    hidden = own * SHAPE.hidden * 8
    per_layer, ends = 4 + 4, 2 + 2
    expected = (SHAPE.layers * per_layer + ends) * hidden
    words_and_losses = own * 8 + own * 8 + 2 * (2 * own) * 8
    for rank in run_on_ranks(2, tensor_parallel_runs, {"one": settings}):
        assert rank["one"]["sent"] == expected + words_and_losses


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tp_size": 4}, "megatron_tp divides KV heads among tp_size 4 ranks, found 2 of model small; choose"),
        ({"cp_size": 2}, "megatron_tp runs without context parallelism, found cp_size 2; set cp_size to 1"),
        ({"task": "attention"}, "megatron_tp divides matrices as well as heads"),
        ({"mlp_tiles": 2}, "megatron_tp has no mlp_tiles 2; set mlp_tiles to 1"),
        ({"loss_kernel": "liger"}, "megatron_tp has no loss_kernel liger; set loss_kernel to own"),
        ({"sharding": "hybrid"}, "megatron_tp has no sharding hybrid; set sharding to full"),
        ({"seq_len": 33}, "seq_len 33 does not split"),
        ({"mask": "documents"}, "megatron_tp divides matrices among tp_size 2 ranks for sequences of one text, found"),
        *(
            ({"model": replace(SHAPE, **{name: value})}, f"megatron_tp cannot divide {name} {value} of model small")
            for name, value in {
                "output_bias": True,
                "mlp_bias": True,
                "qk_norm_whole": True,
                "norms": "after",
                "window": 8,
            }.items()
        ),
        ({"layout": "zigzag"}, "megatron_tp always uses layout contiguous"),
    ],
)
def test_what_cannot_be_divided_is_refused(changes: dict[str, Any], reason: str) -> None:
    assert method_named("megatron_tp").refuse(SETTINGS) is None
    assert str(method_named("megatron_tp").refuse(replace(SETTINGS, world_size=0, **changes))).startswith(reason)


def refusal_of(settings: TrialSettings, label: int) -> str:
    _, task = task_of(settings)
    [batch] = task.batches(0)
    labels_BL = batch.labels_BL.clone()
    labels_BL[0, 3] = label
    with pytest.raises(ValueError, match="no word") as error:
        task.forward(replace(batch, labels_BL=labels_BL))
    return str(error.value)


@pytest.mark.parametrize("label", [260, -1])
def test_a_label_that_no_rank_holds_is_refused(label: int) -> None:
    for reason in run_on_ranks(2, refusal_of, SETTINGS, label):
        assert reason.startswith(f"label {label} is no word of a vocabulary of 260; expected 0 to 259, or -100")


def loss_on_gpus(settings: TrialSettings) -> float:
    device = torch.device("cuda", torch.cuda.current_device())
    task = TrainTask(settings, method_named(settings.method), arrange(settings, device))
    assert all(batch.labels_BL.device.type == "cpu" for batch in task.batches(0))
    return task.step(0).loss


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs: NCCL gathers no host memory")
@pytest.mark.parametrize("fused", [True, False])
def test_labels_in_host_memory_are_gathered_on_the_ranks_gpus(fused: bool) -> None:
    shape = ModelShape(name="small", layers=1, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=64, vocab=260)
    settings = TrialSettings(
        task="train", method="megatron_tp", model=shape, seq_len=512, tp_size=2, dtype="bf16", lm_head_fusion=fused
    )
    first, second = run_on_ranks(2, loss_on_gpus, settings, backend="nccl")
    assert first == second
    assert 3 < first < 8


class OneOfSeveral:
    """The part of `TensorParallel` that an embedding uses, of a rank whose results are summed elsewhere."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def gather_tokens(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        return [tokens]

    def summed(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_word_is_embedded_by_one_rank_the_first_and_the_last_of_its_part_too(ranks: int) -> None:
    words = torch.arange(12)[None]
    whole = torch.nn.Embedding(12, 4)
    parts = [torch.nn.Embedding.from_pretrained(part) for part in whole.weight.detach().chunk(ranks)]
    found = [_VocabParallelEmbedding(part, OneOfSeveral(rank))(words) for rank, part in enumerate(parts)]
    assert torch.equal(sum(found), whole(words))
