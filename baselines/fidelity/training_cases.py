"""The training steps that are run of each system: data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingCase:
    """Steps on some ranks, in fp32."""

    name: str
    form: str
    ranks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSystem:
    """A system's model, trained by a program of ours that its interpreter runs."""

    package: str  # folder of its pin
    title: str
    kernel: str
    program: str  # of baselines/programs
    names: Literal["hugging_face", "megatron"]  # how its parameters are named and split
    steps: int
    cases: tuple[TrainingCase, ...]


TRAINING: Mapping[str, TrainingSystem] = {
    "megatron_core": TrainingSystem(
        package="megatron_core",
        title="Megatron Core GPT",
        kernel="its local layers; the CPU is named where it asks for the current GPU",
        program="train_megatron_core.py",
        names="megatron",
        steps=1,
        cases=tuple(
            TrainingCase(name=f"tp-{ranks}", form=f"tensor parallel over {ranks}, one step", ranks=ranks)
            for ranks in (1, 2, 4)
        ),
    ),
    "ulysses_training": TrainingSystem(
        package="deepspeed",
        title="Llama of transformers under DeepSpeed",
        kernel="torch's own for CPUs",
        program="train_ulysses_sp.py",
        names="hugging_face",
        steps=3,
        cases=tuple(
            TrainingCase(
                name=f"sp-{ranks}", form=f"UlyssesSPAttentionHF over {ranks}, ZeRO-3, three steps", ranks=ranks
            )
            for ranks in (2, 4)
        ),
    ),
}
