"""The settings of one trial: model shape, parallel sizes, and every switch that changes the work.

These values are pure data (no torch here), are sent to the workers as JSON, and become one results column each, so
that two rows with different settings never look alike.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from engine.plain_json import from_json as from_json
from engine.plain_json import to_json as to_json

Task = Literal["train", "attention", "lm_head"]
Dtype = Literal["fp64", "fp32", "bf16"]
Layout = Literal["auto", "contiguous", "zigzag", "striped", "split_zigzag"]
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
Parameters = Literal["auto", "kept", "gathered"]
CudaGraph = Literal["auto", "step", "none"]
SettingsFrom = Literal["equal", "as_published", "tuned"]

BYTES_OF: dict[Dtype, int] = {"fp64": 8, "fp32": 4, "bf16": 2}  # of one element

BYTE_VOCABULARY = 256  # ids of byte-level tokens: what a text file is read as

# Beyond any machine; sizes past them would overflow in the middle of a trial instead of being refused at its start.
MAX_TOKENS = 1 << 40
LARGEST_DIMENSION = 1 << 28

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
    "gather_ahead",
    "gradient_accumulation",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Shape of a Llama-style decoder. Source of the published shapes: thunlp/BurstEngine, apps/llama/config."""

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int  # query heads
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool = True  # SwiGLU (three matrices) rather than GELU (two)
    qk_norm: bool = False  # RMS norm of every head's queries and keys before RoPE, as in Qwen3
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    note: str = field(default="", compare=False)  # where sources disagree; words, no part of what is computed

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab"):
            if not 1 <= getattr(self, name) <= LARGEST_DIMENSION:
                raise ValueError(
                    f"model {self.name}: {name} is {getattr(self, name)}; give a number from 1 to {LARGEST_DIMENSION}"
                )
        for name in ("rope_base", "norm_eps"):
            if getattr(self, name) <= 0:
                raise ValueError(f"model {self.name}: {name} is {getattr(self, name):g}; give a number above 0")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model {self.name}: {self.heads} query heads are not divisible by {self.kv_heads} KV heads; "
                "choose kv_heads that divides heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"model {self.name}: head_dim {self.head_dim} is odd; RoPE needs an even head_dim")

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer: attention projections, MLP, norms."""
        output = self.hidden * self.heads * self.head_dim
        return self.projection_parameters + output + self.mlp_parameters + self.layer_norm_parameters

    @property
    def projection_parameters(self) -> int:
        """Of the projections of one layer to queries, keys and values."""
        return self.hidden * (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def mlp_parameters(self) -> int:
        """Of one layer's MLP."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def layer_norm_parameters(self) -> int:
        """Weights of one layer's norms: one over the hidden states before each half, and of each head's q and k."""
        return 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def parameters(self) -> int:
        """All trainable parameters; embedding and LM head are untied."""
        return self.layers * self.layer_parameters + 2 * self.vocab * self.hidden + self.hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """Activation checkpointing: what is kept of a layer for the backward pass.

    `every: 0` computes no layer again. Otherwise each layer is, but for the last `whole_layers`, and of the layers'
    inputs only every k-th is kept; the others follow from it and the kept attention outputs.

    Of a layer that is not computed again, backward gets its input, q, k, v, attention's output, the MLP's input, and
    for the fraction `mlp` of the tokens the products of the MLP's first matrices; the others' products are repeated.

    `tail` is the fraction of the global sequence, counted from its end, whose attention outputs are kept through
    recomputation (1: attention is never computed twice, 0: always).

    `offload` moves what is kept to host memory: nothing, the layers' inputs, or attention outputs as well.

    `replay` is how the inputs that are not kept follow: `hold` runs a group of k layers once and holds them all, with
    attention's outputs; `bisect` holds ceil(log2 k) of them at once and no outputs, and runs layers again more often.

    `plan` says who chooses the others: `hand`, or `auto`, the planner (`engine.checkpoint.planning`), which leaves the
    values that a user gave as they are. `TrialSettings.planned` names those it chooses.
    """

    every: int = 1
    tail: float = 1.0
    offload: Offload = "none"
    replay: Replay = "hold"
    whole_layers: int = 0
    mlp: float = 1.0
    plan: CheckpointPlan = "hand"

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
        if not 0.0 <= self.mlp <= 1.0:
            raise ValueError(
                f"checkpoint.mlp is {self.mlp}; expected a fraction from 0 (repeat the MLP's first products) to 1 "
                "(keep them)"
            )

    def layers_again(self, layers: int) -> int:
        """Layers, of `layers`, that backward computes again: the first ones."""
        return max(0, layers - self.whole_layers) if self.every else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """How many optimizer steps (task train) or calls (other tasks) are run, and how many of them are timed.

    Where a step takes minutes, `warmup_seq_len` warms up on shorter sequences: kernels are compiled, connections
    opened, optimizer states made, and host memory for a step of full length locked, all the same.
    """

    warmup: int = 1
    measured: int = 3
    warmup_seq_len: int = 0  # tokens of a sequence of the warm-up steps of task train; 0: those of the trial

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise ValueError(f"steps.warmup is {self.warmup}; expected 0 or more")
        if self.measured < 1:
            raise ValueError(f"steps.measured is {self.measured}; expected 1 or more")
        if self.warmup_seq_len < 0:
            raise ValueError(f"steps.warmup_seq_len is {self.warmup_seq_len}; expected 0 or a number of tokens")


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
    mask: str = "causal"  # full, causal, sliding_window:LEFT[:RIGHT]
    layout: Layout = "auto"
    schedule: Schedule = "auto"
    backward: Backward = "auto"
    kernel: Kernel = "auto"
    exchange: ExchangeName = "auto"
    grad_comm_dtype: GradCommDtype = "auto"  # dtype of partial gradients between ranks; auto: as the method's original
    repeat_kv_heads: bool = True  # method ulysses: K and V heads fewer than ranks are repeated, else refused
    overlap_projections: bool = False  # method ulysses: q's all-to-all runs beside k's projection, k's beside v's
    deterministic: bool = False
    lm_head_fusion: bool = True
    loss_kernel: LossKernel = "own"  # the fused loss of the engine, or of a library
    z_loss: float = 0.0  # weight of the squared log-partition added to each token's loss
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    projection_tiles: int = 1  # runs of tokens that queries, keys and values are formed in, one after another
    mlp_tiles: int = 1  # runs of tokens the MLP is computed in, one after another
    head_tiles: int = 0  # runs of tokens that the fused LM head's logits are formed in; 0: by their size
    gather_ahead: int = 1  # layers whose parameters are gathered before the one that computes is done
    optimizer_offload: bool = False  # optimizer states live in host memory
    memory: str = ""  # of one GPU for this trial, such as 80GiB; empty: all that it has
    planned: str = ""  # dotted names, with a space between, of the settings that the planner chooses; no user gives it
    sharding: Sharding = "full"  # parameters over all ranks, or over the ranks of a node and repeated on every node
    parameters: Parameters = "auto"  # one rank alone: kept whole with copies in `dtype`, or gathered by FSDP2
    cuda_graph: CudaGraph = "auto"  # whether CUDA graphs replay a `step` of training (one GPU)
    gradient_accumulation: int = 1  # micro-batches of `batch_size` sequences per optimizer step
    learning_rate: float = 3e-4
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
        if self.parameters == "kept" and self.world_size > 1:
            raise ValueError(
                f"parameters is kept, but {self.world_size} ranks share them; give auto, or gathered, on several ranks"
            )
        if not 0 <= self.z_loss < 1:
            raise ValueError(f"z_loss is {self.z_loss}; give a weight of at least 0 and below 1, such as 1e-4")
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate is {self.learning_rate}; give a number above 0")
        if self.memory:
            size_in_bytes(self.memory, "memory")

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


def keeps_whole(settings: TrialSettings, *, optimizer_offload: bool | None = None) -> bool:
    """Whether a rank keeps the whole parameters, and their copies in the dtype of the computation, from step to step.

    Only where no other rank holds a part of them. `auto` says no where the optimizer's states are on the host, which
    is asked for where memory is short: the copies take 2 bytes per parameter. `optimizer_offload` stands for the
    setting where it is given.
    """
    if settings.world_size > 1 or settings.parameters == "gathered":
        return False
    offload = settings.optimizer_offload if optimizer_offload is None else optimizer_offload
    return settings.parameters == "kept" or not offload


def vocabulary_unsupported_reason(settings: TrialSettings, needed: int) -> str | None:
    """Why the model cannot be trained on tokens whose ids go up to `needed` - 1, or None."""
    if settings.task != "train" or settings.model.vocab >= needed:
        return None
    return (
        f"model {settings.model.name} has a vocabulary of {settings.model.vocab}, but the tokens of {settings.data} "
        f"need {needed}; choose a model with at least that many"
    )
