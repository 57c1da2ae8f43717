"""The wheel, built from the tracked files: it holds every file that the code reads, and asks for few packages."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGES = ("baselines", "burst", "cluster", "conform", "engine", "experiments", "harness", "results/paper")
LEFT_OUT = {"results/paper/README.md"}


def tracked() -> list[str]:
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout, so its files cannot be told from others")
    return [path for path in listed.stdout.splitlines() if (ROOT / path).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for path in tracked():
        if path.split("/")[0] in {"pyproject.toml", "README.md", "LICENSE", *(name.split("/")[0] for name in PACKAGES)}:
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            (source / path).write_bytes((ROOT / path).read_bytes())
    program = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", program], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = out.iterdir()
    assert built.name == f"burst_harness-{PROJECT['version']}-py3-none-any.whl"
    return zipfile.ZipFile(built)


def test_it_holds_every_file_of_the_packages_and_nothing_else(wheel) -> None:
    wanted = {path for path in tracked() if path.startswith(tuple(f"{name}/" for name in PACKAGES))}
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == wanted - LEFT_OUT


def test_it_asks_for_three_packages_and_for_the_others_by_extra(wheel) -> None:
    [name] = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    metadata = Parser().parsestr(wheel.read(name).decode())
    needed = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    assert {each.name for each in needed if each.marker is None} == {"torch", "numpy", "msgspec"}
    assert set(metadata.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    commands = {"harness", "ray", "stacks", "data", "train", "wandb", "trackio", "test"}
    assert {extra for extra in PROJECT["optional-dependencies"] if wanted_by(extra, "pandas", needed)} == commands
    assert {extra for extra in PROJECT["optional-dependencies"] if wanted_by(extra, "ray", needed)} == {"ray", "test"}


def wanted_by(extra: str, name: str, needed: list[Requirement]) -> bool:
    """Whether an extra of this package brings another one, directly or by an extra that it names."""
    brought = [each for each in needed if each.marker is not None and each.marker.evaluate({"extra": extra})]
    inner = [further for each in brought if each.name == PROJECT["name"] for further in each.extras]
    return any(each.name == name for each in brought) or any(wanted_by(each, name, needed) for each in inner)


def test_it_works_where_it_is_unpacked(wheel, tmp_path) -> None:
    wheel.extractall(tmp_path)
    program = (
        "import burst, engine, harness.metrics.hardware as hardware, harness.spec.models as models\n"
        "from harness.__main__ import main\n"
        "assert models.MODELS_DIR.is_dir() and any(hardware.HARDWARE_DIR.iterdir())\n"
        "print(burst.__file__)\n"
        "main()"
    )
    typed = ["plan", "--model", "1b", "--seq-len", "64k", "--gpus", "8", "--hardware", "h200"]
    environment = {"PYTHONPATH": str(tmp_path), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", program, *typed], cwd=tmp_path, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == str(tmp_path / "burst" / "__init__.py")
    assert "NVIDIA H200" in done.stdout
