"""torchtitan as its authors ship it: its trainer with FSDP2 and torch's context parallelism on its Llama 3."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from baselines.called import REQUEST_FILE, parse_program, training_request
from baselines.install.places import InstallPlace
from baselines.programs import PROGRAMS
from baselines.upstream import PrintedSteps, Rendered, Upstream, arguments
from engine.attention.geometry.layout import split_unsupported_reason

if TYPE_CHECKING:
    from engine.settings import Checkpoint, TrialSettings

_OPTIONS = """
--model.name burst_harness --model.flavor trial --training.seq_len {seq_len} --training.local_batch_size {batch_size}
--training.steps {steps} --optimizer.lr {lr:g} --lr_scheduler.warmup_steps 1 --metrics.log_freq 1
--metrics.disable_color_printing --job.dump_folder {folder} --parallelism.context_parallel_degree {cp_size}
--parallelism.tensor_parallel_degree {tp_size} --debug.seed {seed} --compile.enable
--activation_checkpoint.mode {checkpoint}
"""
# As its docs/float8.md has it for tensorwise scaling. The LM head stays in bf16, and so do matrices that are too small
# to gain; FSDP2 gathers in float8 over ranks.
_FLOAT8 = """
--model.converters quantize.linear.float8 --quantize.linear.float8.filter_fqns output,auto_filter_small_kn
--quantize.linear.float8.enable_fsdp_float8_all_gather
--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp
"""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_STEP = re.compile(
    r"step: *\d+  loss: *(\S+)  grad_norm: *(\S+)  memory: *([\d.]+)GiB\([\d.]+%\)  tps: ([\d,]+)  tflops: ([\d,.]+)"
    r"  mfu: (\S+)%"
)


class TorchTitan(Upstream):
    """Llama 3 training; blocks and loss are compiled, attention is torch's with cuDNN's kernel first, or with `kernel:
    fa4` FlashAttention-4 through torch's own switch (torch.nn.attention.activate_flash_attention_impl)."""

    name = "torchtitan_upstream"
    package = "torchtitan"
    system = "torchtitan"
    source = "github.com/pytorch/torchtitan"
    warmup = 2  # compilation
    most_tp = 8
    honours = ("kernel", "linear_dtype")
    fa4_beside_torch = True
    tokens = "plain"
    # Each N-th layer, and what the compiler chooses to keep of a share of what it would without recomputation.
    recomputes: Mapping[str, str] = {"every N": r"every [1-9]\d*", "budget SHARE": r"budget (0(\.\d+)?|1(\.0)?)"}

    def own_reason(self, settings: TrialSettings) -> str | None:
        model = settings.model
        if settings.kernel not in ("auto", "fa4"):
            return f"{self.name} runs kernel auto or fa4, found {settings.kernel}; set kernel to one it runs"
        if model.heads * model.head_dim != model.hidden or not model.gated or model.qk_norm:
            return (
                f"{self.name} trains Llama 3, whose heads add up to hidden, and {model.name} is another; choose a Llama"
            )
        if settings.tp_size > 1 and (model.heads % settings.tp_size or model.kv_heads % settings.tp_size):
            return (
                f"{self.name} splits heads over tp_size, found {model.heads} heads, {model.kv_heads} KV heads and "
                f"tp_size {settings.tp_size}; choose a tp_size that divides both"
            )
        if mode(settings.checkpoint) is None:
            return (
                f"{self.name} recomputes nothing, each layer, or what costs little (selective, op), found "
                f"checkpoint.every {settings.checkpoint.every} and tail {settings.checkpoint.tail:g}; set 0 or 1"
            )
        return split_unsupported_reason("zigzag", settings.seq_len, settings.cp_size)

    def render(self, settings: TrialSettings, trial_dir: Path, place: InstallPlace) -> Rendered:
        words = arguments(
            _OPTIONS + (_FLOAT8 if settings.linear_dtype == "float8" else ""),
            seq_len=settings.seq_len,
            batch_size=settings.batch_size,
            steps=self.steps(settings),
            lr=settings.learning_rate,
            folder=trial_dir / "torchtitan",
            cp_size=settings.cp_size,
            tp_size=settings.tp_size,
            seed=settings.seed,
            checkpoint=mode(settings.checkpoint),
        )
        words = tuple(part for word in words for part in word.split(";"))
        program = (str(place.python), "-u", str(PROGRAMS / "train_torchtitan.py"), str(trial_dir / REQUEST_FILE))
        return Rendered(
            command=(*program, *words),
            environment=place.environment,
            files={
                REQUEST_FILE: json.dumps(training_request(settings, self.steps(settings), trial_dir), indent=1) + "\n"
            },
        )

    def kernel(self, settings: TrialSettings, place: InstallPlace, environment: Mapping[str, str]) -> str:
        # Its ScaledDotProductAttentionWrapper in models/attention.py gives torch this order.
        return "fa4" if settings.kernel == "fa4" else "torch: cudnn, else flash, else math"

    def parse(self, output: str) -> PrintedSteps:
        steps = _STEP.findall(_COLOUR.sub("", output))
        last = steps[-1] if steps else ()
        return PrintedSteps(
            tokens_per_gpu_per_second=[float(one[3].replace(",", "")) for one in steps],
            loss=[float(one[0]) for one in steps],
            grad_norm=[float(one[1]) for one in steps],
            peak_allocated_bytes=parse_program(output).peak_allocated_bytes,
            # What it prints as memory is the peak reserved.
            peak_reserved_bytes=[int(max(float(one[2]) for one in steps) * 2**30)] if steps else [],
            own={
                name: float(value.replace(",", ""))
                for name, value in zip(("tps", "tflops", "mfu"), last[3:], strict=False)
            },
        )


def mode(checkpoint: Checkpoint) -> str | None:
    """Its options for the engine's checkpointing, joined by semicolons; None where it has none."""
    kind, _, value = checkpoint.upstream.partition(" ")
    if kind == "every":
        return f"selective;--activation_checkpoint.selective_ac_option;{value}"
    if kind == "budget":
        return f"memory_budget;--activation_checkpoint.memory_budget;{value}"
    if checkpoint.every == 0:
        return "none"
    if checkpoint.every == 1 and checkpoint.tail == 0:
        return "full"
    whole = checkpoint.every == 1 and checkpoint.tail == 1
    return "selective;--activation_checkpoint.selective_ac_option;op" if whole else None


METHOD = TorchTitan()
