"""The settings of one trial: parallel sizes, and every switch that changes the work.

These values are pure data (no torch here), are sent to the workers as JSON, and become one results column each, so
that two rows with different settings never look alike.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from engine.lora import Lora, adapter_parameters
from engine.reader import from_json as from_json
from engine.reader import to_json as to_json
from engine.shape import EMBEDDING, MAX_TOKENS, ModelShape

Task = Literal["train", "attention", "lm_head", "linear"]
Dtype = Literal["fp64", "fp32", "bf16"]
LinearDtype = Literal["same", "float8"]
Layout = Literal["auto", "contiguous", "zigzag", "striped", "split_zigzag", "balanced"]
Schedule = Literal["auto", "ring", "double_ring", "all_gather", "ulysses", "usp", "usp_transposed"]
Backward = Literal["auto", "query", "key_value"]
Kernel = Literal["auto", "reference", "cpu", "fa2", "cudnn", "fa4", "flex"]
ExchangeName = Literal["auto", "relay", "direct", "copy_engine"]
GradCommDtype = Literal["auto", "fp32", "input_across", "input_after_first", "input"]
LossKernel = Literal["own", "liger", "cce"]
Offload = Literal["none", "inputs", "all"]
Replay = Literal["hold", "bisect"]
CheckpointPlan = Literal["hand", "auto"]
Sharding = Literal["full", "hybrid"]
CudaGraph = Literal["auto", "step", "none"]
OptimizerStates = Literal["8bit"]
PackingRule = Literal["best_fit", "greedy"]
LongerDocuments = Literal["split", "drop"]
SettingsFrom = Literal["equal", "as_published", "tuned"]

# The widest head dim of each kernel for GPUs; these take multiples of 8.
MAX_HEAD_DIM: dict[str, int] = {"fa4": 256, "cudnn": 128, "fa2": 256, "flex": 256}
WIDEST_HEAD_DIM = max(MAX_HEAD_DIM.values())  # that any of them takes

BYTES_OF: dict[Dtype, int] = {"fp64": 8, "fp32": 4, "bf16": 2}  # of one element

# Of moments that are copied from host memory and back: pieces long enough that a copy runs at the link's speed, and as
# many buffers as the link fills while an update waits for a kernel of the forward, which may hold all multiprocessors
# until it ends: 5 ms for a matrix product of 8B on 32K tokens (docs/notes/2026-11-28-updates-beside-the-forward.md).
PIECE_ELEMENTS, BUFFERS = 1 << 23, 8
STATES_BLOCK = 256  # consecutive elements of a moment that share a scale where `optimizer_states` is 8bit

DOCUMENTS = "documents"  # the mask whose documents each batch brings

MAX_STEPS = 1_000_000  # of a kind in a trial: more are a mistake, and such a run would not end
SETTLED_WITHIN = 0.01  # by which two steps may differ that end a warm-up

BYTE_VOCABULARY = 256  # ids of byte-level tokens: what a text file is read as

BYTES_OF_UNIT = {"MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}  # that a size may be written in

# Settings of a trial that count something.
COUNTS = (
    "seq_len",
    "cp_size",
    "tp_size",
    "world_size",
    "batch_size",
    "emulate_nodes",
    "projection_tiles",
    "mlp_tiles",
    "head_groups",
    "gradient_accumulation",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWSettings:
    """The optimizer apart from the learning rate: AdamW (arXiv:1711.05101). The defaults are those of the timed task,
    and common for language models."""

    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1  # of matrices; norms are not decayed
    max_grad_norm: float = 1.0  # gradients are scaled down to this global norm

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name} is {getattr(self, name):g}; give a number from 0 to below 1")
        if self.weight_decay < 0:
            raise ValueError(f"optimizer.weight_decay is {self.weight_decay:g}; give 0 or more")
        for name in ("epsilon", "max_grad_norm"):
            if getattr(self, name) <= 0:
                raise ValueError(f"optimizer.{name} is {getattr(self, name):g}; give a number above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """Activation checkpointing: what is kept of a layer for the backward pass.

    `every: 0` computes no layer again. Otherwise each layer is, but for the last `whole_layers`, and of the layers'
    inputs only every k-th is kept; the others follow from it and the kept attention outputs.

    Of a layer that is not computed again, backward gets its input, q, k, v, attention's output, the MLP's input, and
    for the fraction `mlp` of the tokens the products of the MLP's first matrices; the others' products are repeated.

    `tail` is the fraction of the global sequence, counted from its end, whose attention outputs are kept through
    recomputation (1: attention is never computed twice, 0: always).

    `offload` moves what is kept to host memory: nothing, the layers' inputs, or attention outputs as well. Of the
    layers that are not computed again, `host_layers` have all that backward gets of them there.

    `replay` is how the inputs that are not kept follow: `hold` runs a group of k layers once and holds them all, with
    attention's outputs; `bisect` holds ceil(log2 k) of them at once and no outputs, and runs layers again more often.

    `plan` says who chooses the others: `hand`, or `auto`, the planner (`engine.checkpoint.planning`), which leaves the
    values that a user gave as they are. `TrialSettings.planned` names those it chooses.

    `upstream` is for a compared system alone, in the words of its adapter: what it recomputes or moves in a way that
    none of the others says, mostly in place of `every` and `tail`, or `default`.
    """

    every: int = 1
    tail: float = 1.0
    offload: Offload = "none"
    replay: Replay = "hold"
    whole_layers: int = 0
    mlp: float = 1.0
    plan: CheckpointPlan = "hand"
    upstream: str = "default"
    host_layers: int = 0

    def reuses_attention(self, layers: int) -> bool:
        """Whether one of `layers` layers is computed again and then takes outputs of attention that were kept: the
        tail's, or with `replay: hold` those of its group."""
        kept = self.tail > 0 or (self.every > 1 and self.replay == "hold")
        return kept and self.layers_again(layers) > 0

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(
                f"checkpoint.every is {self.every}; expected 0 (keep all activations), 1 (every layer), ..."
            )
        if not 0.0 <= self.tail <= 1.0:
            raise ValueError(
                f"checkpoint.tail is {self.tail}; expected a fraction from 0 (recompute attention) to 1 "
                "(keep attention outputs)"
            )
        if self.whole_layers < 0:
            raise ValueError(
                f"checkpoint.whole_layers is {self.whole_layers}; expected 0, or a number of layers that are not "
                "computed again"
            )
        if self.host_layers < 0:
            raise ValueError(
                f"checkpoint.host_layers is {self.host_layers}; expected 0, or a number of layers, of those that are "
                "not computed again, whose saved tensors are in host memory"
            )
        if not 0.0 <= self.mlp <= 1.0:
            raise ValueError(
                f"checkpoint.mlp is {self.mlp}; expected a fraction from 0 (repeat the MLP's first products) to 1 "
                "(keep them)"
            )

    def layers_again(self, layers: int) -> int:
        """Layers, of `layers`, that backward computes again: the first ones."""
        return max(0, layers - self.whole_layers) if self.every else 0

    def hosted(self, layers: int) -> tuple[int, ...]:
        """The layers, of `layers` and counted from 0, that are kept whole in host memory: evenly among those that are
        not computed again, so that the layers between them hide copies too. Never the last one, with which backward
        begins."""
        again = self.layers_again(layers)
        return _spread(min(self.host_layers, layers - again - 1), again, layers - 1)

    def settled(self, layers: int) -> int:
        """The layer after whose forward the last of these has to be in host memory: its copy has had the time of as
        many layers as lie between two of them."""
        hosted = self.hosted(layers)
        return min(layers - 1, hosted[-1] + (layers - self.layers_again(layers) - 1) // len(hosted))


@cache
def _spread(count: int, first: int, end: int) -> tuple[int, ...]:
    """So many places from `first` to before `end`, evenly."""
    return tuple(first + index * (end - first) // count for index in range(count))


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """How many optimizer steps (task train) or calls (other tasks) are run, and how many of them are timed.

    `settle` are further steps, so that all trials of an experiment do the same work: those measured are the first ones
    that come after two steps in a row which took the same time within 1%.

    Where a step takes minutes, `warmup_seq_len` warms up on shorter sequences: kernels are compiled, connections
    opened and optimizer states made all the same. Before the first measured step, host memory for a step of full length
    is locked, and one linear layer runs forward and backward at full length, where the model has such layers: the
    kernels of their library tune themselves for each length. The measured steps compute the same without it.
    """

    warmup: int = 1
    settle: int = 0  # the most steps beyond those that may pass until two agree; 0: measured are all after the warm-up
    measured: int = 3
    warmup_seq_len: int = 0  # tokens of a sequence of the warm-up steps of task train; 0: those of the trial

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise ValueError(f"steps.warmup is {self.warmup}; expected 0 or more")
        if self.settle < 0:
            raise ValueError(f"steps.settle is {self.settle}; expected 0 or more")
        full = 0 if self.warmup_seq_len else self.warmup  # warm-up steps of full length
        if self.settle and full + self.settle < 2:
            raise ValueError(
                f"steps.settle is {self.settle}, which leaves fewer than two steps of full length before those "
                f"measured, and two are compared; give at least {2 - full}"
            )
        if self.measured < 1:
            raise ValueError(f"steps.measured is {self.measured}; expected 1 or more")
        for name in ("warmup", "settle", "measured"):
            if (count := getattr(self, name)) > MAX_STEPS:
                raise ValueError(f"steps.{name} is {count}; expected at most {MAX_STEPS}; give fewer")
        if self.warmup_seq_len < 0:
            raise ValueError(f"steps.warmup_seq_len is {self.warmup_seq_len}; expected 0 or a number of tokens")

    @property
    def total(self) -> int:
        """Steps that are run."""
        return self.warmup + self.after_warmup

    @property
    def after_warmup(self) -> int:
        """Of them those after the warm-up steps, the measured ones among them."""
        return self.settle + self.measured

    def settled(self, seconds: Sequence[float]) -> int | None:
        """Of all steps, whose times these are, the first one after two that agree, where it may be the first measured
        one; None where no two agree in time. Steps of another length do not count."""
        first = self.warmup if self.warmup_seq_len else 0
        for index in range(max(self.warmup, first + 2), self.warmup + self.settle + 1):
            if abs(seconds[index - 1] - seconds[index - 2]) <= SETTLED_WITHIN * seconds[index - 2]:
                return index
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialSettings:
    """Everything that decides what one trial computes. Equal settings mean the same trial."""

    task: Task
    method: str
    model: ModelShape
    seq_len: int  # tokens of one whole sequence
    cp_size: int = 1
    tp_size: int = 1
    world_size: int = 0  # ranks; 0 means cp_size x tp_size
    batch_size: int = 1  # sequences per data-parallel replica
    dtype: Dtype = "bf16"
    linear_dtype: LinearDtype = "same"  # of the products of layers with their matrices; same: `dtype`
    mask: str = "causal"  # full, causal, sliding_window:LEFT[:RIGHT], documents
    packing: PackingRule = "best_fit"  # of documents into rows of `seq_len` tokens, where `mask` is documents
    longer_documents: LongerDocuments = "split"  # what becomes of those that no row holds
    layout: Layout = "auto"
    schedule: Schedule = "auto"
    backward: Backward = "auto"
    kernel: Kernel = "auto"
    exchange: ExchangeName = "auto"
    grad_comm_dtype: GradCommDtype = "auto"  # dtype of partial gradients between ranks; auto: as the method's original
    deterministic: bool = False
    lm_head_fusion: bool = True
    loss_kernel: LossKernel = "own"  # the fused loss of the engine, or of a library
    z_loss: float = 0.0  # weight of the squared log-partition added to each token's loss
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    projection_tiles: int = 1  # runs of tokens that queries, keys and values are formed in, one after another
    mlp_tiles: int = 1  # runs of tokens the MLP is computed in, one after another
    # Groups of heads that attention's backward forms queries, keys and values of, one after another, in a layer that is
    # computed again.
    head_groups: int = 1
    head_tiles: int = 0  # runs of tokens that the fused LM head's logits are formed in; 0: by their size
    # Optimizer states live in host memory: all of them, or those of this fraction of the parameters.
    optimizer_offload: bool | float = False
    # Gradients of parameters whose states are in host memory go there too, each when backward has formed it.
    gradient_offload: bool = False
    # AdamW's moments as 8 bits per element and a scale per block; None: in the dtype of the parameters.
    optimizer_states: OptimizerStates | None = None
    memory: str = ""  # of one GPU for this trial, such as 80GiB; empty: all that it has
    host_memory: str = ""  # of the host that one rank may take, such as 64GiB; empty: most of its share
    planned: str = ""  # dotted names, with a space between, of the settings that the planner chooses; no user gives it
    sharding: Sharding = "full"  # parameters over all ranks, or over the ranks of a node and repeated on every node
    cuda_graph: CudaGraph = "auto"  # whether CUDA graphs replay a `step` of training (one GPU)
    gradient_accumulation: int = 1  # micro-batches of `batch_size` sequences per optimizer step
    learning_rate: float = 3e-4
    lora: Lora | None = None  # adapters of these matrices are trained and all else is frozen; None: all is trained
    data: str = "python_docs"  # or the path of a UTF-8 text file
    emulate_nodes: int = 1  # logical nodes one host is split into
    settings: SettingsFrom = "equal"  # where values that an experiment leaves open came from: defaults, or a table
    steps: Steps = field(default_factory=Steps)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.world_size == 0:
            object.__setattr__(self, "world_size", self.cp_size * self.tp_size)
        for name in COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give a number of at least 1")
        if self.head_tiles < 0:
            raise ValueError(
                f"head_tiles is {self.head_tiles}; give a number of tiles, or 0 for the LM head's own choice"
            )
        if self.seq_len * self.batch_size > MAX_TOKENS:
            raise ValueError(
                f"seq_len {self.seq_len} x batch_size {self.batch_size} is more than {MAX_TOKENS} tokens; give fewer"
            )
        if not 0 <= self.optimizer_offload <= 1:
            raise ValueError(
                f"optimizer_offload is {self.optimizer_offload}; give true, false, or the fraction of the parameters "
                "whose states are in host memory, such as 0.4"
            )
        if self.optimizer_offload in (0, 1):  # one way to say all, and one to say none
            object.__setattr__(self, "optimizer_offload", bool(self.optimizer_offload))
        if not 0 <= self.z_loss < 1:
            raise ValueError(f"z_loss is {self.z_loss}; give a weight of at least 0 and below 1, such as 1e-4")
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate is {self.learning_rate}; give a number above 0")
        for name in ("memory", "host_memory"):
            if size := getattr(self, name):
                size_in_bytes(size, name)
        if self.packs:
            self._check_packing()
        if self.task == "train" and any(self.model.windowed):
            self._check_mask_of_windows()

    def _check_packing(self) -> None:
        if self.task != "train":
            raise ValueError(
                f"mask documents takes the lengths of packed text, which task {self.task} has none of; write them, "
                "such as documents:4k,1k,..."
            )
        if self.steps.settle:
            raise ValueError(
                f"steps.settle is {self.steps.settle}, but with mask documents each step has other documents, and no "
                "two need take the same time; leave steps.settle out"
            )
        if self.steps.warmup and self.steps.warmup_seq_len not in (0, self.seq_len):
            raise ValueError(
                f"steps.warmup_seq_len is {self.steps.warmup_seq_len}, but mask documents packs rows of one length; "
                "set it to 0"
            )

    def _check_mask_of_windows(self) -> None:
        model = self.model
        if self.mask != "causal" and not self.packs and (self.mask != model.window_mask or not all(model.windowed)):
            raise ValueError(
                f"mask is {self.mask}, but model {model.name} has a window of {model.window} tokens in "
                f"{sum(model.windowed)} of {model.layers} layers; set mask to causal, "
                "which each of them cuts to its window"
            )

    @property
    def trained_parameters(self) -> int:
        """Parameters with a gradient, a master weight and moments: all of the model's, or those of the adapters."""
        if self.lora is None:
            return self.model.parameters
        return self.model.layers * adapter_parameters(self.model, self.lora)

    @property
    def plain_mlp(self) -> bool:
        """Whether the MLP has a hand-written backward; one with frozen matrices is differentiated by autograd."""
        return self.lora is None and self.model.plain_mlp

    @property
    def packs(self) -> bool:
        """Whether sequences are rows of packed documents, whose lengths are the mask."""
        return self.mask == DOCUMENTS

    @property
    def host_bytes(self) -> float:
        """What `host_memory` lets a rank take of its host; infinite where it is not set."""
        return size_in_bytes(self.host_memory, "host_memory") if self.host_memory else math.inf

    @property
    def row_tokens(self) -> int:
        """Tokens that the ranks of a replica divide among them as one sequence. Packed rows of a micro-batch are one,
        padded to a length that every layout divides."""
        if not self.packs:
            return self.seq_len
        unit = 2 * self.cp_size * self.tp_size
        return -(-self.seq_len * self.batch_size // unit) * unit

    @property
    def layer_masks(self) -> tuple[str, ...]:
        """Of each layer with attention its mask: `mask`, or in training that of the layer's window."""
        inside = self.model.window_mask if self.task == "train" else self.mask
        if self.packs:
            inside = f"{DOCUMENTS}:left-{self.model.window - 1}"
        layers = zip(self.model.windowed, self.model.linear_layers, strict=True)
        return tuple(inside if within else self.mask for within, linear in layers if not linear)

    @property
    def masks(self) -> tuple[str, ...]:
        """The different `layer_masks`. The first is that of layers without a window, or of all: the layout is made for
        it."""
        return tuple(sorted(set(self.layer_masks), key=self.mask.__ne__))

    @property
    def dp_size(self) -> int:
        """Data-parallel replicas: world_size / (cp_size x tp_size); the plan refuses sizes that do not divide."""
        return max(1, self.world_size // (self.cp_size * self.tp_size))


def size_in_bytes(text: str, name: str) -> int:
    """Bytes of a size such as `80GiB` or `1.5 TiB`. Raises ValueError, naming the setting, for any other text."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?) ?([A-Za-z]+)", text)
    if found is None or found[2] not in BYTES_OF_UNIT or not float(found[1]):
        raise ValueError(
            f"{name} is {text[:40]!r}; give a size above 0 with its unit ({', '.join(BYTES_OF_UNIT)}), such as 80GiB"
        )
    return int(float(found[1]) * BYTES_OF_UNIT[found[2]])


def keeps_whole(settings: TrialSettings, *, optimizer_offload: bool | float | None = None) -> bool:
    """Whether a rank keeps the whole parameters, and their copies in the dtype of the computation, from step to step.

    A rank does so if it is the only one and all of the optimizer's states are on its GPU. States are on the host where
    memory is short, and the copies take 2 bytes per parameter. `optimizer_offload`, if given, replaces the setting.
    """
    return settings.world_size == 1 and not (
        settings.optimizer_offload if optimizer_offload is None else optimizer_offload
    )


def has_moments_in_8_bits(name: str, size: Sequence[int]) -> bool:
    """Whether a parameter can have them: a matrix whose rows are whole blocks, but not the embedding, whose tokens are
    of very different frequency. The library's `StableEmbedding` (arXiv:2110.02861) and transformers' Trainer keep its
    moments in fp32 too."""
    return name != EMBEDDING and len(size) > 1 and size[-1] % STATES_BLOCK == 0


@cache
def share_in_8_bits(model: ModelShape) -> float:
    """Of all parameters, those whose moments can have 8 bits."""
    sizes = model.parameter_sizes().items()
    return sum(math.prod(size) for name, size in sizes if has_moments_in_8_bits(name, size)) / model.parameters


def places_hosted(sizes: Sequence[int], fraction: float) -> frozenset[int]:
    """Which parameters of these sizes have their moments in host memory: places that hold this fraction of all
    elements, the last ones but for those that would exceed it, and the smallest of the others where this is nearer to
    it. The next forward needs the last ones last."""
    room = fraction * sum(sizes)
    found: set[int] = set()
    for place in reversed(range(len(sizes))):
        if sizes[place] <= room:
            found.add(place)
            room -= sizes[place]
    others = [place for place in reversed(range(len(sizes))) if place not in found]
    smallest = min(others, key=sizes.__getitem__, default=None)
    if smallest is not None and sizes[smallest] - room < room:
        found.add(smallest)
    return frozenset(found)


def hosted_fraction(settings: TrialSettings, offload: bool | float) -> float:
    """Of all elements, those whose moments are in host memory where `optimizer_offload` is `offload`: it counts whole
    parameters. Adapters are small, and counted as asked."""
    return float(offload) if settings.lora is not None else _hosted_fraction(settings.model, float(offload))


def late_fraction(settings: TrialSettings, offload: bool | float) -> float:
    """Of all elements, those whose updates run beside the next forward: those of `hosted_fraction`, but none with
    moments in 8 bits, which are waited for."""
    return hosted_fraction(settings, offload) if settings.optimizer_states is None else 0.0


@cache
def _hosted_fraction(model: ModelShape, fraction: float) -> float:
    sizes = model.parameter_sizes()
    return sum(math.prod(sizes[name]) for name in _hosted_names(model, fraction)) / sum(map(math.prod, sizes.values()))


@cache
def _hosted_names(model: ModelShape, fraction: float) -> frozenset[str]:
    """The parameters of `places_hosted`."""
    ordered = sorted(model.parameter_sizes().items(), key=lambda named: len(named[1]) < 2)  # as the optimizer has them
    places = places_hosted([math.prod(size) for _, size in ordered], fraction)
    return frozenset(ordered[place][0] for place in places)


def parts_hosted(settings: TrialSettings, offload: bool | float) -> tuple[tuple[int, ...], bool]:
    """The layers, counted from 0, that have a matrix with moments in host memory where `optimizer_offload` is
    `offload`, and whether the LM head has: all gradients of such a part wait for its update (`engine.memory.moments`).
    Adapters are small, and counted as if all were there."""
    if settings.lora is not None:
        return tuple(range(settings.model.layers)), False
    return _parts_hosted(settings.model, float(offload))


@cache
def _parts_hosted(model: ModelShape, fraction: float) -> tuple[tuple[int, ...], bool]:
    sizes = model.parameter_sizes()
    matrices = [name.split(".") for name in _hosted_names(model, fraction) if len(sizes[name]) > 1]
    return tuple(sorted({int(parts[1]) for parts in matrices if parts[0] == "blocks"})), ["head", "weight"] in matrices
