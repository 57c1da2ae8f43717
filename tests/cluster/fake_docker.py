"""A program `docker` that keeps images as files, for machines without an engine. It knows what we ask of docker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.loopback_sshd import LoopbackSshd, running_sshd

# An image is the file $FAKE_DOCKER/<name>: its id, a line that stands for its configuration, then its layers. The
# file `registry` there names a folder that engines push to and pull from.
# An engine in which `id_prefix` exists counts ids in its own way; one with `refuse` cannot load; one with `damage`
# loads something else.
PROGRAM = r"""#!/bin/sh
echo "$*" >> "$FAKE_DOCKER/calls"
flat() { printf %s "$1" | tr / _; }
file() { printf '%s/%s' "$FAKE_DOCKER" "$(flat "$1")"; }
for last; do :; done
case "$1 $2" in
build*) printf 'sha256:b%063d\nbuilt\nlayers\n' 0 > "$(file "$BUILT_TAG")" ;;
"image inspect")
  [ ! -e "$FAKE_DOCKER/down" ] || { echo "Cannot connect to the Docker daemon" >&2; exit 1; }
  [ -e "$(file "$last")" ] || { echo "Error response from daemon: No such image: $last" >&2; exit 1; }
  { read -r id; read -r content; } < "$(file "$last")"
  [ ! -e "$FAKE_DOCKER/id_prefix" ] || id="sha256:$(cat "$FAKE_DOCKER/id_prefix")${id#sha256:????}"
  printf '%s %s %s\n' "$id" "$(stat -c %s "$(file "$last")")" "$content" ;;
"image save") { printf '%s\n' "$last"; cat "$(file "$last")"; } > "$4" ;;
"image load")
  [ ! -e "$FAKE_DOCKER/refuse" ] || { echo "no space left on device" >&2; exit 1; }
  { read -r name; cat > "$(file "$name")"; }
  [ ! -e "$FAKE_DOCKER/damage" ] || printf 'sha256:e%063d\nother\n' 0 > "$(file "$(cat "$FAKE_DOCKER/damage")")" ;;
"image push") cp "$(file "$last")" "$(cat "$FAKE_DOCKER/registry")/$(flat "$last")" ;;
"image pull") cp "$(cat "$FAKE_DOCKER/registry")/$(flat "$last")" "$(file "$last")" ;;
*) echo "fake docker knows no $*" >&2; exit 125 ;;
esac
"""


@dataclass(frozen=True)
class FakeDocker:
    """One engine: its images and the commands it received."""

    folder: Path

    def add(self, name: str, number: int, layers: bytes) -> None:
        header = f'sha256:{number:064d}\n2026-01-01T00:00:00Z ["{number}"] {{"commit":"{number}"}}\n'
        (self.folder / "images" / name.replace("/", "_")).write_bytes(header.encode() + layers)

    def holds(self, name: str) -> bytes | None:
        path = self.folder / "images" / name.replace("/", "_")
        return path.read_bytes() if path.exists() else None

    def empty(self) -> None:
        """Forget all images and commands."""
        for path in (self.folder / "images").iterdir():
            path.unlink()

    def behave(self, how: str, text: str = "") -> None:
        (self.folder / "images" / how).write_text(text)

    def calls(self, beginning: str) -> int:
        log = self.folder / "images" / "calls"
        lines = log.read_text().splitlines() if log.exists() else []
        return sum(line.startswith(beginning) for line in lines)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "FAKE_DOCKER": str(self.folder / "images"),
            "PATH": f"{self.folder}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        }


def install_fake_docker(folder: Path) -> FakeDocker:
    """The program and an empty store below `folder`."""
    (folder / "images").mkdir(parents=True)
    (folder / "bin").mkdir()
    program = folder / "bin" / "docker"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    return FakeDocker(folder)


@contextmanager
def node_with_docker(folder: Path) -> Iterator[tuple[LoopbackSshd, FakeDocker]]:
    """A real sshd; its commands find an engine of their own on PATH."""
    docker = install_fake_docker(folder / "docker")
    server_folder = folder / "sshd"
    server_folder.mkdir()
    variables = {**docker.environment, "HOME": f"{server_folder}/home"}
    # A Match block's SetEnv takes the place of the one the helper wrote.
    options = "Match all\nSetEnv " + " ".join(f"{name}={value}" for name, value in variables.items()) + "\n"
    with running_sshd(server_folder, addresses=("127.0.0.1",), options=options) as server:
        yield server, docker


def layers(size: int) -> bytes:
    """Bytes that do not compress, so that an archive is about as large as its image."""
    return os.urandom(size)
