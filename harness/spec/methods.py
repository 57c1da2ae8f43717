"""Every method that can be compared, found by name: the engine's own and one package per system in `baselines/`.

A module is a method because it assigns `METHOD` at its top level. Files are parsed to find out, so only modules that
define one are imported, and those do without torch by contract (`engine/method.py`).
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import baselines
from engine.method import Method
from harness.base.errors import UsageError, nearest

ENGINE_METHOD = "engine.burst"


def all_methods() -> dict[str, Method]:
    """Methods by the name experiment files use, the engine's own first, the others in alphabetical order."""
    return {name: method for name, (_, method) in _registry().items()}


def method_named(name: str) -> Method:
    """Look a method up by name. Raises UsageError with its nearest neighbour."""
    return _entry(name)[1]


def method_module(name: str) -> str:
    """Import path of the module that defines the method: what trial.json tells the worker. Raises UsageError."""
    return _entry(name)[0]


def is_native(method: Method) -> bool:
    """Whether the engine runs the method: only such a method supplies a layout."""
    return getattr(method, "layout", None) is not None


def _entry(name: str) -> tuple[str, Method]:
    registry = _registry()
    if name not in registry:
        raise UsageError(f"unknown method {name}; {nearest(name, registry)}")
    return registry[name]


@cache
def _registry() -> dict[str, tuple[str, Method]]:
    found = [(module, importlib.import_module(module).METHOD) for module in sorted(_baseline_modules())]
    found.sort(key=lambda entry: entry[1].name)
    registry: dict[str, tuple[str, Method]] = {}
    for module, method in [(ENGINE_METHOD, importlib.import_module(ENGINE_METHOD).METHOD), *found]:
        assert method.name not in registry, f"{module} and {registry[method.name][0]} both define method {method.name}"
        registry[method.name] = (module, method)
    return registry


def _baseline_modules() -> Iterator[str]:
    """Import paths of the modules in `baselines/` that define METHOD: packages themselves and modules inside them."""
    for folder in map(Path, baselines.__path__):
        for system in pkgutil.iter_modules([str(folder)]):
            if not system.ispkg:
                continue
            # Not recursive: `upstream/` below a package holds a foreign checkout.
            for file in (folder / system.name).glob("*.py"):
                if _defines_method(file.read_text(encoding="utf-8")):
                    stem = "" if file.stem == "__init__" else f".{file.stem}"
                    yield f"baselines.{system.name}{stem}"


def _defines_method(source: str) -> bool:
    for statement in ast.parse(source).body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "METHOD" for target in targets):
            return True
    return False
