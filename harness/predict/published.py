"""The published numbers of results/paper: one row of reference.csv each, and the trial that a row stands for.

A row becomes a configuration where its source says enough: GPUs, model, length, context-parallel size and how the
method moves tensors. Several rows may be one configuration, because the sheets repeat measurements under other titles.
Of a row that says too little the reason is kept.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

from baselines.paper_cluster import GPUS_PER_NODE
from cluster.files.filesystem import read_text
from engine.attention.resolve import Choices, HardwareModel, resolve
from engine.reader import to_json
from engine.settings import Checkpoint, Steps, TrialSettings
from engine.shape import ModelShape
from harness.base.errors import UsageError
from harness.predict.attention import (
    LayerAttention,
    attention_problem,
    context_ranks_of_node,
    is_tensor_parallel,
)
from harness.predict.systems import BURST_ENGINE, INTERN_EVO, MEGATRON_DEEPSPEED, MEGATRON_LM, SystemMemory
from harness.spec.models import MODELS_DIR, load_model
from harness.spec.references import PAPER_DIR

T = TypeVar("T")

REFERENCE = PAPER_DIR / "reference.csv"
ARTIFACT = "thunlp/BurstEngine at 426eb7a"  # whose sheets and scripts most rows were read from
COLUMNS = (
    "experiment", "figure", "gpus", "nodes", "gpu_model", "model", "seq_len", "method", "metric", "value", "unit",
    "source",
)  # fmt: skip
OUT_OF_MEMORY = "oom"
# Metrics of training, and of attention alone.
SPEED, MEMORY, TIMES = "tokens_per_gpu_per_second", "peak_memory_gib", ("forward_ms", "forward_backward_ms")


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """One number that others published, or the reason why they give none (`unit` oom)."""

    experiment: str
    figure: str
    gpus: int | None
    nodes: int | None
    gpu_model: str
    model: str
    seq_len: int | None
    method: str
    metric: str
    value: float | None
    text: str  # the value as the file has it, with its digits
    unit: str
    source: str
    line: int  # of the file

    @property
    def derived(self) -> bool:
        """Whether the number was derived from another row when the file was made, rather than read."""
        return self.source.startswith("DERIVED")

    @property
    def number(self) -> float:
        """The value of a row that has one."""
        assert self.value is not None, self
        return self.value

    @property
    def trial(self) -> tuple[object, ...]:
        """What rows of one published trial have in common: they differ in their metric."""
        return (self.experiment, self.figure, self.gpus, self.model, self.seq_len, self.method)

    @property
    def note(self) -> str:
        """What the source says about a doubtful number; empty for most."""
        return self.source.partition("NOTE ")[2]


@cache
def published_rows() -> tuple[Published, ...]:
    """All published numbers of the repository."""
    return read_published(REFERENCE)


def read_published(path: Path) -> tuple[Published, ...]:
    """The rows of such a file. Raises UsageError with file and line for what is no such row."""
    reader = csv.reader(io.StringIO(read_text(path, "table of published numbers"), newline=""))
    header = next(reader, [])
    if tuple(header) != COLUMNS:
        raise UsageError(f"{path}:1: found the columns {', '.join(header) or 'nothing'}; expected {', '.join(COLUMNS)}")
    rows = []
    for cells in reader:
        place = f"{path}:{reader.line_num}"
        if len(cells) != len(COLUMNS):
            raise UsageError(f"{place}: found {len(cells)} cells; expected {len(COLUMNS)}")
        rows.append(_row(dict(zip(COLUMNS, cells, strict=True)), reader.line_num, place))
    return tuple(rows)


def _row(cells: dict[str, str], line: int, place: str) -> Published:
    try:
        gpus, nodes, seq_len = (
            int(float(cells[name])) if cells[name] else None for name in ("gpus", "nodes", "seq_len")
        )
        value = float(cells["value"]) if cells["value"] else None
    except ValueError as error:
        raise UsageError(f"{place}: {error}; expected a number or an empty cell") from error
    if value is None and cells["unit"] != OUT_OF_MEMORY:
        raise UsageError(f"{place}: the value is empty and the unit is {cells['unit']!r}; expected a value, or oom")
    return Published(
        experiment=cells["experiment"], figure=cells["figure"], gpus=gpus, nodes=nodes, gpu_model=cells["gpu_model"],
        model=cells["model"], seq_len=seq_len, method=cells["method"], metric=cells["metric"], value=value,
        text=cells["value"], unit=cells["unit"], source=cells["source"], line=line,
    )  # fmt: skip


def only(rows: Iterable[Published], **wanted: object) -> Published:
    """The one row with these values, such as `method="Burst-Ring", gpus=32`; of equal numbers the first.

    Raises LookupError where there is none, or where rows with these values hold different numbers.
    """
    found = [row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())]
    if len({row.text for row in found}) != 1:
        raise LookupError(f"{len(found)} published rows with {wanted}, of {len({row.text for row in found})} values")
    return found[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedMethod:
    """How the program behind a published method ran attention, and what it kept of it."""

    system: SystemMemory
    schedule: str
    backward: str = "key_value"
    fused_head: bool = False
    tail: float | None = None  # of attention outputs kept, whatever the row says

    @property
    def tuned_links(self) -> bool:
        """The artifact sets NCCL up for its cluster in BurstEngine's own scripts."""
        return self.system is BURST_ENGINE


