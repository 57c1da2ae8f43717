"""`python -m baselines.checkout SYSTEM --into DIR`: fetch a compared system's source as its pin says, and nothing else.

Leaves DIR/source, compared with the pinned commit by git's own hashes; DIR/source.json, the listing that they follow
from; and requirements files with the pinned packages and torch, for pip. Nothing is installed or run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from baselines.git_tree import COMMIT, Listing, differences, is_below, parse_listing
from baselines.pin import FLAVOURS, Checkout, Flavour, load_pin, requirements, specifier
from cluster.files.errors import UsageError
from engine.atomic import write_atomic
from engine.measurement import write_json
from engine.reader import from_json, read_json, to_json

SOURCE, LISTINGS = "source", "source.json"
_FETCH_SECONDS = 1800.0
# The strongest of git's attributes: a file arrives as it was committed, whatever the repository asks for.
_NO_CONVERSION = "* -text -ident -filter -working-tree-encoding\n"


def check_out(checkout: Checkout, into: Path, mirrors: Mapping[str, Path] | None = None) -> dict[str, Listing]:
    """Write the pinned folder to `into`, which must not be there yet; it appears whole or not at all.

    Returns the listing of each repository in it, by the folder it stands at ("." is the first). `mirrors` are
    repositories on this machine that hold a commit, by the commit's name: these are not fetched from elsewhere.

    Raises UsageError when a commit cannot be fetched, or is not the pinned one.
    """
    into.parent.mkdir(parents=True, exist_ok=True)
    mirrors = {} if mirrors is None else mirrors
    with tempfile.TemporaryDirectory(prefix=".checkout-", dir=into.parent) as scratch:
        files = Path(scratch) / "files"
        files.mkdir()
        address = str(mirrors.get(checkout.commit, checkout.repository))
        listing = _write(checkout, address, files, Path(scratch) / "git")
        if listing.tree != checkout.tree:
            raise UsageError(
                f"{checkout.subtree} of commit {checkout.commit[:12]} is {listing.tree[:12]}, the pin says "
                f"{checkout.tree[:12]}; correct the pin"
            )
        listings = {".": listing}
        for number, submodule in enumerate(checkout.submodules):
            found = _submodule_commit(listings, submodule.path)
            if found != submodule.commit:
                raise UsageError(
                    f"submodule {submodule.path} of commit {checkout.commit[:12]} is {found[:12]}, the pin says "
                    f"{submodule.commit[:12]}; correct the pin"
                )
            whole = Checkout(repository=submodule.repository, commit=submodule.commit, tree="0" * 40)
            address = str(mirrors.get(submodule.commit, submodule.repository))
            place = files / submodule.path
            place.mkdir(parents=True, exist_ok=True)
            listing = _write(whole, address, place, Path(scratch) / f"git{number}")
            if not listing.is_commit(submodule.commit):
                raise UsageError(f"{address} gave other files than those of commit {submodule.commit[:12]}; try again")
            listings[submodule.path] = listing
        files.rename(into)
    return listings


def _write(checkout: Checkout, address: str, files: Path, repository: Path) -> Listing:
    """Fetch one commit and write its folder's files below `files`."""
    advice = "check the network, or give --from a folder with a clone of it"
    _fetch(checkout, repository, address, advice)
    listed = _run(repository, "ls-tree", "-r", "-z", "--full-tree", checkout.object, advice="correct the pin")
    text = os.fsdecode(_run(repository, "cat-file", "commit", checkout.commit)) if checkout.subtree == "." else ""
    listing = parse_listing(listed, text)
    # Not `git archive`, which leaves out what the repository's attributes tell it to; and unlike `checkout-index`, this
    # asks for all files that were filtered out at once.
    _git(repository, "config", "core.sparseCheckout", "true")
    write_atomic(repository / "info" / "sparse-checkout", "/*\n" + "".join(f"!/{path}\n" for path in checkout.without))
    place = [f"--git-dir={repository}", f"--work-tree={files}"]
    _git(files, *place, "read-tree", "--reset", "-u", checkout.object, advice=advice)
    if problems := differences(files, listing, checkout.without):
        raise UsageError(f"{problems[0]} after the checkout of {checkout.commit[:12]}; look at git and the disk")
    return listing


