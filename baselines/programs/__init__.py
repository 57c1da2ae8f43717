"""Programs of ours that the interpreter of a compared system runs, by path. They import none of our packages,
and `program_parts` of this folder."""

from pathlib import Path

PROGRAMS = Path(__file__).parent
