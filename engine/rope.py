"""Forms of rotary position embeddings (RoPE, arXiv:2104.09864): the frequencies that positions are multiplied by.

A model is trained with one form and means nothing under another one. Settings and records have it as one text,
`none` or `llama3:factor=8,low_freq_factor=1,high_freq_factor=4,original=8192`; names are those of Hugging Face's
`rope_scaling` and `rope_parameters`, but `original`, and a list has a `/` between its numbers. All arithmetic is in
float64. Only `rotary_tables` imports torch.

| rope_type | frequencies |
|---|---|
| default | base^(-2i/d) |
| linear | those, divided by `factor` (position interpolation, arXiv:2306.15595) |
| dynamic | of a base that grows with the sequence once it is longer than `original` ("NTK-aware") |
| llama3 | long wavelengths divided by `factor`, short ones as they are, a ramp between (Llama 3.1, arXiv:2407.21783) |
| yarn | a ramp over dimensions instead of wavelengths; cosine and sine times a factor (arXiv:2309.00071) |
| longrope | each divided by a number of its own, one list for short and one for long sequences (arXiv:2402.13753) |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from engine.reader import Json, from_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]

NONE = "none"  # the text of plain RoPE
DEFAULT_BASE = 10000.0  # configurations older than `rope_theta` lack it

ORIGINAL = "original_max_position_embeddings"
# Of each form: the keys that it needs, and those that it may have.
KEYS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor", ORIGINAL), ()),
    "llama3": (("factor", ORIGINAL, "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        ("factor", ORIGINAL),
        ("attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
    ),
    "longrope": (("short_factor", "long_factor", ORIGINAL), ("factor", "attention_factor")),
}
SHORT = {ORIGINAL: "original"}  # names in texts, where they differ
LISTS = ("short_factor", "long_factor")
COMMON = ("rope_type", "partial_rotary_factor")  # of every form


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """A form of RoPE with its numbers, all but the base. The default leaves the frequencies as they are."""

    rope_type: RopeType = "default"
    partial_rotary_factor: float = 1.0  # part of a head's dimensions, from its first one on, that is rotated
    factor: float = 0.0  # by which the context was lengthened; 0: not given
    original_max_position_embeddings: int = 0  # tokens of the context before it was lengthened; 0: not given
    low_freq_factor: float = 0.0  # llama3: wavelengths above original / this are divided by `factor`
    high_freq_factor: float = 0.0  # llama3: wavelengths below original / this stay as they are
    beta_fast: float = 32.0  # yarn: rotations within the original context above which a dimension stays as it is
    beta_slow: float = 1.0  # yarn: rotations below which a dimension is divided by `factor`
    truncate: bool = True  # yarn: whether the ramp begins and ends at whole dimensions
    attention_factor: float = 0.0  # of yarn and longrope, times cosine and sine; 0: follows from `factor`
    short_factor: tuple[float, ...] = ()  # longrope: a divisor per frequency, up to the original context
    long_factor: tuple[float, ...] = ()  # longrope: likewise, of longer sequences
    mscale: float = 0.0  # yarn: `attention_factor` is that of this scale over that of the next one (DeepSeek)
    mscale_all_dim: float = 0.0  # yarn: likewise, and of the scores by `score_factor`; 0: not given

    def __post_init__(self) -> None:
        needed, optional = KEYS[self.rope_type]
        for field in fields(self):
            value, given = getattr(self, field.name), getattr(self, field.name) != field.default
            if field.name in needed and not given:
                raise ValueError(f"{field.name} is missing, which rope_type {self.rope_type} needs; give it")
            if given and field.name not in (*COMMON, *needed, *optional):
                raise ValueError(
                    f"{field.name} is {value}, which rope_type {self.rope_type} does not use; leave it out"
                )
            least = 2 if field.name == ORIGINAL else 0
            for number in value if isinstance(value, tuple) else (value,):
                if given and not isinstance(number, str) and not (math.isfinite(number) and number >= least):
                    raise ValueError(f"{field.name} is {number:g}; give a number above {max(0, least - 1)}")
        if not 0 < self.partial_rotary_factor <= 1:
            raise ValueError(f"partial_rotary_factor is {self.partial_rotary_factor:g}; give a part above 0, at most 1")
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            below, above = getattr(self, low), getattr(self, high)
            if (self.rope_type == "llama3" or low == "beta_slow") and below >= above:
                raise ValueError(f"{high} is {above:g}, not above {low}, {below:g}; give a larger one")

    def __str__(self) -> str:
        """The text that `parse_rope` reads."""
        given = [field for field in fields(self)[1:] if getattr(self, field.name) != field.default]
        if self.rope_type == "default" and not given:
            return NONE
        words = (f"{SHORT.get(field.name, field.name)}={_written(getattr(self, field.name))}" for field in given)
        return f"{self.rope_type}:{','.join(words)}"

    def rotated(self, head_dim: int) -> int:
        """Dimensions of a head that are rotated, the first ones."""
        return int(head_dim * self.partial_rotary_factor)

    @property
    def score_factor(self) -> float:
        """Factor of all scores in DeepSeek's latent attention, where rotated dims are a part of a head: that of
        `mscale_all_dim`, squared."""
        return _yarn_factor(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def unsupported_reason(self, head_dim: int) -> str | None:
        """Why heads of this many dimensions cannot be rotated so, or None."""
        rotated = self.rotated(head_dim)
        if rotated < 2 or rotated % 2:
            factor = self.partial_rotary_factor
            part = "" if factor == 1 else f" times partial_rotary_factor {factor:g}"
            return f"head_dim {head_dim}{part} is {rotated}; RoPE needs an even number of dimensions"
        if self.rope_type == "dynamic" and rotated == 2:
            return "rope_type dynamic needs more than 2 rotated dimensions of a head; choose a larger head_dim"
        for name in ("short_factor", "long_factor"):
            numbers = getattr(self, name)
            if self.rope_type == "longrope" and len(numbers) != rotated // 2:
                return f"{name} has {len(numbers)} numbers, but {rotated} rotated dimensions need {rotated // 2}"
        return None


@lru_cache(maxsize=64)
def parse_rope(text: str) -> RopeScaling:
    """The form that a text describes. Raises ValueError, naming what it cannot read."""
    if text == NONE:
        return RopeScaling()
    kind, _, rest = text.partition(":")
    names = {SHORT.get(field.name, field.name): field.name for field in fields(RopeScaling)[1:]}
    values: dict[str, Json] = {}
    for word in filter(None, rest.split(",")):
        name, equals, value = word.partition("=")
        if not equals or name not in names or names[name] in values:
            raise ValueError(
                f"rope_scaling has {word[:60]!r}; expected {NONE}, or TYPE:NAME=NUMBER,... with each of "
                f"{', '.join(names)} at most once"
            )
        values[names[name]] = list(map(_plain, value.split("/"))) if name in LISTS else _plain(value)
    return from_json(RopeScaling, {"rope_type": kind} | values)


def _written(value: float | bool | tuple[float, ...]) -> str:
    if isinstance(value, tuple):
        return "/".join(map(_written, value))
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if value == int(value) else repr(value)  # either is read back to the bit


def _plain(text: str) -> Json:
    """A number or a truth value; any other text as it is, which no field takes."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text, text)


