"""Triton kernels where there is no GPU: programs of this package, run in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.patience import AMPLE

ROOT = Path(__file__).parents[2]


def in_the_interpreter(test: Callable[..., None]) -> Callable[..., None]:
    """Skip a test where Triton is missing, or where a GPU runs the same kernels in another test."""
    missing = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
    needless = pytest.mark.skipif(torch.cuda.is_available(), reason="the same kernels are compared on the GPU")
    return missing(needless(test))


def interpret(program: str) -> subprocess.CompletedProcess[str]:
    """Run `tests.engine.<program>` on CPU tensors; in a process of its own, because Triton reads the switch once."""
    return subprocess.run(
        [sys.executable, "-m", f"tests.engine.{program}", "cpu"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=AMPLE,
        check=False,
    )
