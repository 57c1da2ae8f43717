"""Putting a rendered file onto a node: whole or not at all, and what was there before is kept beside it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from cluster.environment.rendering import NodeEnvironment, env_sh
from cluster.environment.secrets import is_secret
from cluster.probe import Output
from cluster.runner import Runner, Unreachable

# Arguments: path, mode, SHA-256 of what is sent. The content is stdin; a connection that breaks half-way leaves a
# shorter one, which the sum tells. `mv` within one folder is atomic: a shell that sources the file sees old or new.
_SCRIPT = """\
set -eu
case $1 in /*) ;; *) echo "$1 is not an absolute path" >&2; exit 3 ;; esac
[ ! -d "$1" ] || { echo "$1 is a folder" >&2; exit 3; }
folder=$(dirname -- "$1")
mkdir -p -- "$folder"
umask 077
aside=$(mktemp -- "$1.XXXXXXXX")
trap 'rm -f -- "$aside"' EXIT
cat > "$aside"
[ "$(sha256sum < "$aside" | cut -d' ' -f1)" = "$3" ] || { echo "the file did not arrive whole" >&2; exit 3; }
chmod "$2" "$aside"
kept=
if [ -e "$1" ] || [ -L "$1" ]; then
    if [ ! -L "$1" ] && cmp -s -- "$aside" "$1"; then echo unchanged; exit 0; fi
    kept=$1.$(date +%Y%m%d-%H%M%S).$$
    cp -pP -- "$1" "$kept"
fi
mv -f -- "$aside" "$1"
trap - EXIT
if [ -n "$kept" ]; then printf 'replaced %s\\n' "$kept"; else echo written; fi
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
    content = env_sh(environment)
    mode = "600" if any(is_secret(value.name, value.value) for value in environment.values) else "644"
    digest = hashlib.sha256(content.encode()).hexdigest()
    done = runner.run(
        ["env", "LC_ALL=C", "sh", "-c", _SCRIPT, "install", path, mode, digest],
        stdin=content,
        deadline_seconds=deadline_seconds,
    )
    what, _, kept = done.stdout.rstrip("\n").partition(" ")
    if done.exit_status != 0 or what not in ("written", "replaced", "unchanged"):
        complaint = Output(text=done.stderr).first_line or "no answer in time"
        raise Unreachable(f"{path} was not written ({complaint}); check the path and its folder")
    return Installed(path=path, what=what, kept=kept)  # type: ignore[arg-type]  # one of the three, as just checked