_RING_OF_MEGATRON = PublishedMethod(system=MEGATRON_LM, schedule="ring", tail=0.0)
_ULYSSES = PublishedMethod(system=MEGATRON_DEEPSPEED, schedule="ulysses", tail=0.0)
_FLAT, _DOUBLE = (PublishedMethod(system=BURST_ENGINE, schedule=name) for name in ("ring", "double_ring"))
_DOUBLE_OF_QUERIES = replace(_DOUBLE, backward="query")
_LOONG, _LOONG_USP, _LOONG_TRANSPOSED = (
    PublishedMethod(system=INTERN_EVO, schedule=name) for name in ("double_ring", "usp", "usp_transposed")
)
# Methods of training by patterns of the source's names in lower case, the first that fits.
_TRAINED = {
    r"megatron-tp": _RING_OF_MEGATRON,
    r"baseline.*sl_loss": replace(_DOUBLE_OF_QUERIES, fused_head=True),  # the ablation adds one switch after another
    r"baseline.*bwd_opt.*double": _DOUBLE_OF_QUERIES,
    r"baseline.*bwd_opt": replace(_FLAT, backward="query"),
    r"baseline.*double": _DOUBLE,
    r"baseline": _FLAT,
    r"loong.*usp": _LOONG_USP,
    r"loong": _LOONG,
    r"^deepspeed|^ds-ulysses|^ulysses$": _ULYSSES,
    r"^megatron": _RING_OF_MEGATRON,
    r"ulysses|usp": PublishedMethod(system=BURST_ENGINE, schedule="usp", backward="query", fused_head=True),
    r"^burst": replace(_DOUBLE_OF_QUERIES, fused_head=True),
}
# The same of attention alone.
_TIMED = {
    r"head-first": _LOONG_USP,
    r"ring-first": _LOONG_TRANSPOSED,
    r"megatron": _RING_OF_MEGATRON,
    r"doublering": _LOONG,
    r"double_ring=false": replace(_FLAT, backward="query"),
    r"": _DOUBLE_OF_QUERIES,
}
# Share of attention outputs kept, by such patterns; where none fits, all of them in `_WHOLE_TAIL` and none elsewhere.
_TAILS = {r"half-ckpt|sl[-_]ckpt": 0.5, r"whole|full-ckpt|^loong-train-cp-ckpt": 1.0, r"w/o sele-ckpt": 0.0}
_WHOLE_TAIL = ("e2e_main", "cp_scaling")
# What a schedule is where nothing lies between nodes: a configuration has its name by what runs.
_WITHIN_A_NODE = {"double_ring": "ring", "usp": "ulysses", "usp_transposed": "ring"}
# Head counts of the attention benchmarks, from results/paper/experiments.yaml.
_BENCH_HEADS = {"kernel_bench": 40, "burstattention_seq_scaling": 32, "burstattention_batch_scaling": 32}

