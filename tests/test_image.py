"""The image installs what pyproject.toml asks for, in the versions `make` installs. It is not built here."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NEEDED = [Requirement(line) for line in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["gpu"]]
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", DOCKERFILE, re.MULTILINE))


@pytest.mark.parametrize("requirement", NEEDED, ids=lambda requirement: requirement.name)
def test_the_pinned_version_is_one_the_project_allows(requirement):
    pinned = {canonicalize_name(name): version for name, version in PINS.items()}
    assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)])


def test_nothing_else_is_pinned():
    assert {canonicalize_name(name) for name in PINS} == {canonicalize_name(needed.name) for needed in NEEDED}


def test_make_and_the_image_install_the_same_torch():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.findall(r"torch==(\S+)", makefile) == [PINS["torch"]]


def test_the_images_python_and_cuda_are_ones_the_project_allows():
    python = set(re.findall(r"python(\d\.\d+)", DOCKERFILE))
    assert len(python) == 1
    assert SpecifierSet(PROJECT["requires-python"]).contains(python.pop())
    cuda = re.search(r"^ARG CUDA_IMAGE=\S+:(\d+)\.", DOCKERFILE, re.MULTILINE)
    assert cuda
    assert [needed.extras for needed in NEEDED if needed.name == "flash-attn-4"] == [{f"cu{cuda[1]}"}]


def test_the_program_does_not_run_as_root():
    users = re.findall(r"^USER (\w+)", DOCKERFILE, re.MULTILINE)
    assert users == ["burst"]
    assert "useradd --create-home --uid 10001 burst" in DOCKERFILE
