"""The published rows of results/paper as trials: what a prediction is held against.

A row becomes a configuration where its source says enough: GPUs, model, length, context-parallel size and how the
method moves tensors. Several rows may be one configuration, because the sheets repeat measurements under other titles.
Rows that say too little are listed with the reason.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from baselines.paper_cluster import GPUS_PER_NODE
from engine.attention.resolve import Choices, HardwareModel, resolve
from engine.reader import to_json
from engine.settings import Checkpoint, ModelShape, Steps, TrialSettings
from harness.predict.attention import (
    LayerAttention,
    attention_problem,
    context_ranks_of_node,
    is_tensor_parallel,
)
from harness.spec.models import MODELS_DIR, load_model

REFERENCE = Path(__file__).parents[2] / "results" / "paper" / "reference.csv"
# What a schedule is where nothing lies between nodes: a configuration has its name by what runs.
_WITHIN_A_NODE = {"double_ring": "ring", "usp": "ulysses", "usp_transposed": "ring"}
TRAINING, ATTENTION = "tokens_per_gpu_per_second", ("forward_ms", "forward_backward_ms")
END_TO_END = ("e2e_main", "ablation", "checkpointing", "cp_scaling")
# Head counts and masks of the attention benchmarks, from results/paper/experiments.yaml.
_BENCH_HEADS = {"kernel_bench": 40, "burstattention_seq_scaling": 32, "burstattention_batch_scaling": 32}

# Settings that a configuration's name is formed from: those there were when the split was decided.
_NAMED_BY = (
    "task", "method", "model", "seq_len", "cp_size", "tp_size", "world_size", "batch_size", "dtype", "mask", "layout",
    "schedule", "backward", "kernel", "exchange", "grad_comm_dtype", "deterministic", "lm_head_fusion", "loss_kernel",
    "z_loss", "checkpoint", "projection_tiles", "mlp_tiles", "optimizer_offload", "sharding", "gradient_accumulation",
    "learning_rate", "data", "emulate_nodes", "steps", "seed",
)  # fmt: skip
_NAMED_BY_CHECKPOINT = ("every", "tail", "offload", "replay", "whole_layers", "mlp")
_NAMED_BY_MODEL = (  # the published models have no other feature
    "name", "layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "gated", "qk_norm", "rope_base",
    "norm_eps", "note",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """One published set-up as a trial on A800 or A100 GPUs."""

    settings: TrialSettings
    attention: LayerAttention

    @property
    def name(self) -> str:
        """Ten characters that stand for everything the prediction reads. Settings that came later change none."""
        settings: dict[str, Any] = to_json(replace(self.settings, steps=Steps(), grad_comm_dtype="fp32"))
        settings = {key: settings[key] for key in _NAMED_BY}
        settings["checkpoint"] = {key: settings["checkpoint"][key] for key in _NAMED_BY_CHECKPOINT}
        settings["model"] = {key: settings["model"][key] for key in _NAMED_BY_MODEL}
        exchange = {
            "schedule": self.attention.schedule,
            "backward": self.attention.resolved.backward,
            "gradient_bytes": self.attention.resolved.summed_bytes,
            "tuned_links": self.attention.tuned_links,
            "head_chunks": self.attention.resolved.num_head_chunks,
        }
        text = json.dumps([settings, exchange], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:10]


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedTime:
    """One row whose value is a speed or a time."""

    experiment: str
    figure: str
    gpu: str
    method: str  # as the source names it
    metric: str
    value: float
    source: str
    configuration: Configuration | None
    reason: str  # why it is not a configuration; empty where it is

    @property
    def seconds(self) -> float:
        """Of the step or call."""
        if self.metric == TRAINING:
            assert self.configuration is not None, "a row without a configuration has no seconds"
            settings = self.configuration.settings
            return settings.seq_len * settings.dp_size * settings.batch_size / settings.world_size / self.value
        return self.value / 1000


@cache
def published_times() -> tuple[PublishedTime, ...]:
    """All rows of results/paper/reference.csv that hold a speed or a time, in its order."""
    found = []
    with REFERENCE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["metric"] not in (TRAINING, *ATTENTION) or not row["value"]:
                continue
            configuration: Configuration | None = None
            reason = ""
            try:
                configuration = configuration_of_row(row)
            except RowSaysTooLittle as why:
                reason = str(why)
            found.append(
                PublishedTime(
                    experiment=row["experiment"], figure=row["figure"], gpu=row["gpu_model"], method=row["method"],
                    metric=row["metric"], value=float(row["value"]), source=row["source"],
                    configuration=configuration, reason=reason,
                )
            )  # fmt: skip
    return tuple(found)


class RowSaysTooLittle(Exception):
    """The source does not say what a prediction needs."""


def configuration_of_row(row: dict[str, str]) -> Configuration:
    """Settings and attention of a row's trial. Raises RowSaysTooLittle."""
    if row["experiment"] in _BENCH_HEADS:
        return _benchmark(row)
    if row["experiment"] == "sparse":
        raise RowSaysTooLittle("window and GPU count are not stated")
    if "unlabelled" in row["experiment"] or "unlabelled" in row["method"]:
        raise RowSaysTooLittle("the method is not named")
    if "no header; meaning unknown" in row["source"]:
        raise RowSaysTooLittle("the column has no header")
    if not row["gpus"]:
        raise RowSaysTooLittle("the GPU count is not stated")
    gpus, seq_len = int(float(row["gpus"])), int(float(row["seq_len"]))
    words = row["method"]
    ranks = _ranks_of_sequence(words, gpus)
    method, schedule, side, tail, fused = _way(words, row["experiment"])
    split: dict[str, Any] = {"method": "burst", "cp_size": ranks, "layout": "zigzag"}
    if method == "megatron_tp":
        split = {"method": "megatron_tp", "tp_size": ranks}
    settings = TrialSettings(
        task="train",
        model=_model(row["model"]),
        seq_len=seq_len,
        world_size=gpus,
        lm_head_fusion=fused,
        checkpoint=Checkpoint(every=1, tail=tail),
        optimizer_offload="[offload]" in words,
        **split,
    )
    return _configuration(settings, schedule, side, tuned=method == "burst")


