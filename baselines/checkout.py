"""`python -m baselines.checkout SYSTEM --into DIR`: fetch a compared system as its pin says, and nothing else.

Leaves DIR/source, the pinned folder compared by git's own hash of it, and DIR/requirements.txt, the pinned packages for
pip. Nothing is installed or run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from baselines.pin import FLAVOURS, Checkout, Flavour, load_pin
from cluster.files.errors import UsageError

_FETCH_SECONDS = 1800.0


def check_out(checkout: Checkout, into: Path) -> None:
    """Write the pinned folder to `into`, which must not be there yet; it appears whole or not at all.

    Raises UsageError when the commit cannot be fetched, or its folder is not the pinned one.
    """
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".checkout-", dir=into.parent) as scratch:
        repository, files = Path(scratch) / "git", Path(scratch) / "files"
        files.mkdir()
        _git(repository.parent, "init", "--quiet", "--bare", str(repository))
        fetch = ["fetch", "--quiet", "--depth", "1", "--no-tags", "--", checkout.repository, checkout.commit]
        _git(repository, *fetch, advice="check the network, or fetch it elsewhere")
        found = _git(repository, "rev-parse", "--verify", "--quiet", f"{checkout.commit}:{checkout.subtree}")
        if found != checkout.tree:
            raise UsageError(
                f"{checkout.subtree} of commit {checkout.commit[:12]} is {found[:12]}, the pin says "
                f"{checkout.tree[:12]}; correct the pin"
            )
        # Not `git archive`, which leaves out what the repository's attributes tell it to.
        _git(repository, "read-tree", checkout.tree)
        _git(files, f"--git-dir={repository}", f"--work-tree={files}", "checkout-index", "--all")
        files.rename(into)


def prepare(flavour: Flavour, into: Path) -> None:
    """DIR/source and DIR/requirements.txt; see the top of this file. Raises UsageError."""
    if into.exists():
        raise UsageError(f"{into} exists; give --into a path that does not")
    try:
        into.mkdir(parents=True)
        if flavour.checkout is not None:
            check_out(flavour.checkout, into / "source")
        (into / "requirements.txt").write_text("".join(f"{package}\n" for package in flavour.packages), "utf-8")
    except BaseException:
        shutil.rmtree(into, ignore_errors=True)
        raise


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when all is there, 2 with one sentence when not."""
    parser = argparse.ArgumentParser(prog="python -m baselines.checkout", description="fetch a compared system")
    parser.add_argument("system", metavar="SYSTEM", help="a folder of baselines/ with a pin.yaml")
    parser.add_argument("--flavour", choices=FLAVOURS, default="paper", help="which copy (default: paper)")
    parser.add_argument("--into", type=Path, required=True, metavar="DIR", help="a path that does not exist yet")
    parsed = parser.parse_args(arguments)
    try:
        pin = load_pin(parsed.system)
        prepare(pin.flavour(parsed.flavour), parsed.into)
    except UsageError as error:
        print(f"baselines.checkout: {error}", file=sys.stderr)
        return 2
    print(f"{parsed.into}: {pin.system}, {parsed.flavour}; {pin.licence}")
    return 0


def _git(folder: Path, *arguments: str, advice: str = "look at git and the disk") -> str:
    """The output of git, which reads no configuration of this user or machine and prompts for no password."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_FETCH_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise UsageError("git is not installed; install it to fetch compared systems") from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"git {arguments[0]} did not end within {_FETCH_SECONDS:g} s; {advice}") from None
    if done.returncode:
        said = " ".join(done.stderr.split())[-200:] or "no reason given"
        raise UsageError(f"git {arguments[0]} failed ({said}); {advice}")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
