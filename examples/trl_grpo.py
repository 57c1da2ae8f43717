"""GRPO, by TRL, on sequences that two or more ranks share: torchrun --nproc-per-node 2 examples/trl_grpo.py

Started with one rank, the same program trains on one device, and prints the same losses and rewards.
"""

from __future__ import annotations

import os
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import burst.trl  # 1

WORDS = ["<pad>", "<eos>", "say", "yes", "no", "or", "maybe", "and", "then", "again", "please", "not", "never", "now"]


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def reward(completions: list[str], **_: object) -> list[float]:
    """The share of `yes` among the words."""
    return [each.split().count("yes") / max(len(each.split()), 1) for each in completions]


def main(steps: int = 4) -> None:
    """Train a model to say yes, and print the loss and the mean reward of each step."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    shared = {"parallelism_config": burst.trl.parallelism(cp_size=ranks)} if ranks > 1 else {}  # 2
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    prompts = [" ".join(WORDS[at] for at in torch.randint(2, len(WORDS), (4 + at % 5,))) for at in range(32)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=8, num_generations=8, max_completion_length=24,
            max_steps=steps, learning_rate=1e-2, logging_steps=1, report_to=[], save_strategy="no", seed=0,
            disable_tqdm=True, bf16=False, use_cpu=not torch.cuda.is_available(), **shared,  # 3
        )  # fmt: skip
        trainer = GRPOTrainer(
            LlamaForCausalLM(config), reward, arguments, train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer(),
        )  # fmt: skip
        trainer.train()
    of_steps = [(entry["loss"], entry["reward"]) for entry in trainer.state.log_history if "reward" in entry]
    if trainer.accelerator.is_main_process:
        print(f"{ranks} ranks: {'; '.join(f'loss {loss:.5f}, reward {reward:.5f}' for loss, reward in of_steps)}")


if __name__ == "__main__":
    main()
