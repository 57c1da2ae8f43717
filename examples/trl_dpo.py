"""DPO, by TRL, on sequences that two or more ranks share: torchrun --nproc-per-node 2 examples/trl_dpo.py

With one rank, the same program trains on one device, and prints the same losses.
"""

from __future__ import annotations

import os
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

import burst.trl  # 1

WORDS = ["<pad>", "<eos>", "which", "answer", "is", "better", "this", "one", "or", "that", "a", "short", "long", "?"]


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def texts(longest: int) -> list[str]:
    lengths = torch.randint(3, longest, (40,))
    return [" ".join(WORDS[at] for at in torch.randint(2, len(WORDS), (length,))) for length in lengths]


def main(steps: int = 5) -> None:
    """Train on pairs of answers; print each step's loss."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    shared = {"parallelism_config": burst.trl.parallelism(cp_size=ranks)} if ranks > 1 else {}  # 2
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model, reference = LlamaForCausalLM(config), LlamaForCausalLM(config)
    reference.load_state_dict(model.state_dict())
    dataset = Dataset.from_dict({"prompt": texts(12), "chosen": texts(30), "rejected": texts(40)})
    with tempfile.TemporaryDirectory() as folder:
        arguments = DPOConfig(
            output_dir=folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=steps,
            learning_rate=1e-3, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, bf16=False,
            use_cpu=not torch.cuda.is_available(), **shared,  # 3
        )  # fmt: skip
        trainer = DPOTrainer(model, reference, arguments, train_dataset=dataset, processing_class=tokenizer())
        trainer.train()
    losses = [f"{entry['loss']:.5f}" for entry in trainer.state.log_history if "loss" in entry]
    if trainer.accelerator.is_main_process:
        print(f"{ranks} ranks: losses {', '.join(losses)}")


if __name__ == "__main__":
    main()
