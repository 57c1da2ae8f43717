"""The cluster that the paper's runs and its baselines' scripts are written for."""

from __future__ import annotations

GPUS_PER_NODE = 8  # the artifact's scripts start as many processes on every node; most nodes sold have as many