def _configuration(settings: TrialSettings, schedule: str, side: str, *, tuned: bool) -> Configuration:
    """Ranks that send gradients in bf16 under this schedule, all on one node where it has as many GPUs; those of tensor
    parallelism attend alone, each with its own heads."""
    if settings.cp_size <= GPUS_PER_NODE:
        schedule = _WITHIN_A_NODE.get(schedule, schedule)
    problem = attention_problem(settings, context_ranks_of_node(settings, GPUS_PER_NODE))
    if schedule == "ulysses":  # DeepSpeed also divides heads unevenly; each rank counts as the fullest
        heads = -(-problem.heads // settings.cp_size) * settings.cp_size
        problem = replace(problem, heads=heads, kv_heads=heads * problem.kv_heads // problem.heads)
    choices = Choices(schedule=schedule, backward=side, grad_comm_dtype="input", num_head_chunks=1)
    return Configuration(
        settings=settings,
        attention=LayerAttention(
            resolved=resolve(problem, HardwareModel(), choices),
            tuned_links=tuned,
            tensor_parallel=is_tensor_parallel(settings),
        ),
    )


def _ranks_of_sequence(words: str, gpus: int) -> int:
    """Ranks among which a sequence, or the matrices, are divided."""
    said = re.search(r"\[sp=(\d+)\]", words)
    if said:
        return int(said.group(1))
    if "sp unstated" in words:
        raise RowSaysTooLittle("the context-parallel size is not stated")
    return gpus


def _way(words: str, experiment: str) -> tuple[str, str, str, float, bool]:
    """(burst, megatron_tp or other, schedule, backward side, tail, fused head) by the source's name of the method."""
    name = words.casefold()
    if "megatron-tp" in name:
        return "megatron_tp", "ring", "key_value", 0.0, False
    kept = 0.0 if experiment not in ("e2e_main", "cp_scaling") else 1.0
    if "half-ckpt" in name or "sl-ckpt" in name or "sl_ckpt" in name:
        kept = 0.5
    elif "whole" in name or "full-ckpt" in name or name.startswith("loong-train-cp-ckpt"):
        kept = 1.0
    elif "w/o sele-ckpt" in name:
        kept = 0.0
    if "baseline" in name:  # the ablation adds one switch after another
        schedule = "double_ring" if "double" in name else "ring"
        side = "query" if "bwd_opt" in name else "key_value"
        return "burst", schedule, side, kept, "sl_loss" in name
    if "loong" in name:
        return "other", "usp" if "usp" in name else "double_ring", "key_value", kept, False
    if name.startswith(("deepspeed", "ds-ulysses")) or name == "ulysses":
        return "other", "ulysses", "key_value", 0.0, False
    if name.startswith("megatron"):
        return "other", "ring", "key_value", 0.0, False
    if "ulysses" in name or "usp" in name:
        return "burst", "usp", "query", kept, True
    if name.startswith("burst"):
        return "burst", "double_ring", "query", kept, True
    raise RowSaysTooLittle("the method is not one of those compared")


def _benchmark(row: dict[str, str]) -> Configuration:
    """A row of an attention benchmark."""
    heads, gpus, name = _BENCH_HEADS[row["experiment"]], int(float(row["gpus"])), row["method"].casefold()
    causal = row["experiment"] == "kernel_bench"
    batch = re.search(r"batch[ =](\d+)", f"{row['figure']} {row['source']} {row['method']}")
    if row["experiment"] == "burstattention_batch_scaling" and batch is None:
        raise RowSaysTooLittle("the batch is not stated in the row")
    tuned, side, schedule = True, "query", "double_ring"
    if "head-first" in name or "ring-first" in name:
        tuned, side, schedule = False, "key_value", "usp" if "head-first" in name else "usp_transposed"
    elif "megatron" in name or "doublering" in name:
        tuned, side, schedule = False, "key_value", "ring" if "megatron" in name else "double_ring"
    elif "double_ring=false" in name:
        schedule = "ring"
    settings = TrialSettings(
        task="attention",
        method="burst",
        model=replace(_model("14b"), name=f"attention_{heads}", heads=heads, kv_heads=heads, hidden=heads * 128),
        seq_len=int(float(row["seq_len"])),
        cp_size=gpus,
        batch_size=int(batch.group(1)) if batch else 1,
        mask="causal" if causal else "full",
        layout="striped" if "striped" in name else "zigzag" if causal else "contiguous",
    )
    return _configuration(settings, schedule, side, tuned=tuned)


@cache
def _model(name: str) -> ModelShape:
    path = MODELS_DIR / f"{name}.yaml"
    if not path.exists():
        raise RowSaysTooLittle(f"the shape of {name} is not among experiments/models")
    return load_model(path)


def configurations() -> Iterator[tuple[Configuration, list[PublishedTime]]]:
    """Each configuration once, with its rows."""
    rows: dict[str, list[PublishedTime]] = {}
    first: dict[str, Configuration] = {}
    for row in published_times():
        if row.configuration is not None:
            rows.setdefault(row.configuration.name, []).append(row)
            first.setdefault(row.configuration.name, row.configuration)
    return ((first[name], rows[name]) for name in rows)
