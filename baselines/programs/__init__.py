"""Programs of ours that the interpreter of a compared system runs, by path. They import none of our packages."""

from pathlib import Path

PROGRAMS = Path(__file__).parent
