"""A method for launcher tests: BurstAttention whose ranks do what the seed of their trial says."""

import os
import signal
import time

import torch
import torch.distributed as dist

from engine.burst import Burst

WELL, RANK1_RAISES, RANK1_KILLED, HANGS, ALL_REFUSE, RANK1_REFUSES, RANK1_OUT_OF_MEMORY = range(7)
TRACED_HANGS, TRACED_RANK1_RAISES, TRACED_RANK1_KILLED = range(7, 10)  # in the step that is traced, and in no other
CHECK_RANK1_RAISES = 10  # in the call that is compared with float64
HANGS_NOW = "hangs in the traced step"  # what it prints


class Unruly(Burst):
    def attention(self, cp, settings):
        print(f"process {os.getpid()} runs seed {settings.seed}", flush=True)
        kind, in_trouble = settings.seed % 100, dist.get_rank() == dist.get_world_size() - 1
        if kind == RANK1_RAISES and in_trouble:
            raise RuntimeError("planned")
        if kind == RANK1_OUT_OF_MEMORY and in_trouble:
            raise MemoryError("planned")
        if kind == RANK1_KILLED and in_trouble:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == ALL_REFUSE or (kind == RANK1_REFUSES and in_trouble):
            raise ValueError("refused as planned")
        if kind == HANGS:
            time.sleep(600)
        attend = super().attention(cp, settings)
        if kind == CHECK_RANK1_RAISES and in_trouble:
            # Forward alone, and forward with backward.
            return RaisesAfter(attend, 2 * (settings.steps.warmup + settings.steps.measured))
        return UnrulyWhenTraced(attend, kind, in_trouble) if kind >= TRACED_HANGS else attend


class UnrulyWhenTraced:
    """Attention that misbehaves while the profiler runs."""

    def __init__(self, attend, kind: int, in_trouble: bool) -> None:
        self.attend, self.kind, self.in_trouble = attend, kind, in_trouble
        self.keep, self.resolved = attend.keep, attend.resolved

    def __call__(self, *tensors, **saved):
        if torch.autograd._profiler_enabled():
            if self.kind == TRACED_HANGS:
                print(HANGS_NOW, flush=True)
                time.sleep(600)
            if self.kind == TRACED_RANK1_RAISES and self.in_trouble:
                raise RuntimeError("planned")
            if self.kind == TRACED_RANK1_KILLED and self.in_trouble:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.attend(*tensors, **saved)


class RaisesAfter:
    """Attention that raises after so many calls."""

    def __init__(self, attend, calls: int) -> None:
        self.attend, self.calls = attend, calls
        self.keep, self.resolved = attend.keep, attend.resolved

    def __call__(self, *tensors, **saved):
        self.calls -= 1
        if self.calls < 0:
            raise RuntimeError("planned")
        return self.attend(*tensors, **saved)


METHOD = Unruly()