class Frequencies(NamedTuple):
    """What a form of RoPE comes to for one length of sequence: angle = position x frequency."""

    inverse_D: tuple[float, ...]  # radians per token, one for each pair of rotated dimensions
    attention_factor: float  # cosine and sine are multiplied by it


def rope_frequencies(scaling: RopeScaling, base: float, head_dim: int, seq_len: int) -> Frequencies:
    """Frequencies of heads of `head_dim` dimensions in a sequence of `seq_len` tokens, in float64.

    With context parallelism `seq_len` is the length of the whole sequence, on every rank. Raises ValueError for a
    head that cannot be rotated so.
    """
    if (reason := scaling.unsupported_reason(head_dim)) is not None:
        raise ValueError(reason)
    rotated = scaling.rotated(head_dim)
    if scaling.rope_type == "dynamic":
        longer = max(1.0, seq_len / scaling.original_max_position_embeddings)
        base *= (scaling.factor * longer - (scaling.factor - 1)) ** (rotated / (rotated - 2))
    plain_D = tuple(base ** (-index / rotated) for index in range(0, rotated, 2))
    if scaling.rope_type == "linear":
        return Frequencies(tuple(frequency / scaling.factor for frequency in plain_D), 1.0)
    if scaling.rope_type == "llama3":
        return Frequencies(tuple(_llama3(scaling, frequency) for frequency in plain_D), 1.0)
    if scaling.rope_type == "yarn":
        return Frequencies(_yarn(scaling, base, plain_D), scaling.attention_factor or _factor_of_yarn(scaling))
    if scaling.rope_type == "longrope":
        long = seq_len > scaling.original_max_position_embeddings
        divisors = scaling.long_factor if long else scaling.short_factor
        frequencies = tuple(frequency / divisor for frequency, divisor in zip(plain_D, divisors, strict=True))
        return Frequencies(frequencies, scaling.attention_factor or _longrope_factor(scaling))
    return Frequencies(plain_D, 1.0)


