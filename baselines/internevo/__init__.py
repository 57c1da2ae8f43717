"""InternEvo as in the paper's artifact: LoongTrain's 2D attention with weights sharded by its ISP.

The configuration follows the artifact's configs/7B_llama2.py: weights and optimizer over all context-parallel ranks,
the optimizer on the host, every layer recomputed. `schedule` chooses between its two placements: `double_ring` (one
head group; the inner ring is a quarter of the ranks) and `usp` (heads inside a node, a ring across nodes).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from baselines.handicaps import applied_model, applied_values
from baselines.install.places import InstallPlace
from baselines.upstream import PrintedSteps, Rendered, Upstream
from engine.attention.geometry.layout import split_unsupported_reason

if TYPE_CHECKING:
    from engine.settings import TrialSettings

CONFIG_FILE = "internevo_config.py"
_SEQUENCES = {"auto": "double ring", "double_ring": "double ring", "usp": "USP"}
_HEAD_RANKS = 4  # of the artifact's USP runs: CP 8 x HP 4
_CONFIG = """\
JOB_NAME = "burst_harness"
model_type = "LLAMA2"
DO_ALERT = False
VOCAB_SIZE = {vocab}
ckpt = dict(enable_save_ckpt=False, auto_resume=False)
data = dict(
    type="tokenized", seq_len={seq_len}, micro_num={micro_num}, micro_bsz={batch_size}, packed_length={packed},
    use_packed_dataset=False, pack_sample_into_one=False, total_steps={steps}, skip_batches="", rampup_batch_size="",
    min_length=50, train_folder=None, valid_folder=None, valid_every=0, empty_cache_and_diag_interval=200,
    diag_outlier_ratio=1.1,
)
grad_scaler = dict(
    fp16=dict(initial_scale=2**16, min_scale=1, growth_interval=1000), growth_factor=2, backoff_factor=0.5,
    max_scale=2**24, hysteresis=2,
)
hybrid_zero_optimizer = dict(
    cpu_offload={offload}, overlap_sync_grad=True, overlap_sync_param=True, reduce_bucket_size=512 * 1024 * 1024,
    clip_grad_norm=1.0,
)
loss = dict(label_smoothing=0)
adam = dict(lr={lr!r}, adam_beta1=0.9, adam_beta2=0.95, adam_beta2_c=0, adam_eps=1e-8, weight_decay=0.01)
lr_scheduler = dict(total_steps={steps}, init_steps=0, warmup_ratio=0.01, eta_min=1e-5, last_epoch=-1)
beta2_scheduler = dict(init_beta2=0.95, c=0, cur_iter=-1)
use_fp32_norm = False
cce_loss = False
selective_checkpoint = {selective}
model = dict(
    checkpoint={recompute}, num_chunks=1, num_attention_heads={heads}, num_kv_attention_heads={kv_heads},
    hidden_size={hidden}, num_layers={layers}, mlp_ratio={mlp_ratio!r}, vocab_size={vocab}, embed_split_hidden=True,
    embed_grad_scale=1, parallel_output=False, no_bias=True, apply_post_layer_norm=False, dtype="torch.bfloat16",
    norm_type="rmsnorm", layer_norm_epsilon={norm_eps!r}, use_flash_attn=True, qk_interleaved=False,
    mlp_layer_fusion=True, enable_qkv_fusion=True,
)
parallel = dict(
    zero1=dict(size=-1),
    tensor=dict(size={sequence_ranks}, mode="isp"),
    pipeline=dict(size=1, interleaved_overlap=True),
    weight=dict(size={sequence_ranks}, overlap=True, memory_pool={memory_pool}),
    burst=dict(enable=False),
    sequence_2D=dict(
        enable=True, head_size={head_ranks}, context_size={context_ranks}, window_size={window},
        device_placement_strategy=dict(head_first=True, interleaved=False),
    ),
)
cudnn_deterministic = False
cudnn_benchmark = False
monitor = dict(
    alert=dict(enable_feishu_alert=False, feishu_alert_address=None, light_monitor_address=None, alert_file_path=None),
    tensorboard=dict(queue_max_length=10),
)
"""
# Keys hold spaces and brackets; values do not. The line begins with the logger's own words.
_LINE = re.compile(r"^.*\btflops=\S+.*\bstep=\d+.*$", re.MULTILINE)
_FIELD = re.compile(r"([A-Za-z_][\w/ ]*(?:\([\w/]+\))?)=([-+.\deE]+|nan|inf)(?=\s|$)")
_TGS = "tgs (tokens/gpu/second)"  # of this step alone, optimizer included, which fwd_bwd_time is not


class InternEvo(Upstream):
    """Llama training on random tokens, which it makes itself."""

    name = "internevo_upstream"
    package = "internevo"
    system = "InternEvo"
    source = "arXiv:2406.18485"
    honours = ("optimizer_offload", "schedule")
    repeats_batches = True
    attends = "fa2"  # use_flash_attn, and flash_attn in its rings

    def own_reason(self, settings: TrialSettings) -> str | None:
        model, checkpoint = settings.model, settings.checkpoint
        if settings.schedule not in _SEQUENCES:
            return (
                f"{self.name} runs schedule double_ring or usp, found {settings.schedule}; set schedule to one of them"
            )
        head_ranks, context_ranks, window = placement(settings)
        if settings.cp_size % head_ranks or context_ranks % window:
            return (
                f"{self.name} splits cp_size into head ranks and a double ring, found {settings.cp_size}; choose a "
                f"cp_size that is a multiple of {_HEAD_RANKS}"
            )
        if model.heads % head_ranks or model.kv_heads % head_ranks:
            return (
                f"{self.name} needs heads divisible by its {head_ranks} head ranks, found {model.heads} and "
                f"{model.kv_heads} KV heads of model {model.name}; choose another model or schedule double_ring"
            )
        if model.heads * model.head_dim != model.hidden or not model.gated or model.qk_norm:
            return f"{self.name} has gated models whose heads add up to hidden, and {model.name} is another; choose one"
        if checkpoint.every not in (0, 1) or checkpoint.tail not in (0, 1):
            return (
                f"{self.name} recomputes nothing, each layer, or each layer without attention, found checkpoint.every "
                f"{checkpoint.every} and tail {checkpoint.tail:g}; set every and tail to 0 or 1"
            )
        return split_unsupported_reason("zigzag", settings.seq_len, settings.cp_size)

    def render(self, settings: TrialSettings, trial_dir: Path, place: InstallPlace) -> Rendered:
        model, values = applied_model(settings), applied_values(settings)
        head_ranks, context_ranks, window = placement(settings)
        selective = bool(settings.checkpoint.every and settings.checkpoint.tail)
        config = _CONFIG.format(
            seq_len=settings.seq_len,
            micro_num=settings.gradient_accumulation,
            batch_size=settings.batch_size,
            packed=settings.seq_len * settings.batch_size,
            steps=self.steps(settings),
            offload=settings.optimizer_offload,
            lr=settings.learning_rate,
            selective=selective and values.get("selective") != "false",
            memory_pool=values.get("memory_pool") != "false",
            recompute=bool(settings.checkpoint.every),
            heads=model.heads,
            kv_heads=model.kv_heads,
            hidden=model.hidden,
            layers=model.layers,
            mlp_ratio=model.ffn / model.hidden,
            vocab=model.vocab,
            norm_eps=model.norm_eps,
            sequence_ranks=settings.cp_size,
            head_ranks=head_ranks,
            context_ranks=context_ranks,
            window=window,
        )
        program = str(place.source / place.pinned.entry)
        return Rendered(
            command=(
                str(place.python),
                "-u",
                program,
                "--config",
                str(trial_dir / CONFIG_FILE),
                "--seed",
                str(settings.seed),
            ),
            environment={
                **place.environment,
                "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                "LOG_FILE": str(trial_dir / "internevo.txt"),  # it ends without one
            },
            files={CONFIG_FILE: config},
        )

    def parse(self, output: str) -> PrintedSteps:
        lines = [
            dict((name.strip(), float(value)) for name, value in _FIELD.findall(one)) for one in _LINE.findall(output)
        ]
        last = lines[-1] if lines else {}
        names = ("tflops", _TGS, "tgs/last_tgs_1", "tgs/tgs_all", "fwd_bwd_time")
        return PrintedSteps(
            tokens_per_gpu_per_second=[one[_TGS] for one in lines if one.get(_TGS)],
            loss=[one["loss"] for one in lines if "loss" in one],
            grad_norm=[one["grad_norm"] for one in lines if "grad_norm" in one],
            own={name: last[name] for name in names if name in last},
        )


def placement(settings: TrialSettings) -> tuple[int, int, int]:
    """(head ranks, context ranks, ranks of the inner ring), as the artifact chooses them for a CP size."""
    if settings.schedule == "usp":
        head_ranks = min(_HEAD_RANKS, settings.cp_size)
        return head_ranks, settings.cp_size // head_ranks, settings.cp_size // head_ranks
    return 1, settings.cp_size, max(1, settings.cp_size // 4)


METHOD = InternEvo()
