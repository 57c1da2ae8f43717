"""Megatron-DeepSpeed as in the paper's artifact: DeepSpeed-Ulysses under ZeRO-3, with the optimizer on the host.

The options are those of the artifact's script/ulysses.sh: activation checkpointing by DeepSpeed, ZeRO-3 with parameters
repeated in groups of GPUs (hpZ). It computes in bf16, as the others do; as published, in fp16.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from baselines.handicaps import applied_model, applied_values
from baselines.install.places import InstallPlace
from baselines.megatron_lm import parse_iterations
from baselines.upstream import PrintedSteps, Rendered, Upstream, arguments
from engine.attention.geometry.layout import split_unsupported_reason

if TYPE_CHECKING:
    from engine.settings import TrialSettings

CONFIG_FILE = "ds_config.json"
_OPTIONS = """
--tensor-model-parallel-size 1 --no-pipeline-parallel --ds-sequence-parallel-size {cp_size}
--num-layers {model.layers} --hidden-size {model.hidden} --ffn-hidden-size {model.ffn}
--num-attention-heads {model.heads} --seq-length {seq_len} --max-position-embeddings {seq_len}
--micro-batch-size {batch_size} --global-batch-size {global_batch} --train-iters {steps} --eval-iters 0
--eval-interval 1000 --tokenizer-type NullTokenizer --vocab-size {vocab} --data-path {data} --data-impl mmap
--split 98,2,0 --num-workers 0 --lr {lr:g} --min-lr 1e-6 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0
--adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --hysteresis 2 --seed {seed} --{dtype}
--use-rotary-position-embeddings --normalization rmsnorm --disable-bias-linear --swiglu
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --no-query-key-layer-scaling
--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-gradient-accumulation-fusion
--no-async-tensor-model-parallel-allreduce --use-flash-attn-v2 --zero-reduce-scatter
--log-interval 1 --timing-log-level 0
--deepspeed --deepspeed_config {config} --zero-stage 3
"""
_RECOMPUTE = " --checkpoint-activations --deepspeed-activation-checkpointing"
_OFFLOAD_RATIO = 0.8  # of the optimizer that the artifact keeps on the host
_HPZ_RANKS = 8  # a node's, so that parameters are gathered inside it


class MegatronDeepSpeed(Upstream):
    """GPT training with an all-to-all around attention; `data` names a dataset in Megatron's format, without its
    ending."""

    name = "megatron_deepspeed_upstream"
    package = "megatron_deepspeed"
    system = "Megatron-DeepSpeed"
    source = "arXiv:2309.14509"
    honours = ("optimizer_offload",)
    repeats_batches = True
    attends = "fa2"  # --use-flash-attn-v2

    def own_reason(self, settings: TrialSettings) -> str | None:
        model, checkpoint = settings.model, settings.checkpoint
        if model.kv_heads != model.heads:
            return (
                f"{self.name} has as many KV heads as query heads, found {model.kv_heads} and {model.heads} of model "
                f"{model.name}; choose a model without grouped heads"
            )
        if model.heads % settings.cp_size:
            return (
                f"{self.name} needs heads divisible by cp_size, found {model.heads} heads of model {model.name} and "
                f"cp_size {settings.cp_size}; choose a cp_size that divides {model.heads}"
            )
        if not model.gated or model.qk_norm:
            return f"{self.name} trains gated models without norms of q and k, and {model.name} is another; choose one"
        if checkpoint.every not in (0, 1) or (checkpoint.every and checkpoint.tail):
            return (
                f"{self.name} recomputes nothing or each layer whole, found checkpoint.every {checkpoint.every} and "
                f"tail {checkpoint.tail:g}; set every to 0, or every to 1 and tail to 0"
            )
        return split_unsupported_reason("contiguous", settings.seq_len, settings.cp_size)

    def render(self, settings: TrialSettings, trial_dir: Path, place: InstallPlace) -> Rendered:
        global_batch = settings.batch_size * settings.dp_size * settings.gradient_accumulation
        model, values = applied_model(settings), applied_values(settings)
        dtype = values.get("dtype", "bf16")
        words = arguments(
            _OPTIONS
            + (_RECOMPUTE if settings.checkpoint.every else "")
            + (" --cpu-optimizer" if settings.optimizer_offload else ""),
            model=model,
            cp_size=settings.cp_size,
            seq_len=settings.seq_len,
            batch_size=settings.batch_size,
            global_batch=global_batch,
            steps=self.steps(settings),
            vocab=model.vocab - 1,
            data=settings.data,
            lr=settings.learning_rate,
            seed=settings.seed + 1,
            config=trial_dir / CONFIG_FILE,
            dtype=dtype,
        )
        return Rendered(
            command=(str(place.python), "-u", str(place.source / place.pinned.entry), *words),
            environment={**place.environment, "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
            files={
                CONFIG_FILE: json.dumps(
                    deepspeed_config(settings, global_batch, dtype, int(values.get("hpz", _HPZ_RANKS))), indent=1
                )
                + "\n"
            },
        )

    def parse(self, output: str) -> PrintedSteps:
        return parse_iterations(output)


def deepspeed_config(settings: TrialSettings, global_batch: int, dtype: str, hpz_ranks: int) -> dict[str, object]:
    """DeepSpeed's own configuration, as the artifact's ds.json has it but for `dtype` and the ranks of a hpZ group."""
    zero: dict[str, object] = {
        "stage": 3,
        "reduce_scatter": True,
        "zero_hpz_partition_size": min(hpz_ranks, settings.world_size),
        "zero_quantized_weights": False,
        "zero_quantized_gradients": False,
        "contiguous_gradients": True,
        "overlap_comm": True,
    }
    if settings.optimizer_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True, "ratio": _OFFLOAD_RATIO}
    scale = {"loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 11}
    return {
        "train_batch_size": global_batch,
        "train_micro_batch_size_per_gpu": settings.batch_size,
        "steps_per_print": 1,
        "zero_optimization": zero,
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        dtype: {"enabled": True, **(scale if dtype == "fp16" else {})},
        "wall_clock_breakdown": False,
    }


METHOD = MegatronDeepSpeed()
