"""What a file of this folder says of an architecture: its configuration and its weights, beside Hugging Face's.

A file `NAME.py` defines `ARCHITECTURE` and is found by its name, which is the field `architecture` of a shape. It needs
no torch: plans and checks before a start read it. The decoder itself is put together from the features of the shape
(`engine.models.decoder`); a feature that no architecture had before is a new field of `ModelShape`.

Source of keys and names: transformers' documentation of each configuration; defaults are those of its release 5.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.rope import parse_rope, read_rope, write_rope
from engine.shape import LARGEST_DIMENSION, ModelShape

if TYPE_CHECKING:
    from torch import Tensor

MAX_LAYERS = 1 << 16  # beyond any model: a list of kinds of layers is formed from the number

# Accepted values of Mamba-2's `time_step_limit`: none, as written by Python and by JSON.
NO_STEP_LIMIT = (None, [0.0, math.inf], (0.0, math.inf), [0.0, {"__float__": "Infinity"}])
SHARED = ("architecture", "decoder", "latent", "linear", "matrices")  # files of this folder that are no architecture

# Kinds of layers in `layer_types`.
FULL, WINDOWED, LINEAR = "full_attention", "sliding_attention", "linear_attention"

# Keys that may change the function computed, in every architecture, and the only values with which they do not.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "quantization_config": (None,),
    "auto_map": (None,),  # code that comes with the weights
}
DROPOUT = ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop")  # of all architectures here
# Whole numbers of a shape that all configurations have besides the layers, by their keys.
SIZES = {
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "heads": "num_attention_heads",
    "vocab": "vocab_size",
}
# Names of Llama's modules by those of `Decoder` and, within a layer, of `Block`.
OUTSIDE = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
IN_LAYER: Mapping[str, str] = {
    "attention": "self_attn",
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mixer_norm": "input_layernorm",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


class Config:
    """A `config.json`, read key by key. Every method raises ValueError that gives the key, its value and the expected
    one."""

    def __init__(self, content: Mapping[str, object]) -> None:
        self.content = content

    def whole(self, key: str, least: int = 1, most: int = LARGEST_DIMENSION) -> int:
        value = self.content.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(f"{key} is {_shown(value)[:40]}; expected a whole number from {least} to {most}")
        return value

    @property
    def layers(self) -> int:
        return self.whole("num_hidden_layers", most=MAX_LAYERS)

    def number(self, key: str) -> float:
        value = self.content.get(key)
        try:
            number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
        except OverflowError:
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"{key} is {_shown(value)}; expected a number")
        return number

    def flag(self, key: str, default: bool = False) -> bool:
        """A truth value; a missing one and null are `default`."""
        value = self.content.get(key)
        if not isinstance(value, bool | None):
            raise _unsupported(key, value, (False, True))
        return default if value is None else value

    def expect(self, key: str, *accepted: object) -> None:
        """The key is missing or has one of these values."""
        if key in self.content and self.content[key] not in accepted:
            raise _unsupported(key, self.content[key], accepted)

    def windows(self, default: Sequence[str], *, in_use: bool = True) -> dict[str, object]:
        """Fields of a shape with the layers that `layer_types` names, else those of `default`, one for each layer.
        No field where no layer has a window."""
        named = self.content.get("layer_types")
        kinds = default if named is None else named
        known = isinstance(kinds, list) and all(kind in (FULL, WINDOWED) for kind in kinds)
        if not isinstance(kinds, list) or not known or len(kinds) != len(default):
            raise ValueError(f"layer_types is {_shown(named)[:80]}; expected {len(default)} of {FULL}, {WINDOWED}")
        some = WINDOWED in kinds
        if some and not in_use:
            raise ValueError(f"layer_types has {WINDOWED}, but no window is in use; expected {FULL}")
        window = self.whole("sliding_window") if some or (in_use and self.content.get("sliding_window")) else 0
        pattern = "".join("w" if kind == WINDOWED else "f" for kind in kinds)
        return {"window": window, "layer_pattern": shortest_pattern(pattern)} if some else {}

    def linear_layers(self, default: Sequence[str]) -> dict[str, object]:
        """The field of the layers that `layer_types` names, full attention or linear, else of those of `default`."""
        named = self.content.get("layer_types")
        kinds = default if named is None else named
        if not isinstance(kinds, list) or len(kinds) != len(default) or not {*map(str, kinds)} <= {FULL, LINEAR}:
            raise ValueError(f"layer_types is {_shown(named)[:80]}; expected {len(default)} of {FULL}, {LINEAR}")
        return {"layer_pattern": shortest_pattern("".join("l" if kind == LINEAR else "f" for kind in kinds))}


def layer_kinds(windowed: Iterable[bool]) -> list[str]:
    """`layer_types` of layers with a window, where it says so, and without one."""
    return [WINDOWED if each else FULL for each in windowed]


def shortest_pattern(letters: str) -> str:
    """The shortest beginning of `letters` that, repeated, gives all of them."""
    size = next(size for size in range(1, len(letters) + 1) if all(map(str.__eq__, letters, letters[size:] or letters)))
    return letters[:size]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One tensor of a file: parameters one above another, each stored as itself minus `offset`.

    `groups` interleaves the parts: the rows of each are so many blocks, and the first block of every part comes first.
    `conv` is for the weights of a convolution, which have a dimension of 1 after the first. `expert` is for a tensor of
    all experts of a layer, [experts, in, out], where there is one expert: the rows of the parts alternate. A tensor
    without parts has no effect on what is computed; it is written as zeros of size `unused`.
    """

    name: str
    parts: tuple[str, ...] = ()
    offset: float = 0.0
    groups: int = 1
    conv: bool = False
    expert: bool = False
    unused: tuple[int, ...] = ()

    def size(self, sizes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Of the tensor, from those of all parameters."""
        if not self.parts:
            return self.unused
        rows, columns = sum(sizes[part][0] for part in self.parts), sizes[self.parts[0]][1:]
        if self.conv:
            return rows, 1, *columns
        return (1, *columns, rows) if self.expert else (rows, *columns)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The tensor that holds these parameters."""
        import torch

        if self.expert:
            whole = torch.stack(list(parts), 1).flatten(0, 1)
            return whole.t().unsqueeze(0) if whole.ndim > 1 else whole.unsqueeze(0)
        if self.groups > 1:
            return torch.cat([part.unflatten(0, (self.groups, -1)) for part in parts], 1).flatten(0, 1)
        if self.conv:
            return parts[0].unsqueeze(1)
        whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        return whole - self.offset if self.offset else whole

    def split(self, tensor: Tensor, sizes: Mapping[str, tuple[int, ...]]) -> list[Tensor]:
        """The parameters in a tensor of a file, as views of it where nothing is added."""
        import torch

        if self.expert:
            whole = tensor[0].t() if tensor.ndim > 2 else tensor[0]
            return list(whole.unflatten(0, (-1, len(self.parts))).unbind(1))
        if self.offset:
            tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32)) + self.offset
        rows = [sizes[part][0] for part in self.parts]
        if self.groups > 1:
            blocks = tensor.unflatten(0, (self.groups, -1)).split([count // self.groups for count in rows], 1)
            return [block.flatten(0, 1) for block in blocks]
        return list((tensor.squeeze(1) if self.conv else tensor).split(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A family of models under one class of transformers."""

    class_name: str  # under `architectures` of config.json
    model_type: str
    read: Callable[[Config], Mapping[str, object]]  # fields of the shape beyond those that all architectures share
    write: Callable[[ModelShape], Mapping[str, object]]  # keys of the configuration beyond the shared ones; the inverse
    # Values of keys with which the function computed is the decoder's; other values are refused.
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    # Names of weights that differ from Llama's, by modules, or by a parameter that is none of a module of its own.
    # Modules under one name are one tensor, one above another.
    names: Mapping[str, str] = field(default_factory=dict)
    offsets: Mapping[str, float] = field(default_factory=dict)  # of norms whose weight is stored without its 1
    # Of tensors of a layer that interleave their modules, the number of blocks of each.
    interleaved: Callable[[ModelShape], Mapping[str, int]] = lambda _: {}
    # Names of tensors that hold one expert's weights, by the names of parameters in a layer.
    experts: Mapping[str, str] = field(default_factory=dict)
    # Tensors of a layer that have no effect, and their sizes.
    unused: Callable[[ModelShape], Mapping[str, tuple[int, ...]]] = lambda _: {}
    layers: str = "model.layers"  # what the name of a layer's tensor begins with
    halves: bool = False  # what is before the MLP, and the MLP, are numbered as layers of their own
    tied: bool = False  # what a configuration without `tie_word_embeddings` means
    partial_rotary: bool = False  # whether a configuration may rotate a part of each head

    def stored(self, shape: ModelShape) -> list[Stored]:
        """The tensors of a model's files, in the model's order."""
        found: dict[str, list[str]] = {}
        for name in shape.parameter_sizes():
            found.setdefault(self.stored_name(name, shape), []).append(name)
        groups = self.interleaved(shape)
        stored = [
            Stored(
                name=name,
                parts=tuple(parts),
                offset=self.offsets.get(module_of(parts[0]), 0.0),
                groups=groups.get(name.split(".", 3)[-1].rpartition(".")[0], 1),  # behind model.layers.NUMBER
                conv=in_layer(parts[0]).endswith(".conv.weight"),
                expert=in_layer(parts[0]) in self.experts,
            )
            for name, parts in found.items()
        ]
        unused = self.unused(shape).items()
        layers = range(shape.layers)
        return stored + [Stored(name=f"{self.layers}.{n}.{name}", unused=size) for n in layers for name, size in unused]

    def stored_name(self, parameter: str, shape: ModelShape) -> str:
        """Name of the tensor that holds a parameter of `Decoder`."""
        module, kind = module_of(parameter), parameter.rpartition(".")[2]
        if module in OUTSIDE:
            return f"{self.names.get(module) or OUTSIDE[module]}.{kind}"
        layer, own = parameter.split(".", 2)[1:]
        if self.halves:
            layer = str(int(layer) + sum(shape.mlps[: int(layer)]) + own.startswith("mlp"))
        if own in self.experts:
            return f"{self.layers}.{layer}.{self.experts[own]}"
        if own in self.names:
            return f"{self.layers}.{layer}.{self.names[own]}"
        name = self.names.get(module) or IN_LAYER.get(module)
        if name is None:
            raise ValueError(f"architecture {self.model_type} has no name for {module}; add it to its `names`")
        return f"{self.layers}.{layer}.{name}.{kind}"


def in_layer(parameter: str) -> str:
    """The name of a parameter of `Decoder`, a layer's without its place: `mlp.up.bias` of blocks.3.mlp.up.bias."""
    return parameter.split(".", 2)[2] if parameter.startswith("blocks.") else parameter


def module_of(parameter: str) -> str:
    """The module that holds a parameter of `Decoder`, a layer's without its place: `mlp.up` of blocks.3.mlp.up.bias."""
    return in_layer(parameter).rpartition(".")[0]


def architecture_named(name: str) -> Architecture:
    """The architecture of that file. Raises ValueError with the known names."""
    known = architectures()
    if name not in known:
        raise ValueError(f"architecture is {name!r}; expected one of {', '.join(known)}")
    return known[name]


@cache
def architectures() -> Mapping[str, Architecture]:
    """All architectures by name, found in this folder."""
    names = sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return {name: importlib.import_module(f"engine.models.{name}").ARCHITECTURE for name in names if name not in SHARED}


def shape_of(content: Mapping[str, object], name: str) -> ModelShape:
    """The shape that a `config.json` describes, under the given name. Raises ValueError for an unknown feature."""
    config = Config(content)
    architecture_name, architecture = _architecture_of(content)
    for key, accepted in {**NEUTRAL, **architecture.neutral}.items():
        config.expect(key, *accepted)
    for key in DROPOUT:
        if content.get(key) not in (None, 0):
            raise ValueError(f"{key} is {content[key]!r}, and nothing is dropped in training here; set it to 0")
    found: dict[str, Any] = {name: config.whole(key) for name, key in SIZES.items()}
    found["kv_heads"] = found["heads"]
    if content.get("num_key_value_heads") is not None:
        found["kv_heads"] = config.whole("num_key_value_heads")
    found["tied"] = config.flag("tie_word_embeddings", architecture.tied)
    found |= architecture.read(config)
    if "layers" not in found:
        found["layers"] = config.layers
    if "norm_eps" not in found:
        found["norm_eps"] = config.number("rms_norm_eps")
    if found.get("rope", True) and "rope_base" not in found:
        found["rope_base"], found["rope_scaling"] = read_rope(content)
    if "head_dim" not in found:
        found["head_dim"] = head_dim_of(config, found["hidden"], found["heads"])
    shape = ModelShape(name=name, architecture=architecture_name, **found)
    partial = parse_rope(shape.rope_scaling).partial_rotary_factor
    if partial != 1 and not architecture.partial_rotary:
        raise _unsupported("partial_rotary_factor", partial, (1,))
    return shape


def head_dim_of(config: Config, hidden: int, heads: int) -> int:
    """`head_dim`, or without it the hidden size over the heads."""
    if config.content.get("head_dim") is not None:
        return config.whole("head_dim")
    if heads < 1 or hidden % heads:
        raise ValueError(f"hidden_size {hidden} does not split into {heads} heads; add head_dim to the configuration")
    return hidden // heads


def config_of(shape: ModelShape, dtype: str, max_positions: int | None) -> dict[str, object]:
    """The configuration that makes transformers build this shape. Keys are those that releases 4 and 5 both read.

    Args:
        shape: of an architecture of this folder.
        dtype: of the exported tensors, by torch's name.
        max_positions: longest sequence, in tokens, the model was trained for; None leaves it out.

    Raises ValueError, naming the field and both values, for a shape that its architecture does not have.
    """
    architecture = architecture_named(shape.architecture)
    config: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "num_hidden_layers": shape.layers,
        **{key: getattr(shape, field_name) for field_name, key in SIZES.items()},
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": dtype,
        **({} if max_positions is None else {"max_position_embeddings": max_positions}),
        **(write_rope(shape.rope_base, shape.rope_scaling) if shape.rope else {}),
        **architecture.write(shape),
    }
    found = shape_of(config, shape.name)
    for name in (each.name for each in fields(shape) if each.compare):
        had, wanted = getattr(found, name), getattr(shape, name)
        if had != wanted:
            raise ValueError(
                f"model {shape.name} has {name} {wanted}, and {architecture.class_name} has {name} {had}; export a "
                "shape of that architecture"
            )
    return config


def not_exported_reason(shape: ModelShape) -> str | None:
    """Why transformers cannot build this shape, or None."""
    try:
        config_of(shape, "float32", None)
    except ValueError as error:
        return str(error)
    return None


def shape_under(mask: str, shape: ModelShape) -> ModelShape | None:
    """The shape with which transformers attends as a training run did under `mask`: this one, or it with a window in
    every layer. None where the architecture has no such model."""
    # Masks load numpy, and commands that describe models do not wait for it.
    from engine.attention.masks import Causal, Documents, DocumentsOfBatch, SlidingWindow, parse_mask

    found = parse_mask(mask)
    match found:
        case Causal() | DocumentsOfBatch() | Documents(causal=True, spans=()):
            left = getattr(found, "left", None)
        case SlidingWindow(right=0, global_tokens=0):
            left = found.left
        case _:
            return None
    if left is None or (all(shape.windowed) and shape.window == left + 1):
        return shape
    # A window holds the token itself.
    windowed = replace(shape, window=left + 1, layer_pattern=shape.layer_pattern.replace("f", "w"))
    return None if any(shape.windowed) or not_exported_reason(windowed) else windowed


def _architecture_of(content: Mapping[str, object]) -> tuple[str, Architecture]:
    named = content.get("architectures")
    by_class = {each.class_name: (name, each) for name, each in architectures().items()}
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str) or named[0] not in by_class:
        raise ValueError(
            f"architectures is {named!r}; expected a list of one of {', '.join(by_class)}; give such a model's file"
        )
    return by_class[named[0]]


def _unsupported(key: str, value: object, accepted: Iterable[object]) -> ValueError:
    expected = " or ".join(_shown(one) for one in accepted)
    return ValueError(f"{key} is {value!r}, which this model does not have; expected {expected}")


def _shown(value: object) -> str:
    return "missing" if value is None else repr(value)
