"""A part of a GPU: kernels on its streams keep to its multiprocessors, and others use all."""

from __future__ import annotations

import pytest
import torch

from engine.cuda.driver import driver_unsupported_reason
from engine.cuda.green import STEP, all_but

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.skipif(driver_unsupported_reason() is None, reason="needs a machine without a CUDA driver")
def test_without_a_driver_a_part_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"^between_nodes reserve:4 needs CUDA's driver \(.*\); leave reserve out$"):
        all_but(4, torch.device("cuda", 0))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("reserved", [1, 12, 60])
def test_kernels_on_a_part_leave_the_reserved_multiprocessors_alone(reserved) -> None:
    from tests.engine.cuda.processor_ids import processors_used

    device = torch.device("cuda", torch.cuda.current_device())
    total = torch.cuda.get_device_properties(device).multi_processor_count
    part = all_but(reserved, device)
    assert total - reserved - STEP < part.processors <= total - reserved
    assert processors_used(device) == total
    with torch.cuda.stream(part.stream()):
        assert processors_used(device) <= part.processors
        left, right = (torch.randn(512, 512, device=device) for _ in range(2))
        product = left @ right
    torch.cuda.synchronize()
    assert torch.allclose(product, left @ right, atol=1e-2, rtol=1e-2)
    assert processors_used(device) == total


@pytest.mark.gpu
@needs_gpu
def test_a_part_that_leaves_nothing_to_attention_is_refused() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    total = torch.cuda.get_device_properties(device).multi_processor_count
    with pytest.raises(ValueError, match=f"leaves fewer than {STEP} of the {total} multiprocessors to attention"):
        all_but(total - 1, device)