def _fetch(checkout: Checkout, repository: Path, address: str, advice: str) -> None:
    """A new bare repository with the pinned commit. Where the other side can select, without the content of files."""
    repository.mkdir(parents=True)
    _git(repository, "init", "--quiet", "--bare")
    write_atomic(repository / "info" / "attributes", _NO_CONVERSION)
    _git(repository, "config", "remote.origin.url", address)
    _git(repository, "config", "uploadpack.allowFilter", "true")  # for those who take it from here
    selected = ["--filter=blob:none"] if checkout.without or checkout.subtree != "." else []
    _git(
        repository, "fetch", "--quiet", "--depth", "1", "--no-tags", *selected, "origin", checkout.commit, advice=advice
    )
    _git(repository, "update-ref", "refs/heads/pinned", checkout.commit)


def _submodule_commit(listings: Mapping[str, Listing], path: str) -> str:
    """The commit that the innermost repository around `path` names for it; "" when none has it as a submodule."""
    around = max((place for place in listings if place == "." or is_below(path, [place])), key=len)
    below = path if around == "." else path[len(around) + 1 :]
    return next((each.hash for each in listings[around].entries if each.mode == COMMIT and each.path == below), "")


def compared(checkout: Checkout, folder: Path) -> list[str]:
    """How the files in `folder`, with DIR/source and DIR/source.json, differ from the pinned ones; empty if they do
    not.

    The listing is not trusted: it has to lead to the hashes in the pin.
    """
    try:
        data = cast(dict[str, Any], read_json(folder / LISTINGS))
        listings = {name: from_json(Listing, listing) for name, listing in data.items()}
    except (OSError, ValueError, AttributeError) as error:
        return [f"{LISTINGS} cannot be read ({error})"]
    found = []
    for name, listing in listings.items():
        commit = next((each.commit for each in checkout.submodules if each.path == name), None)
        right = listing.tree == checkout.tree if name == "." else commit is not None and listing.is_commit(commit)
        if not right:
            return [f"{LISTINGS} is not of the pinned commit"]
        place = folder / SOURCE / name
        without = checkout.without if name == "." else ()
        found += [one if name == "." else f"{name}/{one}" for one in differences(place, listing, without)]
    missing = {".", *(each.path for each in checkout.submodules)} - set(listings)
    return found + [f"{name} is missing" for name in sorted(missing)]


def write_source(checkout: Checkout, folder: Path, mirrors: Mapping[str, Path] | None = None) -> None:
    """FOLDER/source and FOLDER/source.json. What is there and as pinned stays. Raises UsageError."""
    if (folder / SOURCE).exists():
        if not compared(checkout, folder):
            return
        shutil.rmtree(folder / SOURCE)
    listings = check_out(checkout, folder / SOURCE, mirrors)
    write_json(folder / LISTINGS, {name: to_json(listing) for name, listing in listings.items()})


def write_requirements(flavour: Flavour, folder: Path) -> None:
    """What pip is given: packages to build others with, the packages themselves, and the torch they need.

    An interpreter with torch mostly has numpy, so pins count it as provided; torch's own wheels come without it.
    """
    write_atomic(folder / "build.txt", requirements(flavour.build))
    write_atomic(folder / "requirements.txt", requirements(flavour.packages))
    beside = "numpy\n" if "numpy" in flavour.provided else ""
    write_atomic(folder / "torch.txt", f"torch{specifier(flavour.torch)}\n{beside}")


def prepare(flavour: Flavour, into: Path) -> None:
    """All of it, in a folder that is not there yet; see the top of this file. Raises UsageError."""
    if into.exists():
        raise UsageError(f"{into} exists; give --into a path that does not")
    try:
        into.mkdir(parents=True)
        if flavour.checkout is not None:
            write_source(flavour.checkout, into)
        write_requirements(flavour, into)
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
    return os.fsdecode(_run(folder, *arguments, advice=advice)).strip()


def _run(folder: Path, *arguments: str, advice: str = "look at git and the disk") -> bytes:
    """The output of git, which reads no configuration of this user or machine and prompts for no password."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_TERMINAL_PROMPT": "0"}
    command = next(word for word in arguments if not word.startswith("--"))
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_FETCH_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise UsageError("git is not installed; install it to fetch compared systems") from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"git {command} did not end within {_FETCH_SECONDS:g} s; {advice}") from None
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").split())[-200:] or "no reason given"
        raise UsageError(f"git {command} failed ({said}); {advice}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
