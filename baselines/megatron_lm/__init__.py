"""Megatron-LM as its authors ship it: its own pretrain_gpt.py, with context and tensor parallelism.

Its attention over several ranks is TransformerEngine's. `schedule` sets its `--cp-comm-type` as in
`baselines.transformer_engine`; `auto` leaves its default, p2p.

The release runs from the wheel of megatron-core, its program from a checkout of the release branch; over several ranks
that share a sequence `baselines/programs/pretrain_megatron.py` starts that program, for a fault of it. The paper's copy
runs with the options of the artifact's scripts, which keep neither attention nor any other activation.

Each iteration is one line of its log, `name: value` between bars, printed by the last rank. Names that are not of the
loss and norm are the system's own figures, and kept as it calls them. Megatron-DeepSpeed prints the same lines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baselines.called import head_ranks, heads_reason
from baselines.handicaps import applied_model, applied_options
from baselines.install.places import InstallPlace
from baselines.programs import PROGRAMS
from baselines.stand_ins import python_path
from baselines.tokens import FOLDER, prefixes
from baselines.transformer_engine import COMM_TYPES
from baselines.upstream import PrintedSteps, Rendered, Upstream, arguments
from engine.attention.geometry.layout import split_unsupported_reason

if TYPE_CHECKING:
    from engine.settings import Checkpoint, TrialSettings

_COMMON = """
--num-layers {model.layers} --hidden-size {model.hidden} --ffn-hidden-size {model.ffn}
--num-attention-heads {model.heads} --kv-channels {model.head_dim}
--normalization RMSNorm --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
--attention-dropout 0 --hidden-dropout 0 --seq-length {seq_len} --max-position-embeddings {seq_len}
--tokenizer-type NullTokenizer --vocab-size {vocab} --make-vocab-size-divisible-by {multiple} {data}
--no-create-attention-mask-in-dataloader --num-workers 1
--micro-batch-size {batch_size} --global-batch-size {global_batch} --train-iters {steps} --eval-iters 0
--eval-interval 1000 --bf16 --use-distributed-optimizer --lr {lr:g} --clip-grad 1.0 --weight-decay 0.1
--adam-beta1 0.9 --adam-beta2 0.95 --seed {seed} --context-parallel-size {cp_size}
--tensor-model-parallel-size {tp_size}
--pipeline-model-parallel-size 1 --transformer-impl transformer_engine --log-interval 1 --log-throughput
"""
# The release draws its loss from a fused kernel, checks nothing that the others do not, and reports memory every step.
_RELEASE = """
--norm-epsilon {model.norm_eps:g} --rotary-base {rope_base} --lr-decay-style constant --attention-backend fused
--cross-entropy-loss-fusion --cross-entropy-fusion-impl native --no-check-for-nan-in-loss-and-grad --rerun-mode disabled
--manual-gc --manual-gc-interval 100 --log-memory-interval 1 --timing-log-level 0 --distributed-timeout-minutes 5
"""
# As in the artifact's multi.sh, but without the barriers of its timers, which `settings: as_published` has.
_ARTIFACT = """
--use-rotary-position-embeddings --lr-decay-style cosine --min-lr {min_lr:g} --init-method-std 0.006
--use-flash-attn --timing-log-level {timing} --causal --causal-tflops --method megatron-cp --log-file {log_file}
"""
_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers {every}"
_SELECTIVE = "--recompute-granularity selective --recompute-modules mlp"
_FLOAT8 = "--fp8-format hybrid --fp8-recipe tensorwise"
_MODULE = "(core_attn|layernorm|mlp)"  # of a dense model
_MOCK = "--mock-data"
_NO_MAKE = "bin/make"
_ITERATION = re.compile(r"iteration +\d+/ *\d+ \|(.*)$", re.MULTILINE)
_FIELD = re.compile(r" *([^|:]+?(?:\([^)]*\))?): +(\S+)(?: GB)? *")
_MEMORY = re.compile(r"max allocated: ([\d.]+) \| reserved: [\d.]+ \| max reserved: ([\d.]+)")
_MIB = 1 << 20  # which it prints as MB
_SECONDS, _LOSS, _NORM = "elapsed time per iteration (ms)", "lm loss", "grad norm"
_FIGURES = (
    "throughput per GPU",
    "Token per GPU",
    "tokens per gpu per second",
    "samples per second",
    "TFLOPs",
    "Max Mem",
)


class MegatronLM(Upstream):
    """GPT training. Recomputation: none (`checkpoint.every: 0`), of whole layers (`tail: 0`), of the MLP alone, or by
    `checkpoint.upstream` of the first N layers (`block N`) or of modules (`modules layernorm,mlp`); `offload N` moves
    what N layers save to the host, and recomputes nothing."""

    name = "megatron_lm_upstream"
    package = "megatron_lm"
    system = "Megatron-LM"
    source = "github.com/NVIDIA/Megatron-LM"
    honours = ("optimizer_offload", "schedule", "linear_dtype")
    warmup = 2  # its timer counts the first iteration again in what it prints for the second
    most_tp = 8
    repeats_batches = True
    offloads_parts = True
    recomputes: Mapping[str, str] = {
        "block N": r"block [1-9]\d*",
        "modules NAME,...": rf"modules {_MODULE}(,{_MODULE})*",
        "offload N": r"offload [1-9]\d*",
    }
    tokens = "megatron"

    def own_reason(self, settings: TrialSettings) -> str | None:
        model, tp_size = settings.model, settings.tp_size
        for label, heads in (("query", model.heads), ("KV", model.kv_heads)):
            if heads % tp_size:
                return (
                    f"{self.name} splits {label} heads over tp_size, found {heads} heads of model {model.name} and "
                    f"tp_size {tp_size}; choose a tp_size that divides {heads}"
                )
        if recompute(settings.checkpoint) is None:
            return (
                f"{self.name} recomputes nothing, whole layers, or the MLP alone, found checkpoint.every "
                f"{settings.checkpoint.every} and tail {settings.checkpoint.tail:g}; set every to 0, or tail to 0, or "
                "every and tail to 1, or upstream"
            )
        if settings.checkpoint.upstream != "default" and self.place.flavour == "paper":
            return (
                f"{self.name} is the paper's copy here, which recomputes whole layers, found checkpoint.upstream "
                f"{settings.checkpoint.upstream!r}; leave it out, or install the release: "
                f"burst setup baselines install {self.package} --flavour current"
            )
        kind, _, count = settings.checkpoint.upstream.partition(" ")
        most = model.layers - (kind == "offload")  # its own rule: one layer stays on the GPU
        if count.isdigit() and int(count) > most:
            return (
                f"{self.name} can {kind} at most {most} of the {model.layers} layers of model {model.name}, found "
                f"checkpoint.upstream {settings.checkpoint.upstream!r}; give fewer"
            )
        if (reason := self._schedule_reason(settings)) is not None:
            return reason
        if settings.linear_dtype != "same" and self.place.flavour == "paper":
            return (
                f"{self.name} is the paper's copy here, which has no tensorwise scaling, found linear_dtype "
                f"{settings.linear_dtype}; set it to same, or install the release: "
                f"burst setup baselines install {self.package} --flavour current"
            )
        if settings.optimizer_offload and self.place.flavour == "paper":
            return (
                f"{self.name} is the paper's copy here, which keeps its optimizer on the GPU, found optimizer_offload "
                "true; set it to false, or install the release: "
                f"burst setup baselines install {self.package} --flavour current"
            )
        return split_unsupported_reason("zigzag", settings.seq_len, settings.cp_size)

    def _schedule_reason(self, settings: TrialSettings) -> str | None:
        """Why it cannot share attention in the trial's way, or None."""
        schedule, known = settings.schedule, ("auto", *COMM_TYPES)
        if schedule not in known:
            return f"{self.name} runs schedule {' or '.join(known)}, found {schedule}; set schedule to one it runs"
        if schedule == "auto":
            return None
        if settings.cp_size == 1:
            return f"{self.name} shares attention among several ranks alone, found cp_size 1; set schedule to auto"
        if schedule != "ring" and self.place.flavour == "paper":
            return (
                f"{self.name} is the paper's copy here, which sends point to point alone, found schedule {schedule}; "
                "set it to ring, or install the release: "
                f"burst setup baselines install {self.package} --flavour current"
            )
        if schedule in ("ulysses", "usp") and settings.tp_size > 1:
            return (
                f"{self.name} exchanges heads here without tensor parallelism, found schedule {schedule} and tp_size "
                f"{settings.tp_size}; set tp_size to 1, or schedule to ring or all_gather"
            )
        return heads_reason(self, settings, schedule)

    def render(self, settings: TrialSettings, trial_dir: Path, place: InstallPlace) -> Rendered:
        release = place.flavour == "current"
        model = settings.model if release else applied_model(settings)
        multiple = 128 * settings.tp_size if model.vocab % (128 * settings.tp_size) == 0 else settings.tp_size
        options = _COMMON + (_RELEASE if release else _ARTIFACT)
        if model.kv_heads != model.heads:
            options += f" --group-query-attention --num-query-groups {model.kv_heads}"
        options += " --swiglu" if model.gated else ""
        options += " --qk-layernorm" if model.qk_norm else ""
        options += " --sequence-parallel" if settings.tp_size > 1 or not release else ""
        if settings.optimizer_offload:
            options += " --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer"
            if settings.optimizer_offload < 1:
                options += f" --optimizer-offload-fraction {settings.optimizer_offload}"
        options += " " + (recompute(settings.checkpoint, release=release) or "")
        options += comm_type(settings) if release else ""
        options += f" {_FLOAT8}" if settings.linear_dtype == "float8" else ""
        words = arguments(
            options,
            model=model,
            seq_len=settings.seq_len,
            vocab=model.vocab - 1,  # it adds a token for the end of a document
            multiple=multiple,
            batch_size=settings.batch_size,
            global_batch=settings.batch_size * settings.dp_size * settings.gradient_accumulation,
            steps=self.steps(settings),
            lr=settings.learning_rate,
            min_lr=settings.learning_rate / 10,
            seed=settings.seed + 1,  # it takes none below 1
            cp_size=settings.cp_size,
            tp_size=settings.tp_size,
            rope_base=int(model.rope_base),
            every=settings.checkpoint.every,
            log_file=trial_dir / "megatron.txt",
            data=_MOCK,
            timing=applied_options(settings).get("--timing-log-level", "0"),
        )
        if release:  # whose data the paper's copy would read in the same way, as nobody has tried
            data = ("--train-data-path", *prefixes(settings, self.steps(settings), trial_dir))
            data += ("--data-cache-path", str(trial_dir / FOLDER / "cache"))
            place_of_data = words.index(_MOCK)
            words = (*words[:place_of_data], *data, *words[place_of_data + 1 :])
        program = [str(place.source / place.pinned.entry)]
        if release and settings.cp_size > 1:
            program.insert(0, str(PROGRAMS / "pretrain_megatron.py"))
        # Its start-up calls `make` for helpers that the wheel has compiled already, in a folder without a Makefile.
        return Rendered(
            command=(str(place.python), "-u", *program, *words),
            environment={
                **place.environment,
                "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                **({"PYTHONPATH": python_path(["fused_weight_gradient_mlp_cuda"])} if release else {}),
            },
            files={_NO_MAKE: "#!/bin/sh\nexit 0\n"} if release else {},
        )

    def parse(self, output: str) -> PrintedSteps:
        return parse_iterations(output)

    def kernel(self, settings: TrialSettings, place: InstallPlace, environment: Mapping[str, str]) -> str:
        if place.flavour == "current":  # --attention-backend fused switches the others off
            return "cudnn"
        # TransformerEngine takes its backends from variables, and all of them where none is set.
        off = {name for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN") if environment.get(name) == "0"}
        if len(off) == 1:
            return "cudnn" if "NVTE_FLASH_ATTN" in off else "fa2"
        return "unknown (TransformerEngine chooses)"


def comm_type(settings: TrialSettings) -> str:
    """Its options for the trial's schedule; none for `auto`."""
    if settings.schedule == "auto":
        return ""
    words = f" --cp-comm-type {COMM_TYPES[settings.schedule]}"
    if settings.schedule == "usp":
        across = head_ranks(settings, settings.schedule)
        words += f" --hierarchical-context-parallel-sizes {across} {settings.cp_size // across}"
    return words


def recompute(checkpoint: Checkpoint, release: bool = True) -> str | None:
    """Its options for the engine's checkpointing, None where it has none that do the same."""
    if checkpoint.upstream != "default":
        kind, _, value = checkpoint.upstream.partition(" ")
        options = {
            "block": f"--recompute-granularity full --recompute-method block --recompute-num-layers {value}",
            "modules": f"--recompute-granularity selective --recompute-modules {value.replace(',', ' ')}",
            "offload": f"--cpu-offloading-num-layers {value}",
        }
        return options[kind] if release else None
    if checkpoint.every == 0:
        return ""
    if checkpoint.tail == 0 or not release:
        return _FULL
    return _SELECTIVE if checkpoint.every == 1 and checkpoint.tail == 1 else None


def parse_iterations(output: str) -> PrintedSteps:
    """Steps, losses, norms and memory of one rank's log; the system's own figures are those of its last iteration."""
    iterations = [dict(_FIELD.findall(line)) for line in _ITERATION.findall(output)]
    memory = _MEMORY.findall(output)
    last: dict[str, Any] = iterations[-1] if iterations else {}
    return PrintedSteps(
        step_seconds=[float(one[_SECONDS]) / 1000 for one in iterations if _SECONDS in one],
        loss=[float(one[_LOSS]) for one in iterations if _LOSS in one],
        grad_norm=[float(one[_NORM]) for one in iterations if _NORM in one],
        peak_allocated_bytes=[int(float(memory[-1][0]) * _MIB)] if memory else [],
        peak_reserved_bytes=[int(float(memory[-1][1]) * _MIB)] if memory else [],
        own={name: float(value) for name, value in last.items() if name.startswith(_FIGURES)},
    )


METHOD = MegatronLM()
