"""Install one flavour of a system as its pin says, from the network or from a folder; begun work is gone on with.

Steps: source, files of the packages, environment, packages, comparison with the pin; the state file is written last.
What an earlier, cut-off installation fetched is compared with the pin and kept. Its environment is made anew,
because no file says how far pip had come.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from baselines.checkout import write_source
from baselines.install.bundle import opened, wheels_of
from baselines.install.interpreter import (
    Interpreter,
    clean_environment,
    look_at,
    make_environment,
    this_interpreter,
)
from baselines.install.packages import OtherBuild, fetch, install, install_folder, unpack
from baselines.install.places import BORROWED, STATE_FILE, InstallPlace, beside_torch, locked
from baselines.install.verify import InstallCheck, verify
from baselines.pin import canonical, without
from cluster.files.errors import UsageError
from engine.measurement import write_json
from engine.reader import to_json

_PREPARE_SECONDS = 3600.0
_BUILDS = "builds"  # below the place, until they are moved into its environment

Say = Callable[[str], None]


def install_system(
    place: InstallPlace,
    *,
    python: Path | None = None,
    given: Path | None = None,
    anew: bool = False,
    borrow: bool = False,
    builds: Sequence[OtherBuild] = (),
    say: Say = print,
) -> InstallCheck:
    """Make the installation, or finish it. One that is whole and of this pin is only compared with it.

    `python` provides Python and torch (default: the one that runs this); `given` is a folder or archive that `bundle`
    made, or a folder with wheels and clones: no network is used then. `anew` removes what is there first. With `borrow`
    packages that the pin also allows from beside torch come from there, in the version they have there. `builds` take
    the place of pinned packages.

    Raises UsageError for what a user can mend; the installation then counts as half-finished.
    """
    pinned = place.pinned
    with locked(place):
        condition, sentence = place.condition()
        if condition == "installed" and not anew:
            verdict = verify(place)
            if not verdict.problems:
                say(f"{place.system} ({place.flavour}) is installed: {sentence}")
                return verdict
            say(f"{place.system} ({place.flavour}) is broken ({verdict.problems[0]}) and is made anew")
        elif condition == "half-finished":
            say(f"{place.system} ({place.flavour}): an earlier installation was cut off; going on with it")
        left_out = frozenset() if borrow else pinned.borrowable
        interpreter = look_at(
            python or this_interpreter(),
            beside_torch(name for name in pinned.provided if canonical(name) not in left_out),
        )
        if (reason := interpreter.unsupported_reason(pinned)) is not None:
            raise UsageError(f"{place.system} ({place.flavour}) cannot be installed: {reason}")
        if anew and place.folder.exists():
            shutil.rmtree(place.folder)
        check_space(place.folder, pinned.disk_mib)
        place.folder.mkdir(parents=True, exist_ok=True)
        (place.folder / STATE_FILE).unlink(missing_ok=True)
        with opened(given, place.folder) as files:
            borrowed, other = _build(place, interpreter, files, builds, borrow, say)
        verdict = verify(place, borrowed)
        if verdict.problems:
            raise UsageError(
                f"{place.system} ({place.flavour}) was installed and is not as its pin says: {verdict.problems[0]}; "
                f"correct that, then {place.install_command} --anew"
            )
        finished_at = datetime.now(UTC).isoformat(timespec="seconds")
        state = replace(verdict.found, borrowed=borrowed, builds=other, finished_at=finished_at)
        write_json(place.folder / STATE_FILE, to_json(state))
        say(f"{place.system} ({place.flavour}) is installed: Python {state.python}, torch {state.torch}")
        return verdict


def _build(
    place: InstallPlace,
    interpreter: Interpreter,
    given: Path | None,
    builds: Sequence[OtherBuild],
    borrow: bool,
    say: Say,
) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the packages that were taken from beside torch, and those that are another build."""
    pinned, wheels = place.pinned, place.folder / "wheels"
    borrowed = {
        name: interpreter.versions[name] for name in pinned.borrowable if borrow and name in interpreter.versions
    }
    if pinned.checkout is not None:
        say(f"  source: {pinned.checkout.repository} at {pinned.checkout.commit[:12]}")
        write_source(pinned.checkout, place.folder, given)
    other = _unpacked(builds, place)
    own = without(pinned.packages, {*borrowed, *other})
    packages = {**pinned.build, **own}
    if packages:
        say(f"  packages: {len(packages)} files")
        fetch(packages, wheels, interpreter.path, wheels_of(given))
    for part in ("env", "borrowed"):
        shutil.rmtree(place.folder / part, ignore_errors=True)
    say(f"  environment: Python {interpreter.python}, with torch {interpreter.torch} of {interpreter.path}")
    make_environment(interpreter, place.folder)
    for name in dict.fromkeys(path.partition("/")[0] for path in pinned.preload):
        if (place.folder / BORROWED / name).exists():  # some look for libraries among their own packages only
            (place.packages / name).symlink_to(place.folder / BORROWED / name)
    install(pinned.build, wheels, place.python, pinned.environment)
    install(own, wheels, place.python, pinned.environment)
    if other:
        say(f"  another build of {', '.join(other)}")
        for unpacked in (place.folder / _BUILDS).iterdir():
            unpacked.rename(place.packages / unpacked.name)
    for path in pinned.folders:
        say(f"  {path}: built and installed")
        install_folder(place.source / path, place.folder, place.python, pinned.environment)
    if pinned.prepare:
        say("  compiling what it compiles when first used")
        _prepare(place)
    for folder in (wheels, place.folder / _BUILDS):
        shutil.rmtree(folder, ignore_errors=True)
    return borrowed, other


def _unpacked(builds: Sequence[OtherBuild], place: InstallPlace) -> dict[str, str]:
    """Unpacked before anything is fetched, so that a wrong archive is refused at once."""
    folder = place.folder / _BUILDS
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return unpack(builds, place.pinned, folder)


def _prepare(place: InstallPlace) -> None:
    """Run the pin's own step. A compilation that was killed has left a lock, which the next one would wait on for
    ever."""
    shutil.rmtree(place.extensions, ignore_errors=True)
    log = place.folder / "prepare.log"
    path = f"{place.python.parent}:{os.environ.get('PATH', os.defpath)}"
    environment = clean_environment() | place.environment | {"PATH": path}
    with open(log, "w", encoding="utf-8") as file:
        command = [str(place.python), "-c", place.pinned.prepare]
        try:
            code = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, timeout=_PREPARE_SECONDS,
                check=False, cwd=place.folder,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            raise UsageError(f"{place.system} did not compile within {_PREPARE_SECONDS:g} s; see {log}") from None
    if code:
        raise UsageError(f"{place.system} could not compile what it needs (exit code {code}); see {log}")


def check_space(folder: Path, needed_mib: int) -> None:
    """Raises UsageError where the disk of `folder`, or of its nearest parent, has less free space."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free >> 20
    if free < needed_mib:
        raise UsageError(f"{there} has {free:,} MiB free, and this needs {needed_mib:,} MiB; make room")
