"""The Trainer of transformers on sequences that two or more ranks share.

    torchrun --nproc-per-node 2 examples/transformers_trainer.py

Four lines differ from training on one device: they are marked. Started without torchrun, the same program trains on one
device, and prints the same losses.
"""

from __future__ import annotations

import os
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import burst.accelerate  # 1

SEQ_LEN, VOCABULARY = 96, 64


def packed_row(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Three documents in one row: positions begin again with 0 at each, none sees another or foretells its start."""
    tokens = torch.randint(3, VOCABULARY, (SEQ_LEN,), generator=generator)
    positions = torch.cat([torch.arange(length) for length in (50, 6, 40)])
    return {"input_ids": tokens, "labels": tokens.masked_fill(positions == 0, -100), "position_ids": positions}


def main(steps: int = 5) -> None:
    """Train, and print the loss of each step."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    sharded = {"parallelism_config": burst.accelerate.parallelism(cp_size=ranks)} if ranks > 1 else {}  # 2
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,  # 3: with a cache, transformers does not look for documents
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    rows = [packed_row(generator) for _ in range(16)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=steps,
            learning_rate=1e-2, logging_steps=1,
            report_to=[], save_strategy="no", seed=0, disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
            **sharded,  # 4
        )  # fmt: skip
        trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows, eval_dataset=rows[:4])
        trainer.train()
        evaluation = trainer.evaluate()["eval_loss"]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if os.environ.get("RANK", "0") == "0":
        print(f"{ranks} ranks: losses {', '.join(f'{loss:.5f}' for loss in losses)}; evaluation {evaluation:.5f}")


if __name__ == "__main__":
    main()
