"""How much of the engine one forward and backward of a ring runs: what a reader has to follow, counted from a trace."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
import torch

from engine.attention.context import ContextParallel
from engine.attention.masks import Causal
from engine.attention.op import run_attention
from tests.plans import plan_attention
from tests.ranks import run_on_ranks

ROOT = Path(__file__).parents[3]
ATTENTION = ROOT / "engine" / "attention"
# A kernel computes one tile; the reader of a ring takes it for granted.
KERNELS = (ATTENTION / "kernels", ATTENTION / "geometry" / "tiles.py")
# Off the path: autocast off, no second derivatives, Triton or torch, one stream or two, no marks on sent memory.
GUARDS = {"engine/ops/autograd.py", "engine/cuda/alternate.py", "engine/cuda/streams.py"}
MAX_FILES, MAX_LINES = 5, 650
LOCAL_NAMES = {"key_side", "query_side", "local_grads", "chunk_grads"}


def functions_run(backward: str, exchange: str) -> set[tuple[str, int]]:
    """(file, first line) of every function of the engine that one planned forward and backward calls on this rank."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 32, 4, 16, generator=generator).requires_grad_() for _ in range(3))
    choices = {"schedule": "ring", "backward": backward, "exchange": exchange, "kernel": "reference"}
    plan = plan_attention(q, k, mask=Causal(), cp=ContextParallel(), **choices)
    run_attention(plan, q, k, v).sum().backward()  # opens connections, fills caches
    seen = set()

    def note(frame, event, argument) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT / "engine"):
            seen.add((path.relative_to(ROOT).as_posix(), frame.f_code.co_firstlineno))

    sys.setprofile(note)
    try:
        run_attention(plan, q, k, v).sum().backward()
    finally:
        sys.setprofile(None)
    return seen


def whole_functions(path: str, called: set[int]) -> set[int]:
    """Lines of the functions that start at `called`, whole and with their docstrings; a nested one is in its outer."""
    lines = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first in called:
                lines |= set(range(first, node.end_lineno + 1))
    return lines


@pytest.mark.parametrize("exchange", ["relay", "direct"])
@pytest.mark.parametrize("backward", ["query", "key_value"])
def test_one_forward_and_backward_of_a_ring_is_read_in_few_files(backward, exchange) -> None:
    seen = set.union(*run_on_ranks(2, functions_run, backward, exchange))
    by_file: dict[str, set[int]] = {}
    for path, line in seen:
        if not any((ROOT / path).is_relative_to(kernel) for kernel in KERNELS):
            by_file.setdefault(path, set()).add(line)
    assert by_file.keys() & GUARDS == {path for path in by_file if not (ROOT / path).is_relative_to(ATTENTION)}
    followed = {path: called for path, called in by_file.items() if path not in GUARDS}
    lengths = {path: len(whole_functions(path, called)) for path, called in followed.items()}
    assert all(lengths.values())  # the trace and the sources agree on where functions start
    assert "engine/attention/algorithms/ring.py" in lengths
    assert len(lengths) <= MAX_FILES, lengths
    assert sum(lengths.values()) <= MAX_LINES, lengths


def test_the_reading_guide_names_what_is_there_and_says_its_length() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    guide = page[page.index("\n## Reading guide") :]
    sources = {path: path.read_text(encoding="utf-8") for path in ATTENTION.rglob("*.py")}
    defined = set(re.findall(r"(?:def|class) (\w+)", "\n".join(sources.values())))
    words = re.sub(r"`[\w/]+\.py`", "", guide)
    named = set(re.findall(r"`([A-Z_]\w*|\w+_\w+)(?:\.(\w+))?`", words)) - {("grad_comm_dtype", ""), ("key_value", "")}
    parts = {part for pair in named for part in pair if part}
    assert parts - defined - LOCAL_NAMES == set()
    files = re.findall(r"`((?:\w+/)*\w+\.py|comm/symm_mem/)`", guide.replace("`engine/attention`", ""))
    assert [file for file in files if not (ATTENTION / file).exists() and not (ROOT / file).exists()] == []
