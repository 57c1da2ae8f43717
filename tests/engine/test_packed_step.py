"""A step on packed documents equals the mean over its documents, each trained alone: loss and every gradient."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.burst import METHOD
from engine.data import TokenStore
from engine.data.sequences import PackedRow, PackedSequences, TokenSpan
from engine.data.store import build_store
from engine.data.tokenizers import ByteTokenizer
from engine.distributed import arrange
from engine.lm_head.loss_kernel import IGNORE
from engine.optimizer import gradient_norm
from engine.settings import Checkpoint, TrialSettings
from engine.shape import ModelShape
from engine.tasks.train import TrainTask
from tests.engine.parity import dense_run, errors, parallel_runs
from tests.ranks import run_on_ranks
from tests.slow import slow

LLAMA = ModelShape(name="odd", layers=3, hidden=24, ffn=30, heads=6, kv_heads=2, head_dim=6, vocab=257)
MODELS = {
    "llama": LLAMA,
    "qwen3": replace(LLAMA, name="qwen3", architecture="qwen3", qk_norm=True, tied=True),
    "sinks": replace(LLAMA, name="sinks", sinks=True, qkv_bias=True, rope_scaling="dynamic:factor=2,original=16"),
    "latents": replace(
        LLAMA, name="latents", kv_heads=6, kv_latent=10, q_latent=9, rope_dim=2, value_dim=5, rope_interleaved=True
    ),
}
AGAIN = Checkpoint(every=2, tail=0.4)
# 45 tokens divide by no number of ranks; documents of 1, 2 and 46 and more tokens are among those below.
BASE = TrialSettings(
    task="train",
    method="burst",
    model=LLAMA,
    seq_len=45,
    dtype="fp64",
    mask="documents",
    checkpoint=Checkpoint(every=0),
)
LENGTHS = [1, 2, 45, 46, 100, 3, 7, 11, 20, 20, 30, 5, 1, 9, 44, 2, 13, 17, 29, 31, 4, 4, 8, 16, 3, 23, 41, 6]


@pytest.fixture
def store(tmp_path: Path) -> str:
    chance = np.random.default_rng(1)
    texts = [bytes(chance.integers(32, 127, length, dtype=np.uint8)).decode() for length in LENGTHS]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    build_store([str(tmp_path / "a.jsonl")], tmp_path / "store", ByteTokenizer(), field="text")
    return str(tmp_path / "store")


def cases_for(ranks: int, data: str) -> dict[str, TrialSettings]:
    """Every model with layers computed again, one with layers kept, and by turns what else a step can be."""
    whole = replace(BASE, data=data, cp_size=ranks, world_size=ranks)
    cases = {name: replace(whole, model=model, checkpoint=AGAIN) for name, model in MODELS.items()}
    both = replace(LLAMA, window=7, layer_pattern="wf", rope_base_window=500.0)
    cases["windows"] = replace(whole, model=both, checkpoint=AGAIN)
    cases["window in all"] = replace(whole, model=replace(LLAMA, window=7))
    cases["kept, accumulated"] = replace(whole, gradient_accumulation=2, packing="greedy", longer_documents="drop")
    cases["two rows"] = replace(whole, model=MODELS["qwen3"], batch_size=2)
    if ranks > 1:
        cases["replicas"] = replace(whole, cp_size=ranks // 2, checkpoint=AGAIN)
        cases["zigzag"] = replace(whole, layout="zigzag", checkpoint=AGAIN)
        cases["gathered"] = replace(whole, schedule="all_gather")
        cases["striped"] = replace(whole, layout="striped")
        cases["balanced"] = replace(whole, layout="balanced", checkpoint=AGAIN, gradient_accumulation=2)
        cases["ulysses"] = replace(whole, model=replace(LLAMA, heads=8, kv_heads=8), schedule="ulysses")
    return cases


@pytest.mark.parametrize("ranks", [1, 2, *slow(4, 8)])
def test_a_packed_step_is_the_mean_over_its_documents(ranks: int, store: str) -> None:
    cases = cases_for(ranks, store)
    [found, *_] = run_on_ranks(ranks, parallel_runs, cases)
    for name, settings in cases.items():
        apart = errors(found[name], dense_run(settings, torch.float64))
        assert {what: error for what, error in apart.items() if not error < 1e-10} == {}, name


class GivenRows(PackedSequences):
    """One row of the given documents in every step, of which the first alone is learnt."""

    def __init__(self, settings: TrialSettings, documents: list[list[int]]) -> None:
        store = TokenStore(Path(settings.data))
        super().__init__(store, TokenSpan(start=0, stop=store.header.count), settings)
        tokens = torch.tensor([token for document in documents for token in document])
        labels = torch.full_like(tokens, IGNORE)
        first = len(documents[0])
        labels[: first - 1] = tokens[1:first]
        lengths = np.array([len(document) for document in documents])
        self._row = PackedRow(tokens_S=tokens, labels_S=labels, lengths=lengths)

    def row(self, place: int) -> PackedRow:
        return self._row


def losses_beside(settings: TrialSettings, others: list[list[list[int]]]) -> list[Any]:
    """Of this rank's first batch, for each company of one document: its positions, and the loss of the step."""
    world = arrange(settings, torch.device("cpu"))
    found = []
    document = list(range(40, 57))
    for company in others:
        task = TrainTask(settings, METHOD, world, sequences=GivenRows(settings, [document, *company]))
        [batch] = task.batches(0)
        assert batch.packed.cp.layout.lengths == batch.packed.documents.lengths  # dealt for this row
        loss = task.gradients(0)
        torch.distributed.all_reduce(loss)
        norm = gradient_norm(task.model.parameters()).item()
        found.append((batch.positions_L.tolist(), batch.packed.documents, loss.item(), norm))
    return found


def test_a_document_is_the_same_whatever_it_is_packed_with(store: str) -> None:
    settings = replace(BASE, data=store, cp_size=2, world_size=2, checkpoint=AGAIN)
    others = [[], [[7] * 28], [[1, 2], [3] * 5, [250] * 20]]
    ranks = run_on_ranks(2, losses_beside, settings, others)
    for _, documents, *_ in ranks[0]:
        assert sum(documents.lengths) == 48  # 45 and three tokens of padding
    assert ranks[0][0][1].lengths == (17, 31)  # padding is a document of its own
    positions = sorted([*ranks[0][2][0], *ranks[1][2][0]])
    assert positions == sorted([*range(17), *range(2), *range(5), *range(20), *range(4)])
    for _, _, loss, norm in ranks[0][1:]:
        assert loss == pytest.approx(ranks[0][0][2], rel=1e-12)
        assert norm == pytest.approx(ranks[0][0][3], rel=1e-12)
