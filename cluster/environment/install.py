"""Putting a rendered file onto a node: whole or not at all, and what was there before is kept beside it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from cluster.environment.rendering import NodeEnvironment, env_sh
from cluster.environment.secrets import is_secret
from cluster.probing.probe import Output
from cluster.transport.runner import Runner, Unreachable
from cluster.transport.transfer import TransferFailed, put

# Arguments: path, SHA-256 of what is to stand there. Makes the folder, and keeps a copy of what will be replaced.
_MAKE_WAY = """\
set -eu
[ ! -d "$1" ] || { echo "$1 is a folder" >&2; exit 3; }
mkdir -p -- "$(dirname -- "$1")"
if [ ! -e "$1" ] && [ ! -L "$1" ]; then echo written; exit 0; fi
if [ ! -L "$1" ] && [ "$(sha256sum < "$1" | cut -d' ' -f1)" = "$2" ]; then echo unchanged; exit 0; fi
kept=$1.$(date +%Y%m%d-%H%M%S).$$
cp -pP -- "$1" "$kept"
printf 'replaced %s\\n' "$kept"
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """How a file got onto a node."""

    path: str
    what: Literal["written", "replaced", "unchanged"]
    kept: str = ""  # where the file that was replaced is now

    @property
    def sentence(self) -> str:
        if self.what == "replaced":
            return f"{self.path} replaced; the earlier one is {self.kept}"
        return f"{self.path} {'is as it should be' if self.what == 'unchanged' else 'written'}"


def install(runner: Runner, environment: NodeEnvironment, path: str, *, deadline_seconds: float) -> Installed:
    """Write the node's env.sh to an absolute `path` there, readable by all unless it holds a secret.

    Raises Unreachable with the machine's own words when that fails; what was at `path` is then still there.
    """
    content = env_sh(environment).encode()
    mode = 0o600 if any(is_secret(value.name, value.value) for value in environment.values) else 0o644
    command = ["env", "LC_ALL=C", "sh", "-c", _MAKE_WAY, "sh", path, hashlib.sha256(content).hexdigest()]
    done = runner.run(command, deadline_seconds=deadline_seconds)
    what, _, kept = done.stdout.rstrip("\n").partition(" ")
    if done.exit_status != 0 or what not in ("written", "replaced", "unchanged"):
        complaint = Output(text=done.stderr).first_line or "no answer in time"
        raise Unreachable(f"{path} was not written ({complaint}); check the path and its folder")
    if what != "unchanged":
        try:
            put(runner, content, path, deadline_seconds=deadline_seconds, mode=mode)
        except TransferFailed as error:
            raise Unreachable(str(error)) from None
    return Installed(path=path, what=what, kept=kept)  # type: ignore[arg-type]  # one of the three, as just checked
