"""Models in Hugging Face's layout, in and out: a folder of `config.json` and safetensors files.

`engine.models.architecture` converts a shape to a configuration and back and has the names of tensors. Nothing is ever
unpickled. Whether a folder fits a model is checked before ranks start, so only reading and writing tensors imports
torch: names, sizes and dtypes are read from the files' headers.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from engine.atomic import flush_to_disk
from engine.lora import MODULES, Lora, adapter_sizes
from engine.models.architecture import Stored, architecture_named, config_of, shape_of
from engine.reader import read_regular
from engine.shape import ModelShape

if TYPE_CHECKING:
    import torch
    from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
GENERATION = "generation_config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
LENGTH = "max_position_embeddings"
READABLE = ("F64", "F32", "F16", "BF16")  # by safetensors' names
SHARD_BYTES = 5_000_000_000  # the hub's own tools long used this limit


def import_hugging_face(directory: Path) -> tuple[ModelShape, Iterator[tuple[str, Tensor]]]:
    """The model in `directory`: its shape, named after the folder, and its tensors under this engine's names.

    The iterator yields every parameter of `engine.models.decoder.Decoder(shape)` once, on the CPU and in the dtype of
    the file (one stored without its offset in fp32 or wider); one tensor is read at a time. Everything is checked
    before this returns, so all tensors fit.

    Raises ValueError: one sentence that names the file, for anything but a whole model of an architecture of
    `engine.models`.
    """
    _library("safetensors.torch")
    shape, shards, stored = _fitting(directory)
    return shape, _tensors(shape, shards, stored)


def hugging_face_shape(directory: Path) -> ModelShape:
    """The shape of the model in `directory`, with all checks of `import_hugging_face`.

    Reads `config.json` and the headers of the safetensors files, no tensor; needs no torch. Raises ValueError.
    """
    return _fitting(directory)[0]


def configured_shape(directory: Path) -> ModelShape:
    """The shape that `config.json` in `directory` describes, named after the folder; weights are not looked at.

    Needs no torch. Raises ValueError.
    """
    path = directory / "config.json"
    config = _json_object(path)
    try:
        return shape_of(config, directory.resolve().name)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _fitting(directory: Path) -> tuple[ModelShape, SafetensorsFolder, list[Stored]]:
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
    surplus = sorted(shards.names - names - spare - {architecture.stored_name("head.weight", shape)})
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


class SafetensorsFolder:
    """The tensors of a folder, opened file by file when first asked for and read one at a time."""

    def __init__(self, directory: Path) -> None:
        """Raises ValueError when the folder holds no safetensors, or an index that names other folders' files."""
        self._library = _library()
        self._opened: dict[tuple[Path, str], Any] = {}
        if (directory / SINGLE).exists():  # before an index that an earlier model left there, as in transformers
            file = directory / SINGLE
            self._file_of = dict.fromkeys(self._open(file).keys(), file)
        elif (directory / INDEX).exists():
            self._file_of = _indexed(directory)
        else:
            raise ValueError(
                f"{directory}: holds neither {INDEX} nor {SINGLE}; give a folder with safetensors "
                "(pickled weights such as pytorch_model.bin are never read)"
            )

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors, as their writer called them."""
        return frozenset(self._file_of)

    def described(self, name: str) -> tuple[tuple[int, ...], str]:
        """Size and dtype (by safetensors' name, such as `BF16`) of a tensor, without reading it. Raises ValueError."""
        try:
            view = self._open(self._file_of[name]).get_slice(name)
            return tuple(view.get_shape()), str(view.get_dtype())
        except self._library.SafetensorError as error:
            raise ValueError(f"{self._file_of[name]}: lacks {name}, which {INDEX} lists ({error})") from error

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU, in the dtype it is saved in."""
        tensor: Tensor = self._open(self._file_of[name], "pt").get_tensor(name)
        return tensor

    def _open(self, file: Path, framework: str = "np") -> Any:
        """The library's view of a file; only with framework `pt` does it need torch."""
        if (file, framework) not in self._opened:
            try:
                self._opened[file, framework] = self._library.safe_open(file, framework=framework)
            except (OSError, self._library.SafetensorError) as error:
                raise ValueError(f"{file}: not readable as safetensors ({error}); fetch the file again") from error
        return self._opened[file, framework]


def _indexed(directory: Path) -> dict[str, Path]:
    weight_map = _json_object(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise ValueError(f"{directory / INDEX}: has no weight_map; fetch the file again")
    for file in weight_map.values():
        # An index must not lead out of its folder.
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{directory / INDEX}: names {file!r}; expected files of this folder")
    return {name: directory / file for name, file in weight_map.items()}


def _json_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ValueError naming the file."""
    try:
        content = json.loads(read_regular(path))
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror}); give a folder that holds a whole model"
        ) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or a number beyond Python's limits
        raise ValueError(f"{path}: not readable as JSON ({error}); fetch the file again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds no JSON object; fetch the file again")
    return content


def _library(module: str = "safetensors") -> ModuleType:
    """A module of the library. Raises ValueError, naming the line that installs it, without it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"Hugging Face models need the safetensors library, which cannot be imported here ({error}); "
            "install it with: pip install 'burst-harness[train]'"
        ) from error


def export_hugging_face(
    state: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    shape: ModelShape,
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    max_positions: int | None = None,
    origin: Path | None = None,
    end_of_text: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write `config.json`, safetensors shards and their index; the folder appears whole or not at all.

    Args:
        state: every parameter of `engine.models.decoder.Decoder(shape)`, whole (not sharded over ranks), by its name.
            Pairs may be made one by one: in the model's order no more than one shard is held at a time.
        shape: of the model.
        directory: a new or empty folder.
        dtype: of the saved tensors; None is fp32, which keeps master weights to the bit.
        max_positions: longest sequence, in tokens, the model was trained for; None leaves readers their default.
        origin: folder of the model that training started from; ids of special tokens, a larger number of positions and
            `generation_config.json` are kept as they are there.
        end_of_text: id that ends a text, of a model without origin; None where there is none. Its other special tokens
            are written as none, because readers would fill in those of Llama 2.
        shard_bytes: most bytes of tensors in one file; a larger tensor has a file of its own.

    Returns `directory`. Raises ValueError for a shape without a counterpart, a folder in use, an `origin` without a
    configuration, and a state that lacks parameters or has others; OSError when it cannot be written.
    """
    import torch

    _library("safetensors.torch")
    dtype = dtype or torch.float32
    before = {} if origin is None else _json_object(origin / "config.json")
    lengths = [length for length in (max_positions, before.get(LENGTH)) if isinstance(length, int)]
    config = config_of(shape, str(dtype).removeprefix("torch."), max(lengths, default=None))
    if origin is None:
        config |= dict.fromkeys(TOKEN_IDS) | {"eos_token_id": end_of_text}
    config |= {key: before[key] for key in TOKEN_IDS if key in before}
    sizes = shape.parameter_sizes()
    stored = {each.name: each for each in architecture_named(shape.architecture).stored(shape)}
    held = {name: math.prod(each.size(sizes)) * dtype.itemsize for name, each in stored.items()}
    shards = shards_of(held, shard_bytes)
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]

    with _whole_folder(directory) as aside:
        _write_json(aside / "config.json", config)
        if origin is not None and (origin / GENERATION).is_file():
            shutil.copyfile(origin / GENERATION, aside / GENERATION)
        for number, tensors in _filled(_joined(_checked(state, sizes), stored, dtype), shards):
            _save(tensors, aside / files[number], aside / "config.json")
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        _write_json(aside / INDEX, {"metadata": {"total_size": sum(held.values())}, "weight_map": weight_map})
    return directory


def adapter_unsupported_reason(shape: ModelShape, lora: Lora) -> str | None:
    """Why peft's files have no place for adapters of these matrices, in one sentence, or None. Needs no torch."""
    architecture = architecture_named(shape.architecture)
    alone = {each.parts[0] for each in architecture.stored(shape) if len(each.parts) == 1 and not each.expert}
    for target in lora.targets:
        if f"blocks.0.{MODULES[target]}.weight" not in alone:
            return (
                f"lora.targets has {target}, for which {architecture.class_name} has no module of its own, so peft "
                "could not load the adapters; leave it out"
            )
    return None


def export_adapters(
    state: Mapping[str, Tensor], shape: ModelShape, lora: Lora, directory: Path, *, base: str, dtype: torch.dtype
) -> Path:
    """Write `adapter_config.json` and `adapter_model.safetensors`, which `peft.PeftModel.from_pretrained` loads.

    Args:
        state: every adapter, whole, by its name (`engine.lora.adapter_sizes`).
        shape: of the model that is adapted.
        lora: which of its matrices are.
        directory: a new or empty folder; it appears whole or not at all.
        base: folder or name of the adapted model, which peft's own tools read.
        dtype: of the saved tensors.

    Returns `directory`. Raises ValueError as `export_hugging_face` does, and for matrices that peft has no place for.
    """
    if reason := adapter_unsupported_reason(shape, lora):
        raise ValueError(reason)
    architecture, modules = architecture_named(shape.architecture), set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in _checked(state, adapter_sizes(shape, lora)):
        place, _, kind = name.rpartition(".")
        module = architecture.stored_name(f"{place}.weight", shape).removesuffix(".weight")
        modules.add(module.rpartition(".")[2])
        tensors[f"base_model.model.{module}.{kind}.weight"] = tensor.to(dtype).contiguous()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    with _whole_folder(directory) as aside:
        _write_json(aside / "adapter_config.json", config)
        _save(tensors, aside / "adapter_model.safetensors", aside / "adapter_config.json")
    return directory


@contextmanager
def _whole_folder(directory: Path) -> Iterator[Path]:
    """A folder to fill, which has another name until the block ends without an error. Raises ValueError for a folder in
    use."""
    target = directory.resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{directory} exists already; give a new folder, or move the old one away")
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.getpid()}.part")
    aside.mkdir()
    try:
        yield aside
        for path in (*aside.iterdir(), aside):
            flush_to_disk(path)
        os.replace(aside, target)
        flush_to_disk(target.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _save(tensors: dict[str, Tensor], path: Path, config: Path) -> None:
    """One file of tensors, with the mode of `config`: the library makes files that only their owner can read.

    Raises OSError as writing any other file does: the library has an error of its own.
    """
    try:
        _library("safetensors.torch").save_file(tensors, path, metadata={"format": "pt"})
        shutil.copymode(config, path)
    except _library().SafetensorError as error:
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
    from torch.distributed.tensor import DTensor

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
    import torch

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
