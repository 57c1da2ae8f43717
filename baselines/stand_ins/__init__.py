"""Packages of ours that have the name of one which a system of the paper imports and this machine lacks.

They let the artifact's programs start on one GPU with a newer Python and torch (`baselines.attempt`); the first line of
each says what it stands for, and by what it computes. They are no part of any installation: `burst run` uses the real
packages. A result obtained with one of them says nothing about the speed of the kernel that it replaces.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
