"""This machine's configuration of pip for a build: mounted with the files it names, so the image keeps none of it."""

from __future__ import annotations

import ast
import configparser
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from cluster.files.filesystem import cache_folder
from cluster.images.engine import ImageFailed, last_line

IN_BUILD = "/etc/xdg/pip"  # where pip looks for configuration on every distribution, and none of them keeps any

# The options that say where packages come from and how they are reached; no others matter to a build.
_OPTIONS = frozenset(
    {"cert", "client-cert", "constraint", "extra-index-url", "find-links", "index-url", "no-index", "proxy"}
    | {"default-timeout", "retries", "timeout", "trusted-host"}
)
_SECONDS = 60.0


@contextlib.contextmanager
def mounted_pip_setup() -> Iterator[list[str]]:
    """What a build mounts, as `write_pip_setup` returns it; the files are removed afterwards. Raises ImageFailed."""
    cache = cache_folder("pip-setup")
    cache.mkdir(parents=True, exist_ok=True)
    # Builds side by side have a folder each, of mode 0700.
    with tempfile.TemporaryDirectory(dir=cache, ignore_cleanup_errors=True) as folder:
        yield write_pip_setup(Path(folder))


def write_pip_setup(folder: Path) -> list[str]:
    """Write `pip.conf` and copies of the files it names to `folder`; returns what to mount, as `source:target:ro`.

    An index may have a password in its address, so `folder` is new and of mode 0700. Folders that pip searches, and
    indexes that are folders, are mounted where they are. Raises ImageFailed when pip cannot tell its configuration.
    """
    mounted: dict[Path, None] = {}
    written = configparser.RawConfigParser()
    for option, value in _configuration().items():
        words = [_word(word, folder, mounted) for word in value.split()]
        section, _, name = option.partition(".")
        if not written.has_section(section):
            written.add_section(section)
        written.set(section, name, "\n".join(words))
    with (folder / "pip.conf").open("w") as file:
        written.write(file)
    outermost = [path for path in mounted if not any(parent in mounted for parent in path.parents)]
    return [f"{folder}:{IN_BUILD}:ro", *(f"{path}:{path}:ro" for path in outermost)]


def _configuration() -> dict[str, str]:
    """`section.option` and its value: of pip's files, and of its variables, which have precedence."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        raise ImageFailed(f"pip does not tell its configuration ({last_line(done.stderr)}); install pip beside burst")
    files: dict[str, str] = {}
    variables: dict[str, str] = {}
    for line in done.stdout.splitlines():
        option, _, printed = line.partition("=")
        name = option.rpartition(".")[2]
        if name in _OPTIONS:
            of_variable = option.startswith(":env:")
            (variables if of_variable else files)[f"global.{name}" if of_variable else option] = str(
                ast.literal_eval(printed)
            )
    return {**files, **variables}


def _word(word: str, folder: Path, mounted: dict[Path, None]) -> str:
    """One word of a value as the build reads it: a file's copy, a mounted folder, anything else as it is."""
    path = Path(unquote(urlsplit(word).path) if word.startswith("file:") else word)
    if not path.is_absolute() or not path.exists():
        return word
    if path.is_file():
        copy = folder / f"{len(os.listdir(folder))}-{path.name}"
        shutil.copyfile(path, copy)
        return f"{IN_BUILD}/{copy.name}"
    # Pages of an index may link to files beside it.
    mounted[path.parent if word.startswith("file:") else path] = None
    return word
