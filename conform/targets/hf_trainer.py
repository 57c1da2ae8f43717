"""transformers' Trainer over accelerate: sequences sharded by `burst.accelerate`, or by DeepSpeed's Ulysses (ALST).

The Trainer is given the micro-batches whole, as its data set; its gradients are read before its optimizer steps, whose
learning rate is 0. `ulysses` is accelerate's `sp_backend="deepspeed"`, with ZeRO-1 and torch's attention for CPUs.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from conform.target import CaseProblem, variant_of

VARIANTS = ("burst", "ulysses")
VARIANT = variant_of(__name__, VARIANTS)
NAME = f"transformers' Trainer, {'burst.accelerate' if VARIANT == 'burst' else 'Ulysses of DeepSpeed'}"
RANKS = (2, 4)
REQUIRES = ("transformers", "accelerate", *(() if VARIANT == "burst" else ("deepspeed", "einops", "hjson", "cpuinfo")))
INSTALL = "pip install transformers==5.23.0 accelerate==1.15.0" + (
    "" if VARIANT == "burst" else " einops hjson py-cpuinfo && DS_BUILD_OPS=0 pip install --no-deps deepspeed==0.19.8"
)
_PACKAGES = ("transformers", "accelerate", "burst-harness" if VARIANT == "burst" else "deepspeed")
_OF_BURST = ("window", "odd_lengths", "short", "few_kv_heads", "padding_left")
CAPABILITIES = (
    "causal", "documents", "grouped_heads", "batch", "padding_right", "evaluation", "accumulation", "checkpointing",
    "tied", "frozen", *(_OF_BURST if VARIANT == "burst" else ("few_kv_heads",)),
)  # fmt: skip


def VERSION() -> str:
    return ", ".join(f"{name} {version(name)}" for name in _PACKAGES)


class _Run:
    """The model, and what a step left: `gradients` by name."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.gradients: dict[str, Tensor] = {}


def _as_launched(problem: CaseProblem) -> None:
    """What a launcher sets in the environment of a rank; accelerate takes over the group that is there."""
    ranks = {"RANK": str(problem.rank), "LOCAL_RANK": str(problem.rank), "WORLD_SIZE": str(problem.ranks)}
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "HF_HUB_OFFLINE": "1"} | ranks)
    if VARIANT == "ulysses":
        import deepspeed.comm

        deepspeed.comm.init_distributed("gloo")
        groups = importlib.import_module("deepspeed.runtime.sequence_parallel.parallel_state_sp")
        for name in [name for name in vars(groups) if name.startswith("_SEQUENCE")]:
            setattr(groups, name, None)  # it is made once in a process, and several cases run in one


def make_model(problem: CaseProblem) -> _Run:
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

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


def _settings(problem: CaseProblem, parts: int) -> dict[str, Any]:
    """The arguments of the Trainer that say how sequences are sharded."""
    if VARIANT == "burst":
        import burst.accelerate

        return {"parallelism_config": burst.accelerate.parallelism(cp_size=problem.ranks)}
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    deepspeed = {
        "zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": problem.batch, "gradient_clipping": 0.0,
        "gradient_accumulation_steps": parts, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    sharing = ParallelismConfig(sp_size=problem.ranks, sp_backend="deepspeed", sp_handler=handler)
    return {"parallelism_config": sharing, "deepspeed": deepspeed}


def _read_before_step(run: _Run, engine: Any) -> None:
    """DeepSpeed's engine, which steps at once after the last backward, is read before it does."""
    from deepspeed.utils import safe_get_full_grad

    step = engine.step

    def read_and_step(*args: Any, **settings: Any) -> Any:
        if engine.is_gradient_accumulation_boundary():
            learnt = {name: each for name, each in run.model.named_parameters() if each.requires_grad}
            found = {name: safe_get_full_grad(each) for name, each in learnt.items()}
            run.gradients = {name: each.detach().clone() for name, each in found.items() if each is not None}
        return step(*args, **settings)

    engine.step = read_and_step


def _trainer(run: _Run, parts: Sequence[Mapping[str, Tensor]], problem: CaseProblem, folder: str) -> Any:
    _as_launched(problem)
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class Reader(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            if VARIANT == "ulysses":
                _read_before_step(run, trainer.model_wrapped)

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            if VARIANT == "burst":
                named = run.model.named_parameters()
                run.gradients = {name: each.grad.detach().clone() for name, each in named if each.grad is not None}

    rows = [{name: each[row] for name, each in part.items()} for part in parts for row in range(problem.batch)]
    arguments = TrainingArguments(
        output_dir=folder, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, learning_rate=0.0,
        max_steps=1, max_grad_norm=0.0, per_device_train_batch_size=problem.batch,
        per_device_eval_batch_size=problem.batch, gradient_accumulation_steps=len(parts), bf16=False,
        gradient_checkpointing=problem.checkpointing, train_sampling_strategy="sequential", remove_unused_columns=False,
        log_level="error", **_settings(problem, len(parts)),
    )  # fmt: skip
    trainer: Any = Trainer(
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
