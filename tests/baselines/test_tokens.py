"""The tokens that compared systems read are those that the engine trains on: bytes in files, and what programs make of
them."""

from __future__ import annotations

import runpy
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baselines.programs import PROGRAMS
from baselines.tokens import FOLDER, PLAIN, prefixes, sequences_of, write_tokens
from engine.data import open_tokens
from engine.settings import TrialSettings
from engine.shape import ModelShape

SHAPE = ModelShape(name="small", layers=2, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=256)
STEPS = 3


@pytest.fixture
def settings(tmp_path: Path) -> TrialSettings:
    """Two replicas of two sequences each; the text is shorter than what they read, and starts again."""
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(33 + number * number % 89) for number in range(500)))
    return TrialSettings(
        task="train", method="burst", model=SHAPE, seq_len=64, batch_size=2, world_size=2, data=str(text)
    )


def engine_batches(settings: TrialSettings) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """(tokens, labels) of the engine, by step and replica."""
    store = open_tokens(settings.data)
    return [
        [store.batch(step, replica, settings.dp_size, settings.batch_size, settings.seq_len) for replica in (0, 1)]
        for step in range(STEPS)
    ]


@pytest.mark.parametrize("program", ["train_torchtitan.py", "train_transformers.py"])
def test_programs_read_the_batches_of_the_engine(
    settings: TrialSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.syspath_prepend(PROGRAMS)  # as where Python starts a program
    origin = write_tokens(settings, STEPS, "plain", tmp_path)
    assert origin == open_tokens(settings.data).describe()  # as the engine's own trials record it
    batch: Any = runpy.run_path(str(PROGRAMS / program))["batch"]
    request = {"batch_size": 2, "seq_len": 64, "tokens": str(tmp_path / FOLDER / PLAIN)}
    for step, replicas in enumerate(engine_batches(settings)):
        for replica, (tokens, labels) in enumerate(replicas):
            inputs, targets = batch(request, step, replica, settings.dp_size)
            assert torch.equal(inputs, tokens)
            assert torch.equal(targets, labels)


def test_each_dataset_of_megatron_is_one_sequence_of_the_engine(settings: TrialSettings, tmp_path: Path) -> None:
    write_tokens(settings, STEPS, "megatron", tmp_path)
    sequences = [
        torch.cat([tokens, labels[-1:]])
        for replicas in engine_batches(settings)
        for batch in replicas
        for tokens, labels in zip(*batch, strict=True)
    ]
    names = prefixes(settings, STEPS, tmp_path)
    assert len(names) == len(sequences) == sequences_of(settings, STEPS) == 12
    for name, expected in zip(names, sequences, strict=True):
        assert read_dataset(Path(name)) == expected.tolist()


def read_dataset(prefix: Path) -> list[int]:
    """The only document of a dataset, as Megatron's IndexedDataset describes its files."""
    index = prefix.with_suffix(".idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, documents = struct.unpack_from("<QBQQ", index, 9)
    assert (version, sequences, documents) == (1, 1, 2)
    dtype = {4: np.int32, 8: np.uint16}[code]
    length, offset, first, end = struct.unpack_from("<iqqq", index, 34)
    assert (offset, first, end, len(index)) == (0, 0, 1, 62)
    tokens = np.frombuffer(prefix.with_suffix(".bin").read_bytes(), dtype=dtype)
    assert len(tokens) == length
    return [int(token) for token in tokens]


def test_text_that_cannot_be_read_is_an_error_that_names_it(settings: TrialSettings, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="missing"):
        write_tokens(replace(settings, data="missing.txt"), STEPS, "plain", tmp_path)
