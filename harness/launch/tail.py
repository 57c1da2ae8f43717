"""Follow progress.jsonl while a worker appends to it."""

from __future__ import annotations

import json
from pathlib import Path


class ProgressTail:
    """Yields each line once, and only when it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.last: dict[str, object] = {}  # the newest line; empty before the first

    def new(self) -> list[dict[str, object]]:
        """Lines completed since the last call. A line that is not a JSON object is skipped: progress is for display,
        and neither what a foreign program prints there nor a read that fails may end its trial."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                block = file.read()
        except OSError:  # not there yet, or a file system that does not answer at this moment
            return []
        whole = block[: block.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = []
        for line in whole.splitlines():
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                lines.append(value)
        if lines:
            self.last = lines[-1]
        return lines
