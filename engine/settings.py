"""The settings of one trial: model shape, parallel sizes, and every switch that changes the work.

These values are pure data (no torch here), are sent to the workers as JSON, and become one results column each, so
that two rows with different settings never look alike.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal

from engine.lora import Lora, adapter_parameters
from engine.reader import from_json as from_json
from engine.reader import to_json as to_json
from engine.rope import RopeScaling, parse_rope

Task = Literal["train", "attention", "lm_head"]
Dtype = Literal["fp64", "fp32", "bf16"]
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
PackingRule = Literal["best_fit", "greedy"]
LongerDocuments = Literal["split", "drop"]
Norms = Literal["before", "after", "both"]
Activation = Literal["auto", "silu", "gelu", "gelu_tanh", "clamped_silu"]
LinearKind = Literal["none", "gated_delta_net", "mamba2"]
SettingsFrom = Literal["equal", "as_published", "tuned"]

BYTES_OF: dict[Dtype, int] = {"fp64": 8, "fp32": 4, "bf16": 2}  # of one element

DOCUMENTS = "documents"  # the mask whose documents each batch brings

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
    "gradient_accumulation",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A decoder: its sizes, and the features in which architectures differ (`engine/models`).

    Memory, FLOPs and time follow from these alone. Shape letters: B batch, S sequence, E hidden, F ffn, N heads,
    K kv_heads, D head_dim, V vocab. Source of the paper's shapes: thunlp/BurstEngine, apps/llama/config.
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int  # query heads
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool = True  # the MLP has a gate (three matrices) rather than two matrices
    qk_norm: bool = False  # RMS norm of queries and keys before RoPE
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    note: str = field(default="", compare=False)  # where sources disagree; words, no part of what is computed
    architecture: str = "llama"  # module of `engine/models`: names of weights and keys of config.json
    tied: bool = False  # the LM head is the embedding
    qkv_bias: bool = False
    output_bias: bool = False  # of the matrix after attention
    mlp_bias: bool = False  # of all matrices of the MLP
    qk_norm_whole: bool = False  # the norm of q and k is one over all heads rather than one of each head
    norms: Norms = "before"  # RMS norms of a layer's halves: of their inputs, of their results, or of both
    activation: Activation = "auto"  # of the MLP; auto: silu of a gated one, gelu of another
    window: int = 0  # tokens that a query of a layer with a window sees, itself among them; 0: no layer has one
    layer_pattern: str = "w"  # one letter a layer, repeated: w with the window, f without, l linear
    rope_base_window: float = 0.0  # RoPE's base in layers with a window, where it is never scaled; 0: as in the others
    rope_scaling: str = "none"  # of RoPE's frequencies (`engine.rope`)
    embedding_scale: float = 1.0  # of the embedding's output
    attention_scale: float = 0.0  # of the scores; 0: 1 / sqrt(head_dim)
    sinks: bool = False  # each head has one more logit in its softmax, a parameter, and no value for it
    activation_alpha: float = 1.702  # of clamped_silu: gate * sigmoid(alpha * gate) * (up + 1)
    activation_limit: float = 7.0  # likewise: gate is clamped from above, and up on both sides
    kv_latent: int = 0  # numbers of a token that K and V of all heads are formed from (latent attention); 0: none
    q_latent: int = 0  # with kv_latent: likewise of queries; 0: they are formed from the hidden state
    rope_dim: int = 0  # with kv_latent: dims of a head that are rotated, its last ones; all heads share those of K
    value_dim: int = 0  # with kv_latent: of a head's V and output; 0: head_dim
    rope_interleaved: bool = False  # with kv_latent: rotated dims are pairs of neighbours, not halves
    attention_gate: bool = False  # attention's output is multiplied by the sigmoid of a gate from the same input
    linear: LinearKind = "none"  # the mixer of linear layers (`engine.linear`)
    linear_heads: int = 0  # of them: value heads
    linear_key_heads: int = 0  # heads of their queries and keys; groups of Mamba-2
    linear_key_dim: int = 0  # of a key: the state of a value head is linear_key_dim x linear_value_dim
    linear_value_dim: int = 0
    linear_conv: int = 4  # taps of their short convolution

    RENAMED: ClassVar[Mapping[str, str]] = {"window_pattern": "layer_pattern"}  # until 0.3: keys of older files

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise ValueError(f"model.name is {self.name!r}; give a word that tables can show")
        for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab"):
            if not 1 <= getattr(self, name) <= LARGEST_DIMENSION:
                raise ValueError(
                    f"model {self.name}: {name} is {getattr(self, name)}; give a number from 1 to {LARGEST_DIMENSION}"
                )
        for name in ("rope_base", "norm_eps", "embedding_scale", "activation_alpha", "activation_limit"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"model {self.name}: {name} is {getattr(self, name):g}; give a finite number above 0")
        for name in ("rope_base_window", "attention_scale"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"model {self.name}: {name} is {getattr(self, name):g}; give a finite number, or 0")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model {self.name}: {self.heads} query heads are not divisible by {self.kv_heads} KV heads; "
                "choose kv_heads that divides heads"
            )
        self._check_latent()
        if self.rotated_dim % 2:
            name = "rope_dim" if self.rope_dim else "head_dim"
            raise ValueError(f"model {self.name}: {name} {self.rotated_dim} is odd; RoPE needs an even {name}")
        if self.rope_scaling != "none":
            self._check_rope(parse_rope(self.rope_scaling))
        if self.activation == "clamped_silu" and not self.gated:
            raise ValueError(f"model {self.name}: activation clamped_silu needs a gated MLP; set gated: true")
        if not 0 <= self.window <= MAX_TOKENS:
            raise ValueError(f"model {self.name}: window is {self.window}; give a number of tokens, or 0 for none")
        if not re.fullmatch("[wfl]+", self.layer_pattern):
            raise ValueError(
                f"model {self.name}: layer_pattern is {self.layer_pattern[:40]!r}; give a letter for each "
                "layer, w with the window, f without and l for a linear one, such as wf"
            )
        self._check_linear()

    def _check_linear(self) -> None:
        count = sum(self.linear_layers)
        if self.linear == "none" and not count:
            sizes = ("linear_heads", "linear_key_heads", "linear_key_dim", "linear_value_dim")
            if given := [name for name in sizes if getattr(self, name)]:
                raise ValueError(f"model {self.name}: {given[0]} is given without linear; give both, or neither")
            return
        if self.linear == "none" or not 0 < count < self.layers:
            raise ValueError(
                f"model {self.name}: linear is {self.linear} and {count} of {self.layers} layers are linear; give a "
                "kind of linear layers, and a layer_pattern with l and another letter"
            )
        for name in ("linear_heads", "linear_key_heads", "linear_key_dim", "linear_value_dim", "linear_conv"):
            if not 1 <= getattr(self, name) <= LARGEST_DIMENSION:
                raise ValueError(
                    f"model {self.name}: {name} is {getattr(self, name)}; give a number from 1 to {LARGEST_DIMENSION}"
                )
        if self.linear_heads % self.linear_key_heads:
            raise ValueError(
                f"model {self.name}: {self.linear_heads} linear heads are not divisible by {self.linear_key_heads} "
                "linear key heads; choose linear_key_heads that divides linear_heads"
            )
        if self.norms != "before":
            raise ValueError(f"model {self.name}: linear layers have norms before alone; set norms to before")

    def _check_latent(self) -> None:
        if not self.kv_latent:
            given = [name for name in ("q_latent", "rope_dim", "value_dim", "rope_interleaved") if getattr(self, name)]
            if given:
                raise ValueError(f"model {self.name}: {given[0]} is given without kv_latent; give both, or neither")
            return
        for name in ("kv_latent", "rope_dim"):
            if not 1 <= getattr(self, name) <= LARGEST_DIMENSION:
                raise ValueError(
                    f"model {self.name}: {name} is {getattr(self, name)} with kv_latent; give a number from 1 to "
                    f"{LARGEST_DIMENSION}"
                )
        for name in ("q_latent", "value_dim"):
            if not 0 <= getattr(self, name) <= LARGEST_DIMENSION:
                raise ValueError(f"model {self.name}: {name} is {getattr(self, name)}; give a number of dims, or 0")
        if self.rope_dim >= self.head_dim or self.kv_heads != self.heads:
            raise ValueError(
                f"model {self.name}: rope_dim is {self.rope_dim} of head_dim {self.head_dim}, with {self.kv_heads} KV "
                f"heads of {self.heads}; with kv_latent give a rope_dim below head_dim, and as many KV heads as heads"
            )
        for name in ("qk_norm", "qk_norm_whole", "attention_scale", "attention_gate"):
            if getattr(self, name):
                raise ValueError(
                    f"model {self.name}: {name} is {getattr(self, name)} with kv_latent, which has norms and a scale "
                    "of its own and no gate; leave it out"
                )

    def _check_rope(self, scaling: RopeScaling) -> None:
        if scaling.partial_rotary_factor != 1 and self.attention_scale:
            raise ValueError(
                f"model {self.name}: partial_rotary_factor is {scaling.partial_rotary_factor:g} and attention_scale "
                f"{self.attention_scale:g}; expected 1 or 0: the scale is a factor of rotated dimensions"
            )
        if (reason := scaling.unsupported_reason(self.rotated_dim)) is not None:
            raise ValueError(f"model {self.name}: {reason}")

    @property
    def windowed(self) -> tuple[bool, ...]:
        """Of each layer, whether it attends within the window alone."""
        return tuple(self.window > 0 and letter == "w" for letter in self._letters)

    @property
    def linear_layers(self) -> tuple[bool, ...]:
        """Of each layer, whether it is linear, and so has no attention."""
        return tuple(letter == "l" for letter in self._letters)

    @property
    def linear_runs(self) -> int:
        """Runs of consecutive linear layers."""
        linear = self.linear_layers
        return sum(one and not before for before, one in itertools.pairwise((False, *linear)))

    @property
    def attention_layers(self) -> int:
        """Layers with attention."""
        return self.layers - sum(self.linear_layers)

    @property
    def _letters(self) -> str:
        return (self.layer_pattern * -(-self.layers // len(self.layer_pattern)))[: self.layers]

    @property
    def window_mask(self) -> str:
        """The mask of a layer with the window, as experiment files write it."""
        return f"sliding_window:{self.window - 1}"

    @property
    def feature_beyond_llama(self) -> str:
        """The first field, of those by which architectures differ, that is not as in Llama 2; empty where all are."""
        found = (name for name, of_llama in LLAMA_FEATURES.items() if getattr(self, name) != of_llama)
        return next(found, "")

    @property
    def mlp_activation(self) -> Activation:
        """The activation, `auto` resolved."""
        return self.activation if self.activation != "auto" else "silu" if self.gated else "gelu"

    @property
    def rotated_dim(self) -> int:
        """Dims of a head that RoPE's tables are for."""
        return self.rope_dim or self.head_dim

    @property
    def output_dim(self) -> int:
        """Dims of a head's V and output."""
        return self.value_dim or self.head_dim

    @property
    def sent_key_dims(self) -> int:
        """Numbers of a token that are held and sent for K and V of all heads: their own, or the latent and the key that
        heads share."""
        return self.kv_latent + self.rope_dim if self.kv_latent else self.kv_heads * (self.head_dim + self.output_dim)

    @property
    def expanded_dims(self) -> int:
        """Dims of a head that are formed from the latent: of K without the shared key, then of V."""
        return self.head_dim - self.rope_dim + self.output_dim

    @property
    def plain_projection(self) -> bool:
        """Whether queries, keys and values have a hand-written backward (`engine.layers.tiled_projection`)."""
        rotates_all = parse_rope(self.rope_scaling).partial_rotary_factor == 1
        plain = self.norms == "before" and not self.qkv_bias and not self.qk_norm_whole
        return plain and rotates_all and not self.attention_gate and not self.kv_latent

    @property
    def plain_mlp(self) -> bool:
        """Whether the MLP has a hand-written backward (`engine.layers.tiled_mlp`)."""
        own = "silu" if self.gated else "gelu"
        return self.norms == "before" and not self.mlp_bias and self.mlp_activation == own

    def layer_sizes(self, *, linear: bool = False) -> dict[str, tuple[int, ...]]:
        """Size of every parameter of one layer, with attention or a linear one, by its name in
        `engine.models.decoder.Block`, in the module's order."""
        hidden, ffn = self.hidden, self.ffn
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sizes: dict[str, tuple[int, ...]] = {}

        def matrix(name: str, inputs: int, outputs: int, bias: bool) -> None:
            sizes[f"{name}.weight"] = (outputs, inputs)
            if bias:
                sizes[f"{name}.bias"] = (outputs,)

        if linear:
            sizes |= self._mixer_sizes()
        else:
            if self.norms != "after":
                sizes["attention_norm.weight"] = (hidden,)
            if self.sinks:
                sizes["attention.sinks"] = (self.heads,)
            for name, inputs, outputs, bias in self.latent_matrices():
                matrix(f"attention.{name}", inputs, outputs, bias)
                if name.endswith("_a"):
                    sizes[f"attention.{name}_norm.weight"] = (self.q_latent if name == "q_a" else self.kv_latent,)
            for name, outputs in () if self.kv_latent else (("q", queries), ("k", keys), ("v", keys)):
                matrix(f"attention.{name}", hidden, outputs, self.qkv_bias)
            if self.attention_gate:
                matrix("attention.gate", hidden, queries, self.qkv_bias)
            matrix("attention.output", self.heads * self.output_dim, hidden, self.output_bias)
            if self.qk_norm:
                sizes["attention.q_norm.weight"] = (queries if self.qk_norm_whole else self.head_dim,)
                sizes["attention.k_norm.weight"] = (keys if self.qk_norm_whole else self.head_dim,)
            if self.norms != "before":
                sizes["attention.post_norm.weight"] = (hidden,)
        if self.norms != "after":
            sizes["mlp_norm.weight"] = (hidden,)
        if self.gated:
            matrix("mlp.gate", hidden, ffn, self.mlp_bias)
        matrix("mlp.up", hidden, ffn, self.mlp_bias)
        matrix("mlp.down", ffn, hidden, self.mlp_bias)
        if self.norms != "before":
            sizes["mlp.post_norm.weight"] = (hidden,)
        return sizes

    def latent_matrices(self) -> list[tuple[str, int, int, bool]]:
        """(name, inputs, outputs, bias) of the matrices of latent attention but the last, by the field's names: `_a`
        gives a latent, `_b` takes one. None without a latent."""
        if not self.kv_latent:
            return []
        queries, expanded = self.heads * self.head_dim, self.heads * self.expanded_dims
        q = [("q", self.hidden, queries, False)]
        if self.q_latent:
            q = [("q_a", self.hidden, self.q_latent, self.qkv_bias), ("q_b", self.q_latent, queries, False)]
        return [
            *q,
            ("kv_a", self.hidden, self.kv_latent + self.rope_dim, self.qkv_bias),
            ("kv_b", self.kv_latent, expanded, False),
        ]

    def _mixer_sizes(self) -> dict[str, tuple[int, ...]]:
        """The part before the MLP of a linear layer, in the order of `engine.models.linear`."""
        hidden, delta = self.hidden, self.linear == "gated_delta_net"
        keys, values = self.linear_key_heads * self.linear_key_dim, self.linear_heads * self.linear_value_dim
        heads, channels = (self.linear_heads,), 2 * keys + values
        rows = {
            "q": keys,
            "k": keys,
            "v": values,
            "gate": values,
            "beta": self.linear_heads,
            "decay": self.linear_heads,
        }
        matrices = ("q", "k", "v", "gate", "beta", "decay") if delta else ("gate", "v", "k", "q", "decay")
        sizes: dict[str, tuple[int, ...]] = {"mixer_norm.weight": (hidden,)}
        sizes |= {"mixer.decay_log": heads, "mixer.decay_bias": heads} | ({} if delta else {"mixer.skip": heads})
        sizes |= {f"mixer.{name}.weight": (rows[name], hidden) for name in matrices}
        sizes["mixer.conv.weight"] = (channels, self.linear_conv)
        if not delta:
            sizes["mixer.conv.bias"] = (channels,)
        sizes["mixer.norm.weight"] = (self.linear_value_dim if delta else values,)
        return sizes | {"mixer.output.weight": (hidden, values)}

    def parameter_sizes(self) -> dict[str, tuple[int, ...]]:
        """Size of every parameter by its name in `engine.models.decoder.Decoder`, in the model's order."""
        table = (self.vocab, self.hidden)
        kinds = {kind: self.layer_sizes(linear=kind) for kind in set(self.linear_layers)}
        layers = {
            f"blocks.{index}.{name}": size
            for index, kind in enumerate(self.linear_layers)
            for name, size in kinds[kind].items()
        }
        head = {} if self.tied else {"head.weight": table}
        return {"embedding.weight": table} | layers | {"norm.weight": (self.hidden,)} | head

    def _of_layers(self, attention: float, linear: float) -> float:
        """The mean over all layers of a number of those with attention and one of linear ones."""
        count = sum(self.linear_layers)
        return attention if not count else (attention * (self.layers - count) + linear * count) / self.layers

    @property
    def largest_layer(self) -> int:
        """Parameters of one decoder layer, of the larger kind."""
        return max(self._layer_parameters(linear) for linear in set(self.linear_layers))

    @property
    def layer_parameters(self) -> float:
        """Parameters of one decoder layer, on average over all."""
        return self._of_layers(self._layer_parameters(False), self._layer_parameters(True) if self._hybrid else 0)

    def _layer_parameters(self, linear: bool) -> int:
        return sum(map(math.prod, self.layer_sizes(linear=linear).values()))

    @property
    def _hybrid(self) -> bool:
        return self.linear != "none"

    @property
    def projection_parameters(self) -> float:
        """Of the matrices of one layer that form queries, keys and values of attention, and its gate; on average."""
        gate = self.heads if self.attention_gate else 0
        own = self.hidden * (self.heads + gate + 2 * self.kv_heads) * self.head_dim
        if self.kv_latent:
            own = sum(inputs * outputs for _, inputs, outputs, _ in self.latent_matrices())
        return self._of_layers(own, 0)

    @property
    def mlp_parameters(self) -> int:
        """Of the matrices of one layer's MLP."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def layer_matrices(self) -> float:
        """Parameters of one layer that take part in a matrix multiplication, all but norms, biases and short
        convolutions; on average."""
        keys, values = self.linear_key_heads * self.linear_key_dim, self.linear_heads * self.linear_value_dim
        gates = self.linear_heads * (2 if self.linear == "gated_delta_net" else 1)  # decay, and beta
        mixer = self.hidden * (2 * keys + 3 * values + gates)
        output = self._of_layers(self.hidden * self.heads * self.output_dim, mixer)
        return self.projection_parameters + output + self.mlp_parameters

    @property
    def recurrence_products(self) -> float:
        """Multiply-adds of one layer's recurrence for one token, on average: of every value head the state is written
        and read, and read once more by the delta rule."""
        state = self.linear_heads * self.linear_key_dim * self.linear_value_dim
        return self._of_layers(0, (3 if self.linear == "gated_delta_net" else 2) * state)

    @property
    def parameters(self) -> int:
        """All trainable parameters."""
        tables = (1 if self.tied else 2) * self.vocab * self.hidden
        return round(self.layers * self.layer_parameters) + tables + self.hidden


# The fields after `architecture`, by their defaults: those of Llama 2.
LLAMA_FEATURES: Mapping[str, object] = {
    each.name: each.default
    for each in fields(ModelShape)[[each.name for each in fields(ModelShape)].index("architecture") + 1 :]
}


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

    `offload` moves what is kept to host memory: nothing, the layers' inputs, or attention outputs as well.

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

    @property
    def total(self) -> int:
        """Warm-up steps and measured ones."""
        return self.warmup + self.measured


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
    head_tiles: int = 0  # runs of tokens that the fused LM head's logits are formed in; 0: by their size
    # Optimizer states live in host memory: all of them, or those of this fraction of the parameters.
    optimizer_offload: bool | float = False
    memory: str = ""  # of one GPU for this trial, such as 80GiB; empty: all that it has
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
        if self.memory:
            size_in_bytes(self.memory, "memory")
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


def linear_unsupported_reason(settings: TrialSettings) -> str | None:
    """Why the linear layers of a trial's model cannot be trained so, whatever the method, or None."""
    model = settings.model
    if settings.task != "train" or not any(model.linear_layers):
        return None
    has = f"model {model.name} has linear layers"
    kind, *parts = settings.mask.split(":")
    if kind not in ("causal", DOCUMENTS) or "full" in parts:
        return f"mask is {settings.mask}, and {has}, which are causal; set mask to causal or documents"
    if settings.tp_size > 1:
        return f"tp_size is {settings.tp_size}, and {has}, whose heads no rank divides; set tp_size to 1"
    if settings.lora is not None:
        return f"lora is set, and {has}, whose matrices have no adapters; leave lora out"
    lengths = settings.row_tokens, settings.steps.warmup_seq_len or settings.row_tokens
    tokens, needed = min(lengths) // settings.cp_size, model.linear_conv - 1
    if settings.cp_size == 1 or tokens >= needed:
        return None
    return (
        f"each of {settings.cp_size} ranks holds {tokens} tokens, and {has}, whose convolution takes {needed} of the "
        "rank before; give longer sequences or a smaller cp_size"
    )


def vocabulary_unsupported_reason(settings: TrialSettings, needed: int) -> str | None:
    """Why the model cannot be trained on tokens whose ids go up to `needed` - 1, or None."""
    if settings.task != "train" or settings.model.vocab >= needed:
        return None
    return (
        f"model {settings.model.name} has a vocabulary of {settings.model.vocab}, but the tokens of {settings.data} "
        f"need {needed}; choose a model with at least that many"
    )
