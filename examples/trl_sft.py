"""SFT with packing, by TRL, on sequences that two or more ranks share.

    torchrun --nproc-per-node 2 examples/trl_sft.py

Started with one rank, the same program trains on one device, and prints the same losses.
"""

from __future__ import annotations

import os
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import burst.trl  # 1

WORDS = ["<pad>", "<eos>", "a", "long", "sequence", "is", "cut", "into", "parts", "and", "each", "rank", "has", "one"]


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def main(steps: int = 5) -> None:
    """Train on packed texts of 4 to 40 words, and print the loss of each step."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    shared = {"parallelism_config": burst.trl.parallelism(cp_size=ranks)} if ranks > 1 else {}  # 2
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    lengths = torch.randint(4, 40, (64,)).tolist()
    texts = [" ".join(WORDS[at] for at in torch.randint(2, len(WORDS), (length,))) for length in lengths]
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder, packing=True, max_length=96, per_device_train_batch_size=2,
            gradient_accumulation_steps=2, max_steps=steps, learning_rate=1e-2, logging_steps=1, report_to=[],
            save_strategy="no", disable_tqdm=True, use_cpu=not torch.cuda.is_available(), bf16=False,
            **shared,  # 3
        )  # fmt: skip
        dataset = Dataset.from_dict({"text": texts})
        trainer = SFTTrainer(model, arguments, train_dataset=dataset, processing_class=tokenizer())
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.accelerator.is_main_process:
        print(f"{ranks} ranks: losses {', '.join(f'{loss:.5f}' for loss in losses)}")


if __name__ == "__main__":
    main()
