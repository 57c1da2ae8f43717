"""Trainers of TRL on ranks that share sequences log what they log in one process, and end with its parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.burst.programs import COMMON, as_launched, llama, tokenizer, train
from tests.ranks import run_on_ranks

pytest.importorskip("trl", reason="its trainers are tested: pip install trl peft")
ALL = ("SFT packed", "SFT padded", "SFT LoRA", "DPO", "KTO", "GRPO", "RLOO")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batches", "ranks", "sizes", "fsdp", "kinds"),
    [
        (1, 2, {"cp_size": 2}, False, ALL),
        (1, 2, {"cp_size": 2}, True, ("SFT LoRA", "DPO", "GRPO")),
        (2, 4, {"cp_size": 2, "dp_shard_size": 2}, False, ("SFT packed", "GRPO")),
    ],
)
def test_what_is_logged_is_that_of_processes_with_whole_sequences(
    batches: int, ranks: int, sizes: dict[str, int], fsdp: bool, kinds: tuple[str, ...], tmp_path: Path
) -> None:
    llama().save_pretrained(tmp_path)
    expected = run_on_ranks(batches, train, kinds, str(tmp_path), {})[0]
    found = run_on_ranks(ranks, train, kinds, str(tmp_path), sizes, fsdp)[0]
    for kind in kinds:
        assert found[kind] == pytest.approx(expected[kind], rel=1e-4, abs=1e-5), kind


def refused(folder: str) -> list[str]:
    """The errors for a trainer that was not compared, for a configuration of other trainers, and for vLLM."""
    as_launched()
    import trl
    from datasets import Dataset

    import burst.accelerate
    import burst.trl

    data = Dataset.from_dict({"text": ["w1 w2 w3"], "chosen": ["w1"], "rejected": ["w2"]})

    def start(name: str, configuration: Any, **settings: Any) -> None:
        arguments = getattr(trl, f"{name}Config")(
            output_dir=folder, parallelism_config=configuration, **COMMON | settings
        )
        model = llama(num_labels=1)
        getattr(trl, f"{name}Trainer")(model, args=arguments, train_dataset=data, processing_class=tokenizer())

    told = []
    for name, adapter, settings in (
        ("Reward", burst.trl, {"eval_strategy": "no"}),
        ("SFT", burst.accelerate, {"eval_strategy": "no"}),
        ("GRPO", burst.trl, {"use_vllm": True}),
    ):
        with pytest.raises(ValueError, match=r".") as caught:
            start(name, adapter.parallelism(cp_size=2), **settings)
        told.append(str(caught.value))
    return told


@pytest.mark.slow
def test_other_trainers_and_ways_to_generate_are_refused(tmp_path: Path) -> None:
    assert run_on_ranks(2, refused, str(tmp_path))[0] == [
        "RewardTrainer has not been compared with one process; use one of SFTTrainer, DPOTrainer, KTOTrainer, "
        "GRPOTrainer, RLOOTrainer",
        "SFTTrainer is a trainer of TRL; pass burst.trl.parallelism(cp_size=...) as its configuration",
        "use_vllm has not been tried with sequences sharded by burst; leave it at False",
    ]
