"""transformers' Trainer over accelerate with `burst.accelerate.parallelism`: one step of training, and evaluation.

The Trainer is given the micro-batches whole, in the place of a data loader; its gradients are read before its optimizer
steps, which has a learning rate of 0.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from conform.target import CaseProblem, version_of

NAME = "accelerate with burst.accelerate"
RANKS = (2, 4)
DEVICES = ("cpu",)
REQUIRES = ("transformers", "accelerate")
INSTALL = "pip install transformers==5.23.0 accelerate==1.15.0"
CAPABILITIES = (
    "causal", "documents", "window", "grouped_heads", "few_kv_heads", "odd_lengths", "short", "batch", "padding_right",
    "padding_left", "evaluation", "accumulation", "checkpointing", "tied", "frozen",
)  # fmt: skip


def VERSION() -> str:
    return f"burst-harness {version_of()}, " + ", ".join(
        f"{name} {version_of(name)}" for name in ("transformers", "accelerate")
    )


class _Run:
    """The model, and what a step left: `gradients` by name."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.gradients: dict[str, Tensor] = {}


def _as_launched(problem: CaseProblem) -> None:
    """What a launcher sets in the environment of a rank; accelerate takes over the group that is there."""
    ranks = {"RANK": str(problem.rank), "LOCAL_RANK": str(problem.rank), "WORLD_SIZE": str(problem.ranks)}
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "HF_HUB_OFFLINE": "1"} | ranks)


def make_model(problem: CaseProblem) -> _Run:
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    _as_launched(problem)
    sizes: dict[str, Any] = dict(
        vocab_size=problem.vocab, hidden_size=problem.hidden, intermediate_size=problem.ffn,
        num_hidden_layers=problem.layers, num_attention_heads=problem.heads, num_key_value_heads=problem.kv_heads,
        head_dim=problem.head_dim, rms_norm_eps=problem.norm_eps, tie_word_embeddings=problem.tied, use_cache=False,
        rope_parameters={"rope_type": "default", "rope_theta": problem.rope_theta},
    )  # fmt: skip
    if problem.window is None:
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes))
    else:  # which counts the token itself
        model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=problem.window + 1))
    model.load_state_dict(dict(problem.state), strict=not problem.tied)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(problem.frozen or " "))
    return _Run(model.to(problem.torch_dtype))


def shard(batch: Mapping[str, Tensor], problem: CaseProblem) -> Mapping[str, Tensor]:
    """The model takes whole batches and cuts them itself."""
    return batch


def _trainer(run: _Run, parts: Sequence[Mapping[str, Tensor]], problem: CaseProblem, folder: str) -> Any:
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    import burst.accelerate

    class Reader(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            run.gradients = {
                name: each.grad.detach().clone() for name, each in run.model.named_parameters() if each.grad is not None
            }

    rows = [{name: each[row] for name, each in part.items()} for part in parts for row in range(problem.batch)]
    arguments = TrainingArguments(
        output_dir=folder, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, learning_rate=0.0,
        max_steps=1, max_grad_norm=0.0, per_device_train_batch_size=problem.batch,
        per_device_eval_batch_size=problem.batch, gradient_accumulation_steps=len(parts), bf16=False,
        gradient_checkpointing=problem.checkpointing, train_sampling_strategy="sequential", remove_unused_columns=False,
        parallelism_config=burst.accelerate.parallelism(cp_size=problem.ranks), log_level="error",
    )  # fmt: skip
    trainer = Trainer(
        run.model, arguments, train_dataset=rows, eval_dataset=rows[: problem.batch], callbacks=[Reader()],
        data_collator=lambda found: {name: torch.stack([row[name] for row in found]) for name in found[0]},
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    return trainer


def step(run: _Run, parts: Sequence[Mapping[str, Tensor]], problem: CaseProblem) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return float(_trainer(run, parts, problem, folder).train().training_loss)


def gather(run: _Run, problem: CaseProblem) -> dict[str, Tensor]:
    return {name: each for name, each in run.gradients.items() if name in problem.state}


def evaluate(run: _Run, part: Mapping[str, Tensor], problem: CaseProblem) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return float(_trainer(run, [part], problem, folder).evaluate()["eval_loss"])
