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
# What the interpreter of Triton 3.6 (torch 2.11) meets at a loop over an argument, with numpy 2.4 or newer.
NUMPY_IS_TOO_NEW = "only 0-dimensional arrays can be converted to Python scalars"


def in_the_interpreter(test: Callable[..., None]) -> Callable[..., None]:
    """Skip a test where Triton is missing, or where a GPU runs the same kernels in another test."""
    missing = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
    needless = pytest.mark.skipif(torch.cuda.is_available(), reason="the same kernels are compared on the GPU")
    return missing(needless(test))


def interpret(program: str) -> subprocess.CompletedProcess[str]:
    """Run `tests.engine.<program>` on CPU tensors; in a process of its own, because Triton reads the switch once.

    Skips the test where this Triton's interpreter cannot use this numpy.
    """
    done = subprocess.run(
        [sys.executable, "-m", f"tests.engine.{program}", "cpu"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=AMPLE,
        check=False,
    )
    if f"InterpreterError: TypeError('{NUMPY_IS_TOO_NEW}')" in done.stderr:
        pytest.skip("the interpreter of this Triton cannot use this numpy: install numpy<2.4 or a newer Triton")
    return done
