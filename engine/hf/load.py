"""A folder in Hugging Face's layout as a shape and the tensors that fill it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from engine.hf.config import is_tied, shape_of
from engine.hf.names import EMBEDDING, HEAD, hugging_face_name, parameter_sizes
from engine.hf.shards import Shards, read_json, safetensors
from engine.settings import ModelShape

if TYPE_CHECKING:
    from torch import Tensor

READABLE = ("F64", "F32", "F16", "BF16")  # by safetensors' names


def import_hugging_face(directory: Path) -> tuple[ModelShape, Iterator[tuple[str, Tensor]]]:
    """The model in `directory`: its shape, named after the folder, and its tensors under this engine's names.

    The iterator yields every parameter of `engine.model.Decoder(shape)` once, in the model's order, on the CPU and in
    the dtype of the file; one tensor is read at a time. Everything is checked before this returns, so all
    tensors fit. A tied LM head is a copy of the embedding: training continues with two.

    Raises ValueError: one sentence that names the file, for anything but a whole Llama or Qwen3 with plain RoPE.
    """
    safetensors()
    shape, shards, source = _checked(directory)
    return shape, _tensors(shards, source)


def hugging_face_shape(directory: Path) -> ModelShape:
    """The shape of the model in `directory`, with all checks of `import_hugging_face`.

    Reads `config.json` and the headers of the safetensors files, no tensor; needs no torch. Raises ValueError.
    """
    return _checked(directory)[0]


def ties_head(directory: Path) -> bool:
    """Whether the model in `directory` has one matrix for the embedding and the LM head. Raises OSError, ValueError."""
    return is_tied(read_json(directory / "config.json"))


def _checked(directory: Path) -> tuple[ModelShape, Shards, dict[str, str]]:
    """The model's shape, its files, and the name of the tensor that fills each parameter. Raises ValueError."""
    path = directory / "config.json"
    config = read_json(path)
    try:
        shape, tied = shape_of(config, directory.resolve().name), is_tied(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    shards = Shards(directory)
    return shape, shards, _sources(shape, shards, directory, tied)


def _sources(shape: ModelShape, shards: Shards, directory: Path, tied: bool) -> dict[str, str]:
    """Name of the tensor that fills each parameter. Raises ValueError unless all fit and none is left over."""
    if shape.layers > len(shards.names):  # before a damaged file makes this list very many layers
        raise ValueError(
            f"{directory}: has {len(shards.names)} tensors, too few for {shape.layers} layers; fetch it again"
        )
    sizes = parameter_sizes(shape)
    source = {name: hugging_face_name(EMBEDDING if tied and name == HEAD else name) for name in sizes}
    missing = sorted(set(source.values()) - shards.names)
    if missing:
        raise ValueError(f"{directory}: lacks {_some(missing)}; fetch the missing files")
    # Older exports hold RoPE's frequencies, which follow from the base, and a tied head beside the embedding.
    spare = {name for name in shards.names if name.endswith("rotary_emb.inv_freq")} | {hugging_face_name(HEAD)}
    surplus = sorted(shards.names - set(source.values()) - spare)
    if surplus:
        raise ValueError(
            f"{directory}: holds {_some(surplus)}, which this model has no place for; choose a plain model"
        )
    for name, size in sizes.items():
        found, dtype = shards.described(source[name])
        if found != tuple(size):
            raise ValueError(
                f"{directory}: {source[name]} has size {list(found)}, but config.json makes it {list(size)}; "
                "fetch both from one place"
            )
        if dtype not in READABLE:
            raise ValueError(
                f"{directory}: {source[name]} is saved as {dtype}; expected one of {', '.join(READABLE)}: "
                "choose a model that is not quantized"
            )
    return source


def _tensors(shards: Shards, source: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    import torch

    for name, external in source.items():
        # Cloned: the library may return a view of the mapped file, and a tied head needs memory of its own.
        yield name, shards.read(external).clone(memory_format=torch.contiguous_format)


def _some(names: list[str]) -> str:
    """A few names and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
