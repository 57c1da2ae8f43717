"""The engine's public signatures say what they take and give: no `Any`, but where the reason is written here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ENGINE = Path(__file__).parents[1] / "engine"
# Signatures that may have `Any`, and why.
EXCEPTIONS = {
    "engine/ops/autograd.py: kernels_for": "a module, named by its path, with functions of its own",
}
# Names without an underscore, and what makes a public class's objects or calls them.
SPECIAL = ("__init__", "__new__", "__call__")


def test_no_public_signature_of_the_engine_has_any() -> None:
    found = [f"{path.relative_to(ENGINE.parent)}: {name}" for path in sources() for name in untyped(path.read_text())]
    assert sorted(set(found)) == sorted(EXCEPTIONS)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def f(x: Any): ...", ["f"]),
        ("async def f(*, x: dict[str, Any] | None = None): ...", ["f"]),
        ("def f(*x: int, **y: typing.Any): ...", ["f"]),
        ("def f() -> 'list[Any]': ...", ["f"]),
        ("class C:\n def __init__(self, x: Any): ...\n def _f(self, x: Any): ...", ["C.__init__"]),
        ("class C:\n class D:\n  @property\n  def f(self) -> Any: ...", ["C.D.f"]),
        ("class C:\n x: Any\n _y: Any", ["C.x"]),
        ("if True:\n def f(x: Any): ...", ["f"]),
        ("Report = Callable[[dict[str, Any]], None]", ["Report"]),
        ("Report: TypeAlias = 'Callable[[Any], None]'", ["Report"]),
        ("LIMITS: dict[str, Any] = {}", ["LIMITS"]),
        # Private, of a private class, inside of a function, or autograd's context.
        ("def _f(x: Any): ...\nclass _C:\n def f(x: Any): ...\n_X: Any = 1\n_Y = list[Any]", []),
        ("def f(x: int) -> int:\n y: Any = x\n def g(z: Any): ...\n return cast(Any, y)", []),
        ("class F(torch.autograd.Function):\n @staticmethod\n def forward(ctx: Any, x: Tensor): ...", []),
        ("Many = Anything\ndef f(x: Many) -> object: 'Any'", []),
    ],
)
def test_any_is_found_wherever_a_caller_sees_it(source: str, names: list[str]) -> None:
    assert list(untyped(source)) == names


def sources() -> list[Path]:
    found = sorted(ENGINE.rglob("*.py"))
    assert len(found) > 100
    return found


def untyped(source: str) -> Iterator[str]:
    """Dotted names of what a module shows with `Any` in its types."""
    return _untyped(ast.parse(source).body, "")


def _untyped(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if _is_public(name) and any(map(_has_any, _annotations(node.args, node.returns))):
                    yield prefix + name
            case ast.ClassDef(name=name, body=inner):
                if _is_public(name):
                    yield from _untyped(inner, f"{prefix}{name}.")
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=value):
                is_alias = ast.unparse(annotation).endswith("TypeAlias")
                if _is_public(name) and _has_any(value if is_alias else annotation):
                    yield prefix + name
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript() | ast.BinOp() as value):
                if _is_public(name) and _has_any(value):
                    yield prefix + name
            case ast.If(body=inner, orelse=other) | ast.Try(body=inner, orelse=other):
                yield from _untyped([*inner, *other], prefix)


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name in SPECIAL


def _annotations(arguments: ast.arguments, returns: ast.expr | None) -> Iterator[ast.expr | None]:
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    yield from (each.annotation for each in named if each is not None and each.arg != "ctx")
    yield returns


def _has_any(annotation: ast.expr | None) -> bool:
    if annotation is None:
        return False
    for node in ast.walk(annotation):
        match node:
            case ast.Name(id="Any") | ast.Attribute(attr="Any"):
                return True
            case ast.Constant(value=str(text)) if _has_any(_parsed(text)):  # in quotes
                return True
    return False


def _parsed(text: str) -> ast.expr | None:
    """The expression of an annotation in quotes; None for text that is none, as in a Literal."""
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        return None
