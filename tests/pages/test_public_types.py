"""Public signatures say what they take and give: no `Any`, but where the reason is written here. A class has a name of
its own."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("burst", "conform", "engine", "harness", "baselines", "cluster")
# Of other projects: what stands in for their packages, what is called with their types by their interpreters, and what
# calls them to be judged.
NOT_OURS = ("conform/targets/", "baselines/stand_ins/", "baselines/programs/", "/upstream/")
_COLUMNS = "a column belongs to a table of lines of one kind, which each table has of its own"
_SETTING = "a setting has the type of its field in TrialSettings"
_JSON = "JSON of another process, read by key where it arrives"
_READ = "a value of a file has the type that the caller asks for"
_RESULT = "a method of another process has the result that its name says"
_RAY = "what Ray gives has no types, since Ray is imported where it is used"
# Signatures that may have `Any`, and why.
EXCEPTIONS = {
    "conform/target.py: LoadedTarget.function": "a function of a file of the user's, as its contract says",
    "engine/ops/autograd.py: kernels_for": "a module, named by its path, with functions of its own",
    "engine/ops/norm.py: kernels": "the same",
    "harness/report/results.py: Row": "columns of a record, as pandas reads them: each has a type of its own",
    "harness/report/tables/table.py: Column.form": _COLUMNS,
    "harness/report/tables/table.py: Column.value": _COLUMNS,
    "harness/report/tables/table.py: number": _COLUMNS,
    "harness/report/tables/table.py: table_of": _COLUMNS,
    "harness/report/tables/table.py: text": _COLUMNS,
    "harness/spec/experiment.py: Experiment.exclude": _SETTING,
    "harness/spec/experiment.py: Experiment.fixed": _SETTING,
    "harness/spec/experiment.py: Experiment.sweep": _SETTING,
    "harness/spec/setting.py: read_setting": _SETTING,
    "harness/spec/table.py: SourcedValue.value": _SETTING,
    "harness/spec/table.py: values_for": _SETTING,
    "harness/launch/forkserver.py: ForkServer.events": _JSON,
    "harness/launch/zygote.py: Zygote.serve": _JSON,
    "harness/launch/zygote.py: become": _JSON,
    "cluster/active/fleet.py: converse": _JSON,
    "cluster/active/measurement.py: found": _JSON,
    "cluster/active/measurement.py: line": _JSON,
    "cluster/ray_cluster/node.py: ask": _JSON,
    "cluster/ray_cluster/node_program.py: facts": _JSON,
    "cluster/ray_cluster/node_program.py: start": _JSON,
    "cluster/ray_cluster/node_program.py: status": _JSON,
    "cluster/ray_cluster/node_program.py: stop": _JSON,
    "cluster/files/reader.py: Node.plain": _READ,
    "cluster/files/reader.py: convert": _READ,
    "cluster/ray_cluster/up.py: own_address": _JSON,
    "conform/target.py: Part": "what a target's own function gives and takes",
    "engine/reader.py: parts": _READ,
    "harness/launch/ray/connection.py: RayConnection.nodes": _RAY,
    "harness/launch/ray/connection.py: RayMember.actor": _RAY,
    "harness/launch/ray/connection.py: RayMember.result": _RESULT,
    "harness/launch/ray/connection.py: why_lost": _RAY,
    "harness/launch/ray/host.py: Description.machine": _JSON,
    "harness/launch/ray/job.py: ReservedHost.group": _RAY,
    "harness/launch/ray/watch.py: Member.call": _RESULT,
    "harness/launch/ray/watch.py: Member.result": _RESULT,
    "harness/launch/torchrun.py: TorchrunMember.result": _RESULT,
    "harness/spec/setting.py: leaf_types": _SETTING,
}
# Names without an underscore, and what makes a public class's objects or calls them.
SPECIAL = ("__init__", "__new__", "__call__")


@pytest.mark.parametrize("package", PACKAGES)
def test_no_public_signature_has_any(package: str) -> None:
    found = {f"{path.relative_to(ROOT)}: {name}" for path in sources(package) for name in untyped(path.read_text())}
    allowed = {name for name in EXCEPTIONS if name.startswith(f"{package}/")}
    assert (sorted(found - allowed), sorted(allowed - found)) == ([], [])


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_ships_its_types(package: str) -> None:
    """Type checkers read annotations of an installed package only where `py.typed` lies in it."""
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    assert (ROOT / package / "py.typed").is_file()
    assert "py.typed" in shipped


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


def test_a_class_name_means_one_thing_in_all_packages() -> None:
    places: dict[str, list[str]] = {}
    for path in (path for package in PACKAGES for path in sources(package)):
        for node in ast.parse(path.read_text()).body:  # a class inside another is named by both
            if isinstance(node, ast.ClassDef) and _is_public(node.name):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def sources(package: str) -> list[Path]:
    found = [path for path in sorted((ROOT / package).rglob("*.py")) if not any(part in str(path) for part in NOT_OURS)]
    assert len(found) > (3 if package in ("burst", "conform") else 50)
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
