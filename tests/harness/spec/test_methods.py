"""Methods are found by name, without torch."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from harness.base.errors import UsageError
from harness.spec.methods import all_methods, method_module, method_named

BASELINES = Path(__file__).parents[3] / "baselines"
ADDED = """
from baselines.ring_baseline import KeyValueRing


class Added(KeyValueRing):
    name, system, source, sharding = "added", "A ring", "a paper", "striped"


METHOD = Added()
"""


def test_the_engine_and_its_baselines_are_found() -> None:
    names = list(all_methods())
    assert names[0] == "burst"
    assert names[1:] == sorted(names[1:])
    files = [path for path in BASELINES.glob("*/*.py") if "METHOD =" in path.read_text("utf-8")]
    modules = {path.parent.name if path.stem == "__init__" else path.stem for path in files}
    assert {name.removesuffix("_upstream") for name in names[1:]} == modules != set()


def test_a_package_added_beside_the_others_is_found(tmp_path: Path) -> None:
    (tmp_path / "added").mkdir()
    (tmp_path / "added" / "__init__.py").write_text(ADDED, encoding="utf-8")
    code = (
        "import sys, baselines\n"
        "baselines.__path__.append(sys.argv[1])\n"
        "from harness.spec.methods import all_methods, method_module\n"
        "print(*all_methods(), method_module('added'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [*sorted([*all_methods(), "added"], key=order), "baselines.added"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("METHOD = Added()", "METHOD = ("), "__init__.py:9: this is no Python ('(' was never closed); mend it, or"),
        (
            ("METHOD = Added()", "METHOD = Added"),
            "METHOD of baselines.added is the class Added; write METHOD = Added()",
        ),
        (("METHOD = Added()", "METHOD = 3"), "METHOD of baselines.added has no name; docs/own-method.md says what a"),
        (("METHOD = Added()", "method = Added()"), "__init__.py assigns no METHOD at its top level, or one of another"),
        (('"added", "A', '"other", "A'), "__init__.py assigns no METHOD at its top level, or one of another name; see"),
        (('"added", "A', '"../added", "A'), "has the name '../added'; expected letters, digits, '_' and '-'"),
        (('"added", "A', '"ring", "A'), "both define method ring; give one of them another name"),
        (
            ("METHOD =", "Added.refuse = lambda *_: None\nAdded.layout = lambda *_: 'stripes'\nMETHOD ="),
            "layout of method added returned 'stripes'; expected contiguous, zigzag or striped, or a Layout",
        ),
        (
            ("METHOD =", "Added.refuse = lambda *_: True\nMETHOD ="),
            "refuse of method added returned True; expected None",
        ),
    ],
)
def test_a_method_that_is_none_is_refused_in_one_sentence(
    change: tuple[str, str], message: str, tmp_path: Path
) -> None:
    """It is a user's own, and every command that knows methods would end in a traceback."""
    (tmp_path / "added").mkdir()
    (tmp_path / "added" / "__init__.py").write_text(ADDED.replace(*change), encoding="utf-8")
    (tmp_path / "exp.yaml").write_text(
        "title: t\ntask: train\nmodel: tiny\nsweep: {method: added, seq_len: 128, cp_size: 2}\n", encoding="utf-8"
    )
    code = (
        "import sys, baselines\n"
        "baselines.__path__.append(sys.argv[1])\n"
        "from harness.cli import main\n"
        "sys.exit(main(['plan', sys.argv[1] + '/exp.yaml']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert message in done.stderr
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("burst: ")
    assert done.stderr.count("\n") == 1


def order(name: str) -> tuple[bool, str]:
    return name != "burst", name


def test_the_module_of_a_method_defines_it() -> None:
    for name, method in all_methods().items():
        assert method.name == name
        assert importlib.import_module(method_module(name)).METHOD is method
        assert method.system
        assert method.source


def test_an_unknown_method_names_its_nearest_neighbour() -> None:
    with pytest.raises(UsageError, match="unknown method megatron_cpp; did you mean megatron_cp"):
        method_named("megatron_cpp")
    with pytest.raises(UsageError, match=r"unknown method xyzzy; expected burst, .* or \w+"):
        method_module("xyzzy")
