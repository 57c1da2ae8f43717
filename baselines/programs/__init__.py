"""Programs of ours that the interpreter of a compared system runs, by path. They import none of our packages; what
several of them need is in modules of this folder."""

from pathlib import Path

PROGRAMS = Path(__file__).parent
