"""Whether a commit is in the history of the repository that this code lies in."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from harness.records.provenance import PROJECT_ROOT

NOT_HELD = "which the repository here does not hold"
_COMMIT = re.compile(r"[0-9a-f]{7,64}")


class CommitHistory:
    """The history of a checkout. Where it cannot be asked, `absent` says why, and no commit is judged."""

    def __init__(self, root: Path = PROJECT_ROOT) -> None:
        self._root = root
        self._judged: dict[str, str] = {}
        self.absent = self._why_absent()

    def problem(self, commit: str) -> str:
        """What is wrong with this commit, such as `which no repository here holds`; empty when it is an ancestor."""
        if not _COMMIT.fullmatch(commit):
            return "which is no commit's name"
        if self.absent:
            return ""
        if commit not in self._judged:
            code = self._git("merge-base", "--is-ancestor", commit, "HEAD").returncode
            self._judged[commit] = {0: "", 1: "which the history here does not lead to"}.get(code, NOT_HELD)
        return self._judged[commit]

    def _why_absent(self) -> str:
        try:
            top = self._git("rev-parse", "--show-toplevel")
            if top.returncode or Path(top.stdout.strip()).resolve() != self._root.resolve():
                return "no git repository here"
            if self._git("rev-parse", "--is-shallow-repository").stdout.strip() == "true":
                return "the git repository here is shallow (git fetch --unshallow completes it)"
            return ""
        except (OSError, subprocess.SubprocessError):
            return "no git here"

    def _git(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["git", "-C", str(self._root), *arguments], capture_output=True, text=True, timeout=60, check=False
        )
