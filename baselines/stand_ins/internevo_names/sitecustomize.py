"""Stands for two names that InternEvo imports; Python runs a file of this name when it starts.

`transformers.modeling_utils.shard_checkpoint`, which transformers 5 has no longer, writes checkpoints in Hugging Face's
format, and no attempt writes one. `torch.utils.tensorboard` needs tensorboard; the writer here keeps nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_TRANSFORMERS, _NAME = "transformers.modeling_utils", "shard_checkpoint"
_TENSORBOARD = "torch.utils.tensorboard"


class SummaryWriter:
    """Takes every call and keeps nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def _absent(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("the stand-in for shard_checkpoint writes nothing; install transformers 4.29")


class _LoaderWithName(importlib.abc.Loader):
    """A module as its own loader makes it, with the name added where it lacks it."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if not hasattr(module, _NAME):
            setattr(module, _NAME, _absent)


class _WriterLoader(importlib.abc.Loader):
    """A module that holds the writer alone."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == _TENSORBOARD and importlib.util.find_spec("tensorboard") is None:
            return importlib.machinery.ModuleSpec(name, _WriterLoader())
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == _TRANSFORMERS else None
        if spec is not None and spec.loader is not None:
            spec.loader = _LoaderWithName(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
