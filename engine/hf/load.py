"""A folder in Hugging Face's layout as a shape and the tensors that fill it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from engine.hf.safetensors_folder import SafetensorsFolder, read_json, safetensors
from engine.models.architecture import Stored, architecture_named, shape_of
from engine.settings import ModelShape

if TYPE_CHECKING:
    from torch import Tensor

READABLE = ("F64", "F32", "F16", "BF16")  # by safetensors' names


def import_hugging_face(directory: Path) -> tuple[ModelShape, Iterator[tuple[str, Tensor]]]:
    """The model in `directory`: its shape, named after the folder, and its tensors under this engine's names.

    The iterator yields every parameter of `engine.models.decoder.Decoder(shape)` once, on the CPU and in the dtype of
    the file (one stored without its offset in fp32 or wider); one tensor is read at a time. Everything is checked
    before this returns, so all tensors fit.

    Raises ValueError: one sentence that names the file, for anything but a whole model of an architecture of
    `engine.models`.
    """
    safetensors()
    shape, shards, stored = _checked(directory)
    return shape, _tensors(shape, shards, stored)


def hugging_face_shape(directory: Path) -> ModelShape:
    """The shape of the model in `directory`, with all checks of `import_hugging_face`.

    Reads `config.json` and the headers of the safetensors files, no tensor; needs no torch. Raises ValueError.
    """
    return _checked(directory)[0]


def configured_shape(directory: Path) -> ModelShape:
    """The shape that `config.json` in `directory` describes, named after the folder; weights are not looked at.

    Needs no torch. Raises ValueError.
    """
    path = directory / "config.json"
    config = read_json(path)
    try:
        return shape_of(config, directory.resolve().name)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _checked(directory: Path) -> tuple[ModelShape, SafetensorsFolder, list[Stored]]:
    """The model's shape, its files, and the tensors that fill its parameters. Raises ValueError unless all fit and none
    is left over."""
    shape, shards = configured_shape(directory), SafetensorsFolder(directory)
    if shape.layers > len(shards.names):  # before a damaged file makes this list very many layers
        raise ValueError(
            f"{directory}: has {len(shards.names)} tensors, too few for {shape.layers} layers; fetch it again"
        )
    sizes, architecture = shape.parameter_sizes(), architecture_named(shape.architecture)
    stored = architecture.stored(shape)
    names = {each.name for each in stored}
    missing = sorted(names - shards.names)
    if missing:
        raise ValueError(f"{directory}: lacks {_some(missing)}; fetch the missing files")
    # Older exports hold RoPE's frequencies, which follow from the base, and a tied head beside the embedding.
    spare = {name for name in shards.names if name.endswith("rotary_emb.inv_freq")}
    surplus = sorted(shards.names - names - spare - {architecture.stored_name("head.weight")})
    if surplus:
        raise ValueError(
            f"{directory}: holds {_some(surplus)}, which this model has no place for; choose a plain model"
        )
    for each in stored:
        size = each.size(sizes)
        found, dtype = shards.described(each.name)
        if found != size:
            raise ValueError(
                f"{directory}: {each.name} has size {list(found)}, but config.json makes it {list(size)}; "
                "fetch both from one place"
            )
        if dtype not in READABLE:
            raise ValueError(
                f"{directory}: {each.name} is saved as {dtype}; expected one of {', '.join(READABLE)}: "
                "choose a model that is not quantized"
            )
    return shape, shards, stored


def _tensors(shape: ModelShape, shards: SafetensorsFolder, stored: list[Stored]) -> Iterator[tuple[str, Tensor]]:
    import torch

    sizes = shape.parameter_sizes()
    for each in stored:
        if not each.parts:
            continue
        for name, part in zip(each.parts, each.split(shards.read(each.name), sizes), strict=True):
            # Cloned: the library may return a view of the mapped file.
            yield name, part.clone(memory_format=torch.contiguous_format)


def _some(names: list[str]) -> str:
    """A few names and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