# Settings that a configuration's name is formed from: those there were when the split was decided.
_NAMED_BY = (
    "task", "method", "model", "seq_len", "cp_size", "tp_size", "world_size", "batch_size", "dtype", "mask", "layout",
    "schedule", "backward", "kernel", "exchange", "grad_comm_dtype", "deterministic", "lm_head_fusion", "loss_kernel",
    "z_loss", "checkpoint", "projection_tiles", "mlp_tiles", "optimizer_offload", "sharding", "gradient_accumulation",
    "learning_rate", "data", "emulate_nodes", "steps", "seed",
)  # fmt: skip
_NAMED_BY_CHECKPOINT = ("every", "tail", "offload", "replay", "whole_layers", "mlp")
_NAMED_BY_STEPS = ("warmup", "measured", "warmup_seq_len")
_NAMED_BY_MODEL = (  # the published models have no other feature
    "name", "layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "gated", "qk_norm", "rope_base",
    "norm_eps", "note",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One published set-up as a trial on A800 or A100 GPUs."""

    settings: TrialSettings
    attention: LayerAttention
    system: SystemMemory

    @cached_property
    def name(self) -> str:
        """Ten characters that stand for everything the prediction reads. Settings that came later change none."""
        settings: dict[str, Any] = to_json(replace(self.settings, steps=Steps(), grad_comm_dtype="fp32"))
        settings = {key: settings[key] for key in _NAMED_BY}
        settings["checkpoint"] = {key: settings["checkpoint"][key] for key in _NAMED_BY_CHECKPOINT}
        settings["model"] = {key: settings["model"][key] for key in _NAMED_BY_MODEL}
        settings["steps"] = {key: settings["steps"][key] for key in _NAMED_BY_STEPS}
        exchange = {
            "schedule": self.attention.schedule,
            "backward": self.attention.resolved.backward,
            "gradient_bytes": self.attention.resolved.summed_bytes,
            "tuned_links": self.attention.tuned_links,
            "head_chunks": self.attention.resolved.num_head_chunks,
        }
        text = json.dumps([settings, exchange], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:10]


class _SaysTooLittle(Exception):
    """The source does not say what a prediction needs."""


@cache
def configuration_of(row: Published) -> tuple[Configuration | None, str]:
    """Settings and attention of a row's trial; else None and one sentence why the source says too little."""
    try:
        return (_benchmark(row) if row.experiment in _BENCH_HEADS else _training(row)), ""
    except _SaysTooLittle as reason:
        return None, str(reason)


def configurations(*metrics: str) -> list[tuple[Configuration, list[Published]]]:
    """Each configuration once, with its rows of these metrics."""
    found: dict[str, tuple[Configuration, list[Published]]] = {}
    for row in published_rows():
        configuration, _ = configuration_of(row) if row.metric in metrics else (None, "")
        if configuration is not None:
            found.setdefault(configuration.name, (configuration, []))[1].append(row)
    return list(found.values())


def _training(row: Published) -> Configuration:
    if row.experiment == "sparse":
        raise _SaysTooLittle("window and GPU count are not stated")
    if "unlabelled" in row.experiment or "unlabelled" in row.method:
        raise _SaysTooLittle("the method is not named")
    if "no header; meaning unknown" in row.source:
        raise _SaysTooLittle("the column has no header")
    if row.gpus is None or row.seq_len is None:
        raise _SaysTooLittle("the GPU count is not stated")
    ranks, name = _ranks_of_sequence(row.method, row.gpus), row.method.casefold()
    method = _first(_TRAINED, name)
    if method is None:
        raise _SaysTooLittle("the method is not one of those compared")
    tail = method.tail
    if tail is None:
        tail = _first(_TAILS, name)
    if tail is None:
        tail = 1.0 if row.experiment in _WHOLE_TAIL else 0.0
    split: dict[str, Any] = {"method": "burst", "cp_size": ranks, "layout": "zigzag"}
    if "megatron-tp" in name:
        split = {"method": "megatron_tp", "tp_size": ranks}
    settings = TrialSettings(
        task="train",
        model=_model(row.model),
        seq_len=row.seq_len,
        world_size=row.gpus,
        lm_head_fusion=method.fused_head,
        checkpoint=Checkpoint(every=1, tail=tail),
        optimizer_offload="[offload]" in name,
        **split,
    )
    return _configuration(settings, method)


def _benchmark(row: Published) -> Configuration:
    """A row of an attention benchmark."""
    assert row.gpus is not None, row
    assert row.seq_len is not None, row
    heads, name = _BENCH_HEADS[row.experiment], row.method.casefold()
    causal = row.experiment == "kernel_bench"
    batch = re.search(r"batch[ =](\d+)", f"{row.figure} {row.source} {row.method}")
    if row.experiment == "burstattention_batch_scaling" and batch is None:
        raise _SaysTooLittle("the batch is not stated in the row")
    settings = TrialSettings(
        task="attention",
        method="burst",
        model=replace(_model("14b"), name=f"attention_{heads}", heads=heads, kv_heads=heads, hidden=heads * 128),
        seq_len=row.seq_len,
        cp_size=row.gpus,
        batch_size=int(batch.group(1)) if batch else 1,
        mask="causal" if causal else "full",
        layout="striped" if "striped" in name else "zigzag" if causal else "contiguous",
    )
    method = _first(_TIMED, name)
    assert method is not None, "the last pattern fits every name"
    return _configuration(settings, method)


def _configuration(settings: TrialSettings, method: PublishedMethod) -> Configuration:
    """Ranks that send gradients in bf16, all on one node where it has as many GPUs; those of tensor parallelism attend
    alone, each with its own heads."""
    schedule = method.schedule
    if settings.cp_size <= GPUS_PER_NODE:
        schedule = _WITHIN_A_NODE.get(schedule, schedule)
    problem = attention_problem(settings, context_ranks_of_node(settings, GPUS_PER_NODE))
    if schedule == "ulysses":  # DeepSpeed also divides heads unevenly; each rank counts as the fullest
        heads = -(-problem.heads // settings.cp_size) * settings.cp_size
        problem = replace(problem, heads=heads, kv_heads=heads * problem.kv_heads // problem.heads)
    choices = Choices(schedule=schedule, backward=method.backward, grad_comm_dtype="input", num_head_chunks=1)
    attention = LayerAttention(
        resolved=resolve(problem, HardwareModel(), choices),
        tuned_links=method.tuned_links,
        tensor_parallel=is_tensor_parallel(settings),
    )
    return Configuration(settings=settings, attention=attention, system=method.system)


def _first(by_pattern: Mapping[str, T], name: str) -> T | None:
    """The value of the first pattern that a name contains."""
    return next((value for pattern, value in by_pattern.items() if re.search(pattern, name)), None)


def _ranks_of_sequence(words: str, gpus: int) -> int:
    """Ranks among which a sequence, or the matrices, are divided."""
    if said := re.search(r"\[sp=(\d+)\]", words):
        return int(said.group(1))
    if "sp unstated" in words:
        raise _SaysTooLittle("the context-parallel size is not stated")
    return gpus


@cache
def _model(name: str) -> ModelShape:
    path = MODELS_DIR / f"{name}.yaml"
    if not path.exists():
        raise _SaysTooLittle(f"the shape of {name} is not among experiments/models")
    return load_model(path)
