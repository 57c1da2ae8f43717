"""`python -m baselines.checkout SYSTEM --into DIR`: fetch a compared system's source as its pin says, and nothing else.

Leaves DIR/source, the pinned files; DIR/source.git, the repositories that git compares them with; and requirements
files with the pinned packages and torch, for pip. Nothing is installed or run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO

from baselines.pin import FLAVOURS, Checkout, Flavour, load_pin, requirements, specifier
from cluster.files.errors import UsageError
from engine.atomic import write_atomic

SOURCE, REPOSITORIES = "source", "source.git"
PACKS = "sources"  # folder of a bundle: below it, by commit, the packs that `pack` made
_FETCH_SECONDS = 1800.0
# The strongest of git's attributes: a file arrives as it was committed, whatever the repository asks for.
_NO_CONVERSION = "* -text -ident -filter -working-tree-encoding\n"
_LOOK = "look at git and the disk"
_STATES = {"M": "differs", "T": "differs", "D": "is missing"}  # of git diff-files


def write_source(checkout: Checkout, folder: Path, given: Path | None = None) -> None:
    """FOLDER/source and FOLDER/source.git. What is there and as pinned stays; else both appear whole or not at all.

    `given` is a folder with clones or with `sources/` of a bundle, which are used in the place of the network. Raises
    UsageError when a commit cannot be fetched, or is not the pinned one.
    """
    if (folder / SOURCE).exists() and not compared(checkout, folder):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".checkout-", dir=folder) as name:
        scratch = Path(name)
        (scratch / SOURCE).mkdir()
        for path, part, repository in _parts(checkout, scratch):
            _fetch(part, repository, given)
            _write(part, repository, scratch / SOURCE / path)
        if problems := compared(checkout, scratch):
            raise UsageError(f"after the checkout of {checkout.commit[:12]} {problems[0]}; {_LOOK}")
        for part_name in (SOURCE, REPOSITORIES):
            shutil.rmtree(folder / part_name, ignore_errors=True)
            (scratch / part_name).rename(folder / part_name)


def compared(checkout: Checkout, folder: Path) -> list[str]:
    """How the files in FOLDER/source differ from the pinned ones; empty if they do not. Python's caches do not count.

    git hashes every file again, and what its repositories hold too. Nothing is fetched.
    """
    found = []
    try:
        for path, part, repository in _parts(checkout, folder):
            lines = _differences(part, repository, folder / SOURCE / path)
            found += lines if path == "." else [f"{path}/{line}" for line in lines]
    except (UsageError, OSError) as error:
        return [f"it cannot be compared with the pin ({error})"]
    return found


def pack(checkout: Checkout, folder: Path, given: Path | None = None) -> None:
    """FOLDER/sources/COMMIT/*.pack of the checkout and its submodules, for `write_source` elsewhere. Raises
    UsageError."""
    with tempfile.TemporaryDirectory(prefix=".checkout-", dir=folder) as name:
        scratch = Path(name)
        write_source(checkout, scratch, given)
        for _, part, repository in list(_parts(checkout, scratch)):
            packed = folder / PACKS / part.commit
            packed.mkdir(parents=True, exist_ok=True)
            for path in (repository / "objects" / "pack").glob("*.pack"):
                shutil.move(path, packed)


def _parts(checkout: Checkout, folder: Path) -> Iterator[tuple[str, Checkout, Path]]:
    """The checkout, at ".", and each submodule as one, at its path; with the bare repository of each below `folder`.

    Between one and the next, the first has to be fetched. Raises UsageError where a repository has another folder or
    submodule than the pin.
    """
    seen = {".": (checkout, folder / REPOSITORIES / "0")}
    yield ".", *seen["."]
    tree = _git(seen["."][1], "rev-parse", "--verify", checkout.object, advice="correct the pin")
    if tree != checkout.tree:
        raise UsageError(
            f"{checkout.subtree} of commit {checkout.commit[:12]} is {tree[:12]}, the pin says {checkout.tree[:12]}; "
            "correct the pin"
        )
    for number, submodule in enumerate(checkout.submodules, 1):
        around = max((path for path in seen if path == "." or submodule.path.startswith(f"{path}/")), key=len)
        outer, repository = seen[around]
        path = PurePosixPath(outer.subtree, PurePosixPath(submodule.path).relative_to(around))
        named = _git(repository, "rev-parse", f"{outer.commit}:{path}", advice="correct the pin")
        if named != submodule.commit:
            raise UsageError(
                f"submodule {submodule.path} of commit {checkout.commit[:12]} is {named[:12]}, the pin says "
                f"{submodule.commit[:12]}; correct the pin"
            )
        # Its commit says which files are its own: of a submodule `tree` is not looked at.
        part = Checkout(repository=submodule.repository, commit=submodule.commit, tree=checkout.tree)
        seen[submodule.path] = part, folder / REPOSITORIES / str(number)
        yield submodule.path, *seen[submodule.path]


def _fetch(part: Checkout, repository: Path, given: Path | None) -> None:
    """A new bare repository with the pinned commit. Where the other side can select, without the content of files."""
    repository.mkdir(parents=True)
    _git(repository, "init", "--quiet", "--bare", "--template=")
    write_atomic(repository / "info" / "attributes", _NO_CONVERSION)
    _git(repository, "config", "uploadpack.allowFilter", "true")  # for those who take it from here
    _git(repository, "config", "remote.origin.url", part.repository)
    packs = sorted((given / PACKS / part.commit).glob("*.pack")) if given else []
    for path in packs:  # the objects alone: the settings of another machine's repository are not read
        with open(path, "rb") as file:
            _git(repository, "index-pack", "--stdin", "--promisor", given=file, advice="pack the bundle again")
    if packs:
        _git(repository, "config", "remote.origin.promisor", "true")  # files that were left out are not missed
        write_atomic(repository / "shallow", f"{part.commit}\n")
    else:
        if given:
            _git(repository, "config", "remote.origin.url", str(_clone_with(part.commit, given)))
        _git(repository, "config", "fetch.unpackLimit", "1")  # all of it arrives as packs
        selected = ["--filter=blob:none"] if part.without or part.subtree != "." else []
        _git(
            repository, "fetch", "--quiet", "--depth", "1", "--no-tags", *selected, "origin", part.commit,
            advice="check the network, or give --from a folder with a clone of it",
        )  # fmt: skip
    _git(repository, "update-ref", "refs/heads/pinned", part.commit)


def _clone_with(commit: str, folder: Path) -> Path:
    """The repository in `folder` that holds the commit. Raises UsageError where none does."""
    for path in (folder, *sorted(folder.iterdir())):
        if (path / ".git").exists() or (path / "HEAD").is_file():  # no repository around it
            try:
                _git(path, "-c", "safe.directory=*", "cat-file", "-e", f"{commit}^{{commit}}")
            except UsageError:
                continue
            return path
    raise UsageError(f"{folder} has no repository with commit {commit[:12]}; put a clone with it there")


def _write(part: Checkout, repository: Path, files: Path) -> None:
    """The folder's files. Not by `git archive`, which leaves out what the repository's attributes tell it to; and
    unlike `checkout-index`, this asks for all files that were filtered out at once."""
    files.mkdir(parents=True, exist_ok=True)
    _git(repository, "config", "core.sparseCheckout", "true")
    write_atomic(repository / "info" / "sparse-checkout", "/*\n" + "".join(f"!/{path}\n" for path in part.without))
    place = [f"--git-dir={repository}", f"--work-tree={files}"]
    _git(files, *place, "read-tree", "--reset", "-u", part.object, advice="check the network and the pin")


def _differences(part: Checkout, repository: Path, files: Path) -> list[str]:
    """Files that are missing, differ, or are not part of the commit. Raises UsageError where the repository does not
    hold the commit, or is damaged."""
    _git(repository, "fsck", "--no-dangling", "--no-progress", part.commit)
    with tempfile.TemporaryDirectory(prefix="index-") as scratch:
        index = Path(scratch) / "index"  # a new one, which knows no file's time of change
        there = [f"--git-dir={repository}", f"--work-tree={files}", "-c", "protocol.allow=never"]
        _git(files, *there, "read-tree", part.object, index=index)
        selected = ["--", ".", *(f":(exclude,literal){path}" for path in part.without)]
        _git(files, *there, "update-index", "-q", "--refresh", index=index, codes=(0, 1))
        changed = _git(files, *there, "diff-files", "--name-status", "-z", *selected, index=index).split("\0")
        added = _git(files, *there, "ls-files", "--others", "-z", "--exclude=__pycache__/", *selected, index=index)
    found = [f"{path} {_STATES[state]}" for state, path in zip(changed[:-1:2], changed[1::2], strict=True)]
    return sorted(found + [f"{path} is not part of the commit" for path in added.split("\0") if path])


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


def _git(
    folder: Path,
    *arguments: str,
    advice: str = _LOOK,
    given: IO[bytes] | None = None,
    index: Path | None = None,
    codes: Sequence[int] = (0,),
) -> str:
    """What git prints. It reads no configuration of this user or machine and prompts for no password. Raises
    UsageError."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_TERMINAL_PROMPT": "0"}
    environment |= {"GIT_INDEX_FILE": str(index)} if index else {}
    command = next(word for word in arguments if not word.startswith("-") and "=" not in word)
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            env=environment,
            stdin=given or subprocess.DEVNULL,
            capture_output=True,
            timeout=_FETCH_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise UsageError("git is not installed; install it to fetch compared systems") from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"git {command} did not end within {_FETCH_SECONDS:g} s; {advice}") from None
    if done.returncode not in codes:
        said = " ".join(done.stderr.decode(errors="replace").split())[-200:] or "no reason given"
        raise UsageError(f"git {command} failed ({said}); {advice}")
    return os.fsdecode(done.stdout).strip("\n")


if __name__ == "__main__":
    sys.exit(main())
