"""Whether an installation is the pinned system, unchanged: source, packages, versions and imports."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from baselines.checkout import compared
from baselines.install.interpreter import clean_environment
from baselines.install.places import Installation, InstallPlace
from baselines.pin import Flavour, allows, canonical, without
from baselines.programs import PROGRAMS

_SECONDS = 600.0
_MARK = "BASELINE "


@dataclass(frozen=True, kw_only=True, slots=True)
class InstallCheck:
    """What was found in an environment, and everything that is not as the pin says."""

    found: Installation
    problems: list[str]


def verify(place: InstallPlace, borrowed: Collection[str] | None = None) -> InstallCheck:
    """Compare an installation with its pin: git's hashes of the source, versions and hashes of the packages,
    imports. `borrowed` packages are not its own; by default those that `installed.json` names."""
    pinned = place.pinned
    if borrowed is None:
        state = place.state()
        borrowed = state.borrowed if state else ()
    found, problem = _look(place)
    problems = [problem] if problem else []
    if pinned.checkout is not None:
        problems += [f"source: {one}" for one in compared(pinned.checkout, place.folder)]
    if not problem:
        problems += _package_problems(pinned, found, {*borrowed})
        problems += [f"{module} cannot be imported ({error})" for module, error in found["errors"].items()]
        for name, versions in (("python", pinned.python), ("torch", pinned.torch)):
            if not allows(versions, found[name]):
                problems.append(f"{name} is {found[name] or 'absent'}, the pin says {versions}")
    facts = {name: found.get(name, "") for name in ("python", "torch", "cuda")}
    return InstallCheck(
        found=Installation(pin=pinned.digest, packages=found.get("packages", {}), **facts), problems=problems
    )


def _package_problems(pinned: Flavour, found: dict[str, Any], borrowed: set[str]) -> list[str]:
    installed = {canonical(name): version for name, version in found["packages"].items()}
    problems = [f"{line}: it is not as it was installed" for line in sorted(found["changed"])]
    for package in without({**pinned.build, **pinned.packages}, borrowed):
        name, _, version = package.partition("==")
        has = installed.get(canonical(name))
        if has != version:
            problems.append(f"{name} is {has or 'absent'}, the pin says {version}")
    return problems


def _look(place: InstallPlace) -> tuple[dict[str, Any], str]:
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
