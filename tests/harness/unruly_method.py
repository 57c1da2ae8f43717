"""A method for launcher tests: BurstAttention whose ranks do what the seed of their trial says."""

import os
import signal
import time

import torch.distributed as dist

from engine.burst import Burst

WELL, RANK1_RAISES, RANK1_KILLED, HANGS, ALL_REFUSE, RANK1_REFUSES, RANK1_OUT_OF_MEMORY = range(7)


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
        return super().attention(cp, settings)


METHOD = Unruly()
