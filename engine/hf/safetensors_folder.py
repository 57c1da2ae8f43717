"""Safetensors shards in one folder: which tensor is in which file, and reading one at a time.

Names, sizes and dtypes are read from the files' headers, without torch, also by the program that starts ranks.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def safetensors() -> ModuleType:
    """The library, with `safetensors.torch` loaded. Raises ValueError, naming the line that installs it, without it."""
    _imported("safetensors.torch")
    return _imported("safetensors")


def _imported(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"Hugging Face models need the safetensors library, which cannot be imported here ({error}); "
            "install it with: pip install 'burst-harness[train]'"
        ) from error


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from a file. Raises ValueError naming the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror}); give a folder that holds a whole model"
        ) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or a number beyond Python's limits
        raise ValueError(f"{path}: not readable as JSON ({error}); fetch the file again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds no JSON object; fetch the file again")
    return content


class SafetensorsFolder:
    """The tensors of a folder, opened file by file when first asked for and read one at a time."""

    def __init__(self, directory: Path) -> None:
        """Raises ValueError when the folder holds no safetensors, or an index that names other folders' files."""
        self._library = _imported("safetensors")
        self._opened: dict[tuple[Path, str], Any] = {}
        if (directory / INDEX).exists():
            self._file_of = _indexed(directory)
        elif (directory / SINGLE).exists():
            file = directory / SINGLE
            self._file_of = dict.fromkeys(self._open(file).keys(), file)
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
    weight_map = read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise ValueError(f"{directory / INDEX}: has no weight_map; fetch the file again")
    for file in weight_map.values():
        # An index must not lead out of its folder.
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{directory / INDEX}: names {file!r}; expected files of this folder")
    return {name: directory / file for name, file in weight_map.items()}
