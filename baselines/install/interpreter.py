"""The interpreter that an environment is made with, and the torch it borrows from it.

torch is several GiB, and tied to the machine's driver: an environment takes that of an interpreter which has it, the
project's own by default, rather than installing another. Only torch and what it requires are seen, through links in a
folder of their own, and none of the other packages that lie beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baselines.pin import Flavour, allows
from cluster.files.errors import UsageError

_SECONDS = 300.0

# Run by the interpreter in question, with the names of packages to look for: versions, and the paths of each package
# and of all that it requires, as far as they are installed. Reads metadata and torch's own version file; imports no
# torch.
_LOOK = r"""
import importlib.metadata as m, json, os, re, sys
found, seen, queue = {}, set(), list(sys.argv[1:])
while queue:
    name = re.sub(r"[-_.]+", "-", queue.pop()).lower()
    if name in seen:
        continue
    seen.add(name)
    try:
        one = m.distribution(name)
    except m.PackageNotFoundError:
        continue
    tops = {str(file).replace(os.sep, "/").split("/")[0] for file in one.files or ()} - {"..", "__pycache__"}
    found[name] = {"version": one.version, "paths": [str(one.locate_file(top)) for top in sorted(tops)]}
    queue += [re.match(r"[\w.-]+", line)[0] for line in one.requires or () if "extra ==" not in line]
cuda = ""
for path in found.get("torch", {}).get("paths", ()):
    try:
        text = open(os.path.join(path, "version.py"), encoding="utf-8").read()
        cuda = (re.search(r"^cuda[^=\n]*= *['\"]([\d.]+)", text, re.M) or [None, ""])[1]
    except OSError:
        pass
print(json.dumps({"python": "%d.%d.%d" % sys.version_info[:3], "packages": found, "cuda": cuda}))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interpreter:
    """A Python with torch."""

    path: Path
    python: str
    torch: str  # "" when it has none
    cuda: str  # of torch; "" for a build without
    borrowed: dict[str, list[str]]  # packages that an environment may borrow: their files and folders
    versions: dict[str, str] = field(default_factory=dict)  # of these packages

    def unsupported_reason(self, flavour: Flavour) -> str | None:
        """Why an environment of the flavour cannot be made with it, or None."""
        needs = f"Python {flavour.python} and torch {flavour.torch}"
        if not allows(flavour.python, self.python):
            return f"it needs {needs}, found Python {self.python} at {self.path}; give another with --python"
        if not self.torch:
            return f"it needs {needs}, and {self.path} has no torch; give --python one that has it"
        if not allows(flavour.torch, self.torch):
            return f"it needs {needs}, found torch {self.torch} at {self.path}; give another with --python"
        if "cpu" not in flavour.devices and not self.cuda:
            found = f"torch {self.torch} at {self.path} is a CPU build"
            return f"it runs on GPUs alone, and {found}; give another with --python"
        if self.cuda and not allows(flavour.cuda, self.cuda):
            found = f"torch for CUDA {self.cuda} at {self.path}"
            return f"it needs CUDA {flavour.cuda}, found {found}; give another with --python"
        return None


def look_at(path: Path, provided: Sequence[str] = ()) -> Interpreter:
    """Ask an interpreter for its versions, and for torch and `provided`. Raises UsageError when it does not answer."""
    try:
        done = subprocess.run(
            [str(path), "-c", _LOOK, "torch", *provided],
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        answer = json.loads(done.stdout.splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        raise UsageError(f"{path} does not answer as Python does; give --python the path of an interpreter") from None
    packages = answer["packages"]
    return Interpreter(
        path=path,
        python=answer["python"],
        torch=packages.get("torch", {}).get("version", ""),
        cuda=answer["cuda"],
        borrowed={name: one["paths"] for name, one in packages.items()},
        versions={name: one["version"] for name, one in packages.items()},
    )


def this_interpreter() -> Path:
    """The one that runs this program."""
    return Path(sys.executable)


def make_environment(interpreter: Interpreter, folder: Path) -> None:
    """FOLDER/env without pip, and FOLDER/borrowed, which it sees behind its own packages. Raises UsageError."""
    env, borrowed = folder / "env", folder / "borrowed"
    command = [str(interpreter.path), "-m", "venv", "--without-pip", str(env)]
    try:
        done = subprocess.run(
            command, env=clean_environment(), capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"{interpreter.path} -m venv did not end within {_SECONDS:g} s; look at the disk") from None
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()[-1:]
        raise UsageError(
            f"{interpreter.path} -m venv failed ({' '.join(said)}); install Python's venv, or give --python"
        )
    borrowed.mkdir(exist_ok=True)
    for path in sorted({path for paths in interpreter.borrowed.values() for path in paths}):
        if os.path.exists(path):
            (borrowed / os.path.basename(path)).symlink_to(path)
    [packages] = (env / "lib").glob("python*/site-packages")
    # As a folder of packages, not only a path: a borrowed package may have a .pth file that it needs.
    (packages / "borrowed.pth").write_text(f"import site; site.addsitedir({str(borrowed)!r})\n", encoding="utf-8")


def clean_environment() -> dict[str, str]:
    """This process's environment without what leads Python to packages of ours or of the user."""
    dropped = {"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"}
    return {name: value for name, value in os.environ.items() if name not in dropped} | {"PYTHONNOUSERSITE": "1"}
