"""Programs that stand in for those of a node: shell scripts in a folder of the test, put on PATH."""

from __future__ import annotations

from pathlib import Path


def shell_program(path: Path, body: str) -> Path:
    """Write an executable shell script with this body; returns its path."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path
