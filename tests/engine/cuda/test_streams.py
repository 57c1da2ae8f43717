"""Streams of one's own: never shared by two who are alive, and used again after those."""

from __future__ import annotations

import gc

import pytest
import torch

from engine.cuda.streams import own_stream

POOL = 32  # streams that torch has of each priority


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_no_stream_of_torch_is_one_of_ours_and_those_without_references_are_used_again() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    seen = []
    for _ in range(3):
        ours = [own_stream(device, priority) for priority in (0, 0, -1, -1)]
        theirs = [torch.cuda.Stream(device, priority=priority) for priority in (0, -1) for _ in range(POOL)]
        found = {stream.cuda_stream for stream in (*ours, *theirs, torch.cuda.current_stream(device))}
        assert len(found) == len(ours) + len(theirs) + 1
        seen.append({stream.cuda_stream for stream in ours})
        with torch.cuda.stream(ours[0]):
            assert torch.ones(8, device=device).sum().item() == 8
        del ours, theirs
        gc.collect()
    assert seen[0] == seen[1] == seen[2]
