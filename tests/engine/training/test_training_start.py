"""What a run starts from, what it is judged by, and what is refused before the first step."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from engine.data import open_tokens
from engine.data.sequences import spans
from engine.initialise import initialise
from engine.models.decoder import Decoder
from engine.training.config import Evaluation
from engine.training.loop import StopRequest
from tests.engine.training.training_runs import SHAPE, begin, config, go_on, order, whole
from tests.ranks import run_on_ranks

SEQUENCES = 5  # do not divide by the sequences of a round


def dense_loss() -> float:
    """Mean loss of the first held-out sequences by the one-device model, one sequence at a time."""
    with torch.device("meta"):
        model = Decoder(SHAPE)
    initialise(model, 0, torch.device("cpu"))
    store = open_tokens("python_docs")
    start = spans(store.header, built=False)[1].start
    total = 0.0
    with torch.no_grad():
        for number in range(SEQUENCES):
            tokens = store.window(start + 32 * number, 33)[None]
            total += model(tokens[:, :-1], torch.arange(32), tokens[:, 1:]).item()
    return total / (32 * SEQUENCES)


def evaluations(folder: str) -> list[float]:
    """Evaluation losses of fresh runs in every arrangement of the ranks that are there."""
    size = dist.get_world_size()
    found = []
    for cp_size, z_loss in ((1, 0.0), (size, 0.1)):  # a z-loss is learnt from, not judged by
        judged = Evaluation(every=1, sequences=SEQUENCES)
        case = config(world_size=size, cp_size=cp_size, z_loss=z_loss, evaluate=judged)
        training = begin(Path(folder, f"{size}-{cp_size}"), order(case))
        assert training.evaluator is not None
        found += [training.evaluator.loss(), training.evaluator.loss()]
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_evaluation_loss_is_that_of_a_dense_run_for_any_ranks_and_each_time(ranks, tmp_path) -> None:
    truth = dense_loss()
    for found in run_on_ranks(ranks, evaluations, str(tmp_path)):
        assert found == pytest.approx([truth] * 4, rel=1e-6)
        assert found[0] == found[1]


def starts(folder: str, model: str) -> tuple[dict[str, list[float]], list[str]]:
    """Parameters of a run that starts from a model, and the sentences of runs that cannot start."""
    begun = begin(Path(folder, "from"), order(config(init_from=model, cp_size=2)))
    parameters = {name: whole(value) for name, value in begun.task.model.named_parameters()}
    cases = [
        config(cp_size=2, init_from=model, model=replace(SHAPE, layers=1)),
        config(cp_size=2, data=f"{folder}/short.txt", evaluate=Evaluation()),
        config(cp_size=2, evaluate=Evaluation(every=1, sequences=10**6)),
        config(cp_size=2, model=replace(SHAPE, vocab=100)),
        config(cp_size=2, init_from=f"{folder}/broken"),
    ]
    refused = [go_on(Path(folder, "refused"), order(case)).get("refused", "ran") for case in cases]
    refused.append(go_on(Path(folder, "nothing"), order(config(cp_size=2), resume=True))["refused"])
    return parameters, refused


def test_a_run_starts_from_hugging_face_weights_and_impossible_ones_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="the safetensors library is not installed")
    from engine.hf import export_hugging_face

    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        sizes = {name: parameter.shape for name, parameter in Decoder(SHAPE).named_parameters()}
    state = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    model = tmp_path / "model"
    export_hugging_face(state, SHAPE, model)
    name = "blocks.1.mlp.down.weight"
    broken = state[name].clone()
    broken.view(-1)[:3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    export_hugging_face({**state, name: broken}, SHAPE, tmp_path / "broken")
    (tmp_path / "short.txt").write_text("only a few words")
    for parameters, sentences in run_on_ranks(2, starts, str(tmp_path), str(model)):
        assert parameters == {name: value.flatten().tolist() for name, value in state.items()}
        layers, short, sequences, vocabulary, not_finite, nothing = sentences
        assert f"has NaN or infinity in 3 of the {broken.numel()} weights of {name}; give" in not_finite
        assert layers.endswith("has 1; choose the model file of that shape")
        assert "holds a model with layers 2, but model odd" in layers
        assert "0 are held out, and the 16 to train on hold no such sequence" in short
        assert sequences.startswith("evaluate.sequences is 1000000, but the")
        assert "a vocabulary of 100" in vocabulary
        assert nothing.startswith("there is no checkpoint to resume from (checkpoints/ holds none)")


def notes_of(folder: str) -> list[list[str]]:
    """The notes of runs under several masks."""
    masks = ("causal", "sliding_window:4", "full", "sliding_window:4:1")
    return [begin(Path(folder, str(n)), order(config(mask=mask))).notes for n, mask in enumerate(masks)]


def test_a_mask_that_shows_tokens_what_they_are_to_predict_is_said(tmp_path: Path) -> None:
    [(causal, window, full, both)] = run_on_ranks(1, notes_of, str(tmp_path))
    assert not any("shows tokens" in note for note in (*causal, *window))
    assert any(note.startswith("mask full shows tokens the ones that they are to predict") for note in full)
    assert any(note.startswith("mask sliding_window:4:1 shows tokens") for note in both)


def stop_requests(_: str) -> tuple[bool, bool, object]:
    request = StopRequest()
    before = request.asked
    signal.raise_signal(signal.SIGTERM)
    return before, request.asked, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_first_signal_requests_a_stop_and_the_second_would_end_the_process() -> None:
    assert run_on_ranks(1, stop_requests, "") == [(False, True, True)]
