"""Programs that tests need beside Python: found, or installed where root may, or the reason why they are absent."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.patience import AMPLE

_SYSTEM_PATHS = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"


@functools.cache
def find_or_install(program: str, package: str) -> tuple[str | None, str]:
    """Absolute path of `program`, or None and the reason. Root on Debian installs `package` where it is absent."""
    if found := shutil.which(program, path=_SYSTEM_PATHS):
        return found, ""
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return None, f"{program} is absent and cannot be installed here; as root on Debian: apt-get install {package}"
    # Test workers side by side would meet apt's lock on its lists, which it does not wait for.
    with open(Path(tempfile.gettempdir(), "burst-tests-apt.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not shutil.which(program, path=_SYSTEM_PATHS) and (reason := _install(package)):
            return None, f"{program} is absent and {reason}"
    found = shutil.which(program, path=_SYSTEM_PATHS)
    return found, "" if found else f"{package} was installed but left no {program}"


def missing(*programs: tuple[str, str]) -> str:
    """Why the first of these programs that cannot be had is absent, each given with its package; empty for none."""
    for program, package in programs:
        found, reason = find_or_install(program, package)
        if found is None:
            return reason
    return ""


def path_of(program: str, package: str) -> str:
    """Absolute path of a program that a test cannot do without."""
    found, reason = find_or_install(program, package)
    assert found, reason
    return found


def _install(package: str) -> str:
    """Install one package; the result is empty, or what went wrong."""
    # RUNLEVEL=1 keeps a package from starting its service.
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", package]):
        done = subprocess.run(
            ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120", *command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=AMPLE,
        )
        if done.returncode:
            return f"apt-get {command[0]} failed: {done.stderr.strip()[-200:]}"
    return ""
