"""A model's parameters as a folder that transformers loads."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from engine.atomic import flush_to_disk
from engine.hf.safetensors_folder import INDEX, safetensors
from engine.models.architecture import Stored, architecture_named, config_of
from engine.settings import ModelShape

SHARD_BYTES = 5_000_000_000  # the hub's own tools long used this limit


def export_hugging_face(
    state: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    shape: ModelShape,
    directory: Path,
    *,
    dtype: torch.dtype = torch.float32,
    max_positions: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write `config.json`, safetensors shards and their index; the folder appears whole or not at all.

    Args:
        state: every parameter of `engine.models.decoder.Decoder(shape)`, whole (not sharded over ranks), by its name.
            Pairs may be made one by one: in the model's order no more than one shard is held at a time.
        shape: of the model.
        directory: a new or empty folder.
        dtype: of the saved tensors; the default keeps fp32 master weights to the bit.
        max_positions: longest sequence, in tokens, the model was trained for; None leaves readers their default.
        shard_bytes: most bytes of tensors in one file; a larger tensor has a file of its own.

    Returns `directory`. Raises ValueError for a shape without a counterpart, a folder in use, and a state that lacks
    parameters or has others; OSError when it cannot be written.
    """
    library = safetensors()
    target = directory.resolve()
    config = config_of(shape, str(dtype).removeprefix("torch."), max_positions)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{directory} exists already; give a new folder, or move the old one away")
    sizes = shape.parameter_sizes()
    stored = {each.name: each for each in architecture_named(shape.architecture).stored(shape)}
    held = {name: math.prod(each.size(sizes)) * dtype.itemsize for name, each in stored.items()}
    shards = shards_of(held, shard_bytes)
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]

    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.getpid()}.part")
    aside.mkdir()
    try:
        _write_json(aside / "config.json", config)
        for number, tensors in _filled(_joined(_checked(state, sizes), stored, dtype), shards):
            _save(library, tensors, aside / files[number])
            # The library makes files that only their owner can read; the weights get the mode of config.json.
            shutil.copymode(aside / "config.json", aside / files[number])
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        _write_json(aside / INDEX, {"metadata": {"total_size": sum(held.values())}, "weight_map": weight_map})
        for path in (*aside.iterdir(), aside):
            flush_to_disk(path)
        os.replace(aside, target)
        flush_to_disk(target.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return directory


def _save(library: ModuleType, tensors: dict[str, Tensor], path: Path) -> None:
    """One file of tensors. Raises OSError as writing any other file does: the library has an error of its own."""
    try:
        library.torch.save_file(tensors, path, metadata={"format": "pt"})
    except library.SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def shards_of(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Names cut into runs of at most `most` bytes each, in order; a tensor larger than that stands alone."""
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if size > room:
            shards.append([])
            room = most
        shards[-1].append(name)
        room -= size
    return shards


def _checked(
    state: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    sizes: Mapping[str, tuple[int, ...]],
) -> Iterator[tuple[str, Tensor]]:
    """The parameters on the CPU, in the order of `state`. Raises ValueError for a state that is not the model's."""
    missing = set(sizes)
    for name, tensor in state.items() if isinstance(state, Mapping) else state:
        if name not in missing:
            raise ValueError(f"{name} {'is given twice' if name in sizes else 'is no parameter of this shape'}")
        if isinstance(tensor, DTensor):
            raise ValueError(f"{name} is sharded over ranks; pass its full_tensor()")
        if tensor.shape != sizes[name]:
            raise ValueError(f"{name} has size {list(tensor.shape)}; the shape makes it {list(sizes[name])}")
        missing.remove(name)
        yield name, tensor.detach().cpu()
    if missing:
        raise ValueError(f"the state lacks {len(missing)} parameters, {min(missing)} among them; pass the whole model")


def _joined(
    parameters: Iterable[tuple[str, Tensor]], stored: Mapping[str, Stored], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the files, each once all parameters that it holds have been yielded."""
    tensor_of = {part: each for each in stored.values() for part in each.parts}
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, parameter in parameters:
        each = tensor_of[name]
        parts = waiting.setdefault(each.name, {})
        parts[name] = parameter
        if len(parts) == len(each.parts):
            del waiting[each.name]
            yield each.name, each.join([parts[part] for part in each.parts]).to(dtype).contiguous()
    for each in stored.values():
        if not each.parts:
            yield each.name, torch.zeros(each.unused, dtype=dtype)


def _filled(tensors: Iterable[tuple[str, Tensor]], shards: list[list[str]]) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Each shard's number and tensors once all of them have been yielded."""
    number_of = {name: number for number, names in enumerate(shards) for name in names}
    waiting: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        number = number_of[name]
        shard = waiting.setdefault(number, {})
        shard[name] = tensor
        if len(shard) == len(shards[number]):
            yield number, waiting.pop(number)


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