def _llama3(scaling: RopeScaling, frequency: float) -> float:
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)  # within the original context
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return _between(frequency / scaling.factor, frequency, ramp)


def _yarn(scaling: RopeScaling, base: float, plain_D: tuple[float, ...]) -> tuple[float, ...]:
    rotated = 2 * len(plain_D)

    def dimension(rotations: float) -> float:
        """The dimension that turns this many times within the original context."""
        context = scaling.original_max_position_embeddings
        return rotated * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotated - 1)
    width = last - first or 0.001  # as published: a ramp without width would divide by zero
    return tuple(
        _between(frequency, frequency / scaling.factor, (index - first) / width)
        for index, frequency in enumerate(plain_D)
    )


def _between(start: float, end: float, ramp: float) -> float:
    """From `start` at ramp 0 and below to `end` at ramp 1 and above."""
    ramp = min(max(ramp, 0.0), 1.0)
    return start * (1 - ramp) + end * ramp


def _yarn_factor(factor: float, scale: float = 1.0) -> float:
    """YaRN's factor of cosine and sine, whose square is that of the scores."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _factor_of_yarn(scaling: RopeScaling) -> float:
    if scaling.mscale and scaling.mscale_all_dim:
        return _yarn_factor(scaling.factor, scaling.mscale) / _yarn_factor(scaling.factor, scaling.mscale_all_dim)
    return _yarn_factor(scaling.factor)


def _longrope_factor(scaling: RopeScaling) -> float:
    if scaling.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position_embeddings))


def rotary_tables(
    positions_L: Tensor, head_dim: int, base: float, dtype: torch.dtype, scaling: str = NONE, seq_len: int = 0
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, each [L, half of the rotated dimensions] in `dtype`.

    The angles are formed in float64: positions in the millions times a rounded frequency leave fp32 off by up to
    0.06 rad at 1M tokens.

    Args:
        positions_L: positions in the whole sequence of the tokens held here.
        head_dim: dimensions of a head.
        base: of the frequencies.
        dtype: of the tables.
        scaling: the form of RoPE, as a text.
        seq_len: tokens of the whole sequence; two forms depend on it.
    """
    inverse_D, attention_factor = _frequency_table(scaling, base, head_dim, seq_len, positions_L.device)
    angles_LD = positions_L.double().outer(inverse_D)
    cos_LD, sin_LD = angles_LD.cos(), angles_LD.sin()
    if attention_factor != 1:
        cos_LD, sin_LD = cos_LD * attention_factor, sin_LD * attention_factor
    return cos_LD.to(dtype), sin_LD.to(dtype)


@lru_cache(maxsize=64)
def _frequency_table(
    scaling: str, base: float, head_dim: int, seq_len: int, device: torch.device
) -> tuple[Tensor, float]:
    """The frequencies on a device. Kept, because a step that CUDA graphs replay may copy nothing from the host."""
    import torch

    inverse_D, attention_factor = rope_frequencies(parse_rope(scaling), base, head_dim, seq_len)
    return torch.tensor(inverse_D, dtype=torch.float64, device=device), attention_factor


def read_rope(
    config: Mapping[str, object], layer_type: str | None = None, *, base: float = DEFAULT_BASE
) -> tuple[float, str]:
    """Base and form of the RoPE that a Hugging Face configuration describes.

    Release 4 has `rope_theta` beside `rope_scaling`, release 5 has both in `rope_parameters`, which may be a
    dictionary per type of layer.

    Args:
        config: the content of config.json.
        layer_type: such as `full_attention`, where layers differ; None for a model whose layers are all equal.
        base: of a configuration that names none.

    Raises ValueError, naming key and value, for an unknown form, an unknown key and a missing one.
    """
    bases = [] if config.get("rope_theta") is None else [_number("rope_theta", config["rope_theta"])]
    found: list[dict[str, Any]] = []
    for key in ("rope_scaling", "rope_parameters"):
        given = config.get(key)
        if given is None:
            continue
        if not isinstance(given, dict):
            raise ValueError(f"{key} is {given!r}; expected a dictionary with a rope_type")
        entry = _of_layers(key, given, layer_type)
        if entry.get("rope_theta") is not None:
            bases.append(_number(f"{key}.rope_theta", entry["rope_theta"]))
        found.append({name: value for name, value in entry.items() if name != "rope_theta" and value is not None})
    if len(set(bases)) > 1:
        raise ValueError(f"rope_theta is given as {sorted(set(bases))}; keep the one the model was trained with")
    readings = {_scaling(entry, config) for entry in found if entry} or {_scaling({}, config)}
    if len(readings) > 1:
        raise ValueError("rope_scaling and rope_parameters differ; keep the one that the model was trained with")
    return bases[0] if bases else base, str(readings.pop())


