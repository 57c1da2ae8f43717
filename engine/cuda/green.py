"""A part of a GPU's multiprocessors as streams: kernels on such a stream run on these alone, others on all.

CUDA calls the part a green context. Its streams take kernels and events of the primary context, so torch, Triton and
CuTe launch on them as on any other. torch.cuda.green_contexts makes green contexts as well, but its `set_context` puts
the default stream in the place of the caller's, whose memory and order would then no longer be known.
Source: CUDA driver API reference, "Green Contexts".
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

from engine.cuda.driver import BESIDE_THE_DEFAULT_STREAM, call, driver_unsupported_reason
from engine.cuda.streams import Handles, context_of, stream_from

STEP = 8  # multiprocessors of a part come in so many: kernels with clusters of blocks need them together (Hopper)
_RESOURCE_BYTES = 144  # CUdevResource
_COUNT_AT = 96  # its number of multiprocessors
_PROCESSORS = 1  # CU_DEV_RESOURCE_TYPE_SM
_WITH_STREAMS = 1  # CU_GREEN_CTX_DEFAULT_STREAM


class Part:
    """Some multiprocessors of a GPU. It lasts as long as the process."""

    def __init__(self, device: torch.device, processors: int, context: ctypes.c_void_p) -> None:
        self.device, self.processors = device, processors
        self._context = context
        self._handles = Handles(self._created)

    def stream(self) -> torch.cuda.ExternalStream:
        """A stream on these multiprocessors that no earlier caller, whose stream is still referenced, uses."""
        return stream_from(self._handles, self.device)

    def _created(self) -> int:
        handle = ctypes.c_void_p()
        with context_of(self.device):
            call("cuGreenCtxStreamCreate", ctypes.byref(handle), self._context, BESIDE_THE_DEFAULT_STREAM, 0)
        assert handle.value is not None, "the driver gave no stream and no error"
        return handle.value


@lru_cache(maxsize=8)
def all_but(reserved: int, device: torch.device) -> Part:
    """All multiprocessors of `device` but at least `reserved`.

    Raises ValueError, in one sentence, where the GPU has no more than that, or cannot be divided.
    """
    if reason := driver_unsupported_reason():
        raise ValueError(f"between_nodes reserve:{reserved} needs CUDA's driver ({reason}); leave reserve out")
    total = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = (total - reserved) // STEP * STEP
    if wanted < STEP:
        raise ValueError(
            f"between_nodes reserve:{reserved} leaves fewer than {STEP} of the {total} multiprocessors to attention; "
            "reserve fewer"
        )
    try:
        with context_of(device):
            part = _divided(device, wanted)
            _try_out(part)
    except RuntimeError as error:
        said = (str(error).splitlines() or ["no message"])[0]
        raise ValueError(
            f"between_nodes reserve:{reserved} needs green contexts, which this driver refuses ({said}); "
            "leave reserve out"
        ) from error
    return part


def _try_out(part: Part) -> None:
    """A kernel between events, as callers launch theirs. Raises RuntimeError where that does not work."""
    stream, caller = part.stream(), torch.cuda.current_stream(part.device)
    stream.wait_stream(caller)
    with torch.cuda.stream(stream):
        found = torch.ones(1, device=part.device) + 1
    caller.wait_stream(stream)
    if found.item() != 2:
        raise RuntimeError("a kernel on such a stream gave a wrong result")


def _divided(device: torch.device, wanted: int) -> Part:
    """A part of at least `wanted` multiprocessors."""
    number = ctypes.c_int()
    whole, chosen, rest = (ctypes.create_string_buffer(_RESOURCE_BYTES) for _ in range(3))
    groups, description, context = ctypes.c_uint(1), ctypes.c_void_p(), ctypes.c_void_p()
    call("cuDeviceGet", ctypes.byref(number), device.index)
    call("cuDeviceGetDevResource", number, whole, _PROCESSORS)
    call("cuDevSmResourceSplitByCount", chosen, ctypes.byref(groups), whole, rest, 0, wanted)
    call("cuDevResourceGenerateDesc", ctypes.byref(description), chosen, 1)
    call("cuGreenCtxCreate", ctypes.byref(context), description, number, _WITH_STREAMS)
    return Part(device, ctypes.c_uint.from_buffer(chosen, _COUNT_AT).value, context)
