"""What `import burst` needs and does not need, and what `burst` says without the packages of its commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from harness.__main__ import MODULES

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def python(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own, started in a folder whose modules are found first."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_every_public_name_loads_without_the_packages_of_the_commands(tmp_path) -> None:
    unwanted = {*MODULES, "torch._dynamo", "ray", "transformers", "accelerate", "harness", "cluster", "baselines"}
    program = "import sys, burst; [getattr(burst, name) for name in burst.__all__]; "
    done = python(f"{program}print(sorted({unwanted} & {{*sys.modules}}))", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_a_module_engine_of_the_users_own_is_named(tmp_path) -> None:
    (tmp_path / "engine.py").write_text("class Trainer: ...\n")
    done = python("import burst", tmp_path)
    said = f"ImportError: import burst found engine in {tmp_path}, and needs the package engine in {ROOT}; rename your"
    assert said in done.stderr


def test_the_commands_look_for_the_packages_of_their_extra() -> None:
    modules = {"pyyaml": "yaml"}
    names = [re.match(r"[\w-]+", line)[0] for line in PROJECT["optional-dependencies"]["harness"]]
    assert tuple(modules.get(name, name) for name in names) == MODULES
    assert PROJECT["scripts"] == {"burst": "harness.__main__:main"}


def test_a_command_without_its_extra_says_in_one_sentence_what_to_install(tmp_path) -> None:
    """And one that does not need what is absent runs: nothing is sent over SSH here."""
    typed = ["burst", "plan", str(ROOT / "experiments" / "quickstart.yaml")]
    program = (
        "import sys; sys.modules[{!r}] = None; sys.argv = {!r}; from harness.__main__ import main; sys.exit(main())"
    )
    done = python(program.format("paramiko", typed), tmp_path)
    assert done.returncode == 0, done.stderr
    done = python(program.format("yaml", typed), tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "burst: found no yaml, which this command needs (`import burst` works without); install it with: pip install "
        "'burst-harness[harness]'\n",
    )


def test_the_version_is_one() -> None:
    citation = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    newest = re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert citation
    assert newest
    assert citation[1] == newest[1] == PROJECT["version"]
