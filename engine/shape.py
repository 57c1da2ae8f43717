"""The shape of a model: its sizes, and the features in which architectures differ. Pure data, without torch.

Parameters, FLOPs, memory and time follow from it alone; `engine.models` computes what it says.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import ClassVar, Literal

from engine.rope import DEFAULT_BASE, RopeScaling, parse_rope

Norms = Literal["before", "after", "both"]
Activation = Literal["auto", "silu", "gelu", "gelu_tanh", "relu2", "clamped_silu"]
LinearKind = Literal["none", "gated_delta_net", "mamba2"]

# Beyond any machine; sizes past them would overflow in the middle of a trial instead of being refused at its start.
MAX_TOKENS = 1 << 40
LARGEST_DIMENSION = 1 << 28

EMBEDDING = "embedding.weight"  # the name of its table, which may also be the LM head


@lru_cache(maxsize=64)  # a search of memory settings asks several hundred thousand times
def _has(pattern: str, layers: int, letters: str) -> tuple[bool, ...]:
    """Of each layer, whether its letter of the pattern, which repeats, is one of these."""
    return tuple(letter in letters for letter in itertools.islice(itertools.cycle(pattern), layers))


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
    rope_base: float = DEFAULT_BASE
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
    # One letter a layer, repeated: w with the window, f without, l linear; a capital: likewise, but without an MLP.
    layer_pattern: str = "w"
    rope_base_window: float = 0.0  # RoPE's base in layers with a window, where it is never scaled; 0: as in the others
    rope_scaling: str = "none"  # of RoPE's frequencies (`engine.rope`)
    rope: bool = True  # queries and keys are rotated
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
    linear_step_min: float = 0.0  # of Mamba-2: the least time step

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
        for name in ("rope_base_window", "attention_scale", "linear_step_min"):
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
        if not self.rope:
            self._check_no_rope()
        if self.rope_scaling != "none":
            self._check_rope(parse_rope(self.rope_scaling))
        if self.activation == "clamped_silu" and not self.gated:
            raise ValueError(f"model {self.name}: activation clamped_silu needs a gated MLP; set gated: true")
        if not 0 <= self.window <= MAX_TOKENS:
            raise ValueError(f"model {self.name}: window is {self.window}; give a number of tokens, or 0 for none")
        if not re.fullmatch("[wflWFL]+", self.layer_pattern):
            raise ValueError(
                f"model {self.name}: layer_pattern is {self.layer_pattern[:40]!r}; give a letter for each "
                "layer, w with the window, f without and l for a linear one, such as wf, and a capital for one without "
                "an MLP"
            )
        self._check_linear()

    def _check_linear(self) -> None:
        count = sum(self.linear_layers)
        if self.mlp_share < 1 and not (self.mlp_share and count):
            raise ValueError(
                f"model {self.name}: layer_pattern has capitals, and {sum(self.mlps)} of {self.layers} layers have an "
                f"MLP and {count} are linear; give at least one of each"
            )
        if self.linear == "none" and not count:
            names = [name for name in LLAMA_FEATURES if name.startswith("linear_")]
            if given := [name for name in names if getattr(self, name) != LLAMA_FEATURES[name]]:
                raise ValueError(f"model {self.name}: {given[0]} is given without linear; give both, or neither")
            return
        if self.linear == "none" or not 0 < count < self.layers:
            first = f" by the pattern's first {self.layers} letters" if len(self.layer_pattern) > self.layers else ""
            raise ValueError(
                f"model {self.name}: linear is {self.linear} and {count} of {self.layers} layers are linear{first}; "
                "give a kind of linear layers, and a layer_pattern with l and another letter"
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
        if self.linear_step_min and self.linear != "mamba2":
            raise ValueError(
                f"model {self.name}: linear_step_min is {self.linear_step_min:g}, and linear is {self.linear}; leave "
                "it out: only mamba2 has time steps"
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

    def _check_no_rope(self) -> None:
        for name in ("rope_base", "rope_base_window", "rope_scaling", "attention_scale", "kv_latent"):
            if getattr(self, name) != LLAMA_FEATURES.get(name, DEFAULT_BASE):
                raise ValueError(
                    f"model {self.name}: {name} is {getattr(self, name)} with rope: false, where nothing is rotated; "
                    "leave one of them out"
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
        return _has(self.layer_pattern, self.layers, "wW") if self.window else (False,) * self.layers

    @property
    def rope_of_window(self) -> tuple[bool, ...]:
        """Of each layer, whether its RoPE has the base of layers with the window, and so tables of its own."""
        return tuple(windowed and self.rope_base_window > 0 for windowed in self.windowed)

    @property
    def linear_layers(self) -> tuple[bool, ...]:
        """Of each layer, whether it is linear, and so has no attention."""
        return _has(self.layer_pattern, self.layers, "lL")

    @property
    def mlps(self) -> tuple[bool, ...]:
        """Of each layer, whether it has an MLP."""
        return _has(self.layer_pattern, self.layers, "wfl")

    @property
    def mlp_share(self) -> float:
        """Layers with an MLP over all layers."""
        return sum(self.mlps) / self.layers if not self.layer_pattern.islower() else 1

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
        return (self.rope_dim or self.head_dim) if self.rope else 0

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
        rotates_all = self.rope and parse_rope(self.rope_scaling).partial_rotary_factor == 1
        plain = self.norms == "before" and not self.qkv_bias and not self.qk_norm_whole
        return plain and rotates_all and not self.attention_gate and not self.kv_latent

    @property
    def plain_mlp(self) -> bool:
        """Whether the MLP has a hand-written backward (`engine.layers.tiled_mlp`)."""
        own = "silu" if self.gated else "gelu"
        return self.norms == "before" and not self.mlp_bias and self.mlp_activation == own

    def layer_sizes(self, *, linear: bool = False, mlp: bool = True) -> dict[str, tuple[int, ...]]:
        """Size of every parameter of one layer, with attention or a linear one, with an MLP or without, by its name in
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
        if not mlp:
            return sizes
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
        kinds = {kind: self.layer_sizes(linear=kind[0], mlp=kind[1]) for kind in set(self._kinds)}
        layers = {
            f"blocks.{index}.{name}": size
            for index, kind in enumerate(self._kinds)
            for name, size in kinds[kind].items()
        }
        head = {} if self.tied else {"head.weight": table}
        return {EMBEDDING: table} | layers | {"norm.weight": (self.hidden,)} | head

    def _of_layers(self, attention: float, linear: float) -> float:
        """The mean over all layers of a number of those with attention and one of linear ones."""
        count = sum(self.linear_layers)
        return attention if not count else (attention * (self.layers - count) + linear * count) / self.layers

    @property
    def largest_layer(self) -> int:
        """Parameters of one decoder layer, of the larger kind."""
        return max(self._layer_parameters(*kind) for kind in set(self._kinds))

    @property
    def layer_parameters(self) -> float:
        """Parameters of one decoder layer, on average over all."""
        kinds = Counter(self._kinds)
        if len(kinds) == 1:
            return self.largest_layer
        return sum(count * self._layer_parameters(*kind) for kind, count in kinds.items()) / self.layers

    def _layer_parameters(self, linear: bool, mlp: bool) -> int:
        return sum(map(math.prod, self.layer_sizes(linear=linear, mlp=mlp).values()))

    @property
    def _kinds(self) -> tuple[tuple[bool, bool], ...]:
        """Of each layer, whether it is linear, and whether it has an MLP."""
        return tuple(zip(self.linear_layers, self.mlps, strict=True))

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
        """Of the matrices of the MLP of one layer that has one."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def layer_matrices(self) -> float:
        """Parameters of one layer that take part in a matrix multiplication, all but norms, biases and short
        convolutions; on average."""
        keys, values = self.linear_key_heads * self.linear_key_dim, self.linear_heads * self.linear_value_dim
        gates = self.linear_heads * (2 if self.linear == "gated_delta_net" else 1)  # decay, and beta
        mixer = self.hidden * (2 * keys + 3 * values + gates)
        output = self._of_layers(self.hidden * self.heads * self.output_dim, mixer)
        return self.projection_parameters + output + self.mlp_share * self.mlp_parameters

    @property
    def float8_matrices(self) -> float:
        """Of `layer_matrices`, those that `linear_dtype: float8` multiplies in float8: of attention and the MLP, but
        that which attention itself expands its latent with; on average."""
        output, expanded = self.hidden * self.output_dim, self.kv_latent * self.expanded_dims if self.kv_latent else 0
        attention = self._of_layers(self.heads * (output - expanded), 0)
        return self.projection_parameters + attention + self.mlp_share * self.mlp_parameters

    @property
    def bare_outputs(self) -> float:
        """Of the matrices after attention or recurrence those of layers without an MLP, which end these; on average."""
        attention, linear = self.heads * self.output_dim, self.linear_heads * self.linear_value_dim
        widths = (linear if is_linear else attention for is_linear, mlp in self._kinds if not mlp)
        return self.hidden * sum(widths) / self.layers

    @property
    def linear_layer_products(self) -> int:
        """Multiply-adds of a linear layer's recurrence for one token: of every value head the state is written and
        read, and read once more by the delta rule."""
        state = self.linear_heads * self.linear_key_dim * self.linear_value_dim
        return (3 if self.linear == "gated_delta_net" else 2) * state

    @property
    def recurrence_products(self) -> float:
        """The same of one layer, on average over all."""
        return self._of_layers(0, self.linear_layer_products)

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
