"""The original BurstEngine, the paper's artifact: its pretraining program under BMTrain.

The options are those of its multi.sh: double-ring BurstAttention, ZeRO over the sequence's ranks, every layer
recomputed but for the attention outputs that `checkpoint.tail` keeps, the optimizer on the host. The program ends by
itself at its fourth step, whose time it writes to a file and does not print: three steps can be had of it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from baselines.handicaps import applied_model
from baselines.install.places import InstallPlace
from baselines.upstream import PrintedSteps, Rendered, Upstream, arguments
from engine.attention.geometry.layout import split_unsupported_reason

if TYPE_CHECKING:
    from engine.settings import TrialSettings
    from engine.shape import ModelShape

CONFIG_FILE, DATASET_FILE = "config.json", "dataset.json"
MOST_STEPS = 3
_OPTIONS = """
--model-config {config} --vocab {folder}/config/70b/vocab.txt --tokenizer-path {source}/llama-7b/
--dataset {dataset} --train-iters 400000 --lr {lr:g} --inspect-iters 100 --warmup-iters 2000
--lr-decay-style noam --weight-decay 0.1 --clip-grad 1.0 --loss-scale 1048576 --start-step 1 --bf16
--batch-size {batch_size} --max-length {seq_len} --tp {cp_size} --sp {method} --flash cuda --spzero
"""
_STEP = re.compile(
    r"\|mem_train_allocated: ([\d.]+) \|mem_train_reserved: ([\d.]+) \| train: ([\d.]+) \| tflops: ([\d.]+) "
    r"\| toks: ([\d.]+) \|"
)
_LOSS = re.compile(r"^loss (\S+) grad_norm (\S+)$", re.MULTILINE)


class BurstEngineArtifact(Upstream):
    """Llama training with BurstAttention."""

    name = "burst_engine_upstream"
    package = "burst_engine"
    system = "BurstEngine (artifact)"
    source = "arXiv:2509.19836"
    honours = ("optimizer_offload", "lm_head_fusion")
    attends = "fa2, the fork of flash-attention in the artifact"  # --flash cuda

    def own_reason(self, settings: TrialSettings) -> str | None:
        model, checkpoint = settings.model, settings.checkpoint
        if self.steps(settings) > MOST_STEPS:
            return (
                f"{self.name} ends by itself after printing {MOST_STEPS} steps, found {self.steps(settings)}; set "
                "steps.warmup and steps.measured to 1, and leave steps.settle out"
            )
        if model.kv_heads != model.heads:
            return (
                f"{self.name} maps grouped heads wrongly, found {model.kv_heads} KV heads of model {model.name}; "
                "choose a model without grouped heads"
            )
        if checkpoint.every and checkpoint.tail not in (0, 0.5, 1):
            return (
                f"{self.name} keeps attention's outputs of no tokens, of half or of all, found checkpoint.tail "
                f"{checkpoint.tail:g}; set it to 0, 0.5 or 1"
            )
        if checkpoint.every > 1:
            return f"{self.name} recomputes each layer or none, found checkpoint.every {checkpoint.every}; set 0 or 1"
        return split_unsupported_reason("zigzag", settings.seq_len, settings.cp_size)

    def render(self, settings: TrialSettings, trial_dir: Path, place: InstallPlace) -> Rendered:
        program = place.source / place.pinned.entry
        words = arguments(
            _OPTIONS
            + (" --ckpt" if settings.checkpoint.every else "")
            + (" --offload" if settings.optimizer_offload else ""),
            config=trial_dir / CONFIG_FILE,
            folder=program.parent,
            dataset=trial_dir / DATASET_FILE,
            source=place.source,
            lr=settings.learning_rate,
            batch_size=settings.batch_size,
            seq_len=settings.seq_len,
            cp_size=settings.cp_size,
            method=sequence_method(settings),
        )
        return Rendered(
            command=(str(place.python), "-u", str(program), *words),
            environment={
                **place.environment,
                "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                "LOG_FILE": str(trial_dir / "burst_engine.txt"),
                "TOK_PATH": f"{place.source}/llama-7b/",
            },
            files={
                CONFIG_FILE: json.dumps(model_config(applied_model(settings)), indent=1) + "\n",
                DATASET_FILE: json.dumps([dataset(settings.data, place)], indent=1) + "\n",
            },
            folder=str(program.parent),
        )

    def parse(self, output: str) -> PrintedSteps:
        steps, losses = _STEP.findall(output), _LOSS.findall(output)
        own = (
            dict(
                zip(
                    ("mem_train_allocated", "mem_train_reserved", "train", "tflops", "toks"),
                    map(float, steps[-1]),
                    strict=True,
                )
            )
            if steps
            else {}
        )
        return PrintedSteps(
            step_seconds=[float(one[2]) for one in steps],
            loss=[float(loss) for loss, _ in losses],
            grad_norm=[float(norm) for _, norm in losses],
            own=own,
        )


def sequence_method(settings: TrialSettings) -> str:
    """The name from which its program reads its optimizations: fused LM head and loss, kept attention outputs."""
    kept = {0.0: "", 0.5: "_sl_ckpt", 1.0: "_whole_ckpt"}[settings.checkpoint.tail] if settings.checkpoint.every else ""
    return "burst" + ("_sl_loss" if settings.lm_head_fusion else "") + kept


def dataset(data: str, place: InstallPlace) -> dict[str, object]:
    """What its program reads: the folder `data`, in its own format; the artifact's texts where no folder is named."""
    folder = data if "/" in data else str(place.source / "data" / "BE")
    return {
        "dataset_name": "cot_eng",
        "task_name": "cot_eng",
        "weight": 1.0,
        "path": folder,
        "incontext_weight": [1.0],
        "transforms": str((place.source / place.pinned.entry).parent / "cot_eng" / "script_cpmc.py"),
    }


def model_config(model: ModelShape) -> dict[str, object]:
    """The model as the artifact's configuration files describe one."""
    return {
        "vocab_size": model.vocab,
        "dropout_p": 0.0,
        "eps": model.norm_eps,
        "half": True,
        "use_flash_attn": True,
        "flash_attn_mask_shape": "2d",
        "bf16": True,
        "dim_model": model.hidden,
        "dim_ff": model.ffn,
        "dim_head": model.head_dim,
        "num_heads": model.heads,
        "num_kv_heads": model.kv_heads,
        "num_layers": model.layers,
        "activate_fn": "silu" if model.gated else "gelu",
        "scale": False,
    }


METHOD = BurstEngineArtifact()
