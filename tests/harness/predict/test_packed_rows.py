"""A plan of a trial on packed documents counts those that its record counts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from engine.attention.masks import Documents
from engine.data.store import build_store
from engine.data.tokenizers import ByteTokenizer
from engine.settings import Checkpoint, Steps, TrialSettings
from engine.shape import ModelShape
from harness.metrics.flops import tokens_per_step, work_of
from harness.metrics.hardware import hardware_named
from harness.metrics.throughput import metrics_of
from harness.plan.forecast import forecast
from harness.predict.attention import attention_problem
from harness.predict.packed import packed_rows, step_work
from tests.engine.parity import task_of
from tests.harness.synthetic_records import record
from tests.ranks import run_on_ranks

SHAPE = ModelShape(
    name="windowed", layers=3, hidden=12, ffn=8, heads=2, kv_heads=1, head_dim=6, vocab=260, window=5,
    layer_pattern="fwf",
)  # fmt: skip
LENGTHS = [1, 2, 45, 46, 100, 3, 7, 11, 20, 20, 30, 5, 9, 44, 13, 17, 29, 31, 4, 8, 16, 23, 41, 6]


@pytest.fixture
def trial(tmp_path: Path) -> TrialSettings:
    """Two micro-batches of two rows in a step, on two ranks."""
    chance = np.random.default_rng(1)
    texts = [bytes(chance.integers(32, 127, length, dtype=np.uint8)).decode() for length in LENGTHS]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    build_store([str(tmp_path / "a.jsonl")], tmp_path / "store", ByteTokenizer(), field="text")
    return TrialSettings(
        task="train", method="burst", model=SHAPE, seq_len=45, dtype="fp32", mask="documents", cp_size=2, world_size=2,
        batch_size=2, gradient_accumulation=2, checkpoint=Checkpoint(every=2, tail=0.5), data=str(tmp_path / "store"),
        steps=Steps(warmup=1, measured=2),
    )  # fmt: skip


def packed_facts(settings: TrialSettings) -> dict[str, float]:
    _, task = task_of(settings)
    return task.run(lambda step: None).data["packed"]


def test_predicted_flops_are_those_of_the_record(trial: TrialSettings) -> None:
    [facts, _] = run_on_ranks(2, packed_facts, trial)
    rows, work = packed_rows(trial), step_work(trial)
    assert rows is not None
    assert (rows.tokens, rows.pairs) == (facts["tokens_per_step"], facts["pairs_per_step"])
    one = record(**{name: getattr(trial, name) for name in trial.__dataclass_fields__})
    assert one.measurement is not None
    one.measurement.data["packed"] = facts
    found = metrics_of(one)
    assert found.step_seconds_median is not None
    assert found.tflops_per_gpu == pytest.approx(work.model / 1e12 / 2 / found.step_seconds_median, rel=1e-12)
    assert work.model < work_of(trial).model
    assert rows.documents.tokens == trial.row_tokens
    planned = dataclasses.replace(trial, checkpoint=Checkpoint(), mlp_tiles=8, optimizer_offload=0.5, memory="1GiB")
    assert packed_rows(planned) is rows  # data are read once for all plans


def test_time_is_that_of_documents_and_without_data_that_of_one_document_a_row(trial: TrialSettings) -> None:
    model = dataclasses.replace(SHAPE, hidden=1024, ffn=2048, heads=8, kv_heads=2, head_dim=128, window=1024)
    large = dataclasses.replace(trial, dtype="bf16", seq_len=1 << 16, batch_size=1, model=model)
    problem = attention_problem(large, 2)
    assert isinstance(problem.mask, Documents)
    assert problem.mask == packed_rows(large).documents
    assert problem.layout.lengths == problem.mask.lengths
    unknown = dataclasses.replace(large, data="no such store")
    assert packed_rows(unknown) is None
    assert step_work(unknown) == work_of(unknown)
    hardware = hardware_named("h200")
    documents, rows = forecast(large, hardware), forecast(unknown, hardware)
    assert documents.time is not None
    assert rows.time is not None
    assert documents.time.phases["attention forward"] < rows.time.phases["attention forward"]
    assert documents.time.seconds < rows.time.seconds
    assert rows.tokens_per_gpu_per_second == pytest.approx(tokens_per_step(large) / 2 / rows.time.seconds)
    assert packed_rows(dataclasses.replace(large, mask="causal")) is None
