"""What a rank that serves several trials gives back between them."""

import os
import resource
import sys
from functools import lru_cache
from types import ModuleType

import numpy
import pytest
import torch

from engine.attention.kernels import fa4
from engine.measurement import TrialQueue
from engine.worker import clear, write_error


def test_tensors_and_results_that_our_modules_keep_are_dropped_and_those_of_others_stay(monkeypatch):
    @lru_cache
    def remembered() -> object:
        return object()

    ours, theirs = ModuleType("engine.attention.caching"), ModuleType("another.package")
    for module in (ours, theirs):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    remembered.__module__ = ours.__name__
    ours.remembered, ours.names = remembered, {"zigzag": 1}
    theirs.tensors = {1: torch.zeros(1)}
    first = remembered()
    key = (torch.device("cpu"), torch.float32)
    fa4._zeros[key] = torch.zeros(1)

    clear()
    assert key not in fa4._zeros
    assert remembered() is not first
    assert ours.names == {"zigzag": 1}
    assert theirs.tensors.keys() == {1}


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel cannot reset this peak")
def test_the_peak_of_host_memory_is_that_of_the_next_trial():
    clear()  # of what other tests took
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    large = numpy.ones(1 << 26)  # 512 MiB
    with_it = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    del large
    clear()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert with_it > peak_before
    assert after < with_it - (1 << 18)


def test_a_rank_finishes_only_its_own_turn(tmp_path):
    turns = TrialQueue.named_in(TrialQueue(tmp_path).environment)
    assert turns is not None
    assert TrialQueue.named_in({}) is None
    for rank in (0, 10):
        turns.finish(1, rank)
    turns.finish(11, 3)
    assert (turns.through(1), turns.through(11), turns.through(2)) == ({0, 10}, {3}, set())
    turns.give(2, tmp_path / "trial", 3)
    assert turns.wait(2) == (tmp_path / "trial", 3)


def test_the_first_error_of_a_rank_is_recorded(tmp_path):
    for words in ("the cause", "what follows from it"):
        write_error(tmp_path, 0, RuntimeError(words))
    assert "the cause" in (tmp_path / "errors" / "rank0.json").read_text()
