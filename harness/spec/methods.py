"""Every method that can be compared, found by name: the engine's own and one package per system in `baselines/`.

A module is a method because it assigns `METHOD` at its top level. Files are parsed to find out, so only modules that
define one are imported, and those do without torch by contract (`engine/method.py`).
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import baselines
from engine.method import Method
from harness.base.errors import UsageError, nearest

ENGINE_METHOD = "engine.burst"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")  # it is in ids of trials, which are names of folders


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
        for folder in map(Path, baselines.__path__):
            if name.isidentifier() and (file := folder / name / "__init__.py").is_file():
                raise UsageError(
                    f"unknown method {name}: {file} assigns no METHOD at its top level, or one of another name; see "
                    "docs/own-method.md"
                )
        raise UsageError(f"unknown method {name}; {nearest(name, registry)}")
    return registry[name]


@cache
def _registry() -> dict[str, tuple[str, Method]]:
    found = [(module, _method_of(module)) for module in sorted(_baseline_modules())]
    found.sort(key=lambda entry: entry[1].name)
    registry: dict[str, tuple[str, Method]] = {}
    for module, method in [(ENGINE_METHOD, importlib.import_module(ENGINE_METHOD).METHOD), *found]:
        if method.name in registry:  # as in a copy that was not renamed
            raise UsageError(
                f"{registry[method.name][0]} and {module} both define method {method.name}; give one of them another "
                "name"
            )
        registry[method.name] = (module, method)
    return registry


def _method_of(module: str) -> Method:
    """The METHOD of a module. Raises UsageError where it is none, since a module may be a user's."""
    found = importlib.import_module(module).METHOD
    if isinstance(found, type):
        raise UsageError(f"METHOD of {module} is the class {found.__name__}; write METHOD = {found.__name__}()")
    for part in ("name", "system", "source", "refuse"):
        if not hasattr(found, part):
            raise UsageError(f"METHOD of {module} has no {part}; docs/own-method.md says what a method has")
    if not isinstance(found.name, str) or not _NAME.fullmatch(found.name):
        raise UsageError(f"METHOD of {module} has the name {found.name!r}; expected letters, digits, '_' and '-'")
    method: Method = found
    return method


def _baseline_modules() -> Iterator[str]:
    """Import paths of the modules in `baselines/` that define METHOD: packages themselves and modules inside them."""
    for folder in map(Path, baselines.__path__):
        for system in pkgutil.iter_modules([str(folder)]):
            if not system.ispkg:
                continue
            # Not recursive: `upstream/` below a package holds a foreign checkout.
            for file in (folder / system.name).glob("*.py"):
                if _defines_method(file):
                    stem = "" if file.stem == "__init__" else f".{file.stem}"
                    yield f"baselines.{system.name}{stem}"


def _defines_method(file: Path) -> bool:
    """Raises UsageError for a file that is no Python: a user's own is in no other way noticed before it is imported."""
    try:
        statements = ast.parse(file.read_bytes()).body
    except (SyntaxError, ValueError) as error:
        line = error.lineno if isinstance(error, SyntaxError) and error.lineno else 1
        says = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UsageError(f"{file}:{line}: this is no Python ({says}); mend it, or move it out of baselines") from error
    for statement in statements:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "METHOD" for target in targets):
            return True
    return False
