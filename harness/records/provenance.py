"""What has to be known to run a trial again: which code, which command, which environment - and no secrets."""

from __future__ import annotations

import hashlib
import importlib.machinery
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from cluster.environment.value import redact as redact  # here because it belongs to what a record may say
from cluster.environment.value import shown

PROJECT_ROOT = Path(__file__).resolve().parents[2]
DIRTY = "-dirty"  # ends the commit of a tree with changes
COMMIT_VARIABLE = "BURST_COMMIT"  # names the commit of code that is a copy, such as an image
PACKAGES = ("engine", "harness", "baselines", "cluster")
# Of files that git does not track, those that Python imports, and pins and settings: files of methods among them.
_READ = (*importlib.machinery.all_suffixes(), ".yaml")
# Bytecode whose source counts, and what `burst setup baselines install` makes from pins, which a record names.
_MADE = ("__pycache__/", "/baselines/*/upstream/")
# What must not leave a machine with a record: secrets, and paths below a user's home.
HOME = "a path below a home directory"
_SECRETS: dict[str, re.Pattern[str]] = {
    "a private key": re.compile(r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----"),
    "an access token": re.compile(
        r"\b(?:gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16}"
        r"|sk-[A-Za-z0-9_-]{20,}|xox[abprs]-[\w-]{10,}|eyJ[\w-]{15,}\.eyJ[\w-]{15,}\.[\w-]+)"
    ),
    "a password in an address": re.compile(r"://[^/@\s:<]+:(?!\d+/)[^@\s<\"']+@"),
}
_HOME = re.compile(r"(?<![\w.~-])(?:/(?:home|Users)/[^/\s\"':;,]+|/root(?=[/\s\"':;,]|$)|[A-Z]:\\+Users\\+\w+)")


def commit(root: Path = PROJECT_ROOT, environment: Mapping[str, str] = os.environ) -> str:
    """Commit of the running code, with `-dirty` when tracked files differ from it, or the packages hold files that it
    lacks; empty when nothing says.

    The environment's variable counts where git does not know the code: no repository, or files that differ from its
    commit, such as a copy of files laid over another checkout.
    """
    named, found = environment.get(COMMIT_VARIABLE, ""), ""
    try:
        # An installed copy may lie inside some other repository, whose commit would say nothing about it.
        if Path(_git(root, "rev-parse", "--show-toplevel")).resolve() == root.resolve():
            found = _git(root, "rev-parse", "HEAD")
            if not _git(root, "status", "--porcelain", "--untracked-files=no") and not _untracked(root):
                return found
    except (OSError, subprocess.SubprocessError):  # no git, no repository, or one that belongs to someone else
        pass
    return named or (f"{found}{DIRTY}" if found else "")


def changes(of: str, root: Path = PROJECT_ROOT) -> str:
    """A digest of how tracked files differ from the commit `of`, and of the packages' files that it lacks, which tells
    two changed trees of one commit apart; empty for a commit without changes, and where git does not say."""
    if not of.endswith(DIRTY):
        return ""
    try:
        digest = hashlib.sha256(_git(root, "diff", "--no-ext-diff", "--binary", "HEAD").encode())
        for path in _untracked(root):
            content = path.read_bytes() if path.is_file() else b""
            digest.update(f"{path.relative_to(root)} {len(content)}\n".encode(errors="replace") + content)
        return digest.hexdigest()[:12]
    except (OSError, subprocess.SubprocessError):  # BURST_COMMIT named a changed tree elsewhere
        return ""


def _untracked(root: Path) -> list[Path]:
    """Files of the packages that the running code may read and git does not track, whether it ignores them or not."""
    excluded = [f"--exclude={pattern}" for pattern in _MADE]
    found = []
    for name in filter(None, _git(root, "ls-files", "--others", "-z", *excluded, "--", *PACKAGES).split("\0")):
        path = root / name
        # Git looks neither into a repository inside this one nor behind a link; Python does.
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        found += [each for each in inside if each.name.endswith(_READ) and "__pycache__" not in each.parts]
    return found


def version() -> str:
    """Version of this package, read without importing anything heavy."""
    try:
        return metadata.version("burst-harness")
    except metadata.PackageNotFoundError:  # running from a checkout that is not installed
        return "not installed"


def portable_command(command: Sequence[str], trial_dir: Path) -> list[str]:
    """The command as a record keeps it: this machine's interpreter and directory mean nothing elsewhere."""
    names = {sys.executable: "python", str(trial_dir): "TRIAL_DIR"}
    return [names.get(part, part) for part in command]


def redacted_command(typed: Sequence[str]) -> list[str]:
    """A command line as a record keeps it: without the value of `NAME=VALUE` whose name says that it is a secret, and
    without passwords inside addresses."""
    return [_redacted(part) for part in typed]


def private_in(text: str) -> list[str]:
    """The kinds of private values in a text; a value itself is never repeated."""
    found = [kind for kind, pattern in _SECRETS.items() if pattern.search(text)]
    return found + ([HOME] if _HOME.search(text) else [])


def secret_variables(environment: Mapping[str, str]) -> list[str]:
    """Names of variables whose values a record would hide."""
    return [name for name, value in environment.items() if shown(name, value) != value]


def _redacted(part: str) -> str:
    name, equals, value = part.partition("=")
    if name.startswith("--") and "=" in value:  # --set=NAME=VALUE
        return f"{name}={_redacted(value)}"
    return f"{name}={shown(name, value)}" if equals and not name.startswith("--") else shown("", part)


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, errors="replace", timeout=30, check=True
    )  # fmt: skip
    return done.stdout.strip()
