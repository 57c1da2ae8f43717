"""LoRA adapters of peft, by the Trainer of transformers, on sequences that two or more ranks share.

    torchrun --nproc-per-node 2 examples/lora.py

Started with one rank, the same program trains on one device, and prints the same losses.
"""

from __future__ import annotations

import os
import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import burst.accelerate  # 1

SEQ_LEN, VOCABULARY = 96, 64


def base() -> LlamaForCausalLM:
    """A small model, the same in each call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def main(steps: int = 5) -> None:
    """Train adapters, save them, load them again, and print the loss of each step and of the loaded model."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    shared = {"parallelism_config": burst.accelerate.parallelism(cp_size=ranks)} if ranks > 1 else {}  # 2
    model = get_peft_model(base(), LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"]))
    rows = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, VOCABULARY, (16, SEQ_LEN))]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=steps,
            learning_rate=3e-2, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(), **shared,  # 3
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        if trainer.accelerator.is_main_process:
            model.save_pretrained(folder)
            tokens = rows[0]["input_ids"][None]
            loaded = PeftModel.from_pretrained(base(), folder).merge_and_unload()(input_ids=tokens, labels=tokens).loss
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            print(f"{ranks} ranks: losses {', '.join(f'{loss:.5f}' for loss in losses)}; loaded {loaded:.5f}")


if __name__ == "__main__":
    main()