def write_rope(base: float, text: str) -> dict[str, object]:
    """Keys of a Hugging Face configuration that describe this RoPE, as releases 4 and 5 both read them.

    Three forms have `max_position_embeddings` among them: `dynamic` reads it, and release 4 takes the factor of the
    others from it, whatever `factor` says.
    """
    scaling = parse_rope(text)
    written: dict[str, Any] = {"rope_theta": base, "rope_scaling": None}
    if scaling.partial_rotary_factor != 1:
        written["partial_rotary_factor"] = scaling.partial_rotary_factor
    if scaling.rope_type == "default":
        return written
    needed, optional = KEYS[scaling.rope_type]
    entry: dict[str, Any] = {"rope_type": scaling.rope_type}
    for field in fields(scaling):
        value = getattr(scaling, field.name)
        if field.name in needed or (field.name in optional and value != field.default):
            entry[field.name] = list(value) if isinstance(value, tuple) else value
    if scaling.rope_type == "dynamic":  # which is read from the configuration itself
        written["max_position_embeddings"] = entry.pop(ORIGINAL)
    if scaling.rope_type in ("yarn", "longrope") and scaling.factor:
        written["max_position_embeddings"] = round(scaling.factor * scaling.original_max_position_embeddings)
    if scaling.rope_type == "longrope":
        written[ORIGINAL] = entry[ORIGINAL]
    return written | {"rope_scaling": entry}


def _of_layers(key: str, given: dict[str, Any], layer_type: str | None) -> dict[str, object]:
    """The dictionary of one type of layer: the whole, or the one below that type's name."""
    nested = {name: entry for name, entry in given.items() if isinstance(entry, dict) or name == layer_type}
    if not nested:
        return given
    if nested.keys() != given.keys():
        raise ValueError(f"{key} is {given!r}; expected one dictionary, or one per type of layer")
    if layer_type is None and len(nested) == 1:
        layer_type = next(iter(nested))
    if layer_type not in nested:
        expected = "one for all layers" if layer_type is None else f"one for {layer_type}"
        raise ValueError(f"{key} has dictionaries for {', '.join(sorted(nested))}; expected {expected}")
    return nested[layer_type] or {}


def _scaling(entry: Mapping[str, object], config: Mapping[str, object]) -> RopeScaling:
    """One dictionary of a configuration, without nulls and `rope_theta`. Raises ValueError."""
    values = dict(entry)
    kind = values.pop("type", None)
    kind = values.pop("rope_type", "default" if kind is None else kind)
    if not isinstance(kind, str) or kind not in KEYS:
        raise ValueError(f"rope_type is {kind!r}, which this model does not have; expected {', '.join(KEYS)}")
    needed, optional = KEYS[kind]
    if (part := config.get("partial_rotary_factor")) is not None:
        values.setdefault("partial_rotary_factor", part)
    context = config.get("max_position_embeddings")
    if kind == "dynamic":
        values[ORIGINAL] = context
    elif ORIGINAL in needed:
        values[ORIGINAL] = config.get(ORIGINAL) or values.get(ORIGINAL) or context
    read: dict[str, Any] = {"rope_type": kind}
    for name, value in values.items():
        if value is None:
            continue
        if name not in (*COMMON, *needed, *optional):
            raise ValueError(
                f"{name} is {value!r}, which rope_type {kind} does not have; expected only "
                f"{', '.join((*needed, *optional)) or 'rope_theta'}"
            )
        read[name] = value
    if kind in ("yarn", "longrope") and "factor" not in read and context and read.get(ORIGINAL):
        read["factor"] = _number("max_position_embeddings", context) / _number(ORIGINAL, read[ORIGINAL])
    return from_json(RopeScaling, read)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; expected a number")
    return float(value)
