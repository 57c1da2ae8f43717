"""Whether an installation is the pinned system, unchanged: source, packages, versions and imports."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from typing import Any

from baselines.checkout import compared
from baselines.install.interpreter import clean_environment
from baselines.install.places import Place
from baselines.pin import Flavour, allows
from baselines.programs import PROGRAMS

_SECONDS = 600.0
_MARK = "BASELINE "


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What was found in an environment, and everything that is not as the pin says."""

    python: str
    torch: str
    cuda: str
    packages: dict[str, str]
    problems: list[str]


def verify(place: Place) -> Verdict:
    """Compare an installation with its pin: git's hashes of the source, versions and hashes of the packages,
    imports."""
    pinned = place.pinned
    found, problem = _look(place)
    problems = [problem] if problem else []
    if pinned.checkout is not None:
        problems += [f"source: {one}" for one in compared(pinned.checkout, place.folder)]
    if not problem:
        problems += _package_problems(pinned, found)
        problems += [f"{module} cannot be imported ({error})" for module, error in found["errors"].items()]
        for name, versions in (("python", pinned.python), ("torch", pinned.torch)):
            if not allows(versions, found[name]):
                problems.append(f"{name} is {found[name] or 'absent'}, the pin says {versions}")
    return Verdict(
        python=found.get("python", ""),
        torch=found.get("torch", ""),
        cuda=found.get("cuda", ""),
        packages=found.get("packages", {}),
        problems=problems,
    )


def _package_problems(pinned: Flavour, found: dict[str, Any]) -> list[str]:
    installed = {_canonical(name): version for name, version in found["packages"].items()}
    problems = [f"{line}: it is not as its wheel was" for line in found["changed"]]
    for package in {**pinned.build, **pinned.packages}:
        name, _, version = package.partition("==")
        has = installed.get(_canonical(name))
        if has != version:
            problems.append(f"{name} is {has or 'absent'}, the pin says {version}")
    return problems


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _look(place: Place) -> tuple[dict[str, Any], str]:
    """What the environment's interpreter tells, and a problem when it tells nothing."""
    python = place.python
    command = [str(python), str(PROGRAMS / "look.py"), "torch", *place.pinned.imports]
    environment = clean_environment() | place.environment
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS,
            check=False, cwd=python.parent,
        )  # fmt: skip
    except OSError as error:
        return {}, f"{python.name} of its environment cannot be started ({error.strerror})"
    except subprocess.TimeoutExpired:
        return {}, f"its modules were not imported within {_SECONDS:g} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not lines:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {}, f"its interpreter ended without an answer ({said[:200]})"
    found: dict[str, Any] = json.loads(lines[-1].removeprefix(_MARK))
    return found, ""
