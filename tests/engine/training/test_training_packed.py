"""Training runs on packed documents: evaluation, resume on other ranks, padding reported, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.combinations import combination_unsupported_reason
from engine.data import TokenStore
from engine.data.sequences import PackedSequences, spans
from engine.data.store import build_store
from engine.data.tokenizers import ByteTokenizer
from engine.lm_head.loss_kernel import IGNORE
from engine.settings import Checkpoint
from engine.tasks.check_training import dense_model
from engine.training.config import Evaluation
from engine.training.preflight import check_start, training_data
from tests.engine.training.training_runs import config, curve, order, several
from tests.ranks import run_on_ranks


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("BURST_CACHE", str(tmp_path / "cache"))
    texts = [f"{number} squared is {number * number}. " * (1 + number % 3) for number in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    build_store([str(tmp_path / "a.jsonl")], tmp_path / "store", ByteTokenizer(), 0.2, field="text")
    return str(tmp_path / "store")


def packed(store: str, **changes: Any) -> Any:
    """Rows of 50 tokens, which no two ranks can divide under zigzag."""
    values = {"seq_len": 50, "mask": "documents", "data": store, "evaluate": Evaluation(every=3, sequences=3)}
    return config(**values | changes)


def first_evaluation(store: str) -> float:
    """The loss of the first evaluation, from the held-out documents one by one."""
    settings = packed(store).settings
    held_out = PackedSequences(TokenStore(Path(store)), spans(TokenStore(Path(store)).header, built=True)[1], settings)
    model, loss, targets = dense_model(replace(settings, mask="causal"), torch.device("cpu")), 0.0, 0
    for place in range(3):
        row = held_out.row(place)
        lengths = row.lengths.tolist()
        for tokens_S, labels_S in zip(row.tokens_S.split(lengths), row.labels_S.split(lengths), strict=True):
            loss += model(tokens_S[None], torch.arange(len(tokens_S)), labels_S[None]).item()
            targets += int((labels_S != IGNORE).sum())
    return loss / targets


def test_a_packed_run_resumes_on_other_ranks_and_reports_its_padding(tmp_path: Path, store: str) -> None:
    again = Checkpoint(every=1, tail=0.5)
    one, two = (
        packed(store),
        packed(store, cp_size=2, world_size=2, batch_size=1, gradient_accumulation=2, checkpoint=again),
    )
    alone = [(str(tmp_path / "whole"), order(one), None), (str(tmp_path / "run"), order(one), 4)]
    [[whole, stopped]] = run_on_ranks(1, several, alone)
    assert (whole["finished"], stopped["steps_done"]) == (True, 4)
    [[resumed], _] = run_on_ranks(2, several, [(str(tmp_path / "run"), order(two, resume=True), None)])
    assert "refused" not in resumed
    assert [step for step, *_ in curve(resumed)] == list(range(1, 7))
    for kind in ("step", "evaluation"):
        for found, expected in zip(curve(resumed, kind), curve(whole, kind), strict=True):
            assert [*filter(None, found)] == pytest.approx([*filter(None, expected)], rel=2e-4)
    assert curve(whole, "evaluation")[0][2] == pytest.approx(first_evaluation(store), rel=1e-5)
    steps = [line for line in whole["metrics"] if line["kind"] == "step"]
    assert all(0 <= line["padding"] < 1 for line in steps)
    assert any(line["padding"] > 0 for line in steps)
    assert "rows of 50 tokens" in whole["notes"][0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"evaluate": Evaluation(every=1, sequences=500)},
            r"evaluate\.sequences is 500, but the \d+ held-out tokens of",
        ),
        (
            {"seq_len": 1, "longer_documents": "drop"},
            "no document of .* can be packed: of 50, 50 are longer than seq_len",
        ),
    ],
)
def test_too_few_documents_are_refused(store: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        training_data(packed(store, **changes))


@pytest.mark.parametrize(("mask", "of_data"), [("documents", "packed rows"), ("causal", "sequences")])
def test_a_step_that_takes_more_than_all_data_is_said(store: str, mask: str, of_data: str) -> None:
    there = training_data(packed(store, mask=mask)).sequences
    *_, none = check_start(order(packed(store, mask=mask, batch_size=there)))
    *_, said = check_start(order(packed(store, mask=mask, batch_size=1, gradient_accumulation=there + 1)))
    words = f"a step takes {there + 1} {of_data}, but {store} holds {there} to train on, so each step reads some twice "
    assert (none, said.startswith(words)) == ("", True), said


@pytest.mark.parametrize("changes", [{"packing": "greedy"}, {"longer_documents": "drop"}, {"mask": "causal"}])
def test_other_rows_are_other_facts(store: str, changes: dict[str, Any]) -> None:
    assert order(packed(store)).facts != order(packed(store, **changes)).facts


@pytest.mark.parametrize("mask", ["causal", "documents:25,25"])
@pytest.mark.parametrize(("setting", "value"), [("packing", "greedy"), ("longer_documents", "drop")])
def test_how_to_pack_is_refused_where_no_row_is_packed(store: str, mask: str, setting: str, value: str) -> None:
    settings = packed(store, **{setting: value}).settings
    assert combination_unsupported_reason(settings) is None
    assert combination_unsupported_reason(replace(settings, mask=mask)) == (
        f"{setting} is {value}, but mask is {mask}, and rows are packed under mask documents alone; set mask to "
        f"documents, or leave {setting} out"
    )
    assert combination_unsupported_reason(packed(store, mask=mask).settings) is None
